//! The schedule of a step, from its purpose, the config and the steps that layers declare.

use std::borrow::Cow;
use std::collections::BTreeSet;

use l2l_actors::schedule::{
    self, BlockId, Boundary, BoundaryId, Encoding, LayerId, Pipeline, Ranks, RingModel,
    RingObjective, Schedule, Selection, Visit,
};

use super::{DealtStep, RankShare, Units, most_positions, pipelines};
use crate::config::{
    Config, Deal, EpsTier, GradientDtype, ReferenceKind, ScheduleKind, StashDtype, StashPlace,
    Transfer,
};
use crate::eps::{cut, doubled_len};
use crate::error::Error;
use crate::models::{Base, LayerSelection, Model, StepContext};
use crate::objectives::{Objective, Scope};
use crate::optimizers::StateLayout;
use crate::stash;
use crate::tensor::{ALIGNED, Packing, packed_bf16};

/// What a step of the ring is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Loss, gradients and updates.
    Train,
    /// The loss alone. This purpose and those below have no dropout.
    Evaluate,
    /// The log-probability of each sequence, or its embedding.
    Measure,
    /// The hidden states that the head reads.
    Encode,
    /// Logits of one labelled position a sequence, or the scores of each sequence beside its loss.
    Score,
    /// Logits as in `Score`, with a KV cache: the step reads cached keys and values and adds new
    /// ones.
    Generate {
        /// Positions that the longest sequence has in the cache, or more.
        cached: usize,
    },
}

impl Purpose {
    /// What steps are for that evaluate this model.
    pub(super) fn of_evaluation(model: &Model) -> Purpose {
        if model.shape.head.labels().is_none() { Purpose::Evaluate } else { Purpose::Score }
    }

    /// Whether parameters are updated.
    pub(crate) fn trains(self) -> bool {
        self == Purpose::Train
    }

    /// Whether logits, or scores, leave the device.
    pub(crate) fn scores(self) -> bool {
        matches!(self, Purpose::Score | Purpose::Generate { .. })
    }

    /// With a KV cache: positions that the longest sequence has there, or more.
    fn cached(self) -> Option<usize> {
        match self {
            Purpose::Generate { cached } => Some(cached),
            _ => None,
        }
    }
}

/// Sizes of a step's batch, and what the step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub(crate) sequences: usize,
    pub(crate) positions: usize,
    pub(crate) purpose: Purpose,
}

/// The schedules of all steps of a run, and the most that they need.
#[derive(Default)]
pub(super) struct Schedules {
    pub(super) all: Vec<Schedule>,
    /// Floats of an input or output slot.
    pub(super) boundary: usize,
    pub(super) stash: usize,
    /// Floats of what a device keeps beside the stash.
    pub(super) kept: usize,
}

impl Schedules {
    pub(super) fn add(&mut self, schedule: Schedule) {
        let sequences = schedule.micro_batches.iter().copied().max().unwrap_or(1);
        let tokens = u64::from(sequences) * u64::from(schedule.positions);
        // What a device keeps takes no slot.
        let passes = |visit: &Visit| [&visit.reads[..], &visit.writes].concat();
        let all: BTreeSet<BoundaryId> = schedule.visits.iter().flat_map(passes).collect();
        let bytes = |id| schedule.boundary(id).bytes(sequences.into(), tokens) as usize;
        let largest = all.into_iter().map(bytes).max().unwrap_or(0);
        let floats = (largest / size_of::<f32>()).next_multiple_of(ALIGNED);
        self.boundary = self.boundary.max(floats);
        let layout = stash::layout(&schedule);
        self.stash = self.stash.max(layout.floats);
        self.kept = self.kept.max(layout.kept_floats);
        self.all.push(schedule);
    }
}

/// What the schedule of a step is made from, beside config and model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSpec<'a> {
    pub(crate) shape: StepShape,
    /// This rank's units; `None`: those of sequences that are all the longest.
    pub(crate) units: Option<&'a Units>,
    pub(crate) layers: Option<&'a LayerSelection>,
    /// The optimizer's states of this rank's part of each block.
    pub(crate) states: &'a StateLayout,
    pub(crate) share: RankShare,
    /// The pipeline of the file that the config names, if it does.
    pub(crate) file: Option<&'a Pipeline>,
    /// The layers that keep their activations on the device, in a step that trains.
    pub(crate) kept: &'a BTreeSet<LayerId>,
    /// Whether uploads may wait for what rows choose of blocks.
    pub(crate) may_wait: bool,
    /// Whether what the next visit of a device reads may stay there.
    pub(crate) may_stay: bool,
}

pub(crate) fn schedule_of(
    config: &Config,
    model: &Model,
    step: StepSpec<'_>,
) -> Result<Schedule, Error> {
    let StepSpec { shape, units, layers, states, share, file, kept, may_wait, may_stay } = step;
    let StepShape { sequences, positions, purpose } = shape;
    let states = Some(states).filter(|_| purpose.trains());
    let none = BTreeSet::new();
    let kept = if purpose.trains() { kept } else { &none };
    let is_dealt = share.deals(purpose);
    let (sequences, groups) = if is_dealt {
        let DealtStep { sequences, groups } = share.deal(config, sequences)?;
        let own = share.rank as usize;
        (sequences[own].len(), groups[own].len() as u32)
    } else {
        (sequences, config.parallel.groups)
    };
    // The batches of a window have a gradient each.
    let groups = if purpose.trains() { groups.max(config.window()) } else { groups };
    let most = most_positions(config, model, purpose);
    // Ranks answer as one, also those whose own sequences are short.
    let is_cut = most.is_some_and(|most| positions > most);
    let longest = || Units::new(&vec![positions; sequences], config.step.micro_batch, most);
    let units = units.cloned().unwrap_or_else(longest);
    let of_units = StepShape { positions: units.positions, ..shape };
    let ring = ring_model(config, model, of_units, is_cut, kept, states, share);
    let mut selection = Selection::all(&ring, units.sizes());
    selection.groups = units.groups(groups);
    selection.last_chunk = units.last_chunk();
    selection.runs = units.runs;
    selection.waits_for_choice = may_wait && pays_a_wait(config, model, shape, share);
    let hands_over = may_stay && config.hands_over();
    if hands_over && has_rounds(config, share) {
        selection.light = model.light_layers();
    }
    if let Some(layers) = layers {
        layers.check(model)?;
        selection.layers = layers.ring_layers(model);
        selection.frozen = layers.frozen_blocks(model);
    }
    if !purpose.trains() {
        selection.frozen = (0..ring.blocks.len() as u32).map(BlockId).collect();
    }
    let schedule = match config.schedule.kind {
        ScheduleKind::Relay => schedule::relay(&ring, &selection)?,
        ScheduleKind::Resident => schedule::resident(&ring, &selection)?,
        _ => pipelines::schedule_of(config, &ring, &selection, file, purpose.trains())?,
    };
    let mut schedule = match config.parallel.deal {
        _ if config.schedule.kind.is_pipeline() => schedule,
        Deal::Layers => schedule::deal(schedule, config.devices()),
        Deal::Sequences => {
            let dealt = schedule::deal_groups(schedule, &config.device_weights());
            // A step of few sequences leaves a device without a group. It could not upload its
            // shard, so blocks come whole.
            let is_sharded =
                config.parallel.transfer == Transfer::Sharded && dealt.keeps_busy(config.devices());
            Schedule { shards: if is_sharded { config.devices() } else { 1 }, ..dealt }
        }
    };
    schedule.trains = purpose.trains();
    schedule.ranks = Ranks { count: share.ranks, dealt: is_dealt };
    Ok(if hands_over { schedule::hand_over(schedule) } else { schedule })
}

/// True if light layers go in rounds with a neighbour: one device has both, each in a slot for
/// weights and one for gradients, and what a visit dequantises is not dequantised again in each
/// round. What the stash rounds does not stay on the device, so rounds would save nothing.
fn has_rounds(config: &Config, share: RankShare) -> bool {
    let is_one = config.devices() == 1 && share.ranks == 1;
    let is_as_is = config.train.base == Base::AsIs;
    let has_slots = config.channels.weights >= 2 && config.channels.gradients >= 2;
    is_one && has_slots && is_as_is && !config.stash_rounds()
}

/// True if uploads of a step of this shape should wait for what rows choose of blocks. Schedules of
/// few rows a visit would wait in each, and ranks make the same exchanges only if they wait alike.
fn pays_a_wait(config: &Config, model: &Model, shape: StepShape, share: RankShare) -> bool {
    let rows = shape.sequences * shape.positions;
    config.schedule.kind == ScheduleKind::Relay
        && share.ranks == 1
        && model.shape.experts.is_some_and(|experts| experts.pay_a_wait(rows))
}

/// The model as the ring schedules it, with this config's stash and tier.
fn ring_model(
    config: &Config,
    model: &Model,
    shape: StepShape,
    is_cut: bool,
    kept: &BTreeSet<LayerId>,
    states: Option<&StateLayout>,
    share: RankShare,
) -> RingModel {
    let mut ring = model.for_ring_keeping(&context(config, model, shape), kept);
    if config.stash.place == StashPlace::Device {
        // The host cannot read there what rows choose.
        let steps = ring.layers.iter_mut().flat_map(|layer| &mut layer.steps);
        steps.for_each(|step| step.chosen_by = None);
    }
    // What is asked of a sequence or of a micro-batch is known when all of its units have come.
    let has_loss = model.shape.experts.is_some_and(|experts| experts.balance.has_loss());
    ring.answers_step |= has_loss && is_cut;
    ring.objective = objective(config, model, shape.purpose);
    let staged = config.eps.tier == EpsTier::File;
    for (id, cuts) in &mut ring.cuts {
        let is_packed = config.device.gradient_dtype == GradientDtype::Bf16;
        for (cut, portion) in cuts.iter_mut().zip(model.portions(*id)).filter(|_| is_packed) {
            let packed = packed_bf16(portion.tensors.trained_len()) * size_of::<f32>();
            cut.download_bytes = packed as u64;
        }
    }
    for (index, (block, tensors)) in ring.blocks.iter_mut().zip(&model.blocks).enumerate() {
        block.staged = staged;
        if config.device.gradient_dtype == GradientDtype::Bf16 {
            let packed = packed_bf16(tensors.trained_len()) * size_of::<f32>();
            block.download_bytes = packed as u64;
            block.encoded = true;
        }
        if let (Some(kind), Some(_)) = (config.compression(), states) {
            let RankShare { rank, ranks } = share;
            let sent = kind.sent_bytes(tensors, &cut(tensors, ranks), rank, ranks);
            // All ranks are assumed to send as much as this one.
            let others = u64::from(ranks - 1).max(1);
            block.reduce_scatter_bytes = sent / others * u64::from(ranks);
            block.encoded = true;
        }
        let floats = states.map_or(0, |states| states.of(index).lens().iter().sum::<usize>());
        block.state_bytes = (floats * size_of::<f32>()) as u64;
        let mut own = Cow::Borrowed(tensors);
        if staged && share.ranks > 1 {
            let cut = cut(tensors, share.ranks);
            own = Cow::Owned(tensors.part(cut.of(share.rank)));
            block.master_bytes = (own.host_len() * size_of::<f32>()) as u64;
            block.region_bytes = (own.trained_len() * size_of::<f32>()) as u64;
        }
        if staged && states.is_some() && config.schedule.delay().is_some() {
            block.older_bytes = (doubled_len(&own, false) * size_of::<f32>()) as u64;
        }
    }
    ring
}

/// The objective of a step for this purpose, as the ring schedules it.
fn objective(config: &Config, model: &Model, purpose: Purpose) -> Option<RingObjective> {
    let gradient = model.embedding_gradient();
    let alone = RingObjective { of_step: false, gradient, reference: None };
    match (&model.objective, purpose) {
        (_, Purpose::Measure) => Some(alone),
        (Some(objective), Purpose::Train | Purpose::Evaluate) => {
            let of_step = is_of_step(config, &**objective);
            let is_in_step = config.objective.reference == Some(ReferenceKind::InStep);
            let reference = model.first_adapted().filter(|_| is_in_step);
            Some(RingObjective { of_step, reference, ..alone })
        }
        _ => gradient.map(|_| alone),
    }
}

/// True if losses of this objective need more than what a micro-batch has.
pub(super) fn is_of_step(config: &Config, objective: &dyn Objective) -> bool {
    let each = objective.sequences();
    objective.scope() == Scope::Step || !config.step.micro_batch.is_multiple_of(each)
}

/// The context in which the model's layers declare their steps. Hidden states and their gradients
/// are packed for the stash if that makes them smaller.
fn context(config: &Config, model: &Model, shape: StepShape) -> StepContext {
    let StepShape { positions, purpose, .. } = shape;
    let dtype = config.device.dtype;
    let save = config.schedule.recompute.keep();
    let context = model.context(positions, dtype, save.filter(|_| purpose.trains()));
    let encoding = match config.stash.dtype {
        StashDtype::F32 => Encoding::Plain,
        StashDtype::Bf16 => Encoding::Bf16,
        StashDtype::Int8 => Encoding::Int8 { block: config.stash.block_size },
    };
    let packed = |boundary: Boundary| {
        let packing = Packing { dtype, encoding, columns: boundary.width() };
        let stashed_token_bytes = packing.row_bytes() as u64;
        match stashed_token_bytes < boundary.token_bytes {
            true => Boundary { encoding, stashed_token_bytes, ..boundary },
            false => boundary,
        }
    };
    let [hidden, mut embedding] = [context.hidden, context.embedding].map(packed);
    // Tiles of two tables have parts of a row, and integers of a row share scales.
    if model.shape.block_inputs.is_some() && matches!(encoding, Encoding::Int8 { .. }) {
        embedding = context.embedding;
    }
    StepContext { scores: purpose.scores(), cached: purpose.cached(), hidden, embedding, ..context }
}
