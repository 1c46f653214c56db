//! Rotary position embeddings (Su et al. 2021).

use super::attention::AttentionShape;
use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// Rotary position embeddings: pairs of channels rotate by an angle that grows with the position
/// (Su et al. 2021).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies: about the period of the slowest pair.
    pub theta: f32,
    /// The scaling of frequencies for longer sequences.
    pub scaling: RotaryScaling,
}

/// A scaling of the frequencies of [`Rotary`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// Frequencies are not scaled.
    None,
    /// All frequencies are divided.
    Linear(f32),
    /// Low frequencies are divided, high ones are kept, others are interpolated (Llama 3.1).
    Llama3 {
        /// The divisor.
        factor: f32,
        /// Periods above `positions ÷ low` are low.
        low: f32,
        /// Periods below `positions ÷ high` are high.
        high: f32,
        /// Positions of the sequences that the model was first trained with.
        positions: usize,
    },
}

impl Rotary {
    /// The frequency of each pair of channels of a head, in transformers' arithmetic.
    pub fn frequencies(&self, head_size: usize) -> impl Iterator<Item = f32> {
        let rotary = *self;
        (0..head_size / 2).map(move |pair| {
            let power = (2 * pair) as f32 / head_size as f32;
            let frequency = (1.0 / f64::from(rotary.theta).powf(f64::from(power))) as f32;
            match rotary.scaling {
                RotaryScaling::None => frequency,
                RotaryScaling::Linear(factor) => frequency / factor,
                RotaryScaling::Llama3 { factor, low, high, positions } => {
                    let period = 2.0 * std::f32::consts::PI / frequency;
                    let positions = positions as f32;
                    if period < positions / high {
                        frequency
                    } else if period > positions / low {
                        frequency / factor
                    } else {
                        let smooth = (positions / period - low) / (high - low);
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                }
            }
        })
    }
}

/// Rotates queries and keys by their positions, in place.
#[derive(Clone, Copy, Debug)]
pub struct Rotate<'a> {
    /// Input and output. (R, (H + 2 K) D).
    pub qkv: View,
    /// The frequencies.
    pub rotary: &'a Rotary,
    /// Sizes, and the positions of the rows.
    pub shape: AttentionShape<'a>,
    /// True: rotates back, as gradients need it.
    pub inverse: bool,
}

impl KernelOperation for Rotate<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let Rotate { qkv, shape, .. } = *self;
        views.writes("qkv", qkv, [shape.rows(), shape.qkv_width()], qkv.dtype);
    }
}
