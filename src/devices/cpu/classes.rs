//! First positions of sequences, and losses of whole sequences.

use super::views::CpuKernels;
use crate::kernels::{ClassLoss, ClassLossBackward, FirstRows, FirstRowsBackward, label_of};

pub(super) fn first_rows(on: &CpuKernels<'_>, &FirstRows { y, x }: &FirstRows) {
    let Some(call) = on.call([y], &[x]) else { return };
    let (sequences, channels) = (y.rows, y.columns);
    let [y] = call.write();
    let all = call.read(x).chunks_exact(x.len() / sequences);
    y.chunks_exact_mut(channels).zip(all).for_each(|(y, x)| y.copy_from_slice(&x[..channels]));
}

pub(super) fn first_rows_backward(on: &CpuKernels<'_>, op: &FirstRowsBackward) {
    let FirstRowsBackward { dx, dy } = *op;
    let Some(call) = on.call([dx], &[dy]) else { return };
    let (sequence, channels) = (dx.len() / dy.rows, dy.columns);
    let [dx] = call.write();
    dx.fill(0.0);
    let all = dx.chunks_exact_mut(sequence).zip(call.read(dy).chunks_exact(channels));
    all.for_each(|(dx, dy)| dx[..channels].copy_from_slice(dy));
}

pub(super) fn class_loss(on: &CpuKernels<'_>, op: &ClassLoss) {
    let ClassLoss { out, statistics, scores, is_value } = *op;
    let Some(call) = on.call([out], &[statistics, scores]) else { return };
    let [out] = call.write();
    out.copy_from_slice(call.read(statistics));
    forward(out, call.read(scores), scores.columns, is_value);
}

pub(super) fn class_loss_backward(on: &CpuKernels<'_>, op: &ClassLossBackward) {
    let ClassLossBackward { dscores, scores, statistics, scale, is_value } = *op;
    let Some(call) = on.call([dscores], &[scores, statistics]) else { return };
    let [dscores] = call.write();
    let labels = scores.columns;
    backward(dscores, call.read(scores), call.read(statistics), scale, labels, is_value);
}

/// log Σ exp.
fn lse(scores: &[f32]) -> f64 {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = scores.iter().map(|score| f64::from(score - most).exp()).sum();
    f64::from(most) + sum.ln()
}

/// Puts each sequence's loss and a mark into the statistics of its first position.
fn forward(out: &mut [f32], scores: &[f32], labels: usize, is_value: bool) {
    let sequence = out.len() / (scores.len() / labels);
    let all = out.chunks_exact_mut(sequence);
    for (statistics, scores) in all.zip(scores.chunks_exact(labels)) {
        let label = label_of(statistics);
        let loss = if is_value {
            let off = f64::from(scores[0]) - f64::from(f32::from_bits(label as u32));
            Some(off * off)
        } else {
            let at = usize::try_from(label).ok();
            at.map(|label| lse(scores) - f64::from(scores[label]))
        };
        if let Some(loss) = loss {
            (statistics[0], statistics[1]) = (loss as f32, 1.0);
        }
    }
}

/// dscores = scale · d.
fn backward(
    dscores: &mut [f32],
    scores: &[f32],
    statistics: &[f32],
    scale: f32,
    labels: usize,
    is_value: bool,
) {
    let sequence = statistics.len() / (scores.len() / labels);
    let all = dscores.chunks_exact_mut(labels).zip(scores.chunks_exact(labels));
    for ((d, scores), statistics) in all.zip(statistics.chunks_exact(sequence)) {
        let label = label_of(statistics);
        if is_value {
            d[0] = scale * 2.0 * (scores[0] - f32::from_bits(label as u32));
            continue;
        }
        let Ok(label) = usize::try_from(label) else {
            d.fill(0.0);
            continue;
        };
        let lse = lse(scores);
        for (at, (d, score)) in d.iter_mut().zip(scores).enumerate() {
            let p = (f64::from(*score) - lse).exp() as f32;
            *d = scale * (p - if at == label { 1.0 } else { 0.0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::kernels::STATISTICS;
    use crate::simd::Level;
    use crate::tensor::{Arena, View};

    #[test]
    fn losses_and_their_gradients_are_the_plain_ones() {
        for (labels, is_value) in [(4, false), (1, true)] {
            let scores = noise(3 * labels, 1);
            let values = [0.5_f32, -1.25, 2.0];
            let classes = [2_i32, -100, 0];
            let mut statistics = vec![0.0; 3 * 2 * STATISTICS];
            for (at, statistics) in statistics.chunks_exact_mut(STATISTICS).enumerate() {
                let label =
                    if is_value { values[at / 2].to_bits() as i32 } else { classes[at / 2] };
                let label = if at % 2 == 0 { label } else { -100 };
                statistics[3] = f32::from_bits(label as u32);
            }
            let plain = |scores: &[f64]| -> f64 {
                let of = |(at, scores): (usize, &[f64])| {
                    if is_value {
                        return (scores[0] - f64::from(values[at])).powi(2);
                    }
                    let lse = scores.iter().map(|score| score.exp()).sum::<f64>().ln();
                    usize::try_from(classes[at]).map_or(0.0, |label| lse - scores[label])
                };
                scores.chunks(labels).enumerate().map(of).sum()
            };
            let before = statistics.clone();
            forward(&mut statistics, &scores.narrow, labels, is_value);
            let found = statistics.chunks_exact(STATISTICS).filter(|of| of[1] == 1.0);
            let loss: f64 = found.map(|of| f64::from(of[0])).sum();
            assert!((loss - plain(&scores.wide)).abs() < 1e-5, "{loss}");
            let mut d = vec![f32::NAN; 3 * labels];
            backward(&mut d, &scores.narrow, &before, 1.0, labels, is_value);
            close(&d, &differences(&scores.wide, plain), 1e-5);
        }
    }

    #[test]
    fn first_rows_go_and_come_back() {
        let mut memory = Arena::new(64).expect("little");
        let (x, y) = (View::floats(0, 6).with_columns(1), View::floats(16, 2).with_columns(1));
        let dx = View::floats(32, 6).with_columns(1);
        memory.fill(x, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        memory.fill(dx, &[9.0; 6]);
        let on = CpuKernels { memory: Some(&memory), level: Level::Portable };
        first_rows(&on, &FirstRows { y, x });
        first_rows_backward(&on, &FirstRowsBackward { dx, dy: y });
        assert_eq!(memory.values(y), [1.0, 4.0]);
        assert_eq!(memory.values(dx), [1.0, 0.0, 0.0, 4.0, 0.0, 0.0]);
    }
}
