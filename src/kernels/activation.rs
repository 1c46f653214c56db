//! Activation functions of feed-forwards, alone and as gates.

use super::check::Check;
use crate::tensor::View;

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x Φ(x) (Hendrycks and Gimpel 2016).
    GeluErf,
    /// The same, with Φ by tanh.
    GeluTanh,
    /// x σ(x) (Elfwing et al. 2018).
    Silu,
    /// max(x, 0).
    Relu,
    /// The hyperbolic tangent.
    Tanh,
}

impl Activation {
    /// All names that transformers has for them.
    pub const ALL: [(&str, Activation); 7] = [
        ("gelu", Activation::GeluErf),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("relu", Activation::Relu),
        ("tanh", Activation::Tanh),
    ];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Activation> {
        Activation::ALL.iter().find(|(known, _)| *known == name).map(|(_, activation)| *activation)
    }

    /// Its first name.
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

/// dx = dy f′(x), in place: `dx` holds dy before.
#[derive(Clone, Copy, Debug)]
pub struct ActivateBackward {
    /// (R, C).
    pub dx: View,
    /// The forward's input. (R, C).
    pub x: View,
    /// f.
    pub activation: Activation,
}

/// y = f(gate) up.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// Output. (R, I).
    pub y: View,
    /// Gate and up side by side. (R, 2 I).
    pub x: View,
    /// f.
    pub activation: Activation,
}

/// Gradients of gate and up.
#[derive(Clone, Copy, Debug)]
pub struct GateBackward {
    /// Those of gate and up side by side. (R, 2 I).
    pub dx: View,
    /// (R, I).
    pub dy: View,
    /// The forward's input. (R, 2 I).
    pub x: View,
    /// f.
    pub activation: Activation,
}

impl Activate {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        Check("activate").view("x", self.x, [self.y.rows, self.y.columns], self.y.dtype);
    }
}

impl ActivateBackward {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let ActivateBackward { dx, x, .. } = *self;
        Check("activate_backward").view("x", x, [dx.rows, dx.columns], dx.dtype);
    }
}

impl Gate {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let Gate { y, x, .. } = *self;
        Check("gate").view("x", x, [y.rows, 2 * y.columns], y.dtype);
    }
}

impl GateBackward {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let GateBackward { dx, dy, x, .. } = *self;
        let (check, shape) = (Check("gate_backward"), [dy.rows, 2 * dy.columns]);
        check.view("dx", dx, shape, dy.dtype);
        check.view("x", x, shape, dy.dtype);
    }
}
