//! Rows of tables of tokens: gathered for the tokens of a batch, and the sums of their gradients. A
//! token's rows of all tables stand side by side.
//!
//! The host owns the tables. So no device has kernels for this, and the same loops run beside every
//! kind of device.

use std::ops::Range;

use half::{bf16, f16};
use l2l_actors::schedule::Encoding;
use rayon::prelude::*;

use crate::eps::TableRows;
use crate::models::TableTile;
use crate::random;
use crate::simd::Level;
use crate::tensor::{Dtype, Element, Packing, int8};

/// A tile of a table, and the tokens of a micro-batch.
pub(super) struct Gathered<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) table: TableRows<'a>,
    /// The rows in `table`, and their columns in a row of the stash.
    pub(super) place: &'a TableTile,
    /// Numbers of a row of the stash.
    pub(super) width: usize,
}

impl Gathered<'_> {
    /// Writes the rows of the tokens in the tile, times the scale, to the stash. `noise` gives the
    /// key and the greatest value of the noise of each row. x: (tokens, width), packed; numbers are
    /// packed with others of their row only where the tile has the whole row.
    pub(super) fn write(
        &self,
        x: &mut [f32],
        packing: Packing,
        noise: Option<impl Fn(usize) -> (u64, f32) + Sync>,
    ) {
        match (packing.encoding, packing.dtype) {
            (Encoding::Int8 { .. }, _) => self.write_packed(x, packing, noise),
            (Encoding::Plain, Dtype::F32) => self.write_plain(x, noise),
            (Encoding::Bf16, _) | (Encoding::Plain, Dtype::Bf16) => {
                self.write_plain(bytemuck::cast_slice_mut::<_, bf16>(x), noise);
            }
            (Encoding::Plain, Dtype::F16) => {
                self.write_plain(bytemuck::cast_slice_mut::<_, f16>(x), noise);
            }
        }
    }

    fn write_plain<X: Element>(
        &self,
        x: &mut [X],
        noise: Option<impl Fn(usize) -> (u64, f32) + Sync>,
    ) {
        match self.table {
            TableRows::F32(table) => self.copy(x, table),
            TableRows::Bf16(table) => self.copy(x, table),
            TableRows::F16(table) => self.copy(x, table),
        }
        if let Some(noise) = noise {
            self.add_noise(x, noise);
        }
    }

    fn write_packed(
        &self,
        x: &mut [f32],
        packing: Packing,
        noise: Option<impl Fn(usize) -> (u64, f32) + Sync>,
    ) {
        let packing = Packing { dtype: Dtype::F32, ..packing };
        let rows = x.par_chunks_exact_mut(packing.floats(1)).zip(self.tokens).enumerate();
        rows.filter(|(_, (_, token))| self.row(**token).is_some()).for_each(|(at, row)| {
            let (packed, token) = row;
            let noise = noise.as_ref().map(|noise| move |_| noise(at));
            let mut row = vec![0.0_f32; self.width];
            Gathered { tokens: std::slice::from_ref(token), ..*self }.write_plain(&mut row, noise);
            packing.pack(packed, &row);
        });
    }

    /// A token's row in the table, if the token is in the tile.
    fn row(&self, token: u32) -> Option<usize> {
        let tile = self.place.tile;
        (token as usize).checked_sub(tile.first).filter(|&row| row < tile.rows)
    }

    /// table: (rows, channels).
    fn copy<X: Element, T: Element>(&self, x: &mut [X], table: &[T]) {
        let TableTile { ref columns, scale, .. } = *self.place;
        x.par_chunks_mut(self.width).zip(self.tokens).for_each(|(x, &token)| {
            if let Some(row) = self.row(token) {
                let row = &table[row * columns.len()..][..columns.len()];
                let each = x[columns.clone()].iter_mut().zip(row);
                each.for_each(|(x, &w)| *x = X::from_f32(w.to_f32() * scale));
            }
        });
    }

    fn add_noise<X: Element>(&self, x: &mut [X], noise: impl Fn(usize) -> (u64, f32) + Sync) {
        let columns = &self.place.columns;
        let each = x.par_chunks_mut(self.width).zip(self.tokens).enumerate();
        each.filter(|(_, (_, token))| self.row(**token).is_some()).for_each(|(at, (x, _))| {
            let (mut state, most) = noise(at);
            for x in &mut x[columns.clone()] {
                let uniform = 2.0 * random::unit(&mut state) as f32 - 1.0;
                *x = X::from_f32(x.to_f32() + uniform * most);
            }
        });
    }
}

/// Runs of rows in a tile. One thread adds to one run, so up to 64 threads share a tile.
const RUNS: usize = 64;

/// A tile of a table's gradient, or a part of one.
pub(super) struct Table<'t> {
    pub(super) rows: &'t mut [f32],
    /// Elements of the tile before the part.
    pub(super) from: usize,
    /// The tile's rows, and their columns in a row of the stash.
    pub(super) place: &'t TableTile,
    /// True if the gradients replace what the rows hold.
    pub(super) is_new: bool,
}

/// A token's gradient, as it is stashed.
trait Gradient: Copy + Send + Sync {
    /// Adds a range of its channels to `sum`, times `scale`.
    fn add_to(self, sum: &mut [f32], range: Range<usize>, scale: f32);
}

impl<D: Element> Gradient for &[D] {
    #[inline(always)]
    fn add_to(self, sum: &mut [f32], range: Range<usize>, scale: f32) {
        sum.iter_mut().zip(&self[range]).for_each(|(sum, &dy)| *sum += dy.to_f32() * scale);
    }
}

impl Gradient for int8::Int8Row<'_> {
    #[inline(always)]
    fn add_to(self, sum: &mut [f32], range: Range<usize>, scale: f32) {
        sum.iter_mut().zip(self.numbers(range)).for_each(|(sum, dy)| *sum += dy * scale);
    }
}

/// Gradients of hidden states, each a token's, in the order of the tokens.
pub(super) struct Scattered<'a> {
    pub(super) level: Level,
    pub(super) tokens: &'a [u32],
    /// The gradients of each micro-batch as they are stashed, and the number of their rows.
    pub(super) dx: &'a [(&'a [f32], usize)],
    /// Numbers of a row of them.
    pub(super) width: usize,
}

impl Scattered<'_> {
    /// Adds the gradients of the tokens that lie in a table to the table's rows, times its scale.
    /// Each row's gradients are added in the order of the tokens.
    pub(super) fn add(&self, table: Table<'_>, packing: Packing) {
        match (packing.encoding, packing.dtype) {
            (Encoding::Int8 { block }, _) => {
                let len = int8::row_floats(self.width, block);
                let row = |packed| int8::Int8Row::new(packed, self.width, block);
                let rows = self.dx.iter().flat_map(|&(dx, rows)| dx.chunks_exact(len).take(rows));
                self.add_rows(table, &rows.map(row).collect::<Vec<_>>());
            }
            (Encoding::Plain, Dtype::F32) => self.add_plain::<f32>(table),
            (Encoding::Bf16, _) | (Encoding::Plain, Dtype::Bf16) => self.add_plain::<bf16>(table),
            (Encoding::Plain, Dtype::F16) => self.add_plain::<f16>(table),
        }
    }

    fn add_plain<D: Element>(&self, table: Table<'_>) {
        let rows = self.dx.iter().flat_map(|&(dx, rows)| {
            bytemuck::cast_slice::<f32, D>(dx).chunks_exact(self.width).take(rows)
        });
        self.add_rows(table, &rows.collect::<Vec<_>>());
    }

    fn add_rows<G: Gradient>(&self, table: Table<'_>, gradients: &[G]) {
        let Table { rows, from, place, is_new } = table;
        let TableTile { tile, ref columns, scale, .. } = *place;
        let channels = columns.len();
        let run = (rows.len() / channels).div_ceil(RUNS).max(1) * channels;
        rows.par_chunks_mut(run).enumerate().for_each(|(index, run_of_rows)| {
            let start = from + index * run;
            let end = start + run_of_rows.len();
            if is_new {
                run_of_rows.fill(0.0);
            }
            self.level.run(
                #[inline(always)]
                || {
                    for (&token, gradient) in self.tokens.iter().zip(gradients) {
                        let Some(row) = (token as usize).checked_sub(tile.first) else { continue };
                        let at = row * channels;
                        let low = at.max(start);
                        let high = (at + channels).min(end);
                        if low < high {
                            let to = &mut run_of_rows[low - start..high - start];
                            let [low, high] = [low, high].map(|end| end - at + columns.start);
                            gradient.add_to(to, low..high, scale);
                        }
                    }
                },
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Tile;

    /// Rows from `first` on of a table whose rows stand at these columns.
    fn rows(first: usize, rows: usize, columns: Range<usize>, scale: f32) -> TableTile {
        TableTile { tile: Tile { first, rows }, columns, scale, is_of_tokens: true }
    }

    #[test]
    fn noise_is_uniform_in_its_range() {
        let mut x = vec![1.0_f32; 3 * 1000];
        let place = &rows(3, 4, 0..1000, 1.0);
        let table = TableRows::F32(&[]);
        let tokens = &[4, 9, 5];
        let rows = Gathered { tokens, table, place, width: 1000 };
        // Tokens 4 and 5 lie in the tile, and have noise of 0.1 and 0.2.
        rows.add_noise(&mut x, |row: usize| (row as u64, 0.1 * (1 + row / 2) as f32));
        let rows: Vec<&[f32]> = x.chunks(1000).collect();
        assert!(rows[1].iter().all(|&x| x == 1.0), "its token is in another tile");
        for (row, most) in [(rows[0], 0.1), (rows[2], 0.2)] {
            let off = row.iter().map(|x| f64::from(*x) - 1.0);
            let (mean, square) =
                off.fold((0.0, 0.0), |(sum, square), off| (sum + off, square + off * off));
            assert!(row.iter().all(|x| (x - 1.0).abs() <= most as f32));
            assert!((mean / 1000.0).abs() < 0.1 * most, "{mean}");
            assert!((square / 1000.0 / (most * most) - 1.0 / 3.0).abs() < 0.03, "{square}");
        }
    }

    /// Two tables side by side, the second with one channel more.
    #[test]
    fn tokens_are_gathered_and_scattered_tile_by_tile() {
        let width = 5;
        let tokens = &[4_u32, 0, 4, 2];
        let dy: Vec<f32> = (0..20).map(|at| 0.5 - at as f32).collect();
        let mut x = vec![f32::NAN; tokens.len() * width];
        let level = Level::best();
        let dx = &[(&dy[..], tokens.len())];
        let packing = Packing { dtype: Dtype::F32, encoding: Encoding::Plain, columns: width };
        for (columns, scale) in [(0..2, 1.0), (2..5, 2.0)] {
            let c = columns.len();
            let table: Vec<f32> = (0..5 * c).map(|at| at as f32 + 0.25).collect();
            let mut dtable = vec![f32::NAN; 5 * c];
            for (first, to) in [(0, 3), (3, 5)] {
                let place = &rows(first, to - first, columns.clone(), scale);
                let table = TableRows::F32(&table[first * c..to * c]);
                let rows = Gathered { tokens, table, place, width };
                rows.write(&mut x, packing, None::<fn(usize) -> (u64, f32)>);
                // In two parts, of which the first ends within a row.
                let (one, other) = dtable[first * c..to * c].split_at_mut(c + 1);
                for (rows, from) in [(one, 0), (other, c + 1)] {
                    let table = Table { rows, from, place, is_new: true };
                    Scattered { level, tokens, dx, width }.add(table, packing);
                }
            }
            for (at, &token) in tokens.iter().enumerate() {
                let found = x[at * width..][columns.clone()].iter();
                let row = &table[token as usize * c..][..c];
                assert!(found.zip(row).all(|(x, w)| *x == scale * w), "token {token}");
            }
            assert!(dtable[c..2 * c].iter().all(|d| *d == 0.0), "token 1 does not occur");
            let first = columns.start;
            assert_eq!(dtable[4 * c], scale * (dy[first] + dy[2 * width + first]));
        }
    }
}
