//! The loss of a position.
//!
//! The head scores one tile of the vocabulary after another. So a loss is a function of what tiles
//! accumulate: the log-sum-exp of all logits, and the target's logit. With p = softmax of the
//! logits, its gradient of logit j is (dloss/dlse) p_j + (dloss/dtarget) [j is the target].

/// A loss as a function of log-sum-exp and the target's logit.
pub trait Loss: Send + Sync {
    /// Its value.
    fn value(&self, lse: f32, target: f32) -> f32;

    /// Its derivatives by `lse` and by `target`.
    fn slopes(&self, lse: f32, target: f32) -> [f32; 2];

    /// Whether it is [`CrossEntropy`], which devices other than the CPU know.
    fn is_cross_entropy(&self) -> bool {
        false
    }
}

/// −log p of the target.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropy;

impl Loss for CrossEntropy {
    fn value(&self, lse: f32, target: f32) -> f32 {
        lse - target
    }

    fn slopes(&self, _lse: f32, _target: f32) -> [f32; 2] {
        [1.0, -1.0]
    }

    fn is_cross_entropy(&self) -> bool {
        true
    }
}
