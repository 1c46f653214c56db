//! The dense modules that sentence-transformers applies to embeddings, before they are scaled
//! (EmbeddingGemma has two).
//!
//! The host pools hidden states. A dense module without an activation function is affine, and so is
//! pooling: the mean of products is the product of the mean. So the last layer of the device
//! multiplies the hidden states of all tokens, and the host pools its output. Products of all
//! tokens take longer than one of each sequence, and no other part of the runtime must know them.

use super::classes::linear_backward;
use super::layer::{Backward, Cuts, Forward, Init, Kind, Layer, Save, Tensor};
use super::norms::Affine;
use super::shape::{Head, Shape};
use crate::kernels::{Kernels, Linear};
use crate::tensor::{Dtype, Scratch, View};

/// A dense module, without an activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseModule {
    /// Channels of its output. Those of the last module are the model's.
    pub outputs: usize,
    /// True if it has a bias.
    pub bias: bool,
}

/// The most dense modules of a model: one to more channels, and one back.
pub(crate) const MOST_DENSE: usize = 2;

/// The folders of a directory that have the modules, which also begin the names of their tensors.
pub(crate) const DENSE_FOLDERS: [&str; MOST_DENSE] = ["2_Dense", "3_Dense"];

/// True if a tensor is one of a dense module.
pub(crate) fn is_of_dense(name: &str) -> bool {
    let folder = name.split_once('.').map(|(folder, _)| folder);
    folder.is_some_and(|folder| DENSE_FOLDERS.contains(&folder))
}

impl Shape {
    /// The dense modules of a model that makes embeddings.
    pub(crate) fn dense(&self) -> impl Iterator<Item = DenseModule> {
        let dense = match self.head {
            Head::Embedding { dense, .. } => dense,
            _ => [None; MOST_DENSE],
        };
        dense.into_iter().flatten()
    }
}

/// The layer of a model's dense modules.
#[derive(Clone, Debug)]
pub struct DenseLayer {
    /// The model.
    pub shape: Shape,
}

impl DenseLayer {
    /// The layer of a shape, if it has dense modules.
    pub fn of(shape: Shape) -> Option<DenseLayer> {
        let layer = DenseLayer { shape };
        shape.dense().next().map(|_| layer)
    }

    /// The tensors of each product.
    fn sorted<V: Copy>(&self, views: &[V]) -> Vec<Affine<V>> {
        let mut views = views.iter().copied();
        let mut next = || views.next().expect("as `tensors` lists them");
        let of = |DenseModule { bias, .. }| Affine { weight: next(), bias: bias.then(&mut next) };
        self.shape.dense().map(of).collect()
    }

    /// The input of each product.
    fn inputs(
        &self,
        k: &dyn Kernels,
        w: &[Affine<View>],
        x: View,
        scratch: &Scratch<'_>,
    ) -> Vec<View> {
        let mut inputs = vec![x];
        for (module, w) in self.shape.dense().zip(w).take(w.len() - 1) {
            let y = scratch.take(x.rows, module.outputs);
            let x = inputs[inputs.len() - 1];
            k.linear(&Linear { y, x, w: w.weight, bias: w.bias, transposed: true });
            inputs.push(y);
        }
        inputs
    }
}

impl Layer for DenseLayer {
    fn tensors(&self) -> Vec<Tensor> {
        let mut inputs = self.shape.hidden;
        let mut all = Vec::new();
        for (folder, DenseModule { outputs, bias }) in DENSE_FOLDERS.iter().zip(self.shape.dense())
        {
            // As PyTorch begins a linear layer. A rule for matrices leaves heads to another rule.
            let init = Init::Uniform((inputs as f32).sqrt().recip());
            let name = |part: &str| format!("{folder}.linear.{part}");
            all.push(Tensor::new(name("weight"), vec![outputs, inputs], Kind::Table, init));
            all.extend(bias.then(|| Tensor::new(name("bias"), vec![outputs], Kind::Bias, init)));
            inputs = outputs;
        }
        all
    }

    fn is_optional(&self) -> bool {
        false
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn cuts(&self, _step: usize) -> Cuts {
        Cuts::ByPosition
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { weights, x, y, scratch, .. } = *pass;
        let w = self.sorted(weights);
        let inputs = self.inputs(k, &w, x, scratch);
        if let (Some(&x), Some(w)) = (inputs.last(), w.last()) {
            k.linear(&Linear { y, x, w: w.weight, bias: w.bias, transposed: true });
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { weights, gradients, accumulate, x, mut dy, scratch, .. } = *pass;
        let w = self.sorted(weights);
        let d = self.sorted(gradients);
        let inputs = self.inputs(k, &w, x, scratch);
        for ((nth, &x), (w, d)) in inputs.iter().enumerate().zip(w.iter().zip(&d)).rev() {
            let first = pass.dx.filter(|_| nth == 0);
            let dx = first.unwrap_or_else(|| scratch.take_like(x));
            linear_backward(k, [dx, dy, x], *w, *d, accumulate, scratch);
            dy = dx;
        }
    }
}
