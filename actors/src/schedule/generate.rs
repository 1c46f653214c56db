//! The two schedules: relay (layer-major) and resident (micro-batch-major).
//!
//! Both lay out the same legs, one per layer and phase, and differ in nothing but the loop order:
//! that is why their results can be compared bit for bit. The relay runs all micro-batches
//! through a leg before the next (Pudipeddi et al. 2020, algorithm 3); the resident schedule runs
//! one micro-batch through all legs before the next, as ordinary gradient accumulation does.
//!
//! A frozen step is one where nothing below it needs a gradient: backward legs stop at the lowest
//! layer with something to train, and a step with everything frozen is an evaluation.

use super::*;

/// What a layer is to the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Host visits: gather in forward, scatter in backward. At most one, the first.
    Embedding,
    /// Device visits from boundary to boundary: stem, transformer block, final norm.
    Stack,
    /// Device visits of one tile of the head. After the stack, all reading its last output.
    Tile,
}

/// One layer of a model, as the generators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// What it is.
    pub role: Role,
    /// Blocks it needs; a tied tile and the embedding name the same one.
    pub blocks: Vec<BlockId>,
    /// True for a stack layer that has intermediates to keep, when nothing is recomputed.
    pub keeps: bool,
}

/// A model without tensors: layers, blocks and the sizes of what passes between layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// All blocks.
    pub blocks: Vec<Block>,
    /// All layers, in forward order.
    pub layers: Vec<Layer>,
    /// Between stack layers: the residual stream and its gradient.
    pub hidden: Boundary,
    /// What a stack layer that keeps something keeps when it does not recompute.
    pub intermediates: Boundary,
    /// Running maximum, sum, target logit and labels of the head.
    pub statistics: Boundary,
    /// The f32 gradient that tiles accumulate for the stack's last output.
    pub head_gradient: Boundary,
}

/// What one step visits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Layers in forward order: any subset, any order of the stack.
    pub layers: Vec<LayerId>,
    /// Sequences in each micro-batch.
    pub micro_batches: Vec<u32>,
    /// Blocks that compute no gradient this step.
    pub frozen: Vec<BlockId>,
    /// False: stack layers keep intermediates in the stash instead of recomputing them.
    pub recompute: bool,
}

impl Selection {
    /// All layers, nothing frozen, recomputing.
    pub fn all(model: &Model, micro_batches: Vec<u32>) -> Selection {
        let layers = (0..model.layers.len() as u32).map(LayerId).collect();
        Selection { layers, micro_batches, frozen: Vec::new(), recompute: true }
    }
}

/// Layer-major: all micro-batches through a layer, then the next layer.
///
/// # Errors
/// The selection names an unknown layer or block, or its layers stand in an impossible order.
pub fn relay(model: &Model, selection: &Selection) -> Result<Schedule, Refusal> {
    let (mut schedule, legs) = legs(model, selection)?;
    schedule.visits = legs.forward.into_iter().chain(legs.backward).collect();
    Ok(schedule)
}

/// Micro-batch-major: one micro-batch through all layers and back, then the next.
///
/// # Errors
/// As [`relay`].
pub fn resident(model: &Model, selection: &Selection) -> Result<Schedule, Refusal> {
    let (mut schedule, legs) = legs(model, selection)?;
    let is_gather = |v: &Visit| !v.on_device() && !v.writes.is_empty();
    let is_scatter = |v: &Visit| !v.on_device() && v.phase == Phase::Backward;
    let (gather, forward): (Vec<_>, Vec<_>) = legs.forward.into_iter().partition(is_gather);
    let (scatter, backward): (Vec<_>, Vec<_>) = legs.backward.into_iter().partition(is_scatter);
    let turn: Vec<Visit> = forward.into_iter().chain(backward).collect();
    schedule.visits = gather;
    for m in 0..schedule.micro_batches.len() as MicroBatch {
        schedule.visits.extend(turn.iter().map(|v| Visit { micro_batches: m..m + 1, ..v.clone() }));
    }
    schedule.visits.extend(scatter);
    Ok(schedule)
}

/// One visit per layer and phase, each over all micro-batches, and the loss's.
struct Legs {
    forward: Vec<Visit>,
    backward: Vec<Visit>,
}

/// Hands out boundaries and visits while the legs are laid.
struct Layout {
    schedule: Schedule,
}

impl Layout {
    fn boundary(&mut self, boundary: Boundary) -> BoundaryId {
        self.schedule.boundaries.push(boundary);
        BoundaryId(self.schedule.boundaries.len() as u32 - 1)
    }

    fn visit(
        &self,
        (id, layer): (LayerId, &Layer),
        phase: Phase,
        place: Place,
        reads: &[Option<BoundaryId>],
        writes: &[Option<BoundaryId>],
    ) -> Visit {
        Visit {
            layer: id,
            phase,
            place,
            micro_batches: 0..self.schedule.micro_batches.len() as MicroBatch,
            needs: Needs::Known(layer.blocks.clone()),
            reads: reads.iter().flatten().copied().collect(),
            writes: writes.iter().flatten().copied().collect(),
        }
    }
}

fn legs(model: &Model, selection: &Selection) -> Result<(Schedule, Legs), Refusal> {
    use Phase::{Backward, Forward};
    const DEVICE: Place = Place::Device(0);

    let named = model.layers.iter().flat_map(|layer| &layer.blocks);
    if let Some(id) = named.clone().find(|id| id.0 as usize >= model.blocks.len()) {
        return Err(Refusal::of(format!("{id} of a layer is not in the model")));
    }
    let (embedding, chain, first_tile) = chain_of(model, selection)?;
    let mut blocks = model.blocks.clone();
    for id in &selection.frozen {
        let block = blocks.get_mut(id.0 as usize);
        block.ok_or_else(|| Refusal::of(format!("frozen {id} is not in the model")))?.frozen = true;
    }
    let schedule = Schedule {
        blocks,
        boundaries: Vec::new(),
        micro_batches: selection.micro_batches.clone(),
        visits: Vec::new(),
    };
    let mut layout = Layout { schedule };
    let trains = |layer: &Layer, layout: &Layout| {
        layer.blocks.iter().any(|&id| !layout.schedule.block(id).frozen)
    };
    // Backward reaches down to here; the embedding counts as one below the chain.
    let lowest = match embedding {
        Some((_, layer)) if trains(layer, &layout) => Some(0),
        _ => chain.iter().position(|(_, layer)| trains(layer, &layout)),
    };
    let scatters = embedding.is_some_and(|(_, layer)| trains(layer, &layout));

    // Forward.
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    let mut x = embedding.map(|_| layout.boundary(model.hidden));
    let mut statistics = embedding.map(|_| layout.boundary(model.statistics));
    if let Some(embedding) = embedding {
        forward.push(layout.visit(embedding, Forward, Place::Host, &[], &[x, statistics]));
    }
    let last = chain.len() - 1;
    let mut met = Vec::new(); // (input, intermediates) of every layer, for its backward
    for (at, &layer) in chain.iter().enumerate() {
        let is_tile = at >= first_tile;
        let ends_in_loss = is_tile || at == last;
        let back = lowest.is_some_and(|lowest| at >= lowest);
        let keeps = back && !selection.recompute && layer.1.keeps;
        let kept = keeps.then(|| layout.boundary(model.intermediates));
        met.push((x, kept));
        if ends_in_loss {
            let out = Some(layout.boundary(model.statistics));
            forward.push(layout.visit(layer, Forward, DEVICE, &[x, statistics], &[out, kept]));
            statistics = out;
        } else {
            let out = Some(layout.boundary(model.hidden));
            forward.push(layout.visit(layer, Forward, DEVICE, &[x], &[out, kept]));
            x = out;
        }
    }
    let loss = Layer { role: Role::Tile, blocks: Vec::new(), keeps: false };
    forward.push(layout.visit((chain[last].0, &loss), Forward, Place::Host, &[statistics], &[]));

    // Backward: the gradient that comes down into each layer, and the one it hands on.
    let mut dx = None;
    for (at, &layer) in chain.iter().enumerate().rev().take_while(|_| lowest.is_some()) {
        let lowest = lowest.unwrap_or(0);
        if at < lowest {
            break;
        }
        let hands_on = at > lowest || scatters;
        let shape = if at >= first_tile { model.head_gradient } else { model.hidden };
        let down = hands_on.then(|| layout.boundary(shape));
        let (x, kept) = met[at];
        let head = (at >= first_tile || at == last).then_some(statistics).flatten();
        backward.push(layout.visit(layer, Backward, DEVICE, &[x, kept, head, dx], &[down]));
        dx = down;
    }
    if let Some(embedding) = embedding.filter(|_| scatters) {
        backward.push(layout.visit(embedding, Backward, Place::Host, &[dx], &[]));
    }
    Ok((layout.schedule, Legs { forward, backward }))
}

type Chained<'m> = (LayerId, &'m Layer);

/// Splits the selected layers into embedding and device chain; says where its tiles begin.
fn chain_of<'m>(
    model: &'m Model,
    selection: &Selection,
) -> Result<(Option<Chained<'m>>, Vec<Chained<'m>>, usize), Refusal> {
    let mut chain = Vec::with_capacity(selection.layers.len());
    for &id in &selection.layers {
        let layer = model.layers.get(id.0 as usize);
        chain.push((id, layer.ok_or_else(|| Refusal::of(format!("{id} is not in the model")))?));
    }
    let starts = chain.first().is_some_and(|(_, layer)| layer.role == Role::Embedding);
    let embedding = starts.then(|| chain.remove(0));
    let first_tile = chain.iter().take_while(|(_, layer)| layer.role == Role::Stack).count();
    if chain[first_tile..].iter().any(|(_, layer)| layer.role != Role::Tile) || first_tile == 0 {
        return Err(Refusal::of(
            "layers must be an embedding (or none), then at least one stack layer, then tiles",
        ));
    }
    Ok((embedding, chain, first_tile))
}
