//! The norms of a shape: their tensors, forward and backward.

use super::layer::{Init, Kind, Tensor};
use super::shape::Shape;
use crate::kernels::{Kernels, Norm, NormBackward};
use crate::tensor::{Scratch, View};

/// Weight and bias of a product, or scale and shift of a norm.
#[derive(Clone, Copy)]
pub(super) struct Affine<V> {
    pub(super) weight: V,
    pub(super) bias: Option<V>,
}

/// The backward of a norm with scale and shift `w`, whose gradients are `d`. (R, C).
#[derive(Clone, Copy)]
pub(super) struct AffineBackward {
    pub(super) dx: View,
    pub(super) d: Affine<Option<View>>,
    pub(super) dy: View,
    pub(super) x: View,
    pub(super) statistics: View,
    pub(super) w: Affine<View>,
    pub(super) residual: Option<View>,
}

/// The gradient of a small tensor. That of a frozen tensor goes to workspace, where nothing reads
/// it.
pub(super) fn or_scratch(gradient: Option<View>, tensor: View, scratch: &Scratch<'_>) -> View {
    gradient.unwrap_or_else(|| scratch.take_floats(tensor.rows, tensor.columns))
}

impl Shape {
    /// True when norms have shifts beside their scales.
    pub(crate) fn norms_shift(&self) -> bool {
        !self.rms_norm && !self.norms_only_scale
    }

    /// The heads of queries and of keys that have a norm each, and the channels of such a norm.
    pub(crate) fn normed_heads(&self) -> [usize; 3] {
        match self.joint_qk_norm {
            true => [1, 1, self.attention_width()],
            false => [self.heads, self.kv_heads, self.head_size],
        }
    }

    /// The statistics of the norms of a row's heads.
    pub(crate) fn head_statistics(&self) -> usize {
        let [of_queries, of_keys, _] = self.normed_heads();
        self.values.normed_heads(of_queries, of_keys)
    }

    /// The tensors of a norm of `len` channels: its scale and, with `has_shift`, its shift.
    pub(super) fn norm_tensors(&self, name: &str, len: usize, has_shift: bool) -> Vec<Tensor> {
        let tensor =
            |part: &str, init| Tensor::new(format!("{name}.{part}"), vec![len], Kind::Norm, init);
        let scale = if self.norm_offset == 1.0 { Init::Zeros } else { Init::Ones };
        let shift = has_shift.then(|| tensor("bias", Init::Zeros));
        [tensor("weight", scale)].into_iter().chain(shift).collect()
    }

    pub(super) fn norm(&self, y: View, statistics: View, x: View, w: Affine<View>) -> Norm {
        Norm {
            y,
            statistics,
            x,
            gamma: w.weight,
            gamma_offset: self.norm_offset,
            beta: w.bias,
            epsilon: self.norm_epsilon,
            rms: self.rms_norm,
        }
    }

    pub(super) fn norm_backward(
        &self,
        k: &dyn Kernels,
        op: &AffineBackward,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let AffineBackward { dx, d, dy, x, statistics, w, residual } = *op;
        let op = NormBackward {
            dx,
            dgamma: or_scratch(d.weight, w.weight, scratch),
            dbeta: w.bias.map(|beta| or_scratch(d.bias.flatten(), beta, scratch)),
            residual,
            dy,
            x,
            statistics,
            gamma: w.weight,
            gamma_offset: self.norm_offset,
            rms: self.rms_norm,
            accumulate,
        };
        k.norm_backward(&op, scratch);
    }
}
