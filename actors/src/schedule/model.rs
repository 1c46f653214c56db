//! What the generators make schedules from: a model without tensors, and what one step visits.

use super::{Block, BlockId, Boundary, LayerId};

/// What a layer is to the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Host visits: gather in forward, scatter in backward. At most one, the first.
    Embedding,
    /// Device visits from hidden state to hidden state: stem, transformer block, final norm.
    Stack,
    /// Device visits of one tile of the head. After the stack, all reading its last output.
    Tile,
}

/// One layer of a model, as the generators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingLayer {
    /// What it is.
    pub kind: LayerKind,
    /// Blocks it needs; a tied tile and the embedding name the same one.
    pub blocks: Vec<BlockId>,
    /// True for a stack layer that has activations to save, when nothing is recomputed.
    pub saves: bool,
}

/// A model without tensors: layers, blocks and the sizes of what passes between layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingModel {
    /// All blocks.
    pub blocks: Vec<Block>,
    /// All layers, in forward order.
    pub layers: Vec<RingLayer>,
    /// Between stack layers: the residual stream. Its gradient is of the same size.
    pub hidden: Boundary,
    /// What a stack layer saves when it does not recompute.
    pub saved_activations: Boundary,
    /// What the head's tiles pass on.
    pub statistics: Boundary,
    /// The gradient that tiles add up for the stack's last output.
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
    /// False: stack layers save activations in the stash instead of recomputing them.
    pub recompute: bool,
    /// Groups of micro-batches, at most one for each: see [`Schedule::groups`](super::Schedule).
    pub groups: u32,
}

impl Selection {
    /// All layers, nothing frozen, recomputing, in one group.
    pub fn all(model: &RingModel, micro_batches: Vec<u32>) -> Selection {
        let layers = (0..model.layers.len() as u32).map(LayerId).collect();
        Selection { layers, micro_batches, frozen: Vec::new(), recompute: true, groups: 1 }
    }
}
