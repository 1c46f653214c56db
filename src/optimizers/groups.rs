//! Parameter groups: tensors that patterns name are updated by another rule, or at another rate.

use super::{Masters, RuleState, Update, UpdateRule};
use crate::models::{Tensor, matches_tensor};

/// A parameter group.
pub struct Group {
    /// Patterns of its tensors: kinds (`bias`, `norm`, `weight`), parts of names, or names with `*`
    /// for any text.
    pub patterns: Vec<String>,
    /// The rule of the group.
    pub rule: Box<dyn UpdateRule>,
    /// The factor of the step's learning rate.
    pub rate: f64,
}

/// A rule for each group of tensors. A tensor is in the first group that has a pattern of it, or
/// else among the others.
pub struct Groups {
    /// The groups.
    pub groups: Vec<Group>,
    /// The rule of the others.
    pub others: Box<dyn UpdateRule>,
}

impl Groups {
    fn rules(&self) -> impl Iterator<Item = &dyn UpdateRule> {
        self.groups.iter().map(|group| &*group.rule).chain([&*self.others])
    }

    /// The rule of a tensor, and the factor of its learning rate.
    fn rule_of(&self, tensor: &Tensor) -> (&dyn UpdateRule, f64) {
        let is_named =
            |group: &&Group| group.patterns.iter().any(|pattern| matches_tensor(pattern, tensor));
        match self.groups.iter().find(is_named) {
            Some(group) => (&*group.rule, group.rate),
            None => (&*self.others, 1.0),
        }
    }
}

impl UpdateRule for Groups {
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        self.rule_of(tensor).0.state_layout(tensor)
    }

    fn is_elementwise(&self) -> bool {
        self.rules().all(UpdateRule::is_elementwise)
    }

    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let (rule, rate) = self.rule_of(tensor);
        let update = Update { learning_rate: rate * update.learning_rate, ..update };
        rule.apply(tensor, masters, states, gradient, update);
    }

    fn leave(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        update: Update,
    ) {
        self.rule_of(tensor).0.leave(tensor, masters, states, update);
    }

    fn joins_masters(&self) -> bool {
        self.rules().any(UpdateRule::joins_masters)
    }

    fn workspace_len(&self, tensor: &Tensor) -> usize {
        self.rule_of(tensor).0.workspace_len(tensor)
    }
}
