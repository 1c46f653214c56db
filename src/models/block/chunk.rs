//! The forward of a block on one chunk of a sequence, or on a whole micro-batch, in pieces that its
//! backward can recompute.

use super::TransformerBlock;
use super::carried::CarriedViews;
use super::products::Products;
use super::routing::RoutingViews;
use super::saved::{Activations, Branch, Positive};
use super::shared::OwnViews;
use super::state::ChunkState;
use super::tensors::{FeedForward, Mlp, Product, Weights};
use crate::kernels::{
    Attention, BatchView, CachedAttention, Cast, HeadNorm, Kernels, PackPositive, RegroupColumns,
    Residual, Rotate, Scale, Sink, SplitGates, UnpackPositive, WriteKv,
};
use crate::models::layer::KvCache;
use crate::models::norms::Affine;
use crate::models::shape::NormPlaces;
use crate::tensor::{Scratch, View};

/// The indices of attention and of the feed-forward among the branches.
pub(super) const ATTENTION: usize = 0;
pub(super) const FEED_FORWARD: usize = 1;

/// Views of keys and values, beside those in the projection.
#[derive(Clone, Copy)]
pub(super) struct KvViews {
    /// The places for the keys and values of these rows: for the KV cache, for later chunks, and
    /// for other blocks. (R, 2 K D).
    pub(super) new: [Option<View>; 3],
    /// Keys and values of earlier positions, in the KV cache. (B P, 2 K D).
    pub(super) cached: Option<View>,
    /// For a chunk: keys and values of the positions that it attends to, its own included.
    /// (P, 2 K D).
    pub(super) chunk: Option<View>,
}

impl KvViews {
    /// None of them.
    pub(super) const NONE: KvViews = KvViews { new: [None; 3], cached: None, chunk: None };

    /// Those of a pass that computes attention. A chunk's are passed on to later chunks, and where
    /// other blocks read them, `for_others` is their place.
    pub(super) fn new(
        kv_cache: Option<KvCache>,
        state: Option<ChunkState>,
        for_others: Option<View>,
    ) -> KvViews {
        let cache = kv_cache.map(|cache| cache.new);
        KvViews {
            new: [cache, state.map(|state| state.own()), for_others],
            cached: kv_cache.and_then(|cache| cache.cached),
            chunk: state.map(|state| state.seen()),
        }
    }
}

/// A pass over a chunk, which forward and backward share.
pub(super) struct ChunkPass<'a> {
    pub(super) block: &'a TransformerBlock,
    pub(super) k: &'a dyn Kernels,
    pub(super) w: &'a Weights<'a>,
    pub(super) batch: BatchView<'a>,
    /// The chunk's input. (R, C).
    pub(super) x: View,
    pub(super) saved: Activations,
    /// Inputs and outputs of the branches, in turn. After
    /// [`recompute_feed_forward_input`](ChunkPass::recompute_feed_forward_input): the input of the
    /// feed-forward. (R, C).
    pub(super) hidden: View,
    /// Queries and keys that were normed and rotated, where their heads are normed.
    /// (R, (H + 2 K) D). With linear attention: what the delta rule reads. (R, M).
    pub(super) rotated: View,
    /// The projection, where it has gates or lies head by head.
    pub(super) projected: View,
    /// The output of attention or of the delta rule behind its gates, if it has any.
    pub(super) gated: View,
    pub(super) products: Products<'a>,
    pub(super) kv: KvViews,
    /// With linear attention: what passes along the sequences.
    pub(super) carried: CarriedViews,
    /// With experts: boundaries of the router.
    pub(super) routing: RoutingViews,
    /// The other boundaries of the block beside hidden states.
    pub(super) own: OwnViews,
}

impl ChunkPass<'_> {
    pub(super) fn norm(&self, y: View, statistics: View, x: View, w: Affine<View>) {
        self.k.norm(&self.block.shape.norm(y, statistics, x, w));
    }

    /// The norm of a sum on the residual stream, to `y`.
    pub(super) fn norm_sum(&self, y: View, statistics: View, sum: &Residual<'_>, w: Affine<View>) {
        self.k.residual_norm(sum, &self.block.shape.norm(y, statistics, sum.y, w));
    }

    /// The output of a branch, to `y`: the product of `x`, its norm if the family has one, and its
    /// factor.
    pub(super) fn branch(&self, y: View, x: View, product: &Product<View>, which: usize) {
        match (&self.w.branch_norms, &self.saved.branches) {
            (Some(norms), Some(branches)) => {
                let Branch { output, statistics } = branches[which];
                self.products.linear(output, x, product);
                self.norm(y, statistics, output, norms[which]);
            }
            _ => self.products.linear(y, x, product),
        }
        let factor = self.block.shape.residual_scale;
        if factor != 1.0 {
            self.k.scale(&Scale { y, x: y, factor, by: None });
        }
    }

    /// Computes the chunk's output, to `y`.
    pub(super) fn forward(&self, y: View, scratch: &Scratch<'_>) {
        self.recompute_feed_forward_input(scratch);
        match &self.w.feed_forward {
            FeedForward::Dense(mlp) => self.dense_forward(mlp, y, scratch),
            FeedForward::Experts(experts) => self.experts_forward(experts, y, scratch),
            FeedForward::Apart => unreachable!("a slice's output is a partial sum"),
        }
        if let by @ Some(_) = self.w.output_scalar {
            self.k.scale(&Scale { y, x: y, factor: 1.0, by });
        }
    }

    /// Computes the chunk's output, to `y`, from the feed-forward's input in `hidden`.
    fn dense_forward(&self, mlp: &Mlp<View>, y: View, scratch: &Scratch<'_>) {
        let ChunkPass { block, k, w, ref saved, hidden, ref batch, .. } = *self;
        self.products.linear(saved.up, hidden, &mlp.up);
        if let Some(Positive { packed, room }) = saved.positive {
            k.pack_positive(&PackPositive { packed, x: saved.up, room });
        }
        let activated = scratch.take(batch.rows(), block.shape.intermediate);
        self.products.activate(activated, saved.up);
        let dropout = block.feed_forward_dropout(batch);
        let sum = saved.feed_forward_sum.unwrap_or(y);
        if !block.shape.norms.are_behind_sums() {
            self.branch(hidden, activated, &mlp.down, FEED_FORWARD);
            k.residual(&Residual { y: sum, a: saved.attention_sum, x: hidden, dropout });
            if let Some(w) = &w.input {
                self.add_input(y, sum, w, scratch);
            }
            return;
        }
        self.products.linear(y, activated, &mlp.down);
        let sum = Residual { y: sum, a: hidden, x: y, dropout };
        self.norm_sum(y, saved.norm2, &sum, w.norm2);
    }

    /// Computes attention's activations and its sum, and the feed-forward's input.
    pub(super) fn recompute_feed_forward_input(&self, scratch: &Scratch<'_>) {
        self.recompute_attention(self.attention_input(), scratch);
        self.branch(self.hidden, self.gated_output(), &self.w.projection, ATTENTION);
        self.add_attention();
    }

    /// Computes attention's sum from the output of its branch in `hidden`, and the feed-forward's
    /// input.
    pub(super) fn add_attention(&self) {
        let ChunkPass { block, x: a, ref saved, hidden, ref batch, .. } = *self;
        let y = saved.attention_sum;
        let dropout = block.attention_dropout(batch);
        let sum = Residual { y, a, x: hidden, dropout };
        match self.feed_forward_norm() {
            Some((statistics, norm)) if !block.shape.norms.are_beside() => {
                self.norm_sum(hidden, statistics, &sum, norm);
            }
            _ => {
                self.k.residual(&sum);
                self.norm_saved_sum();
            }
        }
    }

    /// Computes the input of attention: the chunk's input, or its norm in `hidden`.
    pub(super) fn attention_input(&self) -> View {
        let ChunkPass { block, w, x, ref saved, hidden, .. } = *self;
        if !block.shape.norms_attention_input(block.number) {
            return x;
        }
        self.norm(hidden, saved.norm1, x, w.norm1);
        hidden
    }

    /// Computes attention's activations, from its input to its output.
    pub(super) fn recompute_attention(&self, input: View, scratch: &Scratch<'_>) {
        let ChunkPass { block, k, w, ref saved, kv, .. } = *self;
        let qkv = self.project_qkv(input);
        if let Some((w, heads)) = w.linear.as_ref().zip(block.linear()) {
            return self.delta_rule(saved.attention_output, w, heads, scratch);
        }
        let shape = block.attention(&self.batch);
        let y = saved.attention_output;
        let lse = saved.lse;
        match kv.cached {
            Some(cache) => k.cached_attention(&CachedAttention { y, lse, qkv, cache, shape }),
            None => k.attention(&Attention { y, lse, qkv, kv: kv.chunk, shape }),
        }
        if let Some(sinks) = w.sinks {
            k.sink(&Sink { y, lse, sinks, shape });
        }
    }

    /// Computes what later chunks read of this one: keys and values, or states. `is_saved`: from
    /// the saved projection.
    pub(super) fn keys(&self, is_saved: bool, scratch: &Scratch<'_>) {
        if let Some(x) = self.own.kv {
            self.kv.new.iter().flatten().for_each(|&y| self.k.cast(&Cast { y, x }));
            return;
        }
        if is_saved {
            self.qkv_for_attention();
        } else {
            self.project_qkv(self.attention_input());
        }
        if let Some((w, heads)) = self.w.linear.as_ref().zip(self.block.linear()) {
            let y = scratch.take_like(self.saved.attention_output);
            self.delta_rule(y, w, heads, scratch);
        }
    }

    /// Projects attention's input to queries, keys and values, as attention sees them.
    pub(super) fn project_qkv(&self, input: View) -> View {
        let ChunkPass { block, k, w, ref saved, .. } = *self;
        if let Some(gates) = saved.gates {
            let x = self.projected;
            self.products.linear(x, input, &w.qkv);
            let shape = block.attention(&self.batch);
            k.split_gates(&SplitGates { qkv: saved.qkv, gates, x, shape });
        } else if let Some(groups) = block.column_groups() {
            let x = self.projected;
            self.products.linear(x, input, &w.qkv);
            k.regroup_columns(&RegroupColumns { y: saved.qkv, x, groups, back: false });
        } else {
            self.products.linear(saved.qkv, input, &w.qkv);
        }
        if let (Some(rotary), None, None) = (block.rotary(), &w.qk_norm, &w.linear) {
            let shape = block.projected_heads(&self.batch);
            k.rotate(&Rotate { qkv: saved.qkv, rotary, shape, inverse: false });
        }
        self.qkv_for_attention()
    }

    /// Queries, keys and values as attention sees them, recomputed from the saved projections.
    /// Writes new keys and values to the KV cache and to the chunk state.
    pub(super) fn qkv_for_attention(&self) -> View {
        let ChunkPass { block, k, w, ref saved, rotated, .. } = *self;
        if let Some((w, heads)) = w.linear.as_ref().zip(block.linear()) {
            return self.mixed_channels(w, heads);
        }
        let shape = block.projected_heads(&self.batch);
        let mut qkv = saved.qkv;
        let norms = (block.qk_norm(), w.qk_norm(), saved.qk_norm);
        if let (Some(norm), Some(gamma), Some(statistics)) = norms {
            let y = if block.reads_kv() { self.projected } else { rotated };
            let x = saved.qkv;
            let epsilon = block.shape.norm_epsilon;
            let gamma_offset = block.shape.norm_offset;
            let values = block.projected_shape().values;
            k.head_norm(&HeadNorm {
                y,
                statistics,
                x,
                gamma,
                gamma_offset,
                epsilon,
                norm,
                values,
                shape,
            });
            if let Some(rotary) = block.rotary() {
                k.rotate(&Rotate { qkv: y, rotary, shape, inverse: false });
            }
            qkv = y;
        }
        if let Some(kv) = self.own.kv {
            qkv = self.beside_kv(qkv, kv);
        }
        let shape = block.attention(&self.batch);
        for kv in self.kv.new.into_iter().flatten() {
            k.write_kv(&WriteKv { kv, qkv, shape });
        }
        qkv
    }

    /// Computes the feed-forward's input from attention's sum, which was saved, or from the block's
    /// input.
    pub(super) fn norm_saved_sum(&self) {
        let are_beside = self.block.shape.norms.are_beside();
        let x = if are_beside { self.x } else { self.saved.attention_sum };
        match self.feed_forward_norm() {
            Some((statistics, norm)) => self.norm(self.hidden, statistics, x, norm),
            None => self.k.cast(&Cast { y: self.hidden, x }),
        }
    }

    /// The norm in front of the feed-forward, if there is one.
    fn feed_forward_norm(&self) -> Option<(View, Affine<View>)> {
        let ChunkPass { block, w, ref saved, .. } = *self;
        match block.shape.norms {
            NormPlaces::BehindSums | NormPlaces::BeforeBoth => Some((saved.norm1, w.norm1)),
            NormPlaces::Before
            | NormPlaces::BeforeButFirst
            | NormPlaces::Around
            | NormPlaces::BeforeEach => Some((saved.norm2, w.norm2)),
            NormPlaces::Behind => None,
        }
    }

    /// The input of the ReLU, from the positive numbers that were saved. All others become 0: ReLU
    /// and its derivative do not tell them apart. If there were more positive numbers than room,
    /// the input is recomputed.
    pub(super) fn unpack_up(&self, mlp: &Mlp<View>) {
        let Some(Positive { packed, room }) = self.saved.positive else { return };
        let y = self.saved.up;
        if !self.k.unpack_positive(&UnpackPositive { y, packed, room }) {
            self.products.linear(y, self.hidden, &mlp.up);
        }
    }
}
