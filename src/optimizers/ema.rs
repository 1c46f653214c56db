//! An exponential moving average of weights, kept beside the states of another rule.

use rayon::prelude::*;

use super::{CHUNK, RuleState, SplitMasters, Update, UpdateRule};
use crate::models::Tensor;

/// A rule that also keeps the moving average of the parameters, as the last state of each tensor.
/// It begins with the parameters after the first update, as PyTorch's `AveragedModel` does.
pub struct Ema {
    /// The share of the average that an update leaves.
    pub decay: f64,
    /// The rule that updates the parameters.
    pub rule: Box<dyn UpdateRule>,
}

impl Ema {
    /// The name of the average in a checkpoint, behind the tensor's.
    pub const NAME: &'static str = "ema";

    /// What an update moves the average towards the parameters by.
    fn share(&self, update: Update) -> f32 {
        if update.step == 0 { 1.0 } else { (1.0 - self.decay) as f32 }
    }
}

/// Moves an average towards a parameter.
#[inline(always)]
fn moved(average: f32, parameter: f32, share: f32) -> f32 {
    if share == 1.0 { parameter } else { average + (parameter - average) * share }
}

impl UpdateRule for Ema {
    fn states(&self) -> usize {
        self.rule.states() + 1
    }

    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        let mut states = self.rule.state_layout(tensor);
        states.push(RuleState::like(Ema::NAME, tensor));
        states
    }

    fn is_elementwise(&self) -> bool {
        self.rule.is_elementwise()
    }

    fn measure(&self, tensors: &[Tensor], gradient: &[f32]) -> f64 {
        self.rule.measure(tensors, gradient)
    }

    fn apply(
        &self,
        tensors: &[Tensor],
        parameters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let (average, states) = states.split_last_mut().expect("the average");
        self.rule.apply(tensors, parameters, states, gradient, update);
        let share = self.share(update);
        let chunks = average.par_chunks_mut(CHUNK).zip(parameters.par_chunks(CHUNK));
        chunks.for_each(|(average, parameters)| {
            update.level.run(
                #[inline(always)]
                || {
                    for (average, &p) in average.iter_mut().zip(parameters) {
                        *average = moved(*average, p, share);
                    }
                },
            );
        });
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
        let (average, states) = states.split_last_mut().expect("the average");
        self.rule.apply_split(tensors, split, states, gradient, update, unpacked);
        let share = self.share(update);
        let halves = split.published.par_chunks(CHUNK).zip(split.remainder.par_chunks(CHUNK));
        let chunks = average.par_chunks_mut(CHUNK).zip(halves);
        chunks.for_each(|(average, (published, remainder))| {
            for ((average, &published), &remainder) in
                average.iter_mut().zip(published).zip(remainder)
            {
                *average = moved(*average, SplitMasters::join(published, remainder), share);
            }
        });
    }

    fn unpacked_len(&self, parameters: usize) -> usize {
        self.rule.unpacked_len(parameters)
    }

    fn workspace_len(&self, tensor: &Tensor) -> usize {
        self.rule.workspace_len(tensor)
    }
}
