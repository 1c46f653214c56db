//! Scaled dot-product attention over whole micro-batches and over chunks of long sequences.

use super::batch::BatchView;
use super::dropout::Dropout;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// The most channels of a head that kernels have room for.
pub const HEAD_LIMIT: usize = 512;

/// Positions of the largest tile of keys on any device.
const KEY_TILE: usize = 128;

/// The layout of queries, keys and values, and the keys that each query sees.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape<'a> {
    /// The rows, their documents, and the positions before them.
    pub batch: BatchView<'a>,
    /// H.
    pub heads: usize,
    /// K: heads of keys and values; each serves H ÷ K heads of queries.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// True when a query sees no later position.
    pub causal: bool,
    /// A query sees keys that are fewer than this many positions away.
    pub window: Option<usize>,
    /// The factor of scores; `None`: 1 ÷ √D.
    pub scale: Option<f32>,
    /// The limit of scores: a score s becomes cap tanh(s ÷ cap).
    pub cap: Option<f32>,
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout<'a>>,
}

impl<'a> AttentionShape<'a> {
    /// Causal attention without a window or dropout, with `[H, K, D]`.
    pub fn causal(
        batch: BatchView<'a>,
        [heads, kv_heads, head_size]: [usize; 3],
    ) -> AttentionShape<'a> {
        AttentionShape {
            batch,
            heads,
            kv_heads,
            head_size,
            causal: true,
            window: None,
            scale: None,
            cap: None,
            dropout: None,
        }
    }

    /// R.
    pub fn rows(&self) -> usize {
        self.batch.rows()
    }

    /// H D: channels of the output.
    pub fn width(&self) -> usize {
        self.heads * self.head_size
    }

    /// 2 K D: channels of keys and values side by side.
    pub fn kv_width(&self) -> usize {
        2 * self.kv_heads * self.head_size
    }

    /// (H + 2 K) D: channels of queries, keys and values side by side.
    pub fn qkv_width(&self) -> usize {
        self.width() + self.kv_width()
    }

    /// `[H, K, D]`.
    pub(crate) fn sizes(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.head_size]
    }

    /// The factor of scores.
    pub fn score_scale(&self) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (self.head_size as f32).sqrt())
    }

    /// Positions up to the last of a chunk: before + R.
    pub(crate) fn positions(&self) -> usize {
        self.batch.same_positions_before() + self.rows()
    }

    /// The first position that a chunk's tensor of keys and values has. Those behind a window may
    /// be missing.
    pub(crate) fn first_kept(&self, kv: View) -> usize {
        self.positions() - kv.rows
    }

    /// True if a tensor has the keys and values that the queries of a chunk see, in whole tiles.
    fn are_kept(&self, kv: View) -> bool {
        let seen = |window: usize| (self.batch.same_positions_before() + 1).saturating_sub(window);
        let seen = self.window.map_or(0, seen);
        let first = self.positions().checked_sub(kv.rows);
        first.is_some_and(|first| first <= seen && first.is_multiple_of(KEY_TILE))
    }
}

/// Attention of each query to the keys and values of its sequence.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Output. (R, H D).
    pub y: View,
    /// Floats: log-sum-exp of the scores. (R, H) numbers, laid out sequence by sequence; within a
    /// sequence, head by head.
    pub lse: View,
    /// Queries, keys and values side by side. (R, (H + 2 K) D).
    pub qkv: View,
    /// For a chunk: keys and values of its sequence up to its last position; with a window, those
    /// that lie behind it may be missing, in whole tiles of 128. A chunk is causal, and the
    /// positions before it are whole tiles of 64. (P, 2 K D) for the last P of before + R.
    pub kv: Option<View>,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// The keys and values of a chunk's sequence up to the chunk's last position, and their gradients.
#[derive(Clone, Copy, Debug)]
pub struct ChunkKv {
    /// Keys and values, as [`Attention`] has them. (P, 2 K D).
    pub kv: View,
    /// Floats: their gradients. (P, 2 K D).
    pub dkv: View,
    /// True when `dkv` already holds the contributions of later queries.
    pub accumulate: bool,
}

/// Computes dqkv from dy. For a chunk, the gradients of keys and values go to `chunk_kv` instead.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward<'a> {
    /// (R, (H + 2 K) D).
    pub dqkv: View,
    /// Keys, values and their gradients, for a chunk.
    pub chunk_kv: Option<ChunkKv>,
    /// (R, H D).
    pub dy: View,
    /// The forward's output. (R, H D).
    pub y: View,
    /// The forward's log-sum-exp. (R, H).
    pub lse: View,
    /// The forward's input. (R, (H + 2 K) D).
    pub qkv: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

const MISSING: &str = "the chunk's keys and values are not those that its queries see";

impl KernelOperation for Attention<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let Attention { y, lse, qkv, kv, shape } = *self;
        let rows = shape.rows();
        let dtype = qkv.dtype;
        views.writes("y", y, [rows, shape.width()], dtype);
        views.writes("lse", lse, [rows, shape.heads], Dtype::F32);
        views.reads("qkv", qkv, [rows, shape.qkv_width()], dtype);
        if let Some(kv) = kv {
            views.reads("kv", kv, [kv.rows, shape.kv_width()], dtype);
            views.rule(shape.are_kept(kv), MISSING);
        }
    }
}

impl KernelOperation for AttentionBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AttentionBackward { dqkv, chunk_kv, dy, y, lse, qkv, shape } = *self;
        let rows = shape.rows();
        let dtype = qkv.dtype;
        match chunk_kv {
            None => views.writes("dqkv", dqkv, [rows, shape.qkv_width()], dtype),
            Some(ChunkKv { kv, dkv, .. }) => {
                let all = [kv.rows, shape.kv_width()];
                views.rule(shape.are_kept(kv), MISSING);
                // The columns of keys and values are written later, from `dkv`.
                views.writes_opaque("dqkv", dqkv, [rows, shape.qkv_width()], dtype);
                views.writes("dkv", dkv, all, Dtype::F32);
                views.reads("kv", kv, all, dtype);
            }
        }
        views.reads("dy", dy, [rows, shape.width()], dtype);
        views.reads("y", y, [rows, shape.width()], dtype);
        views.reads("lse", lse, [rows, shape.heads], Dtype::F32);
        views.reads("qkv", qkv, [rows, shape.qkv_width()], dtype);
    }
}
