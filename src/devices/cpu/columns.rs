//! Sums to columns of a tensor, and copies of columns.

use rayon::prelude::*;

use super::views::CpuKernels;
use crate::kernels::{AddColumns, Runs, TakeColumns};

/// Rows of one parallel task.
const ROWS: usize = 16;

impl Runs<AddColumns> for CpuKernels<'_> {
    fn run(&self, op: &AddColumns) {
        let AddColumns { y, x, first, scale } = *op;
        let Some(call) = self.call(op) else { return };
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

impl Runs<TakeColumns> for CpuKernels<'_> {
    fn run(&self, op: &TakeColumns) {
        let TakeColumns { y, x, first, scale } = *op;
        let Some(call) = self.call(op) else { return };
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
