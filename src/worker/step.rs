//! A step as the lanes see it: its batch, what it is for, and what it leaves for the caller.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use l2l_actors::Step;
use l2l_actors::schedule::{BlockId, MicroBatch, Schedule, Version};

use crate::data::Batch;
use crate::fabric::parts::Parts;
use crate::kernels::{BatchMetadata, DropoutKey};
use crate::optimizers::LearningRate;
use crate::plan::Purpose;
use crate::stash::StashLayout;

/// What a step of the ring is given.
#[derive(Clone, Debug)]
pub(crate) struct StepInput {
    pub(crate) batch: Batch,
    pub(crate) purpose: Purpose,
    /// Where its boundaries lie in the stash.
    pub(crate) stash: Arc<StashLayout>,
    /// Training steps before it: the ring's own number counts other steps, and begins anew.
    pub(crate) trained: u64,
    /// Those of them that updated the model.
    pub(crate) updated: u64,
    /// What the loss is multiplied by for the backward pass.
    pub(crate) loss_scale: f64,
    /// The KV cache slot of each sequence, of a step that generates.
    pub(crate) cache: Vec<CacheSlot>,
    /// What other processes compute of the step, where it is dealt.
    pub(crate) dealt: Option<Dealt>,
}

/// A step that several processes share.
#[derive(Clone, Debug)]
pub(crate) struct Dealt {
    /// The groups of each process.
    pub(crate) groups: Vec<Range<u32>>,
    /// The rows of each process among those of the whole batch.
    pub(crate) rows: Parts,
    /// The token ids of the whole batch.
    pub(crate) tokens: Vec<u32>,
    /// Sequences of the whole batch before those of this process.
    pub(crate) first_sequence: usize,
}

/// A sequence's slot of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheSlot {
    pub(crate) slot: usize,
    /// Positions that are cached.
    pub(crate) cached: usize,
}

/// A step in the ring.
pub(super) struct StepState {
    pub(super) number: Version,
    pub(super) batch: Batch,
    pub(super) purpose: Purpose,
    pub(super) trained: u64,
    /// Training steps before it that updated the model.
    pub(super) updated: u64,
    /// The loss scale: all gradients of the step are multiplied by it.
    pub(super) loss_scale: f64,
    pub(super) stash: Arc<StashLayout>,
    pub(super) cache: Vec<CacheSlot>,
    /// Cached positions of each sequence.
    pub(super) cached_positions: Vec<usize>,
    /// The factor of the loss's gradients: loss scale ÷ labelled positions.
    pub(super) scale: f32,
    pub(super) learning_rate: f64,
    pub(super) dealt: Option<Dealt>,
    /// Of a run with several processes: the losses of this one's micro-batches.
    pub(super) losses: Mutex<BTreeMap<MicroBatch, f64>>,
    /// The sums of squares of the chunks of gradients, where they are needed: of several processes
    /// those of this one's parts.
    pub(super) squares: Mutex<BTreeMap<BlockId, Vec<f64>>>,
    /// The sums of squares of parameter groups, where they are clipped by their own norm.
    pub(super) group_sums: OnceLock<Vec<f64>>,
}

/// Where a micro-batch lies in its step's batch.
pub(super) struct MicroBatchRange {
    /// Its sequences.
    pub(super) sequences: Range<usize>,
    /// Its rows.
    pub(super) rows: Range<usize>,
}

impl StepState {
    pub(super) fn new(step: &Step, input: StepInput, rate: LearningRate) -> StepState {
        let StepInput { batch, purpose, stash, trained, updated, .. } = input;
        let StepInput { loss_scale, cache, dealt, .. } = input;
        StepState {
            number: step.number,
            stash,
            cached_positions: cache.iter().map(|one| one.cached).collect(),
            cache,
            scale: (loss_scale / batch.labelled as f64) as f32,
            learning_rate: rate.at(updated),
            batch,
            purpose,
            trained,
            updated,
            loss_scale,
            dealt,
            losses: Mutex::default(),
            squares: Mutex::default(),
            group_sums: OnceLock::new(),
        }
    }

    /// Where a micro-batch lies in the step's batch.
    pub(super) fn range(&self, m: MicroBatch, schedule: &Schedule) -> MicroBatchRange {
        let before: u32 = schedule.micro_batches[..m as usize].iter().sum();
        let first = before as usize;
        let count = schedule.micro_batches[m as usize] as usize;
        let rows = self.batch.starts[first]..self.batch.starts[first + count];
        MicroBatchRange { sequences: first..first + count, rows }
    }

    /// The number of tokens of each sequence of a micro-batch.
    pub(super) fn lengths(
        &self,
        m: MicroBatch,
        schedule: &Schedule,
    ) -> impl Iterator<Item = usize> {
        self.range(m, schedule).sequences.map(|sequence| self.batch.length(sequence))
    }

    /// What layers see of a micro-batch. `seed`: of the run, for dropout.
    pub(super) fn metadata(
        &self,
        m: MicroBatch,
        schedule: &Schedule,
        seed: u64,
    ) -> BatchMetadata<'_> {
        let MicroBatchRange { sequences, rows } = self.range(m, schedule);
        let before = self.dealt.as_ref().map_or(0, |dealt| dealt.first_sequence);
        let first_sequence = (before + sequences.start) as u32;
        let key = DropoutKey { seed, step: self.updated, first_sequence };
        BatchMetadata {
            starts: &self.batch.starts[sequences.start..=sequences.end],
            kinds: &self.batch.kinds[rows.clone()],
            documents: self.batch.documents.get(rows).unwrap_or_default(),
            cached: self.cached_positions.get(sequences).unwrap_or_default(),
            dropout_key: self.purpose.trains().then_some(key),
        }
    }

    /// Positions of a micro-batch that have a label.
    pub(super) fn labelled(&self, m: MicroBatch, schedule: &Schedule) -> usize {
        let targets = &self.batch.targets[self.range(m, schedule).rows];
        targets.iter().filter(|target| **target >= 0).count()
    }

    /// The slots of the KV cache of a micro-batch's sequences.
    pub(super) fn cache_slots(&self, m: MicroBatch, schedule: &Schedule) -> &[CacheSlot] {
        &self.cache[self.range(m, schedule).sequences]
    }
}

/// The step that computes, and the one before, whose updates may still run.
#[derive(Default)]
pub(super) struct Steps(Mutex<[Option<Arc<StepState>>; 2]>);

impl Steps {
    pub(super) fn begin(&self, state: StepState) {
        let mut steps = self.0.lock().expect("nothing panics inside");
        steps.swap(0, 1);
        steps[0] = Some(Arc::new(state));
    }

    /// The step of this number.
    ///
    /// # Panics
    /// It is neither of the two.
    pub(super) fn of(&self, number: Version) -> Arc<StepState> {
        let steps = self.0.lock().expect("nothing panics inside");
        let found = steps.iter().flatten().find(|step| step.number == number);
        found.expect("an operation's step has begun").clone()
    }
}
