//! The norms of a shape: their tensors, forward and backward.

use super::layer::{Init, Kind, Tensor};
use super::shape::Shape;
use crate::kernels::{Kernels, Norm, NormBackward, QkNorm, QueryKey};
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

    /// The statistics of a row's norm of queries and keys.
    pub(super) fn head_statistics(&self, norm: QkNorm) -> usize {
        norm.parts(self.head_sizes()).normed(self.values) * norm.statistics()
    }

    /// The scales of the norm of queries and keys.
    pub(super) fn head_norm_tensors(&self, norm: QkNorm, names: [String; 2]) -> Vec<Tensor> {
        let QueryKey { query, key } = norm.scales(&norm.parts(self.head_sizes()));
        let init = self.initial_scale();
        let tensor = |(name, [rows, columns]): (String, [usize; 2])| {
            let shape = match norm {
                QkNorm::ByHead | QkNorm::Joint => vec![columns],
                QkNorm::LayerNorm => vec![rows, columns],
            };
            Tensor::new(format!("{name}.weight"), shape, Kind::Norm, init)
        };
        names.into_iter().zip([query, key]).map(tensor).collect()
    }

    fn head_sizes(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.head_size]
    }

    fn initial_scale(&self) -> Init {
        if self.norm_offset == 1.0 { Init::Zeros } else { Init::Ones }
    }

    /// The tensors of a norm of `len` channels: its scale and, with `has_shift`, its shift.
    pub(super) fn norm_tensors(&self, name: &str, len: usize, has_shift: bool) -> Vec<Tensor> {
        let tensor =
            |part: &str, init| Tensor::new(format!("{name}.{part}"), vec![len], Kind::Norm, init);
        let shift = has_shift.then(|| tensor("bias", Init::Zeros));
        [tensor("weight", self.initial_scale())].into_iter().chain(shift).collect()
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
