//! PowerSGD (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2, with warm start).
//!
//! M (n, m) is the sum over groups g of M_g = gradient_g + error_g, and Q (m, r) is the factor of
//! the step before:
//! P = Σ M_g Q, P̂ = orthonormal columns of P, Q_g = M_gᵀ P̂, Q = Σ Q_g, M ≈ P̂ Qᵀ,
//! error_g = M_g − P̂ Q_gᵀ.
//! Sums are added in the tree of the groups. Both factors are stored transposed: P̂ᵀ (r, n) and
//! Qᵀ (r, m).

use std::ops::Range;

use rayon::prelude::*;

use crate::models::{Tensor, tensor_ranges};
use crate::random;

/// Columns of a transposed factor that one task computes: 1 KiB of each row.
const COLUMNS: usize = 256;

/// The compression of a run's matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PowerSgd {
    pub(crate) rank: usize,
    pub(crate) seed: u64,
}

/// A matrix that is compressed.
#[derive(Clone, Debug)]
pub(crate) struct Factored {
    /// Its index among the block's trained tensors.
    pub(crate) tensor: usize,
    /// Its place in the block's gradient.
    pub(crate) range: Range<usize>,
    pub(crate) columns: usize,
    /// The place of P̂ᵀ among the block's first factors.
    left: Range<usize>,
    /// The place of Qᵀ among the block's second factors.
    pub(crate) right: Range<usize>,
    /// The key of the random numbers in the first Q.
    key: u64,
}

/// How a block is compressed: the factors of its matrices, and vectors that are not compressed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Factors {
    pub(crate) matrices: Vec<Factored>,
    /// Ranges of the gradient that are not compressed.
    pub(crate) vectors: Vec<Range<usize>>,
    /// The floats of all P̂ᵀ.
    pub(crate) left_len: usize,
    /// The floats of all Qᵀ.
    pub(crate) right_len: usize,
    /// The floats of all vectors.
    vectors_len: usize,
}

/// The largest rank whose factors are smaller than a matrix.
pub(crate) fn largest_rank(rows: usize, columns: usize) -> usize {
    (rows * columns).saturating_sub(1) / (rows + columns).max(1)
}

/// The rows and columns of a tensor that is a matrix.
pub(crate) fn matrix_of(tensor: &Tensor) -> Option<(usize, usize)> {
    match tensor.shape[..] {
        [rows, columns] => Some((rows, columns)),
        _ => None,
    }
}

impl Factors {
    /// The factors of a block's trained tensors.
    pub(crate) fn new(tensors: &[Tensor], rank: usize) -> Factors {
        let mut all = Factors::default();
        for (tensor, (each, range)) in tensors.iter().zip(tensor_ranges(tensors)).enumerate() {
            match matrix_of(each) {
                Some((rows, columns)) if rank <= largest_rank(rows, columns) => {
                    let left = all.left_len..all.left_len + rank * rows;
                    let right = all.right_len..all.right_len + rank * columns;
                    all.left_len = left.end;
                    all.right_len = right.end;
                    let key = key_of(&each.name);
                    all.matrices.push(Factored { tensor, range, columns, left, right, key });
                }
                _ => {
                    all.vectors_len += range.len();
                    all.vectors.push(range);
                }
            }
        }
        all
    }

    /// The floats of a group's first factors, and of its vectors if they are exchanged.
    pub(crate) fn left_and_vectors(&self, exchanged: bool) -> usize {
        self.left_len + if exchanged { self.vectors_len } else { 0 }
    }
}

/// The FNV-1a hash of a tensor's name.
fn key_of(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

impl Factored {
    fn rows(&self) -> usize {
        self.range.len() / self.columns
    }
}

impl PowerSgd {
    /// Fills columns of Q that are zeros with random numbers. Before the first step all are zeros.
    pub(crate) fn begin(self, factors: &Factors, right: &mut [f32]) {
        for matrix in &factors.matrices {
            let columns = right[matrix.right.clone()].chunks_exact_mut(matrix.columns);
            for (column, nth) in columns.zip(0_u64..) {
                if column.iter().all(|number| *number == 0.0) {
                    let mut state = random::keyed(self.seed, matrix.key.wrapping_add(nth));
                    let uniform = |state: &mut u64| 2.0 * random::unit(state) as f32 - 1.0;
                    column.iter_mut().for_each(|number| *number = uniform(&mut state));
                }
            }
        }
    }

    /// Computes P_gᵀ = (M_g Q)ᵀ.
    pub(crate) fn left(self, factors: &Factors, left: &mut [f32], m: &[f32], right: &[f32]) {
        for matrix in &factors.matrices {
            let columns = matrix.columns;
            let m = &m[matrix.range.clone()];
            let right = &right[matrix.right.clone()];
            // A task has some rows of M, and writes one column of Pᵀ for each.
            let mut tasks = self.columns_of(&mut left[matrix.left.clone()], matrix.rows());
            tasks.par_iter_mut().enumerate().for_each(|(at, parts)| {
                let m = &m[at * COLUMNS * columns..];
                for (row, m) in m.chunks_exact(columns).take(COLUMNS).enumerate() {
                    for (part, q) in parts.iter_mut().zip(right.chunks_exact(columns)) {
                        part[row] = dot(m, q);
                    }
                }
            });
        }
    }

    /// Cuts a transposed factor, whose rows have `len` numbers, into tasks. A task has some columns
    /// of all rows.
    fn columns_of(self, factor: &mut [f32], len: usize) -> Vec<Vec<&mut [f32]>> {
        let mut tasks: Vec<Vec<&mut [f32]>> = Vec::new();
        for row in factor.chunks_exact_mut(len) {
            for (at, part) in row.chunks_mut(COLUMNS).enumerate() {
                if tasks.len() <= at {
                    tasks.push(Vec::with_capacity(self.rank));
                }
                tasks[at].push(part);
            }
        }
        tasks
    }

    /// Makes the columns of P orthonormal, one after the other (P̂). A column that depends on the
    /// columns before it becomes 0.
    pub(crate) fn orthonormalise(self, factors: &Factors, left: &mut [f32]) {
        for matrix in &factors.matrices {
            let rows = matrix.rows();
            let p = &mut left[matrix.left.clone()];
            for nth in 0..self.rank {
                let (done, column) = p[..(nth + 1) * rows].split_at_mut(nth * rows);
                let mut exact: Vec<f64> = column.iter().map(|&number| number.into()).collect();
                let norm = |column: &[f64]| column.iter().map(|x| x * x).sum::<f64>().sqrt();
                let before = norm(&exact);
                // The second pass removes what rounding left of the first (Kahan and Parlett).
                for other in done.chunks_exact(rows).chain(done.chunks_exact(rows)) {
                    let products = exact.iter().zip(other).map(|(x, y)| x * f64::from(*y));
                    let share: f64 = products.sum();
                    exact.iter_mut().zip(other).for_each(|(x, y)| *x -= share * f64::from(*y));
                }
                let after = norm(&exact);
                let depends = after <= 1e-6 * before; // f32 has no more digits
                let factor = if depends { 0.0 } else { after.recip() };
                column.iter_mut().zip(&exact).for_each(|(to, x)| *to = (x * factor) as f32);
            }
        }
    }

    /// Computes Q_gᵀ = (M_gᵀ P̂)ᵀ.
    pub(crate) fn right(self, factors: &Factors, right: &mut [f32], m: &[f32], left: &[f32]) {
        for matrix in &factors.matrices {
            let columns = matrix.columns;
            let m = &m[matrix.range.clone()];
            let left = &left[matrix.left.clone()];
            // A task has some columns of M, and writes one column of Qᵀ for each.
            let mut tasks = self.columns_of(&mut right[matrix.right.clone()], columns);
            tasks.par_iter_mut().enumerate().for_each(|(at, parts)| {
                let from = at * COLUMNS;
                for (part, p) in parts.iter_mut().zip(left.chunks_exact(matrix.rows())) {
                    part.fill(0.0);
                    for (row, &p) in m.chunks_exact(columns).zip(p) {
                        let row = &row[from..from + part.len()];
                        part.iter_mut().zip(row).for_each(|(sum, &x)| *sum += x * p);
                    }
                }
            });
        }
    }

    /// Computes M_g − P̂ Q_gᵀ in place.
    pub(crate) fn subtract(self, factors: &Factors, m: &mut [f32], left: &[f32], right: &[f32]) {
        for matrix in &factors.matrices {
            let product = Product { matrix, left, right, rank: self.rank };
            let rows = m[matrix.range.clone()].par_chunks_exact_mut(matrix.columns);
            rows.enumerate().for_each(|(row, m)| {
                product.row(row, 0..matrix.columns, |at, approximation| m[at] -= approximation);
            });
        }
    }

    /// Writes the elements of P̂ Qᵀ in a range of the gradient to `part`.
    pub(crate) fn write(
        self,
        factors: &Factors,
        part: &mut [f32],
        range: Range<usize>,
        left: &[f32],
        right: &[f32],
    ) {
        for matrix in &factors.matrices {
            let columns = matrix.columns;
            let start = range.start.max(matrix.range.start);
            let end = range.end.min(matrix.range.end);
            if start >= end {
                continue;
            }
            let product = Product { matrix, left, right, rank: self.rank };
            let row = (start - matrix.range.start) / columns;
            let column = (start - matrix.range.start) % columns;
            let part = &mut part[start - range.start..end - range.start];
            // The range may begin within a row.
            let (head, rows) = part.split_at_mut((columns - column).min(part.len()));
            product.row(row, column..column + head.len(), |nth, sum| head[nth] = sum);
            rows.par_chunks_mut(columns).enumerate().for_each(|(nth_row, to)| {
                product.row(row + 1 + nth_row, 0..to.len(), |nth, sum| to[nth] = sum);
            });
        }
    }
}

/// The product P̂ Qᵀ of a matrix.
#[derive(Clone, Copy)]
struct Product<'a> {
    matrix: &'a Factored,
    left: &'a [f32],
    right: &'a [f32],
    rank: usize,
}

impl Product<'_> {
    /// Computes some columns of a row. `to` gets each number with its place among them.
    fn row(self, row: usize, columns: Range<usize>, mut to: impl FnMut(usize, f32)) {
        let matrix = self.matrix;
        let left = &self.left[matrix.left.clone()];
        let right = &self.right[matrix.right.clone()];
        let mut sums = [0.0_f32; COLUMNS];
        let mut start = columns.start;
        while start < columns.end {
            let sums = &mut sums[..COLUMNS.min(columns.end - start)];
            sums.fill(0.0);
            for k in 0..self.rank {
                let p = left[k * matrix.rows() + row];
                let q = &right[k * matrix.columns + start..][..sums.len()];
                sums.iter_mut().zip(q).for_each(|(sum, &q)| *sum += p * q);
            }
            for (nth, &sum) in sums.iter().enumerate() {
                to(start - columns.start + nth, sum);
            }
            start += sums.len();
        }
    }
}

/// A dot product in 16 partial sums, so that the loop has vector instructions.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0_f32; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::models::{Init, Kind};

    fn tensors(shapes: &[[usize; 2]]) -> Vec<Tensor> {
        let tensor = |(at, shape): (usize, &[usize; 2])| Tensor {
            name: at.to_string(),
            shape: shape.to_vec(),
            kind: Kind::Weight,
            init: Init::Zeros,
            joined: false,
            stacked: false,
            kept_with: None,
        };
        shapes.iter().enumerate().map(tensor).collect()
    }

    /// A group's gradient at an element of a tensor, as `goldens/powersgd.py` has it.
    fn gradient([tensor, i, j, group, step]: [usize; 5]) -> f32 {
        let [k, i, j, g, t] = [tensor, i, j, group, step].map(|number| number as f64);
        let wave = (0.7 * (i + 1.0) + 1.3 * (j + 1.0) + 2.1 * g + 0.9 * k).sin();
        let slow = (0.37 * t + 0.11 * (i + 1.0) * (j + 1.0)).cos();
        let other = (3.1 * (i + 1.0) * (g + 1.0) - 0.5 * (j + 1.0) + t).sin();
        (wave * slow + 0.25 * other) as f32
    }

    fn first_factor(tensor: usize, j: usize, c: usize) -> f32 {
        let [k, j, c] = [tensor, j, c].map(|number| number as f64);
        let one = (1.7 * (j + 1.0) + 0.6 * (c + 1.0) + 0.3 * k).cos();
        (one + 0.5 * (2.9 * (j + 1.0) * (c + 1.0)).sin()) as f32
    }

    /// Sums and the norms of errors over twenty steps equal those of an independent implementation
    /// in PyTorch, in f64.
    #[test]
    fn twenty_steps_are_those_of_pytorch() {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/powersgd.json");
        let golden = std::fs::read_to_string(golden).expect("it is committed");
        let golden: Value = serde_json::from_str(&golden).expect("it is JSON");
        for case in golden["cases"].as_array().expect("a list") {
            let shapes: Vec<[usize; 2]> =
                serde_json::from_value(case["shapes"].clone()).expect("pairs");
            let number = |key: &str| case[key].as_u64().expect("a number") as usize;
            let groups = number("groups");
            let power = PowerSgd { rank: number("rank"), seed: 0 };
            let factors = Factors::new(&tensors(&shapes), power.rank);
            assert_eq!(factors.matrices.len(), shapes.len(), "all are compressed");
            let len = factors.matrices.last().expect("one").range.end;
            let mut errors = vec![vec![0.0; len]; groups];
            let mut factor = vec![0.0; factors.right_len];
            for (nth, matrix) in factors.matrices.iter().enumerate() {
                let columns = factor[matrix.right.clone()].chunks_exact_mut(matrix.columns);
                for (c, column) in columns.enumerate() {
                    let each = column.iter_mut().enumerate();
                    each.for_each(|(j, q)| *q = first_factor(nth, j, c));
                }
            }
            for step in 0..20 {
                let mut left = vec![0.0; factors.left_len];
                for (group, error) in errors.iter_mut().enumerate() {
                    for (nth, matrix) in factors.matrices.iter().enumerate() {
                        for (at, m) in error[matrix.range.clone()].iter_mut().enumerate() {
                            let row = at / matrix.columns;
                            *m += gradient([nth, row, at % matrix.columns, group, step]);
                        }
                    }
                    let mut own = vec![0.0; left.len()];
                    power.begin(&factors, &mut factor);
                    power.left(&factors, &mut own, error, &factor);
                    left.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                }
                power.orthonormalise(&factors, &mut left);
                factor.fill(0.0);
                for error in &mut errors {
                    let mut own = vec![0.0; factor.len()];
                    power.right(&factors, &mut own, error, &left);
                    power.subtract(&factors, error, &left, &own);
                    factor.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                }
                let mut sum = vec![f32::NAN; len];
                let cut = len / 3 + 1; // a part may end within a row
                let (one, other) = sum.split_at_mut(cut);
                power.write(&factors, one, 0..cut, &left, &factor);
                power.write(&factors, other, cut..len, &left, &factor);
                let steps = case["steps"].as_array().expect("a list");
                let Some(expected) = steps.iter().find(|of| of["step"] == step) else { continue };
                check(&factors, &sum, &errors, expected);
            }
        }
    }

    /// Compares the sums, and the norms of the groups' errors, of each matrix.
    fn check(factors: &Factors, sum: &[f32], errors: &[Vec<f32>], expected: &Value) {
        for (nth, matrix) in factors.matrices.iter().enumerate() {
            let numbers = |key: &str| -> Vec<f64> {
                serde_json::from_value(expected[key][nth].clone()).expect("numbers")
            };
            let sums = numbers("sums");
            let most = sums.iter().fold(0.0, |most: f64, sum| most.max(sum.abs()));
            for (found, expected) in sum[matrix.range.clone()].iter().zip(&sums) {
                let off = (f64::from(*found) - expected).abs();
                assert!(off < 3e-3 * most, "{found} for {expected}");
            }
            for (error, expected) in errors.iter().zip(numbers("error_norms")) {
                let error = &error[matrix.range.clone()];
                let norm = error.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
                assert!((norm - expected).abs() < 3e-3 * expected.max(1.0), "{norm}");
            }
        }
    }

    /// Columns that depend on others become zeros, and get random numbers in the next step.
    #[test]
    fn a_gradient_of_rank_one_is_exact() {
        let tensors = tensors(&[[20, 12]]);
        let power = PowerSgd { rank: 3, seed: 7 };
        let factors = Factors::new(&tensors, 3);
        let m: Vec<f32> = (0..240).map(|at| (at / 12) as f32 * (at % 12) as f32 - 3.0).collect();
        let mut right = vec![0.0; factors.right_len];
        for m in [&m, &vec![0.0; 240], &m] {
            let mut left = vec![0.0; factors.left_len];
            let mut error = m.clone();
            power.begin(&factors, &mut right);
            assert!(right.chunks(12).all(|column| column.iter().any(|q| *q != 0.0)));
            power.left(&factors, &mut left, m, &right);
            power.orthonormalise(&factors, &mut left);
            power.right(&factors, &mut right, m, &left);
            power.subtract(&factors, &mut error, &left, &right);
            assert!(error.iter().all(|error| error.abs() < 1e-3), "rank two at most: {error:?}");
        }
    }
}
