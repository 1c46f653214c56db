//! The eager param-server (EPS): masters, optimizer states, gradient regions and versions of all
//! blocks, in memory or in a file.
//!
//! The two tiers move blocks in different ways. In memory, the lanes that read or update a block
//! hold a lease on it. On file, the file lane reads the block into a slot and writes it back.
//! Between steps (initial weights, checkpoints, digests) both are used through `Eps::read_with` and
//! `Eps::write_with`.

mod direct;
mod feedback;
mod file;
mod index;
mod init;
mod memory;
mod parts;
mod places;
mod saving;
mod stored;
mod twice;

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use l2l_actors::schedule::{BlockId, Version};
use rayon::ThreadPool;
use sha2::{Digest, Sha256};

pub use direct::disk_bytes_per_second;
pub(crate) use direct::reserve;
pub(crate) use feedback::ErrorFeedback;
pub(crate) use file::{FileTier, Folder};
pub(crate) use index::{StateOnFile, rank_folder, state_in};
pub(crate) use memory::MemoryTier;
pub(crate) use parts::{RankParts, agreed_step, cut, lost};
pub(crate) use places::{paged, runs_on_file};
pub(crate) use saving::{STORAGE_PATIENCE, Saving};
pub(crate) use stored::{StoredMasters, TableRows};
pub(crate) use twice::doubled_len;

use crate::error::Error;
use crate::fabric::parts::Parts;
use crate::models::{BlockTensors, Model, Tensor};
use crate::optimizers::{BlockStates, RuleState, StateLayout};

/// A run of a block: one range of numbers that is read, written and cut by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BlockRun {
    /// The masters.
    Parameters,
    /// With a delay, the trained weights that devices were sent of the version before.
    Older,
    /// One of the optimizer's states, by its index.
    State(usize),
    /// A run of error feedback, by its index.
    Feedback(usize),
}

/// The number of the first run of error feedback: optimizers have far fewer states.
const FEEDBACK: usize = 1 << 16;
const OLDER: usize = FEEDBACK - 1;

impl BlockRun {
    /// The first run of a block, and a bound above all its runs.
    pub(crate) const FIRST: BlockRun = BlockRun::Parameters;
    pub(crate) const LAST: BlockRun = BlockRun::Feedback(usize::MAX);

    /// The number among the runs of a block: masters, then states, then error feedback.
    fn index(self) -> usize {
        match self {
            BlockRun::Parameters => 0,
            BlockRun::Older => OLDER,
            BlockRun::State(index) => 1 + index,
            BlockRun::Feedback(index) => FEEDBACK + index,
        }
    }

    fn of_index(index: usize) -> BlockRun {
        match index {
            0 => BlockRun::Parameters,
            OLDER => BlockRun::Older,
            1..FEEDBACK => BlockRun::State(index - 1),
            _ => BlockRun::Feedback(index - FEEDBACK),
        }
    }
}

/// Where the runs of blocks are.
enum Tier {
    Memory(MemoryTier),
    File(Box<FileTier>),
}

/// The blocks of a model, in one of the two tiers.
pub(crate) struct Eps {
    /// The tensors of this rank's part of each block.
    tensors: Vec<BlockTensors>,
    /// How blocks are cut, if there are several ranks.
    parts: Option<RankParts>,
    /// The optimizer's states of these tensors.
    states: StateLayout,
    /// The error feedback, if gradients are compressed.
    feedback: Option<ErrorFeedback>,
    tier: Tier,
    /// The progress of the last saving, which may still go on.
    saving: Mutex<Option<Arc<saving::Progress>>>,
    /// The host's threads, for conversions of blocks that are stored in other formats than f32.
    threads: OnceLock<Arc<ThreadPool>>,
}

impl Eps {
    /// Blocks of zeros in memory, with these optimizer states. `region` says which blocks have a
    /// gradient region. `delayed_tiles`: with a delay, the number of the vocabulary's tiles.
    pub(crate) fn in_memory(
        tensors: Vec<BlockTensors>,
        states: StateLayout,
        region: impl Fn(BlockId) -> bool,
        delayed_tiles: Option<usize>,
    ) -> Eps {
        let doubled = delayed_tiles.map(|tiles| {
            let blocks = tensors.iter().enumerate();
            blocks.map(|(index, tensors)| doubled_len(tensors, index < tiles)).collect()
        });
        let tier = Tier::Memory(MemoryTier::new(&tensors, &states, region, doubled));
        Eps::new(tensors, states, tier)
    }

    /// Blocks on file, with these optimizer states.
    pub(crate) fn on_file(tensors: Vec<BlockTensors>, states: StateLayout, tier: FileTier) -> Eps {
        Eps::new(tensors, states, Tier::File(Box::new(tier)))
    }

    fn new(tensors: Vec<BlockTensors>, states: StateLayout, tier: Tier) -> Eps {
        Eps {
            tensors,
            parts: None,
            states,
            feedback: None,
            tier,
            saving: Mutex::default(),
            threads: OnceLock::new(),
        }
    }

    /// Uses these threads for parallel loops. Only the first call has an effect. Without them,
    /// loops use rayon's own threads, which panic if the system does not start them.
    pub(crate) fn use_threads(&self, threads: &Arc<ThreadPool>) {
        _ = self.threads.set(threads.clone());
    }

    /// Runs `work`, whose parallel loops then use the host's threads.
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self.threads.get() {
            Some(threads) => threads.install(work),
            None => work(),
        }
    }

    /// Sets how blocks are cut.
    pub(crate) fn of_rank(self, parts: Option<RankParts>) -> Eps {
        Eps { parts, ..self }
    }

    pub(crate) fn with_feedback(self, feedback: Option<ErrorFeedback>) -> Eps {
        Eps { feedback, ..self }
    }

    /// The error feedback, if gradients are compressed.
    pub(crate) fn feedback(&self) -> Option<&ErrorFeedback> {
        self.feedback.as_ref()
    }

    /// How blocks are cut, if there are several ranks.
    pub(crate) fn parts(&self) -> Option<&RankParts> {
        self.parts.as_ref()
    }

    /// Does work once that reads the EPS: with several ranks, on the first one.
    ///
    /// # Errors
    /// The work failed: all ranks get the error.
    pub(crate) fn once(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        match &self.parts {
            None => work(),
            Some(parts) => parts.first_alone(self, work),
        }
    }

    /// The memory tier.
    ///
    /// # Panics
    /// The blocks are on file.
    pub(crate) fn memory(&self) -> &MemoryTier {
        match &self.tier {
            Tier::Memory(memory) => memory,
            Tier::File(_) => panic!("the EPS is on file"),
        }
    }

    pub(crate) fn file(&self) -> Option<&FileTier> {
        match &self.tier {
            Tier::Memory(_) => None,
            Tier::File(file) => Some(file),
        }
    }

    /// Makes the system give all memory of blocks, so that the first step does not wait for it.
    /// Calls `pin` with the memory of each block's masters. Blocks may be filled meanwhile.
    pub(crate) fn prepare(&self, pin: impl FnMut(&mut [f32])) {
        if let Tier::Memory(memory) = &self.tier {
            memory.prepare(pin);
        }
        if let Some(feedback) = &self.feedback {
            feedback.prepare();
        }
    }

    /// The optimizer's states of this rank's part of a block.
    pub(crate) fn own_states(&self, id: BlockId) -> &BlockStates {
        self.states.of(id.0 as usize)
    }

    /// The optimizer's states of a whole block.
    pub(crate) fn states(&self, id: BlockId) -> &BlockStates {
        self.parts.as_ref().map_or_else(|| self.own_states(id), |parts| parts.states(id))
    }

    /// All runs of blocks except the masters.
    pub(crate) fn state_runs(&self) -> impl Iterator<Item = BlockRun> + use<> {
        let states = self.parts.as_ref().map_or(&self.states, RankParts::layout).count();
        let feedback = self.feedback.as_ref().map_or(0, ErrorFeedback::count);
        (0..states).map(BlockRun::State).chain((0..feedback).map(BlockRun::Feedback))
    }

    /// The tensors that a run of a block has, in the order of their layer: for each its state, in a
    /// run that is not the masters, and its bytes in the run.
    pub(crate) fn pieces<'t>(
        &self,
        id: BlockId,
        run: BlockRun,
        tensors: &'t BlockTensors,
    ) -> Vec<(&'t Tensor, Option<RuleState>, Range<usize>)> {
        const FLOAT: usize = size_of::<f32>();
        let of_tensor = |(at, tensor): (usize, &'t Tensor)| {
            let (state, range) = match run {
                BlockRun::Parameters | BlockRun::Older => return None,
                BlockRun::State(index) => self.states(id).of_tensor(at).get(index)?,
                BlockRun::Feedback(index) => {
                    self.feedback.as_ref()?.layout(id, index).tensors.get(at)?.as_ref()?
                }
            };
            let begin = FLOAT * range.start;
            Some((tensor, Some(state.clone()), begin..begin + state.bytes()))
        };
        if matches!(run, BlockRun::Parameters | BlockRun::Older) {
            let end = if run == BlockRun::Older { tensors.trained_len() } else { tensors.len() };
            let in_bytes = |range: Range<usize>| FLOAT * range.start..FLOAT * range.end;
            let each = tensors.ranges().filter(|(_, range)| range.end <= end);
            return each.map(|(tensor, range)| (tensor, None, in_bytes(range))).collect();
        }
        tensors.trained().iter().enumerate().filter_map(of_tensor).collect()
    }

    /// Gives all blocks this version: that of a run which begins after so many training steps.
    pub(crate) fn begin_at(&self, version: Version) {
        match &self.tier {
            Tier::Memory(memory) => memory.begin_at(version),
            Tier::File(file) => file.begin_at(version),
        }
    }

    /// True if the version before the newest is there, too.
    pub(crate) fn has_older(&self) -> bool {
        match &self.tier {
            Tier::Memory(memory) => memory.has_older(),
            Tier::File(file) => file.has_older(),
        }
    }

    /// The number of updates that each block has had.
    pub(crate) fn updates(&self) -> Vec<u64> {
        match &self.tier {
            Tier::Memory(memory) => memory.updates(),
            Tier::File(file) => file.updates(),
        }
    }

    /// Sets the number of updates that each block has had.
    pub(crate) fn set_updates(&self, updates: &[u64]) {
        match &self.tier {
            Tier::Memory(memory) => memory.set_updates(updates),
            Tier::File(file) => file.set_updates(updates),
        }
    }

    /// Moves a block to its next version without a change, in a step that does not update it.
    pub(crate) fn carry(&self, id: BlockId, version: Version) {
        match &self.tier {
            Tier::Memory(memory) => memory.carry(id, version),
            Tier::File(file) => file.carry(id, version),
        }
    }

    pub(crate) fn tensors(&self, id: BlockId) -> &BlockTensors {
        &self.tensors[id.0 as usize]
    }

    /// Reads a run of a block as f32, while no step runs, or while the block is being saved. All
    /// ranks must call this with the same arguments, except within [`once`](Eps::once).
    ///
    /// # Errors
    /// The file cannot be read, or is not as it was written; or a rank is lost.
    pub(crate) fn read_with<R>(
        &self,
        id: BlockId,
        run: BlockRun,
        read: impl FnOnce(&[f32]) -> R,
    ) -> Result<R, Error> {
        let Some(parts) = &self.parts else { return self.read_own(id, run, read) };
        let cut = self.cut_of(parts, id, run);
        let len = cut.of(parts.exchanges.rank()).len();
        let own = self.read_own(id, run, |own| own[..len].to_vec())?;
        Ok(read(&parts.all_gather(id, run, &cut, &own)?))
    }

    /// How a run of a block is cut. The rank that computes a group has the group's error feedback.
    fn cut_of(&self, parts: &RankParts, id: BlockId, run: BlockRun) -> Parts {
        let (BlockRun::Feedback(index), Some(feedback)) = (run, &self.feedback) else {
            return parts.of_run(id, run);
        };
        let owner = feedback.group_of(index);
        let len = feedback.layout(id, index).len;
        let end = |rank: u32| if rank < owner { 0 } else { len };
        Parts::new((0..parts.exchanges.ranks()).map(end).collect())
    }

    /// Reads this rank's part of a run as it is stored.
    fn read_stored<R>(
        &self,
        id: BlockId,
        run: BlockRun,
        read: impl FnOnce(&[f32]) -> R,
    ) -> Result<R, Error> {
        if let (BlockRun::Feedback(index), Some(feedback)) = (run, &self.feedback) {
            return Ok(feedback.read_with(id, index, read));
        }
        match &self.tier {
            Tier::Memory(memory) => Ok(memory.read_with(id, run, read)),
            Tier::File(file) => {
                file.read_with(id, run, read).map_err(|error| Error::storage("eps.path", error))
            }
        }
    }

    /// Changes a run of a block, as f32, while no step runs. All ranks make the same change, and
    /// each stores its own part. `write` sees zeros in the parts of other ranks.
    ///
    /// # Errors
    /// The file cannot be read or written, or is not as it was written.
    pub(crate) fn write_with(
        &self,
        id: BlockId,
        run: BlockRun,
        write: impl FnOnce(&mut [f32]),
    ) -> Result<(), Error> {
        let Some(parts) = &self.parts else { return self.write_own(id, run, write) };
        let cut = self.cut_of(parts, id, run);
        let own = cut.of(parts.exchanges.rank());
        let mut whole = vec![0.0; cut.len()];
        self.write_own(id, run, |stored| {
            let stored = &mut stored[..own.len()];
            whole[own.clone()].copy_from_slice(stored);
            write(&mut whole);
            stored.copy_from_slice(&whole[own]);
        })
    }

    /// Changes this rank's part of a run as it is stored.
    fn write_stored(
        &self,
        id: BlockId,
        run: BlockRun,
        write: impl FnOnce(&mut [f32]),
    ) -> Result<(), Error> {
        if let (BlockRun::Feedback(index), Some(feedback)) = (run, &self.feedback) {
            feedback.write_with(id, index, write);
            return Ok(());
        }
        match &self.tier {
            Tier::Memory(memory) => {
                memory.write_with(id, run, write);
                Ok(())
            }
            Tier::File(file) => {
                file.write_with(id, run, write).map_err(|error| Error::storage("eps.path", error))
            }
        }
    }

    /// SHA-256 of all masters of a model, block by block, tensor by tensor, as little-endian f32.
    ///
    /// # Errors
    /// As [`read_with`](Eps::read_with).
    pub(crate) fn digest(&self, model: &Model) -> Result<String, Error> {
        self.digest_of(model, &[])
    }

    /// SHA-256 of all masters and optimizer states, block by block.
    ///
    /// # Errors
    /// As [`read_with`](Eps::read_with).
    pub(crate) fn full_digest(&self, model: &Model) -> Result<String, Error> {
        self.digest_of(model, &self.state_runs().collect::<Vec<_>>())
    }

    fn digest_of(&self, model: &Model, states: &[BlockRun]) -> Result<String, Error> {
        let mut hasher = Sha256::new();
        let blocks = model.blocks.iter().enumerate();
        for (index, tensors) in blocks.filter(|(_, tensors)| !tensors.is_empty()) {
            for run in [BlockRun::Parameters].into_iter().chain(states.iter().copied()) {
                let id = BlockId(index as u32);
                let pieces = self.pieces(id, run, tensors);
                self.read_with(id, run, |values| {
                    let bytes: &[u8] = bytemuck::cast_slice(values);
                    pieces.into_iter().for_each(|(_, _, range)| hasher.update(&bytes[range]));
                })?;
            }
        }
        Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
