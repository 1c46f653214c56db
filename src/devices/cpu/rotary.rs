//! Positions by rotation (Su et al. 2021), of the first and second half of each head's channels
//! against each other, as transformers pairs them.

use rayon::prelude::*;

use super::views::{Call, Compute};
use crate::kernels::Rotate;
use crate::simd::Level;

/// Channels of the largest head, halved.
const PAIRS: usize = crate::kernels::HEAD_LIMIT / 2;

impl Compute for Rotate<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Rotate { rotary, shape, inverse, .. } = *self;
        let d = shape.head_size;
        let pairs = d / 2;
        let mut frequencies = [0.0; PAIRS];
        for (to, frequency) in frequencies.iter_mut().zip(rotary.frequencies(d)) {
            *to = frequency;
        }
        let rotated = (shape.heads + shape.kv_heads) * d;
        let rows = call.write(self.qkv).par_chunks_mut(shape.qkv_width()).enumerate();
        rows.for_each(|(row, qkv)| {
            let position = shape.batch.position_in_document(row) as f32;
            let mut cos = [0.0; PAIRS];
            let mut sin = [0.0; PAIRS];
            for pair in 0..pairs {
                // The angle in f32, as transformers has it; its sine and cosine exactly.
                let (s, c) = f64::from(position * frequencies[pair]).sin_cos();
                (cos[pair], sin[pair]) = (c as f32, if inverse { -s as f32 } else { s as f32 });
            }
            level.run(
                #[inline(always)]
                || {
                    for head in qkv[..rotated].chunks_exact_mut(d) {
                        let (first, second) = head.split_at_mut(pairs);
                        let pairs = first.iter_mut().zip(second).zip(cos.iter().zip(&sin));
                        for ((a, b), (cos, sin)) in pairs {
                            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                        }
                    }
                },
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, noise};
    use super::*;
    use crate::kernels::{AttentionShape, BatchMetadata, Rotary, RotaryScaling};

    #[test]
    fn it_rotates_queries_and_keys_and_back() {
        let rotary = Rotary { theta: 100.0, scaling: RotaryScaling::None };
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

    /// The expected numbers are those of transformers' llama3 scaling: theta 500000, factor 8, low
    /// 1, high 4, 8192 positions.
    #[test]
    fn stretched_frequencies_are_transformers() {
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, positions: 8192 };
        let rotary = Rotary { theta: 500_000.0, scaling };
        let found: Vec<f32> = rotary.frequencies(128).collect();
        for (pair, expected) in
            [(0, 1.0), (28, 3.211_446e-3), (29, 2.166_570_6e-3), (63, 3.068_926e-7)]
        {
            assert!((found[pair] / expected - 1.0).abs() < 1e-6, "{pair}: {}", found[pair]);
        }
        let halved = Rotary { theta: 100.0, scaling: RotaryScaling::Linear(2.0) };
        assert_eq!(halved.frequencies(4).collect::<Vec<_>>(), [0.5, 0.05]);
    }
}
