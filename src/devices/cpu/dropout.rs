//! Dropout (Srivastava et al. 2014) by a counter: a mask is a function of where it is asked for.
//!
//! Philox 4×32 with ten rounds (Salmon et al. 2011), keyed by seed, counted by (channel ÷ 4,
//! position, sequence, site and step), so that a recomputed forward and the backward draw the
//! same mask, in any schedule.

use rayon::prelude::*;

use crate::kernels::{Dropout, Rows};
use crate::simd::Level;

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
    /// Of one row of one sequence; `row` is a position, or a head and a query, counted from the first
    /// position.
    #[inline(always)]
    pub(super) fn new(dropout: &Dropout, sequence: usize, row: u32) -> Row {
        let Dropout { probability, seed, step, site, first_sequence, first_position } = *dropout;
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

/// Applies `of(values of y, sequence, position)` to each row of y, in parallel.
fn each_row(y: &mut [f32], rows: Rows, of: impl Fn(&mut [f32], usize, usize) + Sync) {
    let channels = y.len() / rows.count();
    y.par_chunks_mut(channels).enumerate().for_each(|(row, y)| {
        of(y, row / rows.positions, row % rows.positions);
    });
}

/// y *= mask, row by row.
pub(super) fn apply(level: Level, y: &mut [f32], rows: Rows, dropout: &Dropout) {
    each_row(y, rows, |y, sequence, position| {
        level.run(
            #[inline(always)]
            || Row::new(dropout, sequence, position as u32).apply(y),
        );
    });
}

/// y += x.
pub(super) fn add(level: Level, y: &mut [f32], x: &[f32]) {
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

    fn dropout(probability: f32) -> Dropout {
        Dropout { probability, seed: 7, step: 3, site: 11, first_sequence: 0, first_position: 0 }
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
        let rows = Rows { sequences: 4, positions: 5 };
        let mut all = vec![1.0; 4 * 5 * 10];
        apply(Level::best(), &mut all, rows, &dropout(0.3));
        let mut later = vec![1.0; 2 * 5 * 10];
        let from_two = Dropout { first_sequence: 2, ..dropout(0.3) };
        apply(Level::Portable, &mut later, Rows { sequences: 2, ..rows }, &from_two);
        assert_eq!(all[2 * 5 * 10..], later);
        let mut behind = vec![1.0; 3 * 10];
        let (rows, first_position) = (Rows { sequences: 1, positions: 3 }, 2);
        apply(Level::best(), &mut behind, rows, &Dropout { first_position, ..from_two });
        assert_eq!(all[(2 * 5 + 2) * 10..][..30], behind);
    }

    #[test]
    fn it_drops_what_it_should_and_keeps_the_mean() {
        let rows = Rows { sequences: 100, positions: 10 };
        let mut y = vec![1.0; 100_000];
        apply(Level::best(), &mut y, rows, &dropout(0.1));
        let dropped = y.iter().filter(|&&y| y == 0.0).count();
        assert!((9_500..10_500).contains(&dropped), "{dropped} of 100000");
        assert!(y.iter().all(|&y| y == 0.0 || y == 1.0 / 0.9));
    }
}
