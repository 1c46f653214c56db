//! The eager param-server, in memory: masters, optimizer state, gradient regions, versions.
//!
//! Every access is a lease: a lock on one block, with the version it must have. The ring never
//! lets two leases meet, so a lock that is taken is a bug, and says so instead of waiting.

mod begin;

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use l2l_actors::schedule::{BlockId, Version};
use sha2::{Digest, Sha256};

use crate::models::{Model, Tensor, block_len, tensor_ranges};

/// One block of the model.
#[derive(Debug)]
pub(crate) struct Block {
    /// Steps that made it what it is.
    pub(crate) version: Version,
    /// Updates it has had.
    pub(crate) updates: u64,
    /// The f32 masters.
    pub(crate) parameters: Vec<f32>,
    /// The optimizer's states, each as long as the masters.
    pub(crate) states: Vec<Vec<f32>>,
}

/// See the [module](self).
pub(crate) struct Eps {
    blocks: Vec<RwLock<Block>>,
    regions: Vec<RwLock<Vec<f32>>>,
    tensors: Vec<Vec<Tensor>>,
}

impl Eps {
    /// Blocks of zeros, with so many optimizer states, and gradient regions where they are needed.
    pub(crate) fn new(model: &Model, states: usize, region: impl Fn(BlockId) -> bool) -> Eps {
        let block = |tensors: &Vec<Tensor>| {
            let zeros = || vec![0.0; block_len(tensors)];
            let states = (0..states).map(|_| zeros()).collect();
            RwLock::new(Block { version: 0, updates: 0, parameters: zeros(), states })
        };
        let region = |(index, tensors): (usize, &Vec<Tensor>)| {
            let len = if region(BlockId(index as u32)) { block_len(tensors) } else { 0 };
            RwLock::new(vec![0.0; len])
        };
        Eps {
            blocks: model.blocks.iter().map(block).collect(),
            regions: model.blocks.iter().enumerate().map(region).collect(),
            tensors: model.blocks.clone(),
        }
    }

    /// Optimizer states of each parameter.
    pub(crate) fn states(&self) -> usize {
        let block = self.blocks.first().map(|block| block.read().expect("nobody panicked inside"));
        block.map_or(0, |block| block.states.len())
    }

    /// Updates that each block has had.
    pub(crate) fn updates(&self) -> Vec<u64> {
        let updates = |block: &RwLock<Block>| block.read().expect("nobody panicked inside").updates;
        self.blocks.iter().map(updates).collect()
    }

    /// Says how many updates each block has had.
    pub(crate) fn set_updates(&self, updates: &[u64]) {
        for (block, updates) in self.blocks.iter().zip(updates) {
            block.write().expect("nobody panicked inside").updates = *updates;
        }
    }

    /// The tensors of a block.
    pub(crate) fn tensors(&self, id: BlockId) -> &[Tensor] {
        &self.tensors[id.0 as usize]
    }

    /// A lease to read a block as of a version.
    pub(crate) fn read(&self, id: BlockId, version: Version) -> RwLockReadGuard<'_, Block> {
        let block = self.blocks[id.0 as usize].try_read();
        let block = block.unwrap_or_else(|_| panic!("{id} v{version} asked, it is being updated"));
        assert!(
            block.version == version,
            "{id} v{version} asked, the EPS holds v{}",
            block.version
        );
        block
    }

    /// A lease to move a block on from a version.
    pub(crate) fn write(&self, id: BlockId, version: Version) -> RwLockWriteGuard<'_, Block> {
        let block = self.blocks[id.0 as usize].try_write();
        let block = block.unwrap_or_else(|_| panic!("{id} v{version} to update, it is in use"));
        assert!(
            block.version == version,
            "{id} v{version} asked, the EPS holds v{}",
            block.version
        );
        block
    }

    /// A block's gradient region, to read.
    pub(crate) fn region(&self, id: BlockId) -> RwLockReadGuard<'_, Vec<f32>> {
        let region = self.regions[id.0 as usize].try_read();
        region.unwrap_or_else(|_| panic!("the region of {id} is being written"))
    }

    /// A block's gradient region, to write.
    pub(crate) fn region_mut(&self, id: BlockId) -> RwLockWriteGuard<'_, Vec<f32>> {
        let region = self.regions[id.0 as usize].try_write();
        region.unwrap_or_else(|_| panic!("the region of {id} is in use"))
    }

    /// SHA-256 of all masters, block by block, tensor by tensor, as little-endian f32.
    pub(crate) fn digest(&self) -> String {
        self.digest_of(|block| vec![&block.parameters])
    }

    /// The same of masters and optimizer states.
    pub(crate) fn full_digest(&self) -> String {
        self.digest_of(|block| [&block.parameters].into_iter().chain(&block.states).collect())
    }

    fn digest_of(&self, what: impl Fn(&Block) -> Vec<&Vec<f32>>) -> String {
        let mut hasher = Sha256::new();
        for (block, tensors) in self.blocks.iter().zip(&self.tensors) {
            let block = block.read().expect("nobody panicked inside");
            for values in what(&block) {
                for range in tensor_ranges(tensors) {
                    values[range].iter().for_each(|value| hasher.update(value.to_le_bytes()));
                }
            }
        }
        hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
