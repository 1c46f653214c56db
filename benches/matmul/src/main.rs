//! The table the matrix product was chosen by: eight shapes of a GPT of width 512, on all cores.
//!
//! `cd benches/matmul && cargo run --release`. Candidates: gemm and faer with their own threading,
//! and faer on one thread for each tile of 256 × 512, which is what the CPU device does.

use std::time::Instant;

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

/// c = a b, all dense; `a` or `b` may be stored transposed.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    m: usize,
    k: usize,
    n: usize,
    a_turned: bool,
    b_turned: bool,
}

#[derive(Clone, Copy)]
struct Pointers {
    c: *mut f32,
    a: *const f32,
    b: *const f32,
}

// SAFETY: tiles write elements of their own.
unsafe impl Send for Pointers {}
// SAFETY: as above.
unsafe impl Sync for Pointers {}

impl Shape {
    fn strides(self) -> [isize; 4] {
        let [m, k, n] = [self.m, self.k, self.n].map(|size| size as isize);
        let (a_rows, a_columns) = if self.a_turned { (1, m) } else { (k, 1) };
        let (b_rows, b_columns) = if self.b_turned { (1, k) } else { (n, 1) };
        [a_rows, a_columns, b_rows, b_columns]
    }

    fn gemm(self, Pointers { c, a, b }: Pointers, threads: usize) {
        let ([ar, ac, br, bc], Shape { m, k, n, .. }) = (self.strides(), self);
        let parallel = gemm::Parallelism::Rayon(threads);
        // SAFETY: the three matrices are as large as their sizes say.
        unsafe {
            gemm::gemm(
                m, n, k, c, 1, n as isize, false, a, ac, ar, b, bc, br, 0.0, 1.0, false, false,
                false, parallel,
            );
        }
    }

    fn faer(self, pointers: Pointers, threads: usize) {
        self.part(pointers, (0, 0), (self.m, self.n), Par::rayon(threads));
    }

    fn tiles(self, pointers: Pointers, _threads: usize) {
        const ROWS: usize = 256;
        const COLUMNS: usize = 512;
        let across = self.n.div_ceil(COLUMNS);
        (0..self.m.div_ceil(ROWS) * across).into_par_iter().with_max_len(1).for_each(|tile| {
            let (row, column) = (tile / across * ROWS, tile % across * COLUMNS);
            let size = (ROWS.min(self.m - row), COLUMNS.min(self.n - column));
            self.part(pointers, (row, column), size, Par::Seq);
        });
    }

    fn part(self, p: Pointers, (i, j): (usize, usize), (m, n): (usize, usize), par: Par) {
        let [ar, ac, br, bc] = self.strides();
        // SAFETY: the part lies inside, and nobody else writes it.
        let (c, a, b) = unsafe {
            (
                MatMut::from_raw_parts_mut(p.c.add(i * self.n + j), m, n, self.n as isize, 1),
                MatRef::from_raw_parts(p.a.offset(i as isize * ar), m, self.k, ar, ac),
                MatRef::from_raw_parts(p.b.offset(j as isize * bc), self.k, n, br, bc),
            )
        };
        matmul(c, Accum::Replace, a, b, 1.0, par);
    }
}

/// Median GFLOP/s of five runs.
fn rate(shape: Shape, pointers: Pointers, of: fn(Shape, Pointers, usize), threads: usize) -> f64 {
    let work = 2.0 * (shape.m * shape.k * shape.n) as f64;
    let times = (5e9 / work).clamp(3.0, 2000.0) as usize;
    let mut rates: Vec<f64> = (0..5)
        .map(|_| {
            let begin = Instant::now();
            (0..times).for_each(|_| of(shape, pointers, threads));
            work * times as f64 / begin.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates[2]
}

fn main() {
    let threads = rayon::current_num_threads();
    println!("| product | m × k × n | gemm | faer | faer in tiles |\n|---|---|---|---|---|");
    for (name, m, k, n, a_turned, b_turned) in [
        ("attention in", 1024, 512, 1536, false, false),
        ("up", 1024, 512, 2048, false, false),
        ("down", 1024, 2048, 512, false, false),
        ("dx of up", 1024, 2048, 512, false, true),
        ("dw of up", 512, 1024, 2048, true, false),
        ("dw of up, x turned first", 512, 1024, 2048, false, false),
        ("logits", 1024, 512, 8192, false, true),
        ("scores of a tile", 64, 64, 64, false, true),
    ] {
        let shape = Shape { name, m, k, n, a_turned, b_turned };
        let (a, b, mut c) = (vec![0.5; m * k], vec![0.25; k * n], vec![0.0; m * n]);
        let pointers = Pointers { c: c.as_mut_ptr(), a: a.as_ptr(), b: b.as_ptr() };
        let [gemm, faer, tiles] = [Shape::gemm, Shape::faer, Shape::tiles]
            .map(|of: fn(Shape, Pointers, usize)| rate(shape, pointers, of, threads));
        println!("| {} | {m} × {k} × {n} | {gemm:.0} | {faer:.0} | {tiles:.0} |", shape.name);
    }
}
