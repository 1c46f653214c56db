//! The layer of a composition: runs it forward, and walks the recorded operations back.

use super::{Composed, Derived, Operation, Operations, Value};
use crate::kernels::{
    ActivateBackward, ApplyDropout, AttentionBackward, AttentionShape, BatchMetadata, BatchView,
    Clear, Custom, CustomKernel, GateBackward, GateForm, Kernels, LinearBackward, NormBackward,
    Residual, Rotate,
};
use crate::models::layer::{
    Backward, Cuts, Forward, KvCache, Layer, Save, Tensor, block_len, tensor_views,
};
use crate::models::norms::or_scratch;
use crate::tensor::{Dtype, Scratch, View};

/// The gradient of a value, as far as it is known.
#[derive(Clone, Copy)]
struct Gradient {
    view: View,
    /// True: the view may be overwritten, because no other operation reads it.
    is_own: bool,
}

/// The walk back over the recorded operations.
struct Walk<'a, 'n> {
    k: &'n dyn Kernels,
    forward: &'n Operations<'a>,
    gradients: Vec<Option<Gradient>>,
    /// The gradient of each trained tensor, and whether it holds contributions of this step.
    tensors: Vec<(Option<View>, bool)>,
    scratch: &'n Scratch<'n>,
}

impl Walk<'_, '_> {
    fn add(&mut self, to: Value, view: View, is_own: bool) {
        let Some(known) = self.gradients[to.0] else {
            self.gradients[to.0] = Some(Gradient { view, is_own });
            return;
        };
        let sum = if is_own { view } else { self.scratch.take_like(view) };
        self.k.residual(&Residual { y: sum, a: known.view, x: view, dropout: None });
        self.gradients[to.0] = Some(Gradient { view: sum, is_own: true });
    }

    /// Workspace for the gradient of a value.
    fn take_for(&self, value: Value) -> View {
        self.scratch.take_like(self.forward.view(value))
    }

    /// The gradient of an operation's output, to overwrite.
    fn to_overwrite(&self, dy: Gradient) -> View {
        if dy.is_own {
            return dy.view;
        }
        let copy = self.scratch.take_like(dy.view);
        self.k.dropout(&ApplyDropout { y: copy, x: dy.view, dropout: None });
        copy
    }

    /// Gradients of the tensors of one operation, and whether it adds to them.
    fn gradients_of<const N: usize>(
        &mut self,
        tensors: [Option<usize>; N],
    ) -> ([Option<View>; N], bool) {
        let accumulate = tensors.iter().flatten().any(|&index| self.tensors[index].1);
        let views = tensors.map(|index| {
            let (view, has) = &mut self.tensors[index?];
            let y = (*view)?;
            if accumulate && !*has {
                self.k.clear(&Clear { y });
            }
            *has = true;
            Some(y)
        });
        (views, accumulate)
    }

    /// Computes the gradients of an operation's inputs from the gradient of its output.
    fn step(&mut self, operation: &Operation<'_>, dy: Gradient) {
        let k = self.k;
        let forward = self.forward;
        match *operation {
            Operation::Linear { x, w, bias, transposed } => {
                self.linear(x, [Some(w), bias], transposed, dy.view);
            }
            Operation::Norm { x, gamma, beta, rms, statistics } => {
                self.norm(x, [Some(gamma), beta], rms, statistics, dy.view);
            }
            Operation::Activate { x, activation } => {
                let dx = self.to_overwrite(dy);
                k.activate_backward(&ActivateBackward { dx, x: forward.view(x), activation });
                self.add(x, dx, true);
            }
            Operation::Gate { x, activation } => {
                let dx = self.take_for(x);
                let input = forward.view(x);
                let form = GateForm::Plain(activation);
                k.gate_backward(&GateBackward { dx, dy: dy.view, x: input, form });
                self.add(x, dx, true);
            }
            Operation::Add { a, b } => {
                self.add(a, dy.view, false);
                self.add(b, dy.view, false);
            }
            Operation::Dropout { x, dropout } => {
                let dx = self.take_for(x);
                k.dropout(&ApplyDropout { y: dx, x: dy.view, dropout });
                self.add(x, dx, true);
            }
            Operation::Attention { x, y, qkv, lse, ref shape, ref rotary } => {
                let dqkv = self.take_for(x);
                let dy = dy.view;
                let y = forward.view(y);
                let shape = **shape;
                let op = AttentionBackward { dqkv, chunk_kv: None, dy, y, lse, qkv, shape };
                k.attention_backward(&op, self.scratch);
                if let Some(rotary) = rotary {
                    k.rotate(&Rotate { qkv: dqkv, rotary, shape, inverse: true });
                }
                self.add(x, dqkv, true);
            }
            Operation::Custom { x, ref backward, ref numbers } => {
                let dx = self.take_for(x);
                let reads = &[dy.view, forward.view(x)];
                k.custom(&Custom { kernel: backward, writes: &[dx], reads, numbers });
                self.add(x, dx, true);
            }
        }
    }

    /// The backward of a product with a weight and a bias.
    fn linear(&mut self, x: Value, tensors: [Option<usize>; 2], transposed: bool, dy: View) {
        let dx = self.take_for(x);
        let ([dw, dbias], accumulate) = self.gradients_of(tensors);
        let [w, _] = tensors;
        let op = LinearBackward {
            dx,
            dw,
            dbias,
            dy,
            x: self.forward.view(x),
            w: self.forward.weights[w.expect("a product has a weight")],
            transposed,
            accumulate,
        };
        self.k.linear_backward(&op, self.scratch);
        self.add(x, dx, true);
    }

    /// The backward of a norm with a scale and a shift.
    fn norm(
        &mut self,
        x: Value,
        tensors: [Option<usize>; 2],
        rms: bool,
        statistics: View,
        dy: View,
    ) {
        let dx = self.take_for(x);
        let ([dgamma, dbeta], accumulate) = self.gradients_of(tensors);
        let [gamma, beta] = tensors.map(|index| index.map(|index| self.forward.weights[index]));
        let gamma = gamma.expect("a norm has a scale");
        let op = NormBackward {
            dx,
            dgamma: or_scratch(dgamma, gamma, self.scratch),
            dbeta: beta.map(|beta| or_scratch(dbeta, beta, self.scratch)),
            residual: None,
            dy,
            x: self.forward.view(x),
            statistics,
            gamma,
            gamma_offset: 0.0,
            rms,
            accumulate,
        };
        self.k.norm_backward(&op, self.scratch);
        self.add(x, dx, true);
    }
}

impl<C: Composed> Derived<C> {
    /// Runs the forward and records it.
    fn record<'a>(
        &self,
        kernels: Option<&'a dyn Kernels>,
        batch: BatchView<'a>,
        weights: &[View],
        x: View,
        kv_cache: Option<KvCache>,
        scratch: &'a Scratch<'a>,
    ) -> (Operations<'a>, Value) {
        let mut operations = Operations {
            kernels,
            batch,
            weights: weights.to_vec(),
            scratch,
            layer: self.0.index(),
            sites: 0,
            drops: false,
            kv_cache,
            values: vec![x],
            recorded: Vec::new(),
        };
        let y = self.0.compose(&mut operations, Value(0));
        (operations, y)
    }

    /// Looks at the layer's operations without running them.
    fn inspect<T>(&self, look: impl FnOnce(&Operations<'_>) -> T) -> T {
        let batch = BatchMetadata {
            starts: &[0, 1],
            kinds: &[0],
            documents: &[],
            cached: &[],
            dropout_key: None,
        };
        let scratch = Scratch::new(View::floats(0, usize::MAX / 8), Dtype::F32);
        let tensors = self.0.tensors();
        let weights = tensor_views(&tensors, View::floats(0, block_len(&tensors)));
        let x = View::floats(0, self.0.channels());
        let (operations, _) = self.record(None, batch.view(), &weights, x, None, &scratch);
        look(&operations)
    }

    /// Sums a number over the attentions of the layer.
    fn sum_attentions(&self, number: impl Fn(&AttentionShape<'_>) -> usize) -> usize {
        let of = |(operation, _): &(Operation<'_>, Value)| match operation {
            Operation::Attention { shape, .. } => Some(number(shape)),
            _ => None,
        };
        self.inspect(|operations| operations.recorded.iter().filter_map(of).sum())
    }
}

impl<C: Composed> Layer for Derived<C> {
    fn tensors(&self) -> Vec<Tensor> {
        self.0.tensors()
    }

    fn kv_width(&self) -> usize {
        self.sum_attentions(|shape| shape.kv_width())
    }

    fn attention_channels(&self) -> usize {
        self.sum_attentions(|shape| shape.width() * if shape.causal { 1 } else { 2 })
    }

    fn dropout_index(&self) -> Option<u32> {
        self.inspect(|operations| operations.drops).then(|| self.0.index())
    }

    fn custom_kernels(&self) -> Vec<CustomKernel> {
        self.0.custom_kernels()
    }

    /// Attention and custom kernels read other positions, or may do so.
    fn cuts(&self, _step: usize) -> Cuts {
        let reads_others = |(operation, _): &(Operation<'_>, Value)| {
            matches!(operation, Operation::Attention { .. } | Operation::Custom { .. })
        };
        match self.inspect(|operations| operations.recorded.iter().any(reads_others)) {
            true => Cuts::Never,
            false => Cuts::ByPosition,
        }
    }

    /// The backward recomputes all activations.
    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, weights, x, y, kv_cache, scratch, .. } = *pass;
        let (operations, end) = self.record(Some(k), batch, weights, x, kv_cache, scratch);
        k.dropout(&ApplyDropout { y, x: operations.view(end), dropout: None });
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradients, accumulate, x, dy, dx, scratch, .. } = *pass;
        let (forward, end) = self.record(Some(k), batch, weights, x, None, scratch);
        let tensors = gradients.iter().map(|view| (*view, accumulate)).collect();
        let gradients = vec![None; forward.values.len()];
        let mut walk = Walk { k, forward: &forward, gradients, tensors, scratch };
        walk.add(end, dy, false);
        for (operation, y) in forward.recorded.iter().rev() {
            // A value that does not lead to the output has no gradient.
            if let Some(dy) = walk.gradients[y.0] {
                walk.step(operation, dy);
            }
        }
        for &(y, has) in &walk.tensors {
            if let Some(y) = y.filter(|_| !has) {
                k.clear(&Clear { y });
            }
        }
        match (dx, walk.gradients[0]) {
            (Some(y), Some(known)) => k.dropout(&ApplyDropout { y, x: known.view, dropout: None }),
            (Some(y), None) => k.clear(&Clear { y }),
            (None, _) => {}
        }
    }
}
