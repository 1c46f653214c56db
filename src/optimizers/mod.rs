//! Update rules: how a gradient changes a block. Plain mathematics on slices, which knows nothing
//! of lanes and tasks.

mod adafactor;
mod adam;
mod adamw;
mod adamw_8bit;
mod adamw_bf16;
mod decay;
pub(crate) mod elementwise;
mod ema;
mod groups;
mod lamb;
mod lion;
mod loss_scale;
mod muon;
mod product;
mod rate;
mod rates;
mod rounding;
mod sgd;
pub(crate) mod split;
mod states;

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

pub use adafactor::Adafactor;
pub use adam::Adam;
pub use adamw::AdamW;
pub use adamw_8bit::AdamW8bit;
pub use adamw_bf16::AdamWBf16;
pub use decay::WeightDecay;
pub use ema::Ema;
pub use groups::{Group, Groups};
pub use lamb::Lamb;
pub use lion::Lion;
pub use loss_scale::{LossScale, ScaleState};
pub use muon::{Muon, MuonRate};
pub use rate::{Decay, LearningRate};
pub use rates::{stream_bytes_per_second, update_bytes_per_second};
pub use sgd::{Momentum, Sgd};
pub use split::SplitMasters;
pub(crate) use states::{BlockStates, StateLayout};
pub use states::{RuleState, StateDtype};

use crate::models::{MasterFormat, Tensor, tensor_ranges};
use crate::simd::Level;
use crate::tensor::{Dtype, narrow};

/// The elements of one parallel task and of one partial sum. It does not depend on the number of
/// threads, so sums do not either.
const CHUNK: usize = 16384;

/// Masters draw other random numbers than moments do.
const MASTERS: u64 = 0x6d61_7374;

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
    /// The number of updates that the block had before this one.
    pub step: u64,
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

    /// Updates a tensor's parameters and states in place. `states` are those of
    /// [`state_layout`](UpdateRule::state_layout), in its order.
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

    /// The length of `unpacked` that [`apply_split`](UpdateRule::apply_split) needs, for tensors of
    /// at most so many parameters.
    fn unpacked_len(&self, parameters: usize) -> usize {
        parameters
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

    fn workspace_len(&self, tensor: &Tensor) -> usize {
        (**self).workspace_len(tensor)
    }
}

/// The masters of a block, as the EPS has them.
pub(crate) enum BlockMasters<'a> {
    /// f32.
    Plain(&'a mut [f32]),
    /// f32 in two halves.
    Split(SplitMasters<'a>),
    /// f32, and their copies of 16 bits.
    Copied { dtype: Dtype, published: &'a mut [u16], masters: &'a mut [f32] },
    /// bf16.
    Rounded(&'a mut [bf16]),
}

/// Floats of `unpacked` that [`update_block`] needs, for tensors of at most so many parameters.
pub(crate) fn unpacked_len(
    rule: &dyn UpdateRule,
    masters: MasterFormat,
    parameters: usize,
) -> usize {
    match masters {
        MasterFormat::F32 | MasterFormat::Copied(_) => 0,
        MasterFormat::Split => rule.unpacked_len(parameters),
        MasterFormat::Rounded => parameters,
    }
}

/// Updates the trained tensors of a block, one by one. `states` are the runs of `layout`; `scale`
/// gives the factor of each tensor's gradient.
pub(crate) fn update_block(
    rule: &dyn UpdateRule,
    (tensors, layout): (&[Tensor], &BlockStates),
    masters: &mut BlockMasters<'_>,
    states: &mut [&mut [f32]],
    gradient: &[f32],
    (update, scale): (Update, &dyn Fn(&Tensor) -> f32),
    unpacked: &mut [f32],
) {
    for (at, (tensor, range)) in tensors.iter().zip(tensor_ranges(tensors)).enumerate() {
        let update = Update { scale: scale(tensor), ..update };
        let alone = &[Tensor { joined: false, ..tensor.clone() }];
        let own = states.iter_mut().zip(layout.of_tensor(at));
        let mut own: Vec<&mut [f32]> =
            own.map(|(run, (_, range))| &mut run[range.clone()]).collect();
        let gradient = &gradient[range.clone()];
        match masters {
            BlockMasters::Plain(masters) => {
                rule.apply(alone, &mut masters[range], &mut own, gradient, update);
            }
            BlockMasters::Split(SplitMasters { published, remainder }) => {
                let split = &mut SplitMasters {
                    published: &mut published[range.clone()],
                    remainder: &mut remainder[range],
                };
                rule.apply_split(alone, split, &mut own, gradient, update, unpacked);
            }
            BlockMasters::Copied { dtype, published, masters } => {
                let (masters, copies) = (&mut masters[range.clone()], &mut published[range]);
                rule.apply(alone, masters, &mut own, gradient, update);
                let chunks = copies.par_chunks_mut(CHUNK).zip(masters.par_chunks(CHUNK));
                chunks.for_each(|(copies, masters)| narrow(*dtype, copies, masters));
            }
            BlockMasters::Rounded(masters) => {
                let (masters, whole) = (&mut masters[range.clone()], &mut unpacked[..range.len()]);
                let chunks = whole.par_chunks_mut(CHUNK).zip(masters.par_chunks(CHUNK));
                chunks.for_each(|(whole, masters)| masters.convert_to_f32_slice(whole));
                rule.apply(alone, whole, &mut own, gradient, update);
                rounding::round_at_random(masters, whole, rounding::key(tensor, update, MASTERS));
            }
        }
    }
}

#[cfg(test)]
mod tests;
