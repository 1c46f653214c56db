//! Norms over the channels of each row: by mean and deviation, or by root mean square.

use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// y = (offset + γ) (x − mean) rstd + β.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Output. (R, C).
    pub y: View,
    /// Floats: mean (0 by root mean square) and rstd of each row. (R, 2).
    pub statistics: View,
    /// Input. (R, C).
    pub x: View,
    /// Scale. (1, C).
    pub gamma: View,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// Shift. (1, C).
    pub beta: Option<View>,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
    /// True: root mean square, without a mean.
    pub rms: bool,
}

/// dx = `residual` + …, dγ (+)= …, dβ (+)= ….
#[derive(Clone, Copy, Debug)]
pub struct NormBackward {
    /// (R, C).
    pub dx: View,
    /// Floats. (1, C).
    pub dgamma: View,
    /// Floats. (1, C).
    pub dbeta: Option<View>,
    /// The gradient of the residual stream, if `x` is its input, too. (R, C).
    pub residual: Option<View>,
    /// (R, C).
    pub dy: View,
    /// The forward's input. (R, C).
    pub x: View,
    /// The forward's statistics. (R, 2).
    pub statistics: View,
    /// Scale. (1, C).
    pub gamma: View,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// As in [`Norm`].
    pub rms: bool,
    /// True when `dgamma` and `dbeta` are added to; false when they are replaced.
    pub accumulate: bool,
}

impl KernelOperation for Norm {
    fn views(&self, views: &mut Views<'_>) {
        let Norm { y, statistics, x, gamma, beta, .. } = *self;
        let dtype = x.dtype;
        views.writes("y", y, x.shape(), dtype);
        views.writes("statistics", statistics, [x.rows, 2], Dtype::F32);
        views.reads("x", x, x.shape(), dtype);
        views.reads("gamma", gamma, [1, x.columns], dtype);
        views.reads("beta", beta, [1, x.columns], dtype);
    }
}

impl KernelOperation for NormBackward {
    fn views(&self, views: &mut Views<'_>) {
        let NormBackward { dx, dgamma, dbeta, residual, dy, x, statistics, gamma, .. } = *self;
        let dtype = x.dtype;
        views.writes("dx", dx, x.shape(), dtype);
        views.writes("dgamma", dgamma, [1, x.columns], Dtype::F32);
        views.writes("dbeta", dbeta, [1, x.columns], Dtype::F32);
        views.reads("residual", residual, x.shape(), dtype);
        views.reads("dy", dy, x.shape(), dtype);
        views.reads("x", x, x.shape(), dtype);
        views.reads("statistics", statistics, [x.rows, 2], Dtype::F32);
        views.reads("gamma", gamma, [1, x.columns], dtype);
    }
}
