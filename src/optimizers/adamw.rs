//! AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay. The order of operations is
//! PyTorch's.

use super::elementwise::{ElementRule, elementwise_rule};
use super::moments::Moments;
use super::{Update, WeightDecay};
use crate::models::Tensor;

/// AdamW's hyperparameters. It keeps two states a parameter: the first and the second moment.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    /// The decay rates β₁ and β₂ of the moments.
    pub betas: (f64, f64),
    /// ε, which is added to the root of the second moment.
    pub epsilon: f64,
    /// The decay of parameters, as a share of the learning rate.
    pub decay: WeightDecay,
}

impl AdamW {
    pub(super) fn rule(&self, tensor: &Tensor, update: Update) -> impl ElementRule<2> + use<> {
        let moments = Moments::new(self.betas.into(), self.epsilon, update);
        let scale = update.scale;
        // 1 − ηλ: the share of the parameter that weight decay leaves.
        let shrink = (1.0 - update.learning_rate * self.decay.of(tensor)) as f32;
        let rate = (update.learning_rate / moments.bias1) as f32;
        move |p, [m, v]: [&mut f32; 2], g| {
            moments.observe(m, v, g * scale);
            p * shrink - rate * (*m / moments.divisor(*v))
        }
    }
}

elementwise_rule!(AdamW, ["state0", "state1"]);
