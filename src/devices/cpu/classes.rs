//! Pooled rows of sequences, and losses of whole sequences or of tokens.

use std::ops::Range;

use super::views::{Call, Compute};
use crate::kernels::{
    BatchView, ClassLoss, ClassLossBackward, PooledRows, PooledRowsBackward, Pooling, ProblemType,
    STATISTICS, Smoothing, label_of,
};
use crate::simd::Level;

/// The pooled rows of each sequence.
fn of_each(pool: Pooling, batch: &BatchView<'_>) -> impl Iterator<Item = Range<usize>> {
    (0..batch.sequences()).map(move |sequence| pool.rows(batch.sequence(sequence)))
}

impl Compute for PooledRows<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let PooledRows { y, x, pool, ref batch } = *self;
        let channels = y.columns;
        let x = call.read(x);
        for (y, rows) in call.write(y).chunks_exact_mut(channels).zip(of_each(pool, batch)) {
            let count = rows.len() as f32;
            let mut rows = x[rows.start * channels..rows.end * channels].chunks_exact(channels);
            rows.next().into_iter().for_each(|x| y.copy_from_slice(x));
            rows.for_each(|x| y.iter_mut().zip(x).for_each(|(y, x)| *y += x));
            y.iter_mut().for_each(|y| *y /= count);
        }
    }
}

impl Compute for PooledRowsBackward<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let PooledRowsBackward { dx, dy, pool, ref batch } = *self;
        let channels = dy.columns;
        let dx = call.write(dx);
        dx.fill(0.0);
        for (dy, rows) in call.read(dy).chunks_exact(channels).zip(of_each(pool, batch)) {
            let count = rows.len() as f32;
            let rows = dx[rows.start * channels..rows.end * channels].chunks_exact_mut(channels);
            rows.for_each(|dx| dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = dy / count));
        }
    }
}

/// log Σ exp.
fn lse(scores: &[f32]) -> f64 {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = scores.iter().map(|score| f64::from(score - most).exp()).sum();
    f64::from(most) + sum.ln()
}

/// The mean over all labels of the binary cross entropy of a sequence's scores.
fn binary_cross_entropy(scores: &[f32], labels: &[f32]) -> f64 {
    let of_label = |(score, label): (&f32, &f32)| {
        let score = f64::from(*score);
        // log(1 + exp(score)) − label · score, without an overflow.
        score.max(0.0) - f64::from(*label) * score + (-score.abs()).exp().ln_1p()
    };
    scores.iter().zip(labels).map(of_label).sum::<f64>() / scores.len() as f64
}

impl Compute for ClassLoss<'_> {
    /// Writes each sample's loss, or the score that an objective reads, to the statistics of its
    /// row; and 1 as its count, unless each sequence has several labels.
    fn compute(&self, _: Level, call: &Call<'_>) {
        let ClassLoss { scores, problem, smoothing, weighed, .. } = *self;
        let out = call.write(self.out);
        out.copy_from_slice(call.read(self.statistics));
        if problem == ProblemType::MultiLabelClassification {
            let samples = call.read(scores).chunks_exact(scores.columns);
            for (scores, out) in samples.zip(out.chunks_exact_mut(1 + scores.columns)) {
                out[0] = binary_cross_entropy(scores, &out[1..]) as f32;
            }
            return;
        }
        let rows = self.samples.rows(&self.batch);
        for (scores, row) in call.read(scores).chunks_exact(scores.columns).zip(rows) {
            let statistics = &mut out[row * STATISTICS..][..STATISTICS];
            let label = label_of(statistics);
            let loss = if weighed {
                Some(f64::from(scores[0]))
            } else if problem == ProblemType::Regression {
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
}

impl Compute for ClassLossBackward<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let ClassLossBackward { dscores, scores, scale, problem, smoothing, weighed, .. } = *self;
        let classes = scores.columns;
        let statistics = call.read(self.statistics);
        let all = call.write(dscores).chunks_exact_mut(classes);
        let all = all.zip(call.read(scores).chunks_exact(classes));
        if problem == ProblemType::MultiLabelClassification {
            let scale = f64::from(scale) / classes as f64;
            for ((d, scores), labels) in all.zip(statistics.chunks_exact(1 + classes)) {
                for ((d, score), label) in d.iter_mut().zip(scores).zip(&labels[1..]) {
                    let sigmoid = 1.0 / (1.0 + (-f64::from(*score)).exp());
                    *d = (scale * (sigmoid - f64::from(*label))) as f32;
                }
            }
            return;
        }
        for ((d, scores), row) in all.zip(self.samples.rows(&self.batch)) {
            let statistics = &statistics[row * STATISTICS..];
            let label = label_of(statistics);
            if weighed {
                d[0] = scale * statistics[2];
                continue;
            }
            if problem == ProblemType::Regression {
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
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
    use super::*;
    use crate::kernels::{BatchMetadata, Samples};

    /// Three sequences of six rows.
    fn batch() -> BatchView<'static> {
        BatchMetadata::plain(&[0, 2, 3, 6]).view()
    }

    #[test]
    fn losses_and_their_gradients_are_the_plain_ones() {
        let ways = [
            (4, ProblemType::SingleLabelClassification, Smoothing::NONE),
            (4, ProblemType::SingleLabelClassification, Smoothing::of(0.2, 4)),
            (1, ProblemType::Regression, Smoothing::NONE),
        ];
        for (labels, problem, smoothing) in ways {
            let is_value = problem == ProblemType::Regression;
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
            let mut bench = Bench::new();
            let samples = Samples::Sequences;
            let batch = batch();
            let view = bench.tensor(STATISTICS, &statistics);
            let out = bench.nan(6, STATISTICS);
            let dscores = bench.nan(3, labels);
            let of_scores = bench.tensor(labels, &scores.narrow);
            bench.run(Level::Portable, |k, _| {
                k.class_loss(&ClassLoss {
                    out,
                    statistics: view,
                    scores: of_scores,
                    samples,
                    problem,
                    smoothing,
                    weighed: false,
                    batch,
                });
                k.class_loss_backward(&ClassLossBackward {
                    dscores,
                    scores: of_scores,
                    statistics: out,
                    scale: 1.0,
                    samples,
                    problem,
                    smoothing,
                    weighed: false,
                    batch,
                });
            });
            let statistics = bench.values(out);
            let found = statistics.chunks_exact(STATISTICS).filter(|of| of[1] == 1.0);
            let loss: f64 = found.map(|of| f64::from(of[0])).sum();
            assert!((loss - plain(&scores.wide)).abs() < 1e-5, "{loss}");
            close(&bench.values(dscores), &differences(&scores.wide, plain), 1e-5);
        }
    }

    /// Labels of 0 and 1, and one between them, as PyTorch's `BCEWithLogitsLoss` takes; scores so
    /// large that exp would overflow.
    #[test]
    fn several_labels_have_the_binary_cross_entropy_of_each() {
        let batch = batch();
        let samples = Samples::Sequences;
        let problem = ProblemType::MultiLabelClassification;
        let smoothing = Smoothing::NONE;
        let labels = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.25], [1.0, 1.0, 0.0]];
        let wide = [0.5, -1.25, 2.0, 40.0, -800.0, 0.0, 900.0, -3.0, 1.5];
        let plain = |scores: &[f64]| -> f64 {
            let of = |(score, label): (&f64, &f64)| {
                let p = 1.0 / (1.0 + (-score).exp());
                let of = |share: f64, p: f64| if share == 0.0 { 0.0 } else { share * p.ln() };
                -of(*label, p) - of(1.0 - label, 1.0 / (1.0 + score.exp()))
            };
            scores.iter().zip(labels.as_flattened()).map(of).sum::<f64>() / 3.0
        };
        let statistics = labels.map(|[a, b, c]| [0.0, a as f32, b as f32, c as f32]);
        let mut bench = Bench::new();
        let view = bench.tensor(4, statistics.as_flattened());
        let out = bench.nan(3, 4);
        let dscores = bench.nan(3, 3);
        let scores = bench.tensor(3, &wide.map(|score| score as f32));
        bench.run(Level::Portable, |k, _| {
            let statistics = view;
            k.class_loss(&ClassLoss {
                out,
                statistics,
                scores,
                samples,
                problem,
                smoothing,
                weighed: false,
                batch,
            });
            k.class_loss_backward(&ClassLossBackward {
                dscores,
                scores,
                statistics: out,
                scale: 0.5,
                samples,
                problem,
                smoothing,
                weighed: false,
                batch,
            });
        });
        let rows = bench.values(out);
        let loss: f64 = rows.chunks_exact(4).map(|of| f64::from(of[0])).sum();
        assert!((loss - plain(&wide)).abs() < 1e-5, "{loss}");
        let kept = rows.chunks_exact(4).map(|of| of[1..].to_vec()).collect::<Vec<_>>().concat();
        assert_eq!(kept, labels.as_flattened().iter().map(|&y| y as f32).collect::<Vec<_>>());
        let expected: Vec<f64> = wide
            .iter()
            .zip(labels.as_flattened())
            .map(|(score, label)| 0.5 / 3.0 * (1.0 / (1.0 + (-score).exp()) - label))
            .collect();
        close(&bench.values(dscores), &expected, 1e-6);
    }

    #[test]
    fn an_objective_reads_scores_and_gives_their_gradients() {
        let batch = batch();
        let mut statistics = [0.0; 6 * STATISTICS];
        let weights = [0.25, -3.0, 0.0];
        for (row, weight) in Samples::Sequences.rows(&batch).zip(weights) {
            statistics[row * STATISTICS + 2] = weight;
        }
        let of_scores = [1.5, -0.75, 2.0];
        let mut bench = Bench::new();
        let view = bench.tensor(STATISTICS, &statistics);
        let scores = bench.tensor(1, &of_scores);
        let out = bench.nan(6, STATISTICS);
        let dscores = bench.nan(3, 1);
        let samples = Samples::Sequences;
        let problem = ProblemType::Regression;
        let smoothing = Smoothing::NONE;
        let weighed = true;
        bench.run(Level::Portable, |k, _| {
            let op = ClassLoss {
                out,
                statistics: view,
                scores,
                samples,
                problem,
                smoothing,
                weighed,
                batch,
            };
            k.class_loss(&op);
            k.class_loss_backward(&ClassLossBackward {
                dscores,
                scores,
                statistics: view,
                scale: 2.0,
                samples,
                problem,
                smoothing,
                weighed,
                batch,
            });
        });
        let found = bench.values(out);
        let rows = Samples::Sequences.rows(&batch);
        let first: Vec<f32> = rows.map(|row| found[row * STATISTICS]).collect();
        assert_eq!(first, of_scores);
        assert_eq!(bench.values(dscores), weights.map(|weight| 2.0 * weight));
    }

    #[test]
    fn pooled_rows_go_and_come_back() {
        let batch = batch();
        for (pool, pooled, back) in [
            (Pooling::First, [1.0, 3.0, 4.0], [1.0, 0.0, 3.0, 4.0, 0.0, 0.0]),
            (Pooling::Last, [2.0, 3.0, 6.0], [0.0, 2.0, 3.0, 0.0, 0.0, 6.0]),
        ] {
            let mut bench = Bench::new();
            let x = bench.tensor(1, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            let y = bench.nan(3, 1);
            let dx = bench.nan(6, 1);
            bench.run(Level::Portable, |k, _| {
                k.pooled_rows(&PooledRows { y, x, pool, batch });
                k.pooled_rows_backward(&PooledRowsBackward { dx, dy: y, pool, batch });
            });
            assert_eq!(bench.values(y), pooled);
            assert_eq!(bench.values(dx), back);
        }
    }
}
