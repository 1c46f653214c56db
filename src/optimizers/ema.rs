//! An exponential moving average of weights, kept beside the states of another rule.

use rayon::prelude::*;

use super::{CHUNK, Masters, RuleState, SplitMasters, Update, UpdateRule};
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
}

/// Moves averages towards the masters, by a share of the distance.
#[inline(always)]
fn move_towards(averages: &mut [f32], masters: &Masters<'_>, share: f32) {
    let moved = |average: &mut f32, p: f32| {
        *average = if share == 1.0 { p } else { *average + (p - *average) * share };
    };
    match masters {
        Masters::F32(values) => {
            averages.iter_mut().zip(&**values).for_each(|(average, &p)| moved(average, p));
        }
        Masters::Split { halves: SplitMasters { published, remainder }, .. } => {
            let halves = published.iter().zip(&**remainder);
            for (average, (&published, &remainder)) in averages.iter_mut().zip(halves) {
                moved(average, SplitMasters::join(published, remainder));
            }
        }
    }
}

impl Ema {
    /// Moves the average of a tensor towards its masters, after an update of its block.
    fn average(&self, average: &mut [f32], masters: Masters<'_>, update: Update) {
        let share = if update.block_updates == 0 { 1.0 } else { (1.0 - self.decay) as f32 };
        let masters = masters.chunks(CHUNK).into_par_iter();
        average.par_chunks_mut(CHUNK).zip(masters).for_each(|(average, masters)| {
            update.level.run(
                #[inline(always)]
                || move_towards(average, &masters, share),
            );
        });
    }
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
        tensor: &Tensor,
        mut masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let (average, states) = states.split_last_mut().expect("the average");
        self.rule.apply(tensor, masters.reborrow(), states, gradient, update);
        self.average(average, masters, update);
    }

    /// The average follows the steps of the run, as PyTorch's does.
    fn leave(
        &self,
        tensor: &Tensor,
        mut masters: Masters<'_>,
        states: &mut [&mut [f32]],
        update: Update,
    ) {
        let (average, states) = states.split_last_mut().expect("the average");
        self.rule.leave(tensor, masters.reborrow(), states, update);
        self.average(average, masters, update);
    }

    fn joins_masters(&self) -> bool {
        self.rule.joins_masters()
    }

    fn workspace_len(&self, tensor: &Tensor) -> usize {
        self.rule.workspace_len(tensor)
    }
}
