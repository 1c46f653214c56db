//! The order of training: which sequences each step has, a function of the step.

use std::cmp::Reverse;
use std::ops::Range;

use super::{Batch, Dataset, Sequence};
use crate::error::Error;
use crate::random;

/// Batches whose sequences are sorted together by length, as transformers sorts them.
const SORTED: u64 = 50;

/// The order of training: the sequences of each step, epoch after epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) seed: u64,
    pub(super) shuffle: bool,
    /// Whether the sequences of some batches are sorted by length.
    pub(super) by_length: bool,
    pub(super) batch: usize,
}

impl Order {
    /// The sequences of a step: for each its index, and its number `nth` since the run began. A
    /// step may begin in one epoch and end in the next.
    pub(super) fn of_step(self, data: &Dataset, step: u64) -> Vec<(u64, u64)> {
        let batch = self.batch as u64;
        if !self.by_length {
            return self.places(data, step * batch..(step + 1) * batch).collect();
        }
        // Of little data, those of an epoch.
        let epoch = data.len().map_or(SORTED, |count| (count / batch).max(1));
        let sorted = SORTED.min(epoch);
        let first = step / sorted * sorted;
        let mut places: Vec<(u64, u64)> =
            self.places(data, first * batch..(first + sorted) * batch).collect();
        places.sort_by_cached_key(|&(index, _)| Reverse(data.length(index)));
        let from = ((step - first) * batch) as usize;
        places[from..from + self.batch].to_vec()
    }

    /// The sequences of these numbers since the run began: for each its index, and its number.
    fn places(self, data: &Dataset, numbers: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
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
            (index, nth)
        })
    }

    /// The batch of a step.
    pub(super) fn batch(self, data: &Dataset, step: u64) -> Result<Batch, Error> {
        Ok(Batch::of(&self.sequences(data, step)?, data.predicts()))
    }

    /// The sequences of a step, with their masks.
    pub(super) fn sequences(self, data: &Dataset, step: u64) -> Result<Vec<Sequence>, Error> {
        self.of_step(data, step).into_iter().map(|(index, nth)| data.masked(index, nth)).collect()
    }

    /// The first of `steps` steps whose batch has no label, in the first four epochs.
    pub(super) fn unlabelled(self, data: &Dataset, steps: u64) -> Option<u64> {
        if data.all_labelled() {
            return None;
        }
        // A batch of a later epoch that has no label is refused when its step comes.
        let count = data.len().expect("files have an end");
        let four_epochs = 4 * count.div_ceil(self.batch as u64);
        (0..steps.min(four_epochs)).find(|&step| {
            !self.of_step(data, step).into_iter().any(|(index, _)| data.is_labelled(index))
        })
    }
}
