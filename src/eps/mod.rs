//! The eager param-server: masters, optimizer state, gradient regions and versions, block by block,
//! in memory or in a file under it.
//!
//! The tiers differ in who moves a block: in [memory](Memory) the lanes that read and update it hold
//! a lease; on [file](FileTier) the lane of files brings it to a slot and back. What happens between
//! steps (a checkpoint, a digest, the begin) is the same for both.

mod begin;
mod direct;
mod file;
mod index;
mod memory;

use l2l_actors::schedule::{BlockId, Version};
use sha2::{Digest, Sha256};

pub use direct::disk_bytes_per_second;
pub(crate) use file::{FileTier, Folder, Found, found, part_floats};
pub(crate) use memory::Memory;

use crate::error::Error;
use crate::models::{Model, Tensor, block_len, tensor_ranges};
use crate::optimizers::SplitMasters;
use crate::tensor::Dtype;

/// Which of the numbers that belong to each parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Which {
    /// The parameter.
    Parameter,
    /// One of the optimizer's states of it.
    State(usize),
}

impl Which {
    /// Its place among the parts of a block: parameters, then states.
    fn part(self) -> usize {
        match self {
            Which::Parameter => 0,
            Which::State(index) => 1 + index,
        }
    }

    /// All, where a parameter has so many states.
    fn all(states: usize) -> impl Iterator<Item = Which> {
        [Which::Parameter].into_iter().chain((0..states).map(Which::State))
    }
}

/// Where the blocks are.
enum Tier {
    Memory(Memory),
    File(Box<FileTier>),
}

/// See the [module](self).
pub(crate) struct Eps {
    tensors: Vec<Vec<Tensor>>,
    states: usize,
    /// Whether masters are [split](SplitMasters).
    pub(crate) split: bool,
    tier: Tier,
}

impl Eps {
    /// Blocks of zeros in memory, with so many optimizer states, and gradient regions where they are
    /// needed.
    pub(crate) fn in_memory(model: &Model, states: usize, region: impl Fn(BlockId) -> bool) -> Eps {
        let tier = Tier::Memory(Memory::new(&model.blocks, states, region));
        Eps { tensors: model.blocks.clone(), states, split: false, tier }
    }

    /// Blocks on file.
    pub(crate) fn on_file(model: &Model, states: usize, tier: FileTier) -> Eps {
        let tier = Tier::File(Box::new(tier));
        Eps { tensors: model.blocks.clone(), states, split: false, tier }
    }

    /// The same for a device of this kind; zeros are zeros for all.
    pub(crate) fn published_as(self, dtype: Dtype) -> Eps {
        Eps { split: dtype == Dtype::Bf16, ..self }
    }

    /// The tier in memory, for the lanes of a ring whose blocks are there.
    ///
    /// # Panics
    /// They are on file.
    pub(crate) fn memory(&self) -> &Memory {
        match &self.tier {
            Tier::Memory(memory) => memory,
            Tier::File(_) => panic!("the EPS is on file"),
        }
    }

    /// The tier on file, if that is where the blocks are.
    pub(crate) fn file(&self) -> Option<&FileTier> {
        match &self.tier {
            Tier::Memory(_) => None,
            Tier::File(file) => Some(file),
        }
    }

    /// Optimizer states of each parameter.
    pub(crate) fn states(&self) -> usize {
        self.states
    }

    /// Updates that each block has had.
    pub(crate) fn updates(&self) -> Vec<u64> {
        match &self.tier {
            Tier::Memory(memory) => memory.updates(),
            Tier::File(file) => file.updates(),
        }
    }

    /// Says how many updates each block has had.
    pub(crate) fn set_updates(&self, updates: &[u64]) {
        match &self.tier {
            Tier::Memory(memory) => memory.set_updates(updates),
            Tier::File(file) => file.set_updates(updates),
        }
    }

    /// Makes a block's next version of one it was not changed in.
    pub(crate) fn carry(&self, id: BlockId, version: Version) {
        match &self.tier {
            Tier::Memory(memory) => memory.write(id, version).version = version + 1,
            Tier::File(file) => file.carry(id, version),
        }
    }

    /// The tensors of a block.
    pub(crate) fn tensors(&self, id: BlockId) -> &[Tensor] {
        &self.tensors[id.0 as usize]
    }

    /// Reads a part of a block, while no step runs.
    ///
    /// # Errors
    /// It cannot be read from its file, or is not what was written.
    pub(crate) fn read_with<R>(
        &self,
        id: BlockId,
        which: Which,
        read: impl FnOnce(&[f32]) -> R,
    ) -> Result<R, Error> {
        if !self.split || which != Which::Parameter {
            return self.read_stored(id, which, read);
        }
        let mut place = self.read_stored(id, which, <[f32]>::to_vec)?;
        let split = SplitMasters::of(&mut place[..block_len(&self.tensors[id.0 as usize])]);
        let masters: Vec<f32> = split.masters().collect();
        Ok(read(&masters))
    }

    fn read_stored<R>(
        &self,
        id: BlockId,
        which: Which,
        read: impl FnOnce(&[f32]) -> R,
    ) -> Result<R, Error> {
        match &self.tier {
            Tier::Memory(memory) => Ok(memory.read_with(id, which, read)),
            Tier::File(file) => {
                file.read_with(id, which, read).map_err(|error| Error::storage("eps.path", error))
            }
        }
    }

    /// Writes a part of a block, before the first step.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub(crate) fn write_with(
        &self,
        id: BlockId,
        which: Which,
        write: impl FnOnce(&mut [f32]),
    ) -> Result<(), Error> {
        if !self.split || which != Which::Parameter {
            return self.write_stored(id, which, write);
        }
        let len = block_len(self.tensors(id));
        self.write_stored(id, which, |place| {
            let split = SplitMasters::of(&mut place[..len]);
            let mut masters: Vec<f32> = split.masters().collect();
            write(&mut masters);
            let SplitMasters { published, remainder } = split;
            for ((published, remainder), master) in published.iter_mut().zip(remainder).zip(masters)
            {
                (*published, *remainder) = SplitMasters::split(master);
            }
        })
    }

    fn write_stored(
        &self,
        id: BlockId,
        which: Which,
        write: impl FnOnce(&mut [f32]),
    ) -> Result<(), Error> {
        match &self.tier {
            Tier::Memory(memory) => {
                memory.write_with(id, which, write);
                Ok(())
            }
            Tier::File(file) => {
                file.write_with(id, which, write).map_err(|error| Error::storage("eps.path", error))
            }
        }
    }

    /// SHA-256 of all masters, block by block, tensor by tensor, as little-endian f32.
    ///
    /// # Errors
    /// As [`read_with`](Eps::read_with).
    pub(crate) fn digest(&self) -> Result<String, Error> {
        self.digest_of(0)
    }

    /// The same of masters and optimizer states.
    ///
    /// # Errors
    /// As [`read_with`](Eps::read_with).
    pub(crate) fn full_digest(&self) -> Result<String, Error> {
        self.digest_of(self.states)
    }

    fn digest_of(&self, states: usize) -> Result<String, Error> {
        let mut hasher = Sha256::new();
        for (index, tensors) in self.tensors.iter().enumerate() {
            for which in Which::all(states) {
                self.read_with(BlockId(index as u32), which, |values| {
                    for range in tensor_ranges(tensors) {
                        values[range].iter().for_each(|value| hasher.update(value.to_le_bytes()));
                    }
                })?;
            }
        }
        Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
