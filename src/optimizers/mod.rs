//! Update rules: how a gradient changes a block. Plain mathematics on slices, which knows nothing
//! of lanes and tasks.

mod adam;
mod adamw;
mod decay;
pub(crate) mod elementwise;
mod groups;
mod lamb;
mod lion;
mod rate;
mod rates;
mod sgd;
pub(crate) mod split;

use std::ops::Range;

use rayon::prelude::*;

pub use adam::Adam;
pub use adamw::AdamW;
pub use decay::WeightDecay;
pub use groups::{Group, Groups};
pub use lamb::Lamb;
pub use lion::Lion;
pub use rate::{Decay, LearningRate};
pub use rates::{stream_bytes_per_second, update_bytes_per_second};
pub use sgd::{Momentum, Sgd};
pub use split::SplitMasters;

use crate::models::{Tensor, tensor_ranges};
use crate::simd::Level;

/// The elements of one parallel task and of one partial sum. It does not depend on the number of
/// threads, so sums do not either.
const CHUNK: usize = 16384;

/// The chunks of a block's tensors, in order, each of at most [`CHUNK`] elements.
pub(crate) fn chunks(tensors: &[Tensor]) -> impl Iterator<Item = Range<usize>> {
    tensor_ranges(tensors).flat_map(|range| {
        let end = range.end;
        range.step_by(CHUNK).map(move |start| start..(start + CHUNK).min(end))
    })
}

/// The sum of squares of each of a gradient's [`chunks`].
pub(crate) fn chunk_squares(tensors: &[Tensor], gradient: &[f32]) -> Vec<f64> {
    let squares =
        |chunk: Range<usize>| gradient[chunk].iter().map(|&g| f64::from(g) * f64::from(g)).sum();
    let chunks: Vec<Range<usize>> = chunks(tensors).collect();
    chunks.into_par_iter().map(squares).collect()
}

/// The sum over a block's chunks, tensor by tensor.
pub(crate) fn sum_of_chunks(tensors: &[Tensor], squares: &[f64]) -> f64 {
    let (mut sum, mut left) = (0.0, squares);
    for tensor in tensors {
        let (of_tensor, behind) = left.split_at(tensor.len().div_ceil(CHUNK));
        sum += of_tensor.iter().sum::<f64>();
        left = behind;
    }
    sum
}

/// The arguments of an update, beside the gradient.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// The number of updates that the block had before this one.
    pub step: u64,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The factor of the gradient. It is below 1 when the gradient is clipped.
    pub scale: f32,
    /// The vector instructions to use.
    pub(crate) level: Level,
}

/// An update rule, in two phases: measure the gradient, then apply it. Implement it to train with
/// an optimizer of your own.
///
/// All slices hold the tensors of one block, where [`tensor_ranges`] says.
pub trait UpdateRule: Send + Sync {
    /// The number of states that the rule keeps for each parameter (AdamW: 2).
    fn states(&self) -> usize;

    /// True for a rule that updates each parameter by itself, from its own gradient and states.
    /// Only such a rule can be used in several processes: there, tensors are cut into parts, and
    /// the sum of squares is that of [`measure`](UpdateRule::measure)'s own implementation.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// The sum of squares of a block's gradient, in f64 over fixed chunks. The gradient norm of a
    /// step is the root of the sum over all blocks.
    fn measure(&self, tensors: &[Tensor], gradient: &[f32]) -> f64 {
        sum_of_chunks(tensors, &chunk_squares(tensors, gradient))
    }

    /// Updates a block's parameters and states in place.
    fn apply(
        &self,
        tensors: &[Tensor],
        parameters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    );

    /// The same for [split masters](SplitMasters), which a model has on a device of bf16.
    ///
    /// This implementation joins the masters into `unpacked`, applies the rule, and splits them
    /// again. A rule that updates each parameter by itself (AdamW) overrides it, and needs no copy.
    fn apply_split(
        &self,
        tensors: &[Tensor],
        split: &mut SplitMasters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
        unpacked: &mut [f32],
    ) {
        let masters = &mut unpacked[..gradient.len()];
        split.join_to(masters);
        self.apply(tensors, masters, states, gradient, update);
        split.split_from(masters);
    }

    /// The length of `unpacked` that [`apply_split`](UpdateRule::apply_split) needs, for blocks of
    /// at most so many parameters.
    fn unpacked_len(&self, parameters: usize) -> usize {
        parameters
    }
}

impl UpdateRule for Box<dyn UpdateRule> {
    fn states(&self) -> usize {
        (**self).states()
    }

    fn is_elementwise(&self) -> bool {
        (**self).is_elementwise()
    }

    fn measure(&self, tensors: &[Tensor], gradient: &[f32]) -> f64 {
        (**self).measure(tensors, gradient)
    }

    fn apply(
        &self,
        tensors: &[Tensor],
        parameters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        (**self).apply(tensors, parameters, states, gradient, update);
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
        (**self).apply_split(tensors, split, states, gradient, update, unpacked);
    }

    fn unpacked_len(&self, parameters: usize) -> usize {
        (**self).unpacked_len(parameters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{Init, Kind};

    /// Ten steps of each rule against `tests/goldens/optimizers.py`: PyTorch's rules, or the
    /// paper's, in f64.
    #[test]
    fn every_rule_is_pytorchs_or_the_papers() {
        let text = include_str!("../../tests/goldens/optimizers.json");
        let golden: serde_json::Value = serde_json::from_str(text).expect("it is committed");
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            let list = value.as_array().expect("a list").iter();
            list.map(|number| number.as_f64().expect("a number")).collect()
        };
        let tensor = |name: &str, shape: &[usize], kind| {
            let (name, shape) = (name.to_string(), shape.to_vec());
            Tensor { name, shape, kind, init: Init::Zeros, joined: false }
        };
        let tensors = [tensor("w", &[12, 5], Kind::Weight), tensor("b", &[7], Kind::Bias)];
        let ranges: Vec<Range<usize>> = tensor_ranges(&tensors).collect();
        let decay = |rate: f64| WeightDecay { rate, except: vec!["bias".into()] };
        let (betas, epsilon) = ((0.9, 0.99), 1e-8);
        let rules: Vec<(&str, Box<dyn UpdateRule>)> = vec![
            ("adamw", Box::new(AdamW { betas, epsilon, decay: decay(0.1) })),
            ("adam", Box::new(Adam { betas, epsilon, decay: decay(0.1) })),
            ("sgd", Box::new(Sgd { decay: decay(0.1) })),
            ("momentum", Box::new(Momentum { momentum: 0.9, nesterov: false, decay: decay(0.1) })),
            ("nesterov", Box::new(Momentum { momentum: 0.9, nesterov: true, decay: decay(0.1) })),
            ("lion", Box::new(Lion { betas, decay: decay(0.1) })),
            ("lamb", Box::new(Lamb { betas, epsilon, decay: decay(0.1) })),
            (
                "groups",
                Box::new(Groups {
                    groups: vec![Group {
                        patterns: vec!["b".into()],
                        rule: Box::new(Momentum {
                            momentum: 0.9,
                            nesterov: false,
                            decay: WeightDecay { rate: 0.2, except: Vec::new() },
                        }),
                        rate: 3.0,
                    }],
                    others: Box::new(AdamW { betas, epsilon, decay: decay(0.1) }),
                }),
            ),
        ];
        let steps: Vec<Vec<f64>> =
            golden["gradients"].as_array().expect("a list").iter().map(numbers).collect();
        let len = 80;
        let spread = |packed: &[f64]| {
            let mut block = vec![0.0_f32; len];
            let mut packed = packed.iter();
            for range in &ranges {
                let values = block[range.clone()].iter_mut().zip(&mut packed);
                values.for_each(|(to, from)| *to = *from as f32);
            }
            block
        };
        for (name, rule) in rules {
            let expected = numbers(&golden["rules"][name]);
            for splits in [false, true] {
                let mut p = spread(&numbers(&golden["begin"]));
                let mut place = vec![0.0; len];
                SplitMasters::of(&mut place).split_from(&p);
                let mut states = vec![vec![0.0; len]; rule.states()];
                let mut unpacked = vec![0.0; rule.unpacked_len(len)];
                for (step, gradient) in (0..).zip(&steps) {
                    let (level, scale) = (Level::best(), 0.5);
                    let update = Update { step, learning_rate: 0.01, scale, level };
                    let mut parts: Vec<&mut [f32]> =
                        states.iter_mut().map(Vec::as_mut_slice).collect();
                    let gradient = spread(gradient);
                    if splits {
                        let split = &mut SplitMasters::of(&mut place);
                        rule.apply_split(
                            &tensors,
                            split,
                            &mut parts,
                            &gradient,
                            update,
                            &mut unpacked,
                        );
                    } else {
                        rule.apply(&tensors, &mut p, &mut parts, &gradient, update);
                    }
                }
                if splits {
                    SplitMasters::of(&mut place).join_to(&mut p);
                }
                let found = ranges.iter().flat_map(|range| &p[range.clone()]);
                for (at, (found, expected)) in found.zip(&expected).enumerate() {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error < 1e-5, "{name} {at}: {found} {expected}");
                }
            }
        }
    }
}
