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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{Init, Kind, tensor_ranges};
    use crate::optimizers::{Masters, UpdateRule};
    use crate::simd::Level;

    fn tensor(name: &str, kind: Kind, len: usize) -> Tensor {
        Tensor { name: name.into(), shape: vec![len], kind, init: Init::Zeros, joined: false }
    }

    /// Compares every level with the paper's algorithm 2 in f64.
    #[test]
    fn every_level_agrees_with_the_paper() {
        let tensors = [tensor("w", Kind::Weight, 20), tensor("b", Kind::Bias, 3)];
        let decay = WeightDecay { rate: 0.1, except: vec!["bias".to_string()] };
        let rule = AdamW { betas: (0.9, 0.99), epsilon: 1e-8, decay };
        let value = |i: usize| (i as f32 * 0.7).sin();
        for level in Level::all() {
            let mut p: Vec<f32> = (0..48).map(value).collect();
            let begin = p.clone();
            let mut states = vec![vec![0.0; 48]; 2];
            let mut plain: Vec<(f64, f64, f64)> =
                p.iter().map(|&p| (f64::from(p), 0.0, 0.0)).collect();
            for step in 0..5_u64 {
                let gradient: Vec<f32> = (0..48).map(|i| value(i * 3 + step as usize)).collect();
                let update = Update { step, learning_rate: 0.01, scale: 0.5, level, seed: 0 };
                for (tensor, range) in tensors.iter().zip(tensor_ranges(&tensors)) {
                    let states = states.iter_mut().map(|state| &mut state[range.clone()]);
                    let mut states: Vec<&mut [f32]> = states.collect();
                    let masters = Masters::F32(&mut p[range.clone()]);
                    rule.apply(tensor, masters, &mut states, &gradient[range], update);
                }
                for (i, (p, m, v)) in plain.iter_mut().enumerate() {
                    let g = 0.5 * f64::from(gradient[i]);
                    *m = 0.9 * *m + 0.1 * g;
                    *v = 0.99 * *v + 0.01 * g * g;
                    let t = step as i32 + 1;
                    let m_hat = *m / (1.0 - 0.9_f64.powi(t));
                    let v_hat = *v / (1.0 - 0.99_f64.powi(t));
                    let decay = if i < 20 { 0.1 } else { 0.0 };
                    *p -= 0.01 * decay * *p + 0.01 * m_hat / (v_hat.sqrt() + 1e-8);
                }
            }
            for i in (0..20).chain(32..35) {
                let error = (f64::from(p[i]) - plain[i].0).abs();
                assert!(error < 1e-6, "{i}: {} {:?}", p[i], plain[i]);
            }
            assert_eq!(p[20..32], begin[20..32], "padding stays");
        }
    }
}
