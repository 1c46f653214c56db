//! A transformer block: attention and feed-forward beside the residual stream, with norms before
//! the branches or behind the sums, as the family has them.

use super::kernels::{Attention, Dropout, Kernels, Linear, Norm, Rows, View};
use super::layer::{
    Backward, Forward, Init, Keep, Kind, Layer, Memory, Micro, Scratch, Tensor, tensor_views,
};
use super::shape::Shape;

/// A block of a shape, by its number.
#[derive(Clone, Debug)]
pub struct Block {
    /// The layer's index, for dropout.
    pub index: u32,
    /// The block's number, for names.
    pub number: usize,
    /// The model.
    pub shape: Shape,
}

/// What a block's forward leaves for its backward.
struct Kept {
    norm1: View,         // (R, 2)
    qkv: View,           // (R, (H + 2K) D): as attention sees it, unless heads are normed after
    heads: Option<View>, // (R, H + K), of heads that are normed
    mixed: View,         // (R, H D), attention's output
    lse: View,           // (B, H, T)
    middle: View,        // (R, C), the sum behind attention
    norm2: View,         // (R, 2)
    up: View,            // (R, I or 2 I), before the curve
    end: Option<View>,   // (R, C), the sum behind the feed-forward, where a norm follows
}

/// Scale and shift of a norm; weight and bias of a product.
type Pair = (View, Option<View>);

/// A block's tensors, or their gradients.
struct Parts {
    norm1: Pair,
    qkv: Pair,
    qk_norm: Option<[View; 2]>,
    projection: Pair,
    norm2: Pair,
    up: Pair,
    down: Pair,
}

impl Block {
    fn parts(&self, block: View) -> Parts {
        let Shape { rms_norm, qk_norm, biases, .. } = self.shape;
        let mut views = tensor_views(&self.tensors(), block).into_iter();
        let mut next = || views.next().expect("as `tensors` lists them");
        let mut pair = |second: bool| (next(), second.then(&mut next));
        Parts {
            norm1: pair(!rms_norm),
            qkv: pair(biases[0]),
            projection: pair(biases[1]),
            norm2: pair(!rms_norm),
            up: pair(biases[2]),
            down: pair(biases[2]),
            qk_norm: qk_norm.then(|| [pair(false).0, pair(false).0]),
        }
    }

    /// Where intermediates are: those that are kept in `memory`, the others in workspace.
    fn kept(&self, rows: Rows, memory: Option<(Keep, View)>, scratch: &Scratch<'_>) -> Kept {
        let (r, shape) = (rows.count(), &self.shape);
        let stashed = memory.map(|(_, view)| Scratch::new(view));
        let of_all = stashed.as_ref().unwrap_or(scratch);
        let of_attention = match memory {
            Some((Keep::All, _)) => of_all,
            _ => scratch,
        };
        Kept {
            norm1: of_all.take(2 * r),
            qkv: of_attention.take(r * shape.qkv()),
            heads: shape.qk_norm.then(|| of_attention.take(r * (shape.heads + shape.kv_heads))),
            mixed: of_attention.take(r * shape.mixed()),
            lse: of_attention.take(r * shape.heads),
            middle: of_all.take(r * shape.hidden),
            norm2: of_all.take(2 * r),
            up: of_all.take(r * shape.up()),
            end: shape.post_norm.then(|| of_all.take(r * shape.hidden)),
        }
    }

    fn attention<'a>(&self, micro: &Micro<'a>) -> Attention<'a> {
        let Shape { heads, kv_heads, head_size, causal, window, dropout, .. } = self.shape;
        Attention {
            rows: micro.rows,
            heads,
            kv_heads,
            head_size,
            causal,
            window: window.filter(|(_, from)| self.number >= *from).map(|(window, _)| window),
            lengths: micro.lengths,
            documents: micro.documents,
            past: micro.past,
            dropout: micro.dropout(dropout.attention, self.index, 0),
        }
    }

    fn norm(&self, rows: Rows) -> Norm {
        let Shape { hidden: channels, norm_epsilon: epsilon, rms_norm: rms, .. } = self.shape;
        Norm { rows: rows.count(), channels, epsilon, rms }
    }

    fn linear(&self, rows: Rows, inputs: usize, outputs: usize) -> Linear {
        Linear { rows: rows.count(), inputs, outputs, turned: self.shape.turned }
    }

    /// Dropout of attention's output and of the feed-forward's.
    fn drops(&self, micro: &Micro<'_>) -> [Option<Dropout>; 2] {
        let dropout = self.shape.dropout;
        [(dropout.projection, 1), (dropout.feed_forward, 2)]
            .map(|(probability, site)| micro.dropout(probability, self.index, site))
    }

    /// Queries, keys and values as attention sees them, from as they are kept.
    fn seen(&self, k: &dyn Kernels, micro: &Micro<'_>, w: &Parts, kept: &Kept, to: View) -> View {
        let (Some(gammas), Some(heads)) = (w.qk_norm, kept.heads) else { return kept.qkv };
        let (size, epsilon) = (self.attention(micro), self.shape.norm_epsilon);
        k.head_norm(to, heads, kept.qkv, gammas, epsilon, size);
        if let Some(rotary) = &self.shape.rotary {
            k.rotate(to, rotary, size, false);
        }
        to
    }

    /// Where [`seen`](Block::seen) puts them, if not where they are kept.
    fn place_of_seen(&self, rows: Rows, scratch: &Scratch<'_>) -> View {
        let len = if self.shape.qk_norm { rows.count() * self.shape.qkv() } else { 0 };
        scratch.take(len)
    }

    /// All of the forward that the backward needs. `n`: (R, C), used in between; ends as what the
    /// feed-forward reads.
    #[allow(clippy::too_many_arguments, reason = "all that forward and backward share")]
    fn walk(
        &self,
        k: &dyn Kernels,
        micro: &Micro<'_>,
        w: &Parts,
        x: View,
        kept: &Kept,
        n: View,
        place: View,
        memory: Option<Memory>,
    ) {
        self.attend(k, micro, w, x, kept, n, place, memory);
        let (rows, c) = (micro.rows, self.shape.hidden);
        let size = self.linear(rows, self.shape.mixed(), c);
        k.linear(n, kept.mixed, w.projection.0, w.projection.1, size);
        k.residual(kept.middle, x, n, rows, self.drops(micro)[0]);
        self.middle_norm(k, rows, w, kept, n);
        k.linear(kept.up, n, w.up.0, w.up.1, self.linear(rows, c, self.shape.up()));
    }

    /// Of that, attention's: what it reads, and what it comes to. `n` as above.
    #[allow(clippy::too_many_arguments, reason = "as above")]
    fn attend(
        &self,
        k: &dyn Kernels,
        micro: &Micro<'_>,
        w: &Parts,
        x: View,
        kept: &Kept,
        n: View,
        place: View,
        memory: Option<Memory>,
    ) {
        let Shape { hidden: c, post_norm, .. } = self.shape;
        let (rows, norm) = (micro.rows, self.norm(micro.rows));
        let mut read = x;
        if !post_norm {
            k.norm(n, kept.norm1, x, w.norm1.0, w.norm1.1, norm);
            read = n;
        }
        k.linear(kept.qkv, read, w.qkv.0, w.qkv.1, self.linear(rows, c, self.shape.qkv()));
        if let (Some(rotary), None) = (&self.shape.rotary, w.qk_norm) {
            k.rotate(kept.qkv, rotary, self.attention(micro), false);
        }
        let qkv = self.seen(k, micro, w, kept, place);
        let attention = self.attention(micro);
        if let Some(memory) = memory {
            k.remember(memory.fresh, qkv, attention);
        }
        match memory.and_then(|memory| memory.past) {
            Some(past) => k.attention_to_past(kept.mixed, qkv, past, attention),
            None => k.attention(kept.mixed, kept.lse, qkv, attention),
        }
    }

    /// What the feed-forward reads: the norm behind attention's sum, or before the feed-forward.
    fn middle_norm(&self, k: &dyn Kernels, rows: Rows, w: &Parts, kept: &Kept, n: View) {
        let ((gamma, beta), statistics) =
            if self.shape.post_norm { (w.norm1, kept.norm1) } else { (w.norm2, kept.norm2) };
        k.norm(n, statistics, kept.middle, gamma, beta, self.norm(rows));
    }

    /// The feed-forward's curve, gated or not.
    fn curve(&self, k: &dyn Kernels, wide: View, up: View) {
        let Shape { intermediate, gated, activation, .. } = self.shape;
        if gated {
            k.gate(wide, up, intermediate, activation);
        } else {
            k.activate(wide, up, activation);
        }
    }
}

impl Layer for Block {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, heads, kv_heads, head_size: d, .. } = self.shape;
        let Shape { initializer_range, layers, rms_norm, biases, turned, .. } = self.shape;
        let named = |name: &str, part: &str| {
            format!("{}.{part}", name.replace("{}", &self.number.to_string()))
        };
        let weight = Init::Normal(initializer_range);
        // Projections onto the residual stream begin smaller: 2 of them a block add up.
        let onto = Init::Normal(initializer_range / (2.0 * layers as f32).sqrt());
        let mut all = Vec::new();
        let norm = |all: &mut Vec<Tensor>, name: &str, len: usize, shifts: bool| {
            let kind = Kind::Norm;
            let (scale, shift) = (named(name, "weight"), named(name, "bias"));
            all.push(Tensor {
                name: scale,
                shape: vec![len],
                kind,
                init: Init::Ones,
                joined: false,
            });
            if shifts {
                let init = Init::Zeros;
                all.push(Tensor { name: shift, shape: vec![len], kind, init, joined: false });
            }
        };
        // Products that read the same lie one behind the other, as one.
        let linear = |all: &mut Vec<Tensor>, parts: &[(&str, usize)], inputs, bias: bool, init| {
            for (index, (name, outputs)) in parts.iter().enumerate() {
                let shape = if turned { vec![*outputs, inputs] } else { vec![inputs, *outputs] };
                let (name, kind, joined) = (named(name, "weight"), Kind::Weight, index > 0);
                all.push(Tensor { name, shape, kind, init, joined });
            }
            for (index, (name, outputs)) in parts.iter().enumerate().filter(|_| bias) {
                let (name, shape) = (named(name, "bias"), vec![*outputs]);
                let (kind, init, joined) = (Kind::Bias, Init::Zeros, index > 0);
                all.push(Tensor { name, shape, kind, init, joined });
            }
        };
        let qkv: Vec<(&str, usize)> = match names.qkv {
            [fused] => vec![(*fused, self.shape.qkv())],
            apart => apart.iter().copied().zip([heads * d, kv_heads * d, kv_heads * d]).collect(),
        };
        let i = self.shape.intermediate;
        let up: Vec<(&str, usize)> = names.up.iter().map(|name| (*name, i)).collect();
        norm(&mut all, names.norm1, c, !rms_norm);
        linear(&mut all, &qkv, c, biases[0], weight);
        linear(&mut all, &[(names.projection, c)], heads * d, biases[1], onto);
        norm(&mut all, names.norm2, c, !rms_norm);
        linear(&mut all, &up, c, biases[2], weight);
        linear(&mut all, &[(names.down, c)], i, biases[2], onto);
        if self.shape.qk_norm {
            names.qk_norm.iter().for_each(|name| norm(&mut all, name, d, false));
        }
        all
    }

    fn remembered(&self) -> usize {
        2 * self.shape.kv_heads * self.shape.head_size
    }

    fn attention_channels(&self) -> usize {
        self.shape.mixed()
    }

    fn kept_len(&self, positions: usize, keep: Keep) -> usize {
        let shape = &self.shape;
        let heads = if shape.qk_norm { shape.heads + shape.kv_heads } else { 0 };
        let end = if shape.post_norm { shape.hidden } else { 0 };
        let attention = match keep {
            Keep::All => shape.qkv() + heads + shape.mixed() + shape.heads,
            Keep::AllButAttention => 0,
        };
        let row = 4 + attention + shape.hidden + shape.up();
        // Each of nine views is aligned for itself; a sequence pays for all of it.
        positions * (row + end) + 9 * 16
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { ref micro, weights, x, y, kept, memory, scratch } = *pass;
        let Shape { hidden: c, intermediate: i, .. } = self.shape;
        let (w, rows) = (self.parts(weights), micro.rows);
        let kept = self.kept(rows, kept, scratch);
        let (n, place) = (scratch.take(rows.count() * c), self.place_of_seen(rows, scratch));
        self.walk(k, micro, &w, x, &kept, n, place, memory);
        let wide = scratch.take(rows.count() * i);
        self.curve(k, wide, kept.up);
        let size = self.linear(rows, i, c);
        let drop = self.drops(micro)[1];
        let Some(end) = kept.end else {
            k.linear(n, wide, w.down.0, w.down.1, size);
            k.residual(y, kept.middle, n, rows, drop);
            return;
        };
        k.linear(y, wide, w.down.0, w.down.1, size);
        k.residual(end, n, y, rows, drop);
        k.norm(y, kept.norm2, end, w.norm2.0, w.norm2.1, self.norm(rows));
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { ref micro, weights, gradient, accumulate, x, kept, dy, dx, scratch } = *pass;
        let Shape { hidden: c, intermediate: i, gated, activation, post_norm, .. } = self.shape;
        let (w, rows, norm) = (self.parts(weights), micro.rows, self.norm(micro.rows));
        let r = rows.count();
        let gradient = gradient.unwrap_or_else(|| scratch.take(weights.len));
        let d = self.parts(gradient);
        let (n, place) = (scratch.take(r * c), self.place_of_seen(rows, scratch));
        let (wide, dup) = (scratch.take(r * i), scratch.take(r * self.shape.up()));
        let (narrow, dmiddle) = (scratch.take(r * c), scratch.take(r * c));
        let dx = dx.unwrap_or_else(|| scratch.take(r * c));
        let (is_kept, keep) = (kept.is_some(), kept.map(|(keep, _)| keep));
        let kept = self.kept(rows, kept, scratch);
        if keep == Some(Keep::AllButAttention) {
            self.attend(k, micro, &w, x, &kept, n, place, None);
        }
        if is_kept {
            self.middle_norm(k, rows, &w, &kept, n);
        } else {
            self.walk(k, micro, &w, x, &kept, n, place, None);
        }
        self.curve(k, wide, kept.up);
        let drops = self.drops(micro);

        // Behind the feed-forward: dend is the gradient of its sum.
        let mut dend = dy;
        if let Some(end) = kept.end {
            if !is_kept {
                k.linear(narrow, wide, w.down.0, w.down.1, self.linear(rows, i, c));
                k.residual(end, n, narrow, rows, drops[1]);
                k.norm(narrow, kept.norm2, end, w.norm2.0, w.norm2.1, norm);
            }
            dend = scratch.take(r * c);
            let (dgamma, dbeta) = d.norm2;
            k.norm_backward(
                dend, dgamma, dbeta, None, dy, end, kept.norm2, w.norm2.0, norm, accumulate,
                scratch,
            );
        }
        k.dropped(narrow, dend, rows, drops[1]);
        let size = self.linear(rows, i, c);
        let (dw, db) = d.down;
        if gated {
            let dwide = scratch.take(r * i);
            k.linear_backward(dwide, dw, db, narrow, wide, w.down.0, size, accumulate, scratch);
            k.gate_backward(dup, dwide, kept.up, i, activation);
        } else {
            k.linear_backward(dup, dw, db, narrow, wide, w.down.0, size, accumulate, scratch);
            k.activate_backward(dup, kept.up, activation);
        }
        let size = self.linear(rows, c, self.shape.up());
        let (dw, db) = d.up;
        k.linear_backward(narrow, dw, db, dup, n, w.up.0, size, accumulate, scratch);

        // To the sum behind attention, by the norm that the feed-forward read.
        let ((dgamma, dbeta), gamma, statistics) = if post_norm {
            k.residual(narrow, dend, narrow, rows, None);
            (d.norm1, w.norm1.0, kept.norm1)
        } else {
            (d.norm2, w.norm2.0, kept.norm2)
        };
        let residual = (!post_norm).then_some(dend);
        k.norm_backward(
            dmiddle,
            dgamma,
            dbeta,
            residual,
            narrow,
            kept.middle,
            statistics,
            gamma,
            norm,
            accumulate,
            scratch,
        );

        // Attention.
        k.dropped(narrow, dmiddle, rows, drops[0]);
        let size = self.linear(rows, self.shape.mixed(), c);
        let (dw, db) = d.projection;
        let dmixed = scratch.take(r * self.shape.mixed());
        let weight = w.projection.0;
        k.linear_backward(dmixed, dw, db, narrow, kept.mixed, weight, size, accumulate, scratch);
        let (dqkv, attention) = (scratch.take(r * self.shape.qkv()), self.attention(micro));
        let qkv = if keep == Some(Keep::All) {
            self.seen(k, micro, &w, &kept, place)
        } else if self.shape.qk_norm {
            place
        } else {
            kept.qkv
        };
        k.attention_backward(dqkv, dmixed, kept.mixed, kept.lse, qkv, attention, scratch);
        if let Some(rotary) = &self.shape.rotary {
            k.rotate(dqkv, rotary, attention, true);
        }
        if let (Some(dgammas), Some(gammas), Some(heads)) = (d.qk_norm, w.qk_norm, kept.heads) {
            k.head_norm_backward(
                dqkv, dgammas, kept.qkv, heads, gammas, attention, accumulate, scratch,
            );
        }
        let size = self.linear(rows, c, self.shape.qkv());
        let (dw, db) = d.qkv;
        if post_norm {
            k.linear_backward(narrow, dw, db, dqkv, x, w.qkv.0, size, accumulate, scratch);
            k.residual(dx, dmiddle, narrow, rows, None);
            return;
        }
        k.norm(n, kept.norm1, x, w.norm1.0, w.norm1.1, norm);
        k.linear_backward(narrow, dw, db, dqkv, n, w.qkv.0, size, accumulate, scratch);
        let (dgamma, dbeta) = d.norm1;
        let (residual, statistics) = (Some(dmiddle), kept.norm1);
        k.norm_backward(
            dx, dgamma, dbeta, residual, narrow, x, statistics, w.norm1.0, norm, accumulate,
            scratch,
        );
    }
}
