//! Activation functions of feed-forwards, alone and as gates.

use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x Φ(x) (Hendrycks and Gimpel 2016).
    GeluErf,
    /// x Φ(x), with Φ approximated by tanh.
    GeluTanh,
    /// x σ(x) (Elfwing et al. 2018).
    Silu,
    /// max(x, 0).
    Relu,
    /// The hyperbolic tangent.
    Tanh,
}

impl Activation {
    /// All names of these functions in transformers' configs.
    pub const ALL: [(&str, Activation); 7] = [
        ("gelu", Activation::GeluErf),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("relu", Activation::Relu),
        ("tanh", Activation::Tanh),
    ];

    /// The function of this name.
    pub fn named(name: &str) -> Option<Activation> {
        Activation::ALL.iter().find(|(known, _)| *known == name).map(|(_, activation)| *activation)
    }

    /// The first of its names in transformers' configs.
    pub fn name(self) -> &'static str {
        let named = Activation::ALL.iter().find(|(_, activation)| *activation == self);
        named.expect("each has a name").0
    }
}

/// y = f(x).
#[derive(Clone, Copy, Debug)]
pub struct Activate {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// f.
    pub activation: Activation,
}

/// dx = dy f′(x), in place: `dx` holds dy before the call.
#[derive(Clone, Copy, Debug)]
pub struct ActivateBackward {
    /// (R, C).
    pub dx: View,
    /// The forward's input. (R, C).
    pub x: View,
    /// f.
    pub activation: Activation,
}

/// How a feed-forward's gate and up projection become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateForm {
    /// f(gate) up (Shazeer 2020). Gate and up are side by side: the channels of one, then the
    /// channels of the other.
    Plain(Activation),
    /// Both are limited, and gate and up alternate.
    Clamped(ClampedGate),
}

/// The gate of gpt-oss: g σ(α g) (u + 1), where g is the gate, at most `limit`, and u is the up
/// projection, from −`limit` to `limit`. NaN stays NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedGate {
    /// α.
    pub alpha: f32,
    /// The limit.
    pub limit: f32,
}

/// y = the gate of x.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// Output. (R, I).
    pub y: View,
    /// Gate and up, as the form has them. (R, 2 I).
    pub x: View,
    /// How they become one.
    pub form: GateForm,
}

/// Computes the gradients of gate and up from dy.
#[derive(Clone, Copy, Debug)]
pub struct GateBackward {
    /// Output: the gradients of gate and up, as the form has them. (R, 2 I).
    pub dx: View,
    /// (R, I).
    pub dy: View,
    /// The forward's input. (R, 2 I).
    pub x: View,
    /// As in [`Gate`].
    pub form: GateForm,
}

impl KernelOperation for Activate {
    fn views(&self, views: &mut Views<'_>) {
        let Activate { y, x, .. } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("x", x, y.shape(), y.dtype);
    }
}

impl KernelOperation for ActivateBackward {
    fn views(&self, views: &mut Views<'_>) {
        let ActivateBackward { dx, x, .. } = *self;
        views.writes("dx", dx, dx.shape(), dx.dtype);
        views.reads("x", x, dx.shape(), dx.dtype);
    }
}

impl KernelOperation for Gate {
    fn views(&self, views: &mut Views<'_>) {
        let Gate { y, x, .. } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("x", x, [y.rows, 2 * y.columns], y.dtype);
    }
}

impl KernelOperation for GateBackward {
    fn views(&self, views: &mut Views<'_>) {
        let GateBackward { dx, dy, x, .. } = *self;
        let wide = [dy.rows, 2 * dy.columns];
        views.writes("dx", dx, wide, dy.dtype);
        views.reads("dy", dy, dy.shape(), dy.dtype);
        views.reads("x", x, wide, dy.dtype);
    }
}
