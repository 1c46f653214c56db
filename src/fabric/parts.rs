//! Blocks cut into parts, one for each rank. [`all_gather`] makes a block whole from the parts of all
//! ranks. [`all_to_all`] sends each rank its part of a gradient. Both move bytes and add nothing: the
//! rank that owns a part adds the gradients that it receives.

use std::ops::Range;

use super::{Fabric, Lost, Rank, Tag};

/// The part of a block that each rank has. The parts follow each other; a part may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Where each rank's part ends.
    ends: Vec<usize>,
}

impl Parts {
    /// Parts with these ends, one for each rank, in order. The last end is the block's length.
    pub fn new(ends: Vec<usize>) -> Parts {
        assert!(ends.is_sorted() && !ends.is_empty(), "parts follow each other");
        Parts { ends }
    }

    /// The part of a rank.
    pub fn of(&self, rank: Rank) -> Range<usize> {
        let start = rank.checked_sub(1).map_or(0, |before| self.ends[before as usize]);
        start..self.ends[rank as usize]
    }

    /// The length of the whole block.
    pub fn len(&self) -> usize {
        *self.ends.last().expect("there is a rank")
    }

    /// True for a block without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How the block's first `len` elements are cut.
    pub fn clipped(&self, len: usize) -> Parts {
        Parts { ends: self.ends.iter().map(|end| *end.min(&len)).collect() }
    }

    /// The parts counted in bytes, of which an element has `element_bytes`.
    pub fn in_bytes(&self, element_bytes: usize) -> Parts {
        Parts { ends: self.ends.iter().map(|end| end * element_bytes).collect() }
    }

    fn others(&self, own: Rank) -> impl Iterator<Item = Rank> {
        (0..self.ends.len() as Rank).filter(move |&rank| rank != own)
    }
}

/// Completes a block of which this rank has its part: sends this part to all other ranks, and
/// receives theirs.
///
/// # Errors
/// As [`Fabric::exchange`].
pub fn all_gather(
    fabric: &dyn Fabric,
    tag: Tag,
    parts: &Parts,
    block: &mut [u8],
    goes_on: &dyn Fn() -> bool,
) -> Result<(), Lost> {
    assert_eq!(block.len(), parts.len(), "the parts are of this block");
    let own = fabric.rank();
    let Range { start, end } = parts.of(own);
    let (before, from_own) = block.split_at_mut(start);
    let (part, behind) = from_own.split_at_mut(end - start);
    let mut receives = Vec::new();
    let ranks = parts.ends.len() as Rank;
    for (ranks, mut left) in [(0..own, before), (own + 1..ranks, behind)] {
        for rank in ranks {
            let (to, rest) = left.split_at_mut(parts.of(rank).len());
            receives.push((rank, to));
            left = rest;
        }
    }
    let sends: Vec<_> = parts.others(own).map(|rank| (rank, &*part)).collect();
    fabric.exchange(tag, &sends, &mut receives, goes_on)
}

/// Sends each rank its part of a gradient, and receives this rank's part from all others: one behind
/// the other in `received`, in the order of the ranks. (A reduce-scatter without its sum.)
///
/// # Errors
/// As [`Fabric::exchange`].
pub fn all_to_all(
    fabric: &dyn Fabric,
    tag: Tag,
    parts: &Parts,
    gradient: &[u8],
    received: &mut [u8],
    goes_on: &dyn Fn() -> bool,
) -> Result<(), Lost> {
    assert_eq!(gradient.len(), parts.len(), "the parts are of this gradient");
    let own = fabric.rank();
    let bytes = parts.of(own).len();
    assert_eq!(received.len(), bytes * parts.others(own).count(), "room for a part of each rank");
    let sends: Vec<_> = parts.others(own).map(|rank| (rank, &gradient[parts.of(rank)])).collect();
    let mut left = received;
    let mut receives = Vec::new();
    for rank in parts.others(own) {
        let (to, rest) = left.split_at_mut(bytes);
        receives.push((rank, to));
        left = rest;
    }
    fabric.exchange(tag, &sends, &mut receives, goes_on)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::exchanges::Counted;
    use super::super::{Channel, Reports, threads};
    use super::*;

    /// Every rank completes a block, and gets its part of all gradients. A rank sends and receives
    /// (N - 1) / N of the block's bytes.
    #[test]
    fn blocks_are_gathered_and_gradients_arrive() {
        const BYTES: usize = 64 * 60 + 7;
        let of_block = |at: usize| (at * 7 % 251) as u8;
        let of_gradient = |rank: Rank, at: usize| (at * 5 % 241) as u8 ^ rank as u8;
        for ranks in 1..=4_u32 {
            std::thread::scope(|scope| {
                for fabric in threads(ranks) {
                    scope.spawn(move || {
                        let reports = Arc::new(Reports::new(&fabric));
                        let fabric = Counted { fabric: Arc::new(fabric), reports };
                        let moved = || fabric.reports.moved().map(|bytes| bytes as usize);
                        let ends = (1..=ranks as usize).map(|rank| BYTES * rank / ranks as usize);
                        let parts = Parts::new(ends.collect());
                        let own = parts.of(fabric.rank());
                        let mut block = vec![0; BYTES];
                        own.clone().for_each(|at| block[at] = of_block(at));
                        let tag = Tag::new(Channel::Blocks, 0);
                        all_gather(&fabric, tag, &parts, &mut block, &|| true)
                            .expect("all are there");
                        assert!(block.iter().enumerate().all(|(at, &byte)| byte == of_block(at)));
                        let others = ranks as usize - 1;
                        assert_eq!(moved(), [own.len() * others, BYTES - own.len()]);

                        let gradient: Vec<u8> =
                            (0..BYTES).map(|at| of_gradient(fabric.rank(), at)).collect();
                        let mut received = vec![0; own.len() * others];
                        let tag = Tag::new(Channel::Gradients, 0);
                        all_to_all(&fabric, tag, &parts, &gradient, &mut received, &|| true)
                            .expect("all are there");
                        let from: Vec<Rank> = parts.others(fabric.rank()).collect();
                        for (rank, part) in from.into_iter().zip(received.chunks(own.len())) {
                            let same = own.clone().map(|at| of_gradient(rank, at));
                            assert!(same.eq(part.iter().copied()));
                        }
                        assert_eq!(moved()[0], own.len() * others + BYTES - own.len());
                    });
                }
            });
        }
    }
}
