//! LAMB (You et al. 2020, algorithm 2): Adam's step, scaled for each tensor by the ratio of the
//! norms of its parameters and of the step.

use rayon::prelude::*;

use super::{CHUNK, Masters, RuleState, Update, UpdateRule, WeightDecay};
use crate::models::Tensor;

/// LAMB's hyperparameters. It keeps two states a parameter: the first and the second moment.
///
/// The vocabulary's table counts tile by tile, where it is cut into several.
#[derive(Clone, Debug, PartialEq)]
pub struct Lamb {
    /// The decay rates β₁ and β₂ of the moments.
    pub betas: (f64, f64),
    /// ε, which is added to the root of the second moment.
    pub epsilon: f64,
    /// The decay, which is a part of the step.
    pub decay: WeightDecay,
}

/// The factors of one update of a tensor, rounded to f32.
#[derive(Clone, Copy)]
struct Factors {
    scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// The bias corrections of both moments; of the second, its root.
    bias1: f32,
    root_of_bias2: f32,
    epsilon: f32,
    decay: f32,
}

impl Factors {
    /// Updates the moments of a parameter.
    #[inline(always)]
    fn observe(self, m: &mut f32, v: &mut f32, g: f32) {
        let g = g * self.scale;
        *m += (g - *m) * self.one_minus_beta1;
        *v = *v * self.beta2 + g * g * self.one_minus_beta2;
    }

    /// The step of a parameter, before it is scaled.
    #[inline(always)]
    fn step(self, p: f32, m: f32, v: f32) -> f32 {
        m / self.bias1 / (v.sqrt() / self.root_of_bias2 + self.epsilon) + self.decay * p
    }
}

impl Lamb {
    fn factors(&self, tensor: &Tensor, update: Update) -> Factors {
        let (beta1, beta2) = self.betas;
        let count = (update.step + 1) as f64;
        Factors {
            scale: update.scale,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            bias1: (1.0 - beta1.powf(count)) as f32,
            root_of_bias2: (1.0 - beta2.powf(count)).sqrt() as f32,
            epsilon: self.epsilon as f32,
            decay: self.decay.of(tensor) as f32,
        }
    }
}

fn square(value: f32) -> f64 {
    f64::from(value) * f64::from(value)
}

impl UpdateRule for Lamb {
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        vec![RuleState::like("exp_avg", tensor), RuleState::like("exp_avg_sq", tensor)]
    }

    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let [m, v] = states else { unreachable!("two moments") };
        let mut p = masters.join();
        let factors = self.factors(tensor, update);
        let chunks = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
        let chunks = chunks.zip(p.par_chunks(CHUNK)).zip(gradient.par_chunks(CHUNK));
        let squares: Vec<[f64; 2]> = chunks
            .map(|(((m, v), p), g)| {
                let mut sums = [0.0; 2];
                for (((m, v), &p), &g) in m.iter_mut().zip(v).zip(p).zip(g) {
                    factors.observe(m, v, g);
                    sums[0] += square(p);
                    sums[1] += square(factors.step(p, *m, *v));
                }
                sums
            })
            .collect();
        // Chunks are added in their order, so the number of threads changes nothing.
        let [of_p, of_step] = squares
            .iter()
            .fold([0.0; 2], |sums, chunk| [sums[0] + chunk[0], sums[1] + chunk[1]])
            .map(f64::sqrt);
        let ratio = if of_p > 0.0 && of_step > 0.0 { of_p / of_step } else { 1.0 };
        let rate = (update.learning_rate * ratio) as f32;
        let chunks = p.par_chunks_mut(CHUNK).zip(m.par_chunks(CHUNK)).zip(v.par_chunks(CHUNK));
        chunks.for_each(|((p, m), v)| {
            for ((p, &m), &v) in p.iter_mut().zip(m).zip(v) {
                *p -= rate * factors.step(*p, m, v);
            }
        });
    }
}
