//! Softmax cross entropy over tiles of the vocabulary, with a running log-sum-exp.
//!
//! Each tile is added to a labelled position's statistics (maximum, sum, target's logit, label).
//! Positions without a label are skipped. Logits exist for 256 positions and one tile at a time.

use rayon::prelude::*;

use super::math::{exp, largest, limit, limit_slope, sum_of};
use super::views::{Call, ComputeIn, CpuKernels};
use crate::kernels::{
    LogitForm, Logits, RunsIn, STATISTICS, Score, ScoreBackward, Smoothing, label_of,
};
use crate::product::{Elements, Matrix, Product, Start};
use crate::simd::Level;
use crate::tensor::{Scratch, View};

/// Labelled positions that are scored at once.
const CHUNK: usize = 256;

impl ComputeIn for Score {
    fn workspace(&self) -> usize {
        CHUNK * (self.h.columns + self.w.rows)
    }

    fn packed(&self) -> Vec<View> {
        vec![self.h, self.w]
    }

    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let c = self.h.columns;
        let out = call.write(self.out);
        out.copy_from_slice(call.read(self.statistics));
        let h = call.elements(self.h);
        let head = Head::of(call, self.w, self.bias, self.form);
        let (gathered, logits) = workspace.split_at_mut(CHUNK * c);
        let mut from = 0;
        let mut rows = [0; CHUNK];
        loop {
            let count = labelled(out, &mut from, &mut rows);
            if count == 0 {
                return;
            }
            let rows = &rows[..count];
            let gathered = gather(gathered, h, rows, c);
            let logits = &mut logits[..count * self.w.rows];
            head.logits(level, logits, gathered, count);
            add_to_statistics(level, out, logits, rows, self.first, self.smoothing);
        }
    }
}

impl ComputeIn for Logits {
    fn workspace(&self) -> usize {
        CHUNK * self.h.columns
    }

    fn packed(&self) -> Vec<View> {
        vec![self.h, self.w]
    }

    fn compute(&self, level: Level, call: &Call<'_>, gathered: &mut [f32]) {
        let Logits { y, w, .. } = *self;
        let c = self.h.columns;
        let h = call.elements(self.h);
        let head = Head::of(call, w, self.bias, self.form);
        let mut from = 0;
        let mut rows = [0; CHUNK];
        for y in call.write(y).chunks_mut(CHUNK * w.rows) {
            let count = labelled(call.read(self.statistics), &mut from, &mut rows);
            assert_eq!(count * w.rows, y.len(), "a row of logits for each labelled position");
            let gathered = gather(gathered, h, &rows[..count], c);
            head.logits(level, y, gathered, count);
        }
    }
}

impl RunsIn<ScoreBackward<'_>> for CpuKernels<'_> {
    fn run_in(&self, op: &ScoreBackward<'_>, scratch: &Scratch<'_>) {
        self.tile_backward(op, None, scratch);
    }
}

impl CpuKernels<'_> {
    /// The last tile's score and its backward. The logits are computed once for both.
    pub(super) fn score_last_tile(
        &self,
        score: &Score,
        op: &ScoreBackward<'_>,
        scratch: &Scratch<'_>,
    ) {
        assert_eq!(score.out, op.statistics, "the backward reads what the score writes");
        let before = ScoreBackward { statistics: score.statistics, ..*op };
        self.tile_backward(&before, Some(score.out), scratch);
    }

    /// A tile's backward. With `completed`, the tile is first added to the statistics there.
    fn tile_backward(
        &self,
        op: &ScoreBackward<'_>,
        completed: Option<View>,
        scratch: &Scratch<'_>,
    ) {
        let level = self.level;
        let c = op.h.columns;
        let v = op.w.rows;
        let scratch = scratch.nested();
        let memory = scratch.take_floats(1, CHUNK * (2 * c + v));
        let workspace = [Some(memory), completed];
        let workspace = workspace.into_iter().flatten();
        let Some(call) = self.call_in(op, workspace, &[op.h, op.w]) else { return };
        let dh = call.write(op.dh);
        match op.dh_before {
            Some(before) => dh.copy_from_slice(call.read(before)),
            None => dh.fill(0.0),
        }
        let known = call.read(op.statistics);
        let mut completed = call.write_if(completed);
        if let Some(completed) = &mut completed {
            completed.copy_from_slice(known);
        }
        let mut gradients = [op.dw, op.dbias].map(|view| call.write_if(view));
        let head = Head::of(&call, op.w, op.bias, op.form);
        let (gathered, workspace) = call.write(memory).split_at_mut(CHUNK * c);
        let (moved, logits) = workspace.split_at_mut(CHUNK * c);
        let mut from = 0;
        let mut rows = [0; CHUNK];
        let mut accumulate = op.accumulate;
        loop {
            let count = labelled(completed.as_deref().unwrap_or(known), &mut from, &mut rows);
            if count == 0 {
                break;
            }
            let rows = &rows[..count];
            let gathered = gather(gathered, call.elements(op.h), rows, c);
            let logits = &mut logits[..count * v];
            head.logits(level, logits, gathered, count);
            if let Some(completed) = &mut completed {
                add_to_statistics(level, completed, logits, rows, op.first, op.smoothing);
            }
            slopes(level, logits, completed.as_deref().unwrap_or(known), rows, op);
            let moved = &mut moved[..count * c];
            let d = Matrix::rows(logits, v);
            let b = Matrix::rows_of(head.w, c);
            let start = Start::Zero;
            Product { a: d, b, rows: count, depth: v, columns: c, start }.run(level, moved);
            for (moved, &row) in moved.chunks_exact(c).zip(rows) {
                dh[row * c..][..c].iter_mut().zip(moved).for_each(|(dh, moved)| *dh += moved);
            }
            let [dw, dbias] = &mut gradients;
            if let Some(dw) = dw {
                let a = d.transposed();
                let b = Matrix::rows_of(gathered, c);
                let start = Start::accumulate(accumulate);
                Product { a, b, rows: v, depth: count, columns: c, start }.run(level, dw);
            }
            if let Some(dbias) = dbias {
                add_rows(dbias, logits, accumulate);
            }
            accumulate = true;
        }
        if !accumulate {
            gradients.into_iter().flatten().for_each(|gradient| gradient.fill(0.0));
        }
    }
}

/// Collects the next labelled rows from `from` on, at most [`CHUNK`], and returns their number.
fn labelled(statistics: &[f32], from: &mut usize, rows: &mut [usize; CHUNK]) -> usize {
    let mut count = 0;
    while *from * STATISTICS < statistics.len() && count < CHUNK {
        if label_of(&statistics[*from * STATISTICS..]) >= 0 {
            rows[count] = *from;
            count += 1;
        }
        *from += 1;
    }
    count
}

/// Copies some rows of h, one behind the other.
fn gather<'t>(to: &'t mut [f32], h: Elements<'_>, rows: &[usize], channels: usize) -> Elements<'t> {
    fn copy<T: Copy>(to: &mut [T], h: &[T], rows: &[usize], channels: usize) {
        for (to, &row) in to.chunks_exact_mut(channels).zip(rows) {
            to.copy_from_slice(&h[row * channels..][..channels]);
        }
    }
    let len = rows.len() * channels;
    match h {
        Elements::Floats(h) => {
            copy(to, h, rows, channels);
            Elements::Floats(&to[..len])
        }
        Elements::Bf16(h) => {
            let to = bytemuck::cast_slice_mut(to);
            copy(to, h, rows, channels);
            Elements::Bf16(&to[..len])
        }
        Elements::F16(h) => {
            let to = bytemuck::cast_slice_mut(to);
            copy(to, h, rows, channels);
            Elements::F16(&to[..len])
        }
    }
}

/// A tile of the head.
#[derive(Clone, Copy)]
struct Head<'a> {
    /// (V, C).
    w: Elements<'a>,
    /// (V).
    bias: Option<&'a [f32]>,
    channels: usize,
    form: LogitForm,
}

impl<'a> Head<'a> {
    fn of(call: &'a Call<'_>, w: View, bias: Option<View>, form: LogitForm) -> Head<'a> {
        let bias = call.read_if(bias);
        Head { w: call.elements(w), bias, channels: w.columns, form }
    }

    /// Computes the logits of rows of h. h: (rows, C); logits: (rows, V).
    fn logits(self, level: Level, logits: &mut [f32], h: Elements<'_>, rows: usize) {
        let depth = self.channels;
        let columns = self.w.len() / depth;
        let a = Matrix::rows_of(h, depth);
        let b = Matrix::rows_of(self.w, depth).transposed();
        let start = self.bias.map_or(Start::Zero, Start::Bias);
        Product { a, b, rows, depth, columns, start }.run(level, logits);
        let LogitForm { scale, cap } = self.form;
        if self.form != LogitForm::PLAIN {
            logits.par_chunks_mut(columns).for_each(|row| {
                level.run(
                    #[inline(always)]
                    || {
                        row.iter_mut().for_each(|logit| *logit *= scale);
                        limit(row, cap);
                    },
                );
            });
        }
    }
}

/// Adds the logits of some rows to their statistics.
fn add_to_statistics(
    level: Level,
    statistics: &mut [f32],
    logits: &[f32],
    rows: &[usize],
    first: usize,
    smoothing: Smoothing,
) {
    let v = logits.len() / rows.len();
    let before = &*statistics;
    let mut added = [[0.0; 3]; CHUNK];
    let tasks = logits.par_chunks(v).zip(&mut added[..rows.len()]).zip(rows);
    tasks.for_each(|((logits, added), &row)| {
        let before = &before[row * STATISTICS..][..STATISTICS];
        let target = (label_of(before) as usize).checked_sub(first).filter(|&at| at < v);
        let mut target = match smoothing {
            Smoothing::NONE => target.map_or(before[2], |at| logits[at]),
            _ => before[2] + target.map_or(0.0, |at| smoothing.own * logits[at]),
        };
        level.run(
            #[inline(always)]
            || {
                if smoothing != Smoothing::NONE {
                    target += smoothing.each * sum_of(logits, |logit| logit);
                }
                let most = before[0].max(largest(logits));
                let sum = sum_of(logits, |logit| exp(logit - most));
                *added = [most, before[1] * exp(before[0] - most) + sum, target];
            },
        );
    });
    for (added, row) in added.iter().zip(rows) {
        statistics[row * STATISTICS..][..3].copy_from_slice(added);
    }
}

/// Replaces the logits of some rows by the loss's gradient, times the scale.
fn slopes(
    level: Level,
    logits: &mut [f32],
    statistics: &[f32],
    rows: &[usize],
    op: &ScoreBackward<'_>,
) {
    let ScoreBackward { loss, weighed, scale, first, form, .. } = *op;
    let smoothing = if weighed { Smoothing::NONE } else { op.smoothing };
    let v = op.w.rows;
    logits.par_chunks_mut(v).zip(rows).for_each(|(logits, &row)| {
        let of_row = &statistics[row * STATISTICS..][..STATISTICS];
        let lse = of_row[0] + of_row[1].ln();
        let label = label_of(of_row) as usize;
        let [of_lse, of_target] = match weighed {
            true => [1.0, -1.0].map(|slope| scale * of_row[2] * slope),
            false => loss.slopes(lse, of_row[2]).map(|slope| scale * slope),
        };
        let target = label.checked_sub(first).filter(|&at| at < v);
        let of_form = |logit: f32| form.scale * form.cap.map_or(1.0, |cap| limit_slope(logit, cap));
        let slope_of_target = target.map_or(1.0, |at| of_form(logits[at]));
        level.run(
            #[inline(always)]
            || {
                let each = of_target * smoothing.each;
                if form != LogitForm::PLAIN {
                    return logits.iter_mut().for_each(|logit| {
                        *logit = of_form(*logit) * (of_lse * exp(*logit - lse) + each);
                    });
                }
                logits.iter_mut().for_each(|logit| *logit = of_lse * exp(*logit - lse));
                if smoothing != Smoothing::NONE {
                    logits.iter_mut().for_each(|logit| *logit += each);
                }
            },
        );
        if let Some(at) = target {
            logits[at] += slope_of_target * (of_target * smoothing.own);
        }
    });
}

/// sum (+)= Σ of the rows of x, in order.
fn add_rows(sum: &mut [f32], x: &[f32], accumulate: bool) {
    if !accumulate {
        sum.fill(0.0);
    }
    for row in x.chunks_exact(sum.len()) {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
}

#[cfg(test)]
mod tests;
