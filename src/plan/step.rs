//! The schedule of a step: what it is for, and what it carries beside activations.
//!
//! Two things pass through the same slots as activations, as boundaries of roles of their own.
//! *Logits* leave the head for the host. Keys and values of earlier positions come to a layer from
//! the *KV cache*, and new ones leave for it; its place on the host outlives the step.

use l2l_actors::schedule::{
    self, BlockId, Boundary, BoundaryId, Encoding, Pipeline, Ranks, RingModel, Role, Schedule,
    Selection, VisitKind,
};

use super::{DealtStep, RankShare, pipelines};
use crate::config::{Config, Deal, EpsTier, GradientDtype, ScheduleKind, StashDtype, Transfer};
use crate::eps::cut;
use crate::error::Error;
use crate::models::{Head, LayerSelection, Model, Part, Save};
use crate::optimizers::StateLayout;
use crate::tensor::{Dtype, Packing, packed_bf16};

/// What a step of the ring is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Loss, gradients and updates.
    Train,
    /// The loss alone; without dropout, as all that follow.
    Evaluate,
    /// What the head reads: the hidden states of the last layer.
    Encode,
    /// Logits of one labelled position a sequence, or the scores of each sequence beside its loss.
    Score,
    /// The same, with a KV cache: new keys and values leave, cached ones come.
    Generate {
        /// Positions that the longest sequence has in the cache, or more.
        cached: usize,
    },
}

impl Purpose {
    /// Whether parameters are updated.
    pub(crate) fn trains(self) -> bool {
        self == Purpose::Train
    }

    /// Whether logits, or scores, leave the device.
    pub(crate) fn scores(self) -> bool {
        matches!(self, Purpose::Score | Purpose::Generate { .. })
    }
}

/// Sizes of a step's batch, and what the step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub(crate) sequences: usize,
    pub(crate) positions: usize,
    pub(crate) purpose: Purpose,
}

/// Sequences of each micro-batch.
fn micro_batches(batch: usize, micro_batch: usize) -> Vec<u32> {
    (0..batch).step_by(micro_batch).map(|at| micro_batch.min(batch - at) as u32).collect()
}

/// What the schedule of a step is made of, beside config and model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSpec<'a> {
    pub(crate) shape: StepShape,
    /// The layers; `None`: all.
    pub(crate) layers: Option<&'a LayerSelection>,
    /// The optimizer's states of what this process has of each block.
    pub(crate) states: &'a StateLayout,
    /// Which process this is, where several share steps.
    pub(crate) share: RankShare,
    /// The pipeline of the config's file, if it names one.
    pub(crate) file: Option<&'a Pipeline>,
}

/// The schedule of a step.
pub(crate) fn schedule_of(
    config: &Config,
    model: &Model,
    step: StepSpec<'_>,
) -> Result<Schedule, Error> {
    let StepSpec { shape, layers, states, share, file } = step;
    let StepShape { sequences, positions, purpose } = shape;
    let states = Some(states).filter(|_| purpose.trains());
    let ring = ring_model(config, model, positions, states, share);
    let is_dealt = share.deals(purpose);
    let (sequences, groups) = if is_dealt {
        let DealtStep { sequences, groups } = share.deal(config, sequences)?;
        let own = share.rank as usize;
        (sequences[own].len(), groups[own].len() as u32)
    } else {
        (sequences, config.parallel.groups)
    };
    let sizes = micro_batches(sequences, config.step.micro_batch);
    let mut selection = Selection::all(&ring, sizes);
    selection.recompute = config.schedule.recompute.keep().is_none();
    selection.groups = groups;
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
            // Steps of few sequences leave a device without a group: blocks come whole.
            let is_sharded =
                config.parallel.transfer == Transfer::Sharded && dealt.keeps_busy(config.devices());
            Schedule { shards: if is_sharded { config.devices() } else { 1 }, ..dealt }
        }
    };
    schedule.ranks = Ranks { count: share.ranks, dealt: is_dealt };
    if purpose.scores() {
        add_logits(&mut schedule, model, positions);
    }
    if let Purpose::Generate { cached } = purpose {
        add_kv_cache(&mut schedule, model, config.device.dtype, [positions, cached]);
    }
    Ok(schedule)
}

/// The model as the ring schedules it, with this config's stash and tier.
fn ring_model(
    config: &Config,
    model: &Model,
    positions: usize,
    states: Option<&StateLayout>,
    share: RankShare,
) -> RingModel {
    let save = config.schedule.recompute.keep().unwrap_or(Save::All);
    let mut ring = model.for_ring(positions, save, config.device.dtype);
    let encoding = match config.stash.dtype {
        StashDtype::F32 => Encoding::Plain,
        StashDtype::Bf16 => Encoding::Bf16,
        StashDtype::Int8 => Encoding::Int8 { block: config.stash.block_size },
    };
    let packing = Packing { dtype: config.device.dtype, encoding, columns: model.shape.hidden };
    let packed = (packing.floats(positions) * size_of::<f32>()) as u64;
    if packed < ring.hidden.bytes_per_sequence {
        ring.hidden.encoding = encoding;
        ring.hidden.stashed_per_sequence = packed;
    }
    let staged = config.eps.tier == EpsTier::File;
    for (index, (block, tensors)) in ring.blocks.iter_mut().zip(&model.blocks).enumerate() {
        block.staged = staged;
        if config.device.gradient_dtype == GradientDtype::Bf16 {
            let packed = packed_bf16(tensors.trained_len()) * size_of::<f32>();
            (block.download_bytes, block.encoded) = (packed as u64, true);
        }
        if let (Some(kind), Some(_)) = (config.compression(), states) {
            let RankShare { rank, ranks } = share;
            let sent = kind.sent_bytes(tensors, &cut(tensors, ranks), rank, ranks);
            // As if each of the ranks sent as much.
            let others = u64::from(ranks - 1).max(1);
            (block.dealt_bytes, block.encoded) = (sent / others * u64::from(ranks), true);
        }
        let floats = states.map_or(0, |states| states.of(index).lens().iter().sum::<usize>());
        block.state_bytes = (floats * size_of::<f32>()) as u64;
        if staged && share.ranks > 1 {
            let cut = cut(tensors, share.ranks);
            let own = tensors.part(cut.of(share.rank));
            block.master_bytes = (own.host_len() * size_of::<f32>()) as u64;
            block.region_bytes = (own.trained_len() * size_of::<f32>()) as u64;
        }
    }
    ring
}

fn boundary(schedule: &mut Schedule, role: Role, floats: usize) -> BoundaryId {
    let bytes_per_sequence = (floats * size_of::<f32>()) as u64;
    schedule.boundaries.push(Boundary::plain(role, 1, bytes_per_sequence));
    BoundaryId(schedule.boundaries.len() as u32 - 1)
}

/// Makes the loss read a boundary, so that the step waits until it is on the host.
fn read_by_loss(schedule: &mut Schedule, id: BoundaryId) {
    let losses = schedule.visits.iter_mut().filter(|visit| visit.kind == VisitKind::Loss);
    losses.for_each(|visit| visit.reads.push(id));
}

/// Every head writes logits. The loss reads them in the order of the vocabulary.
fn add_logits(schedule: &mut Schedule, model: &Model, positions: usize) {
    for (layer, part) in model.parts.iter().enumerate() {
        let floats = match part {
            Part::Head(tile) => tile.rows,
            Part::Classes(_) => match model.shape.head {
                Head::Classes { labels, .. } => labels,
                Head::TokenClasses { labels } => positions * labels,
                Head::Tokens | Head::Masked => unreachable!("they have tiles"),
            },
            Part::Embedding | Part::Stack(_) => continue,
        };
        let id = boundary(schedule, Role::Logits, floats);
        let visits = schedule.visits.iter_mut();
        let heads = visits.filter(|visit| visit.on_device() && visit.layer.0 as usize == layer);
        heads.for_each(|visit| visit.writes.push(id));
        read_by_loss(schedule, id);
    }
}

/// Every layer with a KV cache reads the keys and values of `cached` positions, and writes those
/// of this step's `positions`. The cached ones are on the host before the step, so a gather writes
/// them for the schedule.
fn add_kv_cache(
    schedule: &mut Schedule,
    model: &Model,
    dtype: Dtype,
    [positions, cached]: [usize; 2],
) {
    for (layer, part) in model.parts.iter().enumerate() {
        let Part::Stack(stack) = part else { continue };
        let width = stack.kv_width();
        if width == 0 {
            continue;
        }
        let new = boundary(schedule, Role::NewKv, dtype.floats(positions * width));
        let floats = dtype.floats(cached * width);
        let cached = (cached > 0).then(|| boundary(schedule, Role::CachedKv, floats));
        for visit in &mut schedule.visits {
            if visit.on_device() && visit.layer.0 as usize == layer {
                visit.writes.push(new);
                visit.reads.extend(cached);
            } else if visit.kind == VisitKind::Gather {
                visit.writes.extend(cached);
            }
        }
        read_by_loss(schedule, new);
    }
}
