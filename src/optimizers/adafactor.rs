//! Adafactor (Shazeer and Stern 2018): the second moment of a matrix is the product of its rows'
//! and its columns' means. As PyTorch's `torch.optim.Adafactor`.

use rayon::prelude::*;

use super::{CHUNK, Masters, RuleState, Update, UpdateRule, WeightDecay, square};
use crate::models::Tensor;

/// Adafactor's hyperparameters. Of a matrix it keeps a float a row and a float a column; of a
/// vector a float a parameter. A tensor of more sizes counts as a matrix of its last size's
/// columns.
///
/// The vocabulary's table counts tile by tile, where it is cut into several.
#[derive(Clone, Debug, PartialEq)]
pub struct Adafactor {
    /// The exponent with which the share of the new in the second moment falls: the share is t to
    /// this power in update t.
    pub decay_rate: f64,
    /// ε₁, below which no root of the second moment counts.
    pub epsilon: f64,
    /// The bound of the root mean square of an update.
    pub clip_threshold: f64,
    /// Whether the learning rate is multiplied by the root mean square of the tensor, or by
    /// [`SMALLEST_SCALE`](Adafactor::SMALLEST_SCALE) if that is more.
    pub scale_parameter: bool,
    /// Whether the learning rate is at most 1 ÷ √t in update t.
    pub relative_step: bool,
    /// The decay of parameters, as a share of the learning rate.
    pub decay: WeightDecay,
}

impl Adafactor {
    /// ε₂: the least factor of the learning rate.
    pub const SMALLEST_SCALE: f64 = 1e-3;
}

/// Rows and columns of a matrix; `None` for a vector.
fn sizes(tensor: &Tensor) -> Option<(usize, usize)> {
    let columns = *tensor.shape.last()?;
    (tensor.shape.len() > 1 && columns > 0).then(|| (tensor.len() / columns, columns))
}

/// The sum of a function of numbers, in f64 over fixed chunks.
fn sum_of(values: &[f32], of: impl Fn(f32) -> f64 + Sync) -> f64 {
    let chunks: Vec<f64> =
        values.par_chunks(CHUNK).map(|chunk| chunk.iter().map(|&value| of(value)).sum()).collect();
    chunks.iter().sum()
}

fn root_mean_square(values: &[f32]) -> f64 {
    (sum_of(values, square) / values.len() as f64).sqrt()
}

/// Moves a mean towards a new value.
fn lerp(mean: &mut f32, new: f64, share: f64) {
    *mean = (f64::from(*mean) + (new - f64::from(*mean)) * share) as f32;
}

/// The rows of one parallel task, of a matrix of `columns` columns.
fn rows_of_task(columns: usize) -> usize {
    (CHUNK / columns).max(1)
}

/// Moves the means of the squares of a gradient's rows and columns.
fn observe(rows: &mut [f32], columns: &mut [f32], gradient: &[f32], scale: f32, share: f64) {
    let count = rows.len() as f64;
    let width = columns.len();
    let of_row = |row: &[f32]| row.iter().map(|&g| square(scale * g)).sum::<f64>();
    let means = rows.par_iter_mut().zip(gradient.par_chunks(width));
    means.for_each(|(mean, row)| lerp(mean, of_row(row) / width as f64, share));
    // Each task has some columns of all rows, so the order of a column's sum is that of its rows.
    const COLUMNS: usize = 64;
    columns.par_chunks_mut(COLUMNS).enumerate().for_each(|(nth, means)| {
        let mut sums = [0.0; COLUMNS];
        for row in gradient.chunks(width) {
            for (sum, &g) in sums.iter_mut().zip(&row[nth * COLUMNS..][..means.len()]) {
                *sum += square(scale * g);
            }
        }
        means.iter_mut().zip(sums).for_each(|(mean, sum)| lerp(mean, sum / count, share));
    });
}

/// The factors of one update of a tensor.
struct Rates {
    /// The learning rate of the tensor.
    rate: f64,
    /// 1 − ηλ: the share of the parameter that weight decay leaves.
    shrink: f64,
}

impl Adafactor {
    /// Adds the step to a tensor. `factor` gives the factor of the gradient at a row and a column.
    fn step(
        &self,
        parameters: &mut [f32],
        gradient: &[f32],
        Rates { rate, shrink }: Rates,
        width: usize,
        factor: impl Fn(usize, usize) -> f32 + Sync,
    ) {
        let task = rows_of_task(width);
        let squares: Vec<f64> = gradient
            .par_chunks(task * width)
            .enumerate()
            .map(|(nth, rows)| {
                let each = rows.chunks(width).enumerate().flat_map(|(row, values)| {
                    let factor = &factor;
                    let values = values.iter().enumerate();
                    values.map(move |(at, &g)| square(factor(nth * task + row, at) * g))
                });
                each.sum()
            })
            .collect();
        let size = (squares.iter().sum::<f64>() / gradient.len() as f64).sqrt();
        let rate = (rate / (size / self.clip_threshold).max(1.0)) as f32;
        let shrink = shrink as f32;
        let chunks = parameters.par_chunks_mut(task * width).zip(gradient.par_chunks(task * width));
        chunks.enumerate().for_each(|(nth, (parameters, gradient))| {
            let rows = parameters.chunks_mut(width).zip(gradient.chunks(width));
            for (row, (parameters, gradient)) in rows.enumerate() {
                for (at, (p, &g)) in parameters.iter_mut().zip(gradient).enumerate() {
                    *p = *p * shrink - rate * (factor(nth * task + row, at) * g);
                }
            }
        });
    }
}

impl UpdateRule for Adafactor {
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        match sizes(tensor) {
            None => vec![RuleState::like("variance", tensor)],
            Some((rows, columns)) => vec![
                RuleState { shape: vec![rows, 1], ..RuleState::like("row_var", tensor) },
                RuleState { shape: vec![1, columns], ..RuleState::like("col_var", tensor) },
            ],
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
        let parameters = &mut *masters.join();
        let t = (update.step + 1) as f64;
        let learning_rate = update.learning_rate;
        let share = t.powf(self.decay_rate);
        let rate = if self.relative_step { learning_rate.min(t.powf(-0.5)) } else { learning_rate };
        let of_tensor = if self.scale_parameter {
            root_mean_square(parameters).max(Adafactor::SMALLEST_SCALE)
        } else {
            1.0
        };
        let shrink = 1.0 - learning_rate * self.decay.of(tensor);
        let rates = Rates { rate: rate * of_tensor, shrink };
        let scale = update.scale;
        let least = self.epsilon * self.epsilon;
        let root = move |square: f64| (f64::from(scale) / square.max(least).sqrt()) as f32;
        match (states, sizes(tensor)) {
            ([rows, columns], Some((_, width))) => {
                observe(rows, columns, gradient, scale, share);
                let mean = sum_of(rows, f64::from) / rows.len() as f64;
                let mean = mean.max(self.epsilon);
                let rows = &**rows;
                let columns = &**columns;
                self.step(parameters, gradient, rates, width, |row, column| {
                    root(f64::from(rows[row]) * f64::from(columns[column]) / mean)
                });
            }
            ([variance], _) => {
                let chunks = variance.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
                chunks.for_each(|(variance, gradient)| {
                    let each = variance.iter_mut().zip(gradient);
                    each.for_each(|(mean, &g)| lerp(mean, square(scale * g), share));
                });
                let variance = &**variance;
                let width = gradient.len().clamp(1, CHUNK);
                self.step(parameters, gradient, rates, width, |row, at| {
                    root(f64::from(variance[row * width + at]))
                });
            }
            _ => unreachable!("one state of a vector, two of a matrix"),
        }
    }
}
