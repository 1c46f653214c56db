//! Compares the kernels of experts with plain sums in f64, and choices with a sort.

use std::cmp::Ordering;

use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

use super::*;
use crate::devices::cpu::oracle::{Bench, close, differences, noise};
use crate::kernels::{Kernels, RowWeights};
use crate::tensor::{Arena, narrow};

/// Integers as the bits of floats.
pub(super) fn bits(integers: impl IntoIterator<Item = usize>) -> Vec<f32> {
    integers.into_iter().map(|integer| f32::from_bits(integer as u32)).collect()
}

fn integers(floats: &[f32]) -> Vec<usize> {
    floats.iter().map(|float| integer(*float)).collect()
}

/// Whether two slices hold the same bits.
pub(super) fn same(a: &[f32], b: &[f32]) -> bool {
    a.iter().map(|a| a.to_bits()).eq(b.iter().map(|b| b.to_bits()))
}

/// The experts of the k largest logits by a sort, in ascending order.
fn by_sort<T: PartialOrd + Copy>(logits: &[T], k: usize) -> Vec<usize> {
    let is_nan = |logit: T| logit.partial_cmp(&logit).is_none();
    let mut all: Vec<usize> = (0..logits.len()).collect();
    all.sort_by(|&a, &b| {
        let [a, b] = [a, b].map(|expert| logits[expert]);
        is_nan(a).cmp(&is_nan(b)).then(b.partial_cmp(&a).unwrap_or(Ordering::Equal))
    });
    all.truncate(k);
    all.sort_unstable();
    all
}

/// The weights of some experts.
fn plain_weights(logits: &[f64], chosen: &[usize], normalised: bool) -> Vec<f64> {
    let all: Vec<usize> = (0..logits.len()).collect();
    let over = if normalised { chosen } else { &all };
    let total: f64 = over.iter().map(|expert| logits[*expert].exp()).sum();
    chosen.iter().map(|expert| logits[*expert].exp() / total).collect()
}

/// Routes rows in one call. Returns the choice and the logits.
fn route(h: &[f32], w: &[f32], op: Sizes) -> [Vec<f32>; 2] {
    let Sizes { channels, experts, per_token, normalised } = op;
    let rows = h.len() / channels;
    let mut bench = Bench::new();
    let chosen = bench.nan(rows, 2 * per_token);
    let logits = bench.nan(rows, experts);
    let [h, w] = [h, w].map(|values| bench.tensor(channels, values));
    let bias = None;
    let op = Route { chosen, logits, h, w, bias, per_token, normalised };
    bench.run(Level::best(), |k, _| k.route(&op));
    [chosen, logits].map(|view| bench.values(view))
}

/// Sizes of a router.
#[derive(Clone, Copy)]
struct Sizes {
    channels: usize,
    experts: usize,
    per_token: usize,
    normalised: bool,
}

proptest! {
    /// With ties, infinities and NaN.
    #[test]
    fn a_choice_is_that_of_a_sort(
        logits in prop::collection::vec(
            prop_oneof![
                (-3_i8..3).prop_map(f32::from),
                -1.0_f32..1.0,
                Just(f32::NAN),
                Just(-f32::NAN),
                Just(f32::NEG_INFINITY),
                Just(f32::INFINITY),
                Just(-0.0),
            ],
            1..40,
        ),
        share in 0.0..1.0,
        normalised in any::<bool>(),
    ) {
        let experts = logits.len();
        let per_token = 1 + (share * experts as f64) as usize;
        let sizes = Sizes { channels: 1, experts, per_token, normalised };
        let [chosen, found] = route(&[1.0], &logits, sizes);
        let (chosen, weights) = chosen.split_at(per_token);
        prop_assert_eq!(integers(chosen), by_sort(&logits, per_token));
        prop_assert!(found.iter().zip(&logits).all(|(a, b)| a == b || a.is_nan() && b.is_nan()));
        let has_nan = logits.iter().any(|logit| logit.is_nan());
        let has_number = logits.iter().any(|logit| logit.is_finite());
        let is_finite = has_number && logits.iter().all(|logit| *logit < f32::INFINITY);
        if has_nan || !is_finite {
            prop_assert!(weights.iter().any(|weight| weight.is_nan()));
        } else {
            let wide: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
            let expected = plain_weights(&wide, &by_sort(&logits, per_token), normalised);
            close(weights, &expected, 1e-6);
        }
    }

    #[test]
    fn assignments_are_sorted_by_expert_then_by_row(
        choices in (1_usize..9, 1_usize..6).prop_flat_map(|(experts, k)| {
            let k = k.min(experts);
            let all: Vec<usize> = (0..experts).collect();
            let row = prop::sample::subsequence(all, k);
            (Just(experts), prop::collection::vec(row, 1..30))
        }),
    ) {
        let (experts, choices) = choices;
        let k = choices[0].len();
        let of_row = |chosen: &Vec<usize>| [bits(chosen.iter().copied()), vec![0.5; k]].concat();
        let mut bench = Bench::new();
        let chosen = bench.tensor(2 * k, &choices.iter().flat_map(of_row).collect::<Vec<_>>());
        let [rows, places] = [(); 2].map(|()| bench.nan(1, choices.len() * k));
        let op = Dispatch { rows, places, chosen, experts };
        let mut counts = Vec::new();
        bench.run(Level::best(), |k, _| counts = k.dispatch(&op));
        let mut expected = Vec::new();
        prop_assert_eq!(counts.len(), experts);
        for (expert, &count) in counts.iter().enumerate() {
            let places = choices.iter().flatten().enumerate();
            let mine: Vec<usize> =
                places.filter(|(_, one)| **one == expert).map(|(place, _)| place).collect();
            prop_assert_eq!(count, mine.len());
            expected.extend(mine);
        }
        prop_assert_eq!(integers(&bench.values(places)), expected.clone());
        let rows_of: Vec<usize> = expected.iter().map(|place| place / k).collect();
        prop_assert_eq!(integers(&bench.values(rows)), rows_of);
        let to_plan = CpuKernels::new(None, Level::best());
        prop_assert_eq!(to_plan.dispatch(&op), vec![choices.len(); experts]);
    }
}

#[test]
fn a_rows_bits_depend_on_neither_other_rows_nor_threads() {
    for normalised in [false, true] {
        let sizes = Sizes { channels: 401, experts: 21, per_token: 4, normalised };
        let rows = 83;
        let h = noise(rows * sizes.channels, 1).narrow;
        let w = noise(sizes.experts * sizes.channels, 2).narrow;
        let on_threads = |count: usize| {
            let pool = ThreadPoolBuilder::new().num_threads(count).build();
            pool.expect("a few threads").install(|| route(&h, &w, sizes))
        };
        let [chosen, logits] = on_threads(1);
        let [again, logits_again] = on_threads(3);
        assert!(same(&chosen, &again) && same(&logits, &logits_again));
        for (row, h) in h.chunks(sizes.channels).enumerate() {
            let [alone, logits_alone] = route(h, &w, sizes);
            assert!(same(&alone, &chosen[row * alone.len()..][..alone.len()]), "row {row}");
            assert!(same(&logits_alone, &logits[row * sizes.experts..][..sizes.experts]));
        }
    }
}

/// The backward of a route, without gradients of its weights.
fn backward_of(route: Route, [dh, dchosen]: [View; 2]) -> RouteBackward<'static> {
    let Route { chosen, logits, h, w, normalised, .. } = route;
    let [dw, dbias] = [None, None];
    let slopes = None;
    let accumulate = false;
    RouteBackward { dh, dw, dbias, logits, chosen, dchosen, h, w, normalised, slopes, accumulate }
}

#[test]
fn routes_and_their_gradients_are_the_plain_ones() {
    for (per_token, normalised) in [(1, false), (3, false), (3, true), (6, true), (6, false)] {
        let [rows, channels, experts] = [7, 9, 6];
        let h = noise(rows * channels, 1);
        let w = noise(experts * channels, 2);
        let dchosen = noise(rows * per_token, 3);
        let logits = |h: &[f64], w: &[f64]| -> Vec<Vec<f64>> {
            let of = |h: &[f64], w: &[f64]| h.iter().zip(w).map(|(h, w)| h * w).sum::<f64>();
            h.chunks(channels).map(|h| w.chunks(channels).map(|w| of(h, w)).collect()).collect()
        };
        let of_noise = logits(&h.wide, &w.wide);
        let choice: Vec<Vec<usize>> =
            of_noise.iter().map(|logits| by_sort(logits, per_token)).collect();
        let weights = |h: &[f64], w: &[f64]| -> Vec<f64> {
            let rows = logits(h, w).into_iter().zip(&choice);
            rows.flat_map(|(logits, chosen)| plain_weights(&logits, chosen, normalised)).collect()
        };
        let loss = |h: &[f64], w: &[f64]| {
            weights(h, w).iter().zip(&dchosen.wide).map(|(w, dw)| w * dw).sum::<f64>()
        };
        for level in Level::all() {
            let mut bench = Bench::new();
            let [chosen, out] = [2 * per_token, experts].map(|columns| bench.nan(rows, columns));
            let [h_view, w_view] = [&h, &w].map(|of| bench.tensor(channels, &of.narrow));
            let ones = vec![1.0; rows * channels];
            let [dh, dh_frozen] = [(); 2].map(|()| bench.tensor(channels, &ones));
            let dw = bench.nan(experts, channels);
            let more = bench.tensor(channels, &vec![2.0; experts * channels]);
            let bias = None;
            let route =
                Route { chosen, logits: out, h: h_view, w: w_view, bias, per_token, normalised };
            let dchosen = bench.tensor(per_token, &dchosen.narrow);
            let backward = RouteBackward { dw: Some(dw), ..backward_of(route, [dh, dchosen]) };
            let frozen = RouteBackward { dh: dh_frozen, dw: None, ..backward };
            bench.run(level, |k, scratch| {
                k.route(&route);
                k.route_backward(&backward, scratch);
                k.route_backward(&frozen, scratch);
            });
            let dh = bench.values(dh);
            assert!(same(&dh, &bench.values(dh_frozen)));
            let op = RouteBackward { dh: dh_frozen, dw: Some(more), accumulate: true, ..backward };
            bench.run(level, |k, scratch| k.route_backward(&op, scratch));
            close(&bench.values(out), &of_noise.concat(), 1e-6);
            let chosen = bench.values(chosen);
            let [found, of_weights]: [Vec<f32>; 2] = [0, 1].map(|half| {
                let halves = chosen.chunks(2 * per_token);
                halves.flat_map(|row| &row[half * per_token..][..per_token]).copied().collect()
            });
            assert_eq!(integers(&found), choice.concat());
            close(&of_weights, &weights(&h.wide, &w.wide), 1e-6);
            let dh: Vec<f32> = dh.iter().map(|dh| dh - 1.0).collect();
            close(&dh, &differences(&h.wide, |h| loss(h, &w.wide)), 1e-5);
            let of_router = differences(&w.wide, |w| loss(&h.wide, w));
            close(&bench.values(dw), &of_router, 1e-5);
            let more: Vec<f32> = bench.values(more).iter().map(|dw| dw - 2.0).collect();
            close(&more, &of_router, 1e-5);
        }
    }
}

/// Each expert scales its rows. One expert has all rows, and one has none.
#[test]
fn rows_go_to_experts_and_come_back() {
    let [rows, channels, experts, k] = [37, 19, 4, 2];
    let choices = |row: usize| if row.is_multiple_of(3) { [0, 3] } else { [0, 1] };
    let weights = noise(rows * k, 1);
    let x = noise(rows * channels, 2);
    let other = noise(rows * channels, 3);
    let of_row = |row: usize| [bits(choices(row)), weights.narrow[row * k..][..k].to_vec()];
    let chosen: Vec<f32> = (0..rows).flat_map(|row| of_row(row).concat()).collect();
    for level in Level::all() {
        let mut bench = Bench::new();
        let chosen = bench.tensor(2 * k, &chosen);
        let [x_view, other_view] = [&x, &other].map(|of| bench.tensor(channels, &of.narrow));
        let [of_assignments, places] = [(); 2].map(|()| bench.nan(1, rows * k));
        let [y, plain_y] = [(); 2].map(|()| bench.tensor(channels, &vec![0.5; rows * channels]));
        let dots = bench.nan(rows, k);
        let weighed: Vec<View> = (0..experts).map(|_| bench.nan(rows, channels)).collect();
        let op = Dispatch { rows: of_assignments, places, chosen, experts };
        bench.run(level, |kernels, scratch| {
            let mut from = 0;
            for (expert, count) in kernels.dispatch(&op).into_iter().enumerate() {
                assert_eq!(count, [37, 24, 0, 13][expert]);
                let part = from..from + count;
                let [rows, places] = [of_assignments, places].map(|of| of.part(part.clone()));
                from += count;
                let scratch = scratch.nested();
                let [mine, others] = [(); 2].map(|()| scratch.take(count, channels));
                kernels.gather_rows(&GatherRows { y: mine, x: x_view, rows });
                kernels.gather_rows(&GatherRows { y: others, x: other_view, rows });
                let weights = RowWeights { places, chosen };
                let combine = CombineRows { y, x: mine, rows: Some(rows), weights: Some(weights) };
                kernels.combine_rows(&combine);
                kernels.combine_rows(&CombineRows { y: plain_y, weights: None, ..combine });
                let y = weighed[expert].row_range(0..count);
                kernels.weigh_rows(&WeighRows { y, x: mine, weights });
                let bias = None;
                kernels.row_dots(&RowDots { out: dots, x: mine, y: others, places, bias });
            }
        });
        let [y, plain_y, dots] = [y, plain_y, dots].map(|view| bench.values(view));
        let mut next = vec![0; experts];
        for row in 0..rows {
            let at = row * channels..(row + 1) * channels;
            let product = |(x, y): (&f64, &f64)| x * y;
            let dot: f64 =
                x.wide[at.clone()].iter().zip(&other.wide[at.clone()]).map(product).sum();
            close(&dots[row * k..][..k], &[dot; 2], 1e-6);
            let mut sums = vec![0.5_f32; channels];
            for (j, expert) in choices(row).into_iter().enumerate() {
                let w = weights.narrow[row * k + j];
                let scaled: Vec<f32> = x.narrow[at.clone()].iter().map(|x| w * x).collect();
                sums.iter_mut().zip(&scaled).for_each(|(sum, x)| *sum += x);
                let one = weighed[expert].row_range(next[expert]..next[expert] + 1);
                next[expert] += 1;
                assert!(same(&bench.values(one), &scaled));
            }
            assert!(same(&y[at.clone()], &sums), "row {row}");
            let twice = x.wide[at.clone()].iter().map(|x| 0.5 + 2.0 * x);
            close(&plain_y[at], &twice.collect::<Vec<_>>(), 1e-6);
        }
    }
}

#[test]
fn gates_of_rows_and_their_gradients_are_the_plain_ones() {
    let [rows, channels] = [35, 5];
    let x = noise(rows * channels, 1);
    let gate = noise(rows, 2);
    let dy = noise(rows * channels, 3);
    let plain = |x: &[f64], gate: &[f64]| -> Vec<f64> {
        let of = |(at, x): (usize, &f64)| x / (1.0 + (-gate[at / channels]).exp());
        x.iter().enumerate().map(of).collect()
    };
    let loss = |x: &[f64], gate: &[f64]| {
        plain(x, gate).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
    };
    for level in Level::all() {
        let mut bench = Bench::new();
        let [y, dx] = [(); 2].map(|()| bench.nan(rows, channels));
        let dgate = bench.nan(rows, 1);
        let [x_view, dy] = [&x, &dy].map(|of| bench.tensor(channels, &of.narrow));
        let gate_view = bench.tensor(1, &gate.narrow);
        bench.run(level, |k, _| {
            k.gate_rows(&GateRows { y, x: x_view, gate: gate_view });
            let op = GateRowsBackward { dx, dgate, dy, x: x_view, gate: gate_view };
            k.gate_rows_backward(&op);
        });
        close(&bench.values(y), &plain(&x.wide, &gate.wide), 1e-6);
        close(&bench.values(dx), &differences(&x.wide, |x| loss(x, &gate.wide)), 1e-5);
        close(&bench.values(dgate), &differences(&gate.wide, |gate| loss(&x.wide, gate)), 1e-5);
    }
}

/// Rows of an even number of columns are copied as floats, others are widened.
#[test]
fn rows_of_16_bits_are_copied() {
    for (columns, room) in [(6, 0), (5, 64)] {
        let x = noise(4 * columns, 1).narrow;
        let mut memory = Arena::new(256).expect("little");
        let place = View::floats(0, Dtype::Bf16.floats(x.len()));
        let mut halves = vec![0.0; place.len()];
        narrow(Dtype::Bf16, &mut bytemuck::cast_slice_mut(&mut halves)[..x.len()], &x);
        memory.fill(place, &halves);
        let rows = View::floats(32, 2);
        memory.fill(rows, &bits([1, 3]));
        let y = View::floats(48, 16).hold(2, columns, Dtype::Bf16);
        let op = GatherRows { y, x: place.hold(4, columns, Dtype::Bf16), rows };
        let widened = View::floats(64, room);
        let kernels = CpuKernels::with_room(Some(&memory), Level::best(), widened);
        kernels.gather_rows(&op);
        let found = memory.values(View::floats(48, 16)).to_vec();
        let found: &[u16] = bytemuck::cast_slice(&found);
        let halves: &[u16] = bytemuck::cast_slice(&halves);
        let expected = [1, 3].map(|row| &halves[row * columns..][..columns]).concat();
        assert_eq!(found[..2 * columns], expected);
    }
}

/// A router of one channel, whose biases choose and weigh.
#[test]
fn biases_of_routers_are_added_and_have_gradients() {
    let [rows, experts, per_token] = [3, 4, 2];
    let h = noise(rows, 1);
    let w = noise(experts, 2);
    let bias = noise(experts, 3);
    let dchosen = noise(rows * per_token, 4);
    let logits = |bias: &[f64]| -> Vec<Vec<f64>> {
        let of_row = |h: &f64| w.wide.iter().zip(bias).map(|(w, bias)| h * w + bias).collect();
        h.wide.iter().map(of_row).collect()
    };
    let found = logits(&bias.wide);
    let choice: Vec<Vec<usize>> = found.iter().map(|row| by_sort(row, per_token)).collect();
    let loss = |bias: &[f64]| {
        let rows = logits(bias).into_iter().zip(&choice);
        let weights = rows.flat_map(|(logits, chosen)| plain_weights(&logits, chosen, true));
        weights.zip(&dchosen.wide).map(|(w, dw)| w * dw).sum::<f64>()
    };
    let expected = differences(&bias.wide, loss);
    for level in Level::all() {
        let mut bench = Bench::new();
        let chosen = bench.nan(rows, 2 * per_token);
        let out = bench.nan(rows, experts);
        let [h, w] = [&h, &w].map(|of| bench.tensor(1, &of.narrow));
        let biases = Some(bench.tensor(experts, &bias.narrow));
        let dbias = bench.nan(1, experts);
        let more = bench.tensor(experts, &vec![3.0; experts]);
        let normalised = true;
        let route = Route { chosen, logits: out, h, w, bias: biases, per_token, normalised };
        let dh = bench.tensor(1, &vec![0.0; rows]);
        let dchosen = bench.tensor(per_token, &dchosen.narrow);
        let backward = RouteBackward { dbias: Some(dbias), ..backward_of(route, [dh, dchosen]) };
        bench.run(level, |k, scratch| {
            k.route(&route);
            k.route_backward(&backward, scratch);
            let again = RouteBackward { dbias: Some(more), accumulate: true, ..backward };
            k.route_backward(&again, scratch);
        });
        close(&bench.values(out), &found.concat(), 1e-6);
        close(&bench.values(dbias), &expected, 1e-5);
        let more: Vec<f32> = bench.values(more).iter().map(|d| d - 3.0).collect();
        close(&more, &expected, 1e-5);
    }
}

/// The rows of one expert, each with a weight; some rows of the choice are of other experts.
#[test]
fn sums_with_a_bias_are_the_plain_ones() {
    let [count, channels, outputs, k] = [37, 19, 300, 2];
    let places: Vec<usize> = (0..count).map(|row| row * 2 * k + row % k).collect();
    let chosen = noise(2 * count * 2 * k, 1);
    let [x, y] = [2, 3].map(|seed| noise(count * channels, seed));
    let dy = noise(count * outputs, 4);
    let bias = noise(outputs, 5);
    let weight = |place: usize| chosen.wide[(2 * (place / k) + 1) * k + place % k];
    let product = |(x, y): (&f64, &f64)| x * y;
    let dot = |row: usize| {
        let [x, y] = [&x, &y].map(|of| &of.wide[row * channels..][..channels]);
        let dy = &dy.wide[row * outputs..][..outputs];
        let plain: f64 = x.iter().zip(y).map(product).sum();
        plain + dy.iter().zip(&bias.wide).map(product).sum::<f64>()
    };
    let mut expected = vec![0.0; outputs];
    for (row, place) in places.iter().enumerate() {
        let dy = &dy.wide[row * outputs..][..outputs];
        expected.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += weight(*place) * dy);
    }
    for level in Level::all() {
        let mut bench = Bench::new();
        let out = bench.nan(2 * count, k);
        let chosen = bench.tensor(2 * k, &chosen.narrow);
        let [x, y] = [&x, &y].map(|of| bench.tensor(channels, &of.narrow));
        let dy = bench.tensor(outputs, &dy.narrow);
        let bias = bench.tensor(outputs, &bias.narrow);
        let of_places = bench.tensor(count, &bits(places.clone()));
        let sums = bench.nan(1, outputs);
        let more = bench.tensor(outputs, &vec![1.0; outputs]);
        bench.run(level, |kernels, _| {
            let bias = Some(BiasRows { dy, bias });
            kernels.row_dots(&RowDots { out, x, y, places: of_places, bias });
            let weights = RowWeights { places: of_places, chosen };
            let sum = SumRows { y: sums, x: dy, weights, accumulate: false };
            kernels.sum_rows(&sum);
            kernels.sum_rows(&SumRows { y: more, accumulate: true, ..sum });
        });
        let out = bench.values(out);
        let dots: Vec<f32> = places.iter().map(|place| out[*place]).collect();
        close(&dots, &(0..count).map(dot).collect::<Vec<_>>(), 1e-6);
        close(&bench.values(sums), &expected, 1e-5);
        let more: Vec<f32> = bench.values(more).iter().map(|sum| sum - 1.0).collect();
        close(&more, &expected, 1e-5);
    }
}
