//! Weight decay: which tensors have it.

use crate::models::{Tensor, matches_tensor};

/// Weight decay of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WeightDecay {
    /// λ.
    pub rate: f64,
    /// Tensors without it: kinds (`bias`, `norm`, `weight`), parts of names, or names with `*` for
    /// any text.
    pub except: Vec<String>,
}

impl WeightDecay {
    /// λ of a tensor.
    pub fn of(&self, tensor: &Tensor) -> f64 {
        let is_without = self.except.iter().any(|pattern| matches_tensor(pattern, tensor));
        if is_without { 0.0 } else { self.rate }
    }
}
