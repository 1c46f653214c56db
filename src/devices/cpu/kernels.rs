//! Which function of this device each operation is. Every operation is checked first.

use super::views::CpuKernels;
use super::{
    activation, attention, classes, columns, copy, cross_entropy, custom, dropout, embedding,
    head_norm, kv_cache, linear, norm, positive, quantised, rotary,
};
use crate::kernels::{
    Activate, ActivateBackward, AddColumns, AddPositions, AddPositionsBackward, AddTokenTypes,
    AddTokenTypesBackward, ApplyDropout, Attention, AttentionBackward, CachedAttention, Cast,
    ClassLoss, ClassLossBackward, Clear, Custom, Dequantise, Gate, GateBackward, HeadNorm,
    HeadNormBackward, Kernels, Linear, LinearBackward, Logits, Norm, NormBackward, PackPositive,
    PooledRows, PooledRowsBackward, ReadKv, Residual, Rotate, Score, ScoreBackward, TakeColumns,
    UnpackPositive, WriteKv,
};
use crate::tensor::Scratch;

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

    fn dropout(&self, op: &ApplyDropout<'_>) {
        op.check();
        dropout::dropout(self, op);
    }

    fn residual(&self, op: &Residual<'_>) {
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

    fn dequantise(&self, op: &Dequantise) {
        op.check();
        quantised::dequantise(self, op);
    }

    fn pack_positive(&self, op: &PackPositive) {
        op.check();
        positive::pack(self, op);
    }

    fn unpack_positive(&self, op: &UnpackPositive) -> bool {
        op.check();
        positive::unpack(self, op)
    }

    fn add_columns(&self, op: &AddColumns) {
        op.check();
        columns::add_columns(self, op);
    }

    fn take_columns(&self, op: &TakeColumns) {
        op.check();
        columns::take_columns(self, op);
    }

    fn pooled_rows(&self, op: &PooledRows<'_>) {
        op.check();
        classes::pooled_rows(self, op);
    }

    fn pooled_rows_backward(&self, op: &PooledRowsBackward<'_>) {
        op.check();
        classes::pooled_rows_backward(self, op);
    }

    fn class_loss(&self, op: &ClassLoss<'_>) {
        op.check();
        classes::class_loss(self, op);
    }

    fn class_loss_backward(&self, op: &ClassLossBackward<'_>) {
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

    fn score_and_backward(&self, score: &Score, op: &ScoreBackward<'_>, scratch: &Scratch<'_>) {
        score.check();
        op.check();
        cross_entropy::score_and_backward(self, score, op, scratch);
    }

    fn custom(&self, op: &Custom<'_>) {
        custom::custom(self, op);
    }
}
