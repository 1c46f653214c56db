//! The EPS in memory. Every access is a lease: a lock on one block, which must have a given
//! version.
//!
//! The ring orders all accesses to a block. So a lock that is already taken is a bug in the ring,
//! and the access panics instead of waiting. Beside the ring, a block may be read while it is
//! saved: updates wait for that before they ask for the lock.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use l2l_actors::schedule::{BlockId, Version};

use super::BlockRun;
use crate::models::BlockTensors;
use crate::optimizers::StateLayout;
use crate::tensor::{Pages, touch};

#[derive(Debug)]
pub(crate) struct MasterBlock {
    /// The step that the block is valid for.
    pub(crate) version: Version,
    pub(crate) updates: u64,
    /// The masters, f32 or split, and frozen tensors in other formats, in pages that a device can
    /// pin.
    pub(crate) parameters: Pages,
    /// The optimizer's states: state `i` of all tensors, one behind the other.
    pub(crate) states: Vec<Pages>,
}

/// The blocks of a model and their gradient regions in memory.
pub(crate) struct MemoryTier {
    blocks: Vec<RwLock<MasterBlock>>,
    regions: Vec<RwLock<Pages>>,
}

/// Zeros, of which the system gives pages when they are first written.
fn pages(len: usize) -> Pages {
    Pages::new(len).expect("the plan found that much memory available")
}

impl MemoryTier {
    /// Blocks of zeros. `region` says which blocks have a gradient region.
    pub(super) fn new(
        blocks: &[BlockTensors],
        states: &StateLayout,
        region: impl Fn(BlockId) -> bool,
    ) -> MemoryTier {
        let block = |(index, tensors): (usize, &BlockTensors)| {
            let states = states.of(index).lens().iter().map(|&len| pages(len)).collect();
            let parameters = pages(tensors.host_len());
            RwLock::new(MasterBlock { version: 0, updates: 0, parameters, states })
        };
        let region = |(index, tensors): (usize, &BlockTensors)| {
            let len = if region(BlockId(index as u32)) { tensors.trained_len() } else { 0 };
            RwLock::new(pages(len))
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
        run: BlockRun,
        read: impl FnOnce(&[f32]) -> R,
    ) -> R {
        let block = self.blocks[id.0 as usize].read().expect("nobody panicked inside");
        read(match run {
            BlockRun::Parameters => &block.parameters,
            BlockRun::State(index) => block.states.get(index).map_or(&[], |state| state),
            BlockRun::Feedback(_) => unreachable!("`ErrorFeedback` has its runs"),
        })
    }

    pub(super) fn write_with(&self, id: BlockId, run: BlockRun, write: impl FnOnce(&mut [f32])) {
        let mut block = self.blocks[id.0 as usize].write().expect("nobody panicked inside");
        write(match run {
            BlockRun::Parameters => &mut block.parameters,
            BlockRun::State(index) => block.states.get_mut(index).map_or(&mut [], |state| state),
            BlockRun::Feedback(_) => unreachable!("`ErrorFeedback` has its runs"),
        });
    }

    /// Calls `pin` with the memory of each block's masters, and makes the system give the memory of
    /// optimizer states and gradient regions.
    pub(super) fn prepare(&self, mut pin: impl FnMut(&mut [f32])) {
        for (block, region) in self.blocks.iter().zip(&self.regions) {
            let mut block = block.write().expect("nobody panicked inside");
            pin(&mut block.parameters);
            block.states.iter_mut().for_each(|state| touch(state));
            drop(block);
            touch(&mut region.write().expect("nobody panicked inside"));
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

    /// Moves a block to its next version without a change. The block may be read at this time, by
    /// the thread that saves it.
    pub(super) fn carry(&self, id: BlockId, version: Version) {
        let mut block = self.blocks[id.0 as usize].write().expect("nobody panicked inside");
        let held = block.version;
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        block.version = version + 1;
    }

    /// A lease to read a block's gradient region.
    pub(crate) fn region(&self, id: BlockId) -> RwLockReadGuard<'_, Pages> {
        let region = self.regions[id.0 as usize].try_read();
        region.unwrap_or_else(|_| panic!("the region of {id} is being written"))
    }

    /// A lease to write a block's gradient region.
    pub(crate) fn region_mut(&self, id: BlockId) -> RwLockWriteGuard<'_, Pages> {
        let region = self.regions[id.0 as usize].try_write();
        region.unwrap_or_else(|_| panic!("the region of {id} is in use"))
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::models::{Model, families};
    use crate::tensor::given_pages;

    /// The first step waits for no page of masters, states and regions.
    #[test]
    fn prepared_memory_is_there() {
        let model = Model::new(families::preset("gpt-small").expect("there is one"));
        let states = StateLayout::new(&*Config::default().update_rule(), &model.blocks);
        let memory = MemoryTier::new(&model.blocks, &states, |_| true);
        let mut pinned = Vec::new();
        memory.prepare(|masters| pinned.push(masters.as_ptr().addr()));
        let pages = |floats: &[f32]| size_of_val(floats).div_ceil(4096);
        for (index, masters) in pinned.into_iter().enumerate() {
            let id = BlockId(index as u32);
            let block = memory.read(id, 0);
            assert_eq!(block.parameters.as_ptr().addr(), masters);
            let region = memory.region(id);
            for memory in block.states.iter().chain([&*region]) {
                assert_eq!(given_pages(memory), pages(memory));
            }
        }
    }
}
