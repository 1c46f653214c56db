//! Positions by rotation (Su et al. 2021), of the first and second half of each head's channels
//! against each other, as transformers pairs them, or of neighbours.

use rayon::prelude::*;

use super::views::{Call, Compute};
use crate::kernels::{PAIRS, RotaryTable, Rotate};
use crate::simd::Level;

impl Compute for Rotate<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Rotate { shape, inverse, .. } = *self;
        let d = shape.head_size;
        let tables = self.tables();
        let rotated = (shape.heads + shape.kv_heads) * d;
        let rows = call.write(self.qkv).par_chunks_mut(shape.qkv_width()).enumerate();
        rows.for_each(|(row, qkv)| {
            let of_row =
                if let [one] = &tables[..] { one } else { &tables[shape.batch.place(row).0] };
            let RotaryTable { frequencies, pairs, distance, interleaved, growth, scale } = *of_row;
            let at = shape.batch.position_in_document(row);
            let position = at as f32;
            let mut cos = [0.0; PAIRS];
            let mut sin = [0.0; PAIRS];
            for pair in 0..pairs {
                // The angle in f32, as transformers has it; its sine and cosine exactly.
                let (s, c) = f64::from(position * frequencies[pair]).sin_cos();
                let s = if inverse { -s as f32 } else { s as f32 };
                (cos[pair], sin[pair]) = (c as f32 * scale, s * scale);
            }
            level.run(
                #[inline(always)]
                || {
                    for head in qkv[..rotated].chunks_exact_mut(d) {
                        if interleaved {
                            let pairs = head[..2 * pairs].as_chunks_mut().0.iter_mut();
                            for ([a, b], (cos, sin)) in pairs.zip(cos.iter().zip(&sin)) {
                                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                            }
                            continue;
                        }
                        let (first, second) = head.split_at_mut(distance);
                        let pairs = first[..pairs].iter_mut().zip(second);
                        let pairs = pairs.zip(cos.iter().zip(&sin));
                        for ((a, b), (cos, sin)) in pairs {
                            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                        }
                    }
                },
            );
            if let Some(growth) = growth {
                let factor = growth.factor(at);
                qkv[..shape.width()].iter_mut().for_each(|query| *query *= factor);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, noise};
    use super::*;
    use crate::kernels::{AttentionShape, BatchMetadata, QueryGrowth, Rotary, RotaryScaling, Yarn};

    #[test]
    fn it_rotates_queries_and_keys_and_back() {
        let rotary = Rotary::new(100.0);
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 5, 9]).view(), [3, 1, 4]);
        let x = noise(shape.rows() * shape.qkv_width(), 1);
        for level in Level::all() {
            let mut bench = Bench::new();
            let qkv = bench.tensor(shape.qkv_width(), &x.narrow);
            let op = Rotate { qkv, rotary: &rotary, shape, inverse: false };
            bench.run(level, |k, _| k.rotate(&op));
            let expected: Vec<f64> = (0..x.wide.len())
                .map(|at| {
                    let row = at / shape.qkv_width();
                    let column = at % shape.qkv_width();
                    let head = column / 4;
                    let i = column % 4;
                    if head >= 4 {
                        return x.wide[at];
                    }
                    let angle = (row % 5) as f64 / 100_f64.powf((i % 2) as f64 / 2.0);
                    let other = if i < 2 { -x.wide[at + 2] } else { x.wide[at - 2] };
                    x.wide[at] * angle.cos() + other * angle.sin()
                })
                .collect();
            close(&bench.values(qkv), &expected, 1e-6);
            bench.run(level, |k, _| k.rotate(&Rotate { inverse: true, ..op }));
            close(&bench.values(qkv), &x.wide, 1e-6);
        }
    }

    /// Neighbours are the two halves in another order.
    #[test]
    fn neighbours_rotate_as_halves_do() {
        let halves = Rotary { part: 0.75, ..Rotary::new(100.0) };
        let rotary = Rotary { interleaved: true, ..halves };
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 5, 9]).view(), [3, 1, 8]);
        let x = noise(shape.rows() * shape.qkv_width(), 4).narrow;
        // Three of four pairs rotate.
        let order = [0, 3, 1, 4, 2, 5, 6, 7];
        let ordered: Vec<f32> =
            (0..x.len()).map(|at| x[at / 8 * 8 + [0, 2, 4, 1, 3, 5, 6, 7][at % 8]]).collect();
        for (level, inverse) in Level::all().into_iter().flat_map(|l| [(l, false), (l, true)]) {
            let mut bench = Bench::new();
            let qkv = bench.tensor(shape.qkv_width(), &x);
            let other = bench.tensor(shape.qkv_width(), &ordered);
            bench.run(level, |k, _| {
                k.rotate(&Rotate { qkv, rotary: &rotary, shape, inverse });
                k.rotate(&Rotate { qkv: other, rotary: &halves, shape, inverse });
            });
            let halves = bench.values(other);
            let expected = (0..x.len()).map(|at| halves[at / 8 * 8 + order[at % 8]]);
            assert_eq!(bench.values(qkv), expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn queries_grow_with_their_positions() {
        let growth = Some(QueryGrowth { beta: 0.5, positions: 2 });
        let plain = Rotary::new(100.0);
        let rotary = Rotary { growth, ..plain };
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 5, 9]).view(), [3, 1, 4]);
        let x = noise(shape.rows() * shape.qkv_width(), 5).narrow;
        for (level, inverse) in Level::all().into_iter().flat_map(|l| [(l, false), (l, true)]) {
            let mut bench = Bench::new();
            let [qkv, other] = [(); 2].map(|()| bench.tensor(shape.qkv_width(), &x));
            bench.run(level, |k, _| {
                k.rotate(&Rotate { qkv, rotary: &rotary, shape, inverse });
                k.rotate(&Rotate { qkv: other, rotary: &plain, shape, inverse });
            });
            let plain = bench.values(other);
            let expected = (0..x.len()).map(|at| {
                let position = at / shape.qkv_width() % 5;
                let is_query = at % shape.qkv_width() < shape.width();
                let factor = 1.0 + 0.5 * (1.0 + (position / 2) as f64).ln();
                f64::from(plain[at]) * if is_query { factor } else { 1.0 }
            });
            close(&bench.values(qkv), &expected.collect::<Vec<_>>(), 1e-6);
        }
    }

    /// A part of each head rotates and is scaled; the transposed rotation scales it once more.
    #[test]
    fn a_part_rotates_and_is_scaled() {
        let yarn = Yarn {
            factor: 2.0,
            attention_factor: 1.5,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            positions: 1 << 20,
        };
        let scaling = RotaryScaling::Yarn(yarn);
        let rotary = Rotary { part: 0.5, scaling, ..Rotary::new(100.0) };
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 3]).view(), [1, 1, 4]);
        let x = noise(shape.rows() * shape.qkv_width(), 2);
        for level in Level::all() {
            let mut bench = Bench::new();
            let qkv = bench.tensor(shape.qkv_width(), &x.narrow);
            let op = Rotate { qkv, rotary: &rotary, shape, inverse: false };
            bench.run(level, |k, _| k.rotate(&op));
            let once = |at: usize, scale: f64| {
                let angle = (at / shape.qkv_width()) as f64;
                match (at % shape.qkv_width(), at % 4) {
                    (0..8, 0) => scale * (x.wide[at] * angle.cos() - x.wide[at + 1] * angle.sin()),
                    (0..8, 1) => scale * (x.wide[at] * angle.cos() + x.wide[at - 1] * angle.sin()),
                    _ => x.wide[at],
                }
            };
            let rotated: Vec<f64> = (0..x.wide.len()).map(|at| once(at, 1.5)).collect();
            close(&bench.values(qkv), &rotated, 1e-6);
            bench.run(level, |k, _| k.rotate(&Rotate { inverse: true, ..op }));
            let back = |at: usize| match (at % shape.qkv_width(), at % 4) {
                (0..8, 0..2) => 2.25 * x.wide[at],
                _ => x.wide[at],
            };
            let back: Vec<f64> = (0..x.wide.len()).map(back).collect();
            close(&bench.values(qkv), &back, 1e-6);
        }
    }

    /// Texts that are generated follow their own lengths.
    #[test]
    fn each_text_has_the_frequencies_of_its_length() {
        let scaling = RotaryScaling::Dynamic { factor: 2.0, positions: 4 };
        let rotary = Rotary { scaling, ..Rotary::new(100.0) };
        let all = BatchMetadata { cached: &[7, 2], ..BatchMetadata::plain(&[0, 1, 2]) };
        let shape = AttentionShape::causal(all.view(), [1, 1, 4]);
        let width = shape.qkv_width();
        let x = noise(2 * width, 3);
        let rotated = |shape: AttentionShape<'_>, x: &[f32]| {
            let mut bench = Bench::new();
            let qkv = bench.tensor(width, x);
            let op = Rotate { qkv, rotary: &rotary, shape, inverse: false };
            bench.run(Level::best(), |k, _| k.rotate(&op));
            bench.values(qkv)
        };
        let both = rotated(shape, &x.narrow);
        for (index, cached) in [[7], [2]].iter().enumerate() {
            let alone = BatchMetadata { cached, ..BatchMetadata::plain(&[0, 1]) };
            let shape = AttentionShape { batch: alone.view(), ..shape };
            let of_one = index * width..(index + 1) * width;
            assert_eq!(both[of_one.clone()], rotated(shape, &x.narrow[of_one]));
        }
    }
}
