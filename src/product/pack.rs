//! Copies of a and b in the order in which a micro-kernel reads them.

use super::micro_kernel::MicroKernel;
use super::{Elements, Matrix};

/// b as (sliver, depth, COLUMNS), with zeros behind its last column.
#[inline(always)]
pub(super) fn slivers<K: MicroKernel>(to: &mut [f32], b: Matrix<'_>, depth: usize, columns: usize) {
    let to = &mut to[..columns.next_multiple_of(K::COLUMNS) * depth];
    let whole = columns / K::COLUMNS * K::COLUMNS;
    if b.columns_by == 1 {
        for p in 0..depth {
            for (sliver, column) in (0..whole).step_by(K::COLUMNS).enumerate() {
                let to = &mut to[(sliver * depth + p) * K::COLUMNS..][..K::COLUMNS];
                b.elements.copy(p * b.rows_by + column, to);
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
            let at = column * b.columns_by + p;
            let mut eight = [0.0; 64];
            let (from, by) = match b.elements {
                Elements::Floats(all) => (&all[at..][..7 * b.columns_by + 8], b.columns_by),
                elements => {
                    for (row, to) in eight.chunks_exact_mut(8).enumerate() {
                        elements.copy(at + row * b.columns_by, to);
                    }
                    (&eight[..], 8)
                }
            };
            let to = &mut to[p * K::COLUMNS + column..][..7 * K::COLUMNS + 8];
            // SAFETY: the slices hold eight rows of eight; this level's instructions are there.
            unsafe { K::transpose_8(to.as_mut_ptr(), K::COLUMNS, from.as_ptr(), by) };
        }
    }
    for (p, to) in to.chunks_exact_mut(K::COLUMNS).enumerate().skip(in_eights) {
        for (column, to) in to.iter_mut().enumerate() {
            *to = b.elements.one(p * b.rows_by + column * b.columns_by);
        }
    }
}

/// The last sliver, if it is not whole.
#[inline(always)]
fn edge<K: MicroKernel>(to: &mut [f32], b: Matrix<'_>, columns: usize) {
    for (p, to) in to.chunks_exact_mut(K::COLUMNS).enumerate() {
        for (column, to) in to.iter_mut().enumerate() {
            let inside = column < columns;
            let at = p * b.rows_by + column * b.columns_by;
            *to = if inside { b.elements.one(at) } else { 0.0 };
        }
    }
}

/// a as (panel, depth, ROWS), with zeros behind its last row.
#[inline(always)]
pub(super) fn panels<K: MicroKernel>(to: &mut [f32], a: Matrix<'_>, depth: usize, rows: usize) {
    let to = &mut to[..rows.next_multiple_of(K::ROWS) * depth];
    let whole = if a.rows_by == 1 { rows / K::ROWS * K::ROWS } else { 0 };
    for p in 0..depth {
        for (panel, row) in (0..whole).step_by(K::ROWS).enumerate() {
            let to = &mut to[(panel * depth + p) * K::ROWS..][..K::ROWS];
            a.elements.copy(p * a.columns_by + row, to);
        }
    }
    for (panel, to) in to.chunks_exact_mut(K::ROWS * depth).enumerate().skip(whole / K::ROWS) {
        for (p, to) in to.chunks_exact_mut(K::ROWS).enumerate() {
            for (i, to) in to.iter_mut().enumerate() {
                let row = panel * K::ROWS + i;
                let at = row * a.rows_by + p * a.columns_by;
                *to = if row < rows { a.elements.one(at) } else { 0.0 };
            }
        }
    }
}
