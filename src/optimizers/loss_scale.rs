//! Loss scaling (Micikevicius et al. 2018): the loss is multiplied by a factor, so that small
//! gradients survive in f16, and updates divide gradients by it.

use serde::{Deserialize, Serialize};

/// A factor of the loss. It changes as that of PyTorch's `torch.amp.GradScaler` does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The factor.
    pub scale: f32,
    /// Steps with finite gradients since it changed.
    pub finite_steps: u64,
    /// The factor by which it grows, and the number of such steps in a row after which it does;
    /// `None`: it never grows.
    pub growth: Option<(f64, u64)>,
    /// The factor by which it shrinks after a step whose gradient is not finite.
    pub backoff_factor: f64,
}

/// The state of a loss scale in a checkpoint.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct ScaleState {
    /// The factor.
    pub scale: f32,
    /// Steps with finite gradients since it changed.
    pub finite_steps: u64,
}

impl LossScale {
    /// Changes the factor after a step. It never comes to 0, as that of `GradScaler` may.
    pub fn stepped(&mut self, is_finite: bool) {
        let times = |factor: f64| (f64::from(self.scale) * factor) as f32;
        if !is_finite {
            // A scale of 0 would make all gradients 0, and finite.
            self.scale = times(self.backoff_factor).max(f32::MIN_POSITIVE);
            self.finite_steps = 0;
            return;
        }
        let Some((factor, interval)) = self.growth else { return };
        self.finite_steps += 1;
        if self.finite_steps >= interval {
            let grown = times(factor);
            self.scale = if grown.is_finite() { grown } else { self.scale };
            self.finite_steps = 0;
        }
    }

    /// The state that a checkpoint keeps.
    pub fn state(&self) -> ScaleState {
        ScaleState { scale: self.scale, finite_steps: self.finite_steps }
    }

    /// The same rule in the state of a checkpoint.
    pub fn resumed(self, ScaleState { scale, finite_steps }: ScaleState) -> LossScale {
        LossScale { scale, finite_steps, ..self }
    }
}
