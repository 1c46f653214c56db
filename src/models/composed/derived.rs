//! The layer of what is composed: walks it forward, and what was noted of it back.

use super::{Composed, Derived, Operation, Operations, Value};
use crate::kernels::BatchView;
use crate::kernels::CustomKernel;
use crate::kernels::{Attention, Kernels, Rows};
use crate::models::layer::{
    Backward, Forward, KvCache, Layer, Save, Tensor, block_len, tensor_views,
};
use crate::tensor::Scratch;
use crate::tensor::{Dtype, View};

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
        let sum = if is_own { view } else { self.scratch.take(view.len()) };
        self.k.residual(sum, known.view, view, self.noted.rows(), None);
        self.slopes[to.0] = Some(Slope { view: sum, is_own: true });
    }

    /// Room for the gradient of a value.
    fn room(&self, of: Value) -> View {
        self.scratch.take(self.noted.of(of).0.len())
    }

    /// What an operation may write over that holds the gradient of what it wrote.
    fn taken(&self, dy: Slope) -> View {
        if dy.is_own {
            return dy.view;
        }
        let copy = self.scratch.take(dy.view.len());
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
            Operation::CustomKernel { x, ref back, ref numbers } => {
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
        batch: BatchView<'a>,
        [weights, x]: [View; 2],
        memory: Option<KvCache>,
        scratch: &'a Scratch<'a>,
    ) -> (Operations<'a>, Value) {
        let mut operations = Operations {
            kernels,
            batch,
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
        let batch =
            BatchView { rows, lengths: &[1], kinds: &[0], documents: &[], past: &[], key: None };
        let scratch = Scratch::new(View::floats(0, usize::MAX / 8), Dtype::F32);
        let weights = View::floats(0, block_len(&self.0.tensors()));
        let x = View::floats(0, self.0.channels());
        let (operations, _) = self.walk(None, batch, [weights, x], None, &scratch);
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

    fn kv_width(&self) -> usize {
        self.of_attentions(|size| size.kv_width())
    }

    fn attention_channels(&self) -> usize {
        self.of_attentions(|size| size.heads * size.head_size)
    }

    fn custom_kernels(&self) -> Vec<CustomKernel> {
        self.0.custom_kernels()
    }

    /// Nothing: its backward computes all again.
    fn saved_len(&self, _positions: usize, _keep: Save, _of: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, weights, x, y, memory, scratch, .. } = *pass;
        let (operations, end) = self.walk(Some(k), batch, [weights, x], memory, scratch);
        k.dropped(y, operations.of(end).0, batch.rows, None);
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradient, accumulate, x, dy, dx, scratch, .. } = *pass;
        let gradient = gradient.unwrap_or_else(|| scratch.take_floats(weights.len()));
        let (noted, end) = self.walk(Some(k), batch, [weights, x], None, scratch);
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
            (Some(dx), Some(slope)) => k.dropped(dx, slope.view, batch.rows, None),
            (Some(dx), None) => k.clear(dx),
            (None, _) => {}
        }
    }
}
