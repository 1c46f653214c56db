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

/// The factors of one update of a tensor, rounded to f32.
#[derive(Clone, Copy)]
struct Factors {
    scale: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    rate: f32,
    /// 1 − ηλ: the share of the parameter that weight decay leaves.
    shrink: f32,
}

impl Factors {
    /// Updates the momentum of a parameter, and gives the new parameter.
    #[inline(always)]
    fn updated(self, p: f32, m: &mut f32, g: f32) -> f32 {
        let g = g * self.scale;
        let direction = *m + (g - *m) * self.one_minus_beta1;
        *m += (g - *m) * self.one_minus_beta2;
        let sign = f32::from(u8::from(direction > 0.0)) - f32::from(u8::from(direction < 0.0));
        p * self.shrink - self.rate * sign
    }
}

impl Lion {
    fn factors(&self, tensor: &Tensor, update: Update) -> Factors {
        let (beta1, beta2) = self.betas;
        let decay = self.decay.of(tensor);
        Factors {
            scale: update.scale,
            one_minus_beta1: (1.0 - beta1) as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            rate: update.learning_rate as f32,
            shrink: (1.0 - update.learning_rate * decay) as f32,
        }
    }

    fn rule(&self, tensor: &Tensor, update: Update) -> impl ElementRule<1> + use<> {
        let factors = self.factors(tensor, update);
        move |p, [m]: [&mut f32; 1], g| factors.updated(p, m, g)
    }
}

elementwise_rule!(Lion, ["exp_avg"]);
