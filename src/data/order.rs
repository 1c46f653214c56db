//! The order of training: the sequences of each step, which depend on the step alone.

use std::cmp::Reverse;
use std::ops::Range;

use super::{Dataset, Sequence};
use crate::config::Config;
use crate::error::Error;
use crate::random;

/// The number of batches whose sequences are sorted together by length, as in transformers.
const SORTED: u64 = 50;

/// A sequence of a step.
#[derive(Clone, Copy)]
pub(super) struct Drawn {
    /// The index of the sequence in its dataset.
    pub(super) index: u64,
    /// The number of sequences before it since the run began: the key of its masks.
    nth: u64,
}

/// The order of training: the sequences of each step, epoch after epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) seed: u64,
    pub(super) shuffle: bool,
    /// Whether the sequences of [`SORTED`] batches are sorted by length.
    pub(super) by_length: bool,
    pub(super) batch: usize,
}

impl Order {
    /// The order of training of a config.
    pub(super) fn of(config: &Config) -> Order {
        Order {
            seed: config.step.seed,
            shuffle: config.data.shuffle,
            by_length: config.data.group_by_length,
            batch: config.step.batch,
        }
    }

    /// The sequences of a step. A step may begin in one epoch and end in the next.
    pub(super) fn of_step(self, data: &Dataset, step: u64) -> Vec<Drawn> {
        let batch = self.batch as u64;
        if !self.by_length {
            return self.drawn(data, step * batch..(step + 1) * batch).collect();
        }
        let first = step / self.sorted(data) * self.sorted(data);
        let drawn = self.drawn_by_length(data, first);
        let from = ((step - first) * batch) as usize;
        drawn[from..from + self.batch].to_vec()
    }

    /// The number of batches whose sequences are sorted together. A dataset with fewer batches is
    /// sorted epoch by epoch.
    fn sorted(self, data: &Dataset) -> u64 {
        let epoch = data.len().map_or(SORTED, |count| (count / self.batch as u64).max(1));
        SORTED.min(epoch)
    }

    /// The sequences of all batches that are sorted together, which begin at step `first`.
    fn drawn_by_length(self, data: &Dataset, first: u64) -> Vec<Drawn> {
        let batch = self.batch as u64;
        let end = first + self.sorted(data);
        let mut drawn: Vec<Drawn> = self.drawn(data, first * batch..end * batch).collect();
        drawn.sort_by_cached_key(|one| Reverse(data.length(one.index)));
        drawn
    }

    /// The sequences with these numbers since the run began.
    fn drawn(self, data: &Dataset, numbers: Range<u64>) -> impl Iterator<Item = Drawn> {
        let count = data.len();
        numbers.map(move |nth| {
            let index = match count.filter(|_| self.shuffle) {
                None => nth,
                Some(count) => {
                    let epoch = nth / count;
                    let seed = random::keyed(self.seed, epoch);
                    epoch * count + random::shuffled(seed, count, nth % count)
                }
            };
            Drawn { index, nth }
        })
    }

    /// The sequences of a step, with their masks.
    pub(super) fn sequences(self, data: &Dataset, step: u64) -> Result<Vec<Sequence>, Error> {
        let drawn = self.of_step(data, step).into_iter();
        drawn.map(|one| data.masked(one.index, one.nth)).collect()
    }

    /// The first of `steps` steps whose batch has no label.
    pub(super) fn unlabelled(self, data: &Dataset, steps: u64) -> Option<u64> {
        if data.all_labelled() {
            return None;
        }
        let is_labelled = |one: Drawn| data.is_labelled(one.index);
        let batch = self.batch as u64;
        if !self.by_length {
            return (0..steps).find(|&step| {
                !self.drawn(data, step * batch..(step + 1) * batch).any(is_labelled)
            });
        }
        let sorted = self.sorted(data);
        let begins = (0..steps.div_ceil(sorted)).map(|nth| nth * sorted);
        let mut batches = begins.flat_map(|first| {
            let drawn = self.drawn_by_length(data, first);
            let batches = drawn.chunks(self.batch).map(|one| one.iter().copied().any(is_labelled));
            (first..).zip(batches.collect::<Vec<bool>>())
        });
        batches.find(|&(step, is_labelled)| step < steps && !is_labelled).map(|(step, _)| step)
    }
}
