//! First positions of sequences, and losses of whole sequences.

use crate::kernels::{ClassLoss, Rows, STATISTICS, label_of};

/// y: (B, C), the first rows of x: (B, T, C).
pub(super) fn first_rows(y: &mut [f32], x: &[f32], rows: Rows) {
    let channels = y.len() / rows.sequences;
    for (y, x) in y.chunks_exact_mut(channels).zip(x.chunks_exact(rows.positions * channels)) {
        y.copy_from_slice(&x[..channels]);
    }
}

/// dx: dy in the first rows, 0 in all others.
pub(super) fn first_rows_backward(dx: &mut [f32], dy: &[f32], rows: Rows) {
    let channels = dy.len() / rows.sequences;
    dx.fill(0.0);
    for (dx, dy) in dx.chunks_exact_mut(rows.positions * channels).zip(dy.chunks_exact(channels)) {
        dx[..channels].copy_from_slice(dy);
    }
}

/// Statistics of the first position of each sequence.
fn firsts<'s>(statistics: &'s [f32], size: &ClassLoss) -> impl Iterator<Item = &'s [f32]> {
    statistics.chunks_exact(size.rows.positions * STATISTICS).map(|all| &all[..STATISTICS])
}

/// log Σ exp.
fn lse(scores: &[f32]) -> f64 {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = scores.iter().map(|score| f64::from(score - most).exp()).sum();
    f64::from(most) + sum.ln()
}

/// Puts each sequence's loss and a mark into the statistics of its first position.
pub(super) fn forward(out: &mut [f32], scores: &[f32], size: &ClassLoss) {
    let all = out.chunks_exact_mut(size.rows.positions * STATISTICS);
    for (statistics, scores) in all.zip(scores.chunks_exact(size.labels)) {
        let label = label_of(statistics);
        let loss = if size.is_value {
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
pub(super) fn backward(
    dscores: &mut [f32],
    scores: &[f32],
    statistics: &[f32],
    scale: f32,
    size: &ClassLoss,
) {
    let all = dscores.chunks_exact_mut(size.labels).zip(scores.chunks_exact(size.labels));
    for ((d, scores), statistics) in all.zip(firsts(statistics, size)) {
        let label = label_of(statistics);
        if size.is_value {
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

    #[test]
    fn losses_and_their_gradients_are_the_plain_ones() {
        let rows = Rows { sequences: 3, positions: 2 };
        for (labels, is_value) in [(4, false), (1, true)] {
            let size = ClassLoss { rows, labels, is_value };
            let scores = noise(3 * labels, 1);
            let values = [0.5_f32, -1.25, 2.0];
            let classes = [2_i32, -100, 0];
            let mut statistics = vec![0.0; rows.count() * STATISTICS];
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
            forward(&mut statistics, &scores.narrow, &size);
            let found = statistics.chunks_exact(STATISTICS).filter(|of| of[1] == 1.0);
            let loss: f64 = found.map(|of| f64::from(of[0])).sum();
            assert!((loss - plain(&scores.wide)).abs() < 1e-5, "{loss}");
            let mut d = vec![f32::NAN; 3 * labels];
            backward(&mut d, &scores.narrow, &before, 1.0, &size);
            close(&d, &differences(&scores.wide, plain), 1e-5);
        }
    }

    #[test]
    fn first_rows_go_and_come_back() {
        let (rows, x) = (Rows { sequences: 2, positions: 3 }, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut y = [0.0; 2];
        first_rows(&mut y, &x, rows);
        assert_eq!(y, [1.0, 4.0]);
        let mut dx = [9.0; 6];
        first_rows_backward(&mut dx, &y, rows);
        assert_eq!(dx, [1.0, 0.0, 0.0, 4.0, 0.0, 0.0]);
    }
}
