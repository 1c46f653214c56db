//! Compares capacities, sums of sequences and gradients of routers' losses with plain loops in f64.

use super::*;
use crate::devices::cpu::oracle::{Bench, Noise, close, differences, noise};
use crate::kernels::{BatchMetadata, BatchView, Dispatch, DropoutKey, Route, RouteBackward};
use crate::tensor::View;

const EXPERTS: usize = 6;

fn batch(starts: &[usize]) -> BatchView<'_> {
    let dropout_key = Some(DropoutKey { seed: 5, step: 2, first_sequence: 3 });
    BatchMetadata { dropout_key, ..BatchMetadata::plain(starts) }.view()
}

/// A router of one channel, whose logits are the products of two vectors.
struct Routed {
    bench: Bench,
    route: Route,
    h: Noise,
    w: Noise,
}

fn routed(rows: usize, k: usize, normalised: bool) -> Routed {
    let mut bench = Bench::new();
    let h = noise(rows, 1);
    let w = noise(EXPERTS, 2);
    let chosen = bench.nan(rows, 2 * k);
    let logits = bench.nan(rows, EXPERTS);
    let [of_h, of_w] = [&h, &w].map(|of| bench.tensor(1, &of.narrow));
    let route = Route { chosen, logits, h: of_h, w: of_w, per_token: k, normalised };
    bench.run(Level::best(), |kernels, _| kernels.route(&route));
    Routed { bench, route, h, w }
}

impl Routed {
    /// The experts of a row, the best first.
    fn ranked(&self, row: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..EXPERTS).collect();
        let logit = |expert: &usize| self.h.wide[row] * self.w.wide[*expert];
        all.sort_by(|a, b| logit(b).total_cmp(&logit(a)));
        all.truncate(self.route.per_token);
        all
    }

    fn limited(
        &mut self,
        factor_millionths: Option<u32>,
        draws: bool,
        batch: BatchView<'_>,
    ) -> (View, Vec<f32>) {
        let Route { chosen, logits, .. } = self.route;
        let limited = self.bench.nan(chosen.rows, chosen.columns);
        let second = batch.dropout(0.5, 7, 3).filter(|_| draws);
        let op = LimitExperts { limited, chosen, logits, factor_millionths, second, batch };
        self.bench.run(Level::best(), |kernels, _| kernels.limit_experts(&op));
        (limited, self.bench.values(limited))
    }
}

/// The rows and experts of the assignments that are left, first choices first.
fn left(limited: &[f32], k: usize) -> Vec<[usize; 2]> {
    let rows = limited.chunks(2 * k).enumerate();
    let kept = rows.flat_map(|(row, chosen)| {
        let kept = chosen[..k].iter().filter(|expert| !is_dropped(**expert));
        kept.map(move |expert| [row, expert_of(*expert)])
    });
    kept.collect()
}

#[test]
fn capacities_are_whole_numbers_of_an_even_share() {
    // 1.1 times 10 is 11, whatever 1.1 is in binary.
    for (factor, k, rows, capacity) in
        [(1.1, 1, 60, 11), (1.25, 1, 24, 5), (1.25, 1, 25, 6), (2.0, 2, 3, 2), (0.001, 1, 5, 1)]
    {
        let millionths = (factor * 1e6) as u32;
        assert_eq!(LimitExperts::capacity(millionths, k, rows, EXPERTS), capacity, "{factor}");
    }
}

#[test]
fn experts_take_first_choices_by_position_then_second_ones() {
    let starts = [0, 17, 18, 40];
    let batch = batch(&starts);
    for (k, factor) in [(1, 400_000), (2, 800_000), (3, 1_000_000), (2, 9_000_000)] {
        let mut routed = routed(40, k, true);
        let (limited, found) = routed.limited(Some(factor), false, batch);
        let mut expected = Vec::new();
        for sequence in 0..3 {
            let rows = batch.sequence(sequence);
            let most = LimitExperts::capacity(factor, k, rows.len(), EXPERTS);
            let mut taken = [0; EXPERTS];
            for rank in 0..k {
                for row in rows.clone() {
                    let expert = routed.ranked(row)[rank];
                    taken[expert] += 1;
                    if taken[expert] <= most {
                        expected.push([row, expert]);
                    }
                }
            }
        }
        expected.sort_unstable();
        assert_eq!(left(&found, k), expected);
        assert!(factor > 1_000_000 || expected.len() < 40 * k, "some are dropped");
        let [rows, places] = [(); 2].map(|()| routed.bench.nan(1, 40 * k));
        let op = Dispatch { rows, places, chosen: limited, experts: EXPERTS };
        let mut counts = Vec::new();
        routed.bench.run(Level::best(), |kernels, _| counts = kernels.dispatch(&op));
        expected.sort_by_key(|[row, expert]| [*expert, *row]);
        let of = |expert: usize| expected.iter().filter(|one| one[1] == expert).count();
        assert_eq!(counts, (0..EXPERTS).map(of).collect::<Vec<_>>());
        let rows = routed.bench.values(rows);
        let rows: Vec<usize> = rows[..expected.len()].iter().map(|row| expert_of(*row)).collect();
        assert_eq!(rows, expected.iter().map(|[row, _]| *row).collect::<Vec<_>>());
    }
}

#[test]
fn second_choices_are_kept_as_often_as_twice_their_weight() {
    let starts = [0, 3000, 6000];
    let batch = batch(&starts);
    let mut routed = routed(6000, 2, true);
    let (_, found) = routed.limited(None, true, batch);
    let chosen = routed.bench.values(routed.route.chosen);
    let mut expected = 0.0;
    for (row, chosen) in chosen.chunks(4).enumerate() {
        let second = routed.ranked(row)[1];
        let at = if expert_of(chosen[0]) == second { 0 } else { 1 };
        expected += (2.0 * f64::from(chosen[2 + at])).min(1.0);
        let first = routed.ranked(row)[0];
        assert!(left(&found[row * 4..][..4], 2).iter().any(|one| one[1] == first));
    }
    let kept = left(&found, 2).len() as f64 - 6000.0;
    assert!((kept - expected).abs() < 200.0, "{kept} of {expected}");
    assert!(kept < 5900.0);
    // A sequence by itself has the same draws.
    let key = DropoutKey { seed: 5, step: 2, first_sequence: 4 };
    let alone = BatchMetadata { dropout_key: Some(key), ..BatchMetadata::plain(&[0, 3000]) };
    let second = alone.view().dropout(0.5, 7, 3);
    let Route { chosen, logits, .. } = routed.route;
    let [chosen, logits] = [chosen, logits].map(|view| view.row_range(3000..6000));
    let limited = routed.bench.nan(3000, 4);
    let op = LimitExperts {
        limited,
        chosen,
        logits,
        factor_millionths: None,
        second,
        batch: alone.view(),
    };
    routed.bench.run(Level::best(), |kernels, _| kernels.limit_experts(&op));
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&routed.bench.values(limited)), bits(&found[3000 * 4..]));
}

#[test]
fn sums_of_sequences_are_the_plain_ones() {
    let starts = [0, 300, 301, 700];
    let batch = batch(&starts);
    for first_choice in [false, true] {
        let mut routed = routed(700, 2, false);
        let (chosen, found) = routed.limited(Some(900_000), false, batch);
        let width = 2 * EXPERTS + 2;
        let statistics = routed.bench.nan(3, width);
        let logits = routed.route.logits;
        let op =
            MeasureRoutes { statistics, logits, chosen, first_choice, batch, accumulate: false };
        let mut values = Vec::new();
        for level in Level::all() {
            routed.bench.run(level, |kernels, scratch| kernels.measure_routes(&op, scratch));
            values = routed.bench.values(statistics);
            let mut expected = vec![0.0; 3 * width];
            for row in 0..700 {
                let sums = &mut expected[batch.place(row).0 * width..][..width];
                let logits = routed.w.wide.iter().map(|w| w * routed.h.wide[row]);
                let logits: Vec<f64> = logits.collect();
                let lse = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
                for (expert, logit) in logits.iter().enumerate() {
                    sums[EXPERTS + expert] += (logit - lse).exp();
                }
                let counted = if first_choice { 1 } else { 2 };
                routed.ranked(row)[..counted].iter().for_each(|expert| sums[*expert] += 1.0);
                sums[2 * EXPERTS] += lse * lse;
                sums[2 * EXPERTS + 1] += (2 - left(&found[row * 4..][..4], 2).len()) as f64;
            }
            close(&values, &expected, 1e-5);
        }
        // Chunks of a sequence add to each other.
        let of_chunks = routed.bench.nan(1, width);
        routed.bench.run(Level::best(), |kernels, scratch| {
            for (from, to) in [(0, 256), (256, 300)] {
                let chunk = crate::kernels::SequenceChunk { sequence: 0, from, to };
                let chunk = batch.chunk_of(chunk);
                let op = MeasureRoutes {
                    statistics: of_chunks,
                    logits: chunk.rows_of(logits),
                    chosen: chunk.rows_of(chosen),
                    first_choice,
                    batch: chunk,
                    accumulate: from > 0,
                };
                kernels.measure_routes(&op, scratch);
            }
        });
        assert_eq!(routed.bench.values(of_chunks), values[..width]);
    }
}

#[test]
fn gradients_of_routers_losses_are_the_plain_ones() {
    let starts = [0, 4, 9];
    let batch = batch(&starts);
    let slopes = noise(2 * (EXPERTS + 1), 3);
    for level in Level::all() {
        let mut routed = routed(9, 2, true);
        let Route { chosen, logits, h, w, normalised, .. } = routed.route;
        let of_sequences = routed.bench.tensor(EXPERTS + 1, &slopes.narrow);
        let dh = routed.bench.tensor(1, &[0.0; 9]);
        let dw = routed.bench.nan(EXPERTS, 1);
        let dchosen = routed.bench.tensor(2, &[0.0; 18]);
        let slopes_of = Some(RouteSlopes { of_sequences, batch });
        let op = RouteBackward {
            dh,
            dw: Some(dw),
            logits,
            chosen,
            dchosen,
            h,
            w,
            normalised,
            slopes: slopes_of,
            accumulate: false,
        };
        routed.bench.run(level, |kernels, scratch| kernels.route_backward(&op, scratch));
        let loss = |h: &[f64], w: &[f64]| -> f64 {
            let of_row = |(row, h): (usize, &f64)| {
                let slopes = &slopes.wide[batch.place(row).0 * (EXPERTS + 1)..][..EXPERTS + 1];
                let lse = w.iter().map(|w| (h * w).exp()).sum::<f64>().ln();
                let balance = w.iter().zip(slopes).map(|(w, b)| b * (h * w - lse).exp());
                balance.sum::<f64>() + slopes[EXPERTS] / 2.0 * lse * lse
            };
            h.iter().enumerate().map(of_row).sum()
        };
        let of_h = differences(&routed.h.wide, |h| loss(h, &routed.w.wide));
        let of_w = differences(&routed.w.wide, |w| loss(&routed.h.wide, w));
        close(&routed.bench.values(dh), &of_h, 1e-5);
        close(&routed.bench.values(dw), &of_w, 1e-5);
    }
}
