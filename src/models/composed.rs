//! Layers made of operations: what a micro-batch goes through is written down once, forward, and its way
//! back is derived.
//!
//! An operation runs its kernel at once and is noted. Backward, a layer is walked again (so it keeps
//! nothing), and then what was noted is walked from its end: each operation turns the gradient of what
//! it wrote into those of what it read. So it costs what other layers cost that compute all again, and runs
//! on every device.

use super::kernels::{Activation, Attention, Dropout, Dtype, Kernels, Linear, Norm, Rows, View};
use super::layer::{
    Backward, Forward, Keep, Layer, Memory, Micro, Scratch, Tensor, block_len, tensor_views,
};
use super::own::Own;
use super::rotary::Rotary;

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
    fn own_kernels(&self) -> Vec<Own> {
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
    micro: Micro<'a>,
    weights: Vec<View>,
    scratch: &'a Scratch<'a>,
    layer: u32,
    /// Dropouts so far.
    sites: u32,
    memory: Option<Memory>,
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
    Own {
        x: Value,
        back: Own,
        numbers: Vec<f32>,
    },
}

impl<'a> Operations<'a> {
    fn rows(&self) -> Rows {
        self.micro.rows
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
        self.micro.dropout(probability, self.layer, site)
    }

    /// x w + b, by the tensors of these indices. w: (C, N), or (N, C) `turned`; b: (N).
    pub fn linear(&mut self, x: Value, w: usize, b: Option<usize>, turned: bool) -> Value {
        let (from, inputs) = self.of(x);
        let outputs = self.weights[w].len / inputs;
        let size = Linear { rows: self.rows().count(), inputs, outputs, turned };
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
        let Micro { rows, lengths, documents, past, .. } = self.micro;
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
                let seen = self.scratch.take(from.len);
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
    pub fn own(&mut self, kernel: &Own, back: &Own, x: Value, numbers: &[f32]) -> Value {
        let (from, width) = self.of(x);
        let (y, to) = self.value(width);
        self.run(|k| k.own(kernel, &[to], &[from], numbers));
        self.note(Operation::Own { x, back: *back, numbers: numbers.to_vec() }, y)
    }
}

/// The gradient of a value, as far as it is known.
#[derive(Clone, Copy)]
struct Slope {
    view: View,
    /// True: it may be written over, for nobody else reads it.
    is_own: bool,
}

/// The way back over what was noted.
struct Back<'a, 'n> {
    k: &'n dyn Kernels,
    noted: &'n Operations<'a>,
    slopes: Vec<Option<Slope>>,
    /// Gradients of the tensors, and whether each holds something of this step.
    tensors: Vec<(View, bool)>,
    scratch: &'n Scratch<'n>,
}

impl Back<'_, '_> {
    /// One more gradient of a value.
    fn give(&mut self, to: Value, view: View, is_own: bool) {
        let Some(known) = self.slopes[to.0] else {
            self.slopes[to.0] = Some(Slope { view, is_own });
            return;
        };
        let sum = if is_own { view } else { self.scratch.take(view.len) };
        self.k.residual(sum, known.view, view, self.noted.rows(), None);
        self.slopes[to.0] = Some(Slope { view: sum, is_own: true });
    }

    /// Room for the gradient of a value.
    fn room(&self, of: Value) -> View {
        self.scratch.take(self.noted.of(of).0.len)
    }

    /// What an operation may write over that holds the gradient of what it wrote.
    fn taken(&self, dy: Slope) -> View {
        if dy.is_own {
            return dy.view;
        }
        let copy = self.scratch.take(dy.view.len);
        self.k.dropped(copy, dy.view, self.noted.rows(), None);
        copy
    }

    /// Gradients of tensors that one operation has, and whether it adds to them.
    fn gradients<const N: usize>(&mut self, of: [Option<usize>; N]) -> ([Option<View>; N], bool) {
        let accumulate = of.iter().flatten().any(|&index| self.tensors[index].1);
        let views = of.map(|index| {
            let (view, has) = &mut self.tensors[index?];
            if accumulate && !*has {
                self.k.clear(*view);
            }
            *has = true;
            Some(*view)
        });
        (views, accumulate)
    }

    /// From the gradient of what an operation wrote to those of what it read.
    fn undo(&mut self, operation: &Operation<'_>, dy: Slope) {
        let (k, noted, scratch) = (self.k, self.noted, self.scratch);
        let of = |value: Value| noted.of(value).0;
        match *operation {
            Operation::Linear { x, w, b, size } => {
                let dx = self.room(x);
                let ([dw, db], accumulate) = self.gradients([Some(w), b]);
                let dw = dw.expect("it has one");
                let weight = noted.weights[w];
                k.linear_backward(dx, dw, db, dy.view, of(x), weight, size, accumulate, scratch);
                self.give(x, dx, true);
            }
            Operation::Norm { x, gamma, beta, size, statistics } => {
                let dx = self.room(x);
                let ([dgamma, dbeta], accumulate) = self.gradients([Some(gamma), beta]);
                let dgamma = dgamma.expect("it has one");
                let scale = noted.weights[gamma];
                k.norm_backward(
                    dx,
                    dgamma,
                    dbeta,
                    None,
                    dy.view,
                    of(x),
                    statistics,
                    scale,
                    size,
                    accumulate,
                    scratch,
                );
                self.give(x, dx, true);
            }
            Operation::Activate { x, form } => {
                let dx = self.taken(dy);
                k.activate_backward(dx, of(x), form);
                self.give(x, dx, true);
            }
            Operation::Gate { x, form } => {
                let dx = self.room(x);
                k.gate_backward(dx, dy.view, of(x), noted.of(x).1 / 2, form);
                self.give(x, dx, true);
            }
            Operation::Add { a, b } => {
                self.give(a, dy.view, false);
                self.give(b, dy.view, false);
            }
            Operation::Drop { x, dropout } => {
                let dx = self.room(x);
                k.dropped(dx, dy.view, noted.rows(), dropout);
                self.give(x, dx, true);
            }
            Operation::Attend { x, y, seen, lse, size, ref rotary } => {
                let dx = self.room(x);
                k.attention_backward(dx, dy.view, of(y), lse, seen, None, size, scratch);
                if let Some(rotary) = rotary {
                    k.rotate(dx, rotary, size, true);
                }
                self.give(x, dx, true);
            }
            Operation::Own { x, ref back, ref numbers } => {
                let dx = self.room(x);
                k.own(back, &[dx], &[dy.view, of(x)], numbers);
                self.give(x, dx, true);
            }
        }
    }
}

impl<C: Composed> Derived<C> {
    /// The layer's forward, noted.
    fn walk<'a>(
        &self,
        kernels: Option<&'a dyn Kernels>,
        micro: Micro<'a>,
        [weights, x]: [View; 2],
        memory: Option<Memory>,
        scratch: &'a Scratch<'a>,
    ) -> (Operations<'a>, Value) {
        let mut operations = Operations {
            kernels,
            micro,
            weights: tensor_views(&self.0.tensors(), weights),
            scratch,
            layer: self.0.index(),
            sites: 0,
            memory,
            values: vec![(x, self.0.channels())],
            noted: Vec::new(),
        };
        let y = self.0.compose(&mut operations, Value(0));
        (operations, y)
    }

    /// Sums something over its attentions, of which it has none, one or more.
    fn of_attentions(&self, of: impl Fn(&Attention<'_>) -> usize) -> usize {
        let rows = Rows { sequences: 1, positions: 1 };
        let micro =
            Micro { rows, lengths: &[1], kinds: &[0], documents: &[], past: &[], draw: None };
        let scratch = Scratch::new(View::floats(0, usize::MAX / 8), Dtype::F32);
        let weights = View::floats(0, block_len(&self.0.tensors()));
        let x = View::floats(0, self.0.channels());
        let (operations, _) = self.walk(None, micro, [weights, x], None, &scratch);
        let attentions = operations.noted.iter().filter_map(|(operation, _)| match operation {
            Operation::Attend { size, .. } => Some(of(size)),
            _ => None,
        });
        attentions.sum()
    }
}

impl<C: Composed> Layer for Derived<C> {
    fn tensors(&self) -> Vec<Tensor> {
        self.0.tensors()
    }

    fn remembered(&self) -> usize {
        self.of_attentions(|size| size.remembered())
    }

    fn attention_channels(&self) -> usize {
        self.of_attentions(|size| size.heads * size.head_size)
    }

    fn own_kernels(&self) -> Vec<Own> {
        self.0.own_kernels()
    }

    /// Nothing: its backward computes all again.
    fn kept_len(&self, _positions: usize, _keep: Keep, _of: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { micro, weights, x, y, memory, scratch, .. } = *pass;
        let (operations, end) = self.walk(Some(k), micro, [weights, x], memory, scratch);
        k.dropped(y, operations.of(end).0, micro.rows, None);
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { micro, weights, gradient, accumulate, x, dy, dx, scratch, .. } = *pass;
        let gradient = gradient.unwrap_or_else(|| scratch.take_floats(weights.len));
        let (noted, end) = self.walk(Some(k), micro, [weights, x], None, scratch);
        let tensors = tensor_views(&self.0.tensors(), gradient);
        let tensors = tensors.into_iter().map(|view| (view, accumulate)).collect();
        let slopes = vec![None; noted.values.len()];
        let mut back = Back { k, noted: &noted, slopes, tensors, scratch };
        back.give(end, dy, false);
        for (operation, y) in noted.noted.iter().rev() {
            // What leads nowhere has no gradient.
            if let Some(dy) = back.slopes[y.0] {
                back.undo(operation, dy);
            }
        }
        for &(view, has) in &back.tensors {
            if !has {
                k.clear(view);
            }
        }
        match (dx, back.slopes[0]) {
            (Some(dx), Some(slope)) => k.dropped(dx, slope.view, micro.rows, None),
            (Some(dx), None) => k.clear(dx),
            (None, _) => {}
        }
    }
}
