//! The operations that layers ask of a device: one struct each, on views of the device's memory.
//!
//! Legend: B sequences, T positions, C channels, H heads of queries, K heads of keys and values, D
//! channels of a head, I channels of a feed-forward, N outputs, V rows of a vocabulary tile. R is
//! the number of rows: the rows of all sequences, one sequence behind the other. All tensors are
//! row-major. In each struct outputs come first, then inputs, then sizes. `(+)=` adds if
//! `accumulate` is true, and replaces otherwise: the first call of a step replaces.
//!
//! A new operation is a struct with an implementation of [`KernelOperation`], a row of the table
//! below, an implementation of `Compute` or `ComputeIn` on the CPU, and a launch on the GPU.
//!
//! Weights and activations are of the device's [`Dtype`](crate::tensor::Dtype). Gradients of
//! weights, statistics, log-sum-exps, gradients of chunks' keys and values, and a head's `dh` and
//! logits are floats on every device.

mod activation;
mod attention;
mod batch;
mod classes;
mod columns;
mod copy;
mod cross_entropy;
mod custom;
mod dropout;
mod embedding;
mod experts;
mod head_norm;
mod kv_cache;
mod linear;
mod linear_attention;
mod loss;
mod norm;
mod operation;
mod output_gates;
mod positive;
mod quantised;
mod rotary;
mod routing;
mod sinks;
#[macro_use]
mod table;
#[cfg(test)]
mod tests;

pub use activation::{
    Activate, ActivateBackward, Activation, ClampedGate, Gate, GateBackward, GateForm,
};
pub use attention::{Attention, AttentionBackward, AttentionShape, ChunkKv, HEAD_LIMIT};
pub use batch::{BatchMetadata, BatchView, Document, Rows, SequenceChunk};
pub use classes::{
    ClassLoss, ClassLossBackward, PooledRows, PooledRowsBackward, Pooling, ProblemType, Samples,
};
pub use columns::{
    AddColumns, ColumnGroups, CopyColumns, GroupedColumns, RegroupColumns, TakeColumns,
};
pub use copy::{Cast, Clear};
pub use cross_entropy::{LogitForm, Logits, STATISTICS, Score, ScoreBackward, label_of};
pub use custom::{CpuFunction, Custom, CustomKernel};
pub use dropout::{ApplyDropout, Dropout, DropoutKey, MaskRows, Residual, Scale};
pub use embedding::{AddPositions, AddPositionsBackward, AddTokenTypes, AddTokenTypesBackward};
pub use experts::{
    BiasRows, CombineRows, Dispatch, GateRows, GateRowsBackward, GatherRows, Route, RouteBackward,
    RowDots, RowWeights, SumRows, WeighRows,
};
pub use head_norm::{HeadNorm, HeadNormBackward, HeadValues, QkNorm, QueryKey};
pub use kv_cache::{CachedAttention, ReadKv, WriteKv};
pub(crate) use linear::LinearSize;
pub use linear::{Linear, LinearBackward};
pub use linear_attention::{
    Carried, CarriedGradients, DeltaRule, DeltaRuleBackward, GatedNorm, GatedNormBackward,
    HeadDecay, LinearHeads, LinearShape, ShortConvolution, ShortConvolutionBackward,
};
pub use loss::{CrossEntropy, Loss, Smoothing};
pub use norm::{Norm, NormBackward};
pub(crate) use operation::{Access, Inspected, each_view};
pub use operation::{KernelOperation, Named, Views};
pub use output_gates::{JoinGates, SigmoidGate, SigmoidGateBackward, SplitGates};
pub use positive::{PackPositive, UnpackPositive, packed_row};
pub use quantised::Dequantise;
pub(crate) use rotary::PAIRS;
pub use rotary::{LongRope, QueryGrowth, Rotary, RotaryScaling, RotaryTable, Rotate, Yarn};
pub use routing::{DROPPED, LimitExperts, MeasureRoutes, OF_SEQUENCE, RouteSlopes};
pub use sinks::{Sink, SinkBackward};

use crate::tensor::Scratch;

/// A device that computes an operation.
pub(crate) trait Runs<O> {
    /// Computes an operation whose views were checked before.
    fn run(&self, op: &O);
}

/// A device that computes an operation with workspace.
pub(crate) trait RunsIn<O> {
    /// Computes an operation whose views were checked before. The workspace that it takes from
    /// `scratch` is given back when it returns.
    fn run_in(&self, op: &O, scratch: &Scratch<'_>);
}

operations! {
    plain {
        linear(Linear);
        norm(Norm);
        activate(Activate);
        activate_backward(ActivateBackward);
        gate(Gate);
        gate_backward(GateBackward);
        rotate(Rotate<'a>);
        head_norm(HeadNorm<'a>);
        attention(Attention<'a>);
        write_kv(WriteKv<'a>);
        read_kv(ReadKv<'a>);
        regroup_columns(RegroupColumns);
        cached_attention(CachedAttention<'a>);
        sink(Sink<'a>);
        sink_backward(SinkBackward<'a>);
        split_gates(SplitGates<'a>);
        join_gates(JoinGates<'a>);
        sigmoid_gate(SigmoidGate);
        sigmoid_gate_backward(SigmoidGateBackward);
        short_convolution(ShortConvolution<'a>);
        gated_norm(GatedNorm<'a>);
        dropout(ApplyDropout<'a>);
        residual(Residual<'a>);
        scale(Scale);
        cast(Cast);
        clear(Clear);
        dequantise(Dequantise);
        pack_positive(PackPositive);
        add_columns(AddColumns);
        take_columns(TakeColumns);
        copy_columns(CopyColumns);
        pooled_rows(PooledRows<'a>);
        pooled_rows_backward(PooledRowsBackward<'a>);
        class_loss(ClassLoss<'a>);
        class_loss_backward(ClassLossBackward<'a>);
        add_token_types(AddTokenTypes<'a>);
        add_positions(AddPositions<'a>);
        add_positions_backward(AddPositionsBackward<'a>);
        route(Route);
        limit_experts(LimitExperts<'a>);
        gather_rows(GatherRows);
        combine_rows(CombineRows);
        weigh_rows(WeighRows);
        row_dots(RowDots);
        sum_rows(SumRows);
        gate_rows(GateRows);
        gate_rows_backward(GateRowsBackward);
    }
    with_workspace {
        linear_backward(LinearBackward);
        norm_backward(NormBackward);
        head_norm_backward(HeadNormBackward<'a>);
        attention_backward(AttentionBackward<'a>);
        short_convolution_backward(ShortConvolutionBackward<'a>);
        delta_rule(DeltaRule<'a>);
        delta_rule_backward(DeltaRuleBackward<'a>);
        gated_norm_backward(GatedNormBackward<'a>);
        add_token_types_backward(AddTokenTypesBackward<'a>);
        score(Score);
        logits(Logits);
        score_backward(ScoreBackward<'a>);
        route_backward(RouteBackward<'a>);
        measure_routes(MeasureRoutes<'a>);
    }
}
