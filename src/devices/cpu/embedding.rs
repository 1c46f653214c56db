//! Rows of tables that are added: positions and kinds of tokens.

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
}
