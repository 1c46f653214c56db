//! The workspace that visits need, measured by running them without memory.

use std::collections::BTreeSet;

use l2l_actors::schedule::{
    BlockId, BoundaryId, LayerId, Phase, RingModel, Schedule, Selection, Visit, relay,
};

use super::{BlockViews, VisitArgs, run};
use crate::kernels::{BatchMetadata, DropoutKey, Kernels, Rows};
use crate::models::{Model, Port, Save, chunk_state_len};
use crate::tensor::{Dtype, View};

/// The visits for which workspace is measured.
#[derive(Clone, Copy)]
pub(crate) struct Measured<'m> {
    pub(crate) model: &'m Model,
    pub(crate) dtype: Dtype,
    /// The activations that are saved for the backward pass.
    pub(crate) save: Option<Save>,
    /// The layers that save all activations, and keep them on the device.
    pub(crate) kept: &'m BTreeSet<LayerId>,
    /// Whether there are backward passes.
    pub(crate) trains: bool,
    /// Whether gradients may pass layers that are not trained.
    pub(crate) freezes: bool,
}

/// The most floats of workspace that a visit needs for a micro-batch of sequences of these sizes.
/// The longest sequence that is not cut into chunks may need more than a longer one, so both are
/// measured. `kernels` have no memory.
pub(crate) fn workspace(kernels: &dyn Kernels, measured: Measured<'_>, rows: Rows) -> usize {
    let chunk_positions = measured.model.shape.chunk_positions;
    let positions = [rows.positions, rows.positions.min(chunk_positions)];
    let needs = positions.map(|positions| measured.workspace(kernels, Rows { positions, ..rows }));
    needs[0].max(needs[1])
}

impl Measured<'_> {
    fn workspace(self, kernels: &dyn Kernels, rows: Rows) -> usize {
        let Measured { model, dtype, save, kept, .. } = self;
        let context = model.context(rows.positions, dtype, save);
        let mut ring = model.for_ring_keeping(&context, kept);
        // Every layer is measured in both phases, whatever a step trains.
        ring.blocks.iter_mut().for_each(|block| block.frozen = false);
        let training = schedule_of(&ring, rows.sequences, false);
        // An evaluation saves nothing, whatever training saves.
        let evaluation = schedule_of(&ring, rows.sequences, true);
        let forward = evaluation.device_visits().map(|visit| (&evaluation, visit));
        let backward = training.device_visits().map(|visit| (&training, visit));
        let backward = backward.filter(|(_, visit)| visit.phase == Phase::Backward && self.trains);
        let needs = forward.chain(backward).flat_map(|(schedule, visit)| {
            self.variants(schedule, visit).map(move |(visit, is_trained)| {
                self.visit(kernels, schedule, &visit, is_trained, rows)
            })
        });
        needs.max().unwrap_or(0)
    }

    /// The variants of a visit in different steps: it may hand a gradient on or not, and its blocks
    /// may be trained or not.
    fn variants(
        self,
        schedule: &Schedule,
        visit: &Visit,
    ) -> impl Iterator<Item = (Visit, bool)> + use<> {
        let is_backward = visit.phase == Phase::Backward;
        let layer = self.model.layers[visit.layer.0 as usize].stack();
        let is_optional = layer.is_some_and(|layer| layer.is_optional());
        let passed = (is_backward && self.freezes && is_optional).then_some(false);
        let is_last = is_backward && self.ends_above_embedding();
        let ends = is_last.then(|| {
            let mut lowest = visit.clone();
            lowest.writes.retain(|id| !schedule.boundary(*id).role.is_gradient());
            lowest
        });
        let visits: Vec<Visit> = [visit.clone()].into_iter().chain(ends).collect();
        visits.into_iter().flat_map(move |visit| {
            [true].into_iter().chain(passed).map(move |is_trained| (visit.clone(), is_trained))
        })
    }

    /// Whether the backward pass may end above the embedding, at a layer that hands no gradient on.
    fn ends_above_embedding(self) -> bool {
        self.model.blocks_of(0).all(|block| block.trained().is_empty())
    }

    /// Floats of workspace that one visit needs. All views of the visit lie apart.
    fn visit(
        self,
        kernels: &dyn Kernels,
        schedule: &Schedule,
        visit: &Visit,
        is_trained: bool,
        rows: Rows,
    ) -> usize {
        let Measured { model, dtype, save, .. } = self;
        let starts = rows.starts();
        let kinds = vec![0; rows.count()];
        let targets = vec![0; rows.count()];
        let batch = BatchMetadata {
            starts: &starts,
            kinds: &kinds,
            documents: &[],
            cached: &[],
            dropout_key: self.trains.then_some(DropoutKey { seed: 0, step: 0, first_sequence: 0 }),
        };
        let backward = visit.phase == Phase::Backward;
        let mut at = 0;
        let mut place = |len: usize| {
            at += len;
            View::floats(at - len, len)
        };
        let blocks = visit.portions().map(|portion| {
            let tensors = model.tensors_of(portion);
            let trained = tensors.trained_len();
            let has_gradient = backward && is_trained && trained > 0;
            BlockViews {
                weights: place(tensors.published_len(dtype)),
                gradient: has_gradient.then(|| place(trained)),
            }
        });
        let blocks = blocks.collect();
        let sequences = rows.sequences as u64;
        let tokens = rows.count() as u64;
        let mut ports = |ids: &mut dyn Iterator<Item = BoundaryId>| -> Vec<Port> {
            let port = |id| {
                let boundary = *schedule.boundary(id);
                let floats = boundary.bytes(sequences, tokens) as usize / Dtype::F32.size();
                Port { boundary, view: place(floats) }
            };
            ids.map(port).collect()
        };
        let reads = ports(&mut visit.all_reads());
        let writes = ports(&mut visit.writes.iter().chain(&visit.keeps).copied());
        let copies = ports(&mut visit.copies.iter().map(|copied| copied.to));
        let copies = copies.into_iter().map(|port| port.view).collect();
        let layer = model.layers[visit.layer.0 as usize].stack();
        let most = model.shape.chunk_positions;
        let chunk_state = |layer| chunk_state_len(layer, [rows.positions, most], backward, dtype);
        let chunk_state = layer.map_or(0, chunk_state);
        let args = VisitArgs {
            batch: batch.view(),
            targets: &targets,
            dtype,
            blocks,
            dequantises: true,
            accumulate: false,
            reads,
            writes,
            copies,
            scale: 1.0,
            save: save.unwrap_or(Save::All),
            chunk_state: place(chunk_state),
            workspace: place(usize::MAX / 4),
        };
        run(model, visit, kernels, &args)
    }
}

/// A step of one micro-batch.
fn schedule_of(ring: &RingModel, sequences: usize, is_frozen: bool) -> Schedule {
    let mut selection = Selection::all(ring, vec![sequences as u32]);
    if is_frozen {
        selection.frozen = (0..ring.blocks.len() as u32).map(BlockId).collect();
    }
    relay(ring, &selection).expect("a model's layers declare steps that fit together")
}
