//! The kernels on views of the arena: checks operations, resolves views and says who may write.

use super::{
    activation, attention, classes, copy, cross_entropy, custom, dropout, embedding, head_norm,
    kv_cache, linear, norm, rotary,
};
use crate::kernels::{
    Activate, ActivateBackward, AddPositions, AddPositionsBackward, AddTokenTypes,
    AddTokenTypesBackward, ApplyDropout, Attention, AttentionBackward, CachedAttention, Cast,
    ClassLoss, ClassLossBackward, Clear, Custom, FirstRows, FirstRowsBackward, Gate, GateBackward,
    HeadNorm, HeadNormBackward, Kernels, Linear, LinearBackward, Logits, Norm, NormBackward,
    ReadKv, Residual, Rotate, Score, ScoreBackward, WriteKv,
};
use crate::simd::Level;
use crate::tensor::{Arena, Scratch, View};

/// Kernels on a device's memory; without memory, they only take their workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuKernels<'a> {
    pub(crate) memory: Option<&'a Arena>,
    pub(crate) level: Level,
}

/// Views resolved for one call.
pub(super) struct Call<'a, const N: usize> {
    memory: &'a Arena,
    writes: [View; N],
}

impl<'a> CpuKernels<'a> {
    /// Begins a call that writes some views and reads others; `None` without memory.
    pub(super) fn call<const N: usize>(
        &self,
        writes: [View; N],
        reads: &[View],
    ) -> Option<Call<'a, N>> {
        check_apart(&writes, reads);
        self.memory.map(|memory| Call { memory, writes })
    }
}

impl<'a, const N: usize> Call<'a, N> {
    pub(super) fn read(&self, view: View) -> &'a [f32] {
        // SAFETY: `call` checked that no view which this call writes overlaps it, and the ring lets
        // no other operation write it.
        unsafe { self.memory.read(view) }
    }

    pub(super) fn read_if(&self, view: Option<View>) -> Option<&'a [f32]> {
        view.map(|view| self.read(view))
    }

    pub(super) fn write(&self) -> [&'a mut [f32]; N] {
        // SAFETY: `call` checked that the views overlap neither each other nor one that is read,
        // and the ring gives them to no other operation.
        self.writes.map(|view| unsafe { self.memory.write(view) })
    }
}

impl CpuKernels<'_> {
    /// Calls a function with the floats of some views; does nothing without memory.
    pub(super) fn with_slices(
        &self,
        writes: &[View],
        reads: &[View],
        function: impl FnOnce(&mut [&mut [f32]], &[&[f32]]),
    ) {
        check_apart(writes, reads);
        let Some(memory) = self.memory else { return };
        // SAFETY: views that are written overlap no others, and the ring gives them to no other
        // operation.
        let mut outputs: Vec<_> =
            writes.iter().map(|view| unsafe { memory.write(*view) }).collect();
        // SAFETY: no view that is read is written here, and the ring lets no other operation write
        // it.
        let inputs: Vec<_> = reads.iter().map(|view| unsafe { memory.read(*view) }).collect();
        function(&mut outputs, &inputs);
    }
}

/// Panics when a view that is written overlaps another one.
fn check_apart(writes: &[View], reads: &[View]) {
    let are_apart = |a: &View, b: &View| a.at + a.len() <= b.at || b.at + b.len() <= a.at;
    for (index, write) in writes.iter().enumerate() {
        for other in writes[index + 1..].iter().chain(reads) {
            assert!(are_apart(write, other), "{write} is written, and {other} is in use");
        }
    }
}

/// An optional view, or a view of nothing.
pub(super) fn or_nothing(view: Option<View>) -> View {
    view.unwrap_or(View::floats(0, 0))
}

impl Kernels for CpuKernels<'_> {
    fn linear(&self, op: &Linear) {
        op.check();
        linear::linear(self, op);
    }

    fn linear_backward(&self, op: &LinearBackward, scratch: &Scratch<'_>) {
        op.check();
        linear::linear_backward(self, op, scratch);
    }

    fn norm(&self, op: &Norm) {
        op.check();
        norm::norm(self, op);
    }

    fn norm_backward(&self, op: &NormBackward, scratch: &Scratch<'_>) {
        op.check();
        norm::norm_backward(self, op, scratch);
    }

    fn activate(&self, op: &Activate) {
        op.check();
        activation::activate(self, op);
    }

    fn activate_backward(&self, op: &ActivateBackward) {
        op.check();
        activation::activate_backward(self, op);
    }

    fn gate(&self, op: &Gate) {
        op.check();
        activation::gate(self, op);
    }

    fn gate_backward(&self, op: &GateBackward) {
        op.check();
        activation::gate_backward(self, op);
    }

    fn rotate(&self, op: &Rotate<'_>) {
        op.check();
        rotary::rotate(self, op);
    }

    fn head_norm(&self, op: &HeadNorm<'_>) {
        op.check();
        head_norm::head_norm(self, op);
    }

    fn head_norm_backward(&self, op: &HeadNormBackward<'_>, scratch: &Scratch<'_>) {
        op.check();
        head_norm::head_norm_backward(self, op, scratch);
    }

    fn attention(&self, op: &Attention<'_>) {
        op.check();
        attention::attention(self, op);
    }

    fn attention_backward(&self, op: &AttentionBackward<'_>, scratch: &Scratch<'_>) {
        op.check();
        attention::attention_backward(self, op, scratch);
    }

    fn write_kv(&self, op: &WriteKv<'_>) {
        op.check();
        kv_cache::write_kv(self, op);
    }

    fn read_kv(&self, op: &ReadKv<'_>) {
        op.check();
        kv_cache::read_kv(self, op);
    }

    fn cached_attention(&self, op: &CachedAttention<'_>) {
        op.check();
        kv_cache::cached_attention(self, op);
    }

    fn dropout(&self, op: &ApplyDropout) {
        op.check();
        dropout::dropout(self, op);
    }

    fn residual(&self, op: &Residual) {
        op.check();
        dropout::residual(self, op);
    }

    fn cast(&self, op: &Cast) {
        op.check();
        copy::cast(self, op);
    }

    fn clear(&self, op: &Clear) {
        copy::clear(self, op);
    }

    fn first_rows(&self, op: &FirstRows) {
        op.check();
        classes::first_rows(self, op);
    }

    fn first_rows_backward(&self, op: &FirstRowsBackward) {
        op.check();
        classes::first_rows_backward(self, op);
    }

    fn class_loss(&self, op: &ClassLoss) {
        op.check();
        classes::class_loss(self, op);
    }

    fn class_loss_backward(&self, op: &ClassLossBackward) {
        op.check();
        classes::class_loss_backward(self, op);
    }

    fn add_token_types(&self, op: &AddTokenTypes<'_>) {
        op.check();
        embedding::add_token_types(self, op);
    }

    fn add_token_types_backward(&self, op: &AddTokenTypesBackward<'_>, _: &Scratch<'_>) {
        op.check();
        embedding::add_token_types_backward(self, op);
    }

    fn add_positions(&self, op: &AddPositions<'_>) {
        op.check();
        embedding::add_positions(self, op);
    }

    fn add_positions_backward(&self, op: &AddPositionsBackward<'_>) {
        op.check();
        embedding::add_positions_backward(self, op);
    }

    fn score(&self, op: &Score, scratch: &Scratch<'_>) {
        op.check();
        cross_entropy::score(self, op, scratch);
    }

    fn logits(&self, op: &Logits, scratch: &Scratch<'_>) {
        op.check();
        cross_entropy::logits(self, op, scratch);
    }

    fn score_backward(&self, op: &ScoreBackward<'_>, scratch: &Scratch<'_>) {
        op.check();
        cross_entropy::score_backward(self, op, scratch);
    }

    fn custom(&self, op: &Custom<'_>) {
        custom::custom(self, op);
    }
}
