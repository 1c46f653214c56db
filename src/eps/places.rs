//! Where blocks lie in the EPS's file. Each block has its copies, and each copy has the block's
//! runs: masters, with a delay the trained weights that devices were sent of the version before,
//! then optimizer states. Runs begin at pages. Gradient regions follow all blocks.

use l2l_actors::schedule::BlockId;

use super::BlockRun;
use super::direct::PAGE_FLOATS;
use super::twice::doubled_len;
use crate::models::BlockTensors;
use crate::optimizers::{BlockStates, StateLayout};

pub(super) struct BlockPlace {
    /// The first byte of the first copy.
    at: u64,
    /// The floats of each run of a copy.
    pub(super) runs: Vec<usize>,
    /// With a delay, the floats of the run of the version before, without the rest of its pages.
    older: Option<usize>,
}

impl BlockPlace {
    fn floats(&self) -> usize {
        self.runs.iter().sum()
    }
}

#[derive(Clone, Copy)]
pub(super) struct FileRange {
    /// The first byte.
    pub(super) at: u64,
    pub(super) floats: usize,
}

/// Where blocks and gradient regions lie in the file.
pub(super) struct Places {
    pub(super) blocks: Vec<BlockPlace>,
    /// The gradient region of each block that has one.
    pub(super) regions: Vec<Option<FileRange>>,
    /// The size of the file.
    pub(super) bytes: u64,
}

/// The place of the masters among the runs of a block, and that of the version before.
pub(super) const MASTERS: usize = 0;
pub(super) const OLDER: usize = 1;

/// The floats that a run takes on file: whole pages.
pub(crate) fn paged(floats: usize) -> usize {
    floats.next_multiple_of(PAGE_FLOATS)
}

/// The floats of each run of a block on file.
pub(crate) fn runs_on_file(
    tensors: &BlockTensors,
    states: &BlockStates,
    is_delayed: bool,
) -> Vec<usize> {
    let older = is_delayed.then(|| doubled_len(tensors, false));
    let runs = [tensors.host_len()].into_iter().chain(older).chain(states.lens().iter().copied());
    runs.map(paged).collect()
}

impl Places {
    pub(super) fn new(
        blocks: &[BlockTensors],
        copies: usize,
        states: &StateLayout,
        region: impl Fn(BlockId) -> bool,
        is_delayed: bool,
    ) -> Places {
        let mut bytes = 0;
        let mut place = |floats: usize| {
            let at = bytes;
            bytes += (floats * size_of::<f32>()) as u64;
            at
        };
        let mut of_block = |(index, tensors): (usize, &BlockTensors)| {
            let runs = runs_on_file(tensors, states.of(index), is_delayed);
            let at = place(copies * runs.iter().sum::<usize>());
            BlockPlace { at, runs, older: is_delayed.then(|| doubled_len(tensors, false)) }
        };
        let places = blocks.iter().enumerate().map(&mut of_block).collect();
        let regions = (0..).map(BlockId).zip(blocks).map(|(id, tensors)| {
            let floats = paged(tensors.trained_len());
            region(id).then(|| FileRange { at: place(floats), floats })
        });
        let regions = regions.collect();
        Places { blocks: places, regions, bytes }
    }

    pub(super) fn runs(&self, id: BlockId) -> &[usize] {
        &self.blocks[id.0 as usize].runs
    }

    /// The floats of the run of the version before, without the rest of its pages. `None`: the
    /// blocks have no such run.
    pub(super) fn older(&self, id: BlockId) -> Option<usize> {
        self.blocks[id.0 as usize].older
    }

    /// True if copies have the version before.
    pub(super) fn has_older(&self) -> bool {
        self.blocks.iter().any(|block| block.older.is_some())
    }

    /// The place of a run among those of its block, if it has this run.
    pub(super) fn nth(&self, id: BlockId, run: BlockRun) -> Option<usize> {
        let BlockPlace { runs, older, .. } = &self.blocks[id.0 as usize];
        let nth = match run {
            BlockRun::Parameters => MASTERS,
            BlockRun::Older => older.map(|_| OLDER)?,
            BlockRun::State(index) => 1 + usize::from(older.is_some()) + index,
            BlockRun::Feedback(_) => return None,
        };
        (nth < runs.len()).then_some(nth)
    }

    pub(super) fn of(&self, id: BlockId, copy: u8, run: usize) -> FileRange {
        let block = &self.blocks[id.0 as usize];
        let before = usize::from(copy) * block.floats() + block.runs[..run].iter().sum::<usize>();
        FileRange { at: block.at + (before * size_of::<f32>()) as u64, floats: block.runs[run] }
    }

    /// Describes the places, to compare them with those of an existing file.
    pub(super) fn layout(&self) -> String {
        let joined = |floats: &mut dyn Iterator<Item = usize>, by: &str| {
            floats.map(|floats| floats.to_string()).collect::<Vec<_>>().join(by)
        };
        let count = self.blocks.first().map_or(0, |block| block.runs.len());
        let is_plain = |BlockPlace { runs, .. }: &BlockPlace| {
            runs.len() == count && runs.iter().all(|&floats| floats == runs[0])
        };
        // Files of earlier versions have these words.
        if self.blocks.iter().all(is_plain) {
            let floats = joined(&mut self.blocks.iter().map(|block| block.runs[0]), " ");
            return format!("{count} parts of {floats}");
        }
        let of_block = |block: &BlockPlace| joined(&mut block.runs.iter().copied(), "+");
        let blocks: Vec<String> = self.blocks.iter().map(of_block).collect();
        format!("parts of {}", blocks.join(" "))
    }

    /// The floats of the largest run.
    pub(super) fn largest(&self) -> usize {
        self.blocks.iter().flat_map(|block| &block.runs).copied().max().unwrap_or(0)
    }
}
