//! The keys of `[optimizer]`: the update rule, the learning rate, parameter groups.

use serde::{Deserialize, Serialize};

use super::check::{is_not_negative, is_positive, must, refuse};
use crate::error::Error;

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule. `adamw` and `lamb` keep two states a parameter, as `adam` does, whose
    /// weight decay passes through its moments; `lion` keeps one; `sgd` keeps one with momentum,
    /// and none without. A program that uses the library may bring its own.
    pub kind: OptimizerKind,
    /// The highest learning rate, reached at the end of the warm-up.
    pub learning_rate: f64,
    /// Shape of the learning rate after the warm-up: `constant`; `linear` or `cosine` decay to
    /// `min_learning_rate`; `polynomial` decays as (1 - share of the steps) to the power of
    /// `power`; `inverse-sqrt` with the root of the number of steps, from the end of the warm-up
    /// (10,000 steps without one); `wsd` (warm-up, stable, decay) is constant for nine tenths of
    /// the steps after the warm-up, then decays linearly.
    pub schedule: RateSchedule,
    /// The power of the `polynomial` schedule; 1 is `linear`.
    pub power: f64,
    /// Steps in which the learning rate rises linearly from 0.
    pub warmup_steps: u64,
    /// Learning rate at the end of the run; not used by the `constant` schedule.
    pub min_learning_rate: f64,
    /// Decay rates of the first and second moment of `adamw`, `adam` and `lamb`. Of `lion`: the
    /// rate of the interpolation whose sign is taken, and of the momentum (its paper has 0.9 and
    /// 0.99).
    pub betas: (f64, f64),
    /// Term added to the denominator of `adamw`, `adam` and `lamb`, for numerical stability.
    pub epsilon: f64,
    /// Momentum of `sgd`: the share that a step leaves of it, in [0, 1).
    pub momentum: f64,
    /// Nesterov's momentum, for `sgd`.
    pub nesterov: bool,
    /// Weight decay. Of `adamw` and `lion` it is decoupled: each step multiplies a weight by 1 −
    /// `learning_rate` × `weight_decay`. Of `lamb` it is a part of the step. Of `adam` and `sgd` it
    /// is added to the gradient.
    pub weight_decay: f64,
    /// Tensors without weight decay: kinds (`bias`, `norm`, `weight`), or patterns of tensor names
    /// with `*`. Biases and norms are not decayed by default, as is usual for transformers.
    pub no_decay: Vec<String>,
    /// Largest global gradient norm; larger gradients are scaled down to it, exactly. Without it,
    /// each block is updated as soon as its gradient is complete. With it, gradients wait on the
    /// host (4 bytes a parameter) until the norm is known, and updates run under the next forward
    /// pass.
    pub clip_norm: Option<f64>,
    /// Parameter groups: tensors with a learning rate, a weight decay or a rule of their own. Each
    /// `[[optimizer.groups]]` has `match`, a list of tensors as in `train.only`, and some of
    /// `learning_rate` (which follows the schedule as the run's does), `weight_decay` (of all its
    /// tensors, whatever `no_decay` says) and `kind`. The first group that names a tensor has it.
    pub groups: Vec<GroupConfig>,
}

/// `[[optimizer.groups]]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GroupConfig {
    /// Its tensors.
    #[serde(rename = "match")]
    pub patterns: Vec<String>,
    /// The highest learning rate; that of the run when absent.
    pub learning_rate: Option<f64>,
    /// Weight decay; that of the run when absent.
    pub weight_decay: Option<f64>,
    /// The update rule; that of the run when absent.
    pub kind: Option<OptimizerKind>,
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig {
            kind: OptimizerKind::Adamw,
            learning_rate: 3e-4,
            schedule: RateSchedule::Constant,
            power: 1.0,
            warmup_steps: 0,
            min_learning_rate: 0.0,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.01,
            no_decay: vec!["bias".into(), "norm".into()],
            clip_norm: None,
            groups: Vec::new(),
        }
    }
}

/// The built-in update rules.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    Adamw,
    /// Adam (Kingma and Ba 2015).
    Adam,
    /// Stochastic gradient descent, with momentum or without.
    Sgd,
    /// LAMB (You et al. 2020).
    Lamb,
    /// Lion (Chen et al. 2023).
    Lion,
}

/// Shape of the learning rate after the warm-up: see [`crate::optimizers::Decay`].
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "named after the shapes of optimizers::Decay")]
pub enum RateSchedule {
    Constant,
    Linear,
    Cosine,
    Wsd,
    Polynomial,
    InverseSqrt,
}

impl OptimizerConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { learning_rate, min_learning_rate, betas, epsilon, .. } = *self;
        let (rate, decay, clip) = (learning_rate, self.weight_decay, self.clip_norm);
        let is_share = |beta: f64| (0.0..1.0).contains(&beta);
        let finite = "a finite number, at least 0";
        must(is_not_negative(rate), "optimizer.learning_rate", finite)?;
        must(is_not_negative(min_learning_rate), "optimizer.min_learning_rate", "at least 0")?;
        let be = "two numbers in [0, 1)";
        must(is_share(betas.0) && is_share(betas.1), "optimizer.betas", be)?;
        let Self { kind, momentum, nesterov, power, schedule, .. } = *self;
        must(is_share(momentum), "optimizer.momentum", "in [0, 1)")?;
        let kinds = self.groups.iter().filter_map(|group| group.kind).chain([kind]);
        let is_sgd = kinds.into_iter().any(|kind| kind == OptimizerKind::Sgd);
        for group in &self.groups {
            let GroupConfig { patterns, learning_rate, weight_decay, .. } = group;
            let be = "of groups with a `match` of at least one tensor";
            must(!patterns.is_empty(), "optimizer.groups", be)?;
            let be = "of finite numbers, at least 0";
            let all_good = [learning_rate, weight_decay].into_iter().flatten();
            must(all_good.copied().all(is_not_negative), "optimizer.groups", be)?;
            let problem = "has a learning_rate, which follows the run's: set \
                           optimizer.learning_rate above 0";
            let has_none = self.learning_rate == 0.0;
            refuse(has_none && learning_rate.is_some(), "optimizer.groups", problem)?;
        }
        let problem = "is for optimizer.kind = \"sgd\": leave it out";
        refuse(momentum > 0.0 && !is_sgd, "optimizer.momentum", problem)?;
        let problem =
            "needs momentum: set optimizer.momentum above 0, with optimizer.kind = \"sgd\"";
        refuse(nesterov && momentum == 0.0, "optimizer.nesterov", problem)?;
        must(is_positive(power), "optimizer.power", "above 0")?;
        let problem = "is for optimizer.schedule = \"polynomial\": leave it out";
        refuse(power != 1.0 && schedule != RateSchedule::Polynomial, "optimizer.power", problem)?;
        must(is_positive(epsilon), "optimizer.epsilon", "above 0")?;
        must(epsilon <= 1.0, "optimizer.epsilon", "at most 1")?;
        let be = "at least 1e-45, because it is used in f32";
        must(epsilon as f32 > 0.0, "optimizer.epsilon", be)?;
        must(is_not_negative(decay), "optimizer.weight_decay", finite)?;
        must(clip.is_none_or(is_positive), "optimizer.clip_norm", "above 0")?;
        must(clip.is_none_or(|clip| clip >= 1e-30), "optimizer.clip_norm", "at least 1e-30")
    }
}
