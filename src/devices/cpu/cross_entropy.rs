//! Softmax cross entropy over tiles of the vocabulary, with a running log-sum-exp.
//!
//! Each tile is added to a labelled position's statistics (maximum, sum, target's logit, label).
//! Positions without a label are skipped. Logits exist for 256 positions and one tile at a time.

use rayon::prelude::*;

use super::math::{exp, largest, sum_of};
use super::product::{Matrix, Product, Start};
use super::views::CpuKernels;
use crate::kernels::{
    Logits, Loss, RunsIn, STATISTICS, Score, ScoreBackward, ScoreSize, Smoothing, label_of,
};
use crate::simd::Level;
use crate::tensor::{Scratch, View};

/// Labelled positions that are scored at once.
const CHUNK: usize = 256;

impl RunsIn<Score> for CpuKernels<'_> {
    fn run_in(&self, op: &Score, scratch: &Scratch<'_>) {
        let Score { out, statistics, h, w, bias, smoothing, .. } = *op;
        let scratch = scratch.nested();
        let size = op.size();
        let memory = scratch.take_floats(1, forward_scratch(&size));
        let Some(call) = self.call_in(op, [memory]) else { return };
        let out = call.write(out);
        out.copy_from_slice(call.read(statistics));
        let head = Head { w: call.read(w), bias: call.read_if(bias) };
        forward(self.level, out, call.read(h), head, smoothing, &size, call.write(memory));
    }
}

impl RunsIn<Logits> for CpuKernels<'_> {
    fn run_in(&self, op: &Logits, scratch: &Scratch<'_>) {
        let Logits { y, statistics, h, w, bias } = *op;
        let scratch = scratch.nested();
        let size = op.size();
        let memory = scratch.take_floats(1, logits_scratch(&size));
        let Some(call) = self.call_in(op, [memory]) else { return };
        let y = call.write(y);
        let memory = call.write(memory);
        let head = Head { w: call.read(w), bias: call.read_if(bias) };
        labelled_logits(self.level, y, call.read(statistics), call.read(h), head, &size, memory);
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
        let ScoreBackward { dh, dw, dbias, dh_before, h, w, bias, loss, scale, smoothing, .. } =
            *op;
        let scratch = scratch.nested();
        let size = op.size();
        let memory = scratch.take_floats(1, backward_scratch(&size));
        let workspace = [Some(memory), completed];
        let Some(call) = self.call_in(op, workspace.into_iter().flatten()) else { return };
        let dh = call.write(dh);
        match dh_before {
            Some(before) => dh.copy_from_slice(call.read(before)),
            None => dh.fill(0.0),
        }
        let known = call.read(op.statistics);
        let statistics = match call.write_if(completed) {
            None => Statistics::Complete(known),
            Some(completed) => {
                completed.copy_from_slice(known);
                Statistics::BeforeLast(completed)
            }
        };
        let head = Head { w: call.read(w), bias: call.read_if(bias) };
        let inputs = Inputs { statistics, h: call.read(h), head, loss, smoothing, scale };
        let gradients = Gradients { dh, dw: call.write_if(dw), dbias: call.write_if(dbias) };
        backward(self.level, gradients, inputs, &size, op.accumulate, call.write(memory));
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
fn gather(to: &mut [f32], h: &[f32], rows: &[usize], channels: usize) {
    for (to, &row) in to.chunks_exact_mut(channels).zip(rows) {
        to.copy_from_slice(&h[row * channels..][..channels]);
    }
}

/// A tile of the head.
#[derive(Clone, Copy)]
struct Head<'a> {
    /// (V, C).
    w: &'a [f32],
    /// (V).
    bias: Option<&'a [f32]>,
}

/// Computes the logits of rows of h. h: (rows, C); logits: (rows, V).
fn logits_of(
    level: Level,
    logits: &mut [f32],
    h: &[f32],
    head: Head<'_>,
    rows: usize,
    size: &ScoreSize,
) {
    let depth = size.channels;
    let columns = size.tile;
    let a = Matrix::rows(h, depth);
    let b = Matrix::rows(head.w, depth).transposed();
    let start = head.bias.map_or(Start::Zero, Start::Bias);
    Product { a, b, rows, depth, columns, start }.run(level, logits);
}

/// Floats of scratch that [`forward`] needs.
fn forward_scratch(size: &ScoreSize) -> usize {
    CHUNK * (size.channels + size.tile)
}

/// Adds the tile to the statistics in `out`.
fn forward(
    level: Level,
    out: &mut [f32],
    h: &[f32],
    head: Head<'_>,
    smoothing: Smoothing,
    size: &ScoreSize,
    scratch: &mut [f32],
) {
    let c = size.channels;
    let v = size.tile;
    let (gathered, logits) = scratch.split_at_mut(CHUNK * c);
    let mut from = 0;
    let mut rows = [0; CHUNK];
    loop {
        let count = labelled(out, &mut from, &mut rows);
        if count == 0 {
            return;
        }
        gather(gathered, h, &rows[..count], c);
        let logits = &mut logits[..count * v];
        logits_of(level, logits, &gathered[..count * c], head, count, size);
        add_to_statistics(level, out, logits, &rows[..count], size, smoothing);
    }
}

/// Adds the logits of some rows to their statistics.
fn add_to_statistics(
    level: Level,
    statistics: &mut [f32],
    logits: &[f32],
    rows: &[usize],
    size: &ScoreSize,
    smoothing: Smoothing,
) {
    let v = size.tile;
    let before = &*statistics;
    let mut added = [[0.0; 3]; CHUNK];
    let tasks = logits.par_chunks(v).zip(&mut added[..rows.len()]).zip(rows);
    tasks.for_each(|((logits, added), &row)| {
        let before = &before[row * STATISTICS..][..STATISTICS];
        let target = (label_of(before) as usize).checked_sub(size.first).filter(|&at| at < v);
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

/// Floats of scratch that [`labelled_logits`] needs.
fn logits_scratch(size: &ScoreSize) -> usize {
    CHUNK * size.channels
}

/// Logits of the labelled rows, in order. y: (labelled rows, V).
fn labelled_logits(
    level: Level,
    y: &mut [f32],
    statistics: &[f32],
    h: &[f32],
    head: Head<'_>,
    size: &ScoreSize,
    gathered: &mut [f32],
) {
    let mut from = 0;
    let mut rows = [0; CHUNK];
    for y in y.chunks_mut(CHUNK * size.tile) {
        let count = labelled(statistics, &mut from, &mut rows);
        assert_eq!(count * size.tile, y.len(), "a row of logits for each labelled position");
        gather(gathered, h, &rows[..count], size.channels);
        logits_of(level, y, &gathered[..count * size.channels], head, count, size);
    }
}

/// Floats of scratch that [`backward`] needs.
fn backward_scratch(size: &ScoreSize) -> usize {
    CHUNK * (2 * size.channels + size.tile)
}

/// The statistics of all rows.
enum Statistics<'a> {
    /// Over all tiles.
    Complete(&'a [f32]),
    /// Over all tiles but the last one, which the backward adds.
    BeforeLast(&'a mut [f32]),
}

impl Statistics<'_> {
    fn values(&self) -> &[f32] {
        match self {
            Statistics::Complete(values) => values,
            Statistics::BeforeLast(values) => values,
        }
    }
}

/// Inputs of the backward pass.
struct Inputs<'a> {
    statistics: Statistics<'a>,
    h: &'a [f32],
    head: Head<'a>,
    loss: &'a dyn Loss,
    smoothing: Smoothing,
    scale: f32,
}

/// Outputs of the backward pass.
struct Gradients<'a> {
    dh: &'a mut [f32],
    dw: Option<&'a mut [f32]>,
    dbias: Option<&'a mut [f32]>,
}

/// dh += scale d w, dw (+)= scale dᵀ h, with d the loss's gradient of the logits.
fn backward(
    level: Level,
    Gradients { dh, mut dw, mut dbias }: Gradients<'_>,
    Inputs { mut statistics, h, head, loss, smoothing, scale }: Inputs<'_>,
    size: &ScoreSize,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let c = size.channels;
    let v = size.tile;
    let (gathered, scratch) = scratch.split_at_mut(CHUNK * c);
    let (moved, scratch) = scratch.split_at_mut(CHUNK * c);
    let logits = &mut scratch[..CHUNK * v];
    let mut from = 0;
    let mut rows = [0; CHUNK];
    let mut accumulate = accumulate;
    loop {
        let count = labelled(statistics.values(), &mut from, &mut rows);
        if count == 0 {
            break;
        }
        gather(gathered, h, &rows[..count], c);
        let logits = &mut logits[..count * v];
        let h = Matrix::rows(&gathered[..count * c], c);
        logits_of(level, logits, h.data, head, count, size);
        if let Statistics::BeforeLast(statistics) = &mut statistics {
            add_to_statistics(level, statistics, logits, &rows[..count], size, smoothing);
        }
        let statistics = statistics.values();
        logits.par_chunks_mut(v).zip(&rows[..count]).for_each(|(logits, &row)| {
            let of_row = &statistics[row * STATISTICS..][..STATISTICS];
            let lse = of_row[0] + of_row[1].ln();
            let label = label_of(of_row) as usize;
            let [of_lse, of_target] = loss.slopes(lse, of_row[2]).map(|slope| scale * slope);
            level.run(
                #[inline(always)]
                || {
                    logits.iter_mut().for_each(|logit| *logit = of_lse * exp(*logit - lse));
                    if smoothing != Smoothing::NONE {
                        let each = of_target * smoothing.each;
                        logits.iter_mut().for_each(|logit| *logit += each);
                    }
                },
            );
            if let Some(at) = label.checked_sub(size.first).filter(|&at| at < v) {
                logits[at] += of_target * smoothing.own;
            }
        });
        let moved = &mut moved[..count * c];
        let d = Matrix::rows(logits, v);
        let w = Matrix::rows(head.w, c);
        let of_h = Product { a: d, b: w, rows: count, depth: v, columns: c, start: Start::Zero };
        of_h.run(level, moved);
        for (moved, &row) in moved.chunks_exact(c).zip(&rows[..count]) {
            dh[row * c..][..c].iter_mut().zip(moved).for_each(|(dh, moved)| *dh += moved);
        }
        if let Some(dw) = &mut dw {
            let a = d.transposed();
            let start = Start::accumulate(accumulate);
            Product { a, b: h, rows: v, depth: count, columns: c, start }.run(level, dw);
        }
        if let Some(dbias) = &mut dbias {
            add_rows(dbias, logits, accumulate);
        }
        accumulate = true;
    }
    if !accumulate {
        [dw, dbias].into_iter().flatten().for_each(|gradient| gradient.fill(0.0));
    }
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
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::kernels::CrossEntropy;

    /// The sum of the losses of labelled rows, computed from the whole vocabulary at once.
    fn plain([h, w, bias]: [&[f64]; 3], labels: &[i32], c: usize, smoothing: Smoothing) -> f64 {
        let of_row = |(h, &label): (&[f64], &i32)| {
            let dot = |w: &[f64]| w.iter().zip(h).map(|(w, h)| w * h).sum::<f64>();
            let logits: Vec<f64> = w.chunks(c).zip(bias).map(|(w, b)| dot(w) + b).collect();
            let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
            let mean = f64::from(smoothing.each) * logits.iter().sum::<f64>();
            let own = |label: usize| f64::from(smoothing.own) * logits[label];
            if label < 0 { 0.0 } else { total.ln() - own(label as usize) - mean }
        };
        h.chunks(c).zip(labels).map(of_row).sum()
    }

    #[test]
    fn a_tile_scored_in_its_backward_has_the_same_bits() {
        let rows = 300;
        let c = 5;
        let v = 20;
        let h = noise(rows * c, 1);
        let w = noise(v * c, 2);
        let bias = noise(v, 3);
        let size = ScoreSize { rows, labelled: 200, channels: c, tile: v, first: 10 };
        let head = Head { w: &w.narrow, bias: Some(&bias.narrow) };
        let mut before = vec![0.0; rows * STATISTICS];
        for (row, statistics) in before.chunks_exact_mut(STATISTICS).enumerate() {
            let label = if row % 3 == 1 { -100 } else { (row % 40) as i32 };
            statistics.copy_from_slice(&[0.5, 1.5, 0.25, f32::from_bits(label as u32)]);
        }
        let ways = [Smoothing::NONE, Smoothing::of(0.2, v)];
        let levels = Level::all().into_iter();
        for (level, smoothing) in levels.flat_map(|level| ways.map(|way| (level, way))) {
            let run = |statistics: Statistics<'_>| {
                let mut dh = vec![0.0; rows * c];
                let mut dw = vec![1.0; v * c];
                let mut dbias = vec![1.0; v];
                let h = &h.narrow;
                let loss = &CrossEntropy;
                let inputs = Inputs { statistics, h, head, loss, smoothing, scale: 0.5 };
                let gradients =
                    Gradients { dh: &mut dh, dw: Some(&mut dw), dbias: Some(&mut dbias) };
                let mut memory = vec![f32::NAN; backward_scratch(&size)];
                backward(level, gradients, inputs, &size, true, &mut memory);
                (dh, dw, dbias)
            };
            let mut complete = before.clone();
            let mut memory = vec![f32::NAN; forward_scratch(&size)];
            forward(level, &mut complete, &h.narrow, head, smoothing, &size, &mut memory);
            let mut completed = before.clone();
            assert_eq!(
                run(Statistics::BeforeLast(&mut completed)),
                run(Statistics::Complete(&complete))
            );
            assert!(completed.iter().zip(&complete).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn tiles_are_one_softmax_forward_and_backward() {
        for (rows, c, vocabulary, tile) in [(3, 5, 7, 7), (6, 4, 11, 3), (300, 3, 20, 8)] {
            let h = noise(rows * c, 1);
            let w = noise(vocabulary * c, 2);
            let bias = noise(vocabulary, 3);
            let label =
                |row: usize| if row % 3 == 1 { -100 } else { (row * 5 % vocabulary) as i32 };
            let labels: Vec<i32> = (0..rows).map(label).collect();
            let tile_at = |first| (first, tile.min(vocabulary - first));
            let tiles: Vec<_> = (0..vocabulary).step_by(tile).map(tile_at).collect();
            let ways = [Smoothing::NONE, Smoothing::of(0.2, vocabulary)];
            let levels = Level::all().into_iter();
            for (level, smoothing) in levels.flat_map(|level| ways.map(|way| (level, way))) {
                let mut statistics = vec![0.0; rows * STATISTICS];
                let positions = statistics.chunks_exact_mut(STATISTICS).zip(&labels);
                positions.for_each(|(statistics, &label)| {
                    let label = f32::from_bits(label as u32);
                    statistics.copy_from_slice(&[f32::NEG_INFINITY, 0.0, 0.0, label]);
                });
                let size =
                    |first, tile| ScoreSize { rows, labelled: rows, channels: c, tile, first };
                for &(first, tile) in &tiles {
                    let size = size(first, tile);
                    let w = &w.narrow[first * c..][..tile * c];
                    let head = Head { w, bias: Some(&bias.narrow[first..][..tile]) };
                    let mut memory = vec![f32::NAN; forward_scratch(&size)];
                    forward(level, &mut statistics, &h.narrow, head, smoothing, &size, &mut memory);
                }
                let labelled = statistics.chunks_exact(STATISTICS).filter(|of| label_of(of) >= 0);
                let losses = labelled.map(|of| CrossEntropy.value(of[0] + of[1].ln(), of[2]));
                let loss: f64 = losses.map(f64::from).sum();
                let expected = plain([&h.wide, &w.wide, &bias.wide], &labels, c, smoothing);
                assert!((loss - expected).abs() < 1e-5 * expected.abs(), "{loss} {expected}");

                let inputs = |statistics, head| Inputs {
                    statistics,
                    h: &h.narrow,
                    head,
                    loss: &CrossEntropy,
                    smoothing,
                    scale: 0.5,
                };
                let mut dh = vec![0.0; rows * c];
                let mut dw = vec![f32::NAN; vocabulary * c];
                let mut dbias = vec![f32::NAN; vocabulary];
                for &(first, tile) in tiles.iter().rev() {
                    let size = size(first, tile);
                    let part = first * c..(first + tile) * c;
                    let mut memory = vec![f32::NAN; backward_scratch(&size)];
                    let w = &w.narrow[part.clone()];
                    let bias = Some(&bias.narrow[first..][..tile]);
                    let inputs = inputs(Statistics::Complete(&statistics), Head { w, bias });
                    let dbias = Some(&mut dbias[first..][..tile]);
                    let gradients = Gradients { dh: &mut dh, dw: Some(&mut dw[part]), dbias };
                    backward(level, gradients, inputs, &size, false, &mut memory);
                }
                let half = |of: Vec<f64>| of.into_iter().map(|g| 0.5 * g).collect::<Vec<_>>();
                let by_w = |w: &[f64]| plain([&h.wide, w, &bias.wide], &labels, c, smoothing);
                let by_bias = |bias: &[f64]| plain([&h.wide, &w.wide, bias], &labels, c, smoothing);
                close(&dbias, &half(differences(&bias.wide, by_bias)), 1e-4);
                close(&dw, &half(differences(&w.wide, by_w)), 1e-4);
                if rows < 10 {
                    let by_h = |h: &[f64]| plain([h, &w.wide, &bias.wide], &labels, c, smoothing);
                    close(&dh, &half(differences(&h.wide, by_h)), 1e-4);
                }
            }
        }
    }
}
