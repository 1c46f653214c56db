//! Stochastic gradient descent, with momentum (Sutskever et al. 2013). The order of operations is
//! PyTorch's.

use super::elementwise::{ElementRule, elementwise_rule};
use super::{Update, WeightDecay};
use crate::models::Tensor;

/// Stochastic gradient descent without momentum. It keeps no state.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    /// The decay that is added to gradients.
    pub decay: WeightDecay,
}

/// Stochastic gradient descent with momentum, one state a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Momentum {
    /// The share of the momentum that an update leaves.
    pub momentum: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// The decay that is added to gradients.
    pub decay: WeightDecay,
}

/// The factors of one update of a tensor, rounded to f32.
#[derive(Clone, Copy)]
struct Factors {
    scale: f32,
    decay: f32,
    momentum: f32,
    nesterov: bool,
    is_first: bool,
    rate: f32,
}

impl Factors {
    /// Updates the momentum of a parameter, and gives the new parameter.
    #[inline(always)]
    fn updated(self, p: f32, momentum: &mut f32, g: f32) -> f32 {
        let g = g * self.scale + self.decay * p;
        // The first update begins the momentum with the gradient.
        *momentum = if self.is_first { g } else { self.momentum * *momentum + g };
        let step = if self.nesterov { g + self.momentum * *momentum } else { *momentum };
        p - self.rate * step
    }
}

impl Sgd {
    fn rule(&self, tensor: &Tensor, update: Update) -> impl ElementRule<0> + use<> {
        let scale = update.scale;
        let decay = self.decay.of(tensor) as f32;
        let rate = update.learning_rate as f32;
        move |p, []: [&mut f32; 0], g| p - rate * (g * scale + decay * p)
    }
}

impl Momentum {
    fn rule(&self, tensor: &Tensor, update: Update) -> impl ElementRule<1> + use<> {
        let factors = Factors {
            scale: update.scale,
            decay: self.decay.of(tensor) as f32,
            momentum: self.momentum as f32,
            nesterov: self.nesterov,
            is_first: update.step == 0,
            rate: update.learning_rate as f32,
        };
        move |p, [m]: [&mut f32; 1], g| factors.updated(p, m, g)
    }
}

elementwise_rule!(Sgd, []);
elementwise_rule!(Momentum, ["momentum_buffer"]);
