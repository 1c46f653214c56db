//! AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay. The order of operations is
//! PyTorch's.

use rayon::prelude::*;

use super::{CHUNK, SplitMasters, Update, UpdateRule};
use crate::models::{Kind, Tensor, tensor_ranges};

/// AdamW's hyperparameters. It keeps two states a parameter: the first and the second moment.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    /// The decay rates β₁ and β₂ of the moments.
    pub betas: (f64, f64),
    /// ε, which is added to the root of the second moment.
    pub epsilon: f64,
    /// The decay of parameters, as a share of the learning rate.
    pub weight_decay: f64,
    /// Tensors without weight decay: kinds (`bias`, `norm`, `weight`), or names with `*` for any
    /// text.
    pub no_decay: Vec<String>,
}

impl AdamW {
    /// Whether a tensor has weight decay.
    fn decays(&self, tensor: &Tensor) -> bool {
        !self.no_decay.iter().any(|pattern| match pattern.as_str() {
            "bias" => tensor.kind == Kind::Bias,
            "norm" => tensor.kind == Kind::Norm,
            "weight" => tensor.kind == Kind::Weight,
            pattern => matches(pattern, &tensor.name),
        })
    }
}

/// Whether a name matches a pattern, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    name.strip_prefix(before).is_some_and(|rest| {
        (0..=rest.len())
            .filter(|&at| rest.is_char_boundary(at))
            .any(|at| matches(after, &rest[at..]))
    })
}

/// The factors of one update of a tensor, rounded to f32. t is the number of updates, this one
/// included; η is the learning rate and λ the weight decay.
#[derive(Clone, Copy)]
struct Factors {
    /// 1 − β₁.
    one_minus_beta1: f32,
    /// β₂.
    beta2: f32,
    /// 1 − β₂.
    one_minus_beta2: f32,
    /// η ÷ (1 − β₁ᵗ): the learning rate with the first moment's bias correction.
    rate: f32,
    /// √(1 − β₂ᵗ): the second moment's bias correction.
    root_of_bias2: f32,
    /// ε.
    epsilon: f32,
    /// 1 − ηλ: the share of the parameter that weight decay leaves.
    shrink: f32,
    /// The factor of the gradient.
    scale: f32,
}

impl Factors {
    /// Updates the moments m and v of a parameter p from its gradient g, and gives the new p.
    #[inline(always)]
    fn updated(self, p: f32, m: &mut f32, v: &mut f32, g: f32) -> f32 {
        let g = g * self.scale;
        *m += (g - *m) * self.one_minus_beta1;
        *v = *v * self.beta2 + g * g * self.one_minus_beta2;
        p * self.shrink - self.rate * (*m / (v.sqrt() / self.root_of_bias2 + self.epsilon))
    }
}

impl AdamW {
    /// The factors of this update of a tensor.
    fn factors(&self, tensor: &Tensor, update: Update) -> Factors {
        let (beta1, beta2) = self.betas;
        let count = (update.step + 1) as f64;
        let (bias1, bias2) = (1.0 - beta1.powf(count), 1.0 - beta2.powf(count));
        let decay = if self.decays(tensor) { self.weight_decay } else { 0.0 };
        Factors {
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            rate: (update.learning_rate / bias1) as f32,
            root_of_bias2: bias2.sqrt() as f32,
            epsilon: self.epsilon as f32,
            shrink: (1.0 - update.learning_rate * decay) as f32,
            scale: update.scale,
        }
    }
}

impl UpdateRule for AdamW {
    fn states(&self) -> usize {
        2
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn apply(
        &self,
        tensors: &[Tensor],
        parameters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let [m, v] = states else { unreachable!("two moments") };
        for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
            let factors = self.factors(tensor, update);
            let p = parameters[range.clone()].par_chunks_mut(CHUNK);
            let m = m[range.clone()].par_chunks_mut(CHUNK);
            let v = v[range.clone()].par_chunks_mut(CHUNK);
            let g = gradient[range].par_chunks(CHUNK);
            p.zip(m).zip(v).zip(g).for_each(|(((p, m), v), g)| {
                update.level.run(
                    #[inline(always)]
                    || {
                        for (((p, m), v), &g) in p.iter_mut().zip(m).zip(v).zip(g) {
                            *p = factors.updated(*p, m, v, g);
                        }
                    },
                );
            });
        }
    }

    fn apply_split(
        &self,
        tensors: &[Tensor],
        split: &mut SplitMasters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
        _unpacked: &mut [f32],
    ) {
        let [m, v] = states else { unreachable!("two moments") };
        for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
            let factors = self.factors(tensor, update);
            let published = split.published[range.clone()].par_chunks_mut(CHUNK);
            let remainder = split.remainder[range.clone()].par_chunks_mut(CHUNK);
            let m = m[range.clone()].par_chunks_mut(CHUNK);
            let v = v[range.clone()].par_chunks_mut(CHUNK);
            let g = gradient[range].par_chunks(CHUNK);
            let all = published.zip(remainder).zip(m).zip(v).zip(g);
            all.for_each(|((((published, remainder), m), v), g)| {
                update.level.run(
                    #[inline(always)]
                    || {
                        let p = published.iter_mut().zip(remainder);
                        for ((((published, remainder), m), v), &g) in p.zip(m).zip(v).zip(g) {
                            let p = factors.updated(
                                SplitMasters::join(*published, *remainder),
                                m,
                                v,
                                g,
                            );
                            (*published, *remainder) = SplitMasters::split(p);
                        }
                    },
                );
            });
        }
    }

    fn unpacked_len(&self, _parameters: usize) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Init;
    use crate::simd::Level;

    fn tensor(name: &str, kind: Kind, len: usize) -> Tensor {
        Tensor { name: name.into(), shape: vec![len], kind, init: Init::Zeros, joined: false }
    }

    /// Compares every level with the paper's algorithm 2 in f64.
    #[test]
    fn every_level_agrees_with_the_paper() {
        let tensors = [tensor("w", Kind::Weight, 20), tensor("b", Kind::Bias, 3)];
        let no_decay = vec!["bias".to_string()];
        let rule = AdamW { betas: (0.9, 0.99), epsilon: 1e-8, weight_decay: 0.1, no_decay };
        let value = |i: usize| (i as f32 * 0.7).sin();
        for level in Level::all() {
            let mut p: Vec<f32> = (0..48).map(value).collect();
            let begin = p.clone();
            let mut states = vec![vec![0.0; 48]; 2];
            let mut plain: Vec<(f64, f64, f64)> =
                p.iter().map(|&p| (f64::from(p), 0.0, 0.0)).collect();
            for step in 0..5_u64 {
                let gradient: Vec<f32> = (0..48).map(|i| value(i * 3 + step as usize)).collect();
                let update = Update { step, learning_rate: 0.01, scale: 0.5, level };
                let mut parts: Vec<&mut [f32]> = states.iter_mut().map(|s| &mut s[..]).collect();
                rule.apply(&tensors, &mut p, &mut parts, &gradient, update);
                for (i, (p, m, v)) in plain.iter_mut().enumerate() {
                    let g = 0.5 * f64::from(gradient[i]);
                    (*m, *v) = (0.9 * *m + 0.1 * g, 0.99 * *v + 0.01 * g * g);
                    let t = step as i32 + 1;
                    let (m_hat, v_hat) =
                        (*m / (1.0 - 0.9_f64.powi(t)), *v / (1.0 - 0.99_f64.powi(t)));
                    let decay = if i < 20 { 0.1 } else { 0.0 };
                    *p -= 0.01 * decay * *p + 0.01 * m_hat / (v_hat.sqrt() + 1e-8);
                }
            }
            for i in (0..20).chain(32..35) {
                assert!(
                    (f64::from(p[i]) - plain[i].0).abs() < 1e-6,
                    "{i}: {} {:?}",
                    p[i],
                    plain[i]
                );
            }
            assert_eq!(p[20..32], begin[20..32], "padding stays");
        }
    }

    #[test]
    fn patterns_name_tensors() {
        assert!(matches("*.bias", "a.bias") && matches("a*c*", "abcd") && matches("x", "x"));
        assert!(!matches("*.bias", "a.bias.b") && !matches("x", "xy"));
    }
}
