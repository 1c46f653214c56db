//! What compression keeps of gradients from step to step: errors, and factors of matrices.
//!
//! The lane that compresses a block's gradients has a lease on them, while others read the block's
//! masters. Of several ranks each keeps what belongs to its own groups, of whole blocks.

use std::ops::Range;
use std::sync::{RwLock, RwLockWriteGuard, TryLockError};

use l2l_actors::schedule::BlockId;

use crate::compression::{Compression, FeedbackRun};
use crate::models::Model;

/// The runs of one block: those of the first group, then those of the next.
type Runs = Vec<Vec<f32>>;

/// See the [module](self).
pub(crate) struct ErrorFeedback {
    pub(crate) compression: Compression,
    /// All groups of the run.
    pub(crate) groups: u32,
    /// Those whose gradients this process computes.
    pub(crate) own: Range<u32>,
    layout: Vec<Vec<FeedbackRun>>,
    runs: Vec<RwLock<Runs>>,
}

impl ErrorFeedback {
    /// Zeros, for a model's blocks.
    pub(crate) fn new(
        compression: Compression,
        model: &Model,
        groups: u32,
        own: Range<u32>,
    ) -> ErrorFeedback {
        let of_block = |block: u32| -> Vec<FeedbackRun> {
            let tensors = model.computed_gradient(BlockId(block));
            (0..groups).flat_map(|group| compression.kept(tensors, group)).collect()
        };
        let layout: Vec<Vec<FeedbackRun>> = (0..model.blocks.len() as u32).map(of_block).collect();
        let is_own = |run: usize| own.contains(&((run / compression.runs_per_group()) as u32));
        let zeros = |runs: &Vec<FeedbackRun>| {
            let len = |(at, run): (usize, &FeedbackRun)| if is_own(at) { run.len } else { 0 };
            RwLock::new(runs.iter().enumerate().map(|run| vec![0.0; len(run)]).collect())
        };
        let runs = layout.iter().map(zeros).collect();
        ErrorFeedback { compression, groups, own, layout, runs }
    }

    /// Runs of each block.
    pub(super) fn count(&self) -> usize {
        self.groups as usize * self.compression.runs_per_group()
    }

    /// What a run of a block has of each tensor.
    pub(super) fn layout(&self, id: BlockId, run: usize) -> &FeedbackRun {
        &self.layout[id.0 as usize][run]
    }

    /// The group that a run is for.
    pub(super) fn group_of(&self, run: usize) -> u32 {
        (run / self.compression.runs_per_group()) as u32
    }

    pub(super) fn read_with<R>(
        &self,
        id: BlockId,
        run: usize,
        read: impl FnOnce(&[f32]) -> R,
    ) -> R {
        read(&self.runs[id.0 as usize].read().expect("nobody panicked inside")[run])
    }

    pub(super) fn write_with(&self, id: BlockId, run: usize, write: impl FnOnce(&mut [f32])) {
        write(&mut self.runs[id.0 as usize].write().expect("nobody panicked inside")[run]);
    }

    /// A lease on the runs of a block.
    pub(crate) fn lease(&self, id: BlockId) -> RwLockWriteGuard<'_, Runs> {
        match self.runs[id.0 as usize].try_write() {
            Err(TryLockError::WouldBlock) => panic!("the errors of {id} are in use"),
            runs => runs.expect("nobody panicked inside"),
        }
    }
}
