//! Windows of attention, the blocks that have them, and what differs in blocks without one.

use crate::kernels::HeadValues;

/// All blocks but one of every few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllBut {
    /// Of this many blocks, one is left out. 0: none is.
    pub every: usize,
    /// Its number among them.
    pub at: usize,
}

impl AllBut {
    /// All blocks.
    pub const NONE: AllBut = AllBut { every: 0, at: 0 };

    /// All but the last of every `every` blocks; all if that is 0.
    pub fn last_of(every: usize) -> AllBut {
        AllBut { every, at: every.saturating_sub(1) }
    }

    /// The blocks of which a list says so, if one of every few is left out.
    pub(crate) fn listed(blocks: &[bool]) -> Option<AllBut> {
        let mut left_out = (0..blocks.len()).filter(|block| !blocks[*block]);
        let all = left_out.next().map_or(AllBut::NONE, |at| {
            let behind = left_out.next().unwrap_or(blocks.len());
            AllBut { every: (behind - at).max(at + 1), at }
        });
        let is_so = blocks.iter().enumerate().all(|(block, one)| all.has(block) == *one);
        is_so.then_some(all)
    }

    /// Whether a block is among them.
    pub fn has(&self, block: usize) -> bool {
        self.every == 0 || block % self.every != self.at
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
    pub blocks: AllBut,
}

impl Window {
    /// A window of all blocks.
    pub fn of_all(positions: usize) -> Window {
        Window { positions, from: 0, blocks: AllBut::NONE }
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
