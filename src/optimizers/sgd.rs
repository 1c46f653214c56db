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
        let scale = update.scale;
        let decay = self.decay.of(tensor) as f32;
        let momentum = self.momentum as f32;
        let nesterov = self.nesterov;
        let is_first = update.step == 0;
        let rate = update.learning_rate as f32;
        move |p, [m]: [&mut f32; 1], g| {
            let g = g * scale + decay * p;
            // The first update begins the momentum with the gradient.
            *m = if is_first { g } else { momentum * *m + g };
            let step = if nesterov { g + momentum * *m } else { *m };
            p - rate * step
        }
    }
}

elementwise_rule!(Sgd, []);
elementwise_rule!(Momentum, ["momentum_buffer"]);
