//! Losses of routers against plain sums over rows.

use super::*;
use crate::models::{Balance, IdleExperts};

const EXPERTS: usize = 3;

/// Two layers, two micro-batches of which the first has two sequences.
const ROWS: [&[usize]; 2] = [&[4, 2], &[6]];

/// Counts, sums of probabilities, squares and dropped assignments of a layer's sequence.
fn measures(layer: usize, micro_batch: usize) -> Vec<f32> {
    let of_sequence = |(sequence, rows): (usize, &usize)| {
        let rows = *rows as f32;
        let first = (layer + sequence) as f32;
        let counts = [first, rows - first, rows];
        let share = 0.2 + 0.1 * (micro_batch + layer) as f32;
        let probabilities = [share * rows, 0.2 * rows, (0.8 - share) * rows];
        [&counts[..], &probabilities, &[rows * 1.5, 1.0]].concat()
    };
    ROWS[micro_batch].iter().enumerate().flat_map(of_sequence).collect()
}

fn experts(balance: Balance) -> Experts {
    let count = EXPERTS;
    Experts {
        count,
        per_token: 2,
        intermediate: 4,
        normalised: true,
        shared: 0,
        every: 1,
        from: 0,
        bundles: None,
        idle: IdleExperts::default(),
        router_bias: false,
        balance,
    }
}

/// The slopes of a micro-batch: layer, sequence, numbers.
type Slopes = Vec<(usize, usize, Vec<f64>)>;

/// The loss of a step, and the slopes of each micro-batch.
fn losses(balance: Balance) -> (RouterLosses, Vec<Slopes>) {
    let experts = experts(balance);
    let mut desk = RouterDesk::default();
    let of = |m: usize| [0, 1].map(|layer| measures(layer, m));
    for m in 0..2 {
        desk.add(&of(m).each_ref().map(|of| &of[..]), EXPERTS);
    }
    let mut all = Vec::new();
    for (m, rows) in ROWS.into_iter().enumerate() {
        let of = of(m);
        let measures = of.each_ref().map(|of| &of[..]);
        let share = Share { experts: &experts, measures: &measures, rows, rows_of_step: 12 };
        let mut slopes = Vec::new();
        let each = |layer, sequence, of: &[f64]| slopes.push((layer, sequence, of.to_vec()));
        let losses = share.losses(|| desk.step_counts(), each);
        desk.losses.insert(m as u32, losses);
        all.push(slopes);
    }
    (RouterLosses::sum(desk.losses.values()).expect("two micro-batches"), all)
}

/// Counts and probabilities of a layer over sequences (micro-batch, sequence).
fn sums(layer: usize, of: &[(usize, usize)]) -> [Vec<f64>; 2] {
    let mut sums = [vec![0.0; EXPERTS], vec![0.0; EXPERTS]];
    for &(m, sequence) in of {
        let row = measures(layer, m)[sequence * 8..][..8].to_vec();
        for (part, sums) in row.chunks(EXPERTS).zip(&mut sums) {
            sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += f64::from(*x));
        }
    }
    sums
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-6, "{a} {b}");
}

const ALL: [(usize, usize); 3] = [(0, 0), (0, 1), (1, 0)];

/// The loss over some sequences of this many rows, each layer by itself.
fn of_each_layer(of: &[(usize, usize)], rows: f64) -> f64 {
    let of_layer = |layer: usize| {
        let [counts, probabilities] = sums(layer, of);
        let products = counts.iter().zip(&probabilities).map(|(c, p)| c / rows * p / rows);
        EXPERTS as f64 * products.sum::<f64>()
    };
    of_layer(0) + of_layer(1)
}

#[test]
fn losses_are_those_of_their_formulas() {
    let balance = Balance { loss: 0.5, ..Balance::default() };
    let [a, b] = [0, 1].map(|layer| sums(layer, &ALL));
    let products = (0..EXPERTS).map(|e| (a[0][e] + b[0][e]) / 24.0 * (a[1][e] + b[1][e]) / 24.0);
    let expected = 0.5 * EXPERTS as f64 * products.sum::<f64>();
    close(losses(balance).0.balance, expected);
    let each = Balance { of: BalanceOf::EachLayer, ..balance };
    close(losses(each).0.balance, 0.5 * of_each_layer(&ALL, 12.0) / 2.0);
    let first = Balance { of: BalanceOf::FirstChoice, ..balance };
    close(losses(first).0.balance, 0.5 * of_each_layer(&ALL, 12.0));
    let by_micro_batch = Balance { over: BalanceOver::MicroBatch, ..first };
    let expected = 0.5 * (of_each_layer(&ALL[..2], 6.0) + of_each_layer(&ALL[2..], 6.0)) / 2.0;
    close(losses(by_micro_batch).0.balance, expected);
    let by_sequence = Balance { over: BalanceOver::Sequence, ..first };
    let of = |at: usize, rows: f64| rows / 12.0 * of_each_layer(&ALL[at..=at], rows);
    close(losses(by_sequence).0.balance, 0.5 * (of(0, 4.0) + of(1, 2.0) + of(2, 6.0)));
}

/// b is the derivative by P, and the loss is linear in P.
#[test]
fn slopes_are_the_factors_of_probabilities() {
    for over in [BalanceOver::Step, BalanceOver::MicroBatch, BalanceOver::Sequence] {
        for of in [BalanceOf::AllLayers, BalanceOf::EachLayer, BalanceOf::FirstChoice] {
            let balance = Balance { loss: 0.5, z_loss: 0.25, of, over, ..Balance::default() };
            let (found, slopes) = losses(balance);
            let mut sum = 0.0;
            for (m, slopes) in slopes.into_iter().enumerate() {
                assert_eq!(slopes.len(), 2 * ROWS[m].len());
                for (layer, sequence, slopes) in slopes {
                    let [_, probabilities] = sums(layer, &[(m, sequence)]);
                    sum += slopes.iter().zip(&probabilities).map(|(b, p)| b * p).sum::<f64>();
                    close(slopes[EXPERTS], 2.0 * 0.25 / 12.0);
                }
            }
            close(found.balance, sum);
            close(found.z, 0.25 * 2.0 * 1.5);
        }
    }
    let none = losses(Balance { z_loss: 0.25, ..Balance::default() });
    assert_eq!(none.0.balance, 0.0);
    assert!(none.1.concat().iter().all(|(.., slopes)| slopes[..EXPERTS] == [0.0; EXPERTS]));
}

#[test]
fn loads_are_counted() {
    let sums = RouterSums {
        counts: vec![6, 0, 0, 2],
        probabilities: vec![1.0, 1.0, 1.0, 1.0],
        squares: 0.0,
        dropped: 3,
    };
    assert_eq!((sums.load_max_ratio(), sums.idle()), (3.0, 2));
    close(sums.entropy(), 4.0_f64.ln());
    let mut twice = sums.clone();
    twice.add_numbers(&sums.numbers().collect::<Vec<_>>());
    assert_eq!((twice.counts, twice.dropped), (vec![12, 0, 0, 4], 6));
    assert_eq!(RouterSums::default().load_max_ratio(), 0.0);
}
