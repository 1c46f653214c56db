//! One micro-batch at one visit: the views of the visited layer's inputs and outputs, chunk by
//! chunk where sequences are long.

mod heads;
mod measured;

use std::collections::BTreeMap;

use l2l_actors::schedule::{BoundaryId, Phase, Role, Visit};

pub(crate) use self::measured::{Measured, workspace};
use crate::kernels::{BatchView, Cast, Kernels};
use crate::models::{
    Backward, BlockTensors, ChunkMemory, FirstPorts, Forward, Keys, KvCache, Layer, Model,
    ModelLayer, Port, PortViews, Save, SlotWeight, Turn, Walk,
};
use crate::tensor::{Dtype, Scratch, View};

/// The arguments of a visit for one micro-batch.
pub(crate) struct VisitArgs<'a> {
    /// The rows that the boundaries hold.
    pub(crate) batch: BatchView<'a>,
    /// The target of each row. Negative: it has no label.
    pub(crate) targets: &'a [i32],
    /// The dtype of weights and activations.
    pub(crate) dtype: Dtype,
    /// The slots of the visit's blocks, in its order.
    pub(crate) blocks: Vec<BlockViews>,
    /// False behind another micro-batch of the visit: the workspace still has the frozen weights
    /// that it dequantised.
    pub(crate) dequantises: bool,
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
    /// The rows of a chunk in the visit's boundaries.
    fn ports<'a>(&'a self, chunk: BatchView<'a>) -> PortViews<'a> {
        let VisitArgs { ref reads, ref writes, batch, dtype, .. } = *self;
        PortViews { reads, writes, held: batch, chunk, dtype }
    }

    /// The boundary of this role that the visit writes.
    pub(crate) fn written(&self, role: Role) -> Option<View> {
        self.ports(self.batch).written(role)
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
    scratch: Scratch<'static>,
    /// Views of the weights of the step's blocks, in the device's dtype.
    weights: Vec<View>,
    /// The weights that the layer dequantises when it needs them.
    stored: Vec<SlotWeight<'r>>,
    /// Views of the gradients of the weights that are trained.
    gradients: Vec<Option<View>>,
}

/// The rows that are computed at once: a chunk of a sequence, or the whole micro-batch.
struct Part<'p> {
    batch: BatchView<'p>,
    ports: PortViews<'p>,
    /// The place of saved activations, and which they are.
    saved: Option<(Save, View)>,
    chunk_state: ChunkMemory,
    /// True to add gradients to their accumulators; false to overwrite those.
    accumulate: bool,
    scratch: Scratch<'p>,
}

impl Part<'_> {
    /// The boundary of this role that the visit reads.
    fn read(&self, role: Role) -> View {
        given(self.ports.read(role))
    }
}

impl<'r> VisitRun<'r> {
    fn new(
        model: &'r Model,
        visit: &'r Visit,
        k: &'r dyn Kernels,
        args: &'r VisitArgs<'r>,
    ) -> VisitRun<'r> {
        let scratch = Scratch::new(args.workspace, args.dtype);
        let weights = Vec::new();
        let stored = Vec::new();
        let gradients = Vec::new();
        VisitRun { model, visit, k, args, scratch, weights, stored, gradients }
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
        let ready = |weight: SlotWeight<'_>| match self.args.dequantises {
            true => weight.ready(self.k, &self.scratch),
            false => weight.place(&self.scratch),
        };
        self.weights = weights.into_iter().map(ready).collect();
        let blocks = self.blocks();
        self.gradients =
            blocks.flat_map(|(tensors, views)| tensors.gradients(views.gradient)).collect();
        let most = self.model.shape.chunk_positions;
        let window = layer.stack().and_then(|layer| layer.window());
        let walk = Walk::new(&self.args.batch, layer.cuts(step), window, most);
        self.walk(layer, &walk);
        self.copy();
        self.scratch.peak()
    }

    /// Computes the chunks of the micro-batch, or all of it.
    fn walk(&self, layer: &ModelLayer, walk: &Walk<'_>) {
        let mut accumulate = self.args.accumulate;
        if self.visit.phase != Phase::Backward {
            for chunk in walk.forward() {
                let part = self.part(layer, walk, chunk, accumulate);
                match self.visit.phase {
                    Phase::Keys => self.keys(layer, &part),
                    _ => self.forward(layer, &part),
                }
            }
            return;
        }
        for (turn, chunk) in walk.backward() {
            let part = self.part(layer, walk, chunk, accumulate);
            match turn {
                Turn::Keys => self.keys(layer, &part),
                Turn::Backward => {
                    self.backward(layer, &part);
                    accumulate = true;
                }
            }
        }
    }

    fn part<'p>(
        &'p self,
        layer: &ModelLayer,
        walk: &Walk<'_>,
        batch: BatchView<'p>,
        accumulate: bool,
    ) -> Part<'p> {
        let VisitArgs { save, dtype, .. } = *self.args;
        let ports = self.args.ports(batch);
        let saved = layer.stack().and_then(|layer| {
            let step = self.visit.step.into();
            let len = |rows| layer.saved_len_of(step, rows, save, dtype);
            ports.saved(|| walk.saved(&batch, len))
        });
        let saved = saved.map(|view| (save, view));
        let chunk_state = ChunkMemory { memory: self.args.chunk_state, before: walk.before() };
        Part { batch, ports, saved, chunk_state, accumulate, scratch: self.scratch.nested() }
    }

    fn forward(&self, layer: &ModelLayer, part: &Part<'_>) {
        match layer {
            ModelLayer::Embedding => unreachable!("the embedding is visited on the host"),
            ModelLayer::Stack(layer) => self.layer_forward(&**layer, part),
            ModelLayer::Classes(classes) => self.classes_forward(classes, part),
            &ModelLayer::Head(tile) => self.tile_forward(tile, part),
        }
    }

    fn keys(&self, layer: &ModelLayer, part: &Part<'_>) {
        let layer = layer.stack().expect("layers of the stack alone attend to positions");
        let pass = Keys {
            batch: part.batch,
            step: self.visit.step.into(),
            weights: &self.weights,
            stored: &self.stored,
            x: part.read(self.first_ports().read),
            ports: part.ports,
            saved: part.saved,
            chunk_state: part.chunk_state,
            scratch: &part.scratch,
        };
        layer.keys(self.k, &pass);
    }

    fn backward(&self, layer: &ModelLayer, part: &Part<'_>) {
        match layer {
            ModelLayer::Embedding => unreachable!("the embedding is visited on the host"),
            ModelLayer::Stack(layer) => self.layer_backward(&**layer, part),
            ModelLayer::Classes(classes) => self.classes_backward(classes, part),
            &ModelLayer::Head(tile) => self.tile_backward(tile, part),
        }
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
    fn blocks(&self) -> impl Iterator<Item = (&'r BlockTensors, BlockViews)> + use<'r> {
        let model = self.model;
        let tensors = |portion| model.tensors_of(portion);
        self.visit.portions().map(tensors).zip(self.args.blocks.iter().copied())
    }

    /// The first boundaries that the visited step declares.
    fn first_ports(&self) -> FirstPorts {
        self.model.first_ports[self.visit.layer.0 as usize][usize::from(self.visit.step)]
    }

    fn layer_forward(&self, layer: &dyn Layer, part: &Part<'_>) {
        let Part { batch, ports, saved, chunk_state, ref scratch, .. } = *part;
        let first = self.first_ports();
        let kv_cache = ports.written(Role::NewKv).map(|new| {
            let cached = ports.read(Role::CachedKv).map(|view| view.with_columns(new.columns));
            KvCache { new, cached }
        });
        let pass = Forward {
            batch,
            step: self.visit.step.into(),
            weights: &self.weights,
            stored: &self.stored,
            x: part.read(first.read),
            y: given(ports.written(first.written)),
            ports,
            saved,
            kv_cache,
            chunk_state,
            scratch,
        };
        layer.forward(self.k, &pass);
    }

    fn layer_backward(&self, layer: &dyn Layer, part: &Part<'_>) {
        let Part { batch, ports, saved, chunk_state, accumulate, ref scratch } = *part;
        let FirstPorts { read, written } = self.first_ports();
        let gradient = |role| match role {
            Role::Own(number) => Role::OwnGradient(number),
            _ => Role::HiddenGradient,
        };
        let of_head = if matches!(written, Role::Hidden | Role::Partial) {
            ports.read(Role::HeadGradient)
        } else {
            None
        };
        let of_head = of_head.map(|dy| self.head_gradient_for(layer, dy, scratch));
        let pass = Backward {
            batch,
            step: self.visit.step.into(),
            weights: &self.weights,
            stored: &self.stored,
            gradients: &self.gradients,
            accumulate,
            x: part.read(read),
            saved,
            dy: given(of_head.or_else(|| ports.read(gradient(written)))),
            dx: ports.written(gradient(read)),
            ports,
            chunk_state,
            scratch,
        };
        layer.backward(self.k, &pass);
    }

    /// The gradient of the head's input, for the layer below the head. It is cast to the device's
    /// dtype, unless it has this dtype or the layer takes floats.
    fn head_gradient_for(&self, layer: &dyn Layer, dy: View, scratch: &Scratch<'_>) -> View {
        if dy.dtype == self.args.dtype || layer.takes_floats() {
            return dy;
        }
        let cast = scratch.take_like(dy);
        self.k.cast(&Cast { y: cast, x: dy });
        cast
    }
}
