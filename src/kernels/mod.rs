//! What layers ask of a device: one struct for each operation, on views of the device's memory.
//!
//! Legend: B sequences, T positions, C channels, H heads of queries, K heads of keys and values, D
//! channels of a head, I channels of a feed-forward, N outputs, V rows of a vocabulary tile. R is
//! the number of rows: those of all sequences, one behind the other. All tensors are row-major. In
//! each struct outputs come first, then inputs, then sizes. `(+)=` replaces, or adds where
//! `accumulate` says so: the first call of a step replaces.
//!
//! Weights and activations are of the device's [`Dtype`](crate::tensor::Dtype). Gradients of
//! weights, statistics, log-sum-exps, gradients of chunks' keys and values, and a head's `dh` and
//! logits are floats on every device.

mod activation;
mod attention;
mod batch;
mod check;
mod classes;
mod columns;
mod copy;
mod cross_entropy;
mod custom;
mod dropout;
mod embedding;
mod head_norm;
mod inspected;
mod kv_cache;
mod linear;
mod loss;
mod norm;
mod positive;
mod quantised;
mod rotary;
#[cfg(test)]
mod tests;

pub use activation::{Activate, ActivateBackward, Activation, Gate, GateBackward};
pub use attention::{Attention, AttentionBackward, AttentionShape, ChunkKv, HEAD_LIMIT};
pub use batch::{BatchMetadata, BatchView, Document, Rows, SequenceChunk};
pub use classes::{ClassLoss, ClassLossBackward, PooledRows, PooledRowsBackward, Pooling, Samples};
pub use columns::{AddColumns, TakeColumns};
pub use copy::{Cast, Clear};
pub(crate) use cross_entropy::ScoreSize;
pub use cross_entropy::{Logits, STATISTICS, Score, ScoreBackward, label_of};
pub use custom::{CpuFunction, Custom, CustomKernel};
pub use dropout::{ApplyDropout, Dropout, DropoutKey, MaskRows, Residual};
pub use embedding::{AddPositions, AddPositionsBackward, AddTokenTypes, AddTokenTypesBackward};
pub use head_norm::{HeadNorm, HeadNormBackward, QueryKey};
pub(crate) use inspected::Inspected;
pub use kv_cache::{CachedAttention, ReadKv, WriteKv};
pub(crate) use linear::LinearSize;
pub use linear::{Linear, LinearBackward};
pub use loss::{CrossEntropy, Loss, Smoothing};
pub use norm::{Norm, NormBackward};
pub use positive::{PackPositive, UnpackPositive, packed_row};
pub use quantised::Dequantise;
pub use rotary::{Rotary, RotaryScaling, Rotate};

use crate::tensor::Scratch;

/// What a device can do. Each method first checks the shapes and dtypes of its views. The methods
/// that are given `scratch` take workspace from it and give it back.
pub trait Kernels {
    /// See [`Linear`].
    fn linear(&self, op: &Linear);

    /// See [`LinearBackward`].
    fn linear_backward(&self, op: &LinearBackward, scratch: &Scratch<'_>);

    /// See [`Norm`].
    fn norm(&self, op: &Norm);

    /// See [`NormBackward`].
    fn norm_backward(&self, op: &NormBackward, scratch: &Scratch<'_>);

    /// See [`Activate`].
    fn activate(&self, op: &Activate);

    /// See [`ActivateBackward`].
    fn activate_backward(&self, op: &ActivateBackward);

    /// The backward of an activation function, then of the product before it: `linear.dy` is
    /// `activate.dx`. A device may sum `linear.dbias` in the same pass as the function's backward.
    fn activate_linear_backward(
        &self,
        activate: &ActivateBackward,
        linear: &LinearBackward,
        scratch: &Scratch<'_>,
    ) {
        self.activate_backward(activate);
        self.linear_backward(linear, scratch);
    }

    /// See [`Gate`].
    fn gate(&self, op: &Gate);

    /// See [`GateBackward`].
    fn gate_backward(&self, op: &GateBackward);

    /// See [`Rotate`].
    fn rotate(&self, op: &Rotate<'_>);

    /// See [`HeadNorm`].
    fn head_norm(&self, op: &HeadNorm<'_>);

    /// See [`HeadNormBackward`].
    fn head_norm_backward(&self, op: &HeadNormBackward<'_>, scratch: &Scratch<'_>);

    /// See [`Attention`].
    fn attention(&self, op: &Attention<'_>);

    /// See [`AttentionBackward`].
    fn attention_backward(&self, op: &AttentionBackward<'_>, scratch: &Scratch<'_>);

    /// See [`WriteKv`].
    fn write_kv(&self, op: &WriteKv<'_>);

    /// See [`ReadKv`].
    fn read_kv(&self, op: &ReadKv<'_>);

    /// See [`CachedAttention`].
    fn cached_attention(&self, op: &CachedAttention<'_>);

    /// See [`ApplyDropout`].
    fn dropout(&self, op: &ApplyDropout<'_>);

    /// See [`Residual`].
    fn residual(&self, op: &Residual<'_>);

    /// A sum and its norm: `norm.x` is `sum.y`, and `norm.y` may be `sum.x`. A device may do both
    /// in one pass.
    fn residual_norm(&self, sum: &Residual<'_>, norm: &Norm) {
        self.residual(sum);
        self.norm(norm);
    }

    /// See [`Cast`].
    fn cast(&self, op: &Cast);

    /// See [`Clear`].
    fn clear(&self, op: &Clear);

    /// See [`Dequantise`].
    fn dequantise(&self, op: &Dequantise);

    /// See [`PackPositive`].
    fn pack_positive(&self, op: &PackPositive);

    /// See [`UnpackPositive`]. False: a row has more positive numbers than there was room for, and
    /// what is written is of no use.
    fn unpack_positive(&self, op: &UnpackPositive) -> bool;

    /// See [`AddColumns`].
    fn add_columns(&self, op: &AddColumns);

    /// See [`TakeColumns`].
    fn take_columns(&self, op: &TakeColumns);

    /// See [`PooledRows`].
    fn pooled_rows(&self, op: &PooledRows<'_>);

    /// See [`PooledRowsBackward`].
    fn pooled_rows_backward(&self, op: &PooledRowsBackward<'_>);

    /// See [`ClassLoss`].
    fn class_loss(&self, op: &ClassLoss<'_>);

    /// See [`ClassLossBackward`].
    fn class_loss_backward(&self, op: &ClassLossBackward<'_>);

    /// See [`AddTokenTypes`].
    fn add_token_types(&self, op: &AddTokenTypes<'_>);

    /// See [`AddTokenTypesBackward`].
    fn add_token_types_backward(&self, op: &AddTokenTypesBackward<'_>, scratch: &Scratch<'_>);

    /// See [`AddPositions`].
    fn add_positions(&self, op: &AddPositions<'_>);

    /// See [`AddPositionsBackward`].
    fn add_positions_backward(&self, op: &AddPositionsBackward<'_>);

    /// See [`Score`].
    fn score(&self, op: &Score, scratch: &Scratch<'_>);

    /// See [`Logits`].
    fn logits(&self, op: &Logits, scratch: &Scratch<'_>);

    /// See [`ScoreBackward`].
    fn score_backward(&self, op: &ScoreBackward<'_>, scratch: &Scratch<'_>);

    /// The last tile's [`Score`], then its [`ScoreBackward`], which reads the statistics that the
    /// score writes. A device may compute the logits once for both.
    fn score_and_backward(&self, score: &Score, op: &ScoreBackward<'_>, scratch: &Scratch<'_>) {
        self.score(score, scratch);
        self.score_backward(op, scratch);
    }

    /// See [`Custom`].
    fn custom(&self, op: &Custom<'_>);
}
