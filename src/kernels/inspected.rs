//! Kernels whose results are looked at, one operation after the other.

use super::{
    Activate, ActivateBackward, AddColumns, AddPositions, AddPositionsBackward, AddTokenTypes,
    AddTokenTypesBackward, ApplyDropout, Attention, AttentionBackward, CachedAttention, Cast,
    ClassLoss, ClassLossBackward, Clear, Custom, Dequantise, Gate, GateBackward, HeadNorm,
    HeadNormBackward, Kernels, Linear, LinearBackward, Logits, Norm, NormBackward, PackPositive,
    PooledRows, PooledRowsBackward, ReadKv, Residual, Rotate, Score, ScoreBackward, TakeColumns,
    UnpackPositive, WriteKv,
};
use crate::tensor::{Scratch, View};

/// Other kernels, and a function that is called for each view of numbers that an operation has
/// written, with the operation's name.
pub(crate) struct Inspected<'k> {
    pub(crate) kernels: &'k dyn Kernels,
    pub(crate) on_write: &'k dyn Fn(&'static str, View),
}

impl Inspected<'_> {
    fn wrote<const N: usize>(&self, operation: &'static str, views: [Option<View>; N]) {
        views.into_iter().flatten().for_each(|view| (self.on_write)(operation, view));
    }
}

/// For each operation: its type, and the fields that it writes. Statistics of a loss hold labels,
/// which are no numbers.
macro_rules! inspected {
    ($($name:ident($op:ty $(, $scratch:ident)?): $($($field:ident).+),*;)*) => {$(
        fn $name(&self, op: &$op $(, $scratch: &Scratch<'_>)?) {
            self.kernels.$name(op $(, $scratch)?);
            self.wrote(stringify!($name), [$(op.$($field).+.into()),*]);
        }
    )*};
}

impl Kernels for Inspected<'_> {
    inspected! {
        linear(Linear): y;
        linear_backward(LinearBackward, scratch): dx, dw, dbias;
        norm(Norm): y, statistics;
        norm_backward(NormBackward, scratch): dx, dgamma, dbeta;
        activate(Activate): y;
        activate_backward(ActivateBackward): dx;
        gate(Gate): y;
        gate_backward(GateBackward): dx;
        rotate(Rotate<'_>): qkv;
        head_norm(HeadNorm<'_>): y, statistics;
        head_norm_backward(HeadNormBackward<'_>, scratch): dx, dgamma.query, dgamma.key;
        attention(Attention<'_>): y, lse;
        write_kv(WriteKv<'_>): kv;
        read_kv(ReadKv<'_>): ;
        cached_attention(CachedAttention<'_>): y;
        dropout(ApplyDropout<'_>): y;
        residual(Residual<'_>): y;
        cast(Cast): y;
        clear(Clear): y;
        dequantise(Dequantise): y;
        pack_positive(PackPositive): ;
        add_columns(AddColumns): y;
        take_columns(TakeColumns): y;
        pooled_rows(PooledRows<'_>): y;
        pooled_rows_backward(PooledRowsBackward<'_>): dx;
        class_loss(ClassLoss<'_>): ;
        class_loss_backward(ClassLossBackward<'_>): dscores;
        add_token_types(AddTokenTypes<'_>): y;
        add_token_types_backward(AddTokenTypesBackward<'_>, scratch): dtable;
        add_positions(AddPositions<'_>): y;
        add_positions_backward(AddPositionsBackward<'_>): dtable;
        score(Score, scratch): ;
        logits(Logits, scratch): y;
        score_backward(ScoreBackward<'_>, scratch): dh, dw, dbias;
    }

    fn attention_backward(&self, op: &AttentionBackward<'_>, scratch: &Scratch<'_>) {
        self.kernels.attention_backward(op, scratch);
        // Of a chunk, `dqkv` is not whole yet.
        let written = op.chunk_kv.map_or(op.dqkv, |chunk| chunk.dkv);
        self.wrote("attention_backward", [Some(written)]);
    }

    fn unpack_positive(&self, op: &UnpackPositive) -> bool {
        let fits = self.kernels.unpack_positive(op);
        self.wrote("unpack_positive", [op.y.into()]);
        fits
    }

    fn custom(&self, op: &Custom<'_>) {
        self.kernels.custom(op);
        op.writes.iter().for_each(|view| (self.on_write)(op.kernel.name, *view));
    }
}
