//! GPT-2 (Radford et al. 2019), as transformers has it: learned positions, pre-norm blocks, a
//! final norm, a head tied to the embedding. Weights of products are (inputs, outputs).

use super::kernels::{Attention, Kernels, Linear, Norm, Rows, View};
use super::layer::{Backward, Forward, Init, Kind, Layer, Micro, Scratch, Tensor, tensor_views};
use super::shape::Shape;

/// Adds positions: what stands between the embedding and the first block.
#[derive(Clone, Debug)]
pub struct Stem {
    /// The layer's index, for dropout.
    pub index: u32,
    /// The model.
    pub shape: Shape,
}

impl Layer for Stem {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { positions, hidden, initializer_range, .. } = self.shape;
        vec![Tensor {
            name: "transformer.wpe.weight".into(),
            shape: vec![positions, hidden],
            kind: Kind::Weight,
            init: Init::Normal(initializer_range),
        }]
    }

    fn products(&self) -> usize {
        0
    }

    fn kept_len(&self, _positions: usize) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { micro, weights, x, y, .. } = *pass;
        let dropout = micro.dropout(self.shape.dropout.embedding, self.index, 0);
        k.add_positions(y, x, weights.part(0..self.tensors()[0].len()), micro.rows);
        if dropout.is_some() {
            k.dropped(y, y, micro.rows, dropout);
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { micro, gradient, accumulate, dy, dx, scratch, .. } = *pass;
        let dropout = micro.dropout(self.shape.dropout.embedding, self.index, 0);
        let dx = dx.unwrap_or_else(|| scratch.take(dy.len));
        k.dropped(dx, dy, micro.rows, dropout);
        if let Some(gradient) = gradient {
            let dw = gradient.part(0..self.tensors()[0].len());
            k.add_positions_backward(dw, dx, micro.rows, accumulate);
        }
    }
}

/// Attention and feed-forward, each behind a norm and beside the residual stream.
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
    norm1: View,  // (R, 2)
    qkv: View,    // (R, 3C)
    mixed: View,  // (R, C), attention's output
    lse: View,    // (B, H, T)
    middle: View, // (R, C), the stream after attention
    norm2: View,  // (R, 2)
    up: View,     // (R, I), before gelu
}

/// A block's tensors, or their gradients.
struct Parts {
    norm1: [View; 2],
    attention: [View; 2],
    projection: [View; 2],
    norm2: [View; 2],
    up: [View; 2],
    down: [View; 2],
}

impl Block {
    fn parts(&self, block: View) -> Parts {
        let views = tensor_views(&self.tensors(), block);
        let pair = |at: usize| [views[2 * at], views[2 * at + 1]];
        Parts {
            norm1: pair(0),
            attention: pair(1),
            projection: pair(2),
            norm2: pair(3),
            up: pair(4),
            down: pair(5),
        }
    }

    fn kept(&self, rows: Rows, memory: &Scratch<'_>) -> Kept {
        let (r, c) = (rows.count(), self.shape.hidden);
        Kept {
            norm1: memory.take(2 * r),
            qkv: memory.take(3 * r * c),
            mixed: memory.take(r * c),
            lse: memory.take(r * self.shape.heads),
            middle: memory.take(r * c),
            norm2: memory.take(2 * r),
            up: memory.take(r * self.shape.intermediate),
        }
    }

    fn attention<'a>(&self, micro: &Micro<'a>) -> Attention<'a> {
        let Shape { heads, hidden, dropout, .. } = self.shape;
        Attention {
            rows: micro.rows,
            heads,
            head_size: hidden / heads,
            causal: true,
            lengths: micro.lengths,
            dropout: micro.dropout(dropout.attention, self.index, 0),
        }
    }

    fn norm(&self, rows: Rows) -> Norm {
        let Shape { hidden: channels, layer_norm_epsilon: epsilon, .. } = self.shape;
        Norm { rows: rows.count(), channels, epsilon }
    }

    /// All of the forward that the backward needs.
    fn walk(&self, k: &dyn Kernels, micro: &Micro<'_>, w: &Parts, x: View, kept: &Kept, n: View) {
        let Shape { hidden: c, intermediate: i, dropout, .. } = self.shape;
        let rows = micro.rows.count();
        let size = |inputs, outputs| Linear { rows, inputs, outputs };
        k.layer_norm(n, kept.norm1, x, w.norm1[0], w.norm1[1], self.norm(micro.rows));
        k.linear(kept.qkv, n, w.attention[0], w.attention[1], size(c, 3 * c));
        k.attention(kept.mixed, kept.lse, kept.qkv, self.attention(micro));
        k.linear(n, kept.mixed, w.projection[0], w.projection[1], size(c, c));
        let drop = micro.dropout(dropout.residual, self.index, 1);
        k.residual(kept.middle, x, n, micro.rows, drop);
        k.layer_norm(n, kept.norm2, kept.middle, w.norm2[0], w.norm2[1], self.norm(micro.rows));
        k.linear(kept.up, n, w.up[0], w.up[1], size(c, i));
    }
}

impl Layer for Block {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { hidden: c, intermediate: i, initializer_range, layers, .. } = self.shape;
        let weight = Init::Normal(initializer_range);
        // Projections onto the residual stream begin smaller: 2 of them a block add up.
        let onto = Init::Normal(initializer_range / (2.0 * layers as f32).sqrt());
        let named = |name: &str, shape: &[usize], kind, init| Tensor {
            name: format!("transformer.h.{}.{name}", self.number),
            shape: shape.to_vec(),
            kind,
            init,
        };
        let norm = |name: &str| {
            [
                named(&format!("{name}.weight"), &[c], Kind::Norm, Init::Ones),
                named(&format!("{name}.bias"), &[c], Kind::Norm, Init::Zeros),
            ]
        };
        let linear = |name: &str, inputs: usize, outputs: usize, init| {
            [
                named(&format!("{name}.weight"), &[inputs, outputs], Kind::Weight, init),
                named(&format!("{name}.bias"), &[outputs], Kind::Bias, Init::Zeros),
            ]
        };
        [
            norm("ln_1"),
            linear("attn.c_attn", c, 3 * c, weight),
            linear("attn.c_proj", c, c, onto),
            norm("ln_2"),
            linear("mlp.c_fc", c, i, weight),
            linear("mlp.c_proj", i, c, onto),
        ]
        .concat()
    }

    fn attention_channels(&self) -> usize {
        self.shape.hidden
    }

    fn kept_len(&self, positions: usize) -> usize {
        let Shape { hidden: c, heads, intermediate: i, .. } = self.shape;
        // Each of seven views is aligned for itself; a sequence pays for all of it.
        positions * (4 + 5 * c + heads + i) + 7 * 16
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { ref micro, weights, x, y, kept, scratch } = *pass;
        let Shape { hidden: c, intermediate: i, dropout, .. } = self.shape;
        let (w, rows) = (self.parts(weights), micro.rows.count());
        let kept = match kept {
            Some(view) => self.kept(micro.rows, &Scratch::new(view)),
            None => self.kept(micro.rows, scratch),
        };
        let n = scratch.take(rows * c);
        self.walk(k, micro, &w, x, &kept, n);
        let wide = scratch.take(rows * i);
        k.gelu(wide, kept.up, self.shape.gelu);
        k.linear(n, wide, w.down[0], w.down[1], Linear { rows, inputs: i, outputs: c });
        let drop = micro.dropout(dropout.residual, self.index, 2);
        k.residual(y, kept.middle, n, micro.rows, drop);
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { ref micro, weights, gradient, accumulate, x, kept, dy, dx, scratch } = *pass;
        let Shape { hidden: c, intermediate: i, dropout, gelu, .. } = self.shape;
        let (w, rows) = (self.parts(weights), micro.rows.count());
        let gradient = gradient.unwrap_or_else(|| scratch.take(weights.len));
        let d = self.parts(gradient);
        let n = scratch.take(rows * c);
        let kept = match kept {
            Some(view) => self.kept(micro.rows, &Scratch::new(view)),
            None => {
                let kept = self.kept(micro.rows, scratch);
                self.walk(k, micro, &w, x, &kept, n);
                kept
            }
        };
        let dx = dx.unwrap_or_else(|| scratch.take(rows * c));
        let size = |inputs, outputs| Linear { rows, inputs, outputs };
        let norm = self.norm(micro.rows);
        let (narrow, dmiddle) = (scratch.take(rows * c), scratch.take(rows * c));
        let (wide, dwide) = (scratch.take(rows * i), scratch.take(rows * i));

        // Feed-forward.
        let drop = micro.dropout(dropout.residual, self.index, 2);
        k.dropped(narrow, dy, micro.rows, drop);
        k.gelu(wide, kept.up, gelu);
        let [dw, db] = d.down;
        k.linear_backward(dwide, dw, db, narrow, wide, w.down[0], size(i, c), accumulate, scratch);
        k.gelu_backward(dwide, kept.up, gelu);
        k.layer_norm(n, kept.norm2, kept.middle, w.norm2[0], w.norm2[1], norm);
        let [dw, db] = d.up;
        k.linear_backward(narrow, dw, db, dwide, n, w.up[0], size(c, i), accumulate, scratch);
        let [dgamma, dbeta] = d.norm2;
        let (residual, statistics) = (Some(dy), kept.norm2);
        k.layer_norm_backward(
            dmiddle,
            dgamma,
            dbeta,
            residual,
            narrow,
            kept.middle,
            statistics,
            w.norm2[0],
            norm,
            accumulate,
            scratch,
        );

        // Attention.
        let drop = micro.dropout(dropout.residual, self.index, 1);
        k.dropped(narrow, dmiddle, micro.rows, drop);
        let [dw, db] = d.projection;
        let dmixed = n;
        k.linear_backward(
            dmixed,
            dw,
            db,
            narrow,
            kept.mixed,
            w.projection[0],
            size(c, c),
            accumulate,
            scratch,
        );
        let dqkv = scratch.take(3 * rows * c);
        let attention = self.attention(micro);
        k.attention_backward(dqkv, dmixed, kept.mixed, kept.lse, kept.qkv, attention, scratch);
        k.layer_norm(n, kept.norm1, x, w.norm1[0], w.norm1[1], norm);
        let [dw, db] = d.attention;
        k.linear_backward(
            narrow,
            dw,
            db,
            dqkv,
            n,
            w.attention[0],
            size(c, 3 * c),
            accumulate,
            scratch,
        );
        let [dgamma, dbeta] = d.norm1;
        let (residual, statistics) = (Some(dmiddle), kept.norm1);
        k.layer_norm_backward(
            dx, dgamma, dbeta, residual, narrow, x, statistics, w.norm1[0], norm, accumulate,
            scratch,
        );
    }
}

/// The norm in front of the head.
#[derive(Clone, Debug)]
pub struct Final {
    /// The model.
    pub shape: Shape,
}

impl Final {
    fn norm(&self, rows: Rows) -> Norm {
        let Shape { hidden: channels, layer_norm_epsilon: epsilon, .. } = self.shape;
        Norm { rows: rows.count(), channels, epsilon }
    }
}

impl Layer for Final {
    fn tensors(&self) -> Vec<Tensor> {
        let named = |name: &str, init| Tensor {
            name: format!("transformer.ln_f.{name}"),
            shape: vec![self.shape.hidden],
            kind: Kind::Norm,
            init,
        };
        vec![named("weight", Init::Ones), named("bias", Init::Zeros)]
    }

    fn kept_len(&self, _positions: usize) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { micro, weights, x, y, scratch, .. } = *pass;
        let views = tensor_views(&self.tensors(), weights);
        let statistics = scratch.take(2 * micro.rows.count());
        k.layer_norm(y, statistics, x, views[0], views[1], self.norm(micro.rows));
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { micro, weights, gradient, accumulate, x, dy, dx, scratch, .. } = *pass;
        let views = tensor_views(&self.tensors(), weights);
        let gradient = gradient.unwrap_or_else(|| scratch.take(weights.len));
        let d = tensor_views(&self.tensors(), gradient);
        let dx = dx.unwrap_or_else(|| scratch.take(dy.len));
        let (y, statistics) = (scratch.take(dy.len), scratch.take(2 * micro.rows.count()));
        let norm = self.norm(micro.rows);
        k.layer_norm(y, statistics, x, views[0], views[1], norm);
        k.layer_norm_backward(
            dx, d[0], d[1], None, dy, x, statistics, views[0], norm, accumulate, scratch,
        );
    }
}
