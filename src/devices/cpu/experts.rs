//! The router of a mixture of experts, and the rows that its experts read and add to.
//!
//! Logits are products, so the bits of a row do not depend on the other rows or on threads.

use std::slice;

use rayon::prelude::*;

use super::activation::sigmoid;
use super::math::{dot, exp, largest, sum_of};
use super::routing::{add_slopes, expert_of, is_dropped};
use super::views::{Call, Compute, ComputeIn, CpuKernels};
use crate::kernels::{
    BiasRows, CombineRows, Dispatch, GateRows, GateRowsBackward, GatherRows, Route, RouteBackward,
    RowDots, Runs, SumRows, WeighRows,
};
use crate::product::{Matrix, Product, Start};
use crate::simd::Level;
use crate::tensor::{Dtype, View};

/// Rows of one parallel task.
const ROWS: usize = 16;

/// The integer in the bits of a float.
pub(super) fn integer(float: f32) -> usize {
    float.to_bits() as usize
}

impl Compute for Route {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Route { chosen, h, w, per_token, normalised, .. } = *self;
        let [columns, depth] = w.shape();
        let logits = call.write(self.logits);
        let a = Matrix::rows(call.read(h), depth);
        let b = Matrix::rows(call.read(w), depth).transposed();
        Product { a, b, rows: h.rows, depth, columns, start: Start::Zero }.run(level, logits);
        if let Some(bias) = call.read_if(self.bias) {
            let add = |row: &mut [f32]| row.iter_mut().zip(bias).for_each(|(l, bias)| *l += bias);
            logits.chunks_mut(columns).for_each(add);
        }
        let rows = call.write(chosen).par_chunks_mut(2 * per_token).zip(logits.par_chunks(columns));
        rows.for_each(|(chosen, logits)| {
            let (experts, weights) = chosen.split_at_mut(per_token);
            choose(bytemuck::cast_slice_mut(experts), logits);
            for (weight, expert) in weights.iter_mut().zip(&*experts) {
                *weight = logits[integer(*expert)];
            }
            level.run(
                #[inline(always)]
                || softmax(weights, logits, normalised),
            );
        });
    }
}

/// The order of logits. NaN is the smallest, and equals itself.
pub(super) fn is_larger(a: f32, b: f32) -> bool {
    a > b || b.is_nan() && !a.is_nan()
}

/// Writes the experts of the largest logits, in ascending order.
fn choose(experts: &mut [u32], logits: &[f32]) {
    for (expert, &logit) in logits.iter().enumerate() {
        // They stand from the best to the worst. An equal one that came earlier stays before it.
        let known = experts.len().min(expert);
        let before = |&one: &u32| !is_larger(logit, logits[one as usize]);
        let at = experts[..known].iter().rposition(before).map_or(0, |at| at + 1);
        if let Some(behind) = experts[..].get_mut(at..).filter(|behind| !behind.is_empty()) {
            behind.rotate_right(1);
            behind[0] = expert as u32;
        }
    }
    experts.sort_unstable();
}

/// Replaces the chosen logits by their weights.
#[inline(always)]
fn softmax(chosen: &mut [f32], logits: &[f32], normalised: bool) {
    let most = largest(chosen);
    let is_number = logits.iter().fold(true, |all, logit| all & !logit.is_nan());
    let total = match normalised {
        _ if !is_number => f32::NAN,
        true => sum_of(chosen, |logit| exp(logit - most)),
        false => sum_of(logits, |logit| exp(logit - most)),
    };
    chosen.iter_mut().for_each(|chosen| *chosen = exp(*chosen - most) / total);
}

impl ComputeIn for RouteBackward<'_> {
    fn workspace(&self) -> usize {
        self.logits.len()
    }

    fn compute(&self, level: Level, call: &Call<'_>, dl: &mut [f32]) {
        let RouteBackward { h, w, normalised, .. } = *self;
        let [experts, channels] = w.shape();
        let k = self.dchosen.columns;
        let chosen = call.read(self.chosen).par_chunks(2 * k);
        let chosen = chosen.zip(call.read(self.dchosen).par_chunks(k));
        let all = call.read(self.logits);
        let logits = all.par_chunks(experts);
        dl.par_chunks_mut(experts).zip(logits).zip(chosen).for_each(|((dl, logits), chosen)| {
            let (chosen, dweights) = chosen;
            let (chosen, weights) = chosen.split_at(k);
            level.run(
                #[inline(always)]
                || {
                    let mean = dot(weights, dweights);
                    dl.fill(0.0);
                    if !normalised {
                        let most = largest(logits);
                        let total = sum_of(logits, |logit| exp(logit - most));
                        let probabilities = logits.iter().map(|logit| exp(logit - most) / total);
                        dl.iter_mut().zip(probabilities).for_each(|(dl, p)| *dl = p * -mean);
                    }
                    for ((expert, w), dw) in chosen.iter().zip(weights).zip(dweights) {
                        dl[expert_of(*expert)] = w * (dw - mean);
                    }
                },
            );
        });
        if let Some(slopes) = self.slopes {
            add_slopes(level, call, slopes, all, dl);
        }
        let rows = h.rows;
        let d = Matrix::rows(dl, experts);
        let b = Matrix::rows(call.read(w), channels);
        let product = Product { a: d, b, rows, depth: experts, columns: channels, start: Start::C };
        product.run(level, call.write(self.dh));
        if let Some(dbias) = call.write_if(self.dbias) {
            if !self.accumulate {
                dbias.fill(0.0);
            }
            let rows = dl.chunks(experts);
            rows.for_each(|dl| dbias.iter_mut().zip(dl).for_each(|(sum, dl)| *sum += dl));
        }
        let Some(dw) = call.write_if(self.dw) else { return };
        if rows > 0 {
            let a = d.transposed();
            let b = Matrix::rows(call.read(h), channels);
            let start = Start::accumulate(self.accumulate);
            let product = Product { a, b, rows: experts, depth: rows, columns: channels, start };
            product.run(level, dw);
        } else if !self.accumulate {
            dw.fill(0.0);
        }
    }
}

impl CpuKernels<'_> {
    /// Sorts assignments by counting them. Returns the rows of each expert; without memory: all.
    pub(super) fn sort_assignments(&self, op: &Dispatch) -> Vec<usize> {
        let Dispatch { rows, places, chosen, experts } = *op;
        let Some(call) = self.call(op) else { return vec![chosen.rows; experts] };
        let k = chosen.columns / 2;
        let chosen = call.read(chosen).chunks_exact(2 * k);
        let assigned = chosen.flat_map(|chosen| &chosen[..k]).enumerate();
        let assigned = assigned.filter(|(_, expert)| !is_dropped(**expert));
        let assigned = assigned.map(|(place, expert)| (place, integer(*expert)));
        let mut counts = vec![0; experts];
        assigned.clone().for_each(|(_, expert)| counts[expert] += 1);
        let mut end = 0;
        let begins = counts.iter().map(|count| {
            end += count;
            end - count
        });
        let mut next: Vec<usize> = begins.collect();
        let rows = call.write(rows);
        let places = call.write(places);
        for (place, expert) in assigned {
            let at = next[expert];
            next[expert] += 1;
            rows[at] = f32::from_bits((place / k) as u32);
            places[at] = f32::from_bits(place as u32);
        }
        counts
    }
}

impl CpuKernels<'_> {
    /// Adds the rows of several experts to one sum. Those of 16 bits are added expert by expert,
    /// because the memory to widen elements is that of one operation.
    pub(super) fn combine_in_order(&self, ops: &[CombineRows]) {
        let Some(&CombineRows { y, .. }) = ops.first() else { return };
        if ops.iter().any(|op| op.y != y || op.x.dtype != Dtype::F32) {
            return ops.iter().for_each(|op| self.run(op));
        }
        let Some(call) = self.call_all(ops) else { return };
        combine(self.level, ops, &call);
    }
}

impl Runs<GatherRows> for CpuKernels<'_> {
    /// Copies rows of 16-bit elements as floats where that is possible, so that the rows that this
    /// expert does not read are not widened.
    fn run(&self, op: &GatherRows) {
        let [y, x] = in_floats([op.y, op.x]).unwrap_or([op.y, op.x]);
        let rows = op.rows;
        let Some(call) = self.call(&GatherRows { y, x, rows }) else { return };
        let channels = x.columns;
        let x = call.read(x);
        let to = call.write(y).par_chunks_mut(channels).zip(call.read(rows)).with_min_len(ROWS);
        to.for_each(|(y, row)| y.copy_from_slice(&x[integer(*row) * channels..][..channels]));
    }
}

/// The memory of these views as floats, if each row is made of whole floats.
fn in_floats(views: [View; 2]) -> Option<[View; 2]> {
    let is_whole = |view: View| {
        let size = view.dtype.size();
        (view.at * size).is_multiple_of(4) && (view.columns * size).is_multiple_of(4)
    };
    let of = |view: View| {
        let parts = Dtype::F32.size() / view.dtype.size();
        View { at: view.at / parts, columns: view.columns / parts, dtype: Dtype::F32, ..view }
    };
    views.into_iter().all(is_whole).then(|| views.map(of))
}

impl Compute for CombineRows {
    fn compute(&self, level: Level, call: &Call<'_>) {
        combine(level, slice::from_ref(self), call);
    }
}

/// Adds the rows of experts to one sum, in the order of the experts, in a pass over the sum.
fn combine(level: Level, experts: &[CombineRows], call: &Call<'_>) {
    let y = experts[0].y;
    let channels = y.columns;
    let experts: Vec<_> = experts.iter().map(|op| CombinedRows::new(op, call)).collect();
    let tasks = call.write(y).par_chunks_mut(ROWS * channels).enumerate();
    tasks.for_each(|(task, y)| {
        let first = task * ROWS;
        level.run(
            #[inline(always)]
            || experts.iter().for_each(|expert| expert.add(y, channels, first)),
        );
    });
}

/// The rows of one expert.
struct CombinedRows<'c> {
    x: &'c [f32],
    rows: Option<&'c [f32]>,
    /// Places and choices.
    weights: Option<[&'c [f32]; 2]>,
    per_token: usize,
}

impl<'c> CombinedRows<'c> {
    fn new(op: &CombineRows, call: &'c Call<'_>) -> CombinedRows<'c> {
        let rows: Option<&[f32]> = op.rows.map(|rows| call.read(rows));
        let is_sorted = |rows: &[f32]| rows.is_sorted_by(|a, b| integer(*a) < integer(*b));
        assert!(rows.is_none_or(is_sorted), "the rows of one expert");
        let weights = op.weights.map(|of| [call.read(of.places), call.read(of.chosen)]);
        let per_token = op.weights.map_or(0, |of| of.chosen.columns / 2);
        CombinedRows { x: call.read(op.x), rows, weights, per_token }
    }

    /// Adds to the rows of `y`, which begin with the row `first`.
    #[inline(always)]
    fn add(&self, y: &mut [f32], channels: usize, first: usize) {
        let CombinedRows { x, rows, weights, per_token } = *self;
        let row = |at: usize| rows.map_or(at, |rows| integer(rows[at]));
        // The first place among the rows that is not before this row.
        let place = |row: usize| {
            rows.map_or(row, |rows| rows.partition_point(|other| integer(*other) < row))
        };
        for at in place(first)..place(first + y.len() / channels) {
            let w = weights
                .map_or(1.0, |[places, chosen]| weight(chosen, per_token, integer(places[at])));
            let y = &mut y[(row(at) - first) * channels..][..channels];
            let x = &x[at * channels..][..channels];
            y.iter_mut().zip(x).for_each(|(y, x)| *y += w * x);
        }
    }
}

/// The weight at a place of the choice.
fn weight(chosen: &[f32], k: usize, place: usize) -> f32 {
    chosen[place / k * 2 * k + k + place % k]
}

impl Compute for WeighRows {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let WeighRows { y, x, weights } = *self;
        let channels = x.columns;
        let chosen = call.read(weights.chosen);
        let k = weights.chosen.columns / 2;
        let x = call.read(x).par_chunks(channels);
        let rows = call.write(y).par_chunks_mut(channels).zip(x).zip(call.read(weights.places));
        rows.with_min_len(ROWS).for_each(|((y, x), place)| {
            let w = weight(chosen, k, integer(*place));
            level.run(
                #[inline(always)]
                || y.iter_mut().zip(x).for_each(|(y, x)| *y = w * x),
            );
        });
    }
}

impl Compute for RowDots {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let channels = self.x.columns;
        let x = call.read(self.x).par_chunks(channels);
        let rows = x.zip(call.read(self.y).par_chunks(channels)).with_min_len(ROWS);
        let dots = rows.map(|(x, y)| {
            level.run(
                #[inline(always)]
                || dot(x, y),
            )
        });
        let mut dots: Vec<f32> = dots.collect();
        if let Some(BiasRows { dy, bias }) = self.bias {
            let rows = call.read(dy).par_chunks(dy.columns).with_min_len(ROWS);
            let bias = call.read(bias);
            let add = |(sum, dy): (&mut f32, &[f32])| {
                level.run(
                    #[inline(always)]
                    || *sum += dot(dy, bias),
                );
            };
            dots.par_iter_mut().zip(rows).for_each(add);
        }
        let out = call.write(self.out);
        for (dot, place) in dots.into_iter().zip(call.read(self.places)) {
            out[integer(*place)] = dot;
        }
    }
}

impl Compute for SumRows {
    /// Columns are summed side by side, each over the rows in order.
    fn compute(&self, level: Level, call: &Call<'_>) {
        /// Columns of one parallel task.
        const COLUMNS: usize = 256;
        let channels = self.x.columns;
        let chosen = call.read(self.weights.chosen);
        let k = self.weights.chosen.columns / 2;
        let x = call.read(self.x);
        let places = call.read(self.weights.places);
        let tasks = call.write(self.y).par_chunks_mut(COLUMNS).enumerate();
        tasks.for_each(|(task, y)| {
            level.run(
                #[inline(always)]
                || {
                    if !self.accumulate {
                        y.fill(0.0);
                    }
                    for (row, place) in places.iter().enumerate() {
                        let w = weight(chosen, k, integer(*place));
                        let x = &x[row * channels + task * COLUMNS..][..y.len()];
                        y.iter_mut().zip(x).for_each(|(y, x)| *y += w * x);
                    }
                },
            );
        });
    }
}

impl Compute for GateRows {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let channels = self.x.columns;
        let x = call.read(self.x).par_chunks(channels);
        let rows = call.write(self.y).par_chunks_mut(channels).zip(x).zip(call.read(self.gate));
        rows.with_min_len(ROWS).for_each(|((y, x), gate)| {
            level.run(
                #[inline(always)]
                || {
                    let s = sigmoid(*gate);
                    y.iter_mut().zip(x).for_each(|(y, x)| *y = s * x);
                },
            );
        });
    }
}

impl Compute for GateRowsBackward {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let channels = self.x.columns;
        let dy = call.read(self.dy).par_chunks(channels);
        let x = call.read(self.x).par_chunks(channels);
        let gates = call.write(self.dgate).par_iter_mut().zip(call.read(self.gate));
        let rows = call.write(self.dx).par_chunks_mut(channels).zip(dy.zip(x)).zip(gates);
        rows.with_min_len(ROWS).for_each(|((dx, dy_x), (dgate, gate))| {
            let (dy, x) = dy_x;
            level.run(
                #[inline(always)]
                || {
                    let s = sigmoid(*gate);
                    dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = s * dy);
                    *dgate = dot(dy, x) * s * (1.0 - s);
                },
            );
        });
    }
}

#[cfg(test)]
mod at_once;
#[cfg(test)]
mod tests;
