//! Update rules: how a gradient changes a block. They are plain mathematics on slices, without
//! lanes and tasks.

mod adafactor;
mod adam;
mod adamw;
mod adamw_8bit;
mod adamw_bf16;
mod block;
mod decay;
pub(crate) mod elementwise;
mod ema;
mod groups;
mod lamb;
mod lion;
mod loss_scale;
mod masters;
mod moments;
mod muon;
mod rate;
mod rates;
mod rounding;
mod sgd;
mod states;

use std::ops::Range;

use rayon::prelude::*;

pub use adafactor::Adafactor;
pub use adam::Adam;
pub use adamw::AdamW;
pub use adamw_8bit::AdamW8bit;
pub use adamw_bf16::AdamWBf16;
pub(crate) use block::{BlockMasters, BlockUpdate, room_len};
pub use decay::WeightDecay;
pub use ema::Ema;
pub use groups::{Group, Groups};
pub use lamb::Lamb;
pub use lion::Lion;
pub use loss_scale::{LossScale, ScaleState};
pub use masters::{Joined, Masters, SplitMasters};
pub use muon::{Muon, MuonRate};
pub use rate::{Decay, LearningRate};
pub use rates::{stream_bytes_per_second, update_bytes_per_second};
pub use sgd::{Momentum, Sgd};
pub(crate) use states::{BlockStates, StateLayout};
pub use states::{RuleState, StateDtype};

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

fn square(value: f32) -> f64 {
    f64::from(value) * f64::from(value)
}

/// The sum of squares of each of a gradient's [`chunks`].
pub(crate) fn chunk_squares(tensors: &[Tensor], gradient: &[f32]) -> Vec<f64> {
    let squares = |chunk: Range<usize>| gradient[chunk].iter().map(|&g| square(g)).sum();
    let chunks: Vec<Range<usize>> = chunks(tensors).collect();
    chunks.into_par_iter().map(squares).collect()
}

/// The sum over each tensor's chunks, of a block.
pub(crate) fn sums_of_tensors(tensors: &[Tensor], squares: &[f64]) -> impl Iterator<Item = f64> {
    let mut left = squares;
    tensors.iter().map(move |tensor| {
        let (of_tensor, behind) = left.split_at(tensor.len().div_ceil(CHUNK));
        left = behind;
        of_tensor.iter().sum()
    })
}

/// The sum over a block's chunks, tensor by tensor.
pub(crate) fn sum_of_chunks(tensors: &[Tensor], squares: &[f64]) -> f64 {
    sums_of_tensors(tensors, squares).fold(0.0, |sum, of_tensor| sum + of_tensor)
}

/// The arguments of an update, beside the gradient.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// The number of updates that the tensor had before this one.
    pub step: u64,
    /// The number of updates that its block had. It differs for tensors that some of them
    /// [left alone](Tensor::kept_with).
    pub(crate) block_updates: u64,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The factor of the gradient. It is below 1 when the gradient is clipped.
    pub scale: f32,
    /// The vector instructions to use.
    pub(crate) level: Level,
    /// The seed of random rounding.
    pub(crate) seed: u64,
}

/// An update rule: measure a gradient, then apply it. Implement it to train with an optimizer of
/// your own.
///
/// Gradients are measured block by block. Updates are applied tensor by tensor: `tensors` holds the
/// one tensor, and all slices are of its elements. (A rule may go on to look where a tensor lies
/// with [`tensor_ranges`], which then gives all of each slice.) Each tensor is whole, but for two
/// cases: a large table of the vocabulary is cut into tiles of rows, which count as tensors of
/// their own, and in several processes each updates pieces (see
/// [`is_elementwise`](UpdateRule::is_elementwise)).
pub trait UpdateRule: Send + Sync {
    /// The number of states that the rule keeps of each tensor, if each is one float a parameter
    /// (AdamW: 2). A rule with other states has
    /// [`state_layout`](UpdateRule::state_layout) instead.
    fn states(&self) -> usize {
        0
    }

    /// The states that the rule keeps of a tensor: those of [`states`](UpdateRule::states), which
    /// are named `state0` and so on. All begin as bytes of 0.
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        const NAMES: [&str; 8] =
            ["state0", "state1", "state2", "state3", "state4", "state5", "state6", "state7"];
        let names = NAMES.get(..self.states()).expect("a rule with more states names them");
        names.iter().map(|name| RuleState::like(name, tensor)).collect()
    }

    /// True for a rule that updates each parameter by itself, from its own gradient and states,
    /// which are one float a parameter. Only such a rule can be used in several processes: there,
    /// tensors are cut into parts, and the sum of squares is that of
    /// [`measure`](UpdateRule::measure)'s own implementation.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// The sum of squares of a block's gradient, in f64 over fixed chunks. The gradient norm of a
    /// step is the root of the sum over all blocks. Here `tensors` are all that are trained of the
    /// block; they lie in the gradient where [`tensor_ranges`] says.
    fn measure(&self, tensors: &[Tensor], gradient: &[f32]) -> f64 {
        sum_of_chunks(tensors, &chunk_squares(tensors, gradient))
    }

    /// Updates a tensor's masters and states in place. `states` are those of
    /// [`state_layout`](UpdateRule::state_layout), in its order. All slices hold the tensor's
    /// elements, in its order, but for states of other sizes.
    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    );

    /// Called in place of [`apply`](UpdateRule::apply) for a tensor that an update
    /// [leaves alone](Tensor::kept_with). A rule whose states follow the steps of the run, and not
    /// the updates of the tensor, may change them here. A rule that wraps another passes it on.
    fn leave(
        &self,
        _tensor: &Tensor,
        _masters: Masters<'_>,
        _states: &mut [&mut [f32]],
        _update: Update,
    ) {
    }

    /// Whether [`apply`](UpdateRule::apply) may call [`Masters::join`]. For a rule that does not,
    /// the plan holds no memory for joined masters.
    fn joins_masters(&self) -> bool {
        true
    }

    /// Floats of memory of its own that the rule works in while it updates a tensor. The plan
    /// counts the most of them.
    fn workspace_len(&self, _tensor: &Tensor) -> usize {
        0
    }
}

impl UpdateRule for Box<dyn UpdateRule> {
    fn states(&self) -> usize {
        (**self).states()
    }

    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        (**self).state_layout(tensor)
    }

    fn is_elementwise(&self) -> bool {
        (**self).is_elementwise()
    }

    fn measure(&self, tensors: &[Tensor], gradient: &[f32]) -> f64 {
        (**self).measure(tensors, gradient)
    }

    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        (**self).apply(tensor, masters, states, gradient, update);
    }

    fn leave(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        update: Update,
    ) {
        (**self).leave(tensor, masters, states, update);
    }

    fn joins_masters(&self) -> bool {
        (**self).joins_masters()
    }

    fn workspace_len(&self, tensor: &Tensor) -> usize {
        (**self).workspace_len(tensor)
    }
}

#[cfg(test)]
mod tests;
