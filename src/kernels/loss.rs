//! The loss of a position.
//!
//! The head scores one tile of the vocabulary after another. So a loss is a function of two numbers
//! that accumulate over tiles: the log-sum-exp of all logits, and the target's logit. Its gradient
//! of logit j is (dloss/dlse) p_j + (dloss/dtarget) [j is the target], with p = softmax(logits).

/// A loss as a function of log-sum-exp and the target's logit.
pub trait Loss: Send + Sync {
    /// The loss.
    fn value(&self, lse: f32, target: f32) -> f32;

    /// Its derivatives by `lse` and by `target`.
    fn slopes(&self, lse: f32, target: f32) -> [f32; 2];

    /// True for [`CrossEntropy`], the only loss that a GPU computes.
    fn is_cross_entropy(&self) -> bool {
        false
    }
}

/// The cross entropy: −log p of the target.
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

/// Label smoothing (Szegedy et al. 2016): the loss reads a weighted sum of logits in place of the
/// target's logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Smoothing {
    /// The weight of the target's own logit.
    pub own: f32,
    /// The weight of every logit; 0: no smoothing.
    pub each: f32,
}

impl Smoothing {
    /// No smoothing: the target's logit alone.
    pub const NONE: Smoothing = Smoothing { own: 1.0, each: 0.0 };

    /// Smoothing that gives 1 − `epsilon` to the target, and `epsilon` to all classes together.
    pub fn of(epsilon: f32, classes: usize) -> Smoothing {
        let each = f64::from(epsilon) / classes as f64;
        Smoothing { own: 1.0 - epsilon, each: each as f32 }
    }
}
