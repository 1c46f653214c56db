//! What a block reads and writes beside hidden states: its input, and keys and values that it
//! shares with other blocks.
//!
//! A block that reads the keys and values of another projects queries alone, and puts them in front
//! of what it read. All behind that is as in other blocks. In the backward, each reader adds to the
//! gradient that the readers above it left, and the block whose keys and values they are adds the
//! sum to its own.

use l2l_actors::schedule::{Boundary, Input, Role};

use super::TransformerBlock;
use super::chunk::ChunkPass;
use crate::kernels::{
    AddColumns, AttentionShape, BatchView, Cast, CopyColumns, HeadValues, TakeColumns,
};
use crate::models::block_inputs::number_of;
use crate::models::layer::Layer;
use crate::models::ports::{LayerStep, PortViews, StepContext};
use crate::models::shape::Shape;
use crate::tensor::{Dtype, Scratch, View};

/// The numbers of the boundaries of keys and values: of blocks without a window, and with one.
const KV: [u16; 2] = [256, 257];

/// Boundaries of a block beside hidden states.
#[derive(Clone, Copy, Default)]
pub(super) struct OwnViews {
    /// The block's input. (R, P).
    pub(super) input: Option<View>,
    /// The place for its gradient. (R, P).
    pub(super) dinput: Option<View>,
    /// Keys and values of another block. (R, 2 K D).
    pub(super) kv: Option<View>,
    /// The gradient of shared keys and values, as far as blocks above have added to it. Floats.
    /// (R, 2 K D).
    dkv: Option<View>,
    /// The place for it with what this block adds. Floats. (R, 2 K D).
    dkv_sum: Option<View>,
}

/// How a block shares keys and values with others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// Others read those of the block.
    IsRead,
    /// It reads those of another, and has none.
    Reads,
}

impl TransformerBlock {
    /// How the block shares keys and values, if it does. Of the blocks in front of the first that
    /// reads them, the last with a window serves those with a window, and the last without one the
    /// others.
    fn sharing(&self) -> Option<Sharing> {
        let from = self.shape.shared_kv?.from;
        if self.number >= from {
            return Some(Sharing::Reads);
        }
        let has_window = |block| self.shape.has_window(block);
        let is_alike = |other: &usize| has_window(*other) == has_window(self.number);
        let is_source = (0..from).rfind(is_alike) == Some(self.number);
        let is_read = is_source && (from..self.shape.layers).any(|other| is_alike(&other));
        is_read.then_some(Sharing::IsRead)
    }

    /// The number of the boundary of keys and values that the block shares, if it does.
    fn kv_number(&self) -> Option<u16> {
        self.sharing().map(|_| KV[usize::from(self.shape.has_window(self.number))])
    }

    /// True for a block that has no keys and values of its own.
    pub(super) fn reads_kv(&self) -> bool {
        self.sharing() == Some(Sharing::Reads)
    }

    /// The shape with those heads of keys and values alone that the block projects.
    pub(super) fn projected_shape(&self) -> Shape {
        match self.reads_kv() {
            true => Shape { kv_heads: 0, values: HeadValues::Plain, ..self.shape },
            false => self.shape,
        }
    }

    /// The heads that the block projects.
    pub(super) fn projected_heads<'a>(&self, batch: &BatchView<'a>) -> AttentionShape<'a> {
        let kv_heads = self.projected_shape().kv_heads;
        AttentionShape { kv_heads, ..self.attention(batch) }
    }

    /// Adds the block's input and shared keys and values to its step.
    pub(super) fn add_own(&self, context: &StepContext, step: &mut LayerStep) {
        let inputs = self.shape.block_inputs;
        step.reads.extend(
            inputs.map(|inputs| context.own_input(number_of(self.number), inputs.channels)),
        );
        let Some(number) = self.kv_number() else { return };
        let kv = context.own(number, self.kv_width());
        if self.reads_kv() {
            let role = Role::OwnGradient(number);
            let gradient = Boundary::of_tokens(role, self.kv_width(), Dtype::F32.size());
            step.reads.push(Input::new(kv, Some(gradient)));
        } else {
            step.writes.push(kv);
        }
    }

    /// The place for keys and values that other blocks read.
    pub(super) fn kv_for_others(&self, ports: &PortViews<'_>) -> Option<View> {
        ports.written(Role::Own(self.kv_number()?))
    }

    /// The boundaries of a pass.
    pub(super) fn own_views(&self, ports: &PortViews<'_>) -> OwnViews {
        let input = self.shape.block_inputs.map(|_| number_of(self.number));
        let number = self.kv_number();
        let gradient = number.map(Role::OwnGradient);
        OwnViews {
            input: input.and_then(|number| ports.read(Role::Own(number))),
            dinput: input.and_then(|number| ports.written(Role::OwnGradient(number))),
            kv: number.filter(|_| self.reads_kv()).and_then(|one| ports.read(Role::Own(one))),
            dkv: gradient.and_then(|role| ports.read(role)),
            dkv_sum: gradient.and_then(|role| ports.written(role)),
        }
    }
}

impl ChunkPass<'_> {
    /// Queries with the keys and values of another block behind them.
    pub(super) fn beside_kv(&self, queries: View, kv: View) -> View {
        let qkv = self.rotated;
        for (to, x) in [(0, queries), (queries.columns, kv)] {
            self.k.copy_columns(&CopyColumns { y: qkv, x, to, from: 0, columns: x.columns });
        }
        qkv
    }

    /// The gradients of what the block projects, in front of rotation and norms: with those of its
    /// keys and values by the blocks that read them; or without keys and values.
    pub(super) fn share_gradients(&self, dqkv: View, scratch: &Scratch<'_>) -> View {
        let ChunkPass { block, k, own, .. } = *self;
        let first = block.shape.attention_width();
        let width = block.kv_width();
        if !block.reads_kv() {
            if let Some(dkv) = own.dkv {
                let x = scratch.take(dqkv.rows, width);
                k.cast(&Cast { y: x, x: dkv });
                k.add_columns(&AddColumns { y: dqkv, x, first, scale: 1.0 });
            }
            return dqkv;
        }
        if let Some(y) = own.dkv_sum {
            let dkv = scratch.take(dqkv.rows, width);
            k.take_columns(&TakeColumns { y: dkv, x: dqkv, first, scale: 1.0 });
            k.cast(&Cast { y, x: dkv });
            if let Some(x) = own.dkv {
                k.add_columns(&AddColumns { y, x, first: 0, scale: 1.0 });
            }
        }
        let y = scratch.take(dqkv.rows, first);
        k.take_columns(&TakeColumns { y, x: dqkv, first: 0, scale: 1.0 });
        y
    }
}
