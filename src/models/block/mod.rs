//! A transformer block: attention and feed-forward beside the residual stream, with norms before
//! the branches or behind the sums, as the family has them.

mod stage;

use self::stage::{Kept, Keys, Stage};
use super::layer::{Backward, Forward, Init, Keep, Kind, Layer, Memory, Tensor, tensor_views};
use super::shape::Shape;
use crate::kernels::{Apart, Attention, Dropout, Kernels, Linear, Norm, Rows};
use crate::kernels::{Micro, STRETCH, Stretch};
use crate::tensor::Scratch;
use crate::tensor::{Dtype, View};

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

    /// Where a stretch's intermediates are: those that are kept in `memory`, the others in workspace.
    fn kept(
        &self,
        stretch: &Stretch,
        rows: Rows,
        memory: Option<(Keep, View)>,
        scratch: &Scratch<'_>,
    ) -> Kept {
        let shape = &self.shape;
        let stashed = memory.map(|(_, view)| Scratch::new(view, scratch.dtype()));
        let place = |is_kept: bool, width: usize| match &stashed {
            Some(stashed) if is_kept => stretch.of(stashed.take(rows.count() * width), width),
            _ => scratch.take(stretch.rows.len() * width),
        };
        let place_floats = |is_kept: bool, width: usize| match &stashed {
            Some(stashed) if is_kept => {
                stretch.of(stashed.take_floats(rows.count() * width), width)
            }
            _ => scratch.take_floats(stretch.rows.len() * width),
        };
        let attention = matches!(memory, Some((Keep::All, _)));
        let normed_heads = shape.heads + shape.kv_heads;
        Kept {
            norm1: place_floats(true, 2),
            qkv: place(attention, shape.qkv()),
            heads: shape.qk_norm.then(|| place_floats(attention, normed_heads)),
            mixed: place(attention, shape.mixed()),
            lse: place_floats(attention, shape.heads),
            middle: place(true, shape.hidden),
            norm2: place_floats(true, 2),
            up: place(true, shape.up()),
            end: shape.post_norm.then(|| place(true, shape.hidden)),
        }
    }

    /// Where a stretch's keys and values go and come from.
    fn keys(
        &self,
        stretch: &Stretch,
        rows: Rows,
        memory: Option<Memory>,
        carried: View,
        scratch: &Scratch<'_>,
    ) -> Keys {
        let Some((sequence, [past])) = stretch.part_of else {
            let (fresh, past) = memory.map_or((None, None), |one| (Some(one.fresh), one.past));
            return Keys { fresh, past, all: None };
        };
        let (width, to) = (self.remembered(), past + stretch.rows.len());
        let len = rows.positions * width;
        let of_sequence = match memory {
            Some(memory) => memory.fresh.part(sequence * len..(sequence + 1) * len),
            None => Scratch::new(carried, scratch.dtype()).take(len),
        };
        let fresh = Some(of_sequence.part(past * width..to * width));
        Keys { fresh, past: None, all: Some(of_sequence.part(0..to * width)) }
    }

    fn stretches(&self, micro: &Micro<'_>) -> Vec<Stretch> {
        micro.stretches(self.shape.causal && micro.past.iter().all(|past| *past == 0))
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

    /// Begins a stretch: takes what its forward and its backward share.
    #[allow(clippy::too_many_arguments, reason = "what forward and backward are given alike")]
    fn stage<'a>(
        &'a self,
        k: &'a dyn Kernels,
        w: &'a Parts,
        stretch: &'a Stretch,
        micro: &Micro<'a>,
        x: View,
        kept: Option<(Keep, View)>,
        keys: Keys,
        scratch: &Scratch<'_>,
    ) -> Stage<'a> {
        let r = stretch.rows.len();
        let place = if self.shape.qk_norm { r * self.shape.qkv() } else { 0 };
        Stage {
            block: self,
            k,
            w,
            micro: stretch.micro(micro),
            x: stretch.of(x, self.shape.hidden),
            kept: self.kept(stretch, micro.rows, kept, scratch),
            n: scratch.take(r * self.shape.hidden),
            place: scratch.take(place),
            keys,
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

    fn kept_len(&self, positions: usize, keep: Keep, of: Dtype) -> usize {
        let shape = &self.shape;
        let heads = if shape.qk_norm { shape.heads + shape.kv_heads } else { 0 };
        let end = if shape.post_norm { shape.hidden } else { 0 };
        let [attention, statistics] = match keep {
            Keep::All => [shape.qkv() + shape.mixed(), heads + shape.heads],
            Keep::AllButAttention => [0, 0],
        };
        let numbers = positions * (attention + shape.hidden + shape.up() + end);
        // Each of nine views is aligned for itself; a sequence pays for all of it.
        of.floats(numbers) + positions * (4 + statistics) + 9 * 16
    }

    fn carried_len(&self, positions: usize, trains: bool, of: Dtype) -> usize {
        let is_cut = self.shape.causal && positions > STRETCH;
        let numbers = positions * self.remembered();
        let gradients = if trains { numbers } else { 0 };
        let [values, gradients] =
            [of.floats(numbers), gradients].map(|floats| floats.next_multiple_of(16));
        if is_cut { values + gradients } else { 0 }
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { ref micro, weights, x, y, kept, memory, carried, scratch } = *pass;
        let w = self.parts(weights);
        for stretch in &self.stretches(micro) {
            let scratch = &scratch.nested();
            let keys = self.keys(stretch, micro.rows, memory, carried, scratch);
            let stage = self.stage(k, &w, stretch, micro, x, kept, keys, scratch);
            stage.forward(stretch.of(y, self.shape.hidden), scratch);
        }
    }

    /// A sequence in stretches is walked from its end: then keys and values of a stretch have all
    /// that later queries give them when it comes. All keys and values are made before.
    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { ref micro, weights, gradient, x, kept, dy, dx, carried, scratch, .. } =
            *pass;
        let (w, c) = (self.parts(weights), self.shape.hidden);
        let d = self.parts(gradient.unwrap_or_else(|| scratch.take_floats(weights.len)));
        let keep = kept.map(|(keep, _)| keep);
        let mut accumulate = pass.accumulate;
        let sequence = |stretch: &Stretch| stretch.part_of.map(|(sequence, _)| sequence);
        let stretches = self.stretches(micro);
        for stretches in stretches.chunk_by(|a, b| sequence(a) == sequence(b)) {
            let (last, others) = stretches.split_last().expect("a chunk has one");
            for stretch in others {
                let scratch = &scratch.nested();
                let keys = self.keys(stretch, micro.rows, None, carried, scratch);
                let stage = self.stage(k, &w, stretch, micro, x, kept, keys, scratch);
                if keep == Some(Keep::All) {
                    stage.seen()
                } else {
                    stage.project()
                };
            }
            for stretch in stretches.iter().rev() {
                let scratch = &scratch.nested();
                let keys = self.keys(stretch, micro.rows, None, carried, scratch);
                let apart = keys.all.map(|kv| {
                    let room = Scratch::new(carried, scratch.dtype());
                    room.take(micro.rows.positions * self.remembered());
                    let dkv = room.take_floats(kv.len);
                    Apart { kv, dkv, accumulate: stretch.rows != last.rows }
                });
                let stage = self.stage(k, &w, stretch, micro, x, kept, keys, scratch);
                let dx = dx.map(|dx| stretch.of(dx, c));
                let dx = dx.unwrap_or_else(|| scratch.take(stretch.rows.len() * c));
                let dy = stretch.of(dy, c);
                stage.backward(&d, keep, dy, dx, apart, accumulate, scratch);
                accumulate = true;
            }
        }
    }
}
