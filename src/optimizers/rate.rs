//! Learning-rate schedules: a linear warm-up, then one of four shapes.

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// It stays at the peak.
    Constant,
    /// It falls linearly to the minimum.
    Linear,
    /// It falls along half a cosine to the minimum (Loshchilov and Hutter 2017).
    Cosine,
    /// It stays at the peak, and falls linearly to the minimum over the last tenth of the steps
    /// after the warm-up (warm-up, stable, decay).
    Wsd,
    /// It falls to the minimum as a power of the share of steps that is left.
    Polynomial {
        /// The power; 1 is linear.
        power: f64,
    },
    /// It falls with the root of the number of steps, beginning at the end of the warm-up; without
    /// one, as if that had 10,000 steps (Vaswani et al. 2017).
    InverseSqrt,
}

/// The learning rate of each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// The highest rate, at the end of the warm-up.
    pub peak: f64,
    /// The rate at the end of the run.
    pub minimum: f64,
    /// The number of steps of the warm-up, in which the rate rises linearly from 0.
    pub warmup: u64,
    /// The number of steps of the run.
    pub steps: u64,
    /// The shape after the warm-up.
    pub decay: Decay,
}

impl LearningRate {
    /// The learning rate of a step. The first step is 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let steps_after_warmup = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let passed = ((step - self.warmup) as f64 / steps_after_warmup).min(1.0);
        let share = match self.decay {
            Decay::Constant => return self.peak,
            Decay::Linear => 1.0 - passed,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * passed).cos()),
            Decay::Polynomial { power } => (1.0 - passed).powf(power),
            Decay::InverseSqrt => {
                let warmup = if self.warmup == 0 { 10_000.0 } else { self.warmup as f64 };
                let rate = self.peak * (warmup / (warmup + (step - self.warmup) as f64)).sqrt();
                return rate.max(self.minimum.min(self.peak));
            }
            Decay::Wsd => ((1.0 - passed) / 0.1).min(1.0),
        };
        self.minimum + (self.peak - self.minimum) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shape_begins_and_ends_where_it_should() {
        let of = |decay| LearningRate { peak: 1.0, minimum: 0.1, warmup: 4, steps: 104, decay };
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine, Decay::Wsd] {
            assert_eq!((of(decay).at(0), of(decay).at(3), of(decay).at(4)), (0.25, 1.0, 1.0));
        }
        // transformers' polynomial and inverse square root schedules, one step later, for their
        // warm-up begins with a rate of 0.
        let polynomial = of(Decay::Polynomial { power: 2.0 });
        assert_eq!((polynomial.at(3), polynomial.at(54)), (1.0, 0.1 + 0.9 * 0.25));
        let root = of(Decay::InverseSqrt);
        assert_eq!((root.at(3), root.at(4), root.at(16)), (1.0, 1.0, 0.5));
        assert_eq!(LearningRate { warmup: 0, ..root }.at(30_000), 0.5);
        assert_eq!(of(Decay::Constant).at(1000), 1.0);
        assert!((of(Decay::Linear).at(54) - 0.55).abs() < 1e-12);
        assert!((of(Decay::Cosine).at(54) - 0.55).abs() < 1e-12);
        assert!((of(Decay::Wsd).at(94) - 1.0).abs() < 1e-12 && of(Decay::Wsd).at(104) == 0.1);
    }
}
