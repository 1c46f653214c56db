//! Softmax cross entropy over tiles of the vocabulary, with a running log-sum-exp.
//!
//! A tile adds itself to each labelled position's statistics (maximum, sum, target's logit, label).
//! Positions without a label are skipped. Logits exist for 256 positions and one tile at a time.

use rayon::prelude::*;

use super::math::{exp, largest, sum_of};
use super::product::{Matrix, Product, Start};
use super::views::{CpuKernels, or_nothing};
use crate::kernels::{
    Logits, Loss, STATISTICS, Score, ScoreBackward, ScoreSize, Smoothing, label_of,
};
use crate::simd::Level;
use crate::tensor::Scratch;

/// Labelled positions that are scored at once.
const CHUNK: usize = 256;

pub(super) fn score(on: &CpuKernels<'_>, op: &Score, scratch: &Scratch<'_>) {
    let Score { out, statistics, h, w, bias, smoothing, .. } = *op;
    let (scratch, size) = (scratch.nested(), op.size());
    let memory = scratch.take_floats(1, forward_scratch(&size));
    let reads = [statistics, h, w, or_nothing(bias)];
    let Some(call) = on.call([out, memory], &reads) else { return };
    let [out, memory] = call.write();
    out.copy_from_slice(call.read(statistics));
    let head = Head { w: call.read(w), bias: call.read_if(bias) };
    forward(on.level, out, call.read(h), (head, smoothing), &size, memory);
}

pub(super) fn logits(on: &CpuKernels<'_>, op: &Logits, scratch: &Scratch<'_>) {
    let Logits { y, statistics, h, w, bias } = *op;
    let (scratch, size) = (scratch.nested(), op.size());
    let memory = scratch.take_floats(1, logits_scratch(&size));
    let reads = [statistics, h, w, or_nothing(bias)];
    let Some(call) = on.call([y, memory], &reads) else { return };
    let [y, memory] = call.write();
    let head = Head { w: call.read(w), bias: call.read_if(bias) };
    labelled_logits(on.level, y, call.read(statistics), call.read(h), head, &size, memory);
}

pub(super) fn score_backward(on: &CpuKernels<'_>, op: &ScoreBackward<'_>, scratch: &Scratch<'_>) {
    both_ways(on, None, op, scratch);
}

pub(super) fn score_and_backward(
    on: &CpuKernels<'_>,
    score: &Score,
    op: &ScoreBackward<'_>,
    scratch: &Scratch<'_>,
) {
    assert_eq!(score.out, op.statistics, "the backward reads what the score writes");
    both_ways(on, Some(score), op, scratch);
}

/// A tile's backward; before it its score, if that is wanted too.
fn both_ways(
    on: &CpuKernels<'_>,
    score: Option<&Score>,
    op: &ScoreBackward<'_>,
    scratch: &Scratch<'_>,
) {
    let ScoreBackward { dh, dw, dbias, dh_before, h, w, bias, loss, scale, smoothing, .. } = *op;
    let (scratch, size) = (scratch.nested(), op.size());
    let memory = scratch.take_floats(1, backward_scratch(&size));
    let known = score.map_or(op.statistics, |score| score.statistics);
    let reads = [known, h, w, dh_before.unwrap_or(h), or_nothing(bias)];
    let completed = or_nothing(score.map(|score| score.out));
    let Some(call) = on.call([dh, or_nothing(dw), or_nothing(dbias), completed, memory], &reads)
    else {
        return;
    };
    let [dh, dw_or_nothing, dbias_or_nothing, completed, memory] = call.write();
    match dh_before {
        Some(before) => dh.copy_from_slice(call.read(before)),
        None => dh.fill(0.0),
    }
    let statistics = match score {
        None => Statistics::Complete(call.read(known)),
        Some(_) => {
            completed.copy_from_slice(call.read(known));
            Statistics::BeforeLast(completed)
        }
    };
    let head = Head { w: call.read(w), bias: call.read_if(bias) };
    let inputs = Inputs { statistics, h: call.read(h), head, loss, smoothing, scale };
    let (dw, dbias) = (dw.map(|_| dw_or_nothing), dbias.map(|_| dbias_or_nothing));
    let gradients = Gradients { dh, dw, dbias };
    backward(on.level, gradients, inputs, &size, op.accumulate, memory);
}

/// The next labelled rows from `from` on, at most a chunk of them; how many.
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

/// Copies rows of h side by side.
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

/// Logits of some rows of h, side by side. logits: (rows, V).
fn logits_of(
    level: Level,
    logits: &mut [f32],
    h: &[f32],
    head: Head<'_>,
    rows: usize,
    size: &ScoreSize,
) {
    let (depth, columns) = (size.channels, size.tile);
    let (a, b) = (Matrix::rows(h, depth), Matrix::rows(head.w, depth).transposed());
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
    (head, smoothing): (Head<'_>, Smoothing),
    size: &ScoreSize,
    scratch: &mut [f32],
) {
    let (c, v) = (size.channels, size.tile);
    let (gathered, logits) = scratch.split_at_mut(CHUNK * c);
    let (mut from, mut rows) = (0, [0; CHUNK]);
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
    let (v, before) = (size.tile, &*statistics);
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
    let (mut from, mut rows) = (0, [0; CHUNK]);
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
    /// Over the tiles before the last one, which adds itself.
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

/// What the backward reads.
struct Inputs<'a> {
    statistics: Statistics<'a>,
    h: &'a [f32],
    head: Head<'a>,
    loss: &'a dyn Loss,
    smoothing: Smoothing,
    scale: f32,
}

/// What the backward writes.
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
    let (c, v) = (size.channels, size.tile);
    let (gathered, scratch) = scratch.split_at_mut(CHUNK * c);
    let (moved, scratch) = scratch.split_at_mut(CHUNK * c);
    let logits = &mut scratch[..CHUNK * v];
    let (mut from, mut rows, mut accumulate) = (0, [0; CHUNK], accumulate);
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
            let (lse, label) = (of_row[0] + of_row[1].ln(), label_of(of_row) as usize);
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
        let (d, w) = (Matrix::rows(logits, v), Matrix::rows(head.w, c));
        let of_h = Product { a: d, b: w, rows: count, depth: v, columns: c, start: Start::Zero };
        of_h.run(level, moved);
        for (moved, &row) in moved.chunks_exact(c).zip(&rows[..count]) {
            dh[row * c..][..c].iter_mut().zip(moved).for_each(|(dh, moved)| *dh += moved);
        }
        if let Some(dw) = &mut dw {
            let (a, start) = (d.transposed(), Start::accumulate(accumulate));
            Product { a, b: h, rows: v, depth: count, columns: c, start }.run(level, dw);
        }
        if let Some(dbias) = &mut dbias {
            if !accumulate {
                dbias.fill(0.0);
            }
            for row in logits.chunks_exact(v) {
                dbias.iter_mut().zip(row).for_each(|(sum, d)| *sum += d);
            }
        }
        accumulate = true;
    }
    if !accumulate {
        [dw, dbias].into_iter().flatten().for_each(|gradient| gradient.fill(0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::kernels::CrossEntropy;

    /// Sum of the losses of labelled rows, from all of the vocabulary at once.
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
        let (rows, c, v) = (300, 5, 20);
        let (h, w, bias) = (noise(rows * c, 1), noise(v * c, 2), noise(v, 3));
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
                let (mut dh, mut dw) = (vec![0.0; rows * c], vec![1.0; v * c]);
                let mut dbias = vec![1.0; v];
                let (h, loss) = (&h.narrow, &CrossEntropy);
                let inputs = Inputs { statistics, h, head, loss, smoothing, scale: 0.5 };
                let gradients =
                    Gradients { dh: &mut dh, dw: Some(&mut dw), dbias: Some(&mut dbias) };
                let mut memory = vec![f32::NAN; backward_scratch(&size)];
                backward(level, gradients, inputs, &size, true, &mut memory);
                (dh, dw, dbias)
            };
            let mut complete = before.clone();
            let mut memory = vec![f32::NAN; forward_scratch(&size)];
            forward(level, &mut complete, &h.narrow, (head, smoothing), &size, &mut memory);
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
            let (h, w) = (noise(rows * c, 1), noise(vocabulary * c, 2));
            let bias = noise(vocabulary, 3);
            let label =
                |row: usize| if row % 3 == 1 { -100 } else { (row * 5 % vocabulary) as i32 };
            let labels: Vec<i32> = (0..rows).map(label).collect();
            let tiles: Vec<(usize, usize)> = (0..vocabulary)
                .step_by(tile)
                .map(|first| (first, tile.min(vocabulary - first)))
                .collect();
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
                    let (size, w) = (size(first, tile), &w.narrow[first * c..][..tile * c]);
                    let head = Head { w, bias: Some(&bias.narrow[first..][..tile]) };
                    let mut memory = vec![f32::NAN; forward_scratch(&size)];
                    forward(
                        level,
                        &mut statistics,
                        &h.narrow,
                        (head, smoothing),
                        &size,
                        &mut memory,
                    );
                }
                let labelled = statistics.chunks_exact(STATISTICS).filter(|of| label_of(of) >= 0);
                let losses = labelled.map(|of| CrossEntropy.value(of[0] + of[1].ln(), of[2]));
                let loss: f64 = losses.map(f64::from).sum();
                let expected = plain([&h.wide, &w.wide, &bias.wide], &labels, c, smoothing);
                assert!((loss - expected).abs() < 1e-5 * expected.abs(), "{loss} {expected}");

                let (mut dh, mut dw) = (vec![0.0; rows * c], vec![f32::NAN; vocabulary * c]);
                let mut dbias = vec![f32::NAN; vocabulary];
                for &(first, tile) in tiles.iter().rev() {
                    let (size, part) = (size(first, tile), first * c..(first + tile) * c);
                    let mut memory = vec![f32::NAN; backward_scratch(&size)];
                    let w = &w.narrow[part.clone()];
                    let statistics = &statistics;
                    let (h, loss) = (&h.narrow, &CrossEntropy);
                    let head = Head { w, bias: Some(&bias.narrow[first..][..tile]) };
                    let statistics = Statistics::Complete(statistics);
                    let inputs = Inputs { statistics, h, head, loss, smoothing, scale: 0.5 };
                    let (dw, dbias) = (&mut dw[part], Some(&mut dbias[first..][..tile]));
                    let gradients = Gradients { dh: &mut dh, dw: Some(dw), dbias };
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
