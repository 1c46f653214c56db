//! Copies of a and b in the order in which a micro-kernel reads them.

use super::Matrix;
use super::micro_kernel::MicroKernel;

/// b as (sliver, depth, COLUMNS), with zeros behind its last column.
#[inline(always)]
pub(super) fn slivers<K: MicroKernel>(to: &mut [f32], b: Matrix<'_>, depth: usize, columns: usize) {
    let to = &mut to[..columns.next_multiple_of(K::COLUMNS) * depth];
    let whole = columns / K::COLUMNS * K::COLUMNS;
    if b.columns_by == 1 {
        for p in 0..depth {
            let row = &b.data[p * b.rows_by..][..whole];
            for (sliver, row) in row.chunks_exact(K::COLUMNS).enumerate() {
                to[(sliver * depth + p) * K::COLUMNS..][..K::COLUMNS].copy_from_slice(row);
            }
        }
    } else {
        for (sliver, to) in to.chunks_exact_mut(depth * K::COLUMNS).enumerate() {
            if (sliver + 1) * K::COLUMNS <= whole {
                transposed::<K>(to, b.from(0, sliver * K::COLUMNS), depth);
            }
        }
    }
    if whole < columns {
        edge::<K>(&mut to[whole * depth..], b.from(0, whole), columns - whole);
    }
}

/// One whole sliver of a b whose columns are not neighbors.
#[inline(always)]
fn transposed<K: MicroKernel>(to: &mut [f32], b: Matrix<'_>, depth: usize) {
    let in_eights = if b.rows_by == 1 { depth / 8 * 8 } else { 0 };
    for column in (0..K::COLUMNS).step_by(8) {
        for p in (0..in_eights).step_by(8) {
            let from = &b.data[column * b.columns_by + p..][..7 * b.columns_by + 8];
            let to = &mut to[p * K::COLUMNS + column..][..7 * K::COLUMNS + 8];
            // SAFETY: the slices hold eight rows of eight; this level's instructions are there.
            unsafe { K::transpose_8(to.as_mut_ptr(), K::COLUMNS, from.as_ptr(), b.columns_by) };
        }
    }
    for (p, to) in to.chunks_exact_mut(K::COLUMNS).enumerate().skip(in_eights) {
        for (column, to) in to.iter_mut().enumerate() {
            *to = b.data[p * b.rows_by + column * b.columns_by];
        }
    }
}

/// The last sliver, if it is not whole.
#[inline(always)]
fn edge<K: MicroKernel>(to: &mut [f32], b: Matrix<'_>, columns: usize) {
    for (p, to) in to.chunks_exact_mut(K::COLUMNS).enumerate() {
        for (column, to) in to.iter_mut().enumerate() {
            let inside = column < columns;
            *to = if inside { b.data[p * b.rows_by + column * b.columns_by] } else { 0.0 };
        }
    }
}

/// a as (panel, depth, ROWS), with zeros behind its last row.
#[inline(always)]
pub(super) fn panels<K: MicroKernel>(to: &mut [f32], a: Matrix<'_>, depth: usize, rows: usize) {
    let to = &mut to[..rows.next_multiple_of(K::ROWS) * depth];
    let whole = if a.rows_by == 1 { rows / K::ROWS * K::ROWS } else { 0 };
    for p in 0..depth {
        let column = &a.data[p * a.columns_by..][..whole];
        for (panel, column) in column.chunks_exact(K::ROWS).enumerate() {
            to[(panel * depth + p) * K::ROWS..][..K::ROWS].copy_from_slice(column);
        }
    }
    for (panel, to) in to.chunks_exact_mut(K::ROWS * depth).enumerate().skip(whole / K::ROWS) {
        for (p, to) in to.chunks_exact_mut(K::ROWS).enumerate() {
            for (i, to) in to.iter_mut().enumerate() {
                let row = panel * K::ROWS + i;
                *to = if row < rows { a.data[row * a.rows_by + p * a.columns_by] } else { 0.0 };
            }
        }
    }
}
