//! Copies of a and b in the order in which a micro-kernel reads them, as slots of its elements.

use super::micro_kernel::{MicroKernel, pair};
use super::{Elements, Matrix};

/// Steps that are fetched ahead into the cache, of slivers and of panels: an operand may lie in
/// memory, and a step of it is too short for the processor to foresee the next.
const AHEAD: [usize; 2] = [4, 16];

/// b as (sliver, steps, COLUMNS), with zeros behind its last column and row.
#[inline(always)]
pub(super) fn slivers<K: MicroKernel>(to: &mut [f32], b: Matrix<'_>, depth: usize, columns: usize) {
    let steps = depth.div_ceil(K::TERMS);
    let to = &mut to[..columns.next_multiple_of(K::COLUMNS) * steps];
    let whole = columns / K::COLUMNS * K::COLUMNS;
    let lines = Lines { elements: b.elements, by: [b.rows_by, b.columns_by], depth };
    if b.columns_by == 1 {
        for step in 0..steps {
            for (sliver, column) in (0..whole).step_by(K::COLUMNS).enumerate() {
                let to = &mut to[(sliver * steps + step) * K::COLUMNS..][..K::COLUMNS];
                lines.fetch::<K>(step + AHEAD[0], column, K::COLUMNS);
                lines.neighbors::<K>(to, step, column);
            }
        }
    } else {
        let slivers = to[..whole * steps].chunks_exact_mut(steps * K::COLUMNS);
        for (sliver, to) in slivers.enumerate() {
            transposed::<K>(to, lines, sliver * K::COLUMNS);
        }
    }
    for (step, to) in to[whole * steps..].chunks_exact_mut(K::COLUMNS).enumerate() {
        for (column, to) in (whole..).zip(to) {
            *to = if column < columns { lines.slot::<K>(step, column) } else { 0.0 };
        }
    }
}

/// One whole sliver of a b whose columns are not neighbors.
#[inline(always)]
fn transposed<K: MicroKernel>(to: &mut [f32], lines: Lines<'_>, first: usize) {
    let in_eights = if lines.by[0] == 1 { lines.depth / K::TERMS / 8 * 8 } else { 0 };
    for column in (0..K::COLUMNS).step_by(8) {
        for step in (0..in_eights).step_by(8) {
            let mut eight = [0.0; 64];
            let (from, by) = match lines.elements {
                Elements::Floats(all) => {
                    let [_, by] = lines.by;
                    (&all[lines.at(step, first + column)..][..7 * by + 8], by)
                }
                _ => {
                    for (row, to) in eight.chunks_exact_mut(8).enumerate() {
                        lines.along::<K>(to, step, first + column + row);
                    }
                    (&eight[..], 8)
                }
            };
            let to = &mut to[step * K::COLUMNS + column..][..7 * K::COLUMNS + 8];
            // SAFETY: the slices hold eight rows of eight; this level's instructions are there.
            unsafe { K::transpose_8(to.as_mut_ptr(), K::COLUMNS, from.as_ptr(), by) };
        }
    }
    for (step, to) in to.chunks_exact_mut(K::COLUMNS).enumerate().skip(in_eights) {
        for (column, to) in (first..).zip(to) {
            *to = lines.slot::<K>(step, column);
        }
    }
}

/// a as (rows, steps). Its columns are neighbors.
#[inline(always)]
pub(super) fn rows<'t, K: MicroKernel>(
    to: &'t mut [f32],
    a: Matrix<'_>,
    depth: usize,
    rows: usize,
) -> &'t [f32] {
    let steps = depth.div_ceil(K::TERMS);
    let lines = Lines { elements: a.elements, by: [a.columns_by, a.rows_by], depth };
    let to = &mut to[..rows * steps];
    for (row, to) in to.chunks_exact_mut(steps).enumerate() {
        lines.along::<K>(to, 0, row);
    }
    to
}

/// a as (panel, steps, ROWS), with zeros behind its last row and column.
#[inline(always)]
pub(super) fn panels<'t, K: MicroKernel>(
    to: &'t mut [f32],
    a: Matrix<'_>,
    depth: usize,
    rows: usize,
) -> &'t [f32] {
    let steps = depth.div_ceil(K::TERMS);
    let lines = Lines { elements: a.elements, by: [a.columns_by, a.rows_by], depth };
    let to = &mut to[..rows.next_multiple_of(K::ROWS) * steps];
    let whole = if a.rows_by == 1 { rows / K::ROWS * K::ROWS } else { 0 };
    for step in 0..steps {
        lines.fetch::<K>(step + AHEAD[1], 0, whole);
        for (panel, row) in (0..whole).step_by(K::ROWS).enumerate() {
            lines.neighbors::<K>(&mut to[(panel * steps + step) * K::ROWS..][..K::ROWS], step, row);
        }
    }
    for (panel, to) in to.chunks_exact_mut(K::ROWS * steps).enumerate().skip(whole / K::ROWS) {
        for (step, to) in to.chunks_exact_mut(K::ROWS).enumerate() {
            for (row, to) in (panel * K::ROWS..).zip(to) {
                *to = if row < rows { lines.slot::<K>(step, row) } else { 0.0 };
            }
        }
    }
    to
}

/// The rows of a, or the columns of b: each runs along the depth.
#[derive(Clone, Copy)]
struct Lines<'a> {
    elements: Elements<'a>,
    /// From an element to the next one of its line, and to the same one of the next line.
    by: [usize; 2],
    depth: usize,
}

impl Lines<'_> {
    fn at(self, term: usize, line: usize) -> usize {
        term * self.by[0] + line * self.by[1]
    }

    #[inline(always)]
    fn slot<K: MicroKernel>(self, step: usize, line: usize) -> f32 {
        let at = self.at(step * K::TERMS, line);
        match self.elements {
            Elements::Bf16(all) if K::TERMS == 2 => {
                let has_second = 2 * step + 1 < self.depth;
                pair(all[at], if has_second { all[at + self.by[0]] } else { 0 })
            }
            elements => elements.one(at),
        }
    }

    /// Fetches a step of lines that are neighbors into the cache.
    #[inline(always)]
    fn fetch<K: MicroKernel>(self, step: usize, line: usize, lines: usize) {
        for term in step * K::TERMS..(step + 1) * K::TERMS {
            let at = self.at(term, line);
            match self.elements {
                Elements::Floats(all) => prefetch(all.as_ptr().wrapping_add(at), lines),
                Elements::Bf16(all) | Elements::F16(all) => {
                    prefetch(all.as_ptr().wrapping_add(at), lines);
                }
            }
        }
    }

    /// The slots of a step in lines that are neighbors.
    #[inline(always)]
    fn neighbors<K: MicroKernel>(self, to: &mut [f32], step: usize, line: usize) {
        let at = self.at(step * K::TERMS, line);
        match self.elements {
            Elements::Bf16(all) if K::TERMS == 2 => {
                let first = &all[at..];
                if 2 * step + 1 == self.depth {
                    return floats_of(to, [first], |[x]| pair(x, 0));
                }
                let second = &all[at + self.by[0]..];
                floats_of(to, [first, second], |[x, next]| pair(x, next));
            }
            elements => elements.copy(at, to),
        }
    }

    /// The slots of a line from a step on. Its elements are neighbors.
    #[inline(always)]
    fn along<K: MicroKernel>(self, to: &mut [f32], step: usize, line: usize) {
        let at = self.at(step * K::TERMS, line);
        match self.elements {
            Elements::Bf16(all) if K::TERMS == 2 => {
                let terms = (2 * to.len()).min(self.depth - 2 * step);
                let (pairs, odd) = all[at..][..terms].as_chunks();
                for (to, [x, next]) in to.iter_mut().zip(pairs) {
                    *to = pair(*x, *next);
                }
                if let [last] = odd {
                    to[pairs.len()] = pair(*last, 0);
                }
            }
            elements => elements.copy(at, to),
        }
    }
}

/// Fetches neighbors into the cache, wherever they lie.
#[inline(always)]
pub(super) fn prefetch<T>(at: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for element in (0..count).step_by(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(element).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, count);
}

/// Computes floats from elements of 16 bits, each from one of each source. Arrays of a constant
/// length become vectors.
#[inline(always)]
pub(super) fn floats_of<const SOURCES: usize>(
    to: &mut [f32],
    from: [&[u16]; SOURCES],
    of: impl Fn([u16; SOURCES]) -> f32,
) {
    let at = in_arrays::<8, SOURCES>(to, from, 0, &of);
    let at = in_arrays::<4, SOURCES>(to, from, at, &of);
    in_arrays::<1, SOURCES>(to, from, at, &of);
}

/// Computes the whole arrays of N floats from `at` on, and returns their end.
#[inline(always)]
fn in_arrays<const N: usize, const SOURCES: usize>(
    to: &mut [f32],
    from: [&[u16]; SOURCES],
    at: usize,
    of: &impl Fn([u16; SOURCES]) -> f32,
) -> usize {
    let to = to[at..].as_chunks_mut::<N>().0;
    let from = from.map(|from| &from[at..].as_chunks::<N>().0[..to.len()]);
    for (nth, to) in to.iter_mut().enumerate() {
        let from = from.map(|from| from[nth]);
        let mut floats = [0.0; N];
        for (lane, float) in floats.iter_mut().enumerate() {
            *float = of(from.map(|from| from[lane]));
        }
        *to = floats;
    }
    at + to.len() * N
}
