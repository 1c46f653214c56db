//! Linear attention. A task has some channels of one head of values of one sequence: they pass all
//! positions with their part of the state, which no other channel reads.

mod backward;
mod convolution;
mod gated_norm;
#[cfg(test)]
mod tests;

use std::ops::Range;

use rayon::prelude::*;

use super::activation::sigmoid;
use super::math::{dot, exp};
use super::views::{Call, ComputeIn};
use crate::kernels::{BatchView, DeltaRule, LinearHeads, LinearShape};
use crate::simd::Level;

/// Channels of values of one task. Its part of the state stays in the first level of the cache.
const CHANNELS: usize = 32;

/// Added to the square of the length of a query or key.
const EPSILON: f32 = 1e-6;

/// For each row, the rows before it in its document.
fn rows_before(batch: &BatchView<'_>) -> Vec<usize> {
    (0..batch.rows()).map(|row| batch.position_in_document(row)).collect()
}

/// The next floats of a workspace.
fn take<'w>(workspace: &mut &'w mut [f32], len: usize) -> &'w mut [f32] {
    let (taken, rest) = std::mem::take(workspace).split_at_mut(len);
    *workspace = rest;
    taken
}

/// What earlier rows of a sequence have left; `None`: it has none.
fn left_before<'c>(
    shape: &LinearShape<'_>,
    carried: Option<&'c [f32]>,
    sequence: usize,
) -> Option<&'c [f32]> {
    let has_before = shape.batch.positions_before(sequence) > 0;
    let len = shape.heads.carried();
    carried.filter(|_| has_before).map(|carried| &carried[sequence * len..][..len])
}

/// What all heads read.
#[derive(Clone, Copy)]
struct Inputs<'i> {
    heads: LinearHeads,
    /// Queries, keys and values. (R, M).
    x: &'i [f32],
    /// Rows with the columns of β and a, behind M columns.
    projected: &'i [f32],
    /// For each row, the rows before it in its document.
    before: &'i [usize],
    log: &'i [f32],
    bias: &'i [f32],
}

/// What a head of values reads of the rows of one sequence.
#[derive(Clone, Copy)]
struct Head<'h> {
    heads: LinearHeads,
    number: usize,
    x: &'h [f32],
    projected: &'h [f32],
    /// Columns of `projected`.
    width: usize,
    before: &'h [usize],
    /// A.
    rate: f32,
    bias: f32,
}

/// The factors of a position.
struct Factors {
    alpha: f32,
    beta: f32,
    /// a + bias.
    step: f32,
    /// softplus(a + bias).
    softplus: f32,
}

impl<'i> Inputs<'i> {
    /// A head of values, on the rows of a sequence.
    fn head(&self, number: usize, rows: Range<usize>) -> Head<'i> {
        let Inputs { heads, x, projected, before, log, bias } = *self;
        let width = projected.len() / before.len();
        let mixed = heads.mixed();
        Head {
            heads,
            number,
            x: &x[rows.start * mixed..rows.end * mixed],
            projected: &projected[rows.start * width..rows.end * width],
            width,
            before: &before[rows],
            rate: exp(log[number]),
            bias: bias[number],
        }
    }
}

impl<'h> Head<'h> {
    fn positions(&self) -> usize {
        self.before.len()
    }

    /// The first column of the head's queries in a row of `x`. Keys lie `keys()` behind them.
    fn first_query(&self) -> usize {
        self.number * self.heads.key_heads / self.heads.value_heads * self.heads.key_size
    }

    /// The query and the key of a position, as the state sees them.
    #[inline(always)]
    fn query_and_key(&self, at: usize, [q, k]: [&mut [f32]; 2]) {
        let x = &self.x[at * self.heads.mixed() + self.first_query()..];
        let size = self.heads.key_size;
        let scale = 1.0 / (size as f32).sqrt();
        for (to, x, scale) in [(q, x, scale), (k, &x[self.heads.keys()..], 1.0)] {
            let x = &x[..size];
            let factor = scale * inverse_length(x);
            to.iter_mut().zip(x).for_each(|(to, x)| *to = x * factor);
        }
    }

    fn values(&self, at: usize) -> &'h [f32] {
        let LinearHeads { value_size, .. } = self.heads;
        let first = 2 * self.heads.keys() + self.number * value_size;
        &self.x[at * self.heads.mixed() + first..][..value_size]
    }

    #[inline(always)]
    fn factors(&self, at: usize) -> Factors {
        let row = &self.projected[at * self.width + self.heads.mixed()..];
        let step = row[self.heads.value_heads + self.number] + self.bias;
        // As PyTorch, which is linear from here on.
        let softplus = if step > 20.0 { step } else { exp(step).ln_1p() };
        let alpha = exp(-self.rate * softplus);
        Factors { alpha, beta: sigmoid(row[self.number]), step, softplus }
    }
}

/// 1 ÷ the length of a query or key.
#[inline(always)]
fn inverse_length(x: &[f32]) -> f32 {
    1.0 / (dot(x, x) + EPSILON).sqrt()
}

/// Some channels of a head of values on all positions of a sequence: their outputs.
struct Task<'t> {
    head: Head<'t>,
    /// The first channel of the head.
    first: usize,
    /// (T, channels).
    y: &'t mut [f32],
    /// The state, (channels, D_k), a query and a key.
    state: &'t mut [f32],
    /// The state in front of the rows; `None`: there are no earlier rows.
    before: Option<&'t [f32]>,
    /// The place for the state behind the rows, if it has one.
    behind: &'t mut [f32],
}

impl Task<'_> {
    #[inline(always)]
    fn run(self) {
        let Task { head, first, y, state, before, behind } = self;
        let size = head.heads.key_size;
        let channels = state.len() / size - 2;
        let (state, query_and_key) = state.split_at_mut(channels * size);
        let (q, k) = query_and_key.split_at_mut(size);
        if let Some(before) = before {
            state.copy_from_slice(before);
        }
        for (at, y) in y.chunks_exact_mut(channels).enumerate() {
            if head.before[at] == 0 {
                state.fill(0.0);
            }
            head.query_and_key(at, [q, k]);
            let Factors { alpha, beta, .. } = head.factors(at);
            let values = &head.values(at)[first..][..channels];
            for ((y, v), state) in y.iter_mut().zip(values).zip(state.chunks_exact_mut(size)) {
                let delta = beta * (v - alpha * dot(state, k));
                state.iter_mut().zip(&*k).for_each(|(s, k)| *s = alpha * *s + delta * k);
                *y = dot(state, q);
            }
        }
        if !behind.is_empty() {
            behind.copy_from_slice(state);
        }
    }
}

/// The first channels of the tasks of a head, and their number.
fn channels_of(heads: LinearHeads) -> impl Iterator<Item = (usize, usize)> + Clone {
    let size = heads.value_size;
    (0..size).step_by(CHANNELS).map(move |first| (first, CHANNELS.min(size - first)))
}

/// Workspace of [`delta_rule`], without the outputs.
fn states(heads: LinearHeads, sequences: usize) -> usize {
    let of_head: usize = channels_of(heads).map(|(_, count)| (count + 2) * heads.key_size).sum();
    sequences * heads.value_heads * of_head
}

/// What passes along the sequences. (B, S).
struct Passed<'p> {
    before: Option<&'p [f32]>,
    /// Empty: there are no later rows.
    behind: &'p mut [f32],
}

/// Runs the delta rule on sequences. `y` gets the outputs of each sequence: those of a head lie one
/// behind the other, and in one those of a task.
fn delta_rule(
    level: Level,
    inputs: &Inputs<'_>,
    shape: &LinearShape<'_>,
    Passed { before, mut behind }: Passed<'_>,
    mut y: &mut [f32],
    mut workspace: &mut [f32],
) {
    let heads = inputs.heads;
    let size = heads.key_size;
    let has_behind = !behind.is_empty();
    let mut next = |len: usize| take(&mut behind, if has_behind { len } else { 0 });
    let mut tasks = Vec::new();
    for sequence in 0..shape.batch.sequences() {
        let before = left_before(shape, before, sequence).map(|left| &left[heads.inputs()..]);
        next(heads.inputs());
        for number in 0..heads.value_heads {
            let head = inputs.head(number, shape.batch.sequence(sequence));
            for (first, channels) in channels_of(heads) {
                let y = take(&mut y, head.positions() * channels);
                let state = take(&mut workspace, (channels + 2) * size);
                let at = (number * heads.value_size + first) * size;
                let before = before.map(|states| &states[at..][..channels * size]);
                let behind = next(channels * size);
                tasks.push(Task { head, first, y, state, before, behind });
            }
        }
    }
    tasks.into_par_iter().for_each(|task| {
        level.run(
            #[inline(always)]
            || task.run(),
        );
    });
}

/// Copies a position's outputs, from where [`delta_rule`] has put those of its sequence, to a row.
fn copy_outputs(heads: LinearHeads, y: &mut [f32], from: &[f32], at: usize) {
    let positions = from.len() / heads.values();
    for (number, y) in y.chunks_exact_mut(heads.value_size).enumerate() {
        for (first, channels) in channels_of(heads) {
            let before = (number * heads.value_size + first) * positions;
            y[first..first + channels].copy_from_slice(&from[before + at * channels..][..channels]);
        }
    }
}

impl ComputeIn for DeltaRule<'_> {
    fn workspace(&self) -> usize {
        let heads = self.shape.heads;
        self.y.rows * heads.values() + states(heads, self.shape.batch.sequences())
    }

    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let batch = self.shape.batch;
        let heads = self.shape.heads;
        let before = &rows_before(&batch);
        let [x, projected] = [self.x, self.projected].map(|view| call.read(view));
        let [log, bias] = [self.decay.log, self.decay.bias].map(|view| call.read(view));
        let inputs = Inputs { heads, x, projected, before, log, bias };
        let sequences: Vec<_> = (0..batch.sequences()).map(|one| batch.sequence(one)).collect();
        let width = heads.values();
        let (outputs, rest) = workspace.split_at_mut(self.y.rows * width);
        let passed = Passed {
            before: call.read_if(self.carried.before),
            behind: call.write_if(self.carried.behind).unwrap_or_default(),
        };
        delta_rule(level, &inputs, &self.shape, passed, outputs, rest);
        let outputs = &*outputs;
        call.write(self.y).par_chunks_mut(width).enumerate().for_each(|(row, y)| {
            let (sequence, at) = batch.place(row);
            let rows = &sequences[sequence];
            copy_outputs(heads, y, &outputs[rows.start * width..rows.end * width], at);
        });
    }
}
