//! Layers made of operations: what a micro-batch goes through is written down once, forward, and its way
//! back is derived.
//!
//! An operation runs its kernel at once and is noted. Backward, a layer is walked again (so it keeps
//! nothing), and then what was noted is walked from its end: each operation turns the gradient of what
//! it wrote into those of what it read. So it costs what other layers cost that compute all again, and runs
//! on every device.

mod derived;

use crate::kernels::BatchView;
use crate::kernels::CustomKernel;
use crate::kernels::Rotary;
use crate::kernels::{Activation, Attention, Dropout, Kernels, Linear, Norm, Rows};
use crate::models::layer::{KvCache, Tensor};
use crate::tensor::Scratch;
use crate::tensor::View;

/// A layer as its forward says.
pub trait Composed: Send + Sync {
    /// The tensors of its block. Operations name them by their index; those that are joined to the one
    /// before count with it.
    fn tensors(&self) -> Vec<Tensor>;

    /// Its index, for dropout; no other layer's.
    fn index(&self) -> u32;

    /// C, of what comes in and goes out.
    fn channels(&self) -> usize;

    /// Kernels of its own that it runs, forward and backward.
    fn custom_kernels(&self) -> Vec<CustomKernel> {
        Vec::new()
    }

    /// What goes out, (R, C), of what comes in, (R, C).
    fn compose(&self, ops: &mut Operations<'_>, x: Value) -> Value;
}

/// Makes a layer of one that is composed.
#[derive(Clone, Copy, Debug)]
pub struct Derived<C>(pub C);

/// A tensor on its way through a layer. (R, its width).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

/// How queries, keys and values that lie side by side become what attention mixes.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// H.
    pub heads: usize,
    /// K, which divides H.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// True when a position sees none behind it.
    pub causal: bool,
    /// How many positions one sees at most, itself included.
    pub window: Option<usize>,
    /// How queries and keys are turned by their positions.
    pub rotary: Option<Rotary>,
    /// Dropout of the probabilities.
    pub dropout: f32,
}

/// What runs, and is noted, while a layer is composed.
pub struct Operations<'a> {
    /// None: nothing runs, it is noted alone.
    kernels: Option<&'a dyn Kernels>,
    batch: BatchView<'a>,
    weights: Vec<View>,
    scratch: &'a Scratch<'a>,
    layer: u32,
    /// Dropouts so far.
    sites: u32,
    memory: Option<KvCache>,
    /// Views and widths.
    values: Vec<(View, usize)>,
    noted: Vec<(Operation<'a>, Value)>,
}

/// An operation, with what its backward reads.
enum Operation<'a> {
    Linear {
        x: Value,
        w: usize,
        b: Option<usize>,
        size: Linear,
    },
    Norm {
        x: Value,
        gamma: usize,
        beta: Option<usize>,
        size: Norm,
        statistics: View,
    },
    Activate {
        x: Value,
        form: Activation,
    },
    Gate {
        x: Value,
        form: Activation,
    },
    Add {
        a: Value,
        b: Value,
    },
    Drop {
        x: Value,
        dropout: Option<Dropout>,
    },
    Attend {
        x: Value,
        y: Value,
        seen: View,
        lse: View,
        size: Attention<'a>,
        rotary: Option<Rotary>,
    },
    CustomKernel {
        x: Value,
        back: CustomKernel,
        numbers: Vec<f32>,
    },
}

impl<'a> Operations<'a> {
    fn rows(&self) -> Rows {
        self.batch.rows
    }

    fn of(&self, value: Value) -> (View, usize) {
        self.values[value.0]
    }

    fn run(&self, kernel: impl FnOnce(&dyn Kernels)) {
        if let Some(kernels) = self.kernels {
            kernel(kernels);
        }
    }

    fn value(&mut self, width: usize) -> (Value, View) {
        let view = self.scratch.take(self.rows().count() * width);
        self.values.push((view, width));
        (Value(self.values.len() - 1), view)
    }

    fn note(&mut self, operation: Operation<'a>, y: Value) -> Value {
        self.noted.push((operation, y));
        y
    }

    fn drops(&mut self, probability: f32) -> Option<Dropout> {
        let site = self.sites;
        self.sites += 1;
        assert!(site < 8, "a layer has eight dropouts at most");
        self.batch.dropout(probability, self.layer, site)
    }

    /// x w + b, by the tensors of these indices. w: (C, N), or (N, C) `turned`; b: (N).
    pub fn linear(&mut self, x: Value, w: usize, b: Option<usize>, transposed: bool) -> Value {
        let (from, inputs) = self.of(x);
        let outputs = self.weights[w].len() / inputs;
        let size = Linear { rows: self.rows().count(), inputs, outputs, transposed };
        let (y, to) = self.value(outputs);
        let (weight, bias) = (self.weights[w], b.map(|b| self.weights[b]));
        self.run(|k| k.linear(to, from, weight, bias, size));
        self.note(Operation::Linear { x, w, b, size }, y)
    }

    /// A norm by mean and deviation, or `rms`: by root mean square. gamma, beta: (C).
    pub fn norm(
        &mut self,
        x: Value,
        gamma: usize,
        beta: Option<usize>,
        epsilon: f32,
        rms: bool,
    ) -> Value {
        let ((from, channels), rows) = (self.of(x), self.rows().count());
        let size = Norm { rows, channels, epsilon, rms };
        let statistics = self.scratch.take_floats(2 * rows);
        let (y, to) = self.value(channels);
        let (scale, shift) = (self.weights[gamma], beta.map(|beta| self.weights[beta]));
        self.run(|k| k.norm(to, statistics, from, scale, shift, size));
        self.note(Operation::Norm { x, gamma, beta, size, statistics }, y)
    }

    /// f(x).
    pub fn activate(&mut self, x: Value, form: Activation) -> Value {
        let (from, width) = self.of(x);
        let (y, to) = self.value(width);
        self.run(|k| k.activate(to, from, form));
        self.note(Operation::Activate { x, form }, y)
    }

    /// f(gate) up, of half the width. x: gate and up side by side.
    pub fn gate(&mut self, x: Value, form: Activation) -> Value {
        let (from, width) = self.of(x);
        let (y, to) = self.value(width / 2);
        self.run(|k| k.gate(to, from, width / 2, form));
        self.note(Operation::Gate { x, form }, y)
    }

    /// a + b.
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        let ((first, width), (second, _), rows) = (self.of(a), self.of(b), self.rows());
        let (y, to) = self.value(width);
        self.run(|k| k.residual(to, first, second, rows, None));
        self.note(Operation::Add { a, b }, y)
    }

    /// x, of which a share of this probability is 0 in training.
    pub fn dropout(&mut self, x: Value, probability: f32) -> Value {
        let ((from, width), rows) = (self.of(x), self.rows());
        let dropout = self.drops(probability);
        let (y, to) = self.value(width);
        self.run(|k| k.dropped(to, from, rows, dropout));
        self.note(Operation::Drop { x, dropout }, y)
    }

    /// Scaled dot-product attention. (R, H D) of (R, (H + 2 K) D): queries, keys and values.
    ///
    /// # Panics
    /// The width is another; or text is generated, and the layer has another attention: one remembers.
    pub fn attention(&mut self, x: Value, heads: Heads) -> Value {
        let Heads { heads: h, kv_heads, head_size, causal, window, rotary, dropout } = heads;
        let BatchView { rows, lengths, documents, past, .. } = self.batch;
        let dropout = self.drops(dropout);
        let size = Attention {
            rows,
            heads: h,
            kv_heads,
            head_size,
            causal,
            window,
            lengths,
            documents,
            past,
            dropout,
        };
        let (from, width) = self.of(x);
        assert_eq!(width, size.packed(), "queries, keys and values side by side");
        let lse = self.scratch.take_floats(rows.count() * h);
        let seen = match &rotary {
            None => from,
            Some(rotary) => {
                let seen = self.scratch.take(from.len());
                self.run(|k| {
                    k.dropped(seen, from, rows, None);
                    k.rotate(seen, rotary, size, false);
                });
                seen
            }
        };
        let (y, to) = self.value(h * head_size);
        let is_first = !self.noted.iter().any(|(one, _)| matches!(one, Operation::Attend { .. }));
        assert!(self.memory.is_none() || is_first, "one attention of a layer remembers");
        let memory = self.memory;
        self.run(|k| {
            if let Some(memory) = memory {
                k.remember(memory.fresh, seen, size);
            }
            match memory.and_then(|memory| memory.past) {
                Some(past) => k.attention_to_past(to, seen, past, size),
                None => k.attention(to, lse, seen, None, size),
            }
        });
        self.note(Operation::Attend { x, y, seen, lse, size, rotary }, y)
    }

    /// A kernel of one's own, of as many elements as it reads: it writes y and reads x. Its backward writes dx
    /// and reads dy and x. Both get the numbers.
    pub fn own(
        &mut self,
        kernel: &CustomKernel,
        back: &CustomKernel,
        x: Value,
        numbers: &[f32],
    ) -> Value {
        let (from, width) = self.of(x);
        let (y, to) = self.value(width);
        self.run(|k| k.own(kernel, &[to], &[from], numbers));
        self.note(Operation::CustomKernel { x, back: *back, numbers: numbers.to_vec() }, y)
    }
}
