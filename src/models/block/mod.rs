//! A transformer block: attention and feed-forward beside the residual stream, with norms before
//! the branches or behind the sums, as the family has them.

mod stage;

use self::stage::{Kept, Keys, Stage};
use super::layer::{Backward, Forward, Init, Kind, KvCache, Layer, Save, Tensor, tensor_views};
use super::shape::Shape;
use crate::kernels::{Apart, Attention, Dropout, Kernels, Linear, Norm, Rows};
use crate::kernels::{BatchView, CHUNK_POSITIONS, SequenceChunk};
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

    /// Where a chunk's intermediates are: those that are kept in `memory`, the others in workspace.
    fn saved(
        &self,
        chunk: &SequenceChunk,
        rows: Rows,
        memory: Option<(Save, View)>,
        scratch: &Scratch<'_>,
    ) -> Kept {
        let shape = &self.shape;
        let stashed = memory.map(|(_, view)| Scratch::new(view, scratch.dtype()));
        let place = |is_kept: bool, width: usize| match &stashed {
            Some(stashed) if is_kept => chunk.of(stashed.take(rows.count() * width), width),
            _ => scratch.take(chunk.rows.len() * width),
        };
        let place_floats = |is_kept: bool, width: usize| match &stashed {
            Some(stashed) if is_kept => chunk.of(stashed.take_floats(rows.count() * width), width),
            _ => scratch.take_floats(chunk.rows.len() * width),
        };
        let attention = matches!(memory, Some((Save::All, _)));
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

    /// Where a chunk's keys and values go and come from.
    fn keys(
        &self,
        chunk: &SequenceChunk,
        rows: Rows,
        memory: Option<KvCache>,
        chunk_state: View,
        scratch: &Scratch<'_>,
    ) -> Keys {
        let Some((sequence, [past])) = chunk.part_of else {
            let (fresh, past) = memory.map_or((None, None), |one| (Some(one.fresh), one.past));
            return Keys { fresh, past, all: None };
        };
        let (width, to) = (self.kv_width(), past + chunk.rows.len());
        let len = rows.positions * width;
        let of_sequence = match memory {
            Some(memory) => memory.fresh.part(sequence * len..(sequence + 1) * len),
            None => Scratch::new(chunk_state, scratch.dtype()).take(len),
        };
        let fresh = Some(of_sequence.part(past * width..to * width));
        Keys { fresh, past: None, all: Some(of_sequence.part(0..to * width)) }
    }

    fn chunks(&self, batch: &BatchView<'_>) -> Vec<SequenceChunk> {
        batch.chunks(self.shape.causal && batch.past.iter().all(|past| *past == 0))
    }

    fn attention<'a>(&self, batch: &BatchView<'a>) -> Attention<'a> {
        let Shape { heads, kv_heads, head_size, causal, window, dropout, .. } = self.shape;
        Attention {
            rows: batch.rows,
            heads,
            kv_heads,
            head_size,
            causal,
            window: window.filter(|(_, from)| self.number >= *from).map(|(window, _)| window),
            lengths: batch.lengths,
            documents: batch.documents,
            past: batch.past,
            dropout: batch.dropout(dropout.attention, self.index, 0),
        }
    }

    fn norm(&self, rows: Rows) -> Norm {
        let Shape { hidden: channels, norm_epsilon: epsilon, rms_norm: rms, .. } = self.shape;
        Norm { rows: rows.count(), channels, epsilon, rms }
    }

    fn linear(&self, rows: Rows, inputs: usize, outputs: usize) -> Linear {
        Linear { rows: rows.count(), inputs, outputs, transposed: self.shape.transposed }
    }

    /// Dropout of attention's output and of the feed-forward's.
    fn drops(&self, batch: &BatchView<'_>) -> [Option<Dropout>; 2] {
        let dropout = self.shape.dropout;
        [(dropout.projection, 1), (dropout.feed_forward, 2)]
            .map(|(probability, site)| batch.dropout(probability, self.index, site))
    }

    /// Begins a chunk: takes what its forward and its backward share.
    #[allow(clippy::too_many_arguments, reason = "what forward and backward are given alike")]
    fn stage<'a>(
        &'a self,
        k: &'a dyn Kernels,
        w: &'a Parts,
        chunk: &'a SequenceChunk,
        batch: &BatchView<'a>,
        x: View,
        saved: Option<(Save, View)>,
        keys: Keys,
        scratch: &Scratch<'_>,
    ) -> Stage<'a> {
        let r = chunk.rows.len();
        let place = if self.shape.qk_norm { r * self.shape.qkv() } else { 0 };
        Stage {
            block: self,
            k,
            w,
            batch: chunk.batch(batch),
            x: chunk.of(x, self.shape.hidden),
            saved: self.saved(chunk, batch.rows, saved, scratch),
            n: scratch.take(r * self.shape.hidden),
            place: scratch.take(place),
            keys,
        }
    }
}

impl Layer for Block {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, heads, kv_heads, head_size: d, .. } = self.shape;
        let Shape { initializer_range, layers, rms_norm, biases, transposed, .. } = self.shape;
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
                let shape =
                    if transposed { vec![*outputs, inputs] } else { vec![inputs, *outputs] };
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

    fn kv_width(&self) -> usize {
        2 * self.shape.kv_heads * self.shape.head_size
    }

    fn attention_channels(&self) -> usize {
        self.shape.mixed()
    }

    fn saved_len(&self, positions: usize, save: Save, of: Dtype) -> usize {
        let shape = &self.shape;
        let heads = if shape.qk_norm { shape.heads + shape.kv_heads } else { 0 };
        let end = if shape.post_norm { shape.hidden } else { 0 };
        let [attention, statistics] = match save {
            Save::All => [shape.qkv() + shape.mixed(), heads + shape.heads],
            Save::AllButAttention => [0, 0],
        };
        let numbers = positions * (attention + shape.hidden + shape.up() + end);
        // Each of nine views is aligned for itself; a sequence pays for all of it.
        of.floats(numbers) + positions * (4 + statistics) + 9 * 16
    }

    fn chunk_state_len(&self, positions: usize, trains: bool, of: Dtype) -> usize {
        let is_cut = self.shape.causal && positions > CHUNK_POSITIONS;
        let numbers = positions * self.kv_width();
        let gradients = if trains { numbers } else { 0 };
        let [values, gradients] =
            [of.floats(numbers), gradients].map(|floats| floats.next_multiple_of(16));
        if is_cut { values + gradients } else { 0 }
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { ref batch, weights, x, y, saved, memory, chunk_state, scratch } = *pass;
        let w = self.parts(weights);
        for chunk in &self.chunks(batch) {
            let scratch = &scratch.nested();
            let keys = self.keys(chunk, batch.rows, memory, chunk_state, scratch);
            let stage = self.stage(k, &w, chunk, batch, x, saved, keys, scratch);
            stage.forward(chunk.of(y, self.shape.hidden), scratch);
        }
    }

    /// A sequence in chunks is walked from its end: then keys and values of a chunk have all
    /// that later queries give them when it comes. All keys and values are made before.
    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward {
            ref batch, weights, gradient, x, saved, dy, dx, chunk_state, scratch, ..
        } = *pass;
        let (w, c) = (self.parts(weights), self.shape.hidden);
        let d = self.parts(gradient.unwrap_or_else(|| scratch.take_floats(weights.len())));
        let save = saved.map(|(save, _)| save);
        let mut accumulate = pass.accumulate;
        let sequence = |chunk: &SequenceChunk| chunk.part_of.map(|(sequence, _)| sequence);
        let chunks = self.chunks(batch);
        for chunks in chunks.chunk_by(|a, b| sequence(a) == sequence(b)) {
            let (last, others) = chunks.split_last().expect("a chunk has one");
            for chunk in others {
                let scratch = &scratch.nested();
                let keys = self.keys(chunk, batch.rows, None, chunk_state, scratch);
                let stage = self.stage(k, &w, chunk, batch, x, saved, keys, scratch);
                if save == Some(Save::All) {
                    stage.seen()
                } else {
                    stage.project()
                };
            }
            for chunk in chunks.iter().rev() {
                let scratch = &scratch.nested();
                let keys = self.keys(chunk, batch.rows, None, chunk_state, scratch);
                let apart = keys.all.map(|kv| {
                    let room = Scratch::new(chunk_state, scratch.dtype());
                    room.take(batch.rows.positions * self.kv_width());
                    let dkv = room.take_floats(kv.len());
                    Apart { kv, dkv, accumulate: chunk.rows != last.rows }
                });
                let stage = self.stage(k, &w, chunk, batch, x, saved, keys, scratch);
                let dx = dx.map(|dx| chunk.of(dx, c));
                let dx = dx.unwrap_or_else(|| scratch.take(chunk.rows.len() * c));
                let dy = chunk.of(dy, c);
                stage.backward(&d, save, dy, dx, apart, accumulate, scratch);
                accumulate = true;
            }
        }
    }
}
