//! Some columns of a tensor.

use rayon::prelude::*;

use super::views::CpuKernels;
use crate::kernels::{AddColumns, TakeColumns};

/// Rows of one parallel task.
const ROWS: usize = 16;

pub(super) fn add_columns(on: &CpuKernels<'_>, op: &AddColumns) {
    let AddColumns { y, x, first, scale } = *op;
    let Some(call) = on.call([y], &[x]) else { return };
    let ([to], from) = (call.write(), call.read(x));
    let (all, some) = (y.columns, x.columns);
    to.par_chunks_mut(ROWS * all).zip(from.par_chunks(ROWS * some)).for_each(|(to, from)| {
        for (to, from) in to.chunks_exact_mut(all).zip(from.chunks_exact(some)) {
            let to = &mut to[first..first + some];
            to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * from);
        }
    });
}

pub(super) fn take_columns(on: &CpuKernels<'_>, op: &TakeColumns) {
    let TakeColumns { y, x, first, scale } = *op;
    let Some(call) = on.call([y], &[x]) else { return };
    let ([to], from) = (call.write(), call.read(x));
    let (all, some) = (x.columns, y.columns);
    to.par_chunks_mut(ROWS * some).zip(from.par_chunks(ROWS * all)).for_each(|(to, from)| {
        for (to, from) in to.chunks_exact_mut(some).zip(from.chunks_exact(all)) {
            let from = &from[first..first + some];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = scale * from);
        }
    });
}
