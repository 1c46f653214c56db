//! Update rules: how a gradient changes a block. Plain mathematics on slices, which knows nothing
//! of lanes and tasks.

mod adamw;
mod rate;
mod rates;
pub(crate) mod split;

use std::ops::Range;

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
