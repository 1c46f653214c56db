//! Compression of gradients, with error feedback.
//!
//! Each group of micro-batches compresses its own gradient, even if the gradient crosses no fabric.
//! So results depend on the number of groups, and not on the rank that computes a group. The
//! compression's *error* of a group's gradient is kept, and added to the group's next gradient of
//! the same block (Seide et al. 2014; Karimireddy et al. 2019).
//!
//! Two kinds work on each [chunk](crate::optimizers) of a block: 8 bits ([`int8`]) and the largest
//! numbers ([`top_k`]). PowerSGD works on whole matrices.
//!
//! [`int8`]: Compression::Int8
//! [`top_k`]: Compression::TopK

mod chunks;
mod power_sgd;

use std::ops::Range;
use std::sync::LazyLock;

use power_sgd::Factored;
pub(crate) use power_sgd::{Factors, PowerSgd, largest_rank, matrix_of};

use crate::fabric::parts::Parts;
use crate::models::{BlockTensors, Tensor, tensor_ranges};
use crate::optimizers::{RuleState, StateDtype, chunks};

/// The most groups of a run with compression. Each has names of its own in a checkpoint.
pub(crate) const MOST_GROUPS: u32 = 256;

/// How gradients are compressed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compression {
    /// Each number is one of 255 multiples of a scale, which a block of numbers shares. The error
    /// of a number is at most 1/254 of the largest magnitude in its block.
    Int8 {
        /// The number of numbers that share a scale: a divisor of 16384.
        block: usize,
    },
    /// The numbers with the largest magnitude in each chunk of at most 16384. The others become 0.
    TopK {
        /// The share of a chunk that is kept, in (0, 0.5].
        density: f64,
    },
    /// Each matrix is a product of two factors of this rank (Vogels et al. 2019). Vectors are not
    /// compressed, nor matrices that are not larger than their factors.
    PowerSgd {
        /// The number of columns of each factor.
        rank: usize,
    },
}

/// Floats of a block that are kept from step to step for one group: its errors, or PowerSGD's
/// second factors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FeedbackRun {
    /// The number of floats.
    pub(crate) len: usize,
    /// For each trained tensor its state and its range in the run, if the run has floats of it.
    pub(crate) tensors: Vec<Option<(RuleState, Range<usize>)>>,
}

/// The names in a checkpoint of each group's errors, and of its factors.
static NAMES: LazyLock<[Vec<String>; 2]> = LazyLock::new(|| {
    ["error", "factor"].map(|name| (0..MOST_GROUPS).map(|at| format!("{name}{at}")).collect())
});

impl Compression {
    /// The number of runs that are kept for each group.
    pub(crate) fn runs_per_group(self) -> usize {
        match self {
            Compression::Int8 { .. } | Compression::TopK { .. } => 1,
            Compression::PowerSgd { .. } => 2,
        }
    }

    /// The runs that are kept of a block's trained tensors for a group.
    pub(crate) fn kept(self, tensors: &[Tensor], group: u32) -> Vec<FeedbackRun> {
        let [errors, factors] = NAMES.each_ref().map(|names| &names[group as usize][..]);
        let error = |(tensor, range)| Some((RuleState::like(errors, tensor), range));
        let len = tensor_ranges(tensors).last().map_or(0, |range| range.end);
        let all = tensors.iter().zip(tensor_ranges(tensors)).map(error).collect();
        let mut runs = vec![FeedbackRun { len, tensors: all }];
        if let Compression::PowerSgd { rank } = self {
            let Factors { matrices, right_len, .. } = Factors::new(tensors, rank);
            let mut all = vec![None; tensors.len()];
            for Factored { tensor, columns, right, .. } in matrices {
                let shape = vec![rank, columns];
                let state = RuleState { name: factors, dtype: StateDtype::F32, shape };
                all[tensor] = Some((state, right));
            }
            runs.push(FeedbackRun { len: right_len, tensors: all });
        }
        runs
    }

    /// The ranks' parts of a packed gradient, for the kinds that pack chunks.
    pub(crate) fn packed_parts(self, tensors: &[Tensor], parts: &Parts, ranks: u32) -> Parts {
        let mut packed = 0;
        let mut left = chunks(tensors).peekable();
        let end_of = |rank: u32| {
            let end = parts.of(rank).end;
            while let Some(chunk) = left.next_if(|chunk| chunk.end <= end) {
                packed += self.packed_floats(chunk.len());
            }
            packed
        };
        Parts::new((0..ranks).map(end_of).collect())
    }

    /// The floats of a rank's workspace for a block of these trained tensors: the packed parts that
    /// ranks exchange, or the factors of all groups. `own` is the rank.
    pub(crate) fn workspace(
        self,
        trained: &[Tensor],
        parts: &Parts,
        own: u32,
        sizes: Sizes,
    ) -> usize {
        let Sizes { groups, ranks } = sizes;
        match self {
            _ if trained.is_empty() => 0,
            Compression::PowerSgd { rank } => {
                let factors = Factors::new(trained, rank);
                groups as usize * (factors.left_and_vectors(ranks > 1) + factors.right_len)
            }
            _ if ranks == 1 => 0,
            _ => {
                let packed = self.packed_parts(trained, parts, ranks);
                assert!(packed.len() <= parts.len(), "a landing block has room for packed chunks");
                let ranks = ranks as usize;
                ranks * parts.of(own).len() + (ranks - 1) * packed.of(own).len()
            }
        }
    }

    /// The bytes of a block's gradient that a rank sends to the others.
    pub(crate) fn sent_bytes(self, block: &BlockTensors, cut: &Parts, own: u32, ranks: u32) -> u64 {
        let floats = match self {
            Compression::PowerSgd { rank } => {
                let factors = Factors::new(block.trained(), rank);
                (ranks as usize - 1) * (factors.left_and_vectors(true) + factors.right_len)
            }
            _ => {
                let parts = cut.clipped(block.trained_len());
                let packed = self.packed_parts(block.trained(), &parts, ranks);
                packed.len() - packed.of(own).len()
            }
        };
        (floats * size_of::<f32>()) as u64
    }
}

/// The numbers of groups of micro-batches and of ranks of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) groups: u32,
    pub(crate) ranks: u32,
}
