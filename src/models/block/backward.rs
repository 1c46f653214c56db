//! The backward of a block on one chunk: the feed-forward's half, then attention's.

use super::chunk::{ATTENTION, ChunkPass, FEED_FORWARD};
use super::experts::PassedDown;
use super::linear::LinearPass;
use super::products::{MlpPart, MlpPass, ProductBackward};
use super::saved::Branch;
use super::tensors::{FeedForward, Gradients};
use crate::kernels::{
    AttentionBackward, Cast, ChunkKv, HeadNormBackward, QueryKey, ReadKv, RegroupColumns, Residual,
    Rotate, SinkBackward, TakeColumns,
};
use crate::models::layer::Save;
use crate::models::norms::{AffineBackward, or_scratch};
use crate::models::shape::NormPlaces;
use crate::tensor::{Scratch, View};

/// The arguments of a chunk's backward, beside those of its forward.
pub(super) struct ChunkGradients<'a> {
    /// Gradients of the block's tensors.
    pub(super) d: &'a Gradients,
    /// The gradient of the chunk's output. (R, C).
    pub(super) dy: View,
    /// The place for the gradient of its input. (R, C).
    pub(super) dx: View,
    /// Keys, values and their gradients, for a chunk of a longer sequence.
    pub(super) chunk_kv: Option<ChunkKv>,
    /// The activations that were saved. `None`: all are recomputed.
    pub(super) save: Option<Save>,
    /// True to add to the gradients of tensors; false to overwrite them.
    pub(super) accumulate: bool,
    /// What the experts' backward has passed down, in a visit of its own.
    pub(super) passed: Option<PassedDown>,
}

/// Workspace that both halves use.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    /// The gradient of a branch's output, then of its input. (R, C).
    pub(super) dbranch: View,
    /// The gradient of the residual stream behind attention. Where branches are beside each other:
    /// that of the block's input but for attention's; with one norm in front of both, that of the
    /// feed-forward's input. (R, C).
    pub(super) dattention_sum: View,
}

impl Buffers {
    /// Takes buffers of the shape of a chunk's input.
    pub(super) fn new(x: View, scratch: &Scratch<'_>) -> Buffers {
        Buffers { dbranch: scratch.take_like(x), dattention_sum: scratch.take_like(x) }
    }
}

impl ChunkPass<'_> {
    /// The gradient of the chunk's input, and of the block's tensors.
    pub(super) fn backward(&self, g: &ChunkGradients<'_>, scratch: &Scratch<'_>) {
        let r = self.batch.rows();
        let buffers = Buffers::new(self.x, scratch);
        match g.save {
            None => self.recompute_feed_forward_input(scratch),
            Some(Save::All) => self.norm_saved_sum(),
            Some(Save::AllButAttention) => {
                self.recompute_attention(self.attention_input(), scratch);
                self.norm_saved_sum();
            }
        }
        let dsum = match (&self.w.feed_forward, &g.d.feed_forward) {
            (FeedForward::Dense(w), FeedForward::Dense(d)) => {
                let activated = scratch.take(r, self.block.shape.intermediate);
                let up = self.saved.up;
                let parts = &[MlpPart { rows: 0..r, w, d }];
                let mlp = MlpPass {
                    parts,
                    x: self.hidden,
                    up,
                    activated,
                    weighted: None,
                    accumulate: g.accumulate,
                };
                self.dense_backward(g, mlp, buffers, scratch)
            }
            (FeedForward::Experts(w), FeedForward::Experts(d)) => {
                self.experts_backward(g, w, d, buffers, scratch);
                g.dy
            }
            _ => unreachable!("weights and gradients are sorted in the same way"),
        };
        self.middle_norm_backward(g, buffers, dsum, scratch);
        let are_beside = self.block.shape.norms.are_beside();
        let dsum = if are_beside { dsum } else { buffers.dattention_sum };
        let dqkv = self.attention_backward(g, dsum, buffers, scratch);
        self.qkv_backward(g, buffers, dqkv, scratch);
    }

    /// The gradient of the feed-forward's input, to `dbranch`. Returns the gradient of its sum.
    fn dense_backward(
        &self,
        g: &ChunkGradients<'_>,
        mlp: MlpPass<'_>,
        buffers: Buffers,
        scratch: &Scratch<'_>,
    ) -> View {
        let dbranch = buffers.dbranch;
        let w = mlp.parts[0].w;
        if g.save.is_none() {
            self.products.linear(mlp.up, mlp.x, &w.up);
        }
        self.unpack_up(w);
        self.products.activate(mlp.activated, mlp.up);
        let dsum = self.last_norm_backward(g, mlp, buffers, scratch);
        let dropout = self.block.feed_forward_dropout(&self.batch);
        let dropped = self.products.dropout_backward(dbranch, dsum, dropout);
        let dy = self.branch_norm_backward(g, dropped, FEED_FORWARD, scratch);
        self.products.mlp_backward(mlp, [dbranch, dy], scratch);
        dsum
    }

    pub(super) fn norm_backward(
        &self,
        g: &ChunkGradients<'_>,
        op: &AffineBackward,
        scratch: &Scratch<'_>,
    ) {
        self.block.shape.norm_backward(self.k, op, g.accumulate, &scratch.nested());
    }

    /// The backward of the norm of a branch's output. Without this norm it returns `dy`.
    fn branch_norm_backward(
        &self,
        g: &ChunkGradients<'_>,
        dy: View,
        which: usize,
        scratch: &Scratch<'_>,
    ) -> View {
        let norms = (&self.w.branch_norms, &g.d.branch_norms, &self.saved.branches);
        let (Some(w), Some(d), Some(branches)) = norms else { return dy };
        let Branch { output: x, statistics } = branches[which];
        let dx = scratch.take_like(dy);
        let op = AffineBackward { dx, d: d[which], dy, x, statistics, w: w[which], residual: None };
        self.norm_backward(g, &op, scratch);
        dx
    }

    /// The gradient of the feed-forward's sum: through the norm behind the sum, or through the
    /// branch of the block's input, if there is one.
    fn last_norm_backward(
        &self,
        g: &ChunkGradients<'_>,
        MlpPass { parts, activated, .. }: MlpPass<'_>,
        buffers: Buffers,
        scratch: &Scratch<'_>,
    ) -> View {
        let ChunkPass { block, k, w, ref saved, hidden, ref batch, .. } = *self;
        let mlp = parts[0].w;
        let sum = saved.feed_forward_sum.unwrap_or(buffers.dbranch);
        if !block.shape.norms.are_behind_sums() {
            let x = buffers.dbranch;
            if block.shape.norms.are_behind() && g.save.is_none() {
                self.branch(x, activated, &mlp.down, FEED_FORWARD);
            }
            let (Some(w), Some(d)) = (&w.input, &g.d.input) else { return g.dy };
            if g.save.is_none() {
                let dropout = block.feed_forward_dropout(batch);
                k.residual(&Residual { y: sum, a: saved.attention_sum, x, dropout });
            }
            return self.input_backward_to(g, sum, w, d, scratch);
        }
        if g.save.is_none() {
            let output = buffers.dbranch;
            self.products.linear(output, activated, &mlp.down);
            let dropout = block.feed_forward_dropout(batch);
            let sum = Residual { y: sum, a: hidden, x: output, dropout };
            self.norm_sum(output, saved.norm2, &sum, w.norm2);
        }
        let dsum = scratch.take_like(buffers.dbranch);
        let op = AffineBackward {
            dx: dsum,
            d: g.d.norm2,
            dy: g.dy,
            x: sum,
            statistics: saved.norm2,
            w: w.norm2,
            residual: None,
        };
        self.norm_backward(g, &op, scratch);
        dsum
    }

    /// The gradient of the sum behind attention, from the gradient of the feed-forward's input in
    /// `dbranch`.
    pub(super) fn middle_norm_backward(
        &self,
        g: &ChunkGradients<'_>,
        buffers: Buffers,
        dsum: View,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, k, w, ref saved, .. } = *self;
        let norms = block.shape.norms;
        let Buffers { dbranch, dattention_sum: dx } = buffers;
        let sum = |y| k.residual(&Residual { y, a: dsum, x: dbranch, dropout: None });
        let (d, w, statistics) = match norms {
            NormPlaces::Behind => return sum(dx),
            // The gradient of the norm's output is summed when that of attention's input is there.
            NormPlaces::BeforeBoth => return k.cast(&Cast { y: dx, x: dbranch }),
            NormPlaces::BehindSums => {
                sum(dbranch);
                (g.d.norm1, w.norm1, saved.norm1)
            }
            NormPlaces::Before
            | NormPlaces::BeforeButFirst
            | NormPlaces::Around
            | NormPlaces::BeforeEach => (g.d.norm2, w.norm2, saved.norm2),
        };
        let residual = norms.are_before().then_some(dsum);
        let x = if norms.are_beside() { self.x } else { saved.attention_sum };
        let op = AffineBackward { dx, d, dy: dbranch, x, statistics, w, residual };
        self.norm_backward(g, &op, scratch);
    }

    /// The gradient of the projected queries, keys and values, from the gradient of the sum behind
    /// attention.
    fn attention_backward(
        &self,
        g: &ChunkGradients<'_>,
        dsum: View,
        buffers: Buffers,
        scratch: &Scratch<'_>,
    ) -> View {
        let dropout = self.block.attention_dropout(&self.batch);
        let dropped = self.products.dropout_backward(buffers.dbranch, dsum, dropout);
        let dprojected = self.branch_norm_backward(g, dropped, ATTENTION, scratch);
        self.heads_backward(g, dprojected, scratch)
    }

    /// The gradient of the projected queries, keys and values, from the gradient of the output of
    /// attention's last product.
    pub(super) fn heads_backward(
        &self,
        g: &ChunkGradients<'_>,
        dprojected: View,
        scratch: &Scratch<'_>,
    ) -> View {
        let ChunkPass { block, k, w, ref saved, ref batch, .. } = *self;
        let y = saved.attention_output;
        let dgated = scratch.take_like(y);
        let op = ProductBackward {
            dx: dgated,
            d: &g.d.projection,
            dy: dprojected,
            x: self.gated_output(),
            w: &w.projection,
            dbias: g.d.projection.bias(),
            activate: None,
            accumulate: g.accumulate,
        };
        self.products.backward(&op, scratch);
        if let (Some(w), Some(d), Some(heads)) = (&w.linear, &g.d.linear, block.linear()) {
            if g.save == Some(Save::All) {
                self.mixed_channels(w, heads);
            }
            let pass = LinearPass { w, d, heads, dy: dgated };
            return self.linear_backward(g, &pass, scratch);
        }
        let [doutput, dgates] = self.gates_backward(dgated, scratch);
        let dqkv = scratch.take(saved.qkv.rows, block.shape.qkv());
        let shape = block.attention(batch);
        self.sinks_backward(g, doutput);
        let qkv = if g.save == Some(Save::All) {
            self.qkv_for_attention()
        } else if block.qk_norm().is_some() || block.reads_kv() {
            self.rotated
        } else {
            saved.qkv
        };
        let chunk_kv = g.chunk_kv;
        let op = AttentionBackward { dqkv, chunk_kv, dy: doutput, y, lse: saved.lse, qkv, shape };
        k.attention_backward(&op, scratch);
        if let Some(ChunkKv { dkv, .. }) = chunk_kv {
            // Later queries have contributed before. The queries of this chunk are the last.
            let kv = dkv.row_range(dkv.rows - dqkv.rows..dkv.rows);
            k.read_kv(&ReadKv { qkv: dqkv, kv, shape });
        }
        let dqkv = self.share_gradients(dqkv, scratch);
        if let Some(rotary) = block.rotary() {
            let shape = block.projected_heads(batch);
            k.rotate(&Rotate { qkv: dqkv, rotary, shape, inverse: true });
        }
        let dqkv = self.head_norms_backward(g, dqkv, scratch);
        self.join_gates(dqkv, dgates, scratch)
    }

    /// The backward of the norms of queries, keys and values. Returns the gradient of what the
    /// projection gives.
    fn head_norms_backward(
        &self,
        g: &ChunkGradients<'_>,
        dqkv: View,
        scratch: &Scratch<'_>,
    ) -> View {
        let ChunkPass { block, k, ref saved, ref batch, .. } = *self;
        let views = (g.d.qk_norm, self.w.qk_norm(), saved.qk_norm);
        if let ((Some([dquery, dkey]), Some(gamma), Some(statistics)), Some(norm)) =
            (views, block.qk_norm())
        {
            let scratch = &scratch.nested();
            let dgamma = QueryKey {
                query: or_scratch(dquery, gamma.query, scratch),
                key: or_scratch(dkey.filter(|_| !block.reads_kv()), gamma.key, scratch),
            };
            let op = HeadNormBackward {
                dx: dqkv,
                dgamma,
                x: saved.qkv,
                statistics,
                gamma,
                gamma_offset: block.shape.norm_offset,
                norm,
                values: block.projected_shape().values,
                shape: block.projected_heads(batch),
                accumulate: g.accumulate,
            };
            k.head_norm_backward(&op, scratch);
        }
        if dqkv.columns == saved.qkv.columns {
            return dqkv;
        }
        let y = scratch.take_like(saved.qkv);
        k.take_columns(&TakeColumns { y, x: dqkv, first: 0, scale: 1.0 });
        y
    }

    /// The gradients of the sinks, from that of attention's output.
    fn sinks_backward(&self, g: &ChunkGradients<'_>, dy: View) {
        let (Some(sinks), Some(dsinks)) = (self.w.sinks, g.d.sinks.flatten()) else { return };
        let op = SinkBackward {
            dsinks,
            dy,
            y: self.saved.attention_output,
            lse: self.saved.lse,
            sinks,
            shape: self.block.attention(&self.batch),
            accumulate: g.accumulate,
        };
        self.k.sink_backward(&op);
    }

    /// The gradient of the chunk's input, from the gradient of queries, keys and values.
    fn qkv_backward(
        &self,
        g: &ChunkGradients<'_>,
        buffers: Buffers,
        dqkv: View,
        scratch: &Scratch<'_>,
    ) {
        self.projection_backward(g, buffers.dbranch, dqkv, self.attention_input(), scratch);
        self.input_backward(g, buffers, scratch);
    }

    /// The backward of the projection of attention's input, to `dx`.
    pub(super) fn projection_backward(
        &self,
        g: &ChunkGradients<'_>,
        dx: View,
        dqkv: View,
        input: View,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, k, w, .. } = *self;
        let d = &g.d.qkv;
        let mut dy = dqkv;
        if let Some(groups) = block.column_groups() {
            dy = scratch.take_like(dqkv);
            k.regroup_columns(&RegroupColumns { y: dy, x: dqkv, groups, back: true });
        }
        let product = ProductBackward {
            dx,
            d,
            dy,
            x: input,
            w: &w.qkv,
            dbias: d.bias(),
            activate: None,
            accumulate: g.accumulate,
        };
        self.products.backward(&product, scratch);
    }

    /// The gradient of the chunk's input, from the gradient of attention's input in `dbranch`.
    pub(super) fn input_backward(
        &self,
        g: &ChunkGradients<'_>,
        buffers: Buffers,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, k, w, x, ref saved, .. } = *self;
        let Buffers { dbranch, dattention_sum, .. } = buffers;
        if !block.shape.norms_attention_input(block.number) {
            k.residual(&Residual { y: g.dx, a: dattention_sum, x: dbranch, dropout: None });
            return;
        }
        let mut residual = dattention_sum;
        if block.shape.norms == NormPlaces::BeforeBoth {
            let of_feed_forward = dattention_sum;
            let op = Residual { y: dbranch, a: of_feed_forward, x: dbranch, dropout: None };
            k.residual(&op);
            residual = g.dy;
        }
        let op = AffineBackward {
            dx: g.dx,
            d: g.d.norm1,
            dy: dbranch,
            x,
            statistics: saved.norm1,
            w: w.norm1,
            residual: Some(residual),
        };
        self.norm_backward(g, &op, scratch);
    }
}
