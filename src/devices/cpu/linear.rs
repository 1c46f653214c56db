//! Products with weights, and their gradients.

use rayon::prelude::*;

use super::product::{Matrix, Product, Start};
use super::views::CpuKernels;
use crate::kernels::{Linear, LinearBackward, LinearSize, Runs, RunsIn};
use crate::simd::Level;
use crate::tensor::Scratch;

/// Rows that one partial sum over rows takes: by shape, never by threads.
const SUM_ROWS: usize = 64;

impl Runs<Linear> for CpuKernels<'_> {
    fn run(&self, op: &Linear) {
        let Linear { y, x, w, bias, .. } = *op;
        let Some(call) = self.call(op) else { return };
        let y = call.write(y);
        forward(self.level, y, call.read(x), call.read(w), call.read_if(bias), &op.size());
    }
}

impl RunsIn<LinearBackward> for CpuKernels<'_> {
    fn run_in(&self, op: &LinearBackward, scratch: &Scratch<'_>) {
        let LinearBackward { dx, dw, dbias, dy, x, w, accumulate, .. } = *op;
        let size = op.size();
        let scratch = scratch.nested();
        let memory = scratch.take_floats(1, dbias.map_or(0, |_| scratch_len(&size)));
        let Some(call) = self.call_in(op, [memory]) else { return };
        let gradients =
            Gradients { dx: call.write(dx), dw: call.write_if(dw), db: call.write_if(dbias) };
        let inputs = Inputs { dy: call.read(dy), x: call.read(x), w: call.read(w) };
        backward(self.level, gradients, inputs, &size, accumulate, call.write(memory));
    }
}

/// w as an (inputs, outputs) matrix, however it is stored.
fn upright<'w>(w: &'w [f32], size: &LinearSize) -> Matrix<'w> {
    if size.transposed {
        Matrix::rows(w, size.inputs).transposed()
    } else {
        Matrix::rows(w, size.outputs)
    }
}

/// y = x w + b.
fn forward(
    level: Level,
    y: &mut [f32],
    x: &[f32],
    w: &[f32],
    bias: Option<&[f32]>,
    size: &LinearSize,
) {
    let LinearSize { rows, inputs, outputs, .. } = *size;
    let a = Matrix::rows(x, inputs);
    let b = upright(w, size);
    let start = bias.map_or(Start::Zero, Start::Bias);
    Product { a, b, rows, depth: inputs, columns: outputs, start }.run(level, y);
}

/// Floats of scratch that [`backward`] needs: partial sums of db.
fn scratch_len(size: &LinearSize) -> usize {
    sum_scratch(size.rows, size.outputs)
}

/// Outputs of the backward pass.
struct Gradients<'a> {
    dx: &'a mut [f32],
    dw: Option<&'a mut [f32]>,
    db: Option<&'a mut [f32]>,
}

/// Inputs of the backward pass.
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
        sum_rows(level, db, dy, rows, accumulate, scratch);
    }
    let x = Matrix::rows(x, inputs);
    let dy = Matrix::rows(dy, outputs);
    let (a, b, [of, by]) =
        if transposed { (dy, x, [outputs, inputs]) } else { (x, dy, [inputs, outputs]) };
    if let Some(dw) = dw {
        let start = Start::accumulate(accumulate);
        Product { a: a.transposed(), b, rows: of, depth: rows, columns: by, start }.run(level, dw);
    }
    let b = upright(w, size).transposed();
    let start = Start::Zero;
    Product { a: dy, b, rows, depth: outputs, columns: inputs, start }.run(level, dx);
}

/// Floats of scratch for [`sum_rows`].
pub(super) fn sum_scratch(rows: usize, columns: usize) -> usize {
    rows.div_ceil(SUM_ROWS) * columns
}

/// sum (+)= Σ over rows of x: first partial sums of 64 rows, then the sum of these in order.
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
            let x = noise(r * c, 1);
            let w = noise(c * n, 2);
            let b = noise(n, 3);
            for level in Level::all() {
                let mut y = vec![f32::NAN; r * n];
                forward(level, &mut y, &x.narrow, &w.narrow, Some(&b.narrow), &size);
                close(&y, &plain(&x.wide, &w.wide, &b.wide, size), 1e-5);
                let none = vec![0.0; n];
                forward(level, &mut y, &x.narrow, &w.narrow, None, &size);
                close(&y, &plain(&x.wide, &w.wide, &none, size), 1e-5);

                let dy = noise(r * n, 4);
                let gradients = |accumulate: bool, start: f32| {
                    let mut dx = vec![f32::NAN; r * c];
                    let mut dw = vec![start; c * n];
                    let mut db = vec![start; n];
                    let mut memory = vec![f32::NAN; scratch_len(&size)];
                    let gradients = Gradients { dx: &mut dx, dw: Some(&mut dw), db: Some(&mut db) };
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
