//! The sequences of one name: the part of them that is meant, how often an epoch sees each, and
//! which share one.

use std::sync::Arc;

use super::files::Opened;
use super::pack::pack;
use super::spool::Spool;

/// Which sequences of a source are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    All,
    /// All but these many, which are spread evenly.
    AllBut(u64),
    /// These many.
    Held(u64),
}

/// Sequences of one name.
pub(super) struct Source {
    pub(super) spool: Arc<Spool>,
    pub(super) digest: String,
    pub(super) is_text: bool,
    pub(super) part: Part,
    /// How often an epoch sees each.
    pub(super) weight: f64,
    /// Which of the part's sequences share one, if they are packed.
    pub(super) packed: Option<Vec<Vec<u32>>>,
}

/// Index of the `nth` of `held` places spread evenly over `count`.
fn held_place(nth: u64, held: u64, count: u64) -> u64 {
    ((2 * u128::from(nth) + 1) * u128::from(count) / (2 * u128::from(held))) as u64
}

/// Index of the `nth` place that is not held.
fn kept_place(nth: u64, held: u64, count: u64) -> u64 {
    // How many held places stand before it: `held_place(j) − j` does not fall.
    let (mut low, mut high) = (0, held);
    while low < high {
        let middle = low.midpoint(high);
        if held_place(middle, held, count) - middle <= nth {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    nth + low
}

impl Source {
    pub(super) fn new(Opened { spool, digest, is_text }: Opened, weight: f64) -> Source {
        let spool = Arc::new(spool);
        Source { spool, digest, is_text, part: Part::All, weight, packed: None }
    }

    pub(super) fn whole(&self) -> u64 {
        self.spool.len() as u64
    }

    /// Sequences of its part.
    pub(super) fn rows(&self) -> u64 {
        match self.part {
            Part::All => self.whole(),
            Part::AllBut(held) => self.whole() - held,
            Part::Held(held) => held,
        }
    }

    /// Sequences that are handed out: several may share one.
    pub(super) fn len(&self) -> u64 {
        self.packed.as_ref().map_or(self.rows(), |packed| packed.len() as u64)
    }

    /// Sequences of an epoch.
    pub(super) fn quota(&self) -> u64 {
        ((self.len() as f64 * self.weight).round() as u64).max(u64::from(self.len() > 0))
    }

    /// The place in the spool of one of its part's.
    pub(super) fn place(&self, row: u64) -> usize {
        (match self.part {
            Part::All => row,
            Part::AllBut(held) => kept_place(row, held, self.whole()),
            Part::Held(held) => held_place(row, held, self.whole()),
        }) as usize
    }

    pub(super) fn pack(&mut self, positions: usize) {
        let lengths = (0..self.rows()).map(|row| self.spool.tokens(self.place(row)));
        self.packed = Some(pack(lengths, positions));
    }

    /// Its part's that one which is handed out is made of.
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
    fn what_is_held_and_what_is_not_is_everything_once() {
        for (count, held) in [(2, 1), (10, 1), (10, 3), (11, 10), (1000, 99), (7, 6)] {
            let mut all: Vec<u64> = (0..held).map(|nth| held_place(nth, held, count)).collect();
            all.extend((0..count - held).map(|nth| kept_place(nth, held, count)));
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count), "{held} of {count}");
        }
    }
}
