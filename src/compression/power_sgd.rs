//! PowerSGD (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2, with warm start).
//!
//! For a matrix M of (n, m), a sum over groups g of M_g = gradient_g + error_g, and the factor Q of
//! (m, r) of the step before:
//! P = Σ M_g Q, P̂ = orthonormal columns of P, Q_g = M_gᵀ P̂, Q = Σ Q_g, M ≈ P̂ Qᵀ,
//! error_g = M_g − P̂ Q_gᵀ.
//! The sums are those of the groups' tree. Both factors lie by rows of rank: P̂ᵀ (r, n), Qᵀ (r, m).

use std::ops::Range;

use rayon::prelude::*;

use crate::models::{Tensor, tensor_ranges};
use crate::random;

/// Columns of a matrix that one task computes.
const COLUMNS: usize = 256;

/// See the [module](self).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PowerSgd {
    pub(crate) rank: usize,
    pub(crate) seed: u64,
}

/// A matrix that is compressed.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Which of the block's trained tensors it is.
    pub(crate) tensor: usize,
    /// Where it lies in the gradient.
    pub(crate) range: Range<usize>,
    pub(crate) columns: usize,
    /// Where its factors lie: P̂ᵀ among the block's, and Qᵀ.
    left: Range<usize>,
    pub(crate) right: Range<usize>,
    /// A number of its own, for the first factor.
    key: u64,
}

/// What is exchanged of a block: factors of its matrices, and all else as it is.
#[derive(Clone, Debug)]
pub(crate) struct Factors {
    pub(crate) matrices: Vec<Matrix>,
    /// Ranges of the gradient that are not compressed.
    pub(crate) vectors: Vec<Range<usize>>,
    /// Floats of all P̂ᵀ, of all Qᵀ, and of all vectors.
    pub(crate) left_len: usize,
    pub(crate) right_len: usize,
    vectors_len: usize,
}

/// The largest rank whose factors are smaller than a matrix.
pub(crate) fn largest_rank(rows: usize, columns: usize) -> usize {
    (rows * columns).saturating_sub(1) / (rows + columns).max(1)
}

/// Rows and columns of a matrix.
pub(crate) fn matrix_of(tensor: &Tensor) -> Option<(usize, usize)> {
    match tensor.shape[..] {
        [rows, columns] => Some((rows, columns)),
        _ => None,
    }
}

impl Factors {
    /// Of a block's trained tensors.
    pub(crate) fn new(tensors: &[Tensor], rank: usize) -> Factors {
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        let (mut left_len, mut right_len, mut vectors_len) = (0, 0, 0);
        for (tensor, (each, range)) in tensors.iter().zip(tensor_ranges(tensors)).enumerate() {
            match matrix_of(each) {
                Some((rows, columns)) if rank <= largest_rank(rows, columns) => {
                    let left = left_len..left_len + rank * rows;
                    let right = right_len..right_len + rank * columns;
                    (left_len, right_len) = (left.end, right.end);
                    let key = key_of(&each.name);
                    matrices.push(Matrix { tensor, range, columns, left, right, key });
                }
                _ => {
                    vectors_len += range.len();
                    vectors.push(range);
                }
            }
        }
        Factors { matrices, vectors, left_len, right_len, vectors_len }
    }

    /// Floats of a group's first factors, and of its vectors where they are exchanged.
    pub(crate) fn left_and_vectors(&self, exchanged: bool) -> usize {
        self.left_len + if exchanged { self.vectors_len } else { 0 }
    }
}

/// FNV-1a of a tensor's name.
fn key_of(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

impl Matrix {
    fn rows(&self) -> usize {
        self.range.len() / self.columns
    }

    /// M of a run that lies as the gradient does.
    fn of<'r>(&self, run: &'r [f32]) -> &'r [f32] {
        &run[self.range.clone()]
    }
}

impl PowerSgd {
    /// Fills columns of Q that are zeros, as all are before the first step, with random numbers.
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

    /// P_gᵀ = (M_g Q)ᵀ.
    pub(crate) fn left(self, factors: &Factors, left: &mut [f32], m: &[f32], right: &[f32]) {
        for matrix in &factors.matrices {
            let (rows, columns) = (matrix.rows(), matrix.columns);
            let (m, right) = (matrix.of(m), &right[matrix.right.clone()]);
            // Each task has some rows of M, and writes their numbers in all rows of Pᵀ.
            let mut tasks = self.columns_of(&mut left[matrix.left.clone()], rows);
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

    /// Columns of a factor's transposed, so many at once of all its rows.
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

    /// P̂: the columns of P made orthonormal, one after the other. One that depends on those before
    /// becomes 0.
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

    /// Q_gᵀ = (M_gᵀ P̂)ᵀ.
    pub(crate) fn right(self, factors: &Factors, right: &mut [f32], m: &[f32], left: &[f32]) {
        for matrix in &factors.matrices {
            let (rows, columns) = (matrix.rows(), matrix.columns);
            let (m, left) = (matrix.of(m), &left[matrix.left.clone()]);
            // Each task has some columns of M, and writes them in all rows of Qᵀ.
            let mut tasks = self.columns_of(&mut right[matrix.right.clone()], columns);
            tasks.par_iter_mut().enumerate().for_each(|(at, parts)| {
                for (k, part) in parts.iter_mut().enumerate() {
                    part.fill(0.0);
                    let from = at * COLUMNS;
                    for (row, &p) in m.chunks_exact(columns).zip(&left[k * rows..][..rows]) {
                        let row = &row[from..from + part.len()];
                        part.iter_mut().zip(row).for_each(|(sum, &x)| *sum += x * p);
                    }
                }
            });
        }
    }

    /// M_g − P̂ Q_gᵀ, in place.
    pub(crate) fn subtract(self, factors: &Factors, m: &mut [f32], left: &[f32], right: &[f32]) {
        for matrix in &factors.matrices {
            let product = Product { matrix, left, right, rank: self.rank };
            let rows = m[matrix.range.clone()].par_chunks_exact_mut(matrix.columns);
            rows.enumerate().for_each(|(row, m)| {
                product.row(row, 0..matrix.columns, |at, approximation| m[at] -= approximation);
            });
        }
    }

    /// P̂ Qᵀ, of the elements of the gradient that lie in a range: `part`.
    pub(crate) fn write(
        self,
        factors: &Factors,
        (part, range): (&mut [f32], Range<usize>),
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
            let (first, last) = (start - matrix.range.start, end - matrix.range.start);
            let part = &mut part[start - range.start..end - range.start];
            // The first row may be a part of one.
            let (head, rows) = part.split_at_mut((columns - first % columns).min(part.len()));
            let at = first % columns;
            product.row(first / columns, at..at + head.len(), |nth, sum| head[nth] = sum);
            let behind = first / columns + 1;
            debug_assert_eq!(first + head.len() + rows.len(), last);
            rows.par_chunks_mut(columns).enumerate().for_each(|(row, to)| {
                product.row(behind + row, 0..to.len(), |nth, sum| to[nth] = sum);
            });
        }
    }
}

/// P̂ Qᵀ of a matrix.
#[derive(Clone, Copy)]
struct Product<'a> {
    matrix: &'a Matrix,
    left: &'a [f32],
    right: &'a [f32],
    rank: usize,
}

impl Product<'_> {
    /// Some columns of a row, each by its place among them.
    fn row(self, row: usize, columns: Range<usize>, mut to: impl FnMut(usize, f32)) {
        let Product { matrix, left, right, rank } = self;
        let (rows, width) = (matrix.rows(), matrix.columns);
        let (left, right) = (&left[matrix.left.clone()], &right[matrix.right.clone()]);
        let mut sums = [0.0_f32; COLUMNS];
        let mut start = columns.start;
        while start < columns.end {
            let sums = &mut sums[..COLUMNS.min(columns.end - start)];
            sums.fill(0.0);
            for k in 0..rank {
                let (p, q) = (left[k * rows + row], &right[k * width + start..][..sums.len()]);
                sums.iter_mut().zip(q).for_each(|(sum, &q)| *sum += p * q);
            }
            for (nth, &sum) in sums.iter().enumerate() {
                to(start - columns.start + nth, sum);
            }
            start += sums.len();
        }
    }
}

/// A dot product, in lanes that are added at the end.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0_f32; LANES];
    let (a_rest, b_rest) = (a.chunks_exact(LANES).remainder(), b.chunks_exact(LANES).remainder());
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
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

    /// Sums, and the norms of errors, over twenty steps are those of an independent implementation
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
            let (rank, groups, tensors) = (number("rank"), number("groups"), tensors(&shapes));
            let (power, factors) = (PowerSgd { rank, seed: 0 }, Factors::new(&tensors, rank));
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
                            let (i, j) = (at / matrix.columns, at % matrix.columns);
                            *m += gradient([nth, i, j, group, step]);
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
                power.write(&factors, (one, 0..cut), &left, &factor);
                power.write(&factors, (other, cut..len), &left, &factor);
                let steps = case["steps"].as_array().expect("a list");
                let Some(expected) = steps.iter().find(|of| of["step"] == step) else { continue };
                for (nth, matrix) in factors.matrices.iter().enumerate() {
                    let sums: Vec<f64> =
                        serde_json::from_value(expected["sums"][nth].clone()).expect("numbers");
                    let norms: Vec<f64> =
                        serde_json::from_value(expected["error_norms"][nth].clone())
                            .expect("numbers");
                    let most = sums.iter().fold(0.0, |most: f64, sum| most.max(sum.abs()));
                    for (found, expected) in sum[matrix.range.clone()].iter().zip(&sums) {
                        let off = (f64::from(*found) - expected).abs();
                        assert!(off < 3e-3 * most, "step {step}: {found} for {expected}");
                    }
                    for (error, expected) in errors.iter().zip(&norms) {
                        let error = &error[matrix.range.clone()];
                        let norm = error.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
                        assert!((norm - expected).abs() < 3e-3 * expected.max(1.0), "{norm}");
                    }
                }
            }
        }
    }

    /// Columns that depend on others become zeros, and the factor begins anew there.
    #[test]
    fn a_gradient_of_rank_one_is_exact() {
        let tensors = tensors(&[[20, 12]]);
        let (power, factors) = (PowerSgd { rank: 3, seed: 7 }, Factors::new(&tensors, 3));
        let m: Vec<f32> = (0..240).map(|at| (at / 12) as f32 * (at % 12) as f32 - 3.0).collect();
        let mut right = vec![0.0; factors.right_len];
        for m in [&m, &vec![0.0; 240], &m] {
            let (mut left, mut error) = (vec![0.0; factors.left_len], m.clone());
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
