//! A source: the sequences of one entry of `data.train` or `data.validation`.
//!
//! It says which of the file's sequences a dataset uses (a validation split leaves some out), how
//! often an epoch has each of them, and which of them are packed into one.

use std::sync::Arc;

use super::Sequence;
use super::files::Opened;
use super::pack::pack;
use super::spool::Spool;

/// The sequences of a file that a dataset uses. A validation split takes sequences that are spread
/// evenly over the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    All,
    /// All but this many, which are held out for validation.
    Training(u64),
    /// The held-out sequences, this many.
    HeldOut(u64),
}

/// The sequences of one entry of the config.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) spool: Arc<Spool>,
    pub(super) digest: String,
    pub(super) is_text: bool,
    pub(super) part: Part,
    /// How often an epoch has each sequence.
    pub(super) weight: f64,
    /// For each packed sequence, the rows of the part that it joins. `None` without packing.
    pub(super) packed: Option<Vec<Vec<u32>>>,
    /// The log-probabilities of both answers of each row by a reference that was measured. Empty:
    /// it was not.
    pub(super) reference: Arc<[f64]>,
}

/// The index in the file of the `nth` held-out sequence, if `held_out` of them are spread evenly
/// over `count`.
fn held_out_place(nth: u64, held_out: u64, count: u64) -> u64 {
    ((2 * u128::from(nth) + 1) * u128::from(count) / (2 * u128::from(held_out))) as u64
}

/// The index in the file of the `nth` sequence that is not held out.
fn training_place(nth: u64, held_out: u64, count: u64) -> u64 {
    // A binary search for the number of held-out sequences before it. It works because
    // `held_out_place(j) − j` never decreases.
    let mut low = 0;
    let mut high = held_out;
    while low < high {
        let middle = low.midpoint(high);
        if held_out_place(middle, held_out, count) - middle <= nth {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    nth + low
}

impl Source {
    pub(super) fn new(Opened { spool, digest, is_text, .. }: Opened, weight: f64) -> Source {
        let spool = Arc::new(spool);
        let reference = Arc::new([]);
        Source { spool, digest, is_text, part: Part::All, weight, packed: None, reference }
    }

    /// The number of sequences in the file, used or not.
    pub(super) fn total(&self) -> u64 {
        self.spool.len() as u64
    }

    /// The number of sequences of the part.
    pub(super) fn rows(&self) -> u64 {
        match self.part {
            Part::All => self.total(),
            Part::Training(held_out) => self.total() - held_out,
            Part::HeldOut(held_out) => held_out,
        }
    }

    /// The number of sequences after packing.
    pub(super) fn len(&self) -> u64 {
        self.packed.as_ref().map_or(self.rows(), |packed| packed.len() as u64)
    }

    /// The number of sequences of the source in an epoch.
    pub(super) fn quota(&self) -> u64 {
        ((self.len() as f64 * self.weight).round() as u64).max(u64::from(self.len() > 0))
    }

    /// The index in the spool of a row of the part.
    pub(super) fn place(&self, row: u64) -> usize {
        (match self.part {
            Part::All => row,
            Part::Training(held_out) => training_place(row, held_out, self.total()),
            Part::HeldOut(held_out) => held_out_place(row, held_out, self.total()),
        }) as usize
    }

    /// Packs the part's sequences into sequences of at most `positions` tokens.
    pub(super) fn pack(&mut self, positions: usize) {
        let lengths = (0..self.rows()).map(|row| self.spool.tokens(self.place(row)));
        self.packed = Some(pack(lengths, positions));
    }

    /// A row of the part, with its reference if that was measured.
    pub(super) fn with_reference(&self, mut one: Sequence, row: u64) -> Sequence {
        if let (pairs, []) = self.reference.as_chunks()
            && let Some::<&[f64; 2]>(pair) = pairs.get(row as usize)
        {
            one.reference = pair.to_vec();
        }
        one
    }

    /// The rows of the part that a sequence consists of: one, unless the source is packed.
    pub(super) fn rows_of(&self, index: u64) -> Vec<u64> {
        match &self.packed {
            Some(packed) => packed[index as usize].iter().map(|&row| u64::from(row)).collect(),
            None => vec![index],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sequence_is_either_held_out_or_trained_on() {
        for (count, held_out) in [(2, 1), (10, 1), (10, 3), (11, 10), (1000, 99), (7, 6)] {
            let mut all: Vec<u64> =
                (0..held_out).map(|nth| held_out_place(nth, held_out, count)).collect();
            all.extend((0..count - held_out).map(|nth| training_place(nth, held_out, count)));
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count), "{held_out} of {count}");
        }
    }
}
