//! What layers with experts measure, and the gradients of the losses that follow from it.

use l2l_actors::schedule::MicroBatch;

use super::HostLanes;
use super::visit::HostVisit;
use crate::models::Experts;
use crate::worker::balance::{Measures, Share};

impl HostLanes {
    fn experts(&self) -> &Experts {
        self.shared.model.shape.experts.as_ref().expect("layers with experts measure")
    }

    fn measures<'a>(&self, at: &HostVisit<'a>, m: MicroBatch) -> Vec<Measures<'a>> {
        at.visit.reads.iter().map(|&boundary| at.stashed(boundary, m)).collect()
    }

    /// Takes what the layers measured of a micro-batch.
    pub(super) fn take_measures(&self, at: &HostVisit<'_>, m: MicroBatch) {
        let measures = self.measures(at, m);
        let writers =
            at.visit.reads.iter().filter_map(|id| {
                at.schedule().visits.iter().find(|visit| visit.writes.contains(id))
            });
        let mut desk = at.state.routers.lock().expect("nothing panics inside");
        desk.layers = writers.map(|visit| visit.layer).collect();
        desk.add(&measures, self.experts().count);
    }

    /// Writes the gradients of the routers' losses for a micro-batch.
    pub(super) fn answer(&self, at: &HostVisit<'_>, m: MicroBatch) {
        let experts = self.experts();
        let width = experts.count + 1;
        let writes = &at.visit.writes;
        let mut answers: Vec<&mut [f32]> =
            writes.iter().map(|&boundary| at.stashed_mut(boundary, m)).collect();
        let rows: Vec<usize> = at.state.lengths(m).collect();
        let measures = self.measures(at, m);
        let rows_of_step = at.state.rows_of_step();
        let share = Share { experts, measures: &measures, rows: &rows, rows_of_step };
        let scale = at.state.input.loss_scale;
        // The lowest layers may not train: they measure, and get no answer.
        let unanswered = at.visit.reads.len() - writes.len();
        let mut desk = at.state.routers.lock().expect("nothing panics inside");
        let losses = share.losses(
            || desk.step_counts(),
            |layer, sequence, slopes| {
                if let Some(answer) = layer.checked_sub(unanswered).map(|at| &mut answers[at]) {
                    let to = &mut answer[sequence * width..][..width];
                    to.iter_mut().zip(slopes).for_each(|(to, slope)| *to = (slope * scale) as f32);
                }
            },
        );
        desk.losses.insert(m, losses);
    }
}
