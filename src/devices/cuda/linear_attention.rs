//! Linear attention: passes of the delta rule over positions, forward and backward. A block has
//! some channels of a head of values of a sequence.
//!
//! The backward first notes the states in front of segments of each sequence. Then it walks the
//! segments from the last to the first. In each, a pass forward notes the states in front of
//! pieces, a pass backward notes the gradients of those behind them, and from both the gradients of
//! queries, keys and factors of all pieces are computed at once. So its workspace grows with the
//! length by a state for each segment.

use super::driver::{Address, Place};
use super::kernels::{On, arguments};
use super::launches::{PART, Words, linear_words, long, parts_of};
use crate::kernels::{
    Carried, DeltaRule, DeltaRuleBackward, GatedNorm, GatedNormBackward, HeadDecay, LinearShape,
    ShortConvolution, ShortConvolutionBackward,
};
use crate::tensor::{Scratch, View};

/// Positions of a segment, in whole pieces.
const SEGMENT: usize = 256;

/// Positions of a piece, as the text expects.
const PIECE: usize = 32;

/// Heads of a block that has a warp for each.
const WARPS: usize = 8;

/// Threads of a block of the delta rule.
const THREADS: usize = 256;

/// The most keys of the passes over positions with 8 lanes a channel. Those with 32 lanes have room
/// for as many as a family may have.
const FEW_KEYS: usize = 128;

/// Partial sums of the weights' gradients.
pub(super) fn convolution_scratch(
    op: &ShortConvolutionBackward<'_>,
    scratch: &Scratch<'_>,
) -> View {
    scratch.take_floats(parts_of(op.dy.rows), op.dw.len())
}

/// Partial sums of dγ.
pub(super) fn norm_scratch(op: &GatedNormBackward<'_>, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(parts_of(op.x.rows), op.gamma.columns)
}

/// The workspace of the delta rule's backward. A state has D_v D_k numbers for each head of values.
#[derive(Clone, Copy)]
pub(super) struct RuleWorkspace {
    /// States in front of segments. (segments B, H D_v D_k).
    segments: View,
    /// States in front of the pieces of a segment, and gradients of those behind. (pieces B,
    /// H D_v D_k).
    states: View,
    dstates: View,
    /// The gradient of the state in front of a segment. (B, H D_v D_k).
    carry: View,
    /// v − α S k on the rows of a segment, and the gradients of δ. (B positions, H D_v).
    errors: View,
    slopes: View,
    /// The gradients of queries and keys by head of values. (B positions, 2 H D_k).
    of_heads: View,
    /// Partial sums of the gradients of ln A and of the bias. (segments pieces B, 2 H).
    parts: View,
}

/// The segments of a batch, and the positions of the first: no other has more.
fn segments(shape: &LinearShape<'_>) -> [usize; 2] {
    let longest = shape.batch.longest();
    [longest.div_ceil(SEGMENT), longest.min(SEGMENT)]
}

pub(super) fn rule_scratch(op: &DeltaRuleBackward<'_>, scratch: &Scratch<'_>) -> RuleWorkspace {
    let heads = op.shape.heads;
    let [count, positions] = segments(&op.shape);
    let b = op.shape.batch.sequences();
    let pieces = positions.div_ceil(PIECE);
    let state = heads.states();
    let of_rows = |columns: usize| scratch.take_floats(b * positions, columns);
    RuleWorkspace {
        segments: scratch.take_floats(count * b, state),
        states: scratch.take_floats(pieces * b, state),
        dstates: scratch.take_floats(pieces * b, state),
        carry: scratch.take_floats(b, state),
        errors: of_rows(heads.values()),
        slopes: of_rows(heads.values()),
        of_heads: of_rows(2 * heads.value_heads * heads.key_size),
        parts: scratch.take_floats(count * pieces * b, 2 * heads.value_heads),
    }
}

/// What the passes of the delta rule over positions read.
#[derive(Clone, Copy)]
struct Rule<'a> {
    x: View,
    projected: View,
    decay: HeadDecay,
    shape: LinearShape<'a>,
}

/// Where a pass over positions writes. Each may be null.
#[derive(Clone, Copy)]
struct Outputs {
    y: Place,
    errors: Place,
    /// The states before each `every`-th position.
    kept: Place,
    every: usize,
    behind: Place,
}

impl Outputs {
    const NONE: Outputs = Outputs {
        y: Place::NULL,
        errors: Place::NULL,
        kept: Place::NULL,
        every: SEGMENT,
        behind: Place::NULL,
    };
}

/// States in front of a pass, and how far those of sequences lie apart.
#[derive(Clone, Copy)]
struct Left {
    at: Place,
    stride: usize,
}

/// Positions of each sequence.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    count: usize,
}

/// Addresses of a micro-batch's metadata, and its sizes.
struct Of {
    starts: Address,
    documents: Address,
    cached: Address,
    sizes: Words<8>,
}

impl On<'_> {
    fn of(&self, shape: &LinearShape<'_>) -> Of {
        Of {
            starts: self.metadata.starts(&shape.batch),
            documents: self.metadata.documents(&shape.batch),
            cached: self.metadata.cached(&shape.batch),
            sizes: linear_words(shape),
        }
    }

    /// The states in what passes along the sequences: the part behind the convolution's.
    fn states(&self, carried: Option<View>, shape: &LinearShape<'_>) -> Place {
        carried.map_or(Place::NULL, |view| self.at(view).behind(shape.heads.inputs()))
    }

    pub(super) fn short_convolution(&self, op: &ShortConvolution<'_>) {
        let ShortConvolution { y, projected, w, ref shape, carried } = *op;
        let Carried { before: left, behind } = carried;
        let Of { starts, documents, cached, sizes } = self.of(shape);
        let [rows, channels] = y.shape();
        let sums = arguments!(
            self; y, projected, w, left, starts, documents, cached, channels, sizes
        );
        self.queue.columns("short_convolution", [rows, 1], channels, sums);
        if let Some(behind) = behind {
            let rows = behind.rows * (shape.heads.taps - 1);
            let inputs = arguments!(self; behind, projected, left, starts, cached, channels, sizes);
            self.queue.columns("leave_inputs", [rows, 1], channels, inputs);
        }
    }

    pub(super) fn short_convolution_backward(
        &self,
        op: &ShortConvolutionBackward<'_>,
        parts: View,
    ) {
        let ShortConvolutionBackward { dprojected, dw, dy, projected, w, ref shape, .. } = *op;
        let Of { starts, documents, cached, sizes } = self.of(shape);
        let [rows, channels] = dy.shape();
        let taps = shape.heads.taps;
        let left = op.carried.before;
        let dbehind = op.carried.dbehind;
        let to_rows = arguments!(
            self; dprojected, dy, projected, w, left, dbehind, starts, documents, cached, channels,
            sizes
        );
        self.queue.columns("short_convolution_backward", [rows, 1], channels, to_rows);
        let to_parts = arguments!(
            self; parts, dy, projected, w, left, starts, documents, cached, PART, channels, sizes
        );
        self.queue.columns("short_convolution_parts", [parts.rows, taps], channels, to_parts);
        let len = dw.len();
        self.queue.fold(self.at(dw), self.at(parts), [parts.rows, len, len], op.accumulate);
        if let Some(dbefore) = op.carried.dbefore {
            let rows = dbefore.rows * (taps - 1);
            let to_before = arguments!(
                self; dbefore, dy, projected, w, left, dbehind, starts, documents, cached, channels,
                sizes
            );
            self.queue.columns("leave_gradients", [rows, 1], channels, to_before);
        }
    }

    pub(super) fn gated_norm(&self, op: &GatedNorm<'_>) {
        let GatedNorm { y, x, projected, gamma, epsilon, ref shape } = *op;
        let rows = x.rows;
        let heads = rows * shape.heads.value_heads;
        let sizes = linear_words(shape);
        let arguments = arguments!(self; y, x, projected, gamma, rows, epsilon, sizes);
        self.queue.launch("gated_norm", [heads.div_ceil(WARPS), 1, 1], [256, 1, 1], 0, arguments);
    }

    pub(super) fn gated_norm_backward(&self, op: &GatedNormBackward<'_>, parts: View) {
        let GatedNormBackward { dx, dprojected, dgamma, dy, x, projected, gamma, .. } = *op;
        let rows = x.rows;
        let epsilon = op.epsilon;
        let sizes = linear_words(&op.shape);
        let to_rows =
            arguments!(self; dx, dprojected, dy, x, projected, gamma, rows, epsilon, sizes);
        let grid = [(rows * op.shape.heads.value_heads).div_ceil(WARPS), 1, 1];
        self.queue.launch("gated_norm_backward", grid, [256, 1, 1], 0, to_rows);
        let to_parts = arguments!(self; parts, dy, x, projected, rows, PART, epsilon, sizes);
        self.queue.launch("gated_norm_parts", [parts.rows, 1, 1], [256, 1, 1], 0, to_parts);
        let d = gamma.columns;
        self.queue.fold(self.at(dgamma), self.at(parts), [parts.rows, d, d], op.accumulate);
    }

    /// Blocks of a pass of the delta rule over positions, and which of two kernels it is.
    fn rule_grid<'k>(
        &self,
        shape: &LinearShape<'_>,
        [few, many]: [&'k str; 2],
    ) -> (&'k str, [usize; 3]) {
        let heads = shape.heads;
        let (kernel, lanes) = if heads.key_size <= FEW_KEYS { (few, 8) } else { (many, 32) };
        let blocks = heads.value_size.div_ceil(THREADS / lanes);
        (kernel, [blocks, heads.value_heads, shape.batch.sequences()])
    }

    /// The delta rule on some positions of each sequence.
    fn run_rule(&self, to: Outputs, rule: &Rule<'_>, left: Left, span: Span) {
        let Rule { x, projected, decay, ref shape } = *rule;
        let Of { starts, documents, cached, sizes } = self.of(shape);
        let Span { from, count } = span;
        let strides = [left.stride, shape.heads.carried()].map(long);
        let [of_left, of_behind] = strides;
        let arguments = arguments!(
            self; to.y, to.errors, to.kept, to.behind, left.at, x, projected, decay.log, decay.bias,
            starts, documents, cached, of_left, of_behind, from, count, to.every, sizes
        );
        let (kernel, grid) = self.rule_grid(shape, ["delta_rule_128", "delta_rule_1024"]);
        self.queue.launch(kernel, grid, [THREADS as u32, 1, 1], 0, arguments);
    }

    pub(super) fn delta_rule(&self, op: &DeltaRule<'_>) {
        let DeltaRule { y, x, projected, decay, shape, carried } = *op;
        let rule = Rule { x, projected, decay, shape };
        let behind = self.states(carried.behind, &shape);
        let left = Left { at: self.states(carried.before, &shape), stride: shape.heads.carried() };
        let to = Outputs { y: self.at(y), behind, ..Outputs::NONE };
        let count = shape.batch.longest();
        self.run_rule(to, &rule, left, Span { from: 0, count });
    }

    pub(super) fn delta_rule_backward(&self, op: &DeltaRuleBackward<'_>, to: RuleWorkspace) {
        let DeltaRuleBackward { ddecay, x, projected, decay, shape, carried, .. } = *op;
        let rule = Rule { x, projected, decay, shape };
        let heads = shape.heads;
        let [segments, positions] = segments(&shape);
        let whole = Span { from: 0, count: shape.batch.longest() };
        let left = Left { at: self.states(carried.before, &shape), stride: heads.carried() };
        let noted = Outputs { kept: self.at(to.segments), ..Outputs::NONE };
        self.run_rule(noted, &rule, left, whole);
        for segment in (0..segments).rev() {
            let b = shape.batch.sequences();
            let first = self.at(to.segments.row_range(segment * b..(segment + 1) * b));
            let left = Left { at: first, stride: heads.states() };
            let span = Span { from: segment * SEGMENT, count: positions };
            let noted = Outputs {
                errors: self.at(to.errors),
                kept: self.at(to.states),
                every: PIECE,
                ..Outputs::NONE
            };
            self.run_rule(noted, &rule, left, span);
            self.run_rule_back(op, &to, span);
            self.gradients_of_segment(op, &to, segment, span);
        }
        let width = 2 * heads.value_heads;
        for (to_heads, at) in [(ddecay.log, 0), (ddecay.bias, heads.value_heads)] {
            let parts = self.at(to.parts).behind(at);
            let sizes = [to.parts.rows, width, heads.value_heads];
            self.queue.fold(self.at(to_heads), parts, sizes, op.accumulate);
        }
    }

    /// The pass backward over the positions of a segment.
    fn run_rule_back(&self, op: &DeltaRuleBackward<'_>, to: &RuleWorkspace, span: Span) {
        let DeltaRuleBackward { dx, dy, x, projected, decay, ref shape, carried, .. } = *op;
        let Of { starts, documents, cached, sizes } = self.of(shape);
        let Span { from, count } = span;
        let dbefore = self.states(carried.dbefore, shape);
        let dbehind = self.states(carried.dbehind, shape);
        let stride = long(shape.heads.carried());
        let arguments = arguments!(
            self; to.slopes, to.dstates, to.carry, dbefore, dx, dy, dbehind, x, projected,
            decay.log, decay.bias, starts, documents, cached, stride, from, count, PIECE, sizes
        );
        let (kernel, grid) = self.rule_grid(shape, ["delta_rule_back_128", "delta_rule_back_1024"]);
        self.queue.launch(kernel, grid, [THREADS as u32, 1, 1], 0, arguments);
    }

    /// The gradients of queries, keys and factors on the positions of a segment.
    fn gradients_of_segment(
        &self,
        op: &DeltaRuleBackward<'_>,
        to: &RuleWorkspace,
        segment: usize,
        span: Span,
    ) {
        let DeltaRuleBackward { dx, dprojected, dy, x, projected, decay, ref shape, .. } = *op;
        let Of { starts, documents, cached, sizes } = self.of(shape);
        let Span { from, count } = span;
        let RuleWorkspace { states, dstates, errors, slopes, of_heads, .. } = *to;
        let b = shape.batch.sequences();
        let pieces = count.div_ceil(PIECE);
        let parts = to.parts.row_range(segment * pieces * b..(segment + 1) * pieces * b);
        let to_pieces = arguments!(
            self; of_heads, dprojected, parts, states, dstates, errors, slopes, dy, x, projected,
            decay.log, decay.bias, starts, documents, cached, from, count, sizes
        );
        let grid = [pieces, shape.heads.value_heads, b];
        self.queue.launch("delta_rule_pieces", grid, [THREADS as u32, 1, 1], 0, to_pieces);
        let to_rows = arguments!(self; dx, x, of_heads, starts, from, count, sizes);
        let warps = b * count * 2 * shape.heads.key_heads;
        let grid = [warps.div_ceil(WARPS), 1, 1];
        self.queue.launch("delta_rule_rows", grid, [256, 1, 1], 0, to_rows);
    }
}
