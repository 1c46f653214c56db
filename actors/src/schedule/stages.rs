//! The schedule of a pipeline: layers cut into stages, and their visits in the pipeline's order.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::generate::{Legs, WHOLE_STEP, legs};
use super::model::{RingLayer, RingModel, Selection};
use super::pipeline::{Action, Pipeline};
use super::{
    LayerId, MicroBatch, Phase, Place, Portion, Refusal, Schedule, Visit, VisitKind, runs,
};

/// The schedule of a pipeline. The model's layers are cut into stages of about as many parameters
/// each, a tile of the head being a layer, and a piece of a layer, too. So `T` stages that follow
/// each other may have the pieces of the same layers (Megatron's PTD-P). Answers of the whole step
/// come behind the last micro-batch.
///
/// # Errors
/// As [`relay`](super::relay); or the pipeline has more stages than there are layers, or does not
/// take every micro-batch once through each stage, or cannot end.
pub fn pipeline(
    model: &RingModel,
    selection: &Selection,
    pipeline: &Pipeline,
) -> Result<Schedule, Refusal> {
    runs::refuse(selection, "a pipeline")?;
    let (mut schedule, legs) = legs(model, selection)?;
    pipeline.check(schedule.micro_batches.len() as MicroBatch, !legs.backward.is_empty())?;
    let places = pipeline.places()?;
    let stages = stages(model, &schedule, &legs, places.len())?;
    let is_gather = |visit: &&Visit| visit.kind == VisitKind::Gather;
    let is_scatter = |visit: &&Visit| visit.kind == VisitKind::Scatter;
    schedule.visits.extend(legs.forward.iter().filter(is_gather).cloned());
    let all = schedule.micro_batches.len() as MicroBatch;
    for (device, Action { stage, phase, micro_batch }) in pipeline.in_order()? {
        let visits = stages[stage as usize].of(phase);
        schedule.visits.extend(visits.iter().filter_map(|visit| {
            let place = if visit.on_device() { Place::Device(device) } else { visit.place };
            let micro_batches = match visit.kind.is_of_step() {
                true => (micro_batch + 1 == all).then_some(0..all)?,
                false => micro_batch..micro_batch + 1,
            };
            Some(Visit { place, ..visit.of_micro_batches(micro_batches) })
        }));
    }
    let mut backward = schedule.visits.iter().skip_while(|visit| visit.phase != Phase::Backward);
    if backward.any(|visit| visit.kind.is_of_step()) {
        return Err(Refusal::of(WHOLE_STEP));
    }
    schedule.visits.extend(legs.backward.iter().filter(is_scatter).cloned());
    Ok(schedule)
}

/// The visits of one stage.
#[derive(Default)]
struct Stage {
    forward: Vec<Visit>,
    backward: Vec<Visit>,
}

impl Stage {
    fn of(&self, phase: Phase) -> &[Visit] {
        if phase.is_backward() { &self.backward } else { &self.forward }
    }
}

/// Cuts legs into stages: by the model's layers, so that a layer keeps its stage when others are
/// left out; or, of layers in another order, by those that are visited. A loss follows the visit
/// that completes its statistics.
fn stages(
    model: &RingModel,
    schedule: &Schedule,
    legs: &Legs,
    count: usize,
) -> Result<Vec<Stage>, Refusal> {
    let mut stops: Vec<(LayerId, Option<u16>)> = Vec::new(); // in the order of the forward pass
    let forward = legs.forward.iter().filter(|visit| visit.on_device());
    // The last tile may have no visit in forward; backward begins with it.
    let backward = legs.backward.iter().filter(|visit| visit.on_device()).rev();
    for visit in forward.chain(backward) {
        if !stops.contains(&visit.stop()) {
            stops.push(visit.stop());
        }
    }
    if stops.is_sorted() {
        let of_devices = (0..).zip(&model.layers);
        let of_devices = of_devices.filter(|(_, layer)| layer.on_device());
        stops = of_devices.flat_map(|(id, layer)| stops_of(LayerId(id), layer)).collect();
    }
    if count > stops.len() {
        let has = stops.len();
        let reason = format!("{count} stages need as many layers; {has} are visited by devices");
        return Err(Refusal::of(reason));
    }
    let size = |&(id, piece): &(LayerId, Option<u16>)| {
        let steps = (0..).zip(&model.layers[id.0 as usize].steps);
        let own = steps.filter(|(number, step)| step.cut.map(|_| *number) == piece);
        let portions: BTreeSet<Portion> = own.flat_map(|(_, step)| step.portions()).collect();
        portions.into_iter().map(|portion| schedule.cut(portion).weight_bytes).sum()
    };
    let sizes: Vec<u64> = stops.iter().map(size).collect();
    let mut stage_of = BTreeMap::new();
    for (stage, Range { start, end }) in cuts(&sizes, count).into_iter().enumerate() {
        stage_of.extend(stops[start..end].iter().map(|&stop| (stop, stage)));
    }
    let mut latest = 0;
    let mut stage_of = |visit: &Visit| {
        // A visit of the host stands behind one of a device.
        latest = stage_of.get(&visit.stop()).copied().unwrap_or(latest);
        latest
    };
    let mut stages: Vec<Stage> = (0..count).map(|_| Stage::default()).collect();
    let has_stage = |visit: &&Visit| !matches!(visit.kind, VisitKind::Gather | VisitKind::Scatter);
    for visit in legs.forward.iter().filter(has_stage) {
        stages[stage_of(visit)].forward.push(visit.clone());
    }
    for visit in legs.backward.iter().filter(has_stage) {
        stages[stage_of(visit)].backward.push(visit.clone());
    }
    Ok(stages)
}

/// The least parts of a layer that a stage may have.
fn stops_of(id: LayerId, layer: &RingLayer) -> Vec<(LayerId, Option<u16>)> {
    if layer.steps.iter().all(|step| step.cut.is_none()) {
        return vec![(id, None)];
    }
    let steps = (0..).zip(&layer.steps);
    steps.map(|(number, step)| (id, step.cut.map(|_| number))).collect()
}

/// Cuts layers of these sizes into `count` stages of about the same size, each of at least one
/// layer: stage `s` (from 1) takes layers while the sum of all sizes so far is at most `s / count`
/// of the total.
fn cuts(sizes: &[u64], count: usize) -> Vec<Range<usize>> {
    let total: u128 = sizes.iter().map(|&size| u128::from(size)).sum();
    let mut cuts = Vec::with_capacity(count);
    let mut end = 0;
    let mut sum = 0_u128;
    for stage in 1..=count {
        let start = end;
        let most = sizes.len() - (count - stage); // the stages behind it have a layer each
        let is_within = |sum: u128| sum * count as u128 <= total * stage as u128;
        while end < most && (end == start || is_within(sum + u128::from(sizes[end]))) {
            sum += u128::from(sizes[end]);
            end += 1;
        }
        cuts.push(start..end);
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::cuts;

    #[test]
    fn stages_are_about_equal_and_none_is_empty() {
        assert_eq!(cuts(&[1; 8], 4), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(cuts(&[1; 5], 2), [0..2, 2..5]);
        // A stem, blocks, a final norm, and a head.
        assert_eq!(cuts(&[1, 10, 10, 10, 10, 1, 8], 2), [0..3, 3..7]);
        assert_eq!(cuts(&[100, 1, 1], 3), [0..1, 1..2, 2..3]);
        assert_eq!(cuts(&[1, 1, 100], 3), [0..1, 1..2, 2..3]);
        assert_eq!(cuts(&[0, 0, 0, 0], 2), [0..3, 3..4]);
    }
}
