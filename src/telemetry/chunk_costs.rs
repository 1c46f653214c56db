//! What each chunk of a long sequence costs beside the mean chunk: a later one attends to more
//! keys.

use std::collections::HashMap;

use l2l_actors::schedule::{LayerId, MicroBatch, Phase, Schedule, Visit};

use crate::models::Model;
use crate::plan::Plan;

/// FLOPs of the chunks of a longest sequence, divided by those of the mean chunk.
#[derive(Clone, Debug, Default)]
pub(super) struct ChunkCosts(HashMap<(u32, Phase), Vec<f64>>);

impl ChunkCosts {
    /// Of a step's schedule, all of whose sequences are the longest of the plan.
    pub(super) fn of(model: &Model, plan: &Plan, schedule: &Schedule) -> ChunkCosts {
        if schedule.runs.is_empty() {
            return ChunkCosts::default();
        }
        let positions = plan.batch.positions;
        let chunk = schedule.positions as usize;
        let chunks = || (0..positions).step_by(chunk).map(|at| at..positions.min(at + chunk));
        let mut costs = HashMap::new();
        for layer in 1..model.layers.len() {
            let save = plan.saves(LayerId(layer as u32));
            for phase in [Phase::Forward, Phase::Keys, Phase::Backward] {
                let flops = |of| model.visit_flops(layer, phase, [of], save);
                let mean = flops(0..positions) / chunks().count() as f64;
                // A layer without products has no FLOPs.
                let share = |of| if mean > 0.0 { flops(of) / mean } else { 1.0 };
                costs.insert((layer as u32, phase), chunks().map(share).collect());
            }
        }
        ChunkCosts(costs)
    }

    /// Of a micro-batch in a visit: 1 if it is no chunk.
    pub(super) fn share(&self, schedule: &Schedule, m: MicroBatch, visit: &Visit) -> f64 {
        let nth = schedule.run_of(m).map(|run| (m - run.start) as usize);
        let is_forward = visit.phase == Phase::Reference;
        let phase = if is_forward { Phase::Forward } else { visit.phase };
        let of_visit = self.0.get(&(visit.layer.0, phase));
        let share = nth.zip(of_visit).and_then(|(nth, shares)| shares.get(nth).copied());
        share.unwrap_or(1.0)
    }
}
