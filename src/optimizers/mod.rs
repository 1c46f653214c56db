//! Update rules: what a gradient does to a block. No lanes, no tasks: mathematics on slices.

mod adamw;
mod rate;
mod rates;
pub(crate) mod split;

use rayon::prelude::*;

pub use adamw::AdamW;
pub use rate::{Decay, LearningRate};
pub use rates::{stream_bytes_per_second, update_bytes_per_second};
pub use split::SplitMasters;

use crate::models::{Tensor, tensor_ranges};
use crate::simd::Level;

/// Elements one task takes, and one partial sum: by shape, never by threads.
const CHUNK: usize = 16384;

/// What an update depends on beside the gradient.
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

    /// The same for [split masters](SplitMasters), which a device of bf16 has. A rule that updates
    /// each number by itself overrides it. For others the masters are unpacked, into as many floats as
    /// [`unpacked_len`](UpdateRule::unpacked_len) says.
    fn apply_split(
        &self,
        tensors: &[Tensor],
        split: &mut SplitMasters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
        unpacked: &mut [f32],
    ) {
        let masters = &mut unpacked[..gradient.len()];
        split.join_to(masters);
        self.apply(tensors, masters, states, gradient, update);
        split.split_from(masters);
    }

    /// Floats that [`apply_split`](UpdateRule::apply_split) unpacks masters into, for blocks of at most
    /// so many parameters.
    fn unpacked_len(&self, parameters: usize) -> usize {
        parameters
    }
}
