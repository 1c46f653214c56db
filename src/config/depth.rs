//! `[depth]`: layers that training steps leave out at random, and layers that are added.

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use super::{Config, OnResume};
use crate::error::Error;

/// `[depth]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DepthConfig {
    /// The probability with which a training step leaves a layer out: the last layer with `rule =
    /// "linear"`, any layer with `"uniform"`. A layer that is left out costs no time and no
    /// transfers, and is not updated. Outputs are not scaled. Validation, evaluation and generation
    /// use all layers.
    pub drop: f64,
    /// How the probability depends on the layer: `linear` or `uniform`.
    pub rule: DropRule,
    /// Progressive layer dropping (Zhang and He 2020): after `t` steps the probability is `drop`
    /// times 1 - exp(-t / ramp_steps). When absent it is `drop` from the first step.
    pub ramp_steps: Option<u64>,
    /// Makes room in the workspace for steps that freeze layers, as programs can with
    /// `Trainer::step_with`. A frozen layer computes no gradients of its weights.
    pub freezes: bool,
    /// Progressive stacking (Gong et al. 2019): numbers of steps. After each of these steps the
    /// number of layers doubles, up to `model.max_layers`.
    pub stack_at: Vec<u64>,
    /// The first parameters of an added layer.
    pub new_layers: NewLayers,
}

/// How the probability of leaving a layer out depends on the layer.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DropRule {
    /// In proportion to the layer's number, counted from 1 (stochastic depth, Huang et al. 2016).
    #[default]
    Linear,
    /// Equal for all layers (LayerDrop, Fan et al. 2019).
    Uniform,
}

/// The first parameters of an added layer.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum NewLayers {
    /// Copies of the layers below, in their order.
    #[default]
    Copy,
    /// Copies whose residual branches end in zeros, so that they pass hidden states on unchanged.
    /// Not for models that have norms behind the branches (BERT).
    ZeroResidual,
}

impl Config {
    pub(super) fn check_depth(&self) -> Result<(), Error> {
        let DepthConfig { drop, ramp_steps, ref stack_at, new_layers, .. } = self.depth;
        must((0.0..1.0).contains(&drop), "depth.drop", "in [0, 1)")?;
        must(ramp_steps != Some(0), "depth.ramp_steps", "at least 1")?;
        let problem = "has no effect: set depth.drop above 0";
        refuse(drop == 0.0 && ramp_steps.is_some(), "depth.ramp_steps", problem)?;
        let problem = "adds layers: set model.max_layers to how many there can be";
        refuse(!stack_at.is_empty() && self.model.max_layers.is_none(), "depth.stack_at", problem)?;
        let problem = "has no effect: set depth.stack_at";
        refuse(stack_at.is_empty() && new_layers != NewLayers::Copy, "depth.new_layers", problem)?;
        let problem = "must be numbers of steps, each larger than the one before";
        refuse(!stack_at.is_sorted_by(|a, b| a < b), "depth.stack_at", problem)
    }
}

impl DepthConfig {
    pub(super) const ON_RESUME: OnResume =
        OnResume::free("freezes").with_changes("drop ramp_steps");

    /// The number of layers after `steps` steps, of a run that began with `first` and has room for
    /// `most`.
    pub fn stacked_layers(&self, steps: u64, first: usize, most: usize) -> usize {
        let doubled = self.stack_at.iter().filter(|&&at| at <= steps);
        doubled.fold(first, |layers, _| layers.saturating_mul(2)).min(most.max(first))
    }

    /// The probability with which step `step` (from 0) leaves out layer `layer` (from 0) of
    /// `layers`.
    pub fn probability(&self, step: u64, layer: usize, layers: usize) -> f64 {
        let grown = match self.ramp_steps {
            Some(ramp) => 1.0 - (-(step as f64) / ramp as f64).exp(),
            None => 1.0,
        };
        let share = match self.rule {
            DropRule::Linear => (layer + 1) as f64 / layers as f64,
            DropRule::Uniform => 1.0,
        };
        self.drop * grown * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_papers() {
        let linear = DepthConfig { drop: 0.5, ..DepthConfig::default() };
        assert_eq!([0, 1, 3].map(|layer| linear.probability(7, layer, 4)), [0.125, 0.25, 0.5]);
        let uniform = DepthConfig { rule: DropRule::Uniform, ..linear.clone() };
        assert_eq!(uniform.probability(0, 0, 4), 0.5);
        let progressive = DepthConfig { ramp_steps: Some(100), ..linear };
        assert_eq!(progressive.probability(0, 3, 4), 0.0);
        let after = progressive.probability(100, 3, 4);
        assert!((after - 0.5 * (1.0 - (-1.0_f64).exp())).abs() < 1e-12);
    }
}
