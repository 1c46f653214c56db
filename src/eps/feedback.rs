//! Error feedback: what compression keeps of gradients from step to step, errors and factors of
//! matrices.
//!
//! The lane that compresses a block's gradients has a lease on them, while other lanes read the
//! block's masters. Each rank keeps them for its own groups, and for whole blocks.

use std::ops::Range;
use std::sync::{RwLock, RwLockWriteGuard, TryLockError};

use l2l_actors::schedule::BlockId;

use crate::compression::{Compression, FeedbackRun};
use crate::models::Model;
use crate::tensor::{Pages, touch};

/// The runs of one block, group after group.
type Runs = Vec<Pages>;

pub(crate) struct ErrorFeedback {
    pub(crate) compression: Compression,
    pub(crate) groups: u32,
    /// The groups whose gradients this rank computes.
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
            let pages =
                |run| Pages::new(len(run)).expect("the plan found that much memory available");
            RwLock::new(runs.iter().enumerate().map(pages).collect())
        };
        let runs = layout.iter().map(zeros).collect();
        ErrorFeedback { compression, groups, own, layout, runs }
    }

    /// Makes the system give the memory of all runs.
    pub(super) fn prepare(&self) {
        for runs in &self.runs {
            let mut runs = runs.write().expect("nobody panicked inside");
            runs.iter_mut().for_each(|run| touch(run));
        }
    }

    /// The number of runs of a block.
    pub(super) fn count(&self) -> usize {
        self.groups as usize * self.compression.runs_per_group()
    }

    /// Where a run of a block has each tensor.
    pub(super) fn layout(&self, id: BlockId, run: usize) -> &FeedbackRun {
        &self.layout[id.0 as usize][run]
    }

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

    pub(crate) fn lease(&self, id: BlockId) -> RwLockWriteGuard<'_, Runs> {
        match self.runs[id.0 as usize].try_write() {
            Err(TryLockError::WouldBlock) => panic!("the errors of {id} are in use"),
            runs => runs.expect("nobody panicked inside"),
        }
    }
}
