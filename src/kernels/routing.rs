//! What a router's loss and its limits need beside the choice: counts and probabilities of each
//! sequence, the gradient of these losses, and the assignments beyond an expert's capacity.
//!
//! Legend as in [`experts`](super::experts): R rows, B sequences, E experts, k choices of a row.

use super::batch::BatchView;
use super::dropout::Dropout;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// The bit of a chosen expert that says that the assignment is dropped: it has no row, and the
/// output of the expert is not added. Its weight stays, for the gradients of the other weights.
pub const DROPPED: u32 = 1 << 31;

/// Numbers of a sequence beside two for each expert: see [`MeasureRoutes`].
pub const OF_SEQUENCE: usize = 2;

/// The sums of each sequence over its rows: for each expert the number of rows that chose it,
/// dropped ones too; for each expert its probability; the square of the logits' log-sum-exp; and
/// the number of dropped assignments.
#[derive(Clone, Copy, Debug)]
pub struct MeasureRoutes<'a> {
    /// Output: floats. Counts are exact up to 2²⁴ rows. (B, 2 E + 2).
    pub statistics: View,
    /// Floats, as [`Route`](super::Route) writes them. (R, E).
    pub logits: View,
    /// Floats, as [`Route`](super::Route) writes them. (R, 2 k).
    pub chosen: View,
    /// True to count the first choice of each row alone.
    pub first_choice: bool,
    /// The rows.
    pub batch: BatchView<'a>,
    /// True when `statistics` is added to; false when it is replaced.
    pub accumulate: bool,
}

/// A choice without some assignments, which are marked as dropped: those of an expert beyond its
/// capacity in a sequence. That is ⌈factor k T ÷ E⌉ for a sequence of T rows, and at least 1. The
/// first choices of all rows come first, by position, then the second choices, and so on (Lepikhin
/// et al. 2020).
#[derive(Clone, Copy, Debug)]
pub struct LimitExperts<'a> {
    /// Output: the choice, with the bit [`DROPPED`] in some experts. Floats. (R, 2 k).
    pub limited: View,
    /// Floats, as [`Route`](super::Route) writes them. (R, 2 k).
    pub chosen: View,
    /// Floats. (R, E).
    pub logits: View,
    /// The factor in millionths, so that every device computes the same capacity; `None`: no limit.
    pub factor_millionths: Option<u32>,
    /// Random numbers: a row keeps its second choice with a probability of twice its weight. One
    /// that is not kept takes no place. Only the key is read, not the probability. `None`: all are
    /// kept.
    pub second: Option<Dropout<'a>>,
    /// The rows: whole sequences.
    pub batch: BatchView<'a>,
}

/// The gradients of a router's losses: the logits of a row get
/// p (b − Σ p b) + z · lse · p.
#[derive(Clone, Copy, Debug)]
pub struct RouteSlopes<'a> {
    /// Of each sequence: b for each expert, then z. Floats. (B, E + 1).
    pub of_sequences: View,
    /// The rows.
    pub batch: BatchView<'a>,
}

impl LimitExperts<'_> {
    /// The most assignments of an expert in a sequence of these rows.
    pub fn capacity(millionths: u32, per_token: usize, rows: usize, experts: usize) -> usize {
        let places = u128::from(millionths) * per_token as u128 * rows as u128;
        places.div_ceil(1_000_000 * experts as u128).max(1) as usize
    }
}

impl KernelOperation for MeasureRoutes<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let MeasureRoutes { statistics, logits, chosen, batch, .. } = *self;
        let width = 2 * logits.columns + OF_SEQUENCE;
        views.writes("statistics", statistics, [batch.sequences(), width], Dtype::F32);
        views.reads("logits", logits, [batch.rows(), logits.columns], Dtype::F32);
        views.reads("chosen", chosen, [batch.rows(), chosen.columns], Dtype::F32);
        views.rule(chosen.columns.is_multiple_of(2), "each chosen expert has a weight");
    }
}

impl KernelOperation for LimitExperts<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let LimitExperts { limited, chosen, logits, batch, .. } = *self;
        views.writes_opaque("limited", limited, [batch.rows(), chosen.columns], Dtype::F32);
        views.reads("chosen", chosen, [batch.rows(), limited.columns], Dtype::F32);
        views.reads("logits", logits, [batch.rows(), logits.columns], Dtype::F32);
        views.rule(chosen.columns.is_multiple_of(2), "each chosen expert has a weight");
        views.rule(batch.chunk().is_none(), "sequences are whole");
    }
}
