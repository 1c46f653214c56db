//! Windows of attention, the blocks that have them, and what differs in blocks without one.

use crate::kernels::HeadValues;

/// Some of a model's blocks: a pattern that repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPattern {
    /// The blocks of the first period, block 0 in the lowest bit.
    bits: u128,
    /// Blocks after which the pattern repeats.
    period: u32,
}

impl BlockPattern {
    /// All blocks.
    pub const ALL: BlockPattern = BlockPattern { bits: 1, period: 1 };

    /// Blocks that a pattern may have before it repeats.
    pub const LONGEST: usize = u128::BITS as usize;

    /// The blocks of which a list says so. The list repeats behind its end. `None`: it is too long,
    /// and does not repeat before.
    pub fn listed(blocks: &[bool]) -> Option<BlockPattern> {
        let repeats =
            |period: &usize| blocks.iter().zip(&blocks[*period..]).all(|(one, next)| one == next);
        let longest = blocks.len().min(BlockPattern::LONGEST);
        let Some(period) = (1..=longest).find(repeats) else {
            return blocks.is_empty().then_some(BlockPattern::ALL);
        };
        let bits = (0..period).map(|block| u128::from(blocks[block]) << block).sum();
        Some(BlockPattern { bits, period: period as u32 })
    }

    /// All blocks but one of every `every`, which is number `at` of them; all blocks if `every` is
    /// 0. `None`: `every` is above [`Self::LONGEST`].
    pub fn all_but(every: usize, at: usize) -> Option<BlockPattern> {
        let blocks = (every <= BlockPattern::LONGEST).then_some(0..every)?;
        BlockPattern::listed(&blocks.map(|block| block != at).collect::<Vec<bool>>())
    }

    /// Whether a block is among them.
    pub fn has(&self, block: usize) -> bool {
        self.bits >> (block % self.period as usize) & 1 == 1
    }
}

/// A window of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// A position sees those that are fewer than this many positions away; a causal model, those
    /// before it.
    pub positions: usize,
    /// The first block with the window.
    pub from: usize,
    /// The blocks from there on that have it.
    pub blocks: BlockPattern,
}

impl Window {
    /// A window of all blocks.
    pub fn of_all(positions: usize) -> Window {
        Window { positions, from: 0, blocks: BlockPattern::ALL }
    }

    /// Whether a block has the window.
    pub fn is_of(&self, block: usize) -> bool {
        block >= self.from && self.blocks.has(block)
    }
}

/// Heads of the blocks without a window, where they are not those of the blocks with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalHeads {
    /// K.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// What values are.
    pub values: HeadValues,
}

/// Blocks that have no keys and values of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedKv {
    /// The first of them. All blocks from there on are like it.
    pub from: usize,
    /// True when their feed-forward has twice the channels.
    pub wide: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_those_of_their_lists() {
        let lists: [&[bool]; 5] = [
            &[true; 3],
            &[false; 2],
            &[true, true, false, true],
            &[false, false, true, false, true],
            &[true, false, false, true, true, true],
        ];
        for list in lists {
            let pattern = BlockPattern::listed(list).expect("it is short");
            let found: Vec<bool> = (0..list.len()).map(|block| pattern.has(block)).collect();
            assert_eq!(found, list);
        }
        assert_eq!(BlockPattern::listed(&[]), Some(BlockPattern::ALL));
        assert_eq!(BlockPattern::listed(&[true; 300]), Some(BlockPattern::ALL));
        let last = BlockPattern::all_but(3, 2).expect("3 are few");
        assert_eq!([1, 2, 3, 4, 5].map(|block| last.has(block)), [true, false, true, true, false]);
        assert_eq!(BlockPattern::all_but(0, 0), Some(BlockPattern::ALL));
        assert!(BlockPattern::all_but(128, 127).is_some_and(|most| !most.has(255)));
        assert_eq!([129, 130].map(|every| BlockPattern::all_but(every, every - 1)), [None, None]);
        let late: Vec<bool> = (0..200).map(|block| block > 150).collect();
        assert_eq!(BlockPattern::listed(&late), None);
    }
}
