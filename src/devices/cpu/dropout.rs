//! Dropout (Srivastava et al. 2014) by a counter: a mask is a function of its position.
//!
//! Philox 4×32 with ten rounds (Salmon et al. 2011), keyed by seed, counted by (channel ÷ 4,
//! position, sequence, site and step), so that a recomputed forward and the backward draw the
//! same mask, in any schedule.

use rayon::prelude::*;

use super::views::CpuKernels;
use crate::kernels::{ApplyDropout, Dropout, Residual};
use crate::simd::Level;

pub(super) fn dropout(on: &CpuKernels<'_>, op: &ApplyDropout<'_>) {
    let ApplyDropout { y, x, dropout } = *op;
    if y != x {
        let Some(call) = on.call([y], &[x]) else { return };
        let [y] = call.write();
        y.copy_from_slice(call.read(x));
    }
    if let Some(dropout) = dropout {
        let Some(call) = on.call([y], &[]) else { return };
        let channels = y.columns;
        let [y] = call.write();
        apply(on.level, y, channels, &dropout);
    }
}

pub(super) fn residual(on: &CpuKernels<'_>, op: &Residual<'_>) {
    let Residual { y, a, x, dropout: mask } = *op;
    dropout(on, &ApplyDropout { y, x, dropout: mask });
    let Some(call) = on.call([y], &[a]) else { return };
    let [y] = call.write();
    add(on.level, y, call.read(a));
}

#[inline(always)]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let low = u64::from(counter[0]) * 0xD251_1F53;
        let high = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// A mask's draws for one row: what survives is scaled up.
#[derive(Clone, Copy)]
pub(super) struct Row {
    key: [u32; 2],
    counter: [u32; 3],
    threshold: u32,
    scale: f32,
}

impl Row {
    /// The draws of one row of one sequence. `row` is a position, or a head and a query, counted
    /// from the first position.
    #[inline(always)]
    pub(super) fn new(dropout: &Dropout<'_>, sequence: usize, row: u32) -> Row {
        let Dropout { probability, seed, step, site, first_sequence, first_position, .. } =
            *dropout;
        let (sequence, row) = (first_sequence + sequence as u32, first_position + row);
        Row {
            key: [seed as u32, (seed >> 32) as u32 ^ (step >> 32) as u32],
            counter: [row, sequence, site.wrapping_mul(0x9E37_79B1) ^ (step as u32)],
            threshold: (f64::from(probability) * 4_294_967_296.0) as u32,
            scale: 1.0 / (1.0 - probability),
        }
    }

    /// Four columns from `column`, a multiple of 4: 0 or the scale.
    #[inline(always)]
    pub(super) fn factors(&self, column: usize) -> [f32; 4] {
        let [row, sequence, site] = self.counter;
        let drawn = philox([(column / 4) as u32, row, sequence, site], self.key);
        drawn.map(|draw| if draw < self.threshold { 0.0 } else { self.scale })
    }

    /// Applies the mask to columns 0.. of a row.
    #[inline(always)]
    pub(super) fn apply(&self, values: &mut [f32]) {
        for (index, values) in values.chunks_mut(4).enumerate() {
            let factors = self.factors(4 * index);
            values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
        }
    }
}

/// y *= mask, row by row. y: (R, C).
fn apply(level: Level, y: &mut [f32], channels: usize, dropout: &Dropout<'_>) {
    y.par_chunks_mut(channels).enumerate().for_each(|(row, y)| {
        let (sequence, position) = dropout.place(row);
        level.run(
            #[inline(always)]
            || Row::new(dropout, sequence, position as u32).apply(y),
        );
    });
}

/// y += x.
fn add(level: Level, y: &mut [f32], x: &[f32]) {
    const PIECE: usize = 16384;
    y.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE)).for_each(|(y, x)| {
        level.run(
            #[inline(always)]
            || y.iter_mut().zip(x).for_each(|(y, x)| *y += x),
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{BatchMetadata, MaskRows};

    fn rows(starts: &[usize]) -> MaskRows<'_> {
        let dropout_key = None;
        let kinds = &[];
        let batch = BatchMetadata { starts, kinds, documents: &[], cached: &[], dropout_key };
        MaskRows::Positions(batch.view())
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
        assert_eq!(philox([0; 4], [0; 2]), zeros);
        let ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), ones);
    }

    #[test]
    fn a_mask_depends_on_its_place_alone() {
        let mut all = vec![1.0; 4 * 5 * 10];
        apply(Level::best(), &mut all, 10, &dropout(0.3, &[0, 5, 10, 15, 20]));
        let mut later = vec![1.0; (3 + 5) * 10];
        let from_two = Dropout { first_sequence: 2, ..dropout(0.3, &[0, 3, 8]) };
        apply(Level::Portable, &mut later, 10, &from_two);
        assert_eq!(all[2 * 5 * 10..][..3 * 10], later[..3 * 10], "a shorter sequence");
        assert_eq!(all[3 * 5 * 10..], later[3 * 10..]);
        let mut behind = vec![1.0; 3 * 10];
        let chunk = Dropout { first_position: 2, rows: rows(&[0, 3]), ..from_two };
        apply(Level::best(), &mut behind, 10, &chunk);
        assert_eq!(all[(2 * 5 + 2) * 10..][..30], behind);
        let mut first = vec![1.0; 2 * 10];
        let of_each = Dropout { rows: MaskRows::Sequences, ..from_two };
        apply(Level::best(), &mut first, 10, &of_each);
        assert_eq!([&first[..10], &first[10..]], [&all[100..110], &all[150..160]]);
    }

    #[test]
    fn it_drops_what_it_should_and_keeps_the_mean() {
        let mut y = vec![1.0; 100_000];
        apply(Level::best(), &mut y, 100, &dropout(0.1, &[0, 10, 1000]));
        let dropped = y.iter().filter(|&&y| y == 0.0).count();
        assert!((9_500..10_500).contains(&dropped), "{dropped} of 100000");
        assert!(y.iter().all(|&y| y == 0.0 || y == 1.0 / 0.9));
    }
}
