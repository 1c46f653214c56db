//! Adam (Kingma and Ba 2015): weight decay is added to gradients, and so passes through the
//! moments. The order of operations is PyTorch's.

use super::elementwise::{ElementRule, elementwise_rule};
use super::moments::Moments;
use super::{Update, WeightDecay};
use crate::models::Tensor;

/// Adam's hyperparameters. It keeps two states a parameter: the first and the second moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    /// The decay rates β₁ and β₂ of the moments.
    pub betas: (f64, f64),
    /// ε, which is added to the root of the second moment.
    pub epsilon: f64,
    /// The decay that is added to gradients.
    pub decay: WeightDecay,
}

impl Adam {
    fn rule(&self, tensor: &Tensor, update: Update) -> impl ElementRule<2> + use<> {
        let moments = Moments::new(self.betas.into(), self.epsilon, update);
        let scale = update.scale;
        let decay = self.decay.of(tensor) as f32;
        let rate = (update.learning_rate / moments.bias1) as f32;
        move |p, [m, v]: [&mut f32; 2], g| {
            moments.observe(m, v, g * scale + decay * p);
            p - rate * (*m / moments.divisor(*v))
        }
    }
}

elementwise_rule!(Adam, ["exp_avg", "exp_avg_sq"]);
