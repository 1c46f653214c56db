//! Rows of tables: tokens on the host, positions on the device.

use rayon::prelude::*;

use crate::kernels::Places;
use crate::simd::Level;

/// y = x + w by position. x, y: (B, T, C); w: (positions, C).
pub(super) fn add_positions(
    level: Level,
    y: &mut [f32],
    x: &[f32],
    w: &[f32],
    places: &Places<'_>,
) {
    let (width, rows) = (y.len() / places.rows.sequences, places.rows.positions);
    let channels = width / rows;
    let sequences = y.par_chunks_mut(width).zip(x.par_chunks(width)).enumerate();
    sequences.for_each(|(sequence, (y, x))| {
        level.run(
            #[inline(always)]
            || {
                let pairs = y.chunks_exact_mut(channels).zip(x.chunks_exact(channels));
                for (at, (y, x)) in pairs.enumerate() {
                    let w = &w[places.of(sequence * rows + at) * channels..][..channels];
                    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                        *y = x + w;
                    }
                }
            },
        );
    });
}

/// dw (+)= Σ over rows of each position of dy, in order.
pub(super) fn add_positions_backward(
    level: Level,
    dw: &mut [f32],
    dy: &[f32],
    places: &Places<'_>,
    accumulate: bool,
) {
    let channels = dy.len() / places.rows.count();
    level.run(
        #[inline(always)]
        || {
            if !accumulate {
                dw.fill(0.0);
            }
            for (row, dy) in dy.chunks_exact(channels).enumerate() {
                let dw = &mut dw[places.of(row) * channels..][..channels];
                dw.iter_mut().zip(dy).for_each(|(dw, dy)| *dw += dy);
            }
        },
    );
}

/// y += w by kind of token. y: (R, C); w: (kinds, C).
pub(super) fn add_types(level: Level, y: &mut [f32], w: &[f32], kinds: &[u8], channels: usize) {
    level.run(
        #[inline(always)]
        || {
            for (y, &kind) in y.chunks_exact_mut(channels).zip(kinds) {
                let w = &w[usize::from(kind) * channels..][..channels];
                y.iter_mut().zip(w).for_each(|(y, w)| *y += w);
            }
        },
    );
}

/// dw (+)= Σ of dy over rows of each kind, in order.
pub(super) fn add_types_backward(
    level: Level,
    dw: &mut [f32],
    dy: &[f32],
    kinds: &[u8],
    channels: usize,
    accumulate: bool,
) {
    level.run(
        #[inline(always)]
        || {
            if !accumulate {
                dw.fill(0.0);
            }
            for (dy, &kind) in dy.chunks_exact(channels).zip(kinds) {
                let dw = &mut dw[usize::from(kind) * channels..][..channels];
                dw.iter_mut().zip(dy).for_each(|(dw, dy)| *dw += dy);
            }
        },
    );
}

/// Copies the rows of those tokens that lie in a tile, rows `first..` of the vocabulary, each number as
/// `cast` makes it.
pub(crate) fn gather<Y: Send, X: Copy + Sync>(
    y: &mut [Y],
    tokens: &[u32],
    tile: &[X],
    first: usize,
    channels: usize,
    cast: impl Fn(X) -> Y + Sync,
) {
    let rows = tile.len() / channels;
    y.par_chunks_mut(channels).zip(tokens).for_each(|(y, &token)| {
        if let Some(row) = (token as usize).checked_sub(first).filter(|&row| row < rows) {
            let row = &tile[row * channels..][..channels];
            y.iter_mut().zip(row).for_each(|(y, &x)| *y = cast(x));
        }
    });
}

/// Runs of a tile's rows that are added to at once.
const RUNS: usize = 64;

/// Adds gradients to the rows of those tokens that lie in a tile, each row's in the tokens' order.
/// `gradient`: of a token by its index, `cast` to floats.
pub(crate) fn scatter<'d, D: Copy + 'd>(
    level: Level,
    dtile: &mut [f32],
    tokens: &[Option<u32>],
    gradient: impl Fn(usize) -> &'d [D] + Sync,
    first: usize,
    channels: usize,
    cast: impl Fn(D) -> f32 + Sync,
) {
    let run = (dtile.len() / channels).div_ceil(RUNS).max(1);
    let runs = dtile.par_chunks_mut(run * channels).enumerate();
    runs.for_each(|(index, rows)| {
        let first = first + index * run;
        level.run(
            #[inline(always)]
            || {
                for (at, token) in tokens.iter().enumerate() {
                    let row = token.and_then(|token| (token as usize).checked_sub(first));
                    if let Some(row) = row.filter(|&row| row < rows.len() / channels) {
                        let to = &mut rows[row * channels..][..channels];
                        to.iter_mut().zip(gradient(at)).for_each(|(to, &dy)| *to += cast(dy));
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::kernels::{Document, Rows};

    #[test]
    fn positions_are_added_and_summed() {
        let (b, t, c) = (3, 2, 5);
        let rows = Rows { sequences: b, positions: t };
        let plain = Places { rows, documents: &[], past: &[] };
        check_positions(plain, c, |row| row % t);
        check_positions(Places { past: &[1, 0, 2], ..plain }, c, |row| {
            row % t + [1, 0, 2][row / t]
        });
        let [all, first, second] = [(0, 2), (0, 1), (1, 2)].map(|(from, to)| Document { from, to });
        let documents = [all, all, first, second, all, all];
        check_positions(Places { documents: &documents, ..plain }, c, |row| {
            [0, 1, 0, 0, 0, 1][row]
        });
    }

    fn check_positions(places: Places<'_>, c: usize, position: impl Fn(usize) -> usize) {
        let (b, t) = (places.rows.sequences, places.rows.positions);
        let (x, w, dy) = (noise(b * t * c, 1), noise(4 * c, 2), noise(b * t * c, 3));
        let plain = |w: &[f64]| -> Vec<f64> {
            x.wide.iter().enumerate().map(|(i, x)| x + w[position(i / c) * c + i % c]).collect()
        };
        let loss = |w: &[f64]| plain(w).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>();
        for level in Level::all() {
            let mut y = vec![f32::NAN; b * t * c];
            add_positions(level, &mut y, &x.narrow, &w.narrow, &places);
            close(&y, &plain(&w.wide), 1e-6);
            let mut dw = vec![f32::NAN; 4 * c];
            add_positions_backward(level, &mut dw, &dy.narrow, &places, false);
            close(&dw, &differences(&w.wide, loss), 1e-5);
        }
    }

    #[test]
    fn tokens_are_gathered_and_scattered_tile_by_tile() {
        let (c, tokens) = (2, [4_u32, 0, 4, 2]);
        let table = noise(5 * c, 1);
        let dy = noise(tokens.len() * c, 2);
        let (mut y, mut dtable) = (vec![f32::NAN; tokens.len() * c], vec![0.0; 5 * c]);
        for (first, to) in [(0, 3), (3, 5)] {
            gather(&mut y, &tokens, &table.narrow[first * c..to * c], first, c, |x| x);
            let known = tokens.iter().enumerate().map(|(at, &token)| (at != 1).then_some(token));
            let (known, dtile) = (known.collect::<Vec<_>>(), &mut dtable[first * c..to * c]);
            let gradient = |at: usize| &dy.narrow[at * c..][..c];
            scatter(Level::best(), dtile, &known, gradient, first, c, |dy| dy);
        }
        for (at, &token) in tokens.iter().enumerate() {
            assert_eq!(y[at * c..][..c], table.narrow[token as usize * c..][..c]);
        }
        assert_eq!(dtable[..2 * c], [0.0; 4], "token 0 is padding here, token 1 is not met");
        assert_eq!(dtable[4 * c], dy.narrow[0] + dy.narrow[2 * c]);
    }
}
