//! Where blocks lie in the EPS's file: for each its copies, and in a copy its parts, which begin at
//! page boundaries. Gradient regions follow all blocks.

use l2l_actors::schedule::BlockId;

use super::direct::PAGE_FLOATS;
use crate::models::BlockTensors;
use crate::optimizers::{BlockStates, StateLayout};

/// Where blocks lie in the file.
pub(super) struct Places {
    /// For each block: its first byte, and the floats of each of its parts.
    pub(super) blocks: Vec<(u64, Vec<usize>)>,
    /// For each block: the first byte and the floats of its gradient region, if it has one.
    pub(super) regions: Vec<Option<(u64, usize)>>,
    /// The size of the file.
    pub(super) bytes: u64,
}

/// The floats that a part of a block takes on file: rounded up to whole pages.
pub(crate) fn part_floats(floats: usize) -> usize {
    floats.next_multiple_of(PAGE_FLOATS)
}

/// The floats of a block's parts on file: masters, and each run of its optimizer states.
pub(crate) fn parts_of(tensors: &BlockTensors, states: &BlockStates) -> Vec<usize> {
    let parts = [tensors.host_len()].into_iter().chain(states.lens().iter().copied());
    parts.map(part_floats).collect()
}

impl Places {
    pub(super) fn new(
        blocks: &[BlockTensors],
        copies: usize,
        states: &StateLayout,
        region: impl Fn(BlockId) -> bool,
    ) -> Places {
        let mut bytes = 0;
        let mut place = |floats: usize| {
            let at = bytes;
            bytes += (floats * size_of::<f32>()) as u64;
            at
        };
        let mut of_block = |(index, tensors): (usize, &BlockTensors)| {
            let parts = parts_of(tensors, states.of(index));
            (place(copies * parts.iter().sum::<usize>()), parts)
        };
        let places = blocks.iter().enumerate().map(&mut of_block).collect();
        let regions = blocks.iter().enumerate().map(|(index, tensors)| {
            let floats = part_floats(tensors.trained_len());
            region(BlockId(index as u32)).then(|| (place(floats), floats))
        });
        let regions = regions.collect();
        Places { blocks: places, regions, bytes }
    }

    /// The floats of a block's parts.
    pub(super) fn parts(&self, id: BlockId) -> &[usize] {
        &self.blocks[id.0 as usize].1
    }

    /// The first byte and the floats of a part of one copy of a block.
    pub(super) fn of(&self, id: BlockId, copy: u8, part: usize) -> (u64, usize) {
        let (at, parts) = &self.blocks[id.0 as usize];
        let before = usize::from(copy) * parts.iter().sum::<usize>();
        let before = before + parts[..part].iter().sum::<usize>();
        (at + (before * size_of::<f32>()) as u64, parts[part])
    }

    /// Describes the places, to compare them with those of an existing file.
    pub(super) fn layout(&self) -> String {
        let count = self.blocks.first().map_or(0, |(_, parts)| parts.len());
        let is_plain = |parts: &[usize]| {
            parts.len() == count && parts.iter().all(|&floats| floats == parts[0])
        };
        if self.blocks.iter().all(|(_, parts)| is_plain(parts)) {
            let floats: Vec<String> =
                self.blocks.iter().map(|(_, parts)| parts[0].to_string()).collect();
            return format!("{count} parts of {}", floats.join(" "));
        }
        let floats = |part: &usize| part.to_string();
        let of_block = |(_, parts): &(u64, Vec<usize>)| {
            parts.iter().map(floats).collect::<Vec<String>>().join("+")
        };
        let blocks: Vec<String> = self.blocks.iter().map(of_block).collect();
        format!("parts of {}", blocks.join(" "))
    }

    /// The floats of the largest part.
    pub(super) fn largest(&self) -> usize {
        self.blocks.iter().flat_map(|(_, parts)| parts).copied().max().unwrap_or(0)
    }
}
