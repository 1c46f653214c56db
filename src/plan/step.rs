//! The schedule of a walk of the ring: what it is for, and what it carries beside activations.
//!
//! Two things ride along on a forward walk as boundaries like any other. *Logits* leave the head
//! for the host. What attention *remembers* of positions that came before comes to a layer, and
//! what is new of it leaves; its place outlives the step. So both pass through the same slots.

use std::collections::BTreeMap;

use l2l_actors::schedule::{self, BlockId, Boundary, BoundaryId, Schedule, Selection};

use crate::config::{Config, ScheduleKind, StashDtype};
use crate::error::Error;
use crate::models::{Head, Model, Part, Save};
use crate::tensor::{Dtype, packed_bytes};

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

/// What a boundary is to a layer's memory, the layers counted that have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recall {
    /// From before.
    Past(usize),
    /// New.
    Fresh(usize),
}

/// What a schedule carries beside activations and their gradients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Carries {
    /// Boundaries that tell logits, in order of the vocabulary, and floats of a sequence.
    pub(crate) told: Vec<(BoundaryId, usize)>,
    /// Boundaries that are memory.
    pub(crate) recalls: BTreeMap<BoundaryId, Recall>,
}

/// Sequences of each micro-batch.
fn micro_batches(batch: usize, micro_batch: usize) -> Vec<u32> {
    (0..batch).step_by(micro_batch).map(|at| micro_batch.min(batch - at) as u32).collect()
}

/// The schedule of a step, and what it carries. `states`: of the update rule, for each parameter.
pub(crate) fn schedule_of(
    config: &Config,
    model: &Model,
    step: StepShape,
    states: usize,
) -> Result<(Schedule, Carries), Error> {
    let StepShape { sequences, positions, purpose } = step;
    let keep = config.schedule.recompute.keep();
    let states = if purpose.trains() { states } else { 0 };
    let dtype = config.device.dtype;
    let mut ring = model.for_ring(positions, keep.unwrap_or(Save::All), states, dtype);
    if config.stash.dtype == StashDtype::Bf16 {
        ring.hidden.stashed_per_sequence = packed_bytes(positions * model.shape.hidden);
    }
    let sizes = micro_batches(sequences, config.step.micro_batch);
    let mut selection = Selection::all(&ring, sizes);
    selection.recompute = keep.is_none();
    if !purpose.trains() {
        selection.frozen = (0..ring.blocks.len() as u32).map(BlockId).collect();
    }
    let mut schedule = match config.schedule.kind {
        ScheduleKind::Relay => schedule::relay(&ring, &selection)?,
        ScheduleKind::Resident => schedule::resident(&ring, &selection)?,
    };
    let mut carries = Carries::default();
    if purpose.scores() {
        tell(&mut schedule, &mut carries, model);
    }
    if let Purpose::Generate { cached } = purpose {
        remember(&mut schedule, &mut carries, model, dtype, [positions, cached]);
    }
    Ok((schedule, carries))
}

fn boundary(schedule: &mut Schedule, floats: usize) -> BoundaryId {
    let bytes_per_sequence = (floats * size_of::<f32>()) as u64;
    let stashed_per_sequence = bytes_per_sequence;
    schedule.boundaries.push(Boundary { slots: 1, bytes_per_sequence, stashed_per_sequence });
    BoundaryId(schedule.boundaries.len() as u32 - 1)
}

/// Lets the host's loss read what somebody writes, and so wait for it.
fn read_at_the_end(schedule: &mut Schedule, id: BoundaryId) {
    let losses = schedule.visits.iter_mut().filter(|visit| visit.is_loss());
    losses.for_each(|visit| visit.reads.push(id));
}

/// Every head writes its logits in front of its statistics, so that they land first.
fn tell(schedule: &mut Schedule, carries: &mut Carries, model: &Model) {
    for (layer, part) in model.parts.iter().enumerate() {
        let floats = match part {
            Part::Head(tile) => tile.rows,
            Part::Classes(_) => match model.shape.head {
                Head::Classes { labels, .. } => labels,
                Head::Tokens | Head::Masked => unreachable!("they have tiles"),
            },
            Part::Embedding | Part::Stack(_) => continue,
        };
        let id = boundary(schedule, floats);
        let visits = schedule.visits.iter_mut();
        let heads = visits.filter(|visit| visit.on_device() && visit.layer.0 as usize == layer);
        heads.for_each(|visit| visit.writes.insert(0, id));
        read_at_the_end(schedule, id);
        carries.told.push((id, floats));
    }
}

/// Every layer that remembers writes what is new, and reads what there is from before: the host
/// has it, as if it were gathered.
fn remember(
    schedule: &mut Schedule,
    carries: &mut Carries,
    model: &Model,
    dtype: Dtype,
    [positions, past]: [usize; 2],
) {
    let remembered = model.parts.iter().enumerate().filter_map(|(layer, part)| match part {
        Part::Stack(of) if of.kv_width() > 0 => Some((layer, of.kv_width())),
        _ => None,
    });
    for (index, (layer, width)) in remembered.enumerate() {
        let fresh = boundary(schedule, dtype.floats(positions * width));
        carries.recalls.insert(fresh, Recall::Fresh(index));
        let before = (past > 0).then(|| boundary(schedule, dtype.floats(past * width)));
        carries.recalls.extend(before.map(|id| (id, Recall::Past(index))));
        for visit in &mut schedule.visits {
            if visit.on_device() && visit.layer.0 as usize == layer {
                visit.writes.push(fresh);
                visit.reads.extend(before);
            } else if !visit.on_device() && !visit.writes.is_empty() {
                visit.writes.extend(before);
            }
        }
        read_at_the_end(schedule, fresh);
    }
}
