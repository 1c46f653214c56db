//! Parameter groups: tensors that patterns name are updated by another rule, or at another rate.

use super::{SplitMasters, Update, UpdateRule};
use crate::models::{Tensor, matches_tensor, tensor_ranges};

/// A parameter group.
pub struct Group {
    /// Patterns of its tensors: kinds (`bias`, `norm`, `weight`), parts of names, or names with `*`
    /// for any text.
    pub patterns: Vec<String>,
    /// Its rule.
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

    /// The rule of a tensor, and its update.
    fn of(&self, tensor: &Tensor, update: Update) -> (&dyn UpdateRule, Update) {
        let is_named =
            |group: &&Group| group.patterns.iter().any(|pattern| matches_tensor(pattern, tensor));
        match self.groups.iter().find(is_named) {
            Some(Group { rule, rate, .. }) => {
                let learning_rate = rate * update.learning_rate;
                (&**rule, Update { learning_rate, ..update })
            }
            None => (&*self.others, update),
        }
    }
}

/// A tensor by itself.
fn alone(tensor: &Tensor) -> [Tensor; 1] {
    [Tensor { joined: false, ..tensor.clone() }]
}

impl UpdateRule for Groups {
    fn states(&self) -> usize {
        self.rules().map(UpdateRule::states).max().unwrap_or(0)
    }

    fn is_elementwise(&self) -> bool {
        self.rules().all(UpdateRule::is_elementwise)
    }

    fn apply(
        &self,
        tensors: &[Tensor],
        parameters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
            let (rule, update) = self.of(tensor, update);
            let own = states.iter_mut().take(rule.states());
            let mut own: Vec<&mut [f32]> = own.map(|state| &mut state[range.clone()]).collect();
            let (parameters, gradient) = (&mut parameters[range.clone()], &gradient[range]);
            rule.apply(&alone(tensor), parameters, &mut own, gradient, update);
        }
    }

    fn apply_split(
        &self,
        tensors: &[Tensor],
        split: &mut SplitMasters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
        unpacked: &mut [f32],
    ) {
        for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
            let (rule, update) = self.of(tensor, update);
            let own = states.iter_mut().take(rule.states());
            let mut own: Vec<&mut [f32]> = own.map(|state| &mut state[range.clone()]).collect();
            let split = &mut SplitMasters {
                published: &mut split.published[range.clone()],
                remainder: &mut split.remainder[range.clone()],
            };
            let gradient = &gradient[range];
            rule.apply_split(&alone(tensor), split, &mut own, gradient, update, unpacked);
        }
    }

    fn unpacked_len(&self, parameters: usize) -> usize {
        self.rules().map(|rule| rule.unpacked_len(parameters)).max().unwrap_or(0)
    }
}
