//! Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal by Newton and Schulz's
//! iteration. As PyTorch's `torch.optim.Muon`, but for the iteration's dtype: f32 here, bf16 there.

use std::sync::Mutex;

use rayon::prelude::*;

use super::{AdamW, CHUNK, Masters, RuleState, Update, UpdateRule, WeightDecay, square};
use crate::models::{Kind, Tensor};
use crate::product::{Matrix, Product, Start};
use crate::simd::Level;

/// The factor of Muon's learning rate for a matrix of A rows and B columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MuonRate {
    /// Times √max(1, A ÷ B), as its author has it. Rates are far above those of AdamW (0.02).
    Original,
    /// Times 0.2 √max(A, B), so that an update is as large as AdamW's, and one rate fits both
    /// (Liu et al. 2025).
    MatchRmsAdamw,
}

impl MuonRate {
    fn factor(self, rows: usize, columns: usize) -> f64 {
        match self {
            MuonRate::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
            MuonRate::MatchRmsAdamw => 0.2 * (rows.max(columns) as f64).sqrt(),
        }
    }
}

/// Muon's hyperparameters. Matrices of layers have one state, the momentum. All other tensors
/// (vectors, tables of embeddings, heads) are updated by AdamW.
#[derive(Debug)]
pub struct Muon {
    /// The share of the momentum that an update leaves.
    momentum: f64,
    nesterov: bool,
    rate: MuonRate,
    decay: WeightDecay,
    others: AdamW,
    /// The memory in which a matrix is computed. Updates follow each other, so the lock is always
    /// free.
    workspace: Mutex<Vec<f32>>,
}

/// The coefficients of the iteration, and how often it is done.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
const ITERATIONS: usize = 5;

/// Iterations before each move of the matrix itself. Rounding of its small singular values grows by
/// a factor of up to 12 in each of them.
const TURNS: [usize; 2] = [2, ITERATIONS - 2];

/// A matrix is divided by its norm, or by this if the norm is less.
const EPSILON: f64 = 1e-7;

/// The sizes of a tensor that is updated as a matrix.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    columns: usize,
}

impl Sizes {
    /// `None` for a tensor that AdamW updates.
    fn of(tensor: &Tensor) -> Option<Sizes> {
        match tensor.shape[..] {
            [rows, columns] if tensor.kind == Kind::Weight && rows * columns > 0 => {
                Some(Sizes { rows, columns })
            }
            _ => None,
        }
    }

    fn short(self) -> usize {
        self.rows.min(self.columns)
    }

    /// The floats of each part of the workspace: two matrices, four squares of the shorter side.
    fn workspace(self) -> [usize; 6] {
        let all = self.rows * self.columns;
        let square = self.short() * self.short();
        [all, all, square, square, square, square]
    }
}

impl Muon {
    /// Muon for matrices, and AdamW for all other tensors.
    pub fn new(
        momentum: f64,
        nesterov: bool,
        rate: MuonRate,
        decay: WeightDecay,
        others: AdamW,
    ) -> Muon {
        Muon { momentum, nesterov, rate, decay, others, workspace: Mutex::default() }
    }

    /// The workspace, which grows to the size that the largest matrix needs.
    fn with_workspace<R>(&self, sizes: Sizes, work: impl FnOnce([&mut [f32]; 6]) -> R) -> R {
        let lens = sizes.workspace();
        let mut all = self.workspace.lock().expect("nothing panics inside");
        if all.len() < lens.iter().sum() {
            *all = vec![0.0; lens.iter().sum()];
        }
        let mut rest = &mut all[..];
        work(lens.map(|len| {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(len);
            rest = behind;
            part
        }))
    }

    /// Moves the momentum, and writes the matrix that is made orthogonal to `direction`.
    fn observe(&self, momentum: &mut [f32], direction: &mut [f32], gradient: &[f32], scale: f32) {
        let share = (1.0 - self.momentum) as f32;
        let nesterov = self.nesterov;
        let of_momentum = self.momentum as f32;
        let chunks = momentum.par_chunks_mut(CHUNK).zip(direction.par_chunks_mut(CHUNK));
        chunks.zip(gradient.par_chunks(CHUNK)).for_each(|((momentum, direction), gradient)| {
            for ((m, d), &g) in momentum.iter_mut().zip(direction).zip(gradient) {
                let g = g * scale;
                *m += (g - *m) * share;
                *d = if nesterov { g + (*m - g) * of_momentum } else { *m };
            }
        });
    }
}

/// Newton and Schulz's iteration: moves the singular values of `x` to about 1. With the Gram matrix
/// G of its shorter side and P = a I + b G + c G², x becomes P x (or x P), and so G becomes P² G.
/// Polynomials of G are symmetric and commute, so several iterations need products of the shorter
/// side alone: their P are multiplied, then `x` moves once. `other` has the size of `x`.
fn orthogonalise(
    level: Level,
    Sizes { rows, columns }: Sizes,
    [mut x, mut other, gram, polynomial, mut moves, mut room]: [&mut [f32]; 6],
) -> &mut [f32] {
    let is_tall = rows > columns;
    let short = rows.min(columns);
    let square = |a: &[f32], b: &[f32], to: &mut [f32]| {
        let [a, b] = [a, b].map(|factor| Matrix::rows(factor, short));
        Product { a, b, rows: short, depth: short, columns: short, start: Start::Zero }
            .run_symmetric(level, to);
    };
    for iterations in TURNS {
        let of_x = Matrix::rows(x, columns);
        let [a, b] = if is_tall { [of_x.transposed(), of_x] } else { [of_x, of_x.transposed()] };
        let depth = rows.max(columns);
        Product { a, b, rows: short, depth, columns: short, start: Start::Zero }
            .run_symmetric(level, gram);
        for iteration in 0..iterations {
            square(gram, gram, polynomial);
            let [a, b, c] = COEFFICIENTS;
            let by_row = polynomial.par_chunks_mut(short).zip(gram.par_chunks(short));
            by_row.enumerate().for_each(|(row, (to, gram))| {
                to.iter_mut().zip(gram).for_each(|(to, g)| *to = b * g + c * *to);
                to[row] += a;
            });
            if iteration == 0 {
                moves.copy_from_slice(polynomial);
            } else {
                square(polynomial, moves, room);
                std::mem::swap(&mut moves, &mut room);
            }
            if iteration + 1 < iterations {
                square(polynomial, gram, room);
                square(polynomial, room, gram);
            }
        }
        let of_x = Matrix::rows(x, columns);
        let by = Matrix::rows(moves, short);
        let [a, b] = if is_tall { [of_x, by] } else { [by, of_x] };
        Product { a, b, rows, depth: short, columns, start: Start::Zero }.run(level, other);
        std::mem::swap(&mut x, &mut other);
    }
    x
}

impl UpdateRule for Muon {
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        match Sizes::of(tensor) {
            Some(_) => vec![RuleState::like("momentum_buffer", tensor)],
            None => self.others.state_layout(tensor),
        }
    }

    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let Some(sizes) = Sizes::of(tensor) else {
            return self.others.apply(tensor, masters, states, gradient, update);
        };
        let parameters = &mut *masters.join();
        let learning_rate = update.learning_rate;
        let rate = (learning_rate * self.rate.factor(sizes.rows, sizes.columns)) as f32;
        let shrink = (1.0 - learning_rate * self.decay.of(tensor)) as f32;
        self.with_workspace(sizes, |workspace| {
            let direction = &mut *workspace[0];
            self.observe(states[0], direction, gradient, update.scale);
            let squares: Vec<f64> = direction
                .par_chunks(CHUNK)
                .map(|chunk| chunk.iter().map(|&d| square(d)).sum())
                .collect();
            let factor = (1.0 / squares.iter().sum::<f64>().sqrt().max(EPSILON)) as f32;
            direction.par_chunks_mut(CHUNK).for_each(|chunk| {
                chunk.iter_mut().for_each(|d| *d *= factor);
            });
            let step = &*orthogonalise(update.level, sizes, workspace);
            let chunks = parameters.par_chunks_mut(CHUNK).zip(step.par_chunks(CHUNK));
            chunks.for_each(|(parameters, step)| {
                for (p, step) in parameters.iter_mut().zip(step) {
                    *p = *p * shrink - rate * step;
                }
            });
        });
    }

    fn workspace_len(&self, tensor: &Tensor) -> usize {
        Sizes::of(tensor).map_or(0, |sizes| sizes.workspace().iter().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::cpu::oracle::noise;

    /// The iteration as it is defined, in f64: x, (rows, columns), becomes
    /// a x + (b G + c G²) x with G = x xᵀ.
    fn plain(mut x: Vec<f64>, Sizes { rows, columns }: Sizes) -> Vec<f64> {
        let times = |a: &[f64], b: &[f64], depth: usize, width: usize| -> Vec<f64> {
            let of =
                |i: usize, j: usize| (0..depth).map(|k| a[i * depth + k] * b[k * width + j]).sum();
            (0..a.len() / depth)
                .flat_map(|i| (0..width).map(move |j| (i, j)))
                .map(|(i, j)| of(i, j))
                .collect()
        };
        let [a, b, c] = COEFFICIENTS.map(f64::from);
        for _ in 0..ITERATIONS {
            let turned: Vec<f64> =
                (0..rows * columns).map(|at| x[at % rows * columns + at / rows]).collect();
            let gram = times(&x, &turned, columns, rows);
            let square = times(&gram, &gram, rows, rows);
            let sum: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| b * g + c * s).collect();
            let moved = times(&sum, &x, rows, columns);
            x.iter_mut().zip(moved).for_each(|(x, moved)| *x = a * *x + moved);
        }
        x
    }

    /// Singular values from 1 down to 1e-6 of the largest move as in f64.
    #[test]
    fn small_singular_values_move_as_large_ones() {
        for [rows, columns] in [[24, 24], [20, 61], [61, 20], [1, 9], [130, 100]] {
            let sizes = Sizes { rows, columns };
            let mut x = noise(rows * columns, 3).narrow;
            for (row, x) in x.chunks_mut(columns).enumerate() {
                let small = 10_f32.powf(-6.0 * row as f32 / rows as f32);
                x.iter_mut().for_each(|x| *x *= small);
            }
            let norm = x.iter().map(|x| square(*x)).sum::<f64>().sqrt();
            x.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
            let expected = plain(x.iter().copied().map(f64::from).collect(), sizes);
            for level in Level::all() {
                let mut workspace = sizes.workspace().map(|len| vec![f32::NAN; len]);
                workspace[0].copy_from_slice(&x);
                let moved =
                    orthogonalise(level, sizes, workspace.each_mut().map(|part| &mut part[..]));
                let errors = moved.iter().zip(&expected).map(|(x, y)| (f64::from(*x) - y).abs());
                let worst = errors.fold(0.0, f64::max);
                assert!(worst < 5e-5, "{rows} × {columns} at {level:?}: {worst}");
            }
        }
    }
}
