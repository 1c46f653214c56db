//! Learning-rate schedules: warm-up, then a shape.

/// What the rate does behind the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Stays.
    Constant,
    /// Falls in a line to the minimum.
    Linear,
    /// Falls along half a cosine to the minimum (Loshchilov and Hutter 2017).
    Cosine,
    /// Stays for nine tenths of the run, then falls in a line (warm-up, stable, decay).
    Wsd,
}

/// The rate of each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// At its highest.
    pub peak: f64,
    /// At its end.
    pub minimum: f64,
    /// Steps in which it rises from 0.
    pub warmup: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Its shape.
    pub decay: Decay,
}

impl LearningRate {
    /// The rate of a step, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let behind = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let passed = ((step - self.warmup) as f64 / behind).min(1.0);
        let share = match self.decay {
            Decay::Constant => return self.peak,
            Decay::Linear => 1.0 - passed,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * passed).cos()),
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
        assert_eq!(of(Decay::Constant).at(1000), 1.0);
        assert!((of(Decay::Linear).at(54) - 0.55).abs() < 1e-12);
        assert!((of(Decay::Cosine).at(54) - 0.55).abs() < 1e-12);
        assert!((of(Decay::Wsd).at(94) - 1.0).abs() < 1e-12 && of(Decay::Wsd).at(104) == 0.1);
    }
}
