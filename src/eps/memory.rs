//! The EPS in memory. Every access is a lease: a lock on one block, which must have a given
//! version.
//!
//! The ring orders all accesses to a block. So a lock that is already taken is a bug in the ring,
//! and the access panics instead of waiting. Beside the ring, a block may be read while it is
//! saved: updates wait for that before they ask for the lock.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use l2l_actors::schedule::{BlockId, Version};

use super::BlockPart;
use crate::models::BlockTensors;
use crate::optimizers::StateLayout;
use crate::tensor::Pages;

#[derive(Debug)]
pub(crate) struct MasterBlock {
    /// The step that the block is valid for.
    pub(crate) version: Version,
    pub(crate) updates: u64,
    /// The masters, f32 or split, and frozen tensors in other formats, in pages that a device can
    /// pin.
    pub(crate) parameters: Pages,
    /// The optimizer's states: state `i` of all tensors, one behind the other.
    pub(crate) states: Vec<Vec<f32>>,
}

/// The blocks of a model and their gradient regions in memory.
pub(crate) struct MemoryTier {
    blocks: Vec<RwLock<MasterBlock>>,
    regions: Vec<RwLock<Vec<f32>>>,
}

impl MemoryTier {
    /// Blocks of zeros. `region` says which blocks have a gradient region.
    pub(super) fn new(
        blocks: &[BlockTensors],
        states: &StateLayout,
        region: impl Fn(BlockId) -> bool,
    ) -> MemoryTier {
        let block = |(index, tensors): (usize, &BlockTensors)| {
            let states = states.of(index).lens().iter().map(|&len| vec![0.0; len]).collect();
            let parameters = Pages::new(tensors.host_len());
            let parameters = parameters.expect("the plan found that much memory available");
            RwLock::new(MasterBlock { version: 0, updates: 0, parameters, states })
        };
        let region = |(index, tensors): (usize, &BlockTensors)| {
            let len = if region(BlockId(index as u32)) { tensors.trained_len() } else { 0 };
            RwLock::new(vec![0.0; len])
        };
        MemoryTier {
            blocks: blocks.iter().enumerate().map(block).collect(),
            regions: blocks.iter().enumerate().map(region).collect(),
        }
    }

    pub(super) fn updates(&self) -> Vec<u64> {
        let updates =
            |block: &RwLock<MasterBlock>| block.read().expect("nobody panicked inside").updates;
        self.blocks.iter().map(updates).collect()
    }

    pub(super) fn set_updates(&self, updates: &[u64]) {
        for (block, updates) in self.blocks.iter().zip(updates) {
            block.write().expect("nobody panicked inside").updates = *updates;
        }
    }

    pub(super) fn read_with<R>(
        &self,
        id: BlockId,
        part: BlockPart,
        read: impl FnOnce(&[f32]) -> R,
    ) -> R {
        let block = self.blocks[id.0 as usize].read().expect("nobody panicked inside");
        read(match part {
            BlockPart::Parameters => &block.parameters,
            BlockPart::State(index) => block.states.get(index).map_or(&[], Vec::as_slice),
            BlockPart::Feedback(_) => unreachable!("`ErrorFeedback` has its runs"),
        })
    }

    pub(super) fn write_with(&self, id: BlockId, part: BlockPart, write: impl FnOnce(&mut [f32])) {
        let mut block = self.blocks[id.0 as usize].write().expect("nobody panicked inside");
        write(match part {
            BlockPart::Parameters => &mut block.parameters,
            BlockPart::State(index) => block.states.get_mut(index).map_or(&mut [], Vec::as_mut),
            BlockPart::Feedback(_) => unreachable!("`ErrorFeedback` has its runs"),
        });
    }

    /// Calls `pin` with the memory of each block's masters, before the first step.
    pub(crate) fn pin_masters(&self, mut pin: impl FnMut(&mut [f32])) {
        for block in &self.blocks {
            pin(&mut block.write().expect("nobody panicked inside").parameters);
        }
    }

    /// A lease to read a block, which must have this version.
    pub(crate) fn read(&self, id: BlockId, version: Version) -> RwLockReadGuard<'_, MasterBlock> {
        let block = self.blocks[id.0 as usize].try_read();
        let block = block.unwrap_or_else(|_| panic!("{id} v{version} asked, it is being updated"));
        let held = block.version;
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        block
    }

    /// A lease to update a block, which must have this version.
    pub(crate) fn write(&self, id: BlockId, version: Version) -> RwLockWriteGuard<'_, MasterBlock> {
        let block = self.blocks[id.0 as usize].try_write();
        let block = block.unwrap_or_else(|_| panic!("{id} v{version} to update, it is in use"));
        let held = block.version;
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        block
    }

    /// Moves a block to its next version without a change. The block may be read at this time, by the
    /// thread that saves it.
    pub(super) fn carry(&self, id: BlockId, version: Version) {
        let mut block = self.blocks[id.0 as usize].write().expect("nobody panicked inside");
        let held = block.version;
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        block.version = version + 1;
    }

    /// A lease to read a block's gradient region.
    pub(crate) fn region(&self, id: BlockId) -> RwLockReadGuard<'_, Vec<f32>> {
        let region = self.regions[id.0 as usize].try_read();
        region.unwrap_or_else(|_| panic!("the region of {id} is being written"))
    }

    /// A lease to write a block's gradient region.
    pub(crate) fn region_mut(&self, id: BlockId) -> RwLockWriteGuard<'_, Vec<f32>> {
        let region = self.regions[id.0 as usize].try_write();
        region.unwrap_or_else(|_| panic!("the region of {id} is in use"))
    }
}
