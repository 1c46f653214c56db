//! One thread's part of a product.

use std::cell::RefCell;
use std::slice::from_raw_parts_mut;

#[cfg(test)]
use super::micro_kernel::Arrays;
#[cfg(target_arch = "aarch64")]
use super::micro_kernel::Neon;
#[cfg(target_arch = "x86_64")]
use super::micro_kernel::{Avx2, Avx512, Avx512Bf16};
use super::micro_kernel::{LARGEST, Left, MicroKernel, Portable, Target};
use super::pack::{self, prefetch};
use super::{CUT, CUTS, GROUP, Product, Start, WIDE};
use crate::simd::Level;
use crate::tensor::Pages;

/// The most floats of packed rows of a, and of packed slivers of b.
const ROWS_LEN: usize = (GROUP + LARGEST[0]) * CUT;
const SLIVERS_LEN: usize = WIDE * CUTS * CUT;

/// Floats of a huge page.
const HUGE: usize = (2 << 20) / size_of::<f32>();

/// Memory for the packed operands of a thread.
struct Packed<'t> {
    a: &'t mut [f32],
    b: &'t mut [f32],
}

impl<'t> Packed<'t> {
    fn of(memory: &'t mut [f32]) -> Packed<'t> {
        let (a, b) = memory.split_at_mut(ROWS_LEN);
        Packed { a, b: &mut b[..SLIVERS_LEN] }
    }
}

thread_local! {
    /// It lives as long as the thread. In small pages products take 3 % longer.
    static PACKED: RefCell<Pages> = RefCell::new({
        let len = (ROWS_LEN + SLIVERS_LEN).next_multiple_of(HUGE);
        Pages::new(len).expect("two MiB for each thread")
    });
}

/// Computes a product of at most [`WIDE`] columns. Rows of c are `width` apart.
///
/// # Safety
/// From `c` on, the product's rows and columns are this call's alone.
pub(super) unsafe fn run(level: Level, product: Product<'_>, c: *mut f32, width: usize) {
    // SAFETY: the caller's promise.
    unsafe { run_task(level, Task { product, c, width, mirror: None }) };
}

/// Computes a part of a symmetric product at `c`, and writes its transpose to `mirror`. If both are
/// one place, the part is on the diagonal: then its lower triangle is computed, and mirrored.
///
/// # Safety
/// As for [`run`], from `c` and from `mirror` on.
pub(super) unsafe fn run_symmetric(
    level: Level,
    product: Product<'_>,
    c: *mut f32,
    mirror: *mut f32,
    width: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { run_task(level, Task { product, c, width, mirror: Some(mirror) }) };
}

/// # Safety
/// As for [`run_symmetric`].
unsafe fn run_task(level: Level, task: Task<'_>) {
    let product = task.product;
    product.a.check(product.rows, product.depth);
    product.b.check(product.depth, product.columns);
    PACKED.with_borrow_mut(|memory| {
        let packed = Packed::of(memory);
        level.run(
            #[inline(always)]
            // SAFETY: a and b were checked, c is the caller's promise, and the level says which
            // instructions there are.
            || unsafe {
                match level {
                    Level::Portable => task.run::<Portable>(packed),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2(_) => task.run::<Avx2>(packed),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512Bf16(_) if product.is_bf16() => task.run::<Avx512Bf16>(packed),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512(_) | Level::Avx512Bf16(_) => task.run::<Avx512>(packed),
                    #[cfg(target_arch = "aarch64")]
                    Level::Neon => task.run::<Neon>(packed),
                }
            },
        );
    });
}

/// [`run`] in portable code with another tile, for tests.
///
/// # Safety
/// As for [`run`].
#[cfg(test)]
pub(super) unsafe fn run_in_tiles<const ROWS: usize, const COLUMNS: usize, const TERMS: usize>(
    product: Product<'_>,
    c: *mut f32,
    width: usize,
) {
    let task = Task { product, c, width, mirror: None };
    // SAFETY: the caller's promise.
    PACKED.with_borrow_mut(|memory| unsafe {
        task.run::<Arrays<ROWS, COLUMNS, TERMS>>(Packed::of(memory));
    });
}

#[derive(Clone, Copy)]
struct Task<'a> {
    product: Product<'a>,
    c: *mut f32,
    width: usize,
    /// The place of its transpose, in a symmetric product.
    mirror: Option<*mut f32>,
}

/// Rows `top..bottom` of a with its columns `from..to`.
struct Group<'a> {
    top: usize,
    bottom: usize,
    from: usize,
    to: usize,
    rows: Rows<'a>,
}

/// The rows of a group, as a micro-kernel reads them.
#[derive(Clone, Copy)]
enum Rows<'a> {
    InPlace,
    /// Slots, row-major and dense.
    Copied(&'a [f32]),
    /// Slots of ROWS rows each, column-major and dense.
    Panels(&'a [f32]),
}

/// Columns `from..to` of b, packed.
struct Slivers<'a> {
    from: usize,
    to: usize,
    packed: &'a [f32],
}

impl Task<'_> {
    #[inline(always)]
    unsafe fn run<K: MicroKernel>(self, packed: Packed<'_>) {
        let Product { a, b, rows, depth, columns, .. } = self.product;
        let high = GROUP / K::ROWS * K::ROWS;
        // Cuts of one length: a short last one would cost nearly as much as a whole one.
        let cut = depth.div_ceil(depth.div_ceil(CUT)).next_multiple_of(8);
        for deep in (0..depth).step_by(CUTS * cut) {
            let deep_end = depth.min(deep + CUTS * cut);
            pack::slivers::<K>(packed.b, b.from(deep, 0), deep_end - deep, columns);
            let slivers = Slivers { from: deep, to: deep_end, packed: packed.b };
            for top in (0..rows).step_by(high) {
                let bottom = rows.min(top + high);
                for from in (deep..deep_end).step_by(cut) {
                    let to = deep_end.min(from + cut);
                    let rows = if a.in_place().is_some() {
                        Rows::InPlace
                    } else if a.columns_by == 1 {
                        let a = a.from(top, from);
                        Rows::Copied(pack::rows::<K>(packed.a, a, to - from, bottom - top))
                    } else {
                        let a = a.from(top, from);
                        Rows::Panels(pack::panels::<K>(packed.a, a, to - from, bottom - top))
                    };
                    let group = Group { top, bottom, from, to, rows };
                    // SAFETY: the caller's promise.
                    unsafe { self.pass::<K>(&group, &slivers) };
                }
            }
        }
        if let Some(mirror) = self.mirror {
            // SAFETY: the caller's promise.
            unsafe { self.copy_transposed::<K>(mirror) };
        }
    }

    /// Writes the transpose to `mirror`; of a part on the diagonal, that of its lower triangle.
    #[inline(always)]
    unsafe fn copy_transposed<K: MicroKernel>(&self, mirror: *mut f32) {
        let Product { rows, columns, .. } = self.product;
        for row in (0..rows).step_by(8) {
            let end = if mirror == self.c { row + 1 } else { columns };
            for column in (0..end).step_by(8) {
                // SAFETY: inside the part.
                let from = unsafe { self.c.add(row * self.width + column) };
                // SAFETY: inside its transpose.
                let to = unsafe { mirror.add(column * self.width + row) };
                let [high, wide] = [rows - row, columns - column].map(|rest| rest.min(8));
                if [high, wide] == [8, 8] && from != to {
                    // SAFETY: whole squares that do not overlap.
                    unsafe { K::transpose_8(to, self.width, from, self.width) };
                    continue;
                }
                for i in 0..high {
                    for j in 0..if from == to { i } else { wide } {
                        // SAFETY: inside both.
                        unsafe { *to.add(j * self.width + i) = *from.add(i * self.width + j) };
                    }
                }
            }
        }
    }

    /// Multiplies a group with all slivers.
    #[inline(always)]
    unsafe fn pass<K: MicroKernel>(&self, group: &Group<'_>, slivers: &Slivers<'_>) {
        let Product { a, columns, start, .. } = self.product;
        let steps = (group.to - group.from).div_ceil(K::TERMS);
        let before = (group.from - slivers.from) / K::TERMS;
        let all_steps = (slivers.to - slivers.from).div_ceil(K::TERMS);
        // The first cut is added to the start, each later one to c.
        let start = if group.from == 0 { start } else { Start::C };
        for column in (0..columns).step_by(K::COLUMNS) {
            let at = column * all_steps + before * K::COLUMNS;
            let b = &slivers.packed[at..][..steps * K::COLUMNS];
            let wide = K::COLUMNS.min(columns - column);
            for row in (group.top..group.bottom).step_by(K::ROWS) {
                let high = K::ROWS.min(group.bottom - row);
                let is_above = row + high <= column; // above the diagonal of c
                if is_above && self.mirror == Some(self.c) {
                    continue;
                }
                // SAFETY: inside c.
                let c = unsafe { self.c.add(row * self.width + column) };
                // Its sums are computed meanwhile.
                (0..high).for_each(|row| prefetch(c.wrapping_add(row * self.width), wide));
                let first = (row - group.top) * steps;
                let left = match group.rows {
                    Rows::Copied(rows) => Left::Rows { at: rows[first..].as_ptr(), by: steps },
                    Rows::Panels(panels) => Left::Panel { at: panels[first..].as_ptr() },
                    Rows::InPlace => {
                        let rows = a.from(row, group.from).in_place();
                        let at = rows.expect("rows that are not packed").as_ptr();
                        Left::Rows { at, by: a.rows_by }
                    }
                };
                let tile = Tile { c, by: self.width, rows: high, columns: wide };
                // SAFETY: the tile is inside c, and this task's.
                let add = unsafe { tile.start(start, column) };
                // SAFETY: the rows of a have `steps` slots, and the sliver has as many rows.
                unsafe { tile.multiply::<K>(add, left, b.as_ptr(), steps) };
            }
        }
    }
}

/// A tile of c, whole or at an edge.
struct Tile {
    c: *mut f32,
    /// Floats from one row to the next.
    by: usize,
    rows: usize,
    columns: usize,
}

impl Tile {
    /// # Safety
    /// The tile is inside c, and the task's.
    #[inline(always)]
    unsafe fn row<'c>(&self, row: usize) -> &'c mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { from_raw_parts_mut(self.c.add(row * self.by), self.columns) }
    }

    /// Prepares the tile; true if sums are added to it then.
    ///
    /// # Safety
    /// As for [`Tile::row`].
    #[inline(always)]
    unsafe fn start(&self, start: Start<'_>, column: usize) -> bool {
        if let Start::Bias(bias) = start {
            for row in 0..self.rows {
                // SAFETY: the caller's promise.
                unsafe { self.row(row) }.copy_from_slice(&bias[column..][..self.columns]);
            }
        }
        !matches!(start, Start::Zero)
    }

    /// c (+)= a b.
    ///
    /// # Safety
    /// As for [`Tile::row`] and [`MicroKernel::multiply`].
    #[inline(always)]
    unsafe fn multiply<K: MicroKernel>(&self, add: bool, a: Left, b: *const f32, steps: usize) {
        if self.columns == K::COLUMNS {
            let c = Target { at: self.c, by: self.by, add };
            // SAFETY: the caller's promise; the tile has all columns.
            return unsafe { K::multiply(c, a, b, self.rows, steps) };
        }
        let mut sums = [0.0_f32; LARGEST[0] * LARGEST[1]];
        let to = Target { at: sums.as_mut_ptr(), by: K::COLUMNS, add: false };
        // SAFETY: the caller's promise; the largest tile fits in `sums`.
        unsafe { K::multiply(to, a, b, self.rows, steps) };
        for (row, sums) in sums.chunks_exact(K::COLUMNS).take(self.rows).enumerate() {
            // SAFETY: the caller's promise.
            let c = unsafe { self.row(row) }.iter_mut().zip(sums);
            c.for_each(|(c, sum)| *c = if add { *c + sum } else { *sum });
        }
    }
}
