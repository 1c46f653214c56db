//! Gradient clipping: by the norm of all gradients, or by the norms of parameter groups.

use crate::config::OptimizerConfig;
use crate::models::{Tensor, matches_tensor};
use crate::optimizers::sums_of_tensors;

/// The limits of the norms. Tensors whose group has no limit are clipped together.
pub(super) struct Clipping {
    /// The limit of the tensors that are clipped together.
    limit: Option<f64>,
    /// The patterns and the limit of each group.
    groups: Vec<(Vec<String>, Option<f64>)>,
}

/// The factors of a step's gradients.
pub(super) struct Factors<'c> {
    clipping: &'c Clipping,
    /// All gradients are divided by the loss scale, as the loss was multiplied by it.
    loss_scale: f64,
    /// The factor of the tensors that are clipped together.
    together: f32,
    /// The factor of each group; empty if no group has a limit.
    of_groups: Vec<f32>,
}

impl Clipping {
    pub(super) fn new(config: &OptimizerConfig) -> Clipping {
        let groups = config.groups.iter();
        let groups = groups.map(|group| (group.patterns.clone(), group.clip_norm)).collect();
        Clipping { limit: config.clip_norm, groups }
    }

    /// True if a group has a limit, so that the sums of [`Clipping::add`] are needed.
    pub(super) fn has_groups(&self) -> bool {
        self.groups.iter().any(|(_, limit)| limit.is_some())
    }

    /// The group of a tensor, if the group has a limit.
    fn group_of(&self, tensor: &Tensor) -> Option<usize> {
        let is_named = |(patterns, _): &(Vec<String>, Option<f64>)| {
            patterns.iter().any(|pattern| matches_tensor(pattern, tensor))
        };
        let group = self.groups.iter().position(is_named)?;
        self.groups[group].1.map(|_| group)
    }

    /// Sums of squares before any block is added: of each group, and of all other tensors.
    pub(super) fn no_sums(&self) -> Vec<f64> {
        vec![0.0; self.groups.len() + 1]
    }

    /// Adds the sums of squares of a block's chunks.
    pub(super) fn add(&self, sums: &mut [f64], tensors: &[Tensor], chunks: &[f64]) {
        for (tensor, sum) in tensors.iter().zip(sums_of_tensors(tensors, chunks)) {
            sums[self.group_of(tensor).unwrap_or(self.groups.len())] += sum;
        }
    }

    /// The factors of a step, from the norm of all its gradients, and from the sums of groups if a
    /// group has a limit. Norm and sums belong to gradients times the loss scale.
    pub(super) fn factors(
        &self,
        norm: Option<f64>,
        sums: Option<&[f64]>,
        loss_scale: f64,
    ) -> Factors<'_> {
        let factor = |norm: Option<f64>, limit| factor(norm.map(|norm| norm / loss_scale), limit);
        let Some(sums) = sums else {
            let together = factor(norm, self.limit);
            return Factors { clipping: self, loss_scale, together, of_groups: Vec::new() };
        };
        let limits = self.groups.iter().map(|(_, limit)| *limit).zip(sums);
        let of_groups = limits.map(|(limit, sum)| factor(Some(sum.sqrt()), limit)).collect();
        let together = factor(Some(sums[self.groups.len()].sqrt()), self.limit);
        Factors { clipping: self, loss_scale, together, of_groups }
    }
}

impl Factors<'_> {
    /// The factor of a tensor's gradient.
    pub(super) fn of(&self, tensor: &Tensor) -> f32 {
        let clips = match self.of_groups[..] {
            [] => self.together,
            ref of_groups => {
                self.clipping.group_of(tensor).map_or(self.together, |group| of_groups[group])
            }
        };
        (f64::from(clips) / self.loss_scale) as f32
    }
}

/// The factor that PyTorch's `clip_grad_norm_` computes.
fn factor(norm: Option<f64>, limit: Option<f64>) -> f32 {
    match (norm, limit) {
        (Some(norm), Some(_)) if norm.is_nan() => f32::NAN,
        (Some(norm), Some(limit)) => (limit / (norm + 1e-6)).min(1.0) as f32,
        _ => 1.0,
    }
}
