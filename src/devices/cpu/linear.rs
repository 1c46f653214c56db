//! Products, in tiles of a fixed size, each on one thread.
//!
//! The product itself is faer's. Cutting it here, by shape alone, keeps the bits the same for any
//! number of threads, and faer's packing memory stays with each thread, so that nothing is
//! allocated per call. Tiles of 256 × 512 were the fastest of five that use two cores well; faer
//! packs xᵀ slowly, so x is transposed into scratch first (see `benches/matmul`).

use faer::linalg::matmul::matmul as product;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::scattered::Scattered;
use super::views::{CpuKernels, or_nothing};
use crate::kernels::{Linear, LinearBackward, LinearSize};
use crate::simd::Level;
use crate::tensor::Scratch;

const TILE_ROWS: usize = 256;
const TILE_COLUMNS: usize = 512;

/// Rows that one partial sum over rows takes: by shape, never by threads.
const SUM_ROWS: usize = 64;

pub(super) fn linear(on: &CpuKernels<'_>, op: &Linear) {
    let Linear { y, x, w, bias, .. } = *op;
    let Some(call) = on.call([y], &[x, w, or_nothing(bias)]) else { return };
    let [y] = call.write();
    forward(y, call.read(x), call.read(w), call.read_if(bias), &op.size());
}

pub(super) fn linear_backward(on: &CpuKernels<'_>, op: &LinearBackward, scratch: &Scratch<'_>) {
    let LinearBackward { dx, dw, dbias, dy, x, w, accumulate, .. } = *op;
    let size = op.size();
    let scratch = scratch.nested();
    let memory = scratch.take(1, scratch_len(&size));
    let writes = [dx, dw, or_nothing(dbias), memory];
    let Some(call) = on.call(writes, &[dy, x, w]) else { return };
    let [dx, dw, dbias_or_nothing, memory] = call.write();
    let gradients = Gradients { dx, dw, db: dbias.map(|_| dbias_or_nothing) };
    let inputs = Inputs { dy: call.read(dy), x: call.read(x), w: call.read(w) };
    backward(on.level, gradients, inputs, &size, accumulate, memory);
}

/// A matrix in a slice: element (i, j) at `i * rows_by + j * columns_by`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows_by: usize,
    pub(super) columns_by: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major with rows of `width`.
    pub(super) fn rows(data: &'a [f32], width: usize) -> Matrix<'a> {
        Matrix { data, rows_by: width, columns_by: 1 }
    }

    /// The transpose.
    pub(super) fn transposed(self) -> Matrix<'a> {
        Matrix { rows_by: self.columns_by, columns_by: self.rows_by, ..self }
    }

    fn part(self, row: usize, column: usize, rows: usize, columns: usize) -> MatRef<'a, f32> {
        let at = row * self.rows_by + column * self.columns_by;
        let last = (rows - 1) * self.rows_by + (columns - 1) * self.columns_by;
        let data = &self.data[at..=at + last];
        let (by_rows, by_columns) = (self.rows_by as isize, self.columns_by as isize);
        // SAFETY: all elements lie within `data`, by its last one.
        unsafe { MatRef::from_raw_parts(data.as_ptr(), rows, columns, by_rows, by_columns) }
    }
}

/// c (+)= a b on this thread. c: (m, n), rows of `width`; a: (m, k); b: (k, n).
pub(super) fn small(
    c: &mut [f32],
    width: usize,
    a: Matrix<'_>,
    b: Matrix<'_>,
    (m, k, n): (usize, usize, usize),
    accumulate: bool,
) {
    if m == 0 || k == 0 || n == 0 {
        return;
    }
    let c = &mut c[..(m - 1) * width + n];
    // SAFETY: all elements lie within `c`, by its last one.
    let c = unsafe { MatMut::from_raw_parts_mut(c.as_mut_ptr(), m, n, width as isize, 1) };
    let mode = if accumulate { Accum::Add } else { Accum::Replace };
    product(c, mode, a.part(0, 0, m, k), b.part(0, 0, k, n), 1.0, Par::Seq);
}

/// c (+)= a b on all threads. c: (m, n), dense.
pub(super) fn matmul(
    c: &mut [f32],
    a: Matrix<'_>,
    b: Matrix<'_>,
    (m, k, n): (usize, usize, usize),
    accumulate: bool,
) {
    assert!(c.len() == m * n && k > 0, "{} elements for {m} by {n}", c.len());
    let c = Scattered::new(c);
    let across = n.div_ceil(TILE_COLUMNS);
    let tiles = m.div_ceil(TILE_ROWS) * across;
    (0..tiles).into_par_iter().with_max_len(1).for_each(|tile| {
        let (row, column) = (tile / across * TILE_ROWS, tile % across * TILE_COLUMNS);
        let (rows, columns) = (TILE_ROWS.min(m - row), TILE_COLUMNS.min(n - column));
        // SAFETY: rows and columns lie within c, whose length was checked; no other tile has them.
        let c = unsafe {
            let at = c.base().add(row * n + column);
            MatMut::from_raw_parts_mut(at, rows, columns, n as isize, 1)
        };
        let mode = if accumulate { Accum::Add } else { Accum::Replace };
        let (a, b) = (a.part(row, 0, rows, k), b.part(0, column, k, columns));
        product(c, mode, a, b, 1.0, Par::Seq);
    });
}

/// t = xᵀ. x: (rows, columns).
pub(super) fn transpose(t: &mut [f32], x: &[f32], rows: usize, columns: usize) {
    const SIDE: usize = 16;
    t.par_chunks_mut(SIDE * rows).enumerate().for_each(|(band, t)| {
        let from = band * SIDE;
        let to = columns.min(from + SIDE);
        for top in (0..rows).step_by(SIDE) {
            for row in top..rows.min(top + SIDE) {
                for (i, value) in x[row * columns + from..row * columns + to].iter().enumerate() {
                    t[i * rows + row] = *value;
                }
            }
        }
    });
}

/// w as (inputs, outputs), whether it is transposed or not.
fn upright<'w>(w: &'w [f32], size: &LinearSize) -> Matrix<'w> {
    if size.transposed {
        Matrix::rows(w, size.inputs).transposed()
    } else {
        Matrix::rows(w, size.outputs)
    }
}

/// y = x w + b.
fn forward(y: &mut [f32], x: &[f32], w: &[f32], b: Option<&[f32]>, size: &LinearSize) {
    let LinearSize { rows, inputs, outputs, .. } = *size;
    if let Some(b) = b {
        y.par_chunks_mut(outputs * SUM_ROWS).for_each(|rows| {
            rows.chunks_exact_mut(outputs).for_each(|row| row.copy_from_slice(b));
        });
    }
    let (x, w) = (Matrix::rows(x, inputs), upright(w, size));
    matmul(y, x, w, (rows, inputs, outputs), b.is_some());
}

/// Floats of scratch that [`backward`] needs: x (or dy) transposed, partial sums of db.
fn scratch_len(size: &LinearSize) -> usize {
    let turns = if size.transposed { size.outputs } else { size.inputs };
    (size.rows * turns).max(sum_scratch(size.rows, size.outputs))
}

/// What the backward writes.
struct Gradients<'a> {
    dx: &'a mut [f32],
    dw: &'a mut [f32],
    db: Option<&'a mut [f32]>,
}

/// What the backward reads.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    w: &'a [f32],
}

/// dx = dy wᵀ, dw (+)= xᵀ dy (transposed: dyᵀ x), db (+)= Σ dy.
fn backward(
    level: Level,
    Gradients { dx, dw, db }: Gradients<'_>,
    Inputs { dy, x, w }: Inputs<'_>,
    size: &LinearSize,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let LinearSize { rows, inputs, outputs, transposed } = *size;
    if let Some(db) = db {
        sum_rows(level, db, dy, rows, accumulate, &mut scratch[..sum_scratch(rows, outputs)]);
    }
    let (left, left_by, right, right_by) =
        if transposed { (dy, outputs, x, inputs) } else { (x, inputs, dy, outputs) };
    let side = &mut scratch[..rows * left_by];
    transpose(side, left, rows, left_by);
    let (side, right) = (Matrix::rows(side, rows), Matrix::rows(right, right_by));
    matmul(dw, side, right, (left_by, rows, right_by), accumulate);
    let dy = Matrix::rows(dy, outputs);
    matmul(dx, dy, upright(w, size).transposed(), (rows, outputs, inputs), false);
}

/// Floats of scratch for [`sum_rows`].
pub(super) fn sum_scratch(rows: usize, columns: usize) -> usize {
    rows.div_ceil(SUM_ROWS) * columns
}

/// sum (+)= Σ over rows of x, in partial sums of 64 rows, then those in order.
pub(super) fn sum_rows(
    level: Level,
    sum: &mut [f32],
    x: &[f32],
    rows: usize,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let columns = sum.len();
    debug_assert!(x.len() == rows * columns && scratch.len() == sum_scratch(rows, columns));
    let parts = scratch.par_chunks_mut(columns).zip(x.par_chunks(SUM_ROWS * columns));
    parts.for_each(|(part, rows)| {
        level.run(
            #[inline(always)]
            || {
                part.fill(0.0);
                for row in rows.chunks_exact(columns) {
                    part.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                }
            },
        );
    });
    add_parts(level, sum, scratch, accumulate);
}

/// sum (+)= the partial sums, in order.
pub(super) fn add_parts(level: Level, sum: &mut [f32], parts: &[f32], accumulate: bool) {
    let columns = sum.len();
    level.run(
        #[inline(always)]
        || {
            for (index, part) in parts.chunks_exact(columns).enumerate() {
                if index == 0 && !accumulate {
                    sum.copy_from_slice(part);
                } else {
                    sum.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;

    fn plain(x: &[f64], w: &[f64], b: &[f64], size: LinearSize) -> Vec<f64> {
        let LinearSize { rows: r, inputs: c, outputs: n, transposed } = size;
        let weight =
            |i: usize, out: usize| if transposed { w[out * c + i] } else { w[i * n + out] };
        let at = |row: usize, out: usize| {
            b[out] + (0..c).map(|i| x[row * c + i] * weight(i, out)).sum::<f64>()
        };
        (0..r * n).map(|index| at(index / n, index % n)).collect()
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        let sizes = [(1, 1, 1), (5, 7, 3), (130, 33, 17), (300, 20, 530)];
        for ((r, c, n), transposed) in sizes.into_iter().flat_map(|s| [(s, false), (s, true)]) {
            let size = LinearSize { rows: r, inputs: c, outputs: n, transposed };
            let (x, w, b) = (noise(r * c, 1), noise(c * n, 2), noise(n, 3));
            for level in Level::all() {
                let mut y = vec![f32::NAN; r * n];
                forward(&mut y, &x.narrow, &w.narrow, Some(&b.narrow), &size);
                close(&y, &plain(&x.wide, &w.wide, &b.wide, size), 1e-5);
                let none = vec![0.0; n];
                forward(&mut y, &x.narrow, &w.narrow, None, &size);
                close(&y, &plain(&x.wide, &w.wide, &none, size), 1e-5);

                let dy = noise(r * n, 4);
                let gradients = |accumulate: bool, start: f32| {
                    let mut dx = vec![f32::NAN; r * c];
                    let (mut dw, mut db) = (vec![start; c * n], vec![start; n]);
                    let mut memory = vec![f32::NAN; scratch_len(&size)];
                    let gradients = Gradients { dx: &mut dx, dw: &mut dw, db: Some(&mut db) };
                    let inputs = Inputs { dy: &dy.narrow, x: &x.narrow, w: &w.narrow };
                    backward(level, gradients, inputs, &size, accumulate, &mut memory);
                    (dx, dw, db)
                };
                let (dx, dw, db) = gradients(false, f32::NAN);
                let (_, dw_more, db_more) = gradients(true, 1.0);
                let more = |v: &[f32]| v.iter().map(|v| f64::from(*v) + 1.0).collect::<Vec<_>>();
                close(&dw_more, &more(&dw), 1e-5);
                close(&db_more, &more(&db), 1e-5);
                if r * c * n < 1000 {
                    let loss = |x: &[f64], w: &[f64], b: &[f64]| {
                        let y = plain(x, w, b, size);
                        y.iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
                    };
                    close(&dx, &differences(&x.wide, |x| loss(x, &w.wide, &b.wide)), 1e-4);
                    close(&dw, &differences(&w.wide, |w| loss(&x.wide, w, &b.wide)), 1e-4);
                    close(&db, &differences(&b.wide, |b| loss(&x.wide, &w.wide, b)), 1e-4);
                }
            }
        }
    }
}
