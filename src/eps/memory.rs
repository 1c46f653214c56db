//! The EPS in memory. Every access is a lease: a lock on one block, which must have a given
//! version.
//!
//! The ring orders all accesses to a block. So a lock that is already taken is a bug in the ring,
//! and the access panics instead of waiting. Beside the ring, a block may be read while it is
//! saved: updates wait for that before they ask for the lock.
//!
//! With a delay, what devices are sent of the trained part is there twice (`twice.rs`): one step
//! reads the version before the newest while an update writes the next one.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use l2l_actors::schedule::{BlockId, Version};

use super::BlockRun;
use super::stored::StoredMasters;
use super::twice::{Twice, TwiceLease};
use crate::models::BlockTensors;
use crate::optimizers::StateLayout;
use crate::tensor::{Pages, touch};

#[derive(Debug)]
pub(crate) struct MasterBlock {
    /// The number of training steps that the block is the result of. Not used with a delay.
    version: Version,
    updates: u64,
    /// The masters, f32 or split, and frozen tensors in other formats, in pages that a device can
    /// pin. With a delay, what devices are not sent.
    parameters: Pages,
    /// The optimizer's states: state `i` of all tensors, one behind the other.
    states: Vec<Pages>,
}

struct MemoryBlock {
    master: RwLock<MasterBlock>,
    /// Floats that devices are sent.
    sent: usize,
    twice: Option<Twice>,
}

/// The blocks of a model and their gradient regions in memory.
pub(crate) struct MemoryTier {
    blocks: Vec<MemoryBlock>,
    regions: Vec<RwLock<Pages>>,
}

/// A lease to read what devices are sent of a block.
pub(crate) enum ReadLease<'b> {
    Once(RwLockReadGuard<'b, MasterBlock>, usize),
    Twice(TwiceLease<'b>),
}

impl ReadLease<'_> {
    /// What devices are sent, in pieces that follow each other.
    pub(crate) fn pieces(&self) -> Vec<&[f32]> {
        match self {
            ReadLease::Once(block, sent) => vec![&block.parameters[..*sent]],
            ReadLease::Twice(lease) => lease.pieces(),
        }
    }
}

/// Zeros, of which the system gives pages when they are first written.
pub(super) fn pages(len: usize) -> Pages {
    Pages::new(len).expect("the plan found that much memory available")
}

impl MemoryBlock {
    fn new(tensors: &BlockTensors, states: &[usize], doubled: Option<usize>) -> MemoryBlock {
        let sent = tensors.published_len(tensors.masters().sent());
        let len = tensors.host_len() - doubled.map_or(0, |_| sent);
        let states = states.iter().map(|&len| pages(len)).collect();
        let master = MasterBlock { version: 0, updates: 0, parameters: pages(len), states };
        let twice = doubled.map(|len| Twice::new(len, sent - len));
        MemoryBlock { master: RwLock::new(master), sent, twice }
    }

    fn lock(&self) -> RwLockReadGuard<'_, MasterBlock> {
        self.master.read().expect("nobody panicked inside")
    }

    fn lock_mut(&self) -> RwLockWriteGuard<'_, MasterBlock> {
        self.master.write().expect("nobody panicked inside")
    }
}

impl MemoryTier {
    /// Blocks of zeros. `region` says which blocks have a gradient region. `doubled`: with a delay,
    /// the floats of each block that are there twice.
    pub(super) fn new(
        blocks: &[BlockTensors],
        states: &StateLayout,
        region: impl Fn(BlockId) -> bool,
        doubled: Option<Vec<usize>>,
    ) -> MemoryTier {
        let block = |(index, tensors): (usize, &BlockTensors)| {
            let doubled = doubled.as_ref().map(|lens| lens[index]);
            MemoryBlock::new(tensors, states.of(index).lens(), doubled)
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

    fn block(&self, id: BlockId) -> &MemoryBlock {
        &self.blocks[id.0 as usize]
    }

    /// True if blocks are there twice.
    pub(super) fn has_older(&self) -> bool {
        self.blocks.iter().any(|block| block.twice.is_some())
    }

    /// Gives all blocks this version.
    pub(super) fn begin_at(&self, version: Version) {
        for block in &self.blocks {
            block.lock_mut().version = version;
            if let Some(twice) = &block.twice {
                twice.begin_at(version);
            }
        }
    }

    pub(super) fn updates(&self) -> Vec<u64> {
        self.blocks.iter().map(|block| block.lock().updates).collect()
    }

    pub(super) fn set_updates(&self, updates: &[u64]) {
        for (block, updates) in self.blocks.iter().zip(updates) {
            block.lock_mut().updates = *updates;
        }
    }

    pub(super) fn read_with<R>(
        &self,
        id: BlockId,
        run: BlockRun,
        read: impl FnOnce(&[f32]) -> R,
    ) -> R {
        let MemoryBlock { twice, .. } = self.block(id);
        let block = self.block(id).lock();
        match (run, twice) {
            (BlockRun::Parameters, None) => read(&block.parameters),
            (BlockRun::Parameters, Some(twice)) => read(&twice.with_rest(&block.parameters)),
            (BlockRun::Older, Some(twice)) => read(&twice.older()),
            (BlockRun::State(index), _) => read(block.states.get(index).map_or(&[], |state| state)),
            (BlockRun::Older, None) => read(&[]),
            (BlockRun::Feedback(_), _) => unreachable!("`ErrorFeedback` has its runs"),
        }
    }

    pub(super) fn write_with(&self, id: BlockId, run: BlockRun, write: impl FnOnce(&mut [f32])) {
        let MemoryBlock { twice, .. } = self.block(id);
        let mut block = self.block(id).lock_mut();
        match (run, twice) {
            (BlockRun::Parameters, None) => write(&mut block.parameters),
            (BlockRun::Parameters, Some(twice)) => {
                let mut all = twice.with_rest(&block.parameters);
                write(&mut all);
                twice.replace(&all, &mut block.parameters);
            }
            (BlockRun::Older, Some(twice)) => twice.write_older(write),
            (BlockRun::State(index), _) => {
                write(block.states.get_mut(index).map_or(&mut [], |state| state));
            }
            (BlockRun::Older, None) => write(&mut []),
            (BlockRun::Feedback(_), _) => unreachable!("`ErrorFeedback` has its runs"),
        }
    }

    /// Calls `pin` with the memory of each block that devices are sent, and makes the system give
    /// the memory of optimizer states and gradient regions.
    pub(super) fn prepare(&self, mut pin: impl FnMut(&mut [f32])) {
        for (block, region) in self.blocks.iter().zip(&self.regions) {
            let mut master = block.lock_mut();
            match &block.twice {
                None => pin(&mut master.parameters),
                Some(twice) => {
                    twice.prepare(&mut pin);
                    touch(&mut master.parameters);
                }
            }
            master.states.iter_mut().for_each(|state| touch(state));
            drop(master);
            touch(&mut region.write().expect("nobody panicked inside"));
        }
    }

    /// A lease to read a block of this version: the newest, or with a delay also the one before.
    pub(crate) fn read(&self, id: BlockId, version: Version) -> ReadLease<'_> {
        let MemoryBlock { master, sent, twice } = self.block(id);
        if let Some(twice) = twice {
            return ReadLease::Twice(twice.read(id, version));
        }
        let block = master.try_read();
        let block = block.unwrap_or_else(|_| panic!("{id} v{version} asked, it is being updated"));
        let held = block.version;
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        ReadLease::Once(block, *sent)
    }

    /// Moves a block from this version to the next. `apply` gets its masters, its states, and the
    /// number of its updates. `copy` copies floats.
    pub(crate) fn update(
        &self,
        id: BlockId,
        version: Version,
        copy: impl Fn(&mut [f32], &[f32]),
        apply: impl FnOnce(StoredMasters<'_>, &mut [&mut [f32]], u64),
    ) {
        let MemoryBlock { master, sent, twice } = self.block(id);
        let block = master.try_write();
        let mut block = block.unwrap_or_else(|_| panic!("{id} v{version} to update, it is in use"));
        let MasterBlock { version: held, updates, parameters, states } = &mut *block;
        let mut states: Vec<&mut [f32]> = states.iter_mut().map(|state| &mut **state).collect();
        match twice {
            Some(twice) => twice.update(id, version, copy, |sent| {
                apply(StoredMasters { sent, kept: parameters }, &mut states, *updates);
            }),
            None => {
                assert!(*held == version, "{id} v{version} asked, the EPS holds v{held}");
                let (sent, kept) = parameters.split_at_mut(*sent);
                apply(StoredMasters { sent, kept }, &mut states, *updates);
                *held = version + 1;
            }
        }
        *updates += 1;
    }

    /// Moves a block to its next version without a change. The block may be read at this time, by
    /// the thread that saves it.
    pub(super) fn carry(&self, id: BlockId, version: Version) {
        if let Some(twice) = &self.block(id).twice {
            return twice.carry(id, version);
        }
        let mut block = self.block(id).lock_mut();
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
        let memory = MemoryTier::new(&model.blocks, &states, |_| true, None);
        let mut pinned = Vec::new();
        memory.prepare(|masters| pinned.push(masters.as_ptr().addr()));
        let pages = |floats: &[f32]| size_of_val(floats).div_ceil(4096);
        for (index, masters) in pinned.into_iter().enumerate() {
            let id = BlockId(index as u32);
            let block = memory.block(id).lock();
            assert_eq!(block.parameters.as_ptr().addr(), masters);
            let region = memory.region(id);
            for memory in block.states.iter().chain([&*region]) {
                assert_eq!(given_pages(memory), pages(memory));
            }
        }
    }
}
