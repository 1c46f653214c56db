//! The tensors of a block, and their views.

use super::TransformerBlock;
use crate::kernels::QueryKey;
use crate::models::layer::{Init, Kind, Tensor, tensor_views};
use crate::models::shape::Shape;
use crate::tensor::View;

/// Weight and bias of a product, or scale and shift of a norm.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) weight: View,
    pub(super) bias: Option<View>,
}

/// Views of a block's tensors, or of their gradients.
pub(super) struct Weights {
    pub(super) norm1: Affine,
    pub(super) qkv: Affine,
    pub(super) qk_norm: Option<QueryKey>,
    pub(super) projection: Affine,
    pub(super) norm2: Affine,
    pub(super) up: Affine,
    pub(super) down: Affine,
}

/// Lists tensors in the order in which they lie in the block.
struct List<'b> {
    block: &'b TransformerBlock,
    tensors: Vec<Tensor>,
}

impl List<'_> {
    fn push(&mut self, name: &str, shape: Vec<usize>, kind: Kind, init: Init, joined: bool) {
        let name = name.replace("{}", &self.block.number.to_string());
        self.tensors.push(Tensor { name, shape, kind, init, joined });
    }

    fn norm(&mut self, name: &str, len: usize, has_shift: bool) {
        self.push(&format!("{name}.weight"), vec![len], Kind::Norm, Init::Ones, false);
        if has_shift {
            self.push(&format!("{name}.bias"), vec![len], Kind::Norm, Init::Zeros, false);
        }
    }

    /// Products that read the same input, by name and outputs. They lie one behind the other and
    /// are computed as one.
    fn linear(&mut self, parts: &[(&str, usize)], inputs: usize, has_bias: bool, init: Init) {
        for (index, &(name, outputs)) in parts.iter().enumerate() {
            let is_transposed = self.block.shape.transposed;
            let shape = if is_transposed { vec![outputs, inputs] } else { vec![inputs, outputs] };
            self.push(&format!("{name}.weight"), shape, Kind::Weight, init, index > 0);
        }
        for (index, &(name, outputs)) in parts.iter().enumerate().filter(|_| has_bias) {
            let name = format!("{name}.bias");
            self.push(&name, vec![outputs], Kind::Bias, Init::Zeros, index > 0);
        }
    }
}

impl TransformerBlock {
    pub(super) fn list_tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, heads, kv_heads, head_size: d, .. } = self.shape;
        let Shape { initializer_range, layers, rms_norm, biases, intermediate: i, .. } = self.shape;
        let weight = Init::Normal(initializer_range);
        // Projections onto the residual stream begin smaller: each block adds two of them.
        let onto = Init::Normal(initializer_range / (2.0 * layers as f32).sqrt());
        let qkv: Vec<(&str, usize)> = match names.qkv {
            [fused] => vec![(*fused, self.shape.qkv())],
            three => three.iter().copied().zip([heads * d, kv_heads * d, kv_heads * d]).collect(),
        };
        let up: Vec<(&str, usize)> = names.up.iter().map(|name| (*name, i)).collect();
        let mut list = List { block: self, tensors: Vec::new() };
        list.norm(names.norm1, c, !rms_norm);
        list.linear(&qkv, c, biases[0], weight);
        list.linear(&[(names.projection, c)], heads * d, biases[1], onto);
        list.norm(names.norm2, c, !rms_norm);
        list.linear(&up, c, biases[2], weight);
        list.linear(&[(names.down, c)], i, biases[2], onto);
        if self.shape.qk_norm {
            names.qk_norm.iter().for_each(|name| list.norm(name, d, false));
        }
        list.tensors
    }

    /// Views of the tensors in a block, or in its gradient.
    pub(super) fn weights(&self, block: View) -> Weights {
        let Shape { rms_norm, qk_norm, biases, .. } = self.shape;
        let mut views = tensor_views(&self.list_tensors(), block).into_iter();
        let mut next = || views.next().expect("as `list_tensors` lists them");
        let mut affine = |has_bias: bool| Affine { weight: next(), bias: has_bias.then(&mut next) };
        Weights {
            norm1: affine(!rms_norm),
            qkv: affine(biases[0]),
            projection: affine(biases[1]),
            norm2: affine(!rms_norm),
            up: affine(biases[2]),
            down: affine(biases[2]),
            qk_norm: qk_norm
                .then(|| QueryKey { query: affine(false).weight, key: affine(false).weight }),
        }
    }
}
