//! What layers ask for, as launches: checks operations, resolves views to addresses.

use super::batch_metadata::DeviceMetadata;
use super::driver::{Address, Place};
use super::launches::Queue;
use super::{attention, cross_entropy, embedding, head_norm, linear, norm};
use crate::kernels::{
    Activate, ActivateBackward, AddColumns, AddPositions, AddPositionsBackward, AddTokenTypes,
    AddTokenTypesBackward, ApplyDropout, Attention, AttentionBackward, CachedAttention, Cast,
    ClassLoss, ClassLossBackward, Clear, Custom, Dequantise, Gate, GateBackward, HeadNorm,
    HeadNormBackward, Kernels, Linear, LinearBackward, Logits, Norm, NormBackward, PackPositive,
    PooledRows, PooledRowsBackward, ReadKv, Residual, Rotate, Score, ScoreBackward, TakeColumns,
    UnpackPositive, WriteKv,
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

impl<'a> CudaKernels<'a> {
    /// On a driver's device.
    pub(super) fn on(
        memory: Address,
        metadata: DeviceMetadata,
        queue: Queue<'a>,
    ) -> CudaKernels<'a> {
        CudaKernels { on: Some(On { queue, memory, metadata }) }
    }

    /// Without a device, to plan.
    pub(crate) fn to_plan() -> CudaKernels<'static> {
        CudaKernels { on: None }
    }

    /// The first error of the launches.
    pub(super) fn end(self) -> Result<(), l2l_actors::BoxedError> {
        self.on.map_or(Ok(()), |on| on.queue.end())
    }

    fn run(&self, launch: impl FnOnce(&On<'_>)) {
        if let Some(on) = &self.on {
            launch(on);
        }
    }
}

impl Kernels for CudaKernels<'_> {
    fn linear(&self, op: &Linear) {
        op.check();
        self.run(|on| on.linear(op));
    }

    fn linear_backward(&self, op: &LinearBackward, scratch: &Scratch<'_>) {
        op.check();
        let parts = linear::backward_scratch(op, &scratch.nested());
        self.run(|on| on.linear_backward(op, parts));
    }

    fn norm(&self, op: &Norm) {
        op.check();
        self.run(|on| on.norm(op));
    }

    fn norm_backward(&self, op: &NormBackward, scratch: &Scratch<'_>) {
        op.check();
        let parts = norm::backward_scratch(op, &scratch.nested());
        self.run(|on| on.norm_backward(op, parts));
    }

    fn activate(&self, op: &Activate) {
        op.check();
        self.run(|on| on.activate(op));
    }

    fn activate_backward(&self, op: &ActivateBackward) {
        op.check();
        self.run(|on| on.activate_backward(op));
    }

    fn activate_linear_backward(
        &self,
        activate: &ActivateBackward,
        linear: &LinearBackward,
        scratch: &Scratch<'_>,
    ) {
        activate.check();
        linear.check();
        assert_eq!(linear.dy, activate.dx, "the product is the one before the function");
        let parts = linear::backward_scratch(linear, &scratch.nested());
        self.run(|on| on.activate_linear_backward(activate, linear, parts));
    }

    fn gate(&self, op: &Gate) {
        op.check();
        self.run(|on| on.gate(op));
    }

    fn gate_backward(&self, op: &GateBackward) {
        op.check();
        self.run(|on| on.gate_backward(op));
    }

    fn rotate(&self, op: &Rotate<'_>) {
        op.check();
        self.run(|on| on.rotate(op));
    }

    fn head_norm(&self, op: &HeadNorm<'_>) {
        op.check();
        self.run(|on| on.head_norm(op));
    }

    fn head_norm_backward(&self, op: &HeadNormBackward<'_>, scratch: &Scratch<'_>) {
        op.check();
        let parts = head_norm::backward_scratch(op, &scratch.nested());
        self.run(|on| on.head_norm_backward(op, parts));
    }

    fn attention(&self, op: &Attention<'_>) {
        op.check();
        self.run(|on| on.attention(op));
    }

    fn attention_backward(&self, op: &AttentionBackward<'_>, scratch: &Scratch<'_>) {
        op.check();
        let workspace = attention::backward_scratch(&op.shape, &scratch.nested());
        self.run(|on| on.attention_backward(op, workspace));
    }

    fn write_kv(&self, op: &WriteKv<'_>) {
        op.check();
        self.run(|on| on.write_kv(op));
    }

    fn read_kv(&self, op: &ReadKv<'_>) {
        op.check();
        self.run(|on| on.read_kv(op));
    }

    fn cached_attention(&self, op: &CachedAttention<'_>) {
        op.check();
        self.run(|on| on.cached_attention(op));
    }

    fn dropout(&self, op: &ApplyDropout<'_>) {
        op.check();
        self.run(|on| on.dropout(op));
    }

    fn residual(&self, op: &Residual<'_>) {
        op.check();
        self.run(|on| on.residual(op));
    }

    fn residual_norm(&self, sum: &Residual<'_>, norm: &Norm) {
        sum.check();
        norm.check();
        assert_eq!(norm.x, sum.y, "the norm is that of the sum");
        self.run(|on| on.residual_norm(sum, norm));
    }

    fn cast(&self, op: &Cast) {
        op.check();
        self.run(|on| on.cast(op));
    }

    fn clear(&self, op: &Clear) {
        self.run(|on| on.clear(op.y));
    }

    fn dequantise(&self, op: &Dequantise) {
        op.check();
        self.run(|on| on.dequantise(op));
    }

    fn pack_positive(&self, _: &PackPositive) {
        unreachable!("packed activations are refused on this device");
    }

    fn unpack_positive(&self, _: &UnpackPositive) -> bool {
        unreachable!("packed activations are refused on this device")
    }

    fn add_columns(&self, op: &AddColumns) {
        op.check();
        self.run(|on| on.add_columns(op));
    }

    fn take_columns(&self, op: &TakeColumns) {
        op.check();
        self.run(|on| on.take_columns(op));
    }

    fn pooled_rows(&self, op: &PooledRows<'_>) {
        op.check();
        self.run(|on| on.pooled_rows(op));
    }

    fn pooled_rows_backward(&self, op: &PooledRowsBackward<'_>) {
        op.check();
        self.run(|on| on.pooled_rows_backward(op));
    }

    fn class_loss(&self, op: &ClassLoss<'_>) {
        op.check();
        self.run(|on| on.class_loss(op));
    }

    fn class_loss_backward(&self, op: &ClassLossBackward<'_>) {
        op.check();
        self.run(|on| on.class_loss_backward(op));
    }

    fn add_token_types(&self, op: &AddTokenTypes<'_>) {
        op.check();
        self.run(|on| on.add_token_types(op));
    }

    fn add_token_types_backward(&self, op: &AddTokenTypesBackward<'_>, scratch: &Scratch<'_>) {
        op.check();
        let parts = embedding::backward_scratch(op, &scratch.nested());
        self.run(|on| on.add_token_types_backward(op, parts));
    }

    fn add_positions(&self, op: &AddPositions<'_>) {
        op.check();
        self.run(|on| on.add_positions(op));
    }

    fn add_positions_backward(&self, op: &AddPositionsBackward<'_>) {
        op.check();
        self.run(|on| on.add_positions_backward(op));
    }

    fn score(&self, op: &Score, scratch: &Scratch<'_>) {
        op.check();
        let labelled = cross_entropy::Labelled::take(&op.size(), &scratch.nested());
        self.run(|on| on.score(op, &labelled));
    }

    fn logits(&self, op: &Logits, scratch: &Scratch<'_>) {
        op.check();
        let scratch = scratch.nested();
        let places = scratch.take_floats(1, op.y.rows);
        let gathered = scratch.take(op.y.rows, op.h.columns);
        self.run(|on| on.logits(op, places, gathered));
    }

    fn score_backward(&self, op: &ScoreBackward<'_>, scratch: &Scratch<'_>) {
        op.check();
        let memory = cross_entropy::BackwardScratch::take(op, &scratch.nested());
        self.run(|on| on.score_backward(op, &memory));
    }

    fn custom(&self, op: &Custom<'_>) {
        self.run(|on| on.custom(op));
    }
}
