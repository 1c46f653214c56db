//! Lion (Chen et al. 2023, algorithm 2): the sign of an interpolation between momentum and
//! gradient.

use super::elementwise::{ElementRule, elementwise_rule};
use super::{Update, WeightDecay};
use crate::models::Tensor;

/// Lion's hyperparameters. It keeps one state a parameter: the momentum.
#[derive(Clone, Debug, PartialEq)]
pub struct Lion {
    /// β₁, of the interpolation whose sign is taken, and β₂, of the momentum.
    pub betas: (f64, f64),
    /// The decay of parameters, as a share of the learning rate.
    pub decay: WeightDecay,
}

impl Lion {
    fn rule(&self, tensor: &Tensor, update: Update) -> impl ElementRule<1> + use<> {
        let (beta1, beta2) = self.betas;
        let scale = update.scale;
        let one_minus_beta1 = (1.0 - beta1) as f32;
        let one_minus_beta2 = (1.0 - beta2) as f32;
        let rate = update.learning_rate as f32;
        // 1 − ηλ: the share of the parameter that weight decay leaves.
        let shrink = (1.0 - update.learning_rate * self.decay.of(tensor)) as f32;
        move |p, [m]: [&mut f32; 1], g| {
            let g = g * scale;
            let direction = *m + (g - *m) * one_minus_beta1;
            *m += (g - *m) * one_minus_beta2;
            let sign = f32::from(u8::from(direction > 0.0)) - f32::from(u8::from(direction < 0.0));
            p * shrink - rate * sign
        }
    }
}

elementwise_rule!(Lion, ["exp_avg"]);
