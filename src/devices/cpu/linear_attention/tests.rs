//! Linear attention beside plain f64, with gradients by central differences.

mod carried;

use std::ops::Range;

use super::super::oracle::{Bench, close, differences, noise};
use crate::kernels::{
    BatchMetadata, BatchView, Carried, CarriedGradients, DeltaRule, DeltaRuleBackward, Document,
    GatedNorm, GatedNormBackward, HeadDecay, LinearHeads, LinearShape, ShortConvolution,
    ShortConvolutionBackward,
};
use crate::simd::Level;

/// Odd sizes: two tasks of a head, heads of keys that serve two heads of values.
const WIDE: LinearHeads =
    LinearHeads { key_heads: 2, value_heads: 4, key_size: 5, value_size: 3, taps: 3 };
const TALL: LinearHeads =
    LinearHeads { key_heads: 1, value_heads: 1, key_size: 3, value_size: 35, taps: 2 };

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The first row of each row's document.
fn first_rows(batch: &BatchView<'_>) -> Vec<usize> {
    let mut firsts = Vec::new();
    for sequence in 0..batch.sequences() {
        let rows = batch.sequence(sequence);
        for at in 0..rows.len() {
            let document = batch.document(sequence, at);
            firsts.push(rows.start + document.map_or(0, |document| document.from as usize));
        }
    }
    firsts
}

fn plain_convolution(projected: &[f64], w: &[f64], shape: &LinearShape<'_>) -> Vec<f64> {
    let heads = shape.heads;
    let mut y = Vec::new();
    for (row, first) in first_rows(&shape.batch).into_iter().enumerate() {
        for channel in 0..heads.mixed() {
            let mut sum = 0.0;
            for tap in 0..heads.taps {
                let at = (row + 1 + tap).checked_sub(heads.taps).filter(|at| *at >= first);
                sum += at.map_or(0.0, |at| {
                    w[channel * heads.taps + tap] * projected[at * heads.projected() + channel]
                });
            }
            y.push(silu(sum));
        }
    }
    y
}

/// As the paper has it: S is a matrix of keys and values, and each position multiplies it.
fn plain_rule(
    x: &[f64],
    projected: &[f64],
    [log, bias]: [&[f64]; 2],
    shape: &LinearShape<'_>,
) -> Vec<f64> {
    let heads = shape.heads;
    let LinearHeads { key_heads, value_heads, key_size, value_size, .. } = heads;
    let firsts = first_rows(&shape.batch);
    let mut y = vec![0.0; firsts.len() * heads.values()];
    for head in 0..value_heads {
        let shared = head / (value_heads / key_heads) * key_size;
        let mut s = vec![vec![0.0; value_size]; key_size];
        for (row, &first) in firsts.iter().enumerate() {
            if row == first {
                s.iter_mut().flatten().for_each(|s| *s = 0.0);
            }
            let x = &x[row * heads.mixed()..];
            let unit = |from: usize| -> Vec<f64> {
                let all = &x[from..][..key_size];
                let length = (all.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                all.iter().map(|x| x / length).collect()
            };
            let q = unit(shared);
            let k = unit(heads.keys() + shared);
            let v = &x[2 * heads.keys() + head * value_size..][..value_size];
            let factors = &projected[row * heads.projected() + heads.mixed()..];
            let beta = 1.0 / (1.0 + (-factors[head]).exp());
            let step = (1.0 + (factors[value_heads + head] + bias[head]).exp()).ln();
            let alpha = (-log[head].exp() * step).exp();
            for channel in 0..value_size {
                let known: f64 = (0..key_size).map(|i| alpha * s[i][channel] * k[i]).sum();
                for i in 0..key_size {
                    s[i][channel] = alpha * s[i][channel] + beta * k[i] * (v[channel] - known);
                }
                let read: f64 = (0..key_size).map(|i| s[i][channel] * q[i]).sum();
                y[row * heads.values() + head * value_size + channel] =
                    read / (key_size as f64).sqrt();
            }
        }
    }
    y
}

fn plain_norm(x: &[f64], projected: &[f64], gamma: &[f64], heads: LinearHeads) -> Vec<f64> {
    let d = heads.value_size;
    let mut y = Vec::new();
    for (index, x) in x.chunks(d).enumerate() {
        let row = index / heads.value_heads;
        let first = row * heads.projected() + heads.remembered() + index % heads.value_heads * d;
        let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / d as f64 + 1e-3).sqrt();
        y.extend((0..d).map(|at| x[at] * rstd * gamma[at] * silu(projected[first + at])));
    }
    y
}

/// Sequences of one document, of three, and of one position.
const DOCUMENTS: [(u32, u32); 4] = [(0, 37), (0, 2), (2, 3), (3, 9)];

fn batch<'b>(documents: &'b [Document]) -> BatchView<'b> {
    BatchMetadata { documents, ..BatchMetadata::plain(&[0, 37, 46, 47]) }.view()
}

fn documents() -> Vec<Document> {
    let of =
        |&(from, to): &(u32, u32)| std::iter::repeat_n(Document { from, to }, (to - from) as usize);
    DOCUMENTS.iter().chain(&[(0, 1)]).flat_map(of).collect()
}

fn sum_of_products(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn convolutions_are_the_plain_ones() {
    let documents = documents();
    for heads in [WIDE, TALL] {
        let shape = LinearShape { batch: batch(&documents), heads };
        let rows = shape.batch.rows();
        let projected = noise(rows * heads.projected(), 1);
        let w = noise(heads.mixed() * heads.taps, 2);
        let dy = noise(rows * heads.mixed(), 3);
        for level in Level::all() {
            let mut bench = Bench::new();
            let y = bench.nan(rows, heads.mixed());
            let dprojected = bench.nan(rows, heads.projected());
            let dw = bench.nan(heads.mixed(), heads.taps);
            let x = bench.tensor(heads.projected(), &projected.narrow);
            let w_view = bench.tensor(heads.taps, &w.narrow);
            let dy_view = bench.tensor(heads.mixed(), &dy.narrow);
            bench.run(level, |k, scratch| {
                let carried = Carried::default();
                k.short_convolution(&ShortConvolution {
                    y,
                    projected: x,
                    w: w_view,
                    shape,
                    carried,
                });
                let op = ShortConvolutionBackward {
                    dprojected,
                    dw,
                    dy: dy_view,
                    projected: x,
                    w: w_view,
                    shape,
                    carried: CarriedGradients::default(),
                    accumulate: false,
                };
                k.short_convolution_backward(&op, scratch);
            });
            close(&bench.values(y), &plain_convolution(&projected.wide, &w.wide, &shape), 1e-5);
            let loss = |projected: &[f64], w: &[f64]| {
                sum_of_products(&plain_convolution(projected, w, &shape), &dy.wide)
            };
            let expected = differences(&w.wide, |w| loss(&projected.wide, w));
            close(&bench.values(dw), &expected, 1e-4);
            let expected = differences(&projected.wide, |x| loss(x, &w.wide));
            of_columns(&bench.values(dprojected), &expected, heads, 0..heads.mixed());
        }
    }
}

/// The inputs of the delta rule: queries, keys and values; projection; ln A; bias.
type RuleInputs<'i> = [&'i [f64]; 4];

/// The gradients of all inputs, from that of the output.
fn plain_rule_backward(all: RuleInputs<'_>, dy: &[f64], shape: &LinearShape<'_>) -> [Vec<f64>; 4] {
    [0, 1, 2, 3].map(|which: usize| {
        differences(all[which], |one| {
            let mut all = all;
            all[which] = one;
            let [x, projected, log, bias] = all;
            sum_of_products(&plain_rule(x, projected, [log, bias], shape), dy)
        })
    })
}

#[test]
fn the_delta_rule_is_the_plain_one() {
    let documents = documents();
    for heads in [WIDE, TALL] {
        let shape = LinearShape { batch: batch(&documents), heads };
        let rows = shape.batch.rows();
        let of_heads = heads.value_heads;
        let [x, projected, dy] = [heads.mixed(), heads.projected(), heads.values()]
            .map(|width| noise(rows * width, width as u64));
        let [log, bias] = [7, 8].map(|seed| noise(of_heads, seed));
        let plain_y = plain_rule(&x.wide, &projected.wide, [&log.wide, &bias.wide], &shape);
        let all = [&x.wide[..], &projected.wide, &log.wide, &bias.wide];
        let expected = plain_rule_backward(all, &dy.wide, &shape);
        for level in Level::all() {
            let mut bench = Bench::new();
            let y = bench.nan(rows, heads.values());
            let dx = bench.nan(rows, heads.mixed());
            let dprojected = bench.nan(rows, heads.projected());
            let mut put = |columns, values: &[f32]| bench.tensor(columns, values);
            let half = vec![0.5; of_heads];
            let ddecay = HeadDecay { log: put(of_heads, &half), bias: put(of_heads, &half) };
            let x = put(heads.mixed(), &x.narrow);
            let projected = put(heads.projected(), &projected.narrow);
            let decay =
                HeadDecay { log: put(of_heads, &log.narrow), bias: put(of_heads, &bias.narrow) };
            let dy = put(heads.values(), &dy.narrow);
            let carried = Carried::default();
            let rule = DeltaRule { y, x, projected, decay, shape, carried };
            let backward = DeltaRuleBackward {
                dx,
                dprojected,
                ddecay,
                dy,
                x,
                projected,
                decay,
                shape,
                carried: CarriedGradients::default(),
                accumulate: true,
            };
            bench.run(level, |k, scratch| {
                k.delta_rule(&rule, scratch);
                k.delta_rule_backward(&backward, scratch);
            });
            close(&bench.values(y), &plain_y, 1e-5);
            close(&bench.values(dx), &expected[0], 1e-4);
            for (view, expected) in [(ddecay.log, &expected[2]), (ddecay.bias, &expected[3])] {
                let with_half: Vec<f64> = expected.iter().map(|one| one + 0.5).collect();
                close(&bench.values(view), &with_half, 1e-4);
            }
            let own = heads.mixed()..heads.remembered();
            of_columns(&bench.values(dprojected), &expected[1], heads, own);
        }
    }
}

/// These columns of the gradient of a projection are the expected ones, and the others were not
/// written.
#[track_caller]
fn of_columns(found: &[f32], expected: &[f64], heads: LinearHeads, columns: Range<usize>) {
    let width = heads.projected();
    for (found, expected) in found.chunks(width).zip(expected.chunks(width)) {
        close(&found[columns.clone()], &expected[columns.clone()], 1e-4);
        let mut others = found[..columns.start].iter().chain(&found[columns.end..]);
        assert!(others.all(|other| other.is_nan()), "columns of others");
    }
}

#[test]
fn gated_norms_are_the_plain_ones() {
    let heads = WIDE;
    let shape = LinearShape { batch: BatchMetadata::plain(&[0, 70]).view(), heads };
    let [x, projected, dy] = [(heads.values(), 1), (heads.projected(), 2), (heads.values(), 3)]
        .map(|(width, seed)| noise(70 * width, seed));
    let gamma = noise(heads.value_size, 4);
    let loss = |x: &[f64], projected: &[f64], gamma: &[f64]| {
        sum_of_products(&plain_norm(x, projected, gamma, heads), &dy.wide)
    };
    for level in Level::all() {
        let mut bench = Bench::new();
        let [y, dx] = [(); 2].map(|()| bench.nan(70, heads.values()));
        let dprojected = bench.nan(70, heads.projected());
        let dgamma = bench.nan(1, heads.value_size);
        let x_view = bench.tensor(heads.values(), &x.narrow);
        let projected_view = bench.tensor(heads.projected(), &projected.narrow);
        let gamma_view = bench.tensor(heads.value_size, &gamma.narrow);
        let dy_view = bench.tensor(heads.values(), &dy.narrow);
        bench.run(level, |k, scratch| {
            let projected = projected_view;
            let gamma = gamma_view;
            let epsilon = 1e-3;
            k.gated_norm(&GatedNorm { y, x: x_view, projected, gamma, epsilon, shape });
            let op = GatedNormBackward {
                dx,
                dprojected,
                dgamma,
                dy: dy_view,
                x: x_view,
                projected,
                gamma,
                epsilon,
                shape,
                accumulate: false,
            };
            k.gated_norm_backward(&op, scratch);
        });
        let expected = plain_norm(&x.wide, &projected.wide, &gamma.wide, heads);
        close(&bench.values(y), &expected, 1e-5);
        let expected = differences(&x.wide, |x| loss(x, &projected.wide, &gamma.wide));
        close(&bench.values(dx), &expected, 1e-4);
        let expected = differences(&gamma.wide, |gamma| loss(&x.wide, &projected.wide, gamma));
        close(&bench.values(dgamma), &expected, 1e-4);
        let expected = differences(&projected.wide, |p| loss(&x.wide, p, &gamma.wide));
        let own = heads.remembered()..heads.projected();
        of_columns(&bench.values(dprojected), &expected, heads, own);
    }
}
