//! Compares tiles of the vocabulary with one softmax in f64.

use super::*;
use crate::devices::cpu::oracle::{Bench, Noise, close, differences, noise};
use crate::kernels::{CrossEntropy, Loss};

#[derive(Clone, Copy)]
struct Way {
    smoothing: Smoothing,
    form: LogitForm,
}

/// With label smoothing and without, and the other forms of logits.
fn ways(classes: usize) -> [Way; 4] {
    let plain = Way { smoothing: Smoothing::NONE, form: LogitForm::PLAIN };
    let smoothed = Way { smoothing: Smoothing::of(0.2, classes), ..plain };
    let scaled = Way { form: LogitForm { scale: 0.7, cap: None }, ..plain };
    let capped = Way { form: LogitForm { scale: 1.5, cap: Some(2.0) }, ..smoothed };
    [plain, smoothed, scaled, capped]
}

impl Way {
    fn has_bias(self) -> bool {
        self.form == LogitForm::PLAIN
    }
}

/// The sum of the losses of labelled rows, computed from the whole vocabulary at once.
fn plain([h, w, bias]: [&[f64]; 3], labels: &[i32], c: usize, way: Way) -> f64 {
    let Way { smoothing, form } = way;
    let formed = |product: f64, bias: f64| match form.cap.map(f64::from) {
        _ if form == LogitForm::PLAIN => product + bias,
        None => f64::from(form.scale) * product,
        Some(cap) => cap * (f64::from(form.scale) * product / cap).tanh(),
    };
    let of_row = |(h, &label): (&[f64], &i32)| {
        let dot = |w: &[f64]| w.iter().zip(h).map(|(w, h)| w * h).sum::<f64>();
        let logits: Vec<f64> = w.chunks(c).zip(bias).map(|(w, b)| formed(dot(w), *b)).collect();
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
    let mut before = vec![0.0; rows * STATISTICS];
    for (row, statistics) in before.chunks_exact_mut(STATISTICS).enumerate() {
        let label = if row % 3 == 1 { -100 } else { (row % 40) as i32 };
        statistics.copy_from_slice(&[0.5, 1.5, 0.25, f32::from_bits(label as u32)]);
    }
    let levels = Level::all().into_iter();
    for (level, way) in levels.flat_map(|level| ways(v).map(|way| (level, way))) {
        let Way { smoothing, form } = way;
        let mut bench = Bench::new();
        let [h, w] = [&h, &w].map(|of| bench.tensor(c, &of.narrow));
        let bias = way.has_bias().then(|| bench.tensor(v, &bias.narrow));
        let statistics = bench.tensor(STATISTICS, &before);
        let [out, completed] = [(); 2].map(|()| bench.nan(rows, STATISTICS));
        let mut backward = |statistics: View| ScoreBackward {
            dh: bench.nan(rows, c),
            dw: Some(bench.tensor(c, &vec![1.0; v * c])),
            dbias: bias.map(|_| bench.tensor(v, &vec![1.0; v])),
            dh_before: None,
            statistics,
            h,
            w,
            bias,
            loss: &CrossEntropy,
            weighed: false,
            smoothing,
            form,
            scale: 0.5,
            first: 10,
            labelled: 200,
            accumulate: true,
        };
        let apart = backward(out);
        let at_once = backward(completed);
        let first = 10;
        let labelled = 200;
        let score = Score { out, statistics, h, w, bias, first, labelled, smoothing, form };
        bench.run(level, |k, scratch| {
            k.score(&score, scratch);
            k.score_backward(&apart, scratch);
            k.score_and_backward(&Score { out: completed, ..score }, &at_once, scratch);
        });
        let mut bits = |op: &ScoreBackward<'_>| {
            let views = [Some(op.dh), op.dw, op.dbias, Some(op.statistics)];
            let values = views.into_iter().flatten().flat_map(|view| bench.values(view));
            values.map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(bits(&apart), bits(&at_once));
    }
}

/// Statistics, dh, dw and dbias of a vocabulary that is scored tile by tile.
fn scored(
    level: Level,
    way: Way,
    [h, w, bias]: [&Noise; 3],
    labels: &[i32],
    tile: usize,
) -> [Vec<f32>; 4] {
    let Way { smoothing, form } = way;
    let rows = labels.len();
    let c = h.narrow.len() / rows;
    let vocabulary = bias.narrow.len();
    let label = |label: &i32| [f32::NEG_INFINITY, 0.0, 0.0, f32::from_bits(*label as u32)];
    let statistics: Vec<f32> = labels.iter().flat_map(label).collect();
    let mut bench = Bench::new();
    let [h, w, bias] =
        [(h, c), (w, c), (bias, 1)].map(|(of, columns)| bench.tensor(columns, &of.narrow));
    let [dw, dbias] = [c, 1].map(|columns| bench.nan(vocabulary, columns));
    let as_row = |view: View| way.has_bias().then(|| view.with_columns(view.len()));
    let tiles = || (0..vocabulary).step_by(tile).map(|at| at..vocabulary.min(at + tile));
    let mut statistics = bench.tensor(STATISTICS, &statistics);
    for tile in tiles() {
        let op = Score {
            out: bench.nan(rows, STATISTICS),
            statistics,
            h,
            w: w.row_range(tile.clone()),
            bias: as_row(bias.row_range(tile.clone())),
            first: tile.start,
            labelled: rows,
            smoothing,
            form,
        };
        bench.run(level, |k, scratch| k.score(&op, scratch));
        statistics = op.out;
    }
    let mut dh_before = None;
    for tile in tiles().collect::<Vec<_>>().into_iter().rev() {
        let op = ScoreBackward {
            dh: bench.nan(rows, c),
            dw: Some(dw.row_range(tile.clone())),
            dbias: as_row(dbias.row_range(tile.clone())),
            dh_before,
            statistics,
            h,
            w: w.row_range(tile.clone()),
            bias: as_row(bias.row_range(tile.clone())),
            loss: &CrossEntropy,
            weighed: false,
            smoothing,
            form,
            scale: 0.5,
            first: tile.start,
            labelled: rows,
            accumulate: false,
        };
        bench.run(level, |k, scratch| k.score_backward(&op, scratch));
        dh_before = Some(op.dh);
    }
    let dh = dh_before.expect("there are tiles");
    [statistics, dh, dw, dbias].map(|view| bench.values(view))
}

#[test]
fn tiles_are_one_softmax_forward_and_backward() {
    for (rows, c, vocabulary, tile) in [(3, 5, 7, 7), (6, 4, 11, 3), (300, 3, 20, 8)] {
        let h = noise(rows * c, 1);
        let w = noise(vocabulary * c, 2);
        let bias = noise(vocabulary, 3);
        let label = |row: usize| if row % 3 == 1 { -100 } else { (row * 5 % vocabulary) as i32 };
        let labels: Vec<i32> = (0..rows).map(label).collect();
        let levels = Level::all().into_iter();
        for (level, way) in levels.flat_map(|level| ways(vocabulary).map(|way| (level, way))) {
            let [statistics, dh, dw, dbias] = scored(level, way, [&h, &w, &bias], &labels, tile);
            let labelled = statistics.chunks_exact(STATISTICS).filter(|of| label_of(of) >= 0);
            let losses = labelled.map(|of| CrossEntropy.value(of[0] + of[1].ln(), of[2]));
            let loss: f64 = losses.map(f64::from).sum();
            let expected = plain([&h.wide, &w.wide, &bias.wide], &labels, c, way);
            assert!((loss - expected).abs() < 1e-5 * expected.abs(), "{loss} {expected}");
            let half = |of: Vec<f64>| of.into_iter().map(|g| 0.5 * g).collect::<Vec<_>>();
            let by_w = |w: &[f64]| plain([&h.wide, w, &bias.wide], &labels, c, way);
            let by_bias = |bias: &[f64]| plain([&h.wide, &w.wide, bias], &labels, c, way);
            if way.has_bias() {
                close(&dbias, &half(differences(&bias.wide, by_bias)), 1e-4);
            }
            close(&dw, &half(differences(&w.wide, by_w)), 1e-4);
            if rows < 10 {
                let by_h = |h: &[f64]| plain([h, &w.wide, &bias.wide], &labels, c, way);
                close(&dh, &half(differences(&h.wide, by_h)), 1e-4);
            }
        }
    }
}
