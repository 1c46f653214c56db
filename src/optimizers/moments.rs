//! Adam's moments of gradients (Kingma and Ba 2015), in PyTorch's order of operations.

use super::Update;

/// The factors of one update of the moments m and v, rounded to f32. t is the number of updates,
/// this one included.
#[derive(Clone, Copy)]
pub(super) struct Moments {
    /// 1 − β₁ᵗ: the first moment's bias correction.
    pub(super) bias1: f64,
    /// √(1 − β₂ᵗ): the second moment's bias correction.
    root_of_bias2: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    epsilon: f32,
}

impl Moments {
    pub(super) fn new([beta1, beta2]: [f64; 2], epsilon: f64, update: Update) -> Moments {
        let count = (update.step + 1) as f64;
        Moments {
            bias1: 1.0 - beta1.powf(count),
            root_of_bias2: (1.0 - beta2.powf(count)).sqrt() as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            epsilon: epsilon as f32,
        }
    }

    /// Updates the moments of a parameter from its gradient g.
    #[inline(always)]
    pub(super) fn observe(self, m: &mut f32, v: &mut f32, g: f32) {
        *m += (g - *m) * self.one_minus_beta1;
        *v = *v * self.beta2 + g * g * self.one_minus_beta2;
    }

    /// The corrected root of the second moment, and ε.
    #[inline(always)]
    pub(super) fn divisor(self, v: f32) -> f32 {
        v.sqrt() / self.root_of_bias2 + self.epsilon
    }
}
