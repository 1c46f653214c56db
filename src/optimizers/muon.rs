//! Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal by Newton and Schulz's
//! iteration. As PyTorch's `torch.optim.Muon`, but for the iteration's dtype: f32 here, bf16 there.

use std::sync::Mutex;

use rayon::prelude::*;

use super::{AdamW, CHUNK, Masters, RuleState, Update, UpdateRule, WeightDecay, square};
use crate::models::{Kind, Tensor};
use crate::simd::Level;
use crate::simd::product::{Product, packed_len};

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

/// A matrix is divided by its norm, or by this if the norm is less.
const EPSILON: f64 = 1e-7;

/// The sizes of a tensor that is updated as a matrix.
#[derive(Clone, Copy)]
struct Matrix {
    rows: usize,
    columns: usize,
}

impl Matrix {
    /// `None` for a tensor that AdamW updates.
    fn of(tensor: &Tensor) -> Option<Matrix> {
        match tensor.shape[..] {
            [rows, columns] if tensor.kind == Kind::Weight && rows * columns > 0 => {
                Some(Matrix { rows, columns })
            }
            _ => None,
        }
    }

    fn short(self) -> usize {
        self.rows.min(self.columns)
    }

    fn long(self) -> usize {
        self.rows.max(self.columns)
    }

    /// The floats of each part of the workspace: two matrices, two squares of the shorter side, and
    /// room for a product.
    fn workspace(self) -> [usize; 5] {
        let short = self.short();
        let long = self.long();
        let packed = packed_len(short, long).max(packed_len(long, short));
        [short * long, short * long, short * short, short * short, packed]
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
    fn with_workspace<R>(&self, matrix: Matrix, work: impl FnOnce([&mut [f32]; 5]) -> R) -> R {
        let lens = matrix.workspace();
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

/// Copies a matrix of `columns` columns transposed, each element multiplied by a factor.
fn transpose(to: &mut [f32], from: &[f32], columns: usize, factor: f32) {
    let rows = from.len() / columns;
    to.par_chunks_mut(rows).enumerate().for_each(|(column, to)| {
        for (row, to) in to.iter_mut().enumerate() {
            *to = from[row * columns + column] * factor;
        }
    });
}

/// Newton and Schulz's iteration: moves the singular values of x, (short, long), to about 1: with
/// G = x xᵀ, x becomes (b G + c G²) x + a x. `other` has the size of x, `gram` and `sum` are
/// (short, short).
fn orthogonalise<'a>(
    level: Level,
    matrix: Matrix,
    mut x: &'a mut [f32],
    [mut other, gram, sum, packed]: [&'a mut [f32]; 4],
) -> &'a mut [f32] {
    let rows = matrix.short();
    let long = matrix.long();
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..ITERATIONS {
        let product = Product {
            a: x,
            b: x,
            is_transposed: true,
            rows,
            depth: long,
            columns: rows,
            alpha: 1.0,
            plus: None,
        };
        product.run(level, gram, packed);
        let polynomial = Product {
            a: gram,
            b: gram,
            is_transposed: false,
            depth: rows,
            alpha: c,
            plus: Some((b, gram)),
            ..product
        };
        polynomial.run(level, sum, packed);
        let plus = Some((a, &*x));
        let moved = Product { a: sum, b: x, columns: long, alpha: 1.0, plus, ..polynomial };
        moved.run(level, other, packed);
        std::mem::swap(&mut x, &mut other);
    }
    x
}

impl UpdateRule for Muon {
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        match Matrix::of(tensor) {
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
        let Some(matrix) = Matrix::of(tensor) else {
            return self.others.apply(tensor, masters, states, gradient, update);
        };
        let Matrix { rows, columns } = matrix;
        let parameters = &mut *masters.join();
        let learning_rate = update.learning_rate;
        let rate = (learning_rate * self.rate.factor(rows, columns)) as f32;
        let shrink = (1.0 - learning_rate * self.decay.of(tensor)) as f32;
        self.with_workspace(matrix, |[x, other, gram, sum, packed]| {
            self.observe(states[0], other, gradient, update.scale);
            let squares: Vec<f64> = other
                .par_chunks(CHUNK)
                .map(|chunk| chunk.iter().map(|&d| square(d)).sum())
                .collect();
            let factor = (1.0 / squares.iter().sum::<f64>().sqrt().max(EPSILON)) as f32;
            let is_tall = rows > columns;
            if is_tall {
                transpose(x, other, columns, factor);
            } else {
                let chunks = x.par_chunks_mut(CHUNK).zip(other.par_chunks(CHUNK));
                chunks.for_each(|(x, direction)| {
                    x.iter_mut().zip(direction).for_each(|(x, &d)| *x = d * factor);
                });
            }
            let step = &*orthogonalise(update.level, matrix, x, [other, gram, sum, packed]);
            parameters.par_chunks_mut(columns).enumerate().for_each(|(row, parameters)| {
                for (column, p) in parameters.iter_mut().enumerate() {
                    let at = if is_tall { column * rows + row } else { row * columns + column };
                    *p = *p * shrink - rate * step[at];
                }
            });
        });
    }

    fn workspace_len(&self, tensor: &Tensor) -> usize {
        Matrix::of(tensor).map_or(0, |matrix| matrix.workspace().iter().sum())
    }
}
