//! Products with weights, and their gradients.

use rayon::prelude::*;

use super::views::{Call, Compute, ComputeIn, CpuKernels};
use crate::kernels::{Linear, LinearBackward, LinearSize, Runs, RunsIn};
use crate::product::{Elements, Matrix, Product, Start};
use crate::simd::Level;
use crate::tensor::{Dtype, Scratch, View};

/// Rows that one partial sum over rows takes: by shape, never by threads.
pub(super) const SUM_ROWS: usize = 64;

impl Compute for Linear {
    fn packed(&self) -> Vec<View> {
        vec![self.x, self.w]
    }

    fn compute(&self, level: Level, call: &Call<'_>) {
        product(self, call).run(level, call.write(self.y));
    }
}

/// x w + bias.
fn product<'c>(op: &Linear, call: &'c Call<'_>) -> Product<'c> {
    let LinearSize { rows, inputs, outputs, .. } = op.size();
    let a = Matrix::rows_of(call.elements(op.x), inputs);
    let b = upright(call.elements(op.w), &op.size());
    let start = call.read_if(op.bias).map_or(Start::Zero, Start::Bias);
    Product { a, b, rows, depth: inputs, columns: outputs, start }
}

impl ComputeIn for LinearBackward {
    fn workspace(&self) -> usize {
        self.dbias.map_or(0, |dbias| sum_scratch(self.x.rows, dbias.columns))
    }

    fn packed(&self) -> Vec<View> {
        vec![self.dy, self.x, self.w]
    }

    /// dx = dy wᵀ, dw (+)= xᵀ dy (transposed: dyᵀ x), db (+)= Σ dy.
    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let LinearSize { rows, .. } = self.size();
        if let Some(db) = call.write_if(self.dbias) {
            sum_rows(level, db, call.elements(self.dy), rows, self.accumulate, workspace);
        }
        if let Some(dw) = call.write_if(self.dw) {
            weights_gradient(self, call).run(level, dw);
        }
        input_gradient(self, call).run(level, call.write(self.dx));
    }
}

/// xᵀ dy (transposed: dyᵀ x).
fn weights_gradient<'c>(op: &LinearBackward, call: &'c Call<'_>) -> Product<'c> {
    let LinearSize { rows, inputs, outputs, transposed } = op.size();
    let x = Matrix::rows_of(call.elements(op.x), inputs);
    let dy = Matrix::rows_of(call.elements(op.dy), outputs);
    let start = Start::accumulate(op.accumulate);
    if transposed {
        let a = dy.transposed();
        return Product { a, b: x, rows: outputs, depth: rows, columns: inputs, start };
    }
    Product { a: x.transposed(), b: dy, rows: inputs, depth: rows, columns: outputs, start }
}

/// dy wᵀ.
fn input_gradient<'c>(op: &LinearBackward, call: &'c Call<'_>) -> Product<'c> {
    let LinearSize { rows, inputs, outputs, .. } = op.size();
    let a = Matrix::rows_of(call.elements(op.dy), outputs);
    let b = upright(call.elements(op.w), &op.size()).transposed();
    Product { a, b, rows, depth: outputs, columns: inputs, start: Start::Zero }
}

impl CpuKernels<'_> {
    /// Computes products at once. Those of 16 bits run one by one, because the memory to widen
    /// elements is that of one operation.
    pub(super) fn run_linears(&self, ops: &[Linear]) {
        if ops.len() == 1 || ops.iter().any(|op| op.x.dtype != Dtype::F32) {
            return ops.iter().for_each(|op| self.run(op));
        }
        let Some(call) = self.call_all(ops) else { return };
        let products = ops.iter().map(|op| (product(op, &call), call.write(op.y)));
        Product::run_all(self.level, products.collect());
    }

    /// Computes backwards at once. Those of 16 bits run one by one, as above, and those of biases,
    /// because their workspace is that of one.
    pub(super) fn run_linears_backward(&self, ops: &[LinearBackward], scratch: &Scratch<'_>) {
        let is_alone = |op: &LinearBackward| op.x.dtype != Dtype::F32 || op.dbias.is_some();
        if ops.len() == 1 || ops.iter().any(is_alone) {
            return ops.iter().for_each(|op| self.run_in(op, scratch));
        }
        let Some(call) = self.call_all(ops) else { return };
        let products = ops.iter().flat_map(|op| {
            let of_weights = call.write_if(op.dw).map(|dw| (weights_gradient(op, &call), dw));
            let of_input = (input_gradient(op, &call), call.write(op.dx));
            of_weights.into_iter().chain([of_input])
        });
        Product::run_all(self.level, products.collect());
    }
}

/// w as an (inputs, outputs) matrix, however it is stored.
fn upright<'w>(w: Elements<'w>, size: &LinearSize) -> Matrix<'w> {
    if size.transposed {
        Matrix::rows_of(w, size.inputs).transposed()
    } else {
        Matrix::rows_of(w, size.outputs)
    }
}

/// Floats of scratch for [`sum_rows`].
pub(super) fn sum_scratch(rows: usize, columns: usize) -> usize {
    rows.div_ceil(SUM_ROWS) * columns
}

/// sum (+)= Σ over rows of x: first partial sums of 64 rows, then the sum of these in order.
fn sum_rows(
    level: Level,
    sum: &mut [f32],
    x: Elements<'_>,
    rows: usize,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let columns = sum.len();
    debug_assert!(x.len() == rows * columns && scratch.len() == sum_scratch(rows, columns));
    scratch.par_chunks_mut(columns).enumerate().for_each(|(index, part)| {
        let from = index * SUM_ROWS;
        level.run(
            #[inline(always)]
            || {
                part.fill(0.0);
                (from..rows.min(from + SUM_ROWS)).for_each(|row| x.add_to(part, row * columns));
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
    use super::super::oracle::{Bench, close, differences, noise};
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
                let mut bench = Bench::new();
                let [x_view, dx] =
                    [&x.narrow[..], &vec![f32::NAN; r * c]].map(|x| bench.tensor(c, x));
                let [w_view, dw, dw_more] =
                    [&w.narrow[..], &vec![f32::NAN; c * n], &vec![1.0; c * n]]
                        .map(|w| bench.tensor(if transposed { c } else { n }, w));
                let [bias, db, db_more] =
                    [&b.narrow[..], &vec![f32::NAN; n], &vec![1.0; n]].map(|b| bench.tensor(n, b));
                let [y, y_alone] = [(); 2].map(|()| bench.nan(r, n));
                let dy = noise(r * n, 4);
                let dy_view = bench.tensor(n, &dy.narrow);
                let op = Linear { y, x: x_view, w: w_view, bias: Some(bias), transposed };
                let back = LinearBackward {
                    dx,
                    dw: Some(dw),
                    dbias: Some(db),
                    dy: dy_view,
                    x: x_view,
                    w: w_view,
                    transposed,
                    accumulate: false,
                };
                let more = LinearBackward {
                    dw: Some(dw_more),
                    dbias: Some(db_more),
                    accumulate: true,
                    ..back
                };
                bench.run(level, |k, scratch| {
                    k.linear(&op);
                    k.linear(&Linear { y: y_alone, bias: None, ..op });
                    k.linear_backward(&more, scratch);
                    k.linear_backward(&back, scratch);
                });
                close(&bench.values(y), &plain(&x.wide, &w.wide, &b.wide, size), 1e-5);
                let none = vec![0.0; n];
                close(&bench.values(y_alone), &plain(&x.wide, &w.wide, &none, size), 1e-5);
                let [dx, dw, db, dw_more, db_more] =
                    [dx, dw, db, dw_more, db_more].map(|view| bench.values(view));
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
