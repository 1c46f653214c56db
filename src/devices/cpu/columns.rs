//! Sums to columns of a tensor, and copies of columns.

use rayon::prelude::*;

use super::views::{Call, Compute};
use crate::kernels::{AddColumns, CopyColumns, TakeColumns};
use crate::simd::Level;

/// Rows of one parallel task.
const ROWS: usize = 16;

impl Compute for AddColumns {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let AddColumns { y, x, first, scale } = *self;
        let all = y.columns;
        let some = x.columns;
        let tasks = call.write(y).par_chunks_mut(ROWS * all);
        tasks.zip(call.read(x).par_chunks(ROWS * some)).for_each(|(to, from)| {
            for (to, from) in to.chunks_exact_mut(all).zip(from.chunks_exact(some)) {
                let to = &mut to[first..first + some];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * from);
            }
        });
    }
}

impl Compute for TakeColumns {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let TakeColumns { y, x, first, scale } = *self;
        let all = x.columns;
        let some = y.columns;
        let tasks = call.write(y).par_chunks_mut(ROWS * some);
        tasks.zip(call.read(x).par_chunks(ROWS * all)).for_each(|(to, from)| {
            for (to, from) in to.chunks_exact_mut(some).zip(from.chunks_exact(all)) {
                let from = &from[first..first + some];
                to.iter_mut().zip(from).for_each(|(to, from)| *to = scale * from);
            }
        });
    }
}

impl Compute for CopyColumns {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let CopyColumns { y, x, to, from, columns } = *self;
        let tasks = call.write(y).par_chunks_mut(ROWS * y.columns);
        tasks.zip(call.read(x).par_chunks(ROWS * x.columns)).for_each(|(y_rows, x_rows)| {
            let rows = y_rows.chunks_exact_mut(y.columns).zip(x_rows.chunks_exact(x.columns));
            rows.for_each(|(y, x)| y[to..][..columns].copy_from_slice(&x[from..][..columns]));
        });
    }
}
