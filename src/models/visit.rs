//! One micro-batch at one visit: the views of the visited layer's inputs and outputs.

use std::collections::{BTreeMap, BTreeSet};

use l2l_actors::schedule::{
    BlockId, BoundaryId, LayerId, Phase, RingModel, Role, Schedule, Selection, Visit, relay,
};

use crate::kernels::{
    BatchMetadata, BatchView, Cast, DropoutKey, Kernels, Logits, Rows, Score, ScoreBackward,
    Smoothing,
};
use crate::models::{
    Backward, BlockTensors, Classes, ClassesBackward, ClassesForward, FirstPorts, Forward, KvCache,
    Layer, Model, ModelLayer, Port, PortViews, Save, SlotWeight, Tile,
};
use crate::tensor::{Dtype, Scratch, View};

/// The arguments of a visit for one micro-batch.
pub(crate) struct VisitArgs<'a> {
    pub(crate) batch: BatchView<'a>,
    /// Positions of the micro-batch that have a label.
    pub(crate) labelled: usize,
    /// The dtype of weights and activations.
    pub(crate) dtype: Dtype,
    /// The slots of the visit's blocks, in its order.
    pub(crate) blocks: Vec<BlockViews>,
    /// True to add gradients to their accumulators; false to overwrite those.
    pub(crate) accumulate: bool,
    /// Boundaries that the visit reads and writes.
    pub(crate) reads: Vec<Port>,
    pub(crate) writes: Vec<Port>,
    /// The places of the visit's copies, in its order.
    pub(crate) copies: Vec<View>,
    /// 1 ÷ labelled positions of the step.
    pub(crate) scale: f32,
    /// The activations that are saved, if any are.
    pub(crate) save: Save,
    pub(crate) workspace: View,
    /// State that the chunks of a long sequence pass on.
    pub(crate) chunk_state: View,
}

/// The slots of a visit's block, in floats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockViews {
    pub(crate) weights: View,
    /// The accumulator, if the visit adds to the block's gradient.
    pub(crate) gradient: Option<View>,
}

impl VisitArgs<'_> {
    fn ports(&self) -> PortViews<'_> {
        PortViews {
            reads: &self.reads,
            writes: &self.writes,
            rows: self.batch.rows(),
            sequences: self.batch.sequences(),
            dtype: self.dtype,
        }
    }

    /// The boundary of this role that the visit writes.
    pub(crate) fn written(&self, role: Role) -> Option<View> {
        self.ports().written(role)
    }
}

/// A boundary that every visit of this kind has.
fn given(view: Option<View>) -> View {
    view.expect("the schedule gives each visit the boundaries of its kind")
}

/// Runs the visited step of a layer. Returns the most floats of workspace that were in use at once.
pub(crate) fn run(
    model: &Model,
    visit: &Visit,
    kernels: &dyn Kernels,
    args: &VisitArgs<'_>,
) -> usize {
    VisitRun::new(model, visit, kernels, args).run()
}

struct VisitRun<'r> {
    model: &'r Model,
    visit: &'r Visit,
    k: &'r dyn Kernels,
    args: &'r VisitArgs<'r>,
    ports: PortViews<'r>,
    scratch: Scratch<'static>,
    /// Views of the weights of the step's blocks, in the device's dtype.
    weights: Vec<View>,
    /// The weights that the layer dequantises when it needs them.
    stored: Vec<SlotWeight<'r>>,
}

impl<'r> VisitRun<'r> {
    fn new(
        model: &'r Model,
        visit: &'r Visit,
        k: &'r dyn Kernels,
        args: &'r VisitArgs<'r>,
    ) -> VisitRun<'r> {
        let scratch = Scratch::new(args.workspace, args.dtype);
        let ports = args.ports();
        let weights = Vec::new();
        let stored = Vec::new();
        VisitRun { model, visit, k, args, ports, scratch, weights, stored }
    }

    fn run(mut self) -> usize {
        let layer = &self.model.layers[self.visit.layer.0 as usize];
        let dtype = self.args.dtype;
        let blocks = self.blocks();
        let weights = blocks.flat_map(|(tensors, views)| tensors.weights(views.weights, dtype));
        let mut weights: Vec<SlotWeight<'_>> = weights.collect();
        let step = self.visit.step.into();
        let stored = layer.stack().map_or(0, |layer| layer.stored_weights(step));
        self.stored = weights.split_off(weights.len() - stored);
        let ready = |weight: SlotWeight<'_>| weight.ready(self.k, &self.scratch);
        self.weights = weights.into_iter().map(ready).collect();
        match (layer, self.visit.phase) {
            (ModelLayer::Embedding, _) => unreachable!("the embedding is visited on the host"),
            (_, Phase::Keys) => unreachable!("the compute lane refuses schedules with runs"),
            (ModelLayer::Stack(layer), Phase::Forward) => self.layer_forward(&**layer),
            (ModelLayer::Stack(layer), Phase::Backward) => self.layer_backward(&**layer),
            (ModelLayer::Classes(classes), Phase::Forward) => self.classes_forward(classes),
            (ModelLayer::Classes(classes), Phase::Backward) => self.classes_backward(classes),
            (&ModelLayer::Head(tile), Phase::Forward) => self.tile_forward(tile),
            (&ModelLayer::Head(tile), Phase::Backward) => self.tile_backward(tile),
        }
        self.copy();
        self.scratch.peak()
    }

    /// Copies what stays on the device for later visits.
    fn copy(&self) {
        let reads = self.visit.all_reads().zip(&self.args.reads);
        let writes = self.visit.writes.iter().copied().zip(&self.args.writes);
        let met: BTreeMap<BoundaryId, View> =
            reads.chain(writes).map(|(id, port)| (id, port.view)).collect();
        for (copied, &y) in self.visit.copies.iter().zip(&self.args.copies) {
            self.k.cast(&Cast { y, x: met[&copied.from] });
        }
    }

    /// The tensors of the step's blocks, and their slots.
    fn blocks(&self) -> impl Iterator<Item = (&'r BlockTensors, BlockViews)> {
        let tensors = |id: &BlockId| &self.model.blocks[id.0 as usize];
        self.visit.blocks.iter().map(tensors).zip(self.args.blocks.iter().copied())
    }

    /// The boundary of this role that the visit reads.
    fn read(&self, role: Role) -> View {
        given(self.ports.read(role))
    }

    /// The place for the gradient of a head's input: in workspace, if no layer below needs it.
    fn head_gradient(&self) -> View {
        self.ports.written(Role::HeadGradient).unwrap_or_else(|| {
            let dtype = self.model.head_gradient(self.args.dtype);
            let rows = self.args.batch.rows();
            let columns = self.model.shape.hidden;
            self.scratch.take_floats(1, dtype.floats(rows * columns)).hold(rows, columns, dtype)
        })
    }

    /// Views of the gradients of the weights that are trained.
    fn gradients(&self) -> Vec<Option<View>> {
        self.blocks().flat_map(|(tensors, views)| tensors.gradients(views.gradient)).collect()
    }

    /// The first boundaries that the visited step declares.
    fn first_ports(&self) -> FirstPorts {
        self.model.first_ports[self.visit.layer.0 as usize][usize::from(self.visit.step)]
    }

    fn layer_forward(&self, layer: &dyn Layer) {
        let VisitArgs { batch, save, chunk_state, .. } = *self.args;
        let ports = self.ports;
        let first = self.first_ports();
        let kv_cache = ports.written(Role::NewKv).map(|new| {
            let cached = ports.read(Role::CachedKv).map(|view| view.with_columns(new.columns));
            KvCache { new, cached }
        });
        let saved = ports.written(Role::SavedActivations);
        let pass = Forward {
            batch,
            step: self.visit.step.into(),
            weights: &self.weights,
            stored: &self.stored,
            x: given(ports.read(first.read)),
            y: given(ports.written(first.written)),
            ports,
            saved: saved.map(|view| (save, view)),
            kv_cache,
            chunk_state,
            scratch: &self.scratch,
        };
        layer.forward(self.k, &pass);
    }

    fn layer_backward(&self, layer: &dyn Layer) {
        let VisitArgs { batch, accumulate, save, chunk_state, .. } = *self.args;
        let ports = self.ports;
        let FirstPorts { read, written } = self.first_ports();
        let gradient = |role| match role {
            Role::Own(number) => Role::OwnGradient(number),
            _ => Role::HiddenGradient,
        };
        let of_head = if written == Role::Hidden { ports.read(Role::HeadGradient) } else { None };
        let of_head = of_head.map(|dy| self.head_gradient_for(layer, dy));
        let pass = Backward {
            batch,
            step: self.visit.step.into(),
            weights: &self.weights,
            stored: &self.stored,
            gradients: &self.gradients(),
            accumulate,
            x: given(ports.read(read)),
            saved: ports.read(Role::SavedActivations).map(|view| (save, view)),
            dy: given(of_head.or_else(|| ports.read(gradient(written)))),
            dx: ports.written(gradient(read)),
            ports,
            chunk_state,
            scratch: &self.scratch,
        };
        layer.backward(self.k, &pass);
    }

    /// The gradient of the head's input, for the layer below the head. It is cast to the device's
    /// dtype, unless it has this dtype or the layer takes floats.
    fn head_gradient_for(&self, layer: &dyn Layer, dy: View) -> View {
        if dy.dtype == self.args.dtype || layer.takes_floats() {
            return dy;
        }
        let cast = self.scratch.take_like(dy);
        self.k.cast(&Cast { y: cast, x: dy });
        cast
    }

    fn classes_forward(&self, classes: &Classes) {
        let pass = ClassesForward {
            out: given(self.ports.written(Role::Statistics)),
            scores: self.ports.written(Role::Logits),
            batch: self.args.batch,
            weights: &self.weights,
            statistics: self.read(Role::Statistics),
            h: self.read(Role::Hidden),
            smoothing: self.smoothing(classes.labels()),
        };
        classes.forward(self.k, &pass, &self.scratch);
    }

    /// The statistics over the whole head, for its backward. This visit or an earlier one completes
    /// them.
    fn complete_statistics(&self) -> View {
        let completed = self.ports.written(Role::Statistics);
        completed.unwrap_or_else(|| self.read(Role::Statistics))
    }

    fn classes_backward(&self, classes: &Classes) {
        if self.ports.written(Role::Statistics).is_some() {
            self.classes_forward(classes);
        }
        let pass = ClassesBackward {
            gradients: &self.gradients(),
            dh: self.head_gradient(),
            batch: self.args.batch,
            weights: &self.weights,
            statistics: self.complete_statistics(),
            h: self.read(Role::Hidden),
            smoothing: self.smoothing(classes.labels()),
            scale: self.args.scale,
            accumulate: self.args.accumulate,
        };
        classes.backward(self.k, &pass, &self.scratch);
    }

    /// The arguments of a tile's score.
    fn score(&self, tile: Tile) -> Score {
        Score {
            out: given(self.ports.written(Role::Statistics)),
            statistics: self.read(Role::Statistics),
            h: self.read(Role::Hidden),
            w: self.weights[0],
            bias: self.weights.get(1).copied(),
            first: tile.first,
            labelled: self.args.labelled,
            smoothing: self.smoothing(self.model.shape.vocabulary),
        }
    }

    /// Labels are smoothed in training alone.
    fn smoothing(&self, classes: usize) -> Smoothing {
        match self.model.label_smoothing {
            epsilon if epsilon > 0.0 && self.args.batch.trains() => Smoothing::of(epsilon, classes),
            _ => Smoothing::NONE,
        }
    }

    fn tile_forward(&self, tile: Tile) {
        let score = self.score(tile);
        let Score { out, statistics, h, w, bias, .. } = score;
        if let Some(y) = self.ports.written(Role::Logits) {
            self.k.logits(&Logits { y, statistics, h, w, bias }, &self.scratch);
            self.k.cast(&Cast { y: out, x: statistics });
        } else {
            self.k.score(&score, &self.scratch);
        }
    }

    fn tile_backward(&self, tile: Tile) {
        let VisitArgs { labelled, accumulate, scale, .. } = *self.args;
        let gradients = self.gradients();
        let op = ScoreBackward {
            dh: self.head_gradient(),
            dw: gradients[0],
            dbias: gradients.get(1).copied().flatten(),
            dh_before: self.ports.read(Role::HeadGradient),
            statistics: self.complete_statistics(),
            h: self.read(Role::Hidden),
            w: self.weights[0],
            bias: self.weights.get(1).copied(),
            loss: &*self.model.loss,
            smoothing: self.smoothing(self.model.shape.vocabulary),
            scale,
            first: tile.first,
            labelled,
            accumulate,
        };
        match self.ports.written(Role::Statistics) {
            Some(_) => self.k.score_and_backward(&self.score(tile), &op, &self.scratch),
            None => self.k.score_backward(&op, &self.scratch),
        }
    }
}

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
        let blocks = visit.blocks.iter().map(|id| {
            let tensors = &model.blocks[id.0 as usize];
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
        let chunk_state =
            layer.map_or(0, |layer| layer.chunk_state_len(rows.positions, backward, dtype));
        let args = VisitArgs {
            batch: batch.view(),
            labelled: rows.count(),
            dtype,
            blocks,
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
