//! A model: its layers in forward order, its blocks, and its description for the ring.

use std::collections::{BTreeMap, BTreeSet};

use l2l_actors::schedule::{
    Block as BlockSize, BlockId, Boundary, Input, LayerId, RingLayer, RingModel, RingObjective,
    RingStep, Role, VisitKind,
};

use super::adapters::Adapters;
use super::block::TransformerBlock;
use super::block_inputs::InputProjection;
use super::block_tensors::BlockTensors;
use super::classes::Classes;
use super::dense::DenseLayer;
use super::ends::{Final, Stem};
use super::families::Names;
use super::layer::{Cuts, Layer, Save, Tensor, block_len, tensors_of_blocks};
use super::portions::PortionTensors;
use super::ports::{FirstPorts, LayerStep, StepContext};
use super::projection::EmbeddingProjection;
use super::shape::Shape;
use super::tables::{TableTile, Tile, tables, tiles};
use super::walk;
use crate::error::Error;
use crate::kernels::{CrossEntropy, Loss};
use crate::objectives::Objective;
use crate::tensor::Dtype;

/// A layer of the model, as the ring visits it.
pub enum ModelLayer {
    /// The embedding, on the host.
    Embedding,
    /// A layer of the stack.
    Stack(Box<dyn Layer>),
    /// A tile of the head.
    Head(Tile),
    /// A head of classes.
    Classes(Box<Classes>),
}

impl ModelLayer {
    /// The layer, if it is one of the stack.
    pub fn stack(&self) -> Option<&dyn Layer> {
        match self {
            ModelLayer::Stack(layer) => Some(&**layer),
            ModelLayer::Embedding | ModelLayer::Head(_) | ModelLayer::Classes(_) => None,
        }
    }

    /// How a step computes sequences of more than a chunk.
    pub fn cuts(&self, step: usize) -> Cuts {
        match self {
            ModelLayer::Stack(layer) => layer.cuts(step),
            ModelLayer::Classes(classes) => classes.cuts(),
            ModelLayer::Embedding | ModelLayer::Head(_) => Cuts::ByPosition,
        }
    }

    /// True for a layer that devices compute: the embedding is computed by the host.
    pub fn is_on_device(&self) -> bool {
        !matches!(self, ModelLayer::Embedding)
    }

    /// True for a tile of the head, and for a head of classes.
    pub fn is_head(&self) -> bool {
        matches!(self, ModelLayer::Head(_) | ModelLayer::Classes(_))
    }

    /// What the layer is, in a word for reports.
    pub fn name(&self) -> &'static str {
        match self {
            ModelLayer::Embedding => "embedding",
            ModelLayer::Stack(_) => "stack",
            ModelLayer::Head(_) => "head",
            ModelLayer::Classes(_) => "classes",
        }
    }
}

/// The largest layer of the stack has this many times the parameters of a light layer, or more. A
/// norm has hundreds of times fewer than a layer with products, and such layers are of like size:
/// any number between tells them apart.
const LIGHT: usize = 8;

/// A model. Its blocks are the embedding's tiles, those of the table of blocks' inputs if it has
/// one, the blocks of the stack in order, and the head's tiles unless they are tied to the
/// embedding's.
pub struct Model {
    /// The sizes of the model.
    pub shape: Shape,
    /// The layers in forward order, as the ring visits them.
    pub layers: Vec<ModelLayer>,
    /// The blocks of each layer.
    pub layer_blocks: Vec<Vec<BlockId>>,
    /// The tensors of each block.
    pub blocks: Vec<BlockTensors>,
    /// The portions of each block that is cut; of others, none.
    pub(super) portions: Vec<Vec<PortionTensors>>,
    /// Tiles of the vocabulary.
    pub tiles: Vec<Tile>,
    /// The blocks of the embedding, which are the model's first.
    pub(crate) tables: Vec<TableTile>,
    /// The first boundaries of each layer's steps.
    pub(crate) first_ports: Vec<Vec<FirstPorts>>,
    /// The loss of a labelled position.
    pub loss: Box<dyn Loss>,
    /// The objective of a step; `None`: the mean of `loss` over all labelled positions.
    pub objective: Option<Box<dyn Objective>>,
    /// ε of [label smoothing](crate::kernels::Smoothing) in training.
    pub label_smoothing: f32,
}

/// Bytes of a logit.
const FLOAT: usize = size_of::<f32>();

impl Model {
    /// A model of this shape.
    pub fn new(shape: Shape) -> Model {
        let stack = Model::stack_of(shape, &|_| None);
        let elements = Model::tile_elements(shape, &|_| None);
        Model::with_tiles(shape, stack, None, elements)
    }

    /// Elements of a tile of the vocabulary: as many as the largest block has. Of blocks in slices,
    /// those of the smallest pieces that there may be: tiles, and so sums over them, do not depend
    /// on the number of pieces.
    pub(super) fn tile_elements(
        shape: Shape,
        adapters: &dyn Fn(Vec<String>) -> Option<Adapters>,
    ) -> usize {
        let shape = Shape { pieces: shape.slices, ..shape };
        largest_piece(&Model::stack_of(shape, adapters))
    }

    /// The layers between the embedding and the head of a shape. `adapters` gives the adapters of
    /// a layer with these modules.
    pub(super) fn stack_of(
        shape: Shape,
        adapters: &dyn Fn(Vec<String>) -> Option<Adapters>,
    ) -> Vec<Box<dyn Layer>> {
        let mut stack: Vec<Box<dyn Layer>> = Vec::new();
        if Stem::is_in(&shape) {
            let hidden = shape.embedding_width();
            stack.push(Box::new(Stem { index: 1, shape: Shape { hidden, ..shape } }));
        }
        if let Some(projection) = EmbeddingProjection::of(shape) {
            let (module, ..) = projection.module();
            let adapters = adapters(vec![module]);
            stack.push(Box::new(EmbeddingProjection { adapters, ..projection }));
        }
        if let Some(inputs) = InputProjection::of(shape) {
            let (module, ..) = inputs.module();
            let adapters = adapters(vec![module]);
            stack.push(Box::new(InputProjection { adapters, ..inputs }));
        }
        for number in 0..shape.layers {
            let block = TransformerBlock::new(2 + number as u32, number, shape);
            let modules = block.linear_modules().into_iter().map(|(name, ..)| name).collect();
            stack.push(Box::new(TransformerBlock { adapters: adapters(modules), ..block }));
        }
        for end in Final::all_of(shape) {
            let adapters = adapters(end.module().into_iter().collect());
            stack.push(Box::new(Final { adapters, ..end }));
        }
        if let Some(dense) = DenseLayer::of(shape) {
            stack.push(Box::new(dense));
        }
        stack
    }

    /// A model of these layers, between an embedding and a head of this shape's vocabulary and
    /// width. Each layer with dropout must have an index of its own, for its masks. Index 0 belongs
    /// to the head of classes.
    pub fn of(shape: Shape, stack: Vec<Box<dyn Layer>>) -> Model {
        let largest = largest_block(&stack);
        Model::with_tiles(shape, stack, None, largest)
    }

    /// A model of these layers, whose vocabulary tiles have up to `tile_elements` elements.
    /// `adapters` are those of a head of classes.
    pub(super) fn with_tiles(
        shape: Shape,
        stack: Vec<Box<dyn Layer>>,
        adapters: Option<Adapters>,
        tile_elements: usize,
    ) -> Model {
        let tiles = tiles([shape.vocabulary, shape.embedding_width()], tile_elements);
        let tables = tables(&shape, &tiles, tile_elements);
        let mut blocks: Vec<BlockTensors> =
            tables.iter().map(|one| one.tensors(&shape).into()).collect();
        let mut layers = vec![ModelLayer::Embedding];
        let mut layer_blocks = vec![(0..tables.len() as u32).map(BlockId).collect::<Vec<_>>()];
        for layer in stack {
            let first = blocks.len() as u32;
            blocks.extend(tensors_of_blocks(&*layer).into_iter().map(BlockTensors::from));
            layer_blocks.push((first..blocks.len() as u32).map(BlockId).collect());
            layers.push(ModelLayer::Stack(layer));
        }
        if !shape.scores_vocabulary() && !shape.embeds() {
            let classes = Classes { shape, adapters };
            layer_blocks.push(vec![BlockId(blocks.len() as u32)]);
            blocks.push(classes.tensors().into());
            layers.push(ModelLayer::Classes(Box::new(classes)));
        }
        for (index, tile) in tiles.iter().enumerate().filter(|_| shape.scores_vocabulary()) {
            layers.push(ModelLayer::Head(*tile));
            if shape.tied {
                layer_blocks.push(vec![BlockId(index as u32)]);
            } else {
                layer_blocks.push(vec![BlockId(blocks.len() as u32)]);
                blocks.push(tile.tensors(shape.names.head, &shape, true).into());
            }
        }
        let context = StepContext::new(&shape, 1, Dtype::F32, None);
        let first_ports = |layer: &ModelLayer| {
            let steps = layer.stack().map_or_else(Vec::new, |layer| layer.steps(&context));
            steps.iter().map(LayerStep::first_ports).collect()
        };
        let first_ports = layers.iter().map(first_ports).collect();
        let loss = Box::new(CrossEntropy);
        let objective = None;
        let label_smoothing = 0.0;
        let portions = Vec::new();
        let mut model = Model {
            shape,
            layers,
            layer_blocks,
            blocks,
            portions,
            tiles,
            tables,
            first_ports,
            loss,
            objective,
            label_smoothing,
        };
        model.list_portions();
        model
    }

    /// The trained tensors of a block whose gradient a device computes. There are none in a tile of
    /// the embedding alone: the host computes its gradient, row by row.
    pub(crate) fn computed_gradient(&self, id: BlockId) -> &[Tensor] {
        let mut visited = self.layers.iter().zip(&self.layer_blocks);
        let is_computed =
            visited.any(|(layer, blocks)| layer.is_on_device() && blocks.contains(&id));
        if is_computed { self.blocks[id.0 as usize].trained() } else { &[] }
    }

    /// True if the chunks of a long sequence can be visited one by one: a token's choice of experts
    /// must not depend on those of later chunks.
    pub fn can_be_cut(&self) -> bool {
        let is_cut = |(layer, steps): (&ModelLayer, &Vec<FirstPorts>)| {
            (0..steps.len()).all(|step| layer.cuts(step) != Cuts::Never)
        };
        let drops = self.shape.experts.is_some_and(|experts| experts.balance.drops());
        !drops && self.layers.iter().zip(&self.first_ports).all(is_cut)
    }

    /// The context of a training step on sequences of up to `positions` tokens.
    pub fn context(&self, positions: usize, dtype: Dtype, save: Option<Save>) -> StepContext {
        StepContext::new(&self.shape, positions, dtype, save)
    }

    /// The model as the ring schedules it: its blocks, and the steps that its layers declare. The
    /// plan adds the optimizer states of blocks.
    pub fn for_ring(&self, context: &StepContext) -> RingModel {
        self.for_ring_keeping(context, &BTreeSet::new())
    }

    /// The same, where these layers save all their activations and keep them on the device.
    pub(crate) fn for_ring_keeping(
        &self,
        context: &StepContext,
        kept: &BTreeSet<LayerId>,
    ) -> RingModel {
        let block = |tensors: &BlockTensors| {
            let gradient_bytes = tensors.gradient_bytes();
            BlockSize {
                weight_bytes: (tensors.published_len(context.dtype) * size_of::<f32>()) as u64,
                gradient_bytes,
                download_bytes: gradient_bytes,
                reduce_scatter_bytes: gradient_bytes,
                encoded: false,
                master_bytes: (tensors.host_len() * size_of::<f32>()) as u64,
                state_bytes: 0,
                older_bytes: 0,
                region_bytes: gradient_bytes,
                staged: false,
                frozen: tensors.trained().is_empty() && !tensors.is_empty(),
            }
        };
        let layers = (0..).zip(&self.layers).zip(&self.layer_blocks);
        let layers = layers.map(|((number, layer), blocks)| {
            let keeps = kept.contains(&LayerId(number));
            let save = if keeps { Some(Save::All) } else { context.save };
            let context = &StepContext { save, ..*context };
            let kind = match layer {
                ModelLayer::Embedding => VisitKind::Gather,
                ModelLayer::Stack(_) => VisitKind::Layer,
                ModelLayer::Head(_) | ModelLayer::Classes(_) => VisitKind::Tile,
            };
            let window = layer.stack().and_then(|layer| layer.window());
            let steps = self.steps(layer, blocks, context).into_iter().enumerate();
            let steps = steps.map(|(number, step)| {
                let LayerStep { blocks: needs, cut, chosen_by, reads, writes, saves, asks } = step;
                let needs = needs.into_iter().map(|index| blocks[index]).collect();
                let most = self.shape.chunk_positions;
                let reach = walk::reach(layer.cuts(number), window, most);
                RingStep { kind, needs, cut, chosen_by, reads, writes, saves, keeps, reach, asks }
            });
            RingLayer { steps: steps.collect() }
        });
        RingModel {
            blocks: self.blocks.iter().map(block).collect(),
            cuts: self.cuts(context.dtype),
            layers: layers.collect(),
            positions: context.positions as u32,
            answers_step: self.shape.experts.is_some_and(|one| one.balance.is_of_step()),
            // Without a head there is no other loss.
            objective: self.embedding_gradient().map(Some).map(|gradient| RingObjective {
                of_step: false,
                gradient,
                reference: None,
            }),
        }
    }

    /// What each step of each layer writes to the KV cache, if it does.
    pub(crate) fn new_kv(&self, dtype: Dtype) -> Vec<Vec<Option<Boundary>>> {
        let context = StepContext { cached: Some(0), ..self.context(1, dtype, None) };
        let of_layer = |layer: &ModelLayer| {
            let steps = layer.stack().map_or_else(Vec::new, |layer| layer.steps(&context));
            let is_kv = |boundary: &&Boundary| boundary.role == Role::NewKv;
            steps.iter().map(|step| step.writes.iter().find(is_kv).copied()).collect()
        };
        self.layers.iter().map(of_layer).collect()
    }

    fn steps(
        &self,
        layer: &ModelLayer,
        blocks: &[BlockId],
        context: &StepContext,
    ) -> Vec<LayerStep> {
        let blocks = (0..blocks.len()).collect();
        let statistics = context.statistics(self.shape.head);
        let logits = match layer {
            ModelLayer::Stack(layer) => return layer.steps(context),
            ModelLayer::Embedding => {
                let mut writes = vec![context.embedding];
                writes.extend(Some(statistics).filter(|_| !self.shape.embeds()));
                let of_host = LayerStep::on_hidden(context, blocks);
                return vec![LayerStep { reads: Vec::new(), writes, ..of_host }];
            }
            ModelLayer::Head(tile) => Boundary::of_sequences(Role::Logits, tile.rows, FLOAT),
            ModelLayer::Classes(classes) => classes.logits(),
        };
        let known = Input::new(statistics, None);
        let reads = vec![context.head_input(self.head_gradient(context.dtype)), known];
        let logits = context.scores.then_some(logits);
        let writes = [statistics].into_iter().chain(logits).collect();
        vec![LayerStep { reads, writes, ..LayerStep::on_hidden(context, blocks) }]
    }

    /// The dtype of the head's gradient. Tiles of the vocabulary add to it in floats, and the host
    /// writes floats where there is no head.
    pub fn head_gradient(&self, dtype: Dtype) -> Dtype {
        if self.shape.head.labels().is_none() { Dtype::F32 } else { dtype }
    }

    /// The gradient of the last hidden states that an objective on embeddings writes. `None`: the
    /// model has a head.
    pub(crate) fn embedding_gradient(&self) -> Option<Boundary> {
        let gradient = Boundary::of_tokens(Role::HeadGradient, self.shape.hidden, FLOAT);
        self.shape.embeds().then_some(gradient)
    }

    /// Layers of the stack that compute little beside the others, such as the last norm: copies of
    /// their inputs and outputs take longer.
    pub(crate) fn light_layers(&self) -> Vec<LayerId> {
        let stack = (0..self.layers.len()).filter(|&layer| self.layers[layer].stack().is_some());
        let len = |layer: usize| self.blocks_of(layer).map(BlockTensors::len).sum::<usize>();
        let most = stack.clone().map(len).max().unwrap_or(0);
        stack.filter(|&layer| LIGHT * len(layer) <= most).map(|id| LayerId(id as u32)).collect()
    }

    pub(crate) fn blocks_of(&self, layer: usize) -> impl Iterator<Item = &BlockTensors> {
        self.layer_blocks[layer].iter().map(|id| &self.blocks[id.0 as usize])
    }

    /// Whether any of these blocks has a tensor that is trained.
    pub(super) fn trains(&self, blocks: &[BlockId]) -> bool {
        blocks.iter().any(|block| !self.blocks[block.0 as usize].trained().is_empty())
    }

    /// Refuses tensors that a checkpoint could not distinguish, and layers whose dropout masks
    /// would be the same.
    ///
    /// # Errors
    /// Two tensors have one name, or one has no sizes; two layers have one index.
    pub(crate) fn check_names(&self) -> Result<(), Error> {
        let mut indices = BTreeMap::from([(0, "the head of classes")]);
        for layer in self.layers.iter().filter_map(ModelLayer::stack) {
            let Some(index) = layer.dropout_index() else { continue };
            if let Some(other) = indices.insert(index, "another layer") {
                let what = format_args!(
                    "its dropout has index {index}, which {other} has: give each layer its own, \
                     from 1, or they drop the same elements"
                );
                let name = layer.tensors().first().map_or_else(String::new, |t| t.name.clone());
                return Err(Error::bad_model(format_args!("the layer of tensor {name}"), what));
            }
        }
        let mut met = BTreeSet::new();
        let Names { embedding, head, inputs, .. } = *self.shape.names;
        let tables = [embedding, head, inputs.table, &self.shape.head_bias()];
        for tensor in self.blocks.iter().flat_map(BlockTensors::iter) {
            let is_new = met.insert(&tensor.name)
                || tensor.stacked
                || tables.contains(&tensor.name.as_str());
            if !is_new || tensor.shape.is_empty() {
                let Tensor { name, shape, .. } = tensor;
                let what = "its name must be its own, and it must have sizes";
                return Err(Error::bad_model(format_args!("tensor {name} of {shape:?}"), what));
            }
        }
        Ok(())
    }

    /// Sequences of a record: 1 without an objective.
    pub(crate) fn sequences_of_record(&self) -> usize {
        self.objective.as_ref().map_or(1, |objective| objective.sequences())
    }

    /// The sequences of so many records.
    pub(crate) fn sequences_of(&self, records: usize) -> usize {
        records.saturating_mul(self.sequences_of_record())
    }

    /// The number of parameters that are trained.
    pub fn trained_parameters(&self) -> usize {
        self.blocks.iter().flat_map(BlockTensors::trained).map(Tensor::len).sum()
    }

    /// The number of parameters. Tied parameters count once.
    pub fn parameters(&self) -> usize {
        self.blocks.iter().flat_map(BlockTensors::iter).map(Tensor::len).sum()
    }
}

/// Elements of the largest portion of these layers; of a layer that is visited whole, of its
/// largest block.
fn largest_piece(stack: &[Box<dyn Layer>]) -> usize {
    let of_layer = |layer: &dyn Layer| {
        let blocks = tensors_of_blocks(layer).into_iter().enumerate();
        let pieces = blocks.map(|(number, tensors)| {
            let block = BlockTensors::from(tensors);
            let portions = layer.portions(number).into_iter();
            let lens = portions.map(|portion| PortionTensors::of(&block, portion).tensors.len());
            lens.max().unwrap_or(block.len())
        });
        pieces.max().unwrap_or(0)
    };
    stack.iter().map(|layer| of_layer(&**layer)).max().unwrap_or(0)
}

/// Elements of the largest block of these layers.
fn largest_block(stack: &[Box<dyn Layer>]) -> usize {
    let blocks = stack.iter().flat_map(|layer| tensors_of_blocks(&**layer));
    blocks.map(|tensors| block_len(&tensors)).max().unwrap_or(0)
}
