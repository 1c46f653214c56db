//! Dropout (Srivastava et al. 2014) by a counter: a mask is a function of its position.
//!
//! Philox 4×32 with ten rounds (Salmon et al. 2011), keyed by seed, counted by (channel ÷ 4,
//! position, sequence, site and step), so that a recomputed forward and the backward draw the
//! same mask, in any schedule.

use rayon::prelude::*;

use super::views::{Call, Compute, CpuKernels};
use crate::kernels::{ApplyDropout, Dropout, Residual, Runs, Scale};
use crate::simd::Level;
use crate::tensor::View;

impl Runs<ApplyDropout<'_>> for CpuKernels<'_> {
    fn run(&self, op: &ApplyDropout<'_>) {
        let ApplyDropout { y, x, dropout } = *op;
        if y != x || dropout.is_some() {
            let Some(call) = self.call(op) else { return };
            apply(self.level, &call, y, None, x, dropout);
        }
    }
}

impl Compute for Residual<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        apply(level, call, self.y, Some(self.a), self.x, self.dropout);
    }
}

impl Compute for Scale {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Scale { y, x, factor, by } = *self;
        let factor = by.map_or(factor, |by| factor * call.read(by)[0]);
        let read = (x != y).then(|| call.read(x));
        let y = call.write(y);
        if let Some(x) = read {
            y.copy_from_slice(x);
        }
        y.par_chunks_mut(PIECE).for_each(|y| {
            level.run(
                #[inline(always)]
                || y.iter_mut().for_each(|y| *y *= factor),
            );
        });
    }
}

/// Floats of one task, about.
const PIECE: usize = 16384;

/// Counters that are drawn from at once. With fewer, the compiler makes no vector instructions.
const LANES: usize = 16;

/// Columns whose factors are drawn at once.
pub(super) const DRAWN: usize = 4 * LANES;

/// The random words of [`LANES`] counters: `counter[word][lane]`.
#[inline(always)]
fn philox(mut counter: [[u32; LANES]; 4], mut key: [u32; 2]) -> [[u32; LANES]; 4] {
    for _ in 0..10 {
        let [a, b, c, d] = counter;
        for lane in 0..LANES {
            let low = u64::from(a[lane]) * 0xD251_1F53;
            let high = u64::from(c[lane]) * 0xCD9E_8D57;
            counter[0][lane] = (high >> 32) as u32 ^ b[lane] ^ key[0];
            counter[1][lane] = high as u32;
            counter[2][lane] = (low >> 32) as u32 ^ d[lane] ^ key[1];
            counter[3][lane] = low as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The mask of one row: 0, or the factor that keeps the mean.
#[derive(Clone, Copy)]
pub(super) struct Row {
    key: [u32; 2],
    counter: [u32; 3],
    threshold: u32,
    scale: f32,
}

impl Row {
    /// The mask of one row of one sequence. `row` is a position, or a head and a query, relative to
    /// the first position.
    #[inline(always)]
    pub(super) fn new(dropout: &Dropout<'_>, sequence: usize, row: u32) -> Row {
        let Dropout { probability, seed, step, site, first_sequence, first_position, .. } =
            *dropout;
        let sequence = first_sequence + sequence as u32;
        let row = first_position + row;
        Row {
            key: [seed as u32, (seed >> 32) as u32 ^ (step >> 32) as u32],
            counter: [row, sequence, site.wrapping_mul(0x9E37_79B1) ^ (step as u32)],
            threshold: (f64::from(probability) * 4_294_967_296.0) as u32,
            scale: 1.0 / (1.0 - probability),
        }
    }

    /// [`DRAWN`] columns from `column`, a multiple of 4: 0 or the scale.
    #[inline(always)]
    pub(super) fn factors(&self, column: usize) -> [f32; DRAWN] {
        let [row, sequence, site] = self.counter.map(|word| [word; LANES]);
        let columns = std::array::from_fn(|lane| (column / 4 + lane) as u32);
        let drawn = philox([columns, row, sequence, site], self.key);
        std::array::from_fn(
            |at| {
                if drawn[at % 4][at / 4] < self.threshold { 0.0 } else { self.scale }
            },
        )
    }

    /// The random word of the row's first column.
    pub(super) fn first_draw(&self) -> u32 {
        let [row, sequence, site] = self.counter.map(|word| [word; LANES]);
        philox([[0; LANES], row, sequence, site], self.key)[0][0]
    }

    /// Multiplies columns of a row by the mask, from `column` on, a multiple of 4.
    #[inline(always)]
    pub(super) fn apply(&self, values: &mut [f32], column: usize) {
        for (index, values) in values.chunks_mut(DRAWN).enumerate() {
            let factors = self.factors(column + DRAWN * index);
            values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
        }
    }
}

/// y = a + mask x, in one pass. `None` for `a` means 0; `x` may be `y`. (R, C).
fn apply(
    level: Level,
    call: &Call<'_>,
    y: View,
    a: Option<View>,
    x: View,
    dropout: Option<Dropout<'_>>,
) {
    let channels = y.columns;
    let x = call.read_if(Some(x).filter(|x| *x != y));
    let a = call.read_if(a);
    let rows = PIECE.div_ceil(channels);
    call.write(y).par_chunks_mut(rows * channels).enumerate().for_each(|(piece, y)| {
        level.run(
            #[inline(always)]
            || {
                for (row, y) in (piece * rows..).zip(y.chunks_exact_mut(channels)) {
                    if let Some(x) = x {
                        y.copy_from_slice(&x[row * channels..][..channels]);
                    }
                    if let Some(dropout) = &dropout {
                        let (sequence, position) = dropout.place(row);
                        Row::new(dropout, sequence, position as u32).apply(y, 0);
                    }
                    if let Some(a) = a {
                        let a = &a[row * channels..][..channels];
                        y.iter_mut().zip(a).for_each(|(y, a)| *y += a);
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::super::oracle::Bench;
    use super::*;
    use crate::kernels::{BatchMetadata, MaskRows};

    fn rows(starts: &[usize]) -> MaskRows<'_> {
        MaskRows::Positions(BatchMetadata::plain(starts).view())
    }

    fn dropout(probability: f32, starts: &[usize]) -> Dropout<'_> {
        Dropout {
            probability,
            seed: 7,
            step: 3,
            site: 11,
            first_sequence: 0,
            first_position: 0,
            rows: rows(starts),
        }
    }

    #[test]
    fn philox_is_the_published_one() {
        // Known answers of Random123's kat_vectors for philox4x32, 10 rounds.
        let zeros = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        assert_eq!(philox([[0; LANES]; 4], [0; 2]), zeros.map(|word| [word; LANES]));
        let ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        let found = philox([[u32::MAX; LANES]; 4], [u32::MAX; 2]);
        assert_eq!(found, ones.map(|word| [word; LANES]));
    }

    /// Rows of ones, after dropout.
    fn dropped(level: Level, rows: usize, columns: usize, dropout: Dropout<'_>) -> Vec<f32> {
        let mut bench = Bench::new();
        let y = bench.tensor(columns, &vec![1.0; rows * columns]);
        let dropout = Some(dropout);
        bench.run(level, |k, _| k.dropout(&ApplyDropout { y, x: y, dropout }));
        bench.values(y)
    }

    #[test]
    fn a_mask_depends_on_its_place_alone() {
        let all = dropped(Level::best(), 20, 10, dropout(0.3, &[0, 5, 10, 15, 20]));
        let from_two = Dropout { first_sequence: 2, ..dropout(0.3, &[0, 3, 8]) };
        let later = dropped(Level::Portable, 8, 10, from_two);
        assert_eq!(all[2 * 5 * 10..][..3 * 10], later[..3 * 10], "a shorter sequence");
        assert_eq!(all[3 * 5 * 10..], later[3 * 10..]);
        let chunk = Dropout { first_position: 2, rows: rows(&[0, 3]), ..from_two };
        let behind = dropped(Level::best(), 3, 10, chunk);
        assert_eq!(all[(2 * 5 + 2) * 10..][..30], behind);
        let of_each = Dropout { rows: MaskRows::Sequences, ..from_two };
        let first = dropped(Level::best(), 2, 10, of_each);
        assert_eq!([&first[..10], &first[10..]], [&all[100..110], &all[150..160]]);
    }

    #[test]
    fn it_drops_what_it_should_and_keeps_the_mean() {
        let y = dropped(Level::best(), 1000, 100, dropout(0.1, &[0, 10, 1000]));
        let zeros = y.iter().filter(|&&y| y == 0.0).count();
        assert!((9_500..10_500).contains(&zeros), "{zeros} of 100000");
        assert!(y.iter().all(|&y| y == 0.0 || y == 1.0 / 0.9));
    }
}
