//! What layers with experts measure, and the gradients of the losses that follow from it.

use std::ops::Range;

use l2l_actors::schedule::{BoundaryId, MicroBatch};

use super::HostLanes;
use super::visit::HostVisit;
use crate::models::Experts;
use crate::worker::balance::{Measures, Share};

impl HostLanes {
    fn experts(&self) -> &Experts {
        self.shared.model.shape.experts.as_ref().expect("layers with experts measure")
    }

    /// What the layers measured of these units: a row of numbers for each sequence. The rows of a
    /// sequence's chunks are added.
    fn measures(&self, at: &HostVisit<'_>, units: Range<MicroBatch>) -> Vec<Vec<f32>> {
        let width = self.experts().measured_width();
        let of_layer = |&boundary: &BoundaryId| {
            let mut all = Vec::new();
            for m in units.clone() {
                let measured = at.stashed(boundary, m);
                if at.state.positions(m).all(|positions| positions.start == 0) {
                    all.extend(measured);
                    continue;
                }
                let from = all.len() - width;
                all[from..].iter_mut().zip(measured).for_each(|(sum, chunk)| *sum += chunk);
            }
            all
        };
        at.visit.reads.iter().map(of_layer).collect()
    }

    /// Takes what the layers measured of a micro-batch, when the last of its units has come.
    pub(super) fn take_measures(&self, at: &HostVisit<'_>, m: MicroBatch) {
        let units = at.state.input.units.whole(m);
        if m + 1 < units.end {
            return;
        }
        let measures = self.measures(at, units);
        let measures: Vec<Measures<'_>> = measures.iter().map(Vec::as_slice).collect();
        let writers =
            at.visit.reads.iter().filter_map(|id| {
                at.schedule().visits.iter().find(|visit| visit.writes.contains(id))
            });
        let mut desk = at.state.routers.lock().expect("nothing panics inside");
        desk.layers = writers.map(|visit| visit.layer).collect();
        desk.add(&measures, self.experts().count);
    }

    /// Writes the gradients of the routers' losses for a micro-batch. Its chunk of a sequence gets
    /// the answer of the whole sequence.
    pub(super) fn answer(&self, at: &HostVisit<'_>, m: MicroBatch) {
        let experts = self.experts();
        let width = experts.count + 1;
        let writes = &at.visit.writes;
        let mut answers: Vec<&mut [f32]> =
            writes.iter().map(|&boundary| at.stashed_mut(boundary, m)).collect();
        let units = at.state.input.units.whole(m);
        let all = at.state.input.units.sequences_of(&units);
        let own = at.state.range(m).sequences;
        let batch = &at.state.input.batch;
        let rows: Vec<usize> = all.clone().map(|one| batch.length(one)).collect();
        let measures = self.measures(at, units.clone());
        let measures: Vec<Measures<'_>> = measures.iter().map(Vec::as_slice).collect();
        let rows_of_step = at.state.rows_of_step();
        let share = Share { experts, measures: &measures, rows: &rows, rows_of_step };
        let scale = at.state.input.loss_scale;
        // The lowest layers may not train: they measure, and get no answer.
        let unanswered = at.visit.reads.len() - writes.len();
        let mut desk = at.state.routers.lock().expect("nothing panics inside");
        let losses = share.losses(
            || desk.step_counts(),
            |layer, sequence, slopes| {
                let Some(answer) = layer.checked_sub(unanswered).map(|at| &mut answers[at]) else {
                    return;
                };
                let sequence = all.start + sequence;
                if own.contains(&sequence) {
                    let to = &mut answer[(sequence - own.start) * width..][..width];
                    to.iter_mut().zip(slopes).for_each(|(to, slope)| *to = (slope * scale) as f32);
                }
            },
        );
        desk.losses.insert(units.start, losses);
    }
}
