//! Loops over embedding rows, their gradients, and losses.
//!
//! The host owns the vocabulary's table and the labels. So no device has a kernel for this, and the
//! same loops run beside every kind of device.

use std::ops::Range;

use rayon::prelude::*;

use crate::eps::TableRows;
use crate::kernels::{Loss, label_of};
use crate::models::Tile;
use crate::random;
use crate::simd::Level;
use crate::tensor::{Element, int8};

/// Copies the rows of the tokens that lie in a tile, times `scale`. The tile begins at row `first`
/// of the vocabulary. y: (tokens, channels).
pub(super) fn gather<Y: Element>(
    y: &mut [Y],
    tokens: &[u32],
    tile: &TableRows<'_>,
    first: usize,
    channels: usize,
    scale: f32,
) {
    match tile {
        TableRows::F32(tile) => gather_rows(y, tokens, tile, first, channels, scale),
        TableRows::Bf16(tile) => gather_rows(y, tokens, tile, first, channels, scale),
        TableRows::F16(tile) => gather_rows(y, tokens, tile, first, channels, scale),
    }
}

/// tile: (rows, channels).
fn gather_rows<Y: Element, X: Element>(
    y: &mut [Y],
    tokens: &[u32],
    tile: &[X],
    first: usize,
    channels: usize,
    scale: f32,
) {
    let rows = tile.len() / channels;
    y.par_chunks_mut(channels).zip(tokens).for_each(|(y, &token)| {
        if let Some(row) = (token as usize).checked_sub(first).filter(|&row| row < rows) {
            let row = &tile[row * channels..][..channels];
            y.iter_mut().zip(row).for_each(|(y, &x)| *y = Y::from_f32(x.to_f32() * scale));
        }
    });
}

/// Adds noise to the rows of the tokens that lie in a tile. `noise` gives the key and the greatest
/// value of a row's noise. y: (tokens, channels).
pub(super) fn add_noise<Y: Element>(
    y: &mut [Y],
    tokens: &[u32],
    tile: Tile,
    channels: usize,
    noise: impl Fn(usize) -> (u64, f32) + Sync,
) {
    let each = y.par_chunks_mut(channels).zip(tokens).enumerate();
    each.for_each(|(row, (y, &token))| {
        if (tile.first..tile.first + tile.rows).contains(&(token as usize)) {
            let (mut state, most) = noise(row);
            for y in y {
                let uniform = 2.0 * random::unit(&mut state) as f32 - 1.0;
                *y = Y::from_f32(y.to_f32() + uniform * most);
            }
        }
    });
}

/// Runs of rows in a tile. One thread adds to one run, so a tile occupies up to 64 threads.
const RUNS: usize = 64;

/// A tile of the embedding's gradient, or a part of one.
pub(super) struct Table<'t> {
    pub(super) rows: &'t mut [f32],
    /// Elements of the tile before the part.
    pub(super) from: usize,
    /// The tile's first row of the vocabulary.
    pub(super) first: usize,
    /// True if the gradients replace what the rows hold.
    pub(super) is_new: bool,
}

/// A token's gradient, as it is stashed.
pub(super) trait Gradient: Copy + Send + Sync {
    fn channels(self) -> usize;
    /// Adds a range of its channels to `sum`, times `scale`.
    fn add_to(self, sum: &mut [f32], range: Range<usize>, scale: f32);
}

impl<D: Element> Gradient for &[D] {
    fn channels(self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn add_to(self, sum: &mut [f32], range: Range<usize>, scale: f32) {
        sum.iter_mut().zip(&self[range]).for_each(|(sum, &dy)| *sum += dy.to_f32() * scale);
    }
}

impl Gradient for int8::Int8Row<'_> {
    fn channels(self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn add_to(self, sum: &mut [f32], range: Range<usize>, scale: f32) {
        sum.iter_mut().zip(self.numbers(range)).for_each(|(sum, dy)| *sum += dy * scale);
    }
}

/// Adds the gradients of the tokens that lie in a table to the table's rows, times `scale`. Each
/// row's gradients are added in the order of the tokens. `gradients` has one for each token.
pub(super) fn scatter<G: Gradient>(
    level: Level,
    table: Table<'_>,
    tokens: &[u32],
    gradients: &[G],
    scale: f32,
) {
    let Table { rows, from, first, is_new } = table;
    let channels = gradients.first().map_or(1, |gradient| gradient.channels());
    let run = (rows.len() / channels).div_ceil(RUNS).max(1) * channels;
    rows.par_chunks_mut(run).enumerate().for_each(|(index, run_of_rows)| {
        let start = from + index * run;
        let end = start + run_of_rows.len();
        if is_new {
            run_of_rows.fill(0.0);
        }
        level.run(
            #[inline(always)]
            || {
                for (&token, gradient) in tokens.iter().zip(gradients) {
                    let Some(row) = (token as usize).checked_sub(first) else { continue };
                    let at = row * channels;
                    let low = at.max(start);
                    let high = (at + channels).min(end);
                    if low < high {
                        let to = &mut run_of_rows[low - start..high - start];
                        gradient.add_to(to, low - at..high - at, scale);
                    }
                }
            },
        );
    });
}

/// Writes the statistics of a position before the first tile of the head adds to them.
pub(super) fn begin_statistics(statistics: &mut [f32], label: i32) {
    statistics.copy_from_slice(&[f32::NEG_INFINITY, 0.0, 0.0, f32::from_bits(label as u32)]);
}

/// The loss of a labelled position, from its complete statistics; `None` without a label.
pub(super) fn token_loss(statistics: &[f32], loss: &dyn Loss) -> Option<f32> {
    let [most, sum, target, _] = *statistics else { unreachable!("four floats a position") };
    (label_of(statistics) >= 0).then(|| loss.value(most + sum.ln(), target))
}

/// The loss of a sequence, which the class head writes to the statistics of the first position;
/// `None` for all other positions.
pub(super) fn sequence_loss(statistics: &[f32]) -> Option<f32> {
    (statistics[1] == 1.0).then_some(statistics[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::CrossEntropy;

    #[test]
    fn noise_is_uniform_in_its_range() {
        let mut y = vec![1.0_f32; 3 * 1000];
        let tokens = [4, 9, 5];
        // Tokens 4 and 5 lie in the tile, and have noise of 0.1 and 0.2.
        let noise = |row: usize| (row as u64, 0.1 * (1 + row / 2) as f32);
        add_noise(&mut y, &tokens, Tile { first: 3, rows: 4 }, 1000, noise);
        let rows: Vec<&[f32]> = y.chunks(1000).collect();
        assert!(rows[1].iter().all(|&y| y == 1.0), "its token is in another tile");
        for (row, most) in [(rows[0], 0.1), (rows[2], 0.2)] {
            let off = row.iter().map(|y| f64::from(*y) - 1.0);
            let (mean, square) =
                off.fold((0.0, 0.0), |(sum, square), off| (sum + off, square + off * off));
            assert!(row.iter().all(|y| (y - 1.0).abs() <= most as f32));
            assert!((mean / 1000.0).abs() < 0.1 * most, "{mean}");
            assert!((square / 1000.0 / (most * most) - 1.0 / 3.0).abs() < 0.03, "{square}");
        }
    }

    #[test]
    fn tokens_are_gathered_and_scattered_tile_by_tile() {
        let c = 2;
        let tokens = [4_u32, 0, 4, 2];
        let table: Vec<f32> = (0..10).map(|at| at as f32 + 0.25).collect();
        let dy: Vec<f32> = (0..8).map(|at| 0.5 - at as f32).collect();
        let mut y = vec![f32::NAN; tokens.len() * c];
        let mut dtable = vec![f32::NAN; 5 * c];
        for (first, to) in [(0, 3), (3, 5)] {
            gather_rows(&mut y, &tokens, &table[first * c..to * c], first, c, 1.0);
            let rows: Vec<&[f32]> = dy.chunks_exact(c).collect();
            // In two parts, of which the first ends within a row.
            let (one, other) = dtable[first * c..to * c].split_at_mut(3);
            for (rows_of_part, from) in [(one, 0), (other, 3)] {
                let table = Table { rows: rows_of_part, from, first, is_new: true };
                scatter(Level::best(), table, &tokens, &rows, 1.0);
            }
        }
        for (at, &token) in tokens.iter().enumerate() {
            assert_eq!(y[at * c..][..c], table[token as usize * c..][..c]);
        }
        assert_eq!(dtable[c..2 * c], [0.0; 2], "token 1 does not occur");
        assert_eq!(dtable[4 * c], dy[0] + dy[2 * c]);
    }

    #[test]
    fn losses_are_those_of_complete_statistics() {
        let mut statistics = [f32::NAN; 4];
        begin_statistics(&mut statistics, 3);
        assert_eq!(label_of(&statistics), 3);
        assert_eq!(sequence_loss(&statistics), None);
        statistics[..3].copy_from_slice(&[2.0, 1.0, 0.5]);
        assert_eq!(token_loss(&statistics, &CrossEntropy), Some(1.5));
        assert_eq!(sequence_loss(&statistics), Some(2.0));
        begin_statistics(&mut statistics, -100);
        assert_eq!(token_loss(&statistics, &CrossEntropy), None);
    }
}
