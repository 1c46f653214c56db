//! Update rules: how a gradient changes a block. Plain mathematics on slices, which knows nothing
//! of lanes and tasks.

mod adamw;
mod rate;
mod rates;
pub(crate) mod split;

use rayon::prelude::*;

pub use adamw::AdamW;
pub use rate::{Decay, LearningRate};
pub use rates::{stream_bytes_per_second, update_bytes_per_second};
pub use split::SplitMasters;

use crate::models::{Tensor, tensor_ranges};
use crate::simd::Level;

/// The elements of one parallel task and of one partial sum. It does not depend on the number of
/// threads, so sums do not either.
const CHUNK: usize = 16384;

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

    /// The sum of squares of a block's gradient, in f64 over fixed chunks. The gradient norm of a
    /// step is the root of the sum over all blocks.
    fn measure(&self, tensors: &[Tensor], gradient: &[f32]) -> f64 {
        let squares = |chunk: &[f32]| chunk.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        let mut sum = 0.0;
        for range in tensor_ranges(tensors) {
            let parts: Vec<f64> = gradient[range].par_chunks(CHUNK).map(squares).collect();
            sum += parts.iter().sum::<f64>();
        }
        sum
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
