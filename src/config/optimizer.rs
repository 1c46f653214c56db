//! `[optimizer]`: the update rule, the learning rate, parameter groups.

use serde::{Deserialize, Serialize};

use super::check::{is_not_negative, is_positive, must, refuse};
use super::{Config, MasterDtype, OnResume};
use crate::error::Error;
use crate::optimizers::{
    Adafactor, Adam, AdamW, AdamW8bit, AdamWBf16, Decay, Ema, Group, Groups, Lamb, LearningRate,
    Lion, Momentum, Muon, MuonRate, Sgd, UpdateRule, WeightDecay,
};

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule. `adamw`, `lamb` and `adam` (whose weight decay passes through its moments)
    /// keep two states a parameter; `lion` keeps one; `sgd` keeps one with momentum, and none
    /// without. `adafactor` keeps a number for each row and each column of a matrix.
    /// `muon` keeps one state of the matrices inside layers, and updates vectors, embeddings and
    /// heads as `adamw` does. `adamw-8bit` and `adamw-bf16` are `adamw` with moments of one and of
    /// two bytes. A program that uses the library may bring its own.
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
    /// Decay rates of the first and second moment of `adamw` (in all its forms), `adam` and
    /// `lamb`. For `lion`: the rates of the interpolation whose sign is taken, and of the momentum
    /// (its paper has 0.9 and 0.99).
    pub betas: (f64, f64),
    /// Term added to the denominator of `adamw` (in all its forms), `adam` and `lamb`, for
    /// numerical stability.
    pub epsilon: f64,
    /// Momentum of `sgd` and `muon`: the share that stays from step to step, in [0, 1). When
    /// absent, 0 for `sgd` and 0.95 for `muon`.
    pub momentum: Option<f64>,
    /// Nesterov's momentum, for `sgd` and `muon`. When absent, `false` for `sgd` and `true` for
    /// `muon`.
    pub nesterov: Option<bool>,
    /// How `muon` scales the learning rate for a matrix of A rows and B columns: `original` by
    /// √max(1, A ÷ B), which needs rates of about 0.02; `match-rms-adamw` by 0.2 √max(A, B), so
    /// that one rate fits both the matrices and the tensors that `adamw` updates.
    pub muon_rate: MuonRateRule,
    /// With `adafactor`: in step t, the new gradient has a share of t to this power in the second
    /// moment.
    pub decay_rate: f64,
    /// With `adafactor`: the bound of the root mean square of a tensor's update.
    pub clip_threshold: f64,
    /// With `adafactor`: multiplies the learning rate by the root mean square of the tensor, at
    /// least 0.001.
    pub scale_parameter: bool,
    /// With `adafactor`: bounds the learning rate by 1 ÷ √t in step t.
    pub relative_step: bool,
    /// With `adamw-8bit`: elements of a tensor that share a factor, a power of two from 16 to 4096.
    /// Tensors of fewer than 4,096 elements keep moments of floats.
    pub block_size: usize,
    /// Keeps a moving average of the weights, in 4 more bytes a parameter. This share of the
    /// average stays from step to step, for instance 0.999. `l2l export --ema` writes the average.
    pub ema: Option<f64>,
    /// How the host stores master weights: `f32` (4 bytes a parameter, and 2 more for the copy that
    /// is sent to a device of 16 bits), `split` (f32 in two halves, one of which is sent to a
    /// device of bf16: 4 bytes), or `bf16` (2 bytes, for a device of bf16: an updated weight is
    /// rounded at random, so that small changes are not lost on average). `auto` is `split` for
    /// bf16, else `f32`.
    pub masters: MasterDtype,
    /// Weight decay. With `adamw` (in all its forms), `lion`, `muon` and `adafactor` it is
    /// decoupled: each step multiplies a weight by 1 − `learning_rate` × `weight_decay`. With
    /// `lamb` it is a part of the step. With `adam` and `sgd` it is added to the gradient.
    pub weight_decay: f64,
    /// Tensors without weight decay: kinds (`bias`, `norm`, `weight`), or patterns of tensor names
    /// with `*`. Biases and norms are not decayed by default, as is usual for transformers.
    pub no_decay: Vec<String>,
    /// Largest global gradient norm; larger gradients are scaled down to it, exactly. Without it,
    /// each block is updated as soon as its gradient is complete. With it, gradients wait on the
    /// host (4 bytes a parameter) until the norm is known, and updates run under the next forward
    /// pass.
    pub clip_norm: Option<f64>,
    /// Parameter groups: tensors with their own learning rate, weight decay or rule. Each
    /// `[[optimizer.groups]]` has `match`, a list of tensors as in `train.only`, and some of these
    /// keys: `learning_rate` (it follows the run's schedule), `weight_decay` (for all its tensors,
    /// whatever `no_decay` says), `kind`, and `clip_norm` (for the gradient of its tensors;
    /// `optimizer.clip_norm` is then for the other tensors). A tensor belongs to the first group
    /// that names it.
    pub groups: Vec<GroupConfig>,
}

/// `[[optimizer.groups]]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GroupConfig {
    /// The tensors of the group.
    #[serde(rename = "match")]
    pub patterns: Vec<String>,
    /// The highest learning rate; the run's when absent.
    pub learning_rate: Option<f64>,
    /// Weight decay; the run's when absent.
    pub weight_decay: Option<f64>,
    /// The update rule; the run's when absent.
    pub kind: Option<OptimizerKind>,
    /// The largest norm of the gradient of its tensors. When absent, `optimizer.clip_norm` clips
    /// them together with all other tensors without a norm of their own.
    pub clip_norm: Option<f64>,
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig {
            kind: OptimizerKind::Adamw,
            learning_rate: 3e-4,
            masters: MasterDtype::Auto,
            schedule: RateSchedule::Constant,
            power: 1.0,
            warmup_steps: 0,
            min_learning_rate: 0.0,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            momentum: None,
            nesterov: None,
            muon_rate: MuonRateRule::Original,
            decay_rate: -0.8,
            clip_threshold: 1.0,
            scale_parameter: true,
            relative_step: false,
            block_size: 256,
            ema: None,
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
    /// Adafactor (Shazeer and Stern 2018).
    Adafactor,
    /// Muon (Jordan et al. 2024) for matrices of layers, AdamW for all other tensors.
    Muon,
    /// AdamW with moments of 8 bits in blocks (Dettmers et al. 2022).
    #[serde(rename = "adamw-8bit")]
    Adamw8bit,
    /// AdamW with moments in bf16, rounded at random.
    #[serde(rename = "adamw-bf16")]
    AdamwBf16,
}

/// How Muon scales the learning rate of a matrix.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MuonRateRule {
    /// As in the author's code.
    Original,
    /// Updates are as large as AdamW's (Liu et al. 2025).
    MatchRmsAdamw,
}

/// The shape of the learning rate after the warm-up, as [`crate::optimizers::Decay`] has it.
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
    pub(super) const ON_RESUME: OnResume = OnResume::free("").with_changes(
        "betas clip_norm clip_threshold decay_rate epsilon learning_rate masters \
         min_learning_rate muon_rate no_decay power relative_step scale_parameter schedule \
         warmup_steps weight_decay",
    );

    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { learning_rate, min_learning_rate, betas, epsilon, .. } = *self;
        let clip = self.clip_norm;
        let finite = "a finite number, at least 0";
        must(is_not_negative(learning_rate), "optimizer.learning_rate", finite)?;
        must(is_not_negative(min_learning_rate), "optimizer.min_learning_rate", "at least 0")?;
        let be = "at most optimizer.learning_rate, because the rate decays to it";
        must(min_learning_rate <= learning_rate, "optimizer.min_learning_rate", be)?;
        let be = "two numbers in [0, 1)";
        must(is_share(betas.0) && is_share(betas.1), "optimizer.betas", be)?;
        self.check_groups()?;
        self.check_rules()?;
        let Self { power, schedule, .. } = *self;
        must(is_positive(power), "optimizer.power", "above 0")?;
        let problem = "is for optimizer.schedule = \"polynomial\": leave it out";
        refuse(power != 1.0 && schedule != RateSchedule::Polynomial, "optimizer.power", problem)?;
        must(is_positive(epsilon), "optimizer.epsilon", "above 0")?;
        must(epsilon <= 1.0, "optimizer.epsilon", "at most 1")?;
        let be = "at least 1e-45, because it is used in f32";
        must(epsilon as f32 > 0.0, "optimizer.epsilon", be)?;
        must(is_not_negative(self.weight_decay), "optimizer.weight_decay", finite)?;
        must(clip.is_none_or(is_positive), "optimizer.clip_norm", "above 0")?;
        must(clip.is_none_or(|clip| clip >= 1e-30), "optimizer.clip_norm", "at least 1e-30")
    }

    /// True if gradients are clipped. Then updates wait for norms.
    pub(crate) fn clips(&self) -> bool {
        let of_groups = || self.groups.iter().any(|group| group.clip_norm.is_some());
        self.clip_norm.is_some() || of_groups()
    }

    fn check_groups(&self) -> Result<(), Error> {
        for group in &self.groups {
            let GroupConfig { patterns, learning_rate, weight_decay, .. } = group;
            let be = "of groups with a `match` of at least one tensor";
            must(!patterns.is_empty(), "optimizer.groups", be)?;
            let be = "of finite numbers, at least 0";
            let all_good = [learning_rate, weight_decay].into_iter().flatten();
            must(all_good.copied().all(is_not_negative), "optimizer.groups", be)?;
            let is_norm = |clip: f64| is_positive(clip) && clip >= 1e-30;
            let be = "of clip_norms of at least 1e-30";
            must(group.clip_norm.is_none_or(is_norm), "optimizer.groups", be)?;
            let problem = "has a learning_rate, which follows the run's: set \
                           optimizer.learning_rate above 0";
            let has_none = self.learning_rate == 0.0;
            refuse(has_none && learning_rate.is_some(), "optimizer.groups", problem)?;
        }
        Ok(())
    }

    /// Checks the keys of single rules.
    fn check_rules(&self) -> Result<(), Error> {
        use OptimizerKind::{Adafactor, Adamw8bit, Muon, Sgd};
        let default = OptimizerConfig::default();
        let kinds = self.groups.iter().filter_map(|group| group.kind).chain([self.kind]);
        let kinds: Vec<OptimizerKind> = kinds.collect();
        let is_for = |key: &str, is_set: bool, rules: &[OptimizerKind]| {
            let names: Vec<String> =
                rules.iter().map(|kind| format!("{:?}", kind.name())).collect();
            let problem = format!("is for optimizer.kind = {}: leave it out", names.join(" or "));
            let is_used = kinds.iter().any(|kind| rules.contains(kind));
            refuse(is_set && !is_used, &format!("optimizer.{key}"), &problem)
        };
        let Self { momentum, nesterov, decay_rate, clip_threshold, block_size, ema, .. } = *self;
        must(momentum.is_none_or(is_share), "optimizer.momentum", "in [0, 1)")?;
        is_for("momentum", momentum.is_some_and(|share| share > 0.0), &[Sgd, Muon])?;
        is_for("nesterov", nesterov == Some(true), &[Sgd, Muon])?;
        let has_none = momentum.unwrap_or(if kinds.contains(&Muon) { 0.95 } else { 0.0 }) == 0.0;
        let problem =
            "needs momentum: set optimizer.momentum above 0, with optimizer.kind = \"sgd\"";
        refuse(nesterov == Some(true) && has_none, "optimizer.nesterov", problem)?;
        is_for("muon_rate", self.muon_rate != default.muon_rate, &[Muon])?;
        let is_falling = decay_rate.is_finite() && (-1.0..0.0).contains(&decay_rate);
        must(is_falling, "optimizer.decay_rate", "from -1 to below 0")?;
        is_for("decay_rate", decay_rate != default.decay_rate, &[Adafactor])?;
        must(is_positive(clip_threshold), "optimizer.clip_threshold", "above 0")?;
        is_for("clip_threshold", clip_threshold != default.clip_threshold, &[Adafactor])?;
        is_for("scale_parameter", !self.scale_parameter, &[Adafactor])?;
        is_for("relative_step", self.relative_step, &[Adafactor])?;
        let is_block = block_size.is_power_of_two() && (16..=4096).contains(&block_size);
        must(is_block, "optimizer.block_size", "a power of two from 16 to 4096")?;
        is_for("block_size", block_size != default.block_size, &[Adamw8bit])?;
        must(ema.is_none_or(is_share), "optimizer.ema", "in [0, 1)")
    }

    /// An update rule, whose random numbers follow from `seed`.
    fn rule_of(&self, kind: OptimizerKind, decay: WeightDecay, seed: u64) -> Box<dyn UpdateRule> {
        let Self { betas, epsilon, momentum, nesterov, block_size, .. } = *self;
        let adamw = |decay| AdamW { betas, epsilon, decay };
        match kind {
            OptimizerKind::Adamw => Box::new(adamw(decay)),
            OptimizerKind::Adam => Box::new(Adam { betas, epsilon, decay }),
            OptimizerKind::Lamb => Box::new(Lamb { betas, epsilon, decay }),
            OptimizerKind::Lion => Box::new(Lion { betas, decay }),
            OptimizerKind::Sgd => match momentum.unwrap_or(0.0) {
                0.0 => Box::new(Sgd { decay }),
                momentum => {
                    let nesterov = nesterov.unwrap_or(false);
                    Box::new(Momentum { momentum, nesterov, decay })
                }
            },
            OptimizerKind::Adafactor => Box::new(Adafactor {
                decay_rate: self.decay_rate,
                epsilon: f64::from(f32::EPSILON),
                clip_threshold: self.clip_threshold,
                scale_parameter: self.scale_parameter,
                relative_step: self.relative_step,
                decay,
            }),
            OptimizerKind::Muon => {
                let rate = match self.muon_rate {
                    MuonRateRule::Original => MuonRate::Original,
                    MuonRateRule::MatchRmsAdamw => MuonRate::MatchRmsAdamw,
                };
                let momentum = momentum.unwrap_or(0.95);
                let nesterov = nesterov.unwrap_or(true);
                Box::new(Muon::new(momentum, nesterov, rate, decay.clone(), adamw(decay)))
            }
            OptimizerKind::Adamw8bit => {
                let smallest = AdamW8bit::SMALLEST;
                Box::new(AdamW8bit { adamw: adamw(decay), block_size, smallest })
            }
            OptimizerKind::AdamwBf16 => Box::new(AdamWBf16 { adamw: adamw(decay), seed }),
        }
    }
}

impl Config {
    /// The update rule.
    pub fn update_rule(&self) -> Box<dyn UpdateRule> {
        let config = &self.optimizer;
        let seed = self.step.seed;
        let decay = WeightDecay { rate: config.weight_decay, except: config.no_decay.clone() };
        let others = config.rule_of(config.kind, decay.clone(), seed);
        let group = |group: &GroupConfig| {
            let own = group.weight_decay.map(|rate| WeightDecay { rate, except: Vec::new() });
            let rate = group.learning_rate.map_or(1.0, |rate| rate / config.learning_rate);
            let kind = group.kind.unwrap_or(config.kind);
            let rule = config.rule_of(kind, own.unwrap_or_else(|| decay.clone()), seed);
            Group { patterns: group.patterns.clone(), rule, rate }
        };
        let rule: Box<dyn UpdateRule> = match &config.groups[..] {
            [] => others,
            groups => Box::new(Groups { groups: groups.iter().map(group).collect(), others }),
        };
        match config.ema {
            Some(decay) => Box::new(Ema { decay, rule }),
            None => rule,
        }
    }

    /// The learning rate of each step of a run.
    pub fn learning_rate(&self, steps: u64) -> LearningRate {
        LearningRate {
            peak: self.optimizer.learning_rate,
            minimum: self.optimizer.min_learning_rate,
            warmup: self.optimizer.warmup_steps,
            steps,
            decay: match self.optimizer.schedule {
                RateSchedule::Constant => Decay::Constant,
                RateSchedule::Linear => Decay::Linear,
                RateSchedule::Cosine => Decay::Cosine,
                RateSchedule::Wsd => Decay::Wsd,
                RateSchedule::Polynomial => Decay::Polynomial { power: self.optimizer.power },
                RateSchedule::InverseSqrt => Decay::InverseSqrt,
            },
        }
    }
}

/// True if a number can be the share of a moving average that stays from step to step.
fn is_share(share: f64) -> bool {
    (0.0..1.0).contains(&share)
}

impl OptimizerKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [OptimizerKind; 9] = [
        OptimizerKind::Adamw,
        OptimizerKind::Adam,
        OptimizerKind::Sgd,
        OptimizerKind::Lamb,
        OptimizerKind::Lion,
        OptimizerKind::Adafactor,
        OptimizerKind::Muon,
        OptimizerKind::Adamw8bit,
        OptimizerKind::AdamwBf16,
    ];

    /// The name in config files.
    pub fn name(self) -> &'static str {
        const NAMES: [&str; OptimizerKind::ALL.len()] = [
            "adamw",
            "adam",
            "sgd",
            "lamb",
            "lion",
            "adafactor",
            "muon",
            "adamw-8bit",
            "adamw-bf16",
        ];
        NAMES[self as usize]
    }
}
