//! Layers made of operations: the forward is written once, and the backward is derived from it.
//!
//! An operation runs its kernel at once and is recorded. The backward first runs the forward again,
//! so nothing is saved. Then it walks the recorded operations from their end: each computes the
//! gradients of its inputs from the gradient of its output. So a composed layer costs as much as
//! any layer that recomputes its activations, and runs on every device.

mod derived;

use crate::kernels::{
    Activate, Activation, ApplyDropout, Attention, AttentionShape, BatchView, CachedAttention,
    Custom, CustomKernel, Dropout, Gate, GateForm, Kernels, Linear, Norm, Residual, Rotary, Rotate,
    WriteKv,
};
use crate::models::layer::{KvCache, Tensor};
use crate::tensor::{Scratch, View};

/// A layer that is described by its forward.
pub trait Composed: Send + Sync {
    /// The tensors of the layer. Operations name them by their index. A joined tensor has the index
    /// of the tensor before.
    fn tensors(&self) -> Vec<Tensor>;

    /// The layer's index, for dropout. Each layer needs an index of its own.
    fn index(&self) -> u32;

    /// C, the channels of input and output.
    fn channels(&self) -> usize;

    /// Custom kernels that the layer runs, forward and backward.
    fn custom_kernels(&self) -> Vec<CustomKernel> {
        Vec::new()
    }

    /// Computes the output from the input. Both are (R, C).
    fn compose(&self, ops: &mut Operations<'_>, x: Value) -> Value;
}

/// The [layer](crate::models::Layer) of a composition, with a derived backward.
#[derive(Clone, Copy, Debug)]
pub struct Derived<C>(pub C);

/// A tensor inside a layer. (R, its width).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

/// The heads of an attention, and the keys that a query sees.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// H.
    pub heads: usize,
    /// K, which divides H.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// True when a query sees no later position.
    pub causal: bool,
    /// The most positions that a query sees, its own included.
    pub window: Option<usize>,
    /// Rotary positions of queries and keys.
    pub rotary: Option<Rotary>,
    /// Dropout of the probabilities.
    pub dropout: f32,
}

/// Runs and records the operations of a layer.
pub struct Operations<'a> {
    /// `None`: operations are recorded and do not run.
    kernels: Option<&'a dyn Kernels>,
    batch: BatchView<'a>,
    weights: Vec<View>,
    scratch: &'a Scratch<'a>,
    layer: u32,
    /// The number of dropouts so far.
    sites: u32,
    /// Whether a dropout has a probability above 0.
    drops: bool,
    kv_cache: Option<KvCache>,
    values: Vec<View>,
    recorded: Vec<(Operation<'a>, Value)>,
}

/// An operation, with the values that its backward reads.
#[allow(clippy::large_enum_variant, reason = "a layer records a few dozen at most")]
enum Operation<'a> {
    Linear {
        x: Value,
        w: usize,
        bias: Option<usize>,
        transposed: bool,
    },
    Norm {
        x: Value,
        gamma: usize,
        beta: Option<usize>,
        rms: bool,
        statistics: View,
    },
    Activate {
        x: Value,
        activation: Activation,
    },
    Gate {
        x: Value,
        activation: Activation,
    },
    Add {
        a: Value,
        b: Value,
    },
    Dropout {
        x: Value,
        dropout: Option<Dropout<'a>>,
    },
    Attention {
        x: Value,
        y: Value,
        /// Queries, keys and values as attention sees them.
        qkv: View,
        lse: View,
        shape: Box<AttentionShape<'a>>,
        rotary: Option<Rotary>,
    },
    Custom {
        x: Value,
        backward: CustomKernel,
        numbers: Vec<f32>,
    },
}

impl<'a> Operations<'a> {
    fn rows(&self) -> usize {
        self.batch.rows()
    }

    fn view(&self, value: Value) -> View {
        self.values[value.0]
    }

    fn run(&self, kernel: impl FnOnce(&dyn Kernels)) {
        if let Some(kernels) = self.kernels {
            kernel(kernels);
        }
    }

    /// A new value of this width, in workspace.
    fn value(&mut self, width: usize) -> (Value, View) {
        let view = self.scratch.take(self.rows(), width);
        self.values.push(view);
        (Value(self.values.len() - 1), view)
    }

    fn record(&mut self, operation: Operation<'a>, y: Value) -> Value {
        self.recorded.push((operation, y));
        y
    }

    fn next_dropout(&mut self, probability: f32) -> Option<Dropout<'a>> {
        let site = self.sites;
        self.sites += 1;
        self.drops |= probability > 0.0;
        assert!(site < 8, "a layer has eight dropouts at most");
        self.batch.dropout(probability, self.layer, site)
    }

    /// x w + bias, by the tensors of these indices. w: (C, N), or (N, C) `transposed`; bias: (N).
    pub fn linear(&mut self, x: Value, w: usize, bias: Option<usize>, transposed: bool) -> Value {
        let input = self.view(x);
        let weight = self.weights[w];
        let (y, output) = self.value(if transposed { weight.rows } else { weight.columns });
        let shift = bias.map(|bias| self.weights[bias]);
        let op = Linear { y: output, x: input, w: weight, bias: shift, transposed };
        self.run(|k| k.linear(&op));
        self.record(Operation::Linear { x, w, bias, transposed }, y)
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
        let input = self.view(x);
        let statistics = self.scratch.take_floats(input.rows, 2);
        let (y, output) = self.value(input.columns);
        let op = Norm {
            y: output,
            statistics,
            x: input,
            gamma: self.weights[gamma],
            gamma_offset: 0.0,
            beta: beta.map(|beta| self.weights[beta]),
            epsilon,
            rms,
        };
        self.run(|k| k.norm(&op));
        self.record(Operation::Norm { x, gamma, beta, rms, statistics }, y)
    }

    /// f(x).
    pub fn activate(&mut self, x: Value, activation: Activation) -> Value {
        let input = self.view(x);
        let (y, output) = self.value(input.columns);
        self.run(|k| k.activate(&Activate { y: output, x: input, activation }));
        self.record(Operation::Activate { x, activation }, y)
    }

    /// f(gate) up, of half the width. x: gate and up side by side.
    pub fn gate(&mut self, x: Value, activation: Activation) -> Value {
        let input = self.view(x);
        let (y, output) = self.value(input.columns / 2);
        let form = GateForm::Plain(activation);
        self.run(|k| k.gate(&Gate { y: output, x: input, form }));
        self.record(Operation::Gate { x, activation }, y)
    }

    /// a + b.
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        let first = self.view(a);
        let second = self.view(b);
        let (y, output) = self.value(first.columns);
        let op = Residual { y: output, a: first, x: second, dropout: None };
        self.run(|k| k.residual(&op));
        self.record(Operation::Add { a, b }, y)
    }

    /// x, whose numbers are 0 with this probability in training.
    pub fn dropout(&mut self, x: Value, probability: f32) -> Value {
        let input = self.view(x);
        let dropout = self.next_dropout(probability);
        let (y, output) = self.value(input.columns);
        self.run(|k| k.dropout(&ApplyDropout { y: output, x: input, dropout }));
        self.record(Operation::Dropout { x, dropout }, y)
    }

    /// Scaled dot-product attention. (R, H D) of (R, (H + 2 K) D): queries, keys and values.
    ///
    /// # Panics
    /// x has another width; or a layer with two attentions is to use a KV cache.
    pub fn attention(&mut self, x: Value, heads: Heads) -> Value {
        let Heads { heads, kv_heads, head_size, causal, window, rotary, dropout } = heads;
        let batch = self.batch;
        let dropout = self.next_dropout(dropout);
        let plain = AttentionShape::causal(batch, [heads, kv_heads, head_size]);
        let shape = AttentionShape { causal, window, dropout, ..plain };
        let input = self.view(x);
        assert_eq!(input.columns, shape.qkv_width(), "queries, keys and values side by side");
        let lse = self.scratch.take_floats(input.rows, heads);
        let qkv = self.rotated(input, rotary.as_ref(), shape);
        let (y, output) = self.value(shape.width());
        let is_attention =
            |(one, _): &(Operation<'_>, Value)| matches!(one, Operation::Attention { .. });
        let is_first = !self.recorded.iter().any(is_attention);
        assert!(self.kv_cache.is_none() || is_first, "one attention of a layer has a KV cache");
        let kv_cache = self.kv_cache;
        self.run(|k| {
            if let Some(KvCache { new, .. }) = kv_cache {
                k.write_kv(&WriteKv { kv: new, qkv, shape });
            }
            match kv_cache.and_then(|cache| cache.cached) {
                Some(cache) => {
                    k.cached_attention(&CachedAttention { y: output, lse, qkv, cache, shape });
                }
                None => k.attention(&Attention { y: output, lse, qkv, kv: None, shape }),
            }
        });
        let shape = Box::new(shape);
        self.record(Operation::Attention { x, y, qkv, lse, shape, rotary }, y)
    }

    /// Queries, keys and values as attention sees them: rotated, if `rotary` says so.
    fn rotated(&self, x: View, rotary: Option<&Rotary>, shape: AttentionShape<'_>) -> View {
        let Some(rotary) = rotary else { return x };
        let qkv = self.scratch.take_like(x);
        self.run(|k| {
            k.dropout(&ApplyDropout { y: qkv, x, dropout: None });
            k.rotate(&Rotate { qkv, rotary, shape, inverse: false });
        });
        qkv
    }

    /// A custom kernel whose output has the shape of its input: it writes y and reads x. Its
    /// backward writes dx and reads dy and x. Both get the numbers as arguments.
    pub fn custom(
        &mut self,
        kernel: &CustomKernel,
        backward: &CustomKernel,
        x: Value,
        numbers: &[f32],
    ) -> Value {
        let input = self.view(x);
        let (y, output) = self.value(input.columns);
        self.run(|k| k.custom(&Custom { kernel, writes: &[output], reads: &[input], numbers }));
        self.record(Operation::Custom { x, backward: *backward, numbers: numbers.to_vec() }, y)
    }
}
