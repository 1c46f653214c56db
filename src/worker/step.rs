//! A step as the lanes see it: its batch, its purpose, and the sums that its operations leave.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use l2l_actors::Step;
use l2l_actors::schedule::{BlockId, MicroBatch, Schedule, Version};

use super::balance::{RouterDesk, RouterReport};
use super::choice::Choices;
use super::objective::ObjectiveDesk;
use crate::data::Batch;
use crate::fabric::parts::Parts;
use crate::kernels::{BatchMetadata, BatchView, DropoutKey, SequenceChunk};
use crate::objectives::{Objective, ObjectiveMetrics};
use crate::optimizers::LearningRate;
use crate::plan::{Purpose, RingUnit, Units};
use crate::stash::StashLayout;

/// The data of a step.
#[derive(Clone, Debug)]
pub(crate) struct StepInput {
    pub(crate) batch: Batch,
    pub(crate) purpose: Purpose,
    /// The place of each boundary in the stash.
    pub(crate) stash: Arc<StashLayout>,
    /// The micro-batches of the ring.
    pub(crate) units: Arc<Units>,
    /// Training steps before this step. The ring's own number counts steps of all purposes, and
    /// begins at 0 in each run.
    pub(crate) trained: u64,
    /// Training steps before this step that updated the model.
    pub(crate) updated: u64,
    /// The factor of the loss for the backward pass, and so of all gradients.
    pub(crate) loss_scale: f64,
    /// The KV cache slot of each sequence, if the step generates.
    pub(crate) cache: Vec<CacheSlot>,
    /// The shares of all ranks, if the step is dealt.
    pub(crate) dealt: Option<Dealt>,
}

/// A step whose groups are dealt to ranks.
#[derive(Clone, Debug)]
pub(crate) struct Dealt {
    /// The groups of each rank.
    pub(crate) groups: Vec<Range<u32>>,
    /// The rows of each rank among the rows of the whole batch.
    pub(crate) rows: Parts,
    /// The token ids of the whole batch.
    pub(crate) tokens: Vec<u32>,
    /// The first of each sequence of the whole batch, and the end.
    pub(crate) starts: Vec<usize>,
    /// Of each sequence of the whole batch, where it has them: the log-probability by a reference,
    /// and the score of its record.
    pub(crate) reference: Vec<f64>,
    pub(crate) scores: Vec<f32>,
    /// The place of this rank's first sequence in the whole batch.
    pub(crate) first_sequence: usize,
}

/// A sequence's slot of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheSlot {
    pub(crate) slot: usize,
    /// The number of cached positions.
    pub(crate) cached: usize,
}

/// A step in the ring.
pub(super) struct StepState {
    pub(super) step: Arc<Step>,
    pub(super) input: StepInput,
    /// Cached positions of each sequence.
    cached_positions: Vec<usize>,
    /// The batches of the step: one, or those of a window.
    pub(super) batches: Vec<BatchOfStep>,
    rate: LearningRate,
    /// The sums of the losses of units that are a part of a micro-batch.
    pub(super) partial_losses: Mutex<BTreeMap<MicroBatch, f64>>,
    /// The losses of this rank's micro-batches, in a run of several ranks.
    pub(super) losses: Mutex<BTreeMap<MicroBatch, f64>>,
    /// What the routers of layers with experts did.
    pub(super) routers: Mutex<RouterDesk>,
    /// What the step's objective measured.
    pub(super) objective: Mutex<ObjectiveDesk>,
    /// Which experts have rows.
    pub(super) choices: Choices,
    /// The sums of squares of each block's chunks, with several ranks or clipping by group. With
    /// several ranks, a block has the chunks of this rank's part.
    pub(super) squares: Mutex<BTreeMap<BlockId, Vec<f64>>>,
    /// The sums of squares of parameter groups, if a group is clipped by its own norm.
    pub(super) group_sums: OnceLock<Vec<f64>>,
}

/// What has an update of its own.
pub(super) struct BatchOfStep {
    /// The first of its sequences.
    first: usize,
    /// Its labelled positions, on all ranks.
    pub(super) labelled: usize,
    /// The factor of the loss's gradients: loss scale ÷ labelled positions; with an objective, the
    /// loss scale.
    pub(super) scale: f32,
}

impl BatchOfStep {
    /// The batches of a step.
    fn all(schedule: &Schedule, input: &StepInput) -> Vec<BatchOfStep> {
        let of = |first: usize, labelled: usize| {
            let scale = (input.loss_scale / labelled as f64) as f32;
            BatchOfStep { first, labelled, scale }
        };
        if !schedule.in_batches {
            return vec![of(0, input.batch.labelled)];
        }
        let groups = schedule.groups.iter();
        let sequences = groups.map(|group| input.units.sequences_of(group));
        sequences.map(|all| of(all.start, input.batch.labelled_in(all))).collect()
    }
}

/// The range of a micro-batch in its step's batch.
pub(super) struct MicroBatchRange {
    pub(super) sequences: Range<usize>,
    pub(super) rows: Range<usize>,
}

impl StepState {
    pub(super) fn new(step: Arc<Step>, input: StepInput, rate: LearningRate) -> StepState {
        StepState {
            batches: BatchOfStep::all(&step.plan.schedule, &input),
            step,
            cached_positions: input.cache.iter().map(|slot| slot.cached).collect(),
            rate,
            input,
            partial_losses: Mutex::default(),
            losses: Mutex::default(),
            routers: Mutex::default(),
            objective: Mutex::default(),
            choices: Choices::default(),
            squares: Mutex::default(),
            group_sums: OnceLock::new(),
        }
    }

    pub(super) fn schedule(&self) -> &Schedule {
        &self.step.plan.schedule
    }

    /// The sequences and rows of a micro-batch in the step's batch.
    pub(super) fn range(&self, m: MicroBatch) -> MicroBatchRange {
        let RingUnit { sequences, chunk } = self.input.units.of(m);
        let [first, end] = [sequences.start, sequences.end].map(|at| self.input.batch.starts[at]);
        let rows = match chunk {
            Some(Range { start, end }) => first + start..first + end,
            None => first..end,
        };
        MicroBatchRange { sequences: sequences.clone(), rows }
    }

    /// The rows of the step, on all ranks.
    pub(super) fn rows_of_step(&self) -> usize {
        let own = || self.input.batch.tokens.len();
        self.input.dealt.as_ref().map_or_else(own, |dealt| dealt.tokens.len())
    }

    /// The sequences of all ranks, if the step's objective needs what is measured of all of them.
    pub(super) fn shared(&self) -> Option<&Dealt> {
        let mut visits = self.schedule().visits.iter();
        let is_shared = visits.any(|visit| visit.kind.is_objective() && visit.kind.is_of_step());
        self.input.dealt.as_ref().filter(|_| is_shared)
    }

    /// The positions of each sequence that a micro-batch has.
    pub(super) fn positions(&self, m: MicroBatch) -> impl Iterator<Item = Range<usize>> {
        let RingUnit { sequences, chunk } = self.input.units.of(m);
        let positions =
            |sequence| chunk.clone().unwrap_or_else(|| 0..self.input.batch.length(sequence));
        sequences.clone().map(positions)
    }

    /// The batch of a micro-batch.
    pub(super) fn batch_of(&self, m: MicroBatch) -> &BatchOfStep {
        &self.batches[self.schedule().batch_of(m) as usize]
    }

    /// The learning rate of the update that moves a block on from this version.
    pub(super) fn learning_rate(&self, version: Version) -> f64 {
        self.rate.at(self.input.updated + (version - self.step.version))
    }

    /// A micro-batch as layers see it. `seed` is the run's, for dropout. Also of a chunk, the
    /// metadata are those of a whole micro-batch of the config: rotary frequencies may follow its
    /// longest sequence.
    pub(super) fn view(&self, m: MicroBatch, seed: u64) -> BatchView<'_> {
        let RingUnit { sequences, chunk } = self.input.units.of(m);
        let all = self.input.units.sequences_of(&self.input.units.whole(m));
        let sequence = sequences.start - all.start;
        let whole = self.metadata(m, all, seed).view();
        match *chunk {
            Some(Range { start: from, end: to }) => {
                whole.chunk_of(SequenceChunk { sequence, from, to })
            }
            None => whole,
        }
    }

    fn metadata(&self, m: MicroBatch, sequences: Range<usize>, seed: u64) -> BatchMetadata<'_> {
        let starts = &self.input.batch.starts[sequences.start..=sequences.end];
        let rows = starts[0]..starts[sequences.len()];
        let before = self.input.dealt.as_ref().map_or(0, |dealt| dealt.first_sequence);
        let first_sequence = (before + sequences.start - self.batch_of(m).first) as u32;
        let step = self.input.updated + u64::from(self.schedule().batch_of(m));
        let key = DropoutKey { seed, step, first_sequence };
        BatchMetadata {
            starts,
            kinds: &self.input.batch.kinds[rows.clone()],
            documents: self.input.batch.documents.get(rows).unwrap_or_default(),
            cached: self.cached_positions.get(sequences).unwrap_or_default(),
            dropout_key: self.input.purpose.trains().then_some(key),
        }
    }

    /// The target of each row of a micro-batch. Negative: it has no label.
    pub(super) fn targets(&self, m: MicroBatch) -> &[i32] {
        &self.input.batch.targets[self.range(m).rows]
    }

    /// The slots of the KV cache of a micro-batch's sequences.
    pub(super) fn cache_slots(&self, m: MicroBatch) -> &[CacheSlot] {
        &self.input.cache[self.range(m).sequences]
    }
}

/// The step that began last, and earlier steps whose updates may still run.
#[derive(Default)]
pub(super) struct Steps(Mutex<Vec<Arc<StepState>>>);

impl Steps {
    pub(super) fn begin(&self, state: StepState) {
        let mut steps = self.0.lock().expect("nothing panics inside");
        // Each operation has its step.
        steps.retain(|state| Arc::strong_count(&state.step) > 1);
        steps.push(Arc::new(state));
    }

    /// What the routers of the last step that began did.
    pub(super) fn router_report(&self) -> Option<RouterReport> {
        let steps = self.0.lock().expect("nothing panics inside");
        let state = steps.last()?;
        state.routers.lock().expect("nothing panics inside").report()
    }

    /// The log-probability of each sequence of the last step that began, if it measured them.
    pub(super) fn log_probabilities(&self) -> Vec<f64> {
        let steps = self.0.lock().expect("nothing panics inside");
        let of = |state: &Arc<StepState>| {
            state.objective.lock().expect("nothing panics inside").log_probabilities()
        };
        steps.last().map(of).unwrap_or_default()
    }

    /// The metrics of the last step that began.
    pub(super) fn metrics(&self, objective: &dyn Objective) -> ObjectiveMetrics {
        let steps = self.0.lock().expect("nothing panics inside");
        let of = |state: &Arc<StepState>| {
            state.objective.lock().expect("nothing panics inside").mean_metrics(objective)
        };
        steps.last().map(of).unwrap_or_default()
    }

    /// The embedding of each sequence of the last step that began, if it measured them and does not
    /// train.
    pub(super) fn embeddings(&self) -> Vec<f32> {
        let steps = self.0.lock().expect("nothing panics inside");
        let of = |state: &Arc<StepState>| {
            state.objective.lock().expect("nothing panics inside").embeddings()
        };
        let last = steps.last().filter(|state| !state.input.purpose.trains());
        last.map(of).unwrap_or_default()
    }

    /// The state of a step by its number.
    ///
    /// # Panics
    /// No operation has the step any more.
    pub(super) fn of(&self, number: Version) -> Arc<StepState> {
        let steps = self.0.lock().expect("nothing panics inside");
        let found = steps.iter().find(|state| state.step.number == number);
        found.expect("an operation's step has begun").clone()
    }
}
