//! Compression of gradients, with error feedback.
//!
//! Each group of micro-batches compresses a gradient of its own, whether that crosses a fabric or
//! not: so results depend on the number of groups, and not on who computes them. What the
//! compression loses of a group's gradient, its *error*, is kept and added to the group's next
//! gradient of the same block (Seide et al. 2014; Karimireddy et al. 2019).
//!
//! Two kinds work on the [chunks](crate::optimizers) of a block by themselves: 8 bits ([`int8`])
//! and the largest numbers ([`top_k`]). PowerSGD works on whole matrices.
//!
//! [`int8`]: Compression::Int8
//! [`top_k`]: Compression::TopK

mod chunks;
mod power_sgd;

use std::ops::Range;
use std::sync::LazyLock;

pub(crate) use power_sgd::{Factors, PowerSgd, largest_rank, matrix_of};

use crate::fabric::parts::Parts;
use crate::models::{BlockTensors, Tensor, tensor_ranges};
use crate::optimizers::{RuleState, StateDtype, chunks};

/// The most groups that a run with compression has.
pub(crate) const MOST_GROUPS: u32 = 256;

/// How gradients are compressed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compression {
    /// Each number is one of 255 multiples of a scale, which a block of numbers shares. A number is
    /// off by at most 1/254 of the largest of its block.
    Int8 {
        /// Numbers that share a scale, a divisor of 16384.
        block: usize,
    },
    /// Of each chunk of at most 16384 numbers those of the largest magnitude; the others are 0.
    TopK {
        /// The share of a chunk that is kept, in (0, 0.5].
        density: f64,
    },
    /// Matrices are products of two factors of this rank (Vogels et al. 2019). Vectors, and
    /// matrices that their factors would not make smaller, stay as they are.
    PowerSgd {
        /// Columns of each factor.
        rank: usize,
    },
}

/// What is kept of a block from step to step for one group: a run of floats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FeedbackRun {
    /// Its floats.
    pub(crate) len: usize,
    /// For each trained tensor what the run has of it, if it has something.
    pub(crate) tensors: Vec<Option<(RuleState, Range<usize>)>>,
}

/// Names of what is kept for each group, in a checkpoint: of errors, and of factors.
static NAMES: LazyLock<[Vec<String>; 2]> = LazyLock::new(|| {
    ["error", "factor"].map(|name| (0..MOST_GROUPS).map(|at| format!("{name}{at}")).collect())
});

impl Compression {
    /// Runs that are kept for each group: errors, and PowerSGD's second factor.
    pub(crate) fn runs_per_group(self) -> usize {
        match self {
            Compression::Int8 { .. } | Compression::TopK { .. } => 1,
            Compression::PowerSgd { .. } => 2,
        }
    }

    /// What is kept of a block's trained tensors for a group.
    pub(crate) fn kept(self, tensors: &[Tensor], group: u32) -> Vec<FeedbackRun> {
        let errors = tensors.iter().zip(tensor_ranges(tensors));
        let [errors_of, factors_of] = &*NAMES;
        let name: &str = &errors_of[group as usize];
        let mut len = 0;
        let errors = errors.map(|(tensor, range)| {
            len = range.end;
            Some((RuleState::like(name, tensor), range))
        });
        let errors = errors.collect();
        let mut runs = vec![FeedbackRun { len, tensors: errors }];
        if let Compression::PowerSgd { rank } = self {
            let factors = Factors::new(tensors, rank);
            let mut of_tensors = vec![None; tensors.len()];
            for matrix in &factors.matrices {
                let (dtype, shape) = (StateDtype::F32, vec![rank, matrix.columns]);
                let state = RuleState { name: &factors_of[group as usize], dtype, shape };
                of_tensors[matrix.tensor] = Some((state, matrix.right.clone()));
            }
            runs.push(FeedbackRun { len: factors.right_len, tensors: of_tensors });
        }
        runs
    }

    /// How the chunks of a block's gradient are packed, for the kinds that pack chunks: the floats
    /// of each of the ranks' parts, packed.
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

    /// Floats that a process works in, for a block of these trained tensors, of which it has one of
    /// so many parts: what ranks exchange, or the factors of all groups.
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
                assert!(packed.len() <= parts.len(), "what is packed lies in a landing block");
                let (packed, ranks) = (packed.of(own), ranks as usize);
                ranks * parts.of(own).len() + (ranks - 1) * packed.len()
            }
        }
    }

    /// Bytes of a block's gradient that a process sends to the others.
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

/// How many groups of micro-batches a run has, and how many processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) groups: u32,
    pub(crate) ranks: u32,
}
