//! Products of matrices on the host, for rules that see a gradient as a matrix, and for objectives
//! that compare embeddings.
//!
//! Every element is one sum in the order of its terms. So the bits depend neither on the number of
//! threads nor on the vector instructions. (The device's own product, which orders sums by blocks,
//! belongs to a room above this one.)

use rayon::prelude::*;

use super::Level;

/// c = alpha · a · b + beta · d. All matrices lie row behind row.
pub(crate) struct Product<'a> {
    /// (rows, depth).
    pub(crate) a: &'a [f32],
    /// (depth, columns); or (columns, depth), when it is transposed.
    pub(crate) b: &'a [f32],
    pub(crate) is_transposed: bool,
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) columns: usize,
    pub(crate) alpha: f32,
    /// beta, and d of (rows, columns).
    pub(crate) plus: Option<(f32, &'a [f32])>,
}

/// Rows and columns of c that are summed at once, in registers: 6 × 16 floats are 12 vectors of
/// AVX2.
const ROWS: usize = 6;
const COLUMNS: usize = 16;

/// The floats of `packed` that a product needs.
pub(crate) fn packed_len(depth: usize, columns: usize) -> usize {
    depth * columns.next_multiple_of(COLUMNS)
}

impl Product<'_> {
    /// Computes c. `packed` is room for b, in panels of [`COLUMNS`].
    pub(crate) fn run(&self, level: Level, c: &mut [f32], packed: &mut [f32]) {
        let packed = &mut packed[..packed_len(self.depth, self.columns)];
        self.pack(packed);
        let strips = c[..self.rows * self.columns].par_chunks_mut(ROWS * self.columns);
        strips.enumerate().for_each(|(nth, strip)| {
            level.run(
                #[inline(always)]
                || self.strip(nth * ROWS, strip, packed),
            );
        });
    }

    /// Copies b panel by panel; columns behind the last are zeros.
    fn pack(&self, packed: &mut [f32]) {
        let panels = packed.par_chunks_mut(self.depth * COLUMNS);
        panels.enumerate().for_each(|(nth, panel)| {
            let first = nth * COLUMNS;
            let count = COLUMNS.min(self.columns - first);
            for (k, to) in panel.chunks_exact_mut(COLUMNS).enumerate() {
                to[count..].fill(0.0);
                for (column, to) in to[..count].iter_mut().enumerate() {
                    *to = if self.is_transposed {
                        self.b[(first + column) * self.depth + k]
                    } else {
                        self.b[k * self.columns + first + column]
                    };
                }
            }
        });
    }

    /// Computes some rows of c.
    #[inline(always)]
    fn strip(&self, first: usize, strip: &mut [f32], packed: &[f32]) {
        let count = strip.len() / self.columns;
        // Rows behind the last repeat it, and are not written.
        let a: [&[f32]; ROWS] = std::array::from_fn(|row| {
            &self.a[(first + row.min(count - 1)) * self.depth..][..self.depth]
        });
        for (nth, panel) in packed.chunks_exact(self.depth * COLUMNS).enumerate() {
            let mut sums = [[0.0_f32; COLUMNS]; ROWS];
            for (k, b) in panel.chunks_exact(COLUMNS).enumerate() {
                let b: &[f32; COLUMNS] = b.try_into().expect("a row of a panel");
                for (sums, a) in sums.iter_mut().zip(&a) {
                    let a = a[k];
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum += a * b;
                    }
                }
            }
            let from = nth * COLUMNS;
            let width = COLUMNS.min(self.columns - from);
            for (row, sums) in sums.iter().enumerate().take(count) {
                let to = &mut strip[row * self.columns + from..][..width];
                match self.plus {
                    None => to.iter_mut().zip(sums).for_each(|(c, sum)| *c = self.alpha * sum),
                    Some((beta, d)) => {
                        let d = &d[(first + row) * self.columns + from..][..width];
                        for ((c, sum), d) in to.iter_mut().zip(sums).zip(d) {
                            *c = self.alpha * sum + beta * d;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_the_sums_of_their_terms_at_every_level() {
        let value = |seed: usize| move |at: usize| ((at * 37 + seed) as f32 * 0.11).sin();
        for (rows, depth, columns) in [(1, 1, 1), (7, 5, 17), (13, 40, 16), (6, 3, 33)] {
            let a: Vec<f32> = (0..rows * depth).map(value(1)).collect();
            let b: Vec<f32> = (0..depth * columns).map(value(2)).collect();
            let d: Vec<f32> = (0..rows * columns).map(value(3)).collect();
            for is_transposed in [false, true] {
                let of_b = |k: usize, column: usize| match is_transposed {
                    true => b[column * depth + k],
                    false => b[k * columns + column],
                };
                let plain = |row: usize, column: usize| {
                    let terms = (0..depth).map(|k| a[row * depth + k] * of_b(k, column));
                    let sum = terms.fold(0.0, |sum, term| sum + term);
                    0.5 * sum + 2.0 * d[row * columns + column]
                };
                let each = (0..rows).flat_map(|row| (0..columns).map(move |c| (row, c)));
                let expected: Vec<f32> = each.map(|(row, column)| plain(row, column)).collect();
                for level in Level::all() {
                    let mut c = vec![f32::NAN; rows * columns];
                    let mut packed = vec![f32::NAN; packed_len(depth, columns)];
                    let plus = Some((2.0, &d[..]));
                    Product { a: &a, b: &b, is_transposed, rows, depth, columns, alpha: 0.5, plus }
                        .run(level, &mut c, &mut packed);
                    assert_eq!(c, expected, "{rows} × {depth} × {columns} at {level:?}");
                }
            }
        }
    }
}
