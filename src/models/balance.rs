//! How a router of experts is trained beside the loss of the model, and limited in training.

use l2l_actors::schedule::{Boundary, Question, Role};
use serde::{Deserialize, Serialize};

use super::shape::Experts;
use crate::kernels::OF_SEQUENCE;

/// Losses of a router, and limits of its choice. Evaluation and generation have neither.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Balance {
    /// α of the loss that balances the experts. 0: there is none.
    pub loss: f64,
    /// What this loss compares.
    pub of: BalanceOf,
    /// The rows over which it is computed.
    pub over: BalanceOver,
    /// ζ: the loss gets ζ times the mean of (log Σ exp logits)² (Zoph et al. 2022). 0: there is
    /// none.
    pub z_loss: f64,
    /// The capacity of an expert in a sequence, in millionths of its even share of the choices.
    /// `None`: no choice is dropped.
    pub capacity_millionths: Option<u32>,
    /// True: a row keeps its second choice with a probability of twice its weight.
    pub second_at_random: bool,
}

/// What the loss that balances experts compares: c, the share of the rows that chose an expert,
/// with P, the mean of the expert's probability.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum BalanceOf {
    /// c and P are means over all layers, as in transformers: α E Σ c P.
    #[default]
    AllLayers,
    /// Each layer by itself: α Σ over layers of E Σ c P ÷ k (Fedus et al. 2021).
    EachLayer,
    /// Each layer by itself, and c counts the first choice of each row alone: α Σ over layers of
    /// E Σ c P (Lepikhin et al. 2020).
    FirstChoice,
}

/// The rows over which the loss that balances experts is computed.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum BalanceOver {
    /// All rows of a training step, on all devices and ranks.
    #[default]
    Step,
    /// The rows of a micro-batch; the mean over micro-batches, by their rows.
    MicroBatch,
    /// The rows of a sequence; the mean over sequences, by their rows.
    Sequence,
}

impl Balance {
    /// True if the router has a loss of its own, whose gradient the backward pass adds.
    pub fn has_loss(&self) -> bool {
        self.loss > 0.0 || self.z_loss > 0.0
    }

    /// True if its gradient depends on the whole step.
    pub fn is_of_step(&self) -> bool {
        self.loss > 0.0 && self.over == BalanceOver::Step
    }

    /// True if choices are dropped in training.
    pub fn drops(&self) -> bool {
        self.capacity_millionths.is_some() || self.second_at_random
    }
}

impl Experts {
    /// The numbers that a layer measures of a sequence.
    pub(crate) fn measured_width(&self) -> usize {
        2 * self.count + OF_SEQUENCE
    }

    /// What a layer with these experts measures in training, and the answer that it gets.
    pub(super) fn question(&self) -> Question {
        let of_sequences = |role, width| Boundary::of_sequences(role, width, size_of::<f32>());
        let measured = of_sequences(Role::Routing, self.measured_width());
        let answer = of_sequences(Role::Balance, self.count + 1);
        Question { measured, answer: self.balance.has_loss().then_some(answer) }
    }
}
