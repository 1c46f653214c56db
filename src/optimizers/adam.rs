//! Adam (Kingma and Ba 2015): weight decay is added to gradients, and so passes through the
//! moments. The order of operations is PyTorch's.

use super::elementwise::{ElementRule, elementwise_rule};
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

/// The factors of one update of a tensor, rounded to f32.
#[derive(Clone, Copy)]
struct Factors {
    scale: f32,
    decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// The learning rate with the first moment's bias correction.
    rate: f32,
    /// The second moment's bias correction.
    root_of_bias2: f32,
    epsilon: f32,
}

impl Factors {
    /// Updates the moments of a parameter, and gives the new parameter.
    #[inline(always)]
    fn updated(self, p: f32, m: &mut f32, v: &mut f32, g: f32) -> f32 {
        let g = g * self.scale + self.decay * p;
        *m += (g - *m) * self.one_minus_beta1;
        *v = *v * self.beta2 + g * g * self.one_minus_beta2;
        p - self.rate * (*m / (v.sqrt() / self.root_of_bias2 + self.epsilon))
    }
}

impl Adam {
    fn factors(&self, tensor: &Tensor, update: Update) -> Factors {
        let (beta1, beta2) = self.betas;
        let count = (update.step + 1) as f64;
        let bias1 = 1.0 - beta1.powf(count);
        let bias2 = 1.0 - beta2.powf(count);
        Factors {
            scale: update.scale,
            decay: self.decay.of(tensor) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            rate: (update.learning_rate / bias1) as f32,
            root_of_bias2: bias2.sqrt() as f32,
            epsilon: self.epsilon as f32,
        }
    }

    fn rule(&self, tensor: &Tensor, update: Update) -> impl ElementRule<2> + use<> {
        let factors = self.factors(tensor, update);
        move |p, [m, v]: [&mut f32; 2], g| factors.updated(p, m, v, g)
    }
}

elementwise_rule!(Adam, ["exp_avg", "exp_avg_sq"]);
