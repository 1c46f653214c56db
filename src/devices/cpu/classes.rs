//! Pooled rows of sequences, and losses of whole sequences or of tokens.

use super::views::CpuKernels;
use crate::kernels::{
    BatchView, ClassLoss, ClassLossBackward, PooledRows, PooledRowsBackward, Pooling, Runs,
    STATISTICS, Smoothing, label_of,
};

/// The pooled row of each sequence.
fn one_of_each(pool: Pooling, batch: &BatchView<'_>) -> impl Iterator<Item = usize> {
    (0..batch.sequences()).map(move |sequence| pool.row(batch.sequence(sequence)))
}

impl Runs<PooledRows<'_>> for CpuKernels<'_> {
    fn run(&self, op: &PooledRows<'_>) {
        let PooledRows { y, x, pool, ref batch } = *op;
        let Some(call) = self.call(op) else { return };
        let channels = y.columns;
        let x = call.read(x);
        for (y, row) in call.write(y).chunks_exact_mut(channels).zip(one_of_each(pool, batch)) {
            y.copy_from_slice(&x[row * channels..][..channels]);
        }
    }
}

impl Runs<PooledRowsBackward<'_>> for CpuKernels<'_> {
    fn run(&self, op: &PooledRowsBackward<'_>) {
        let PooledRowsBackward { dx, dy, pool, ref batch } = *op;
        let Some(call) = self.call(op) else { return };
        let channels = dy.columns;
        let dx = call.write(dx);
        dx.fill(0.0);
        for (dy, row) in call.read(dy).chunks_exact(channels).zip(one_of_each(pool, batch)) {
            dx[row * channels..][..channels].copy_from_slice(dy);
        }
    }
}

impl Runs<ClassLoss<'_>> for CpuKernels<'_> {
    fn run(&self, op: &ClassLoss<'_>) {
        let ClassLoss { out, statistics, scores, is_value, smoothing, .. } = *op;
        let Some(call) = self.call(op) else { return };
        let out = call.write(out);
        out.copy_from_slice(call.read(statistics));
        let target = Target { is_value, smoothing };
        forward(out, call.read(scores), scores.columns, target, op.samples.rows(&op.batch));
    }
}

impl Runs<ClassLossBackward<'_>> for CpuKernels<'_> {
    fn run(&self, op: &ClassLossBackward<'_>) {
        let ClassLossBackward { dscores, scores, statistics, scale, .. } = *op;
        let target = Target { is_value: op.is_value, smoothing: op.smoothing };
        let Some(call) = self.call(op) else { return };
        let statistics = call.read(statistics);
        let rows = op.samples.rows(&op.batch);
        let labels: Vec<i32> = rows.map(|row| label_of(&statistics[row * STATISTICS..])).collect();
        backward(call.write(dscores), call.read(scores), &labels, scale, target);
    }
}

/// How scores become a loss.
#[derive(Clone, Copy)]
struct Target {
    is_value: bool,
    smoothing: Smoothing,
}

/// log Σ exp.
fn lse(scores: &[f32]) -> f64 {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = scores.iter().map(|score| f64::from(score - most).exp()).sum();
    f64::from(most) + sum.ln()
}

/// Writes each sample's loss, and 1 as its count, to the statistics of its row.
fn forward(
    out: &mut [f32],
    scores: &[f32],
    classes: usize,
    Target { is_value, smoothing }: Target,
    rows: impl Iterator<Item = usize>,
) {
    for (scores, row) in scores.chunks_exact(classes).zip(rows) {
        let statistics = &mut out[row * STATISTICS..][..STATISTICS];
        let label = label_of(statistics);
        let loss = if is_value {
            let off = f64::from(scores[0]) - f64::from(f32::from_bits(label as u32));
            Some(off * off)
        } else {
            let at = usize::try_from(label).ok();
            at.map(|label| {
                let mean = match smoothing {
                    Smoothing::NONE => 0.0,
                    _ => scores.iter().map(|score| f64::from(*score)).sum(),
                };
                let of_label = f64::from(smoothing.own) * f64::from(scores[label]);
                lse(scores) - (of_label + f64::from(smoothing.each) * mean)
            })
        };
        if let Some(loss) = loss {
            (statistics[0], statistics[1]) = (loss as f32, 1.0);
        }
    }
}

/// dscores = scale · the gradient of the loss. `labels` has one label for each sample.
fn backward(
    dscores: &mut [f32],
    scores: &[f32],
    labels: &[i32],
    scale: f32,
    Target { is_value, smoothing }: Target,
) {
    let classes = scores.len() / labels.len();
    let all = dscores.chunks_exact_mut(classes).zip(scores.chunks_exact(classes));
    for ((d, scores), &label) in all.zip(labels) {
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
            let own = if at == label { smoothing.own } else { 0.0 };
            *d = scale * (p - own - smoothing.each);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::kernels::BatchMetadata;
    use crate::kernels::Samples;
    use crate::simd::Level;
    use crate::tensor::{Arena, View};

    /// Three sequences of six rows.
    fn batch() -> BatchView<'static> {
        let starts = &[0, 2, 3, 6];
        let dropout_key = None;
        BatchMetadata { starts, kinds: &[], documents: &[], cached: &[], dropout_key }.view()
    }

    #[test]
    fn losses_and_their_gradients_are_the_plain_ones() {
        let ways = [
            (4, Target { is_value: false, smoothing: Smoothing::NONE }),
            (4, Target { is_value: false, smoothing: Smoothing::of(0.2, 4) }),
            (1, Target { is_value: true, smoothing: Smoothing::NONE }),
        ];
        for (labels, target) in ways {
            let Target { is_value, smoothing } = target;
            let scores = noise(3 * labels, 1);
            let values = [0.5_f32, -1.25, 2.0];
            let classes = [2_i32, -100, 0];
            let bits = values.map(|value| value.to_bits() as i32);
            let of_each = if is_value { bits } else { classes };
            let mut statistics = vec![0.0; 6 * STATISTICS];
            let no_label = f32::from_bits(-100_i32 as u32);
            statistics.chunks_exact_mut(STATISTICS).for_each(|of_one| of_one[3] = no_label);
            for (row, label) in Samples::Sequences.rows(&batch()).zip(of_each) {
                statistics[row * STATISTICS + 3] = f32::from_bits(label as u32);
            }
            let plain = |scores: &[f64]| -> f64 {
                let of = |(at, scores): (usize, &[f64])| {
                    if is_value {
                        return (scores[0] - f64::from(values[at])).powi(2);
                    }
                    let lse = scores.iter().map(|score| score.exp()).sum::<f64>().ln();
                    let mean = f64::from(smoothing.each) * scores.iter().sum::<f64>();
                    let own = f64::from(smoothing.own);
                    let loss = |label: usize| lse - own * scores[label] - mean;
                    usize::try_from(classes[at]).map_or(0.0, loss)
                };
                scores.chunks(labels).enumerate().map(of).sum()
            };
            let rows = Samples::Sequences.rows(&batch()).collect::<Vec<_>>();
            forward(&mut statistics, &scores.narrow, labels, target, rows.into_iter());
            let found = statistics.chunks_exact(STATISTICS).filter(|of| of[1] == 1.0);
            let loss: f64 = found.map(|of| f64::from(of[0])).sum();
            assert!((loss - plain(&scores.wide)).abs() < 1e-5, "{loss}");
            let mut d = vec![f32::NAN; 3 * labels];
            backward(&mut d, &scores.narrow, &of_each, 1.0, target);
            close(&d, &differences(&scores.wide, plain), 1e-5);
        }
    }

    #[test]
    fn pooled_rows_go_and_come_back() {
        let mut memory = Arena::new(64).expect("little");
        let batch = batch();
        let x = View::floats(0, 6).with_columns(1);
        let y = View::floats(16, 3).with_columns(1);
        let dx = View::floats(32, 6).with_columns(1);
        memory.fill(x, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        for (pool, pooled, back) in [
            (Pooling::First, [1.0, 3.0, 4.0], [1.0, 0.0, 3.0, 4.0, 0.0, 0.0]),
            (Pooling::Last, [2.0, 3.0, 6.0], [0.0, 2.0, 3.0, 0.0, 0.0, 6.0]),
        ] {
            memory.fill(dx, &[9.0; 6]);
            let on = CpuKernels::new(Some(&memory), Level::Portable);
            on.run(&PooledRows { y, x, pool, batch });
            on.run(&PooledRowsBackward { dx, dy: y, pool, batch });
            assert_eq!(memory.values(y), pooled);
            assert_eq!(memory.values(dx), back);
        }
    }
}
