//! Update rules: what a gradient does to a block. No lanes, no tasks: mathematics on slices.

mod adamw;
pub(crate) mod planes;
mod rate;
mod rates;

use rayon::prelude::*;

pub use adamw::AdamW;
pub use planes::Planes;
pub use rate::{Decay, LearningRate};
pub use rates::{stream_bytes_per_second, update_bytes_per_second};

use crate::models::{Tensor, tensor_ranges};
use crate::simd::Level;

/// Elements one task takes, and one partial sum: by shape, never by threads.
const CHUNK: usize = 16384;

/// What an update is told.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Updates of the block before this one.
    pub step: u64,
    /// The step's learning rate.
    pub learning_rate: f64,
    /// What the gradient is multiplied by: less than 1 when it was clipped.
    pub scale: f32,
    /// Vector instructions.
    pub(crate) level: Level,
}

/// A rule in two phases: measure the gradient, apply it.
pub trait UpdateRule: Send + Sync {
    /// States it keeps beside each parameter.
    fn states(&self) -> usize;

    /// Sum of squares of a block's gradient, in f64 over fixed chunks.
    fn measure(&self, tensors: &[Tensor], gradient: &[f32]) -> f64 {
        let squares = |chunk: &[f32]| chunk.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        let mut sum = 0.0;
        for range in tensor_ranges(tensors) {
            let parts: Vec<f64> = gradient[range].par_chunks(CHUNK).map(squares).collect();
            sum += parts.iter().sum::<f64>();
        }
        sum
    }

    /// Moves a block's parameters and states.
    fn apply(
        &self,
        tensors: &[Tensor],
        parameters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    );

    /// The same where masters lie in two planes, as those of a device of bf16 do. A rule that moves each
    /// number by itself does it there; for others, masters are put together on a `desk` of as many floats
    /// as [`desk`](UpdateRule::desk) says.
    fn apply_in_planes(
        &self,
        tensors: &[Tensor],
        planes: &mut Planes<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
        desk: &mut [f32],
    ) {
        let masters = &mut desk[..gradient.len()];
        planes.join_to(masters);
        self.apply(tensors, masters, states, gradient, update);
        planes.split_from(masters);
    }

    /// Floats of a desk for blocks of at most so many parameters in planes.
    fn desk(&self, parameters: usize) -> usize {
        parameters
    }
}
