//! Gates of attention's output.

use rayon::prelude::*;

use super::activation::sigmoid;
use super::views::{Call, Compute};
use crate::kernels::{JoinGates, SigmoidGate, SigmoidGateBackward, SplitGates};
use crate::simd::Level;

/// Elements of one parallel task.
const PIECE: usize = 8192;

impl Compute for SplitGates<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let shape = self.shape;
        let d = shape.head_size;
        let width = shape.width();
        let rows = call.write(self.qkv).par_chunks_mut(shape.qkv_width());
        let rows = rows.zip(call.write(self.gates).par_chunks_mut(width));
        let x = call.read(self.x).par_chunks(width + shape.qkv_width());
        rows.zip(x).for_each(|((qkv, gates), x)| {
            let (pairs, kv) = x.split_at(2 * width);
            let heads = qkv.chunks_exact_mut(d).zip(gates.chunks_exact_mut(d));
            for ((query, gate), pair) in heads.zip(pairs.chunks_exact(2 * d)) {
                query.copy_from_slice(&pair[..d]);
                gate.copy_from_slice(&pair[d..]);
            }
            qkv[width..].copy_from_slice(kv);
        });
    }
}

impl Compute for JoinGates<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let shape = self.shape;
        let d = shape.head_size;
        let width = shape.width();
        let rows = call.write(self.y).par_chunks_mut(width + shape.qkv_width());
        let rows = rows.zip(call.read(self.qkv).par_chunks(shape.qkv_width()));
        rows.zip(call.read(self.gates).par_chunks(width)).for_each(|((y, qkv), gates)| {
            let (pairs, kv) = y.split_at_mut(2 * width);
            let heads = qkv.chunks_exact(d).zip(gates.chunks_exact(d));
            for (pair, (query, gate)) in pairs.chunks_exact_mut(2 * d).zip(heads) {
                pair[..d].copy_from_slice(query);
                pair[d..].copy_from_slice(gate);
            }
            kv.copy_from_slice(&qkv[width..]);
        });
    }
}

impl Compute for SigmoidGate {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let pieces = call.write(self.y).par_chunks_mut(PIECE);
        let pieces = pieces.zip(call.read(self.x).par_chunks(PIECE));
        pieces.zip(call.read(self.gates).par_chunks(PIECE)).for_each(|((y, x), gates)| {
            level.run(
                #[inline(always)]
                || {
                    let all = y.iter_mut().zip(x).zip(gates);
                    all.for_each(|((y, x), gate)| *y = x * sigmoid(*gate));
                },
            );
        });
    }
}

impl Compute for SigmoidGateBackward {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let [dy, x, gates] = [self.dy, self.x, self.gates].map(|view| call.read(view));
        let pieces = call.write(self.dx).par_chunks_mut(PIECE);
        let pieces = pieces.zip(call.write(self.dgates).par_chunks_mut(PIECE));
        let reads = dy.par_chunks(PIECE).zip(x.par_chunks(PIECE)).zip(gates.par_chunks(PIECE));
        pieces.zip(reads).for_each(|((dx, dgates), ((dy, x), gates))| {
            level.run(
                #[inline(always)]
                || {
                    for at in 0..dy.len() {
                        let s = sigmoid(gates[at]);
                        dx[at] = dy[at] * s;
                        dgates[at] = dy[at] * x[at] * (s * (1.0 - s));
                    }
                },
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
    use super::*;
    use crate::kernels::{AttentionShape, BatchMetadata};

    #[test]
    fn projections_are_taken_apart_and_put_together() {
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 2]).view(), [2, 1, 2]);
        let x: Vec<f32> = (0..24).map(|at| at as f32).collect();
        let mut bench = Bench::new();
        let qkv = bench.nan(2, 8);
        let gates = bench.nan(2, 4);
        let y = bench.nan(2, 12);
        let input = bench.tensor(12, &x);
        bench.run(Level::best(), |k, _| {
            k.split_gates(&SplitGates { qkv, gates, x: input, shape });
            k.join_gates(&JoinGates { y, qkv, gates, shape });
        });
        assert_eq!(bench.values(qkv)[..8], [0, 1, 4, 5, 8, 9, 10, 11_u8].map(f32::from));
        assert_eq!(bench.values(gates)[..4], [2, 3, 6, 7_u8].map(f32::from));
        assert_eq!(bench.values(y), x);
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        let [x, gates, dy] = [1, 2, 3].map(|seed| noise(35, seed));
        let plain = |x: &[f64], gates: &[f64]| -> Vec<f64> {
            x.iter().zip(gates).map(|(x, gate)| x / (1.0 + (-gate).exp())).collect()
        };
        for level in Level::all() {
            let mut bench = Bench::new();
            let [y, dx, dgates] = [(); 3].map(|()| bench.nan(5, 7));
            let [x_view, gates_view, dy_view] =
                [&x, &gates, &dy].map(|one| bench.tensor(7, &one.narrow));
            bench.run(level, |k, _| {
                k.sigmoid_gate(&SigmoidGate { y, x: x_view, gates: gates_view });
                let op =
                    SigmoidGateBackward { dx, dgates, dy: dy_view, x: x_view, gates: gates_view };
                k.sigmoid_gate_backward(&op);
            });
            close(&bench.values(y), &plain(&x.wide, &gates.wide), 1e-6);
            let loss = |x: &[f64], gates: &[f64]| {
                plain(x, gates).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            let expected = differences(&x.wide, |x| loss(x, &gates.wide));
            close(&bench.values(dx), &expected, 1e-5);
            let expected = differences(&gates.wide, |gates| loss(&x.wide, gates));
            close(&bench.values(dgates), &expected, 1e-5);
        }
    }
}
