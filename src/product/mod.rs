//! Matrix products of floats on this processor: c = start + a b. The CPU device computes with them,
//! and so do rules that see a gradient as a matrix, and objectives that compare embeddings.
//!
//! The bits of an element follow from the depth and the instruction set alone. Its sum runs over
//! the depth in order, in cuts of at most [`CUT`] terms: a micro-kernel sums a cut in registers,
//! then the cut is added to c. The other rows and columns, threads, tiles and addresses change
//! nothing.
//!
//! The loops are those of Goto and van de Geijn (2008). A task owns some rows and at most [`WIDE`]
//! columns of c. It packs its columns of b into slivers as wide as the micro-kernel's tile. One
//! sliver stays in the first cache while a group of rows passes by, and the group stays in the
//! second cache. Rows of a whose elements are neighbors are read where they are; others are packed.

mod micro_kernel;
mod pack;
mod scattered;
mod task;

use rayon::prelude::*;

use crate::simd::Level;
use crate::tensor::{Dtype, widen};
use micro_kernel::pair;
pub(crate) use scattered::Scattered;

/// The most terms of a sum that are added in registers. The bits of results depend on it.
const CUT: usize = 384;

/// Cuts of b that are packed at a time.
const CUTS: usize = 2;

/// The most columns of c in one task.
const WIDE: usize = 512;

/// The fewest columns of c for which products that run at once are split.
const NARROW: usize = 128;

/// The least and the most rows and columns of a task of a symmetric product.
const EDGES: [usize; 2] = [32, 128];

/// Tasks of a thread when products run at once: more would be short, fewer of unlike lengths.
const SHARES: usize = 4;

/// The most rows of a that are multiplied with a sliver in turn.
const GROUP: usize = 72;

/// The elements of a matrix. Those of 16 bits are widened while they are packed, if the
/// micro-kernel computes with floats.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    Floats(&'a [f32]),
    Bf16(&'a [u16]),
    F16(&'a [u16]),
}

impl<'a> Elements<'a> {
    /// Elements of 16 bits.
    pub(crate) fn of(dtype: Dtype, halves: &'a [u16]) -> Elements<'a> {
        match dtype {
            Dtype::Bf16 => Elements::Bf16(halves),
            Dtype::F16 => Elements::F16(halves),
            Dtype::F32 => unreachable!("floats have 32 bits"),
        }
    }

    /// The elements from `at` on.
    #[inline(always)]
    fn from(self, at: usize) -> Self {
        match self {
            Elements::Floats(all) => Elements::Floats(&all[at..]),
            Elements::Bf16(all) => Elements::Bf16(&all[at..]),
            Elements::F16(all) => Elements::F16(&all[at..]),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Elements::Floats(all) => all.len(),
            Elements::Bf16(all) | Elements::F16(all) => all.len(),
        }
    }

    /// The elements from `at` on, as many as there is room for.
    #[inline(always)]
    fn copy(self, at: usize, to: &mut [f32]) {
        match self {
            Elements::Floats(all) => to.copy_from_slice(&all[at..][..to.len()]),
            Elements::Bf16(all) => pack::floats_of(to, [&all[at..]], |[x]| pair(x, 0)),
            Elements::F16(all) => widen(Dtype::F16, to, &all[at..][..to.len()]),
        }
    }

    #[inline(always)]
    fn one(self, at: usize) -> f32 {
        let mut one = [0.0];
        self.copy(at, &mut one);
        one[0]
    }

    /// Adds the elements from `at` on to as many sums.
    #[inline(always)]
    pub(crate) fn add_to(self, sums: &mut [f32], at: usize) {
        const FEW: usize = 64;
        if let Elements::Floats(all) = self {
            return sums.iter_mut().zip(&all[at..]).for_each(|(sum, x)| *sum += x);
        }
        let mut few = [0.0; FEW];
        for (index, sums) in sums.chunks_mut(FEW).enumerate() {
            let few = &mut few[..sums.len()];
            self.copy(at + index * FEW, few);
            sums.iter_mut().zip(few).for_each(|(sum, x)| *sum += *x);
        }
    }
}

/// A matrix in a slice: element (i, j) at `i * rows_by + j * columns_by`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    elements: Elements<'a>,
    rows_by: usize,
    columns_by: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix with rows of `width`.
    pub(crate) fn rows(floats: &'a [f32], width: usize) -> Matrix<'a> {
        Matrix::rows_of(Elements::Floats(floats), width)
    }

    /// A row-major matrix of these elements, with rows of `width`.
    pub(crate) fn rows_of(elements: Elements<'a>, width: usize) -> Matrix<'a> {
        Matrix { elements, rows_by: width, columns_by: 1 }
    }

    /// The transpose.
    pub(crate) fn transposed(self) -> Matrix<'a> {
        Matrix { rows_by: self.columns_by, columns_by: self.rows_by, ..self }
    }

    /// The part that begins at a row and a column.
    fn from(self, row: usize, column: usize) -> Matrix<'a> {
        let at = row * self.rows_by + column * self.columns_by;
        Matrix { elements: self.elements.from(at), ..self }
    }

    /// The floats of the matrix, if a micro-kernel can read its rows where they are.
    fn in_place(self) -> Option<&'a [f32]> {
        match self.elements {
            Elements::Floats(floats) if self.columns_by == 1 => Some(floats),
            _ => None,
        }
    }

    /// Panics unless a matrix of `rows` by `columns` lies in the slice.
    fn check(&self, rows: usize, columns: usize) {
        let last = (rows - 1) * self.rows_by + (columns - 1) * self.columns_by;
        let len = self.elements.len();
        assert!(last < len, "{rows} by {columns} are not in {len}");
    }
}

/// The value that a product is added to.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    Zero,
    /// The elements of c.
    C,
    /// One value a column.
    Bias(&'a [f32]),
}

impl Start<'_> {
    /// [`Start::C`] if `accumulate` is true, else zero.
    pub(crate) fn accumulate(accumulate: bool) -> Self {
        if accumulate { Start::C } else { Start::Zero }
    }
}

/// c = start + a b.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    /// (rows, depth).
    pub(crate) a: Matrix<'a>,
    /// (depth, columns).
    pub(crate) b: Matrix<'a>,
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) columns: usize,
    pub(crate) start: Start<'a>,
}

impl Product<'_> {
    /// Computes c on all threads of the pool. c: (rows, columns), dense.
    pub(crate) fn run(self, level: Level, c: &mut [f32]) {
        let Product { rows, columns, .. } = self;
        assert_eq!(c.len(), rows * columns, "{rows} by {columns}");
        if c.is_empty() {
            return;
        }
        let (high, wide) = self.task_size(rayon::current_num_threads());
        let across = columns.div_ceil(wide);
        let c = Scattered::new(c);
        (0..across * rows.div_ceil(high)).into_par_iter().with_max_len(1).for_each(|task| {
            let row = task / across * high;
            let column = task % across * wide;
            let part = self.part(row, column, high.min(rows - row), wide.min(columns - column));
            // SAFETY: inside c, whose length was checked; no other task has these elements.
            unsafe { task::run(level, part, c.base().add(row * columns + column), columns) };
        });
    }

    /// Computes a product that is a symmetric matrix, and is added to nothing: its lower triangle,
    /// of which the upper one is a copy.
    pub(crate) fn run_symmetric(self, level: Level, c: &mut [f32]) {
        let Product { rows, columns, .. } = self;
        assert!(rows == columns && c.len() == rows * columns, "{rows} by {columns}");
        assert!(matches!(self.start, Start::Zero), "a symmetric product is added to nothing");
        let c = Scattered::new(c);
        // About four tasks a side, so that threads have equal shares.
        let [least, most] = EDGES;
        let edge = (rows / 4).next_multiple_of(least).clamp(least, most);
        let edges = (0..rows).step_by(edge);
        let lower = edges.flat_map(|row| (0..=row).step_by(edge).map(move |column| (row, column)));
        let tiles: Vec<_> = lower.collect();
        tiles.into_par_iter().with_max_len(1).for_each(|(row, column)| {
            let [high, wide] = [rows - row, columns - column].map(|rest| edge.min(rest));
            let part = self.part(row, column, high, wide);
            // SAFETY: inside c, whose length was checked; no other task has these elements, nor
            // those of the transpose.
            unsafe {
                let to = c.base().add(row * columns + column);
                let mirror = c.base().add(column * columns + row);
                task::run_symmetric(level, part, to, mirror, columns);
            }
        });
    }

    /// Computes products on all threads of the pool at once. Each has a c of its own, dense.
    pub(crate) fn run_all(level: Level, products: Vec<(Product<'_>, &mut [f32])>) {
        let work = |product: &Product<'_>| product.rows * product.columns * product.depth;
        let total: usize = products.iter().map(|(product, _)| work(product)).sum();
        let share = total.div_ceil(SHARES * rayon::current_num_threads());
        let mut tasks = Vec::new();
        for (product, c) in products {
            let Product { rows, columns, .. } = product;
            assert_eq!(c.len(), rows * columns, "{rows} by {columns}");
            if c.is_empty() {
                continue;
            }
            // Columns are split first: each column of b is packed once.
            let parts = work(&product).div_ceil(share);
            let across = columns.div_ceil(WIDE).max(parts.min(columns.div_ceil(NARROW)));
            let wide = columns.div_ceil(across).next_multiple_of(micro_kernel::LARGEST[1]);
            let across = columns.div_ceil(wide);
            let high = rows.div_ceil(parts.div_ceil(across).min(rows.div_ceil(GROUP)));
            let c = Scattered::new(c);
            let pieces = (0..rows).step_by(high).flat_map(|row| {
                (0..columns).step_by(wide).map(move |column| {
                    let part =
                        product.part(row, column, high.min(rows - row), wide.min(columns - column));
                    (part, c, row * columns + column, columns)
                })
            });
            tasks.extend(pieces);
        }
        tasks.into_par_iter().with_max_len(1).for_each(|(part, c, at, columns)| {
            // SAFETY: inside c, whose length was checked; no other task has these elements.
            unsafe { task::run(level, part, c.base().add(at), columns) };
        });
    }

    /// Computes c on this thread. Rows of c are `width` apart.
    pub(crate) fn on_this_thread(self, level: Level, c: &mut [f32], width: usize) {
        let Product { rows, columns, .. } = self;
        if rows == 0 || columns == 0 {
            return;
        }
        assert!((rows - 1) * width + columns <= c.len(), "{rows} by {columns}");
        for column in (0..columns).step_by(WIDE) {
            let part = self.part(0, column, rows, WIDE.min(columns - column));
            // SAFETY: inside c, by the assertion.
            unsafe { part.on_pointer(level, c.as_mut_ptr().add(column), width) };
        }
    }

    /// Rows and columns of one task. Columns are split first: each column of b is packed once.
    fn task_size(&self, threads: usize) -> (usize, usize) {
        let slivers = self.columns.div_ceil(threads).next_multiple_of(micro_kernel::LARGEST[1]);
        let wide = slivers.min(WIDE);
        let across = self.columns.div_ceil(wide);
        // Two tasks a thread, so that a slow thread does not hold up the others for long.
        let down = (2 * threads).div_ceil(across).min(self.rows.div_ceil(GROUP));
        (self.rows.div_ceil(down), wide)
    }

    #[cfg(target_arch = "x86_64")]
    fn is_bf16(self) -> bool {
        matches!([self.a, self.b].map(|of| of.elements), [Elements::Bf16(_), Elements::Bf16(_)])
    }

    fn part(self, row: usize, column: usize, rows: usize, columns: usize) -> Self {
        let start = match self.start {
            Start::Bias(bias) => Start::Bias(&bias[column..column + columns]),
            other => other,
        };
        let a = self.a.from(row, 0);
        let b = self.b.from(0, column);
        Product { a, b, rows, columns, start, ..self }
    }

    /// Computes at most [`WIDE`] columns of c on this thread.
    ///
    /// # Safety
    /// Only this call uses the product's rows and columns from `c` on. Rows are `width` apart.
    pub(crate) unsafe fn on_pointer(self, level: Level, c: *mut f32, width: usize) {
        assert!(self.columns <= WIDE, "{} columns", self.columns);
        // SAFETY: the caller's promise.
        unsafe { task::run(level, self, c, width) };
    }
}

#[cfg(test)]
mod tests;
