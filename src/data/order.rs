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
        // A dataset with fewer batches is sorted epoch by epoch.
        let epoch = data.len().map_or(SORTED, |count| (count / batch).max(1));
        let sorted = SORTED.min(epoch);
        let first = step / sorted * sorted;
        let mut drawn: Vec<Drawn> =
            self.drawn(data, first * batch..(first + sorted) * batch).collect();
        drawn.sort_by_cached_key(|one| Reverse(data.length(one.index)));
        let from = ((step - first) * batch) as usize;
        drawn[from..from + self.batch].to_vec()
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

    /// The first of `steps` steps whose batch has no label. Only four epochs are searched: an
    /// unlabelled batch of a later epoch is refused when its step comes.
    pub(super) fn unlabelled(self, data: &Dataset, steps: u64) -> Option<u64> {
        if data.all_labelled() {
            return None;
        }
        let count = data.len().expect("files have an end");
        let four_epochs = 4 * count.div_ceil(self.batch as u64);
        (0..steps.min(four_epochs)).find(|&step| {
            !self.of_step(data, step).into_iter().any(|one| data.is_labelled(one.index))
        })
    }
}
