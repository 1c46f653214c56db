//! One chunk of a micro-batch through a block: what runs on which views, forward and backward.

use super::{Block, Parts};
use crate::kernels::BatchView;
use crate::kernels::{Apart, Kernels};
use crate::models::layer::Save;
use crate::models::shape::Shape;
use crate::tensor::Scratch;
use crate::tensor::View;

/// What a block's forward leaves for its backward.
pub(super) struct Kept {
    pub(super) norm1: View,         // (R, 2)
    pub(super) qkv: View, // (R, (H + 2K) D): as attention sees it, unless heads are normed after
    pub(super) heads: Option<View>, // (R, H + K), of heads that are normed
    pub(super) mixed: View, // (R, H D), attention's output
    pub(super) lse: View, // (B, H, T)
    pub(super) middle: View, // (R, C), the sum behind attention
    pub(super) norm2: View, // (R, 2)
    pub(super) up: View,  // (R, I or 2 I), before the curve
    pub(super) end: Option<View>, // (R, C), the sum behind the feed-forward, where a norm follows
}

/// Where keys and values are, if not beside their queries alone.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    /// Where those of these rows go. (R, 2 K D).
    pub(super) fresh: Option<View>,
    /// Those from before, in a cache.
    pub(super) past: Option<View>,
    /// All up to these, when a sequence is walked in chunks. (past + T, 2 K D).
    pub(super) all: Option<View>,
}

/// What forward and backward of a chunk share.
pub(super) struct Stage<'a> {
    pub(super) block: &'a Block,
    pub(super) k: &'a dyn Kernels,
    pub(super) w: &'a Parts,
    pub(super) batch: BatchView<'a>,
    pub(super) x: View,
    pub(super) saved: Kept,
    /// (R, C), used in between; behind a walk what the feed-forward reads.
    pub(super) n: View,
    /// Where attention's normed queries and keys are, if they are not where they are kept.
    pub(super) place: View,
    pub(super) keys: Keys,
}

impl Stage<'_> {
    /// All of the forward that the backward needs.
    fn walk(&self) {
        self.attend();
        let Stage { block, k, w, x, ref saved, n, .. } = *self;
        let (rows, c) = (self.batch.rows, block.shape.hidden);
        let size = block.linear(rows, block.shape.mixed(), c);
        k.linear(n, saved.mixed, w.projection.0, w.projection.1, size);
        k.residual(saved.middle, x, n, rows, block.drops(&self.batch)[0]);
        self.middle_norm();
        k.linear(saved.up, n, w.up.0, w.up.1, block.linear(rows, c, block.shape.up()));
    }

    /// Of that, attention's: what it reads, and what it comes to.
    fn attend(&self) {
        let Stage { k, ref saved, keys, .. } = *self;
        let (qkv, size) = (self.project(), self.block.attention(&self.batch));
        match keys.past {
            Some(past) => k.attention_to_past(saved.mixed, qkv, past, size),
            None => k.attention(saved.mixed, saved.lse, qkv, keys.all, size),
        }
    }

    /// Queries, keys and values as attention sees them.
    pub(super) fn project(&self) -> View {
        let Stage { block, k, w, x, ref saved, n, .. } = *self;
        let Shape { hidden: c, post_norm, .. } = block.shape;
        let rows = self.batch.rows;
        let mut read = x;
        if !post_norm {
            k.norm(n, saved.norm1, x, w.norm1.0, w.norm1.1, block.norm(rows));
            read = n;
        }
        k.linear(saved.qkv, read, w.qkv.0, w.qkv.1, block.linear(rows, c, block.shape.qkv()));
        if let (Some(rotary), None) = (&block.shape.rotary, w.qk_norm) {
            k.rotate(saved.qkv, rotary, block.attention(&self.batch), false);
        }
        self.seen()
    }

    /// The same from as they are kept; what is to be remembered of them is.
    pub(super) fn seen(&self) -> View {
        let Stage { block, k, w, ref saved, place, .. } = *self;
        let size = block.attention(&self.batch);
        let mut qkv = saved.qkv;
        if let (Some(gammas), Some(heads)) = (w.qk_norm, saved.heads) {
            k.head_norm(place, heads, saved.qkv, gammas, block.shape.norm_epsilon, size);
            if let Some(rotary) = &block.shape.rotary {
                k.rotate(place, rotary, size, false);
            }
            qkv = place;
        }
        if let Some(fresh) = self.keys.fresh {
            k.remember(fresh, qkv, size);
        }
        qkv
    }

    /// What the feed-forward reads: the norm behind attention's sum, or before the feed-forward.
    fn middle_norm(&self) {
        let Stage { block, k, w, ref saved, n, .. } = *self;
        let ((gamma, beta), statistics) =
            if block.shape.post_norm { (w.norm1, saved.norm1) } else { (w.norm2, saved.norm2) };
        k.norm(n, statistics, saved.middle, gamma, beta, block.norm(self.batch.rows));
    }

    /// The feed-forward's curve, gated or not.
    fn curve(&self, wide: View) {
        let Shape { intermediate, gated, activation, .. } = self.block.shape;
        if gated {
            self.k.gate(wide, self.saved.up, intermediate, activation);
        } else {
            self.k.activate(wide, self.saved.up, activation);
        }
    }

    pub(super) fn forward(&self, y: View, scratch: &Scratch<'_>) {
        self.walk();
        let Stage { block, k, w, ref saved, n, .. } = *self;
        let Shape { hidden: c, intermediate: i, .. } = block.shape;
        let rows = self.batch.rows;
        let wide = scratch.take(rows.count() * i);
        self.curve(wide);
        let size = block.linear(rows, i, c);
        let drop = block.drops(&self.batch)[1];
        let Some(end) = saved.end else {
            k.linear(n, wide, w.down.0, w.down.1, size);
            k.residual(y, saved.middle, n, rows, drop);
            return;
        };
        k.linear(y, wide, w.down.0, w.down.1, size);
        k.residual(end, n, y, rows, drop);
        k.norm(y, saved.norm2, end, w.norm2.0, w.norm2.1, block.norm(rows));
    }

    /// `dy` and `dx` are the chunk's; `keep`: what was kept.
    #[allow(clippy::too_many_arguments, reason = "all that a backward has beside its forward")]
    pub(super) fn backward(
        &self,
        d: &Parts,
        save: Option<Save>,
        dy: View,
        dx: View,
        apart: Option<Apart>,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let Stage { block, k, w, x, ref saved, n, place, .. } = *self;
        let Shape { hidden: c, intermediate: i, gated, activation, post_norm, .. } = block.shape;
        let (rows, norm) = (self.batch.rows, block.norm(self.batch.rows));
        let r = rows.count();
        let (wide, dup) = (scratch.take(r * i), scratch.take(r * block.shape.up()));
        let (narrow, dmiddle) = (scratch.take(r * c), scratch.take(r * c));
        match save {
            None => self.walk(),
            Some(Save::All) => self.middle_norm(),
            Some(Save::AllButAttention) => {
                self.attend();
                self.middle_norm();
            }
        }
        self.curve(wide);
        let drops = block.drops(&self.batch);
        // Behind the feed-forward: dend is the gradient of its sum.
        let mut dend = dy;
        if let Some(end) = saved.end {
            if save.is_none() {
                k.linear(narrow, wide, w.down.0, w.down.1, block.linear(rows, i, c));
                k.residual(end, n, narrow, rows, drops[1]);
                k.norm(narrow, saved.norm2, end, w.norm2.0, w.norm2.1, norm);
            }
            dend = scratch.take(r * c);
            let (dgamma, dbeta) = d.norm2;
            k.norm_backward(
                dend,
                dgamma,
                dbeta,
                None,
                dy,
                end,
                saved.norm2,
                w.norm2.0,
                norm,
                accumulate,
                scratch,
            );
        }
        k.dropped(narrow, dend, rows, drops[1]);
        let size = block.linear(rows, i, c);
        let (dw, db) = d.down;
        if gated {
            let dwide = scratch.take(r * i);
            k.linear_backward(dwide, dw, db, narrow, wide, w.down.0, size, accumulate, scratch);
            k.gate_backward(dup, dwide, saved.up, i, activation);
        } else {
            k.linear_backward(dup, dw, db, narrow, wide, w.down.0, size, accumulate, scratch);
            k.activate_backward(dup, saved.up, activation);
        }
        let size = block.linear(rows, c, block.shape.up());
        let (dw, db) = d.up;
        k.linear_backward(narrow, dw, db, dup, n, w.up.0, size, accumulate, scratch);

        // To the sum behind attention, by the norm that the feed-forward read.
        let ((dgamma, dbeta), gamma, statistics) = if post_norm {
            k.residual(narrow, dend, narrow, rows, None);
            (d.norm1, w.norm1.0, saved.norm1)
        } else {
            (d.norm2, w.norm2.0, saved.norm2)
        };
        let residual = (!post_norm).then_some(dend);
        k.norm_backward(
            dmiddle,
            dgamma,
            dbeta,
            residual,
            narrow,
            saved.middle,
            statistics,
            gamma,
            norm,
            accumulate,
            scratch,
        );

        // Attention.
        k.dropped(narrow, dmiddle, rows, drops[0]);
        let size = block.linear(rows, block.shape.mixed(), c);
        let (dw, db) = d.projection;
        let dmixed = scratch.take(r * block.shape.mixed());
        let weight = w.projection.0;
        k.linear_backward(dmixed, dw, db, narrow, saved.mixed, weight, size, accumulate, scratch);
        let (dqkv, attention) = (scratch.take(r * block.shape.qkv()), block.attention(&self.batch));
        let qkv = if save == Some(Save::All) {
            self.seen()
        } else if block.shape.qk_norm {
            place
        } else {
            saved.qkv
        };
        k.attention_backward(dqkv, dmixed, saved.mixed, saved.lse, qkv, apart, attention, scratch);
        if let Some(Apart { dkv, .. }) = apart {
            // What later queries gave has come; these are the last.
            let len = r * attention.kv_width();
            k.recall(dqkv, dkv.part(dkv.len() - len..dkv.len()), attention);
        }
        if let Some(rotary) = &block.shape.rotary {
            k.rotate(dqkv, rotary, attention, true);
        }
        if let (Some(dgammas), Some(gammas), Some(heads)) = (d.qk_norm, w.qk_norm, saved.heads) {
            k.head_norm_backward(
                dqkv, dgammas, saved.qkv, heads, gammas, attention, accumulate, scratch,
            );
        }
        let size = block.linear(rows, c, block.shape.qkv());
        let (dw, db) = d.qkv;
        if post_norm {
            k.linear_backward(narrow, dw, db, dqkv, x, w.qkv.0, size, accumulate, scratch);
            k.residual(dx, dmiddle, narrow, rows, None);
            return;
        }
        k.norm(n, saved.norm1, x, w.norm1.0, w.norm1.1, norm);
        k.linear_backward(narrow, dw, db, dqkv, n, w.qkv.0, size, accumulate, scratch);
        let (dgamma, dbeta) = d.norm1;
        let (residual, statistics) = (Some(dmiddle), saved.norm1);
        k.norm_backward(
            dx, dgamma, dbeta, residual, narrow, x, statistics, w.norm1.0, norm, accumulate,
            scratch,
        );
    }
}
