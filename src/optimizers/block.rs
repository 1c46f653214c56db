//! The update of one block: its trained tensors one by one, in any format of masters.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::states::count_update;
use super::{BlockStates, CHUNK, Masters, SplitMasters, Update, UpdateRule, rounding};
use crate::models::{MasterFormat, Tensor, tensor_ranges};
use crate::tensor::{Dtype, narrow};

/// Masters draw other random numbers than moments do.
const SALT: u64 = 0x6d61_7374;

/// The masters of a block, as the EPS stores them.
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

/// Floats of [`BlockUpdate::room`] for tensors of at most `parameters` elements.
pub(crate) fn room_len(rule: &dyn UpdateRule, masters: MasterFormat, parameters: usize) -> usize {
    match masters {
        MasterFormat::Split if rule.joins_masters() => parameters,
        MasterFormat::Rounded => parameters,
        MasterFormat::F32 | MasterFormat::Copied(_) | MasterFormat::Split => 0,
    }
}

/// The data that an update of a block reads and writes.
pub(crate) struct BlockUpdate<'a, 's> {
    /// The trained tensors.
    pub(crate) tensors: &'a [Tensor],
    pub(crate) masters: BlockMasters<'a>,
    /// One run of floats for each state.
    pub(crate) states: &'a mut [&'s mut [f32]],
    /// The places of each tensor's states in the runs.
    pub(crate) layout: &'a BlockStates,
    pub(crate) gradient: &'a [f32],
    /// For each expert of the block's layer, whether the update leaves it alone. Empty: it leaves
    /// none alone.
    pub(crate) idle: &'a [bool],
    /// Holds the masters of one tensor as f32, where they are stored otherwise.
    pub(crate) room: &'a mut [f32],
}

impl BlockUpdate<'_, '_> {
    /// Updates tensor by tensor. `scale` gives the factor of each tensor's gradient.
    pub(crate) fn run(
        mut self,
        rule: &dyn UpdateRule,
        update: Update,
        scale: &dyn Fn(&Tensor) -> f32,
    ) {
        for (at, (tensor, range)) in
            self.tensors.iter().zip(tensor_ranges(self.tensors)).enumerate()
        {
            let update = Update { scale: scale(tensor), ..update };
            self.update_tensor(rule, at, range, update);
        }
    }

    /// Updates tensor `at`, whose elements lie in `range`.
    fn update_tensor(
        &mut self,
        rule: &dyn UpdateRule,
        at: usize,
        range: Range<usize>,
        mut update: Update,
    ) {
        let tensor = &self.tensors[at];
        let gradient = &self.gradient[range.clone()];
        let runs = self.states.iter_mut().zip(self.layout.of_tensor(at));
        let mut states: Vec<&mut [f32]> =
            runs.map(|(run, (_, range))| &mut run[range.clone()]).collect();
        let is_left = tensor.kept_with.is_some_and(|expert| self.idle.get(expert) == Some(&true));
        if tensor.kept_with.is_some() {
            let count = states.pop().expect("the count of updates is the last state");
            update.step = count_update(count, is_left);
        }
        let mut apply = |masters: Masters<'_>| match is_left {
            true => rule.leave(tensor, masters, &mut states, update),
            false => rule.apply(tensor, masters, &mut states, gradient, update),
        };
        match &mut self.masters {
            BlockMasters::Plain(masters) => apply(Masters::F32(&mut masters[range])),
            BlockMasters::Split(SplitMasters { published, remainder }) => {
                let published = &mut published[range.clone()];
                let halves = SplitMasters { published, remainder: &mut remainder[range] };
                apply(Masters::Split { halves, room: self.room });
            }
            BlockMasters::Copied { dtype, published, masters } => {
                let masters = &mut masters[range.clone()];
                apply(Masters::F32(masters));
                let copies = published[range].par_chunks_mut(CHUNK);
                let chunks = copies.zip(masters.par_chunks(CHUNK));
                chunks.for_each(|(copies, masters)| narrow(*dtype, copies, masters));
            }
            BlockMasters::Rounded(masters) => {
                let whole = &mut self.room[..range.len()];
                let masters = &mut masters[range];
                let chunks = whole.par_chunks_mut(CHUNK).zip(masters.par_chunks(CHUNK));
                chunks.for_each(|(whole, masters)| masters.convert_to_f32_slice(whole));
                apply(Masters::F32(whole));
                rounding::round_at_random(masters, whole, rounding::key(tensor, update, SALT));
            }
        }
    }
}
