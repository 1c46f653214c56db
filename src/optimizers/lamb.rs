//! LAMB (You et al. 2020, algorithm 2): Adam's step, scaled for each tensor by the ratio of the
//! norms of its parameters and of the step.

use rayon::prelude::*;

use super::moments::Moments;
use super::{CHUNK, Masters, RuleState, Update, UpdateRule, WeightDecay, square};
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
        let moments = Moments::new(self.betas.into(), self.epsilon, update);
        let bias1 = moments.bias1 as f32;
        let decay = self.decay.of(tensor) as f32;
        // The step of a parameter, before it is scaled.
        let step = |p: f32, m: f32, v: f32| m / bias1 / moments.divisor(v) + decay * p;
        let chunks = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
        let chunks = chunks.zip(p.par_chunks(CHUNK)).zip(gradient.par_chunks(CHUNK));
        let squares: Vec<[f64; 2]> = chunks
            .map(|(((m, v), p), g)| {
                let mut sums = [0.0; 2];
                for (((m, v), &p), &g) in m.iter_mut().zip(v).zip(p).zip(g) {
                    moments.observe(m, v, g * update.scale);
                    sums[0] += square(p);
                    sums[1] += square(step(p, *m, *v));
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
                *p -= rate * step(*p, m, v);
            }
        });
    }
}
