//! `[experts]`: losses that balance the experts of a model, and limits of their choice.

use serde::{Deserialize, Serialize};

use super::OnResume;
use super::check::{is_not_negative, must};
use crate::error::Error;
use crate::models::{BalanceOf, BalanceOver, IdleExperts};

/// `[experts]`. The presets `switch-small` and `gshard-small` have values of their own where a key
/// is absent.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ExpertsConfig {
    /// α of the loss that makes tokens use all experts alike; 0 is none. When absent,
    /// `router_aux_loss_coef` of the model's `config.json` if its `output_router_logits` is true
    /// and the model predicts tokens, as in transformers; else 0. The reported `loss` is without
    /// it.
    pub balance_loss: Option<f64>,
    /// What this loss compares. With E experts, c the mean over the tokens of how often a token
    /// chose an expert and P the mean of its probability: `all-layers` is α E Σ c P with means over
    /// all layers, as in transformers; `each-layer` is the sum over the layers of α E Σ c P ÷ (the
    /// number of choices), as in Switch and Megatron; `first-choice` is the same of first choices
    /// alone, as in GShard. When absent: `all-layers`.
    pub balance_of: Option<BalanceOf>,
    /// The tokens over which the means of `balance_loss` are taken: all of a `step`, of a
    /// `micro-batch`, or of a `sequence`. `step` needs all forward passes before the first backward
    /// pass (`schedule.kind = "relay"` or `"gpipe"`).
    pub balance_over: BalanceOver,
    /// ζ of the loss that keeps a router's logits small (Zoph et al. 2022): ζ times the mean over
    /// the tokens of (log Σ exp logits)², summed over the layers. The reported `loss` is without
    /// it. When absent: 0, and there is none.
    pub z_loss: Option<f64>,
    /// The most tokens of a sequence that an expert takes in training, as a multiple of its even
    /// share. First choices come first, then second ones, each by position; the choices beyond are
    /// dropped. When absent, none is dropped.
    pub capacity_factor: Option<f64>,
    /// In training, a token keeps the second of its two choices with a probability of twice its
    /// weight (GShard). When absent: `false`.
    pub second_at_random: Option<bool>,
    /// What an update does to an expert that no token of its step chose. `update`: the gradient is
    /// zero, and weight decay and moments go on, as in transformers 5, where the experts of a block
    /// are one parameter. `keep`: the expert is left alone, with its moments and the count of its
    /// updates, as PyTorch leaves a parameter without a gradient (transformers 4, where each expert
    /// is a module). For one process, without `compression`; not with `balance_of =
    /// "first-choice"` or `second_at_random`.
    pub idle: IdleExperts,
}

/// The largest factor of capacity: every expert then has room for all tokens of any sequence.
const MOST_CAPACITY: f64 = 4096.0;

/// Factors of capacity are counted in parts of this size.
const MILLION: f64 = 1e6;

impl ExpertsConfig {
    pub(super) const ON_RESUME: OnResume = OnResume::free("").with_changes(
        "balance_loss balance_of balance_over z_loss capacity_factor second_at_random",
    );

    pub(super) fn check(&self) -> Result<(), Error> {
        let be = "a finite number, 0 or more";
        must(self.balance_loss.is_none_or(is_not_negative), "experts.balance_loss", be)?;
        must(self.z_loss.is_none_or(is_not_negative), "experts.z_loss", be)?;
        let is_factor = |factor: f64| (1e-3..=MOST_CAPACITY).contains(&factor);
        let be = "from 0.001 to 4096: 1.25 is a quarter more than an expert's even share";
        must(self.capacity_factor.is_none_or(is_factor), "experts.capacity_factor", be)
    }

    /// The factor of capacity in millionths.
    pub(crate) fn capacity_millionths(&self) -> Option<u32> {
        self.capacity_factor.map(|factor| (factor * MILLION).round() as u32)
    }

    /// The first key that is set.
    pub(crate) fn first_set(&self) -> Option<&'static str> {
        let keys = [
            ("experts.balance_loss", self.balance_loss.is_some()),
            ("experts.balance_of", self.balance_of.is_some()),
            ("experts.balance_over", self.balance_over != BalanceOver::default()),
            ("experts.z_loss", self.z_loss.is_some()),
            ("experts.capacity_factor", self.capacity_factor.is_some()),
            ("experts.second_at_random", self.second_at_random.is_some()),
            ("experts.idle", self.idle != IdleExperts::default()),
        ];
        keys.into_iter().find(|(_, is_set)| *is_set).map(|(key, _)| key)
    }
}
