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

/// What a walk is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To learn.
    Train {
        /// Of the update rule, beside each parameter.
        states: usize,
    },
    /// The loss alone.
    Evaluate,
    /// Logits of one labelled position a sequence, or scores of each sequence.
    Tell,
    /// The same; layers remember what they see, and see so many positions from before.
    Remember {
        /// Of the sequence that has the most.
        past: usize,
    },
}

/// What a step walks over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
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

/// The schedule of a walk, and what it carries.
pub(crate) fn schedule_of(
    config: &Config,
    model: &Model,
    walk: Walk,
) -> Result<(Schedule, Carries), Error> {
    let keep = config.schedule.recompute.keep();
    let states = match walk.purpose {
        Purpose::Train { states } => states,
        _ => 0,
    };
    let dtype = config.device.dtype;
    let mut ring = model.for_ring(walk.positions, keep.unwrap_or(Save::All), states, dtype);
    if config.stash.dtype == StashDtype::Bf16 {
        ring.hidden.stashed_per_sequence = packed_bytes(walk.positions * model.shape.hidden);
    }
    let sizes = micro_batches(walk.sequences, config.step.micro_batch);
    let mut selection = Selection::all(&ring, sizes);
    selection.recompute = keep.is_none();
    if !matches!(walk.purpose, Purpose::Train { .. }) {
        selection.frozen = (0..ring.blocks.len() as u32).map(BlockId).collect();
    }
    let mut schedule = match config.schedule.kind {
        ScheduleKind::Relay => schedule::relay(&ring, &selection)?,
        ScheduleKind::Resident => schedule::resident(&ring, &selection)?,
    };
    let mut carries = Carries::default();
    match walk.purpose {
        Purpose::Train { .. } | Purpose::Evaluate => {}
        Purpose::Tell => tell(&mut schedule, &mut carries, model),
        Purpose::Remember { past } => {
            tell(&mut schedule, &mut carries, model);
            remember(&mut schedule, &mut carries, model, dtype, [walk.positions, past]);
        }
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
