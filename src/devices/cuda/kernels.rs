//! The operations of layers as launches: views become addresses, and workspace is taken.

use super::batch_metadata::DeviceMetadata;
use super::driver::{Address, Argument, Place};
use super::launches::{Queue, Words, int};
use super::{
    attention, cross_entropy, embedding, experts, head_norm, linear, linear_attention, norm,
    routing,
};
use crate::kernels::{
    Activate, ActivateBackward, AddColumns, AddPositions, AddPositionsBackward, AddTokenTypes,
    AddTokenTypesBackward, ApplyDropout, Attention, AttentionBackward, CachedAttention, Cast,
    ClassLoss, ClassLossBackward, Clear, CombineRows, CopyColumns, Custom, DeltaRule,
    DeltaRuleBackward, Dequantise, DeviceKernels, Dispatch, Gate, GateBackward, GateRows,
    GateRowsBackward, GatedNorm, GatedNormBackward, GatherRows, HeadNorm, HeadNormBackward,
    JoinGates, LimitExperts, Linear, LinearBackward, Logits, MeasureRoutes, Norm, NormBackward,
    PackPositive, PooledRows, PooledRowsBackward, ReadKv, RegroupColumns, Residual, Rotate, Route,
    RouteBackward, RowDots, Runs, RunsIn, Scale, Score, ScoreBackward, ShortConvolution,
    ShortConvolutionBackward, SigmoidGate, SigmoidGateBackward, Sink, SinkBackward, SplitGates,
    SumRows, TakeColumns, UnpackPositive, WeighRows, WriteKv,
};
use crate::tensor::{Scratch, View};

/// Kernels on a device's memory; without a device, they only take their workspace.
pub(crate) struct CudaKernels<'a> {
    on: Option<On<'a>>,
}

/// A device, for one operation of the ring.
pub(super) struct On<'a> {
    pub(super) queue: Queue<'a>,
    memory: Address,
    pub(super) metadata: DeviceMetadata,
}

impl On<'_> {
    pub(super) fn at(&self, view: View) -> Place {
        Place { at: self.memory, dtype: view.dtype }.behind(view.at)
    }

    pub(super) fn at_if(&self, view: Option<View>) -> Place {
        view.map_or(Place::NULL, |view| self.at(view))
    }

    pub(super) fn copy(&self, to: View, from: View) {
        self.queue.copy(self.at(to), self.at(from), to.len());
    }
}

/// A value that is passed to a kernel: a view as its address, a size as an `int` of the text.
pub(super) trait ToArgument {
    fn argument(self, on: &On<'_>) -> impl Argument;
}

impl ToArgument for View {
    fn argument(self, on: &On<'_>) -> impl Argument {
        on.at(self)
    }
}

impl ToArgument for Option<View> {
    fn argument(self, on: &On<'_>) -> impl Argument {
        on.at_if(self)
    }
}

impl ToArgument for usize {
    fn argument(self, _: &On<'_>) -> impl Argument {
        int(self)
    }
}

impl ToArgument for bool {
    fn argument(self, _: &On<'_>) -> impl Argument {
        i32::from(self)
    }
}

impl<const N: usize> ToArgument for Words<N> {
    fn argument(self, _: &On<'_>) -> impl Argument {
        self
    }
}

/// Values that are arguments already.
macro_rules! passed_unchanged {
    ($($value:ty),*) => {$(
        impl ToArgument for $value {
            fn argument(self, _: &On<'_>) -> impl Argument {
                self
            }
        }
    )*};
}

passed_unchanged!(i32, i64, f32, Address, Place);

/// The arguments of a launch, in the order of the kernel's parameters.
macro_rules! arguments {
    ($on:ident; $($value:expr),*) => {
        &[$(&$crate::devices::cuda::kernels::ToArgument::argument($value, $on)
            as &dyn $crate::devices::cuda::driver::Argument),*]
    };
}

pub(super) use arguments;

impl<'a> CudaKernels<'a> {
    /// Kernels on a driver's device.
    pub(super) fn on(
        memory: Address,
        metadata: DeviceMetadata,
        queue: Queue<'a>,
    ) -> CudaKernels<'a> {
        CudaKernels { on: Some(On { queue, memory, metadata }) }
    }

    /// Kernels without a device, to plan.
    pub(crate) fn to_plan() -> CudaKernels<'static> {
        CudaKernels { on: None }
    }

    /// The first error of the launches.
    pub(super) fn end(self) -> Result<(), l2l_actors::BoxedError> {
        self.on.map_or(Ok(()), |on| on.queue.end())
    }

    fn on_device(&self, launch: impl FnOnce(&On<'_>)) {
        if let Some(on) = &self.on {
            launch(on);
        }
    }
}

/// Operations that take no workspace: each is a method of [`On`].
macro_rules! launched {
    ($($name:ident($op:ty);)*) => {$(
        impl Runs<$op> for CudaKernels<'_> {
            fn run(&self, op: &$op) {
                self.on_device(|on| on.$name(op));
            }
        }
    )*};
}

launched! {
    linear(Linear);
    norm(Norm);
    activate(Activate);
    activate_backward(ActivateBackward);
    gate(Gate);
    gate_backward(GateBackward);
    rotate(Rotate<'_>);
    head_norm(HeadNorm<'_>);
    attention(Attention<'_>);
    write_kv(WriteKv<'_>);
    read_kv(ReadKv<'_>);
    regroup_columns(RegroupColumns);
    cached_attention(CachedAttention<'_>);
    sink(Sink<'_>);
    sink_backward(SinkBackward<'_>);
    dropout(ApplyDropout<'_>);
    residual(Residual<'_>);
    scale(Scale);
    cast(Cast);
    dequantise(Dequantise);
    add_columns(AddColumns);
    take_columns(TakeColumns);
    copy_columns(CopyColumns);
    pooled_rows(PooledRows<'_>);
    pooled_rows_backward(PooledRowsBackward<'_>);
    class_loss(ClassLoss<'_>);
    class_loss_backward(ClassLossBackward<'_>);
    add_token_types(AddTokenTypes<'_>);
    add_positions(AddPositions<'_>);
    add_positions_backward(AddPositionsBackward<'_>);
    route(Route);
    limit_experts(LimitExperts<'_>);
    gather_rows(GatherRows);
    combine_rows(CombineRows);
    weigh_rows(WeighRows);
    row_dots(RowDots);
    sum_rows(SumRows);
    gate_rows(GateRows);
    gate_rows_backward(GateRowsBackward);
    custom(Custom<'_>);
    pack_positive(PackPositive);
    split_gates(SplitGates<'_>);
    join_gates(JoinGates<'_>);
    sigmoid_gate(SigmoidGate);
    sigmoid_gate_backward(SigmoidGateBackward);
    short_convolution(ShortConvolution<'_>);
    gated_norm(GatedNorm<'_>);
}

impl Runs<Clear> for CudaKernels<'_> {
    fn run(&self, op: &Clear) {
        self.on_device(|on| on.clear(op.y));
    }
}

/// Operations with workspace: each is a method of [`On`] that also gets the workspace.
macro_rules! launched_in {
    ($($name:ident($op:ty) $take:path;)*) => {$(
        impl RunsIn<$op> for CudaKernels<'_> {
            fn run_in(&self, op: &$op, scratch: &Scratch<'_>) {
                let workspace = $take(op, &scratch.nested());
                self.on_device(|on| on.$name(op, workspace));
            }
        }
    )*};
}

launched_in! {
    linear_backward(LinearBackward) linear::backward_scratch;
    norm_backward(NormBackward) norm::backward_scratch;
    head_norm_backward(HeadNormBackward<'_>) head_norm::backward_scratch;
    attention_backward(AttentionBackward<'_>) attention::backward_scratch;
    add_token_types_backward(AddTokenTypesBackward<'_>) embedding::backward_scratch;
    score(Score) cross_entropy::score_scratch;
    logits(Logits) cross_entropy::logits_scratch;
    score_backward(ScoreBackward<'_>) cross_entropy::backward_scratch;
    route_backward(RouteBackward<'_>) experts::backward_scratch;
    measure_routes(MeasureRoutes<'_>) routing::measure_scratch;
    short_convolution_backward(ShortConvolutionBackward<'_>) linear_attention::convolution_scratch;
    delta_rule_backward(DeltaRuleBackward<'_>) linear_attention::rule_scratch;
    gated_norm_backward(GatedNormBackward<'_>) linear_attention::norm_scratch;
}

impl RunsIn<DeltaRule<'_>> for CudaKernels<'_> {
    fn run_in(&self, op: &DeltaRule<'_>, _: &Scratch<'_>) {
        self.on_device(|on| on.delta_rule(op));
    }
}

impl DeviceKernels for CudaKernels<'_> {
    /// Without a device: false, so that the workspace of the other way is counted, too.
    fn unpack_positive(&self, op: &UnpackPositive) -> bool {
        self.on.as_ref().is_some_and(|on| on.unpack_positive(op))
    }

    fn dispatch(&self, op: &Dispatch) -> Vec<usize> {
        let without = || vec![op.chosen.rows; op.experts];
        self.on.as_ref().map_or_else(without, |on| on.dispatch(op))
    }

    fn activate_linear_backward(
        &self,
        activate: &ActivateBackward,
        linear: &LinearBackward,
        scratch: &Scratch<'_>,
    ) {
        let parts = linear::backward_scratch(linear, &scratch.nested());
        self.on_device(|on| on.activate_linear_backward(activate, linear, parts));
    }

    fn residual_norm(&self, sum: &Residual<'_>, norm: &Norm) {
        self.on_device(|on| on.residual_norm(sum, norm));
    }
}
