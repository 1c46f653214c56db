//! Rotary position embeddings (Su et al. 2021), and how they are stretched to longer sequences. All
//! frequencies are those of transformers 5.

use super::attention::AttentionShape;
use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// The most pairs of channels of a head that rotate.
pub(crate) const PAIRS: usize = 128;

/// Rotary position embeddings: pairs of channels rotate by an angle that grows with the position
/// (Su et al. 2021).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies: about the period of the slowest pair.
    pub theta: f32,
    /// The part of a head's channels that rotates, from the first channel on: transformers'
    /// `partial_rotary_factor`.
    pub part: f64,
    /// True when the channels of a pair are neighbours; false when they are half of what rotates
    /// apart.
    pub interleaved: bool,
    /// How queries grow with their positions, if they do. All of a head rotates then.
    pub growth: Option<QueryGrowth>,
    /// The scaling of frequencies for longer sequences.
    pub scaling: RotaryScaling,
}

/// Queries that grow with their positions, so that attention stays sharp in long texts. Their
/// factor is 1 + beta ln(1 + ⌊position ÷ positions⌋) (Llama 4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// The factor of the logarithm.
    pub beta: f32,
    /// The positions over which the factor is the same.
    pub positions: usize,
}

impl QueryGrowth {
    /// The factor of a query.
    pub(crate) fn factor(&self, position: usize) -> f32 {
        let turns = (1 + position / self.positions) as f64;
        (1.0 + f64::from(self.beta) * turns.ln()) as f32
    }
}

/// A scaling of the frequencies of [`Rotary`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a model has two at most, and shapes are Copy")]
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
    /// The base grows with the sequence, once that is longer than `positions` (dynamic NTK).
    Dynamic {
        /// How fast the base grows.
        factor: f32,
        /// The positions that need no other base.
        positions: usize,
    },
    /// Frequencies are those of a whole head, divided by this factor, though a part of each half of
    /// a head rotates (Gemma 4).
    Proportional(f32),
    /// Low frequencies are divided, high ones are kept, and attention gets sharper.
    Yarn(Yarn),
    /// Each frequency has a divisor of its own, which depends on whether a sequence is long.
    LongRope(LongRope),
}

/// YaRN (Peng et al. 2023).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// The divisor of low frequencies.
    pub factor: f32,
    /// The factor of rotated queries and of rotated keys.
    pub attention_factor: f32,
    /// Pairs with more turns over `positions` keep their frequency.
    pub beta_fast: f32,
    /// The frequencies of pairs with fewer turns over `positions` are divided by `factor`.
    pub beta_slow: f32,
    /// True when the first and the last pair between both are rounded to whole pairs.
    pub truncate: bool,
    /// Positions of the sequences that the model was first trained with.
    pub positions: usize,
}

/// LongRoPE (Ding et al. 2024).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongRope {
    /// The divisor of each pair's frequency in a sequence of at most `positions`.
    pub short: [f32; PAIRS],
    /// The divisor of each pair's frequency in a longer sequence.
    pub long: [f32; PAIRS],
    /// The factor of rotated queries and of rotated keys.
    pub attention_factor: f32,
    /// Positions of the sequences that the model was first trained with.
    pub positions: usize,
}

/// How rows of one length are rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryTable {
    /// The frequency of each pair of channels that rotates, then zeros.
    pub frequencies: [f32; PAIRS],
    /// The number of pairs that rotate.
    pub pairs: usize,
    /// How many channels the first one of a pair is before the second.
    pub distance: usize,
    /// True when it is one before the second instead.
    pub interleaved: bool,
    /// As in [`Rotary`].
    pub growth: Option<QueryGrowth>,
    /// The factor of rotated channels.
    pub scale: f32,
}

impl Rotary {
    /// Rotary positions of whole heads, without a scaling.
    pub const fn new(theta: f32) -> Rotary {
        Rotary { theta, part: 1.0, interleaved: false, growth: None, scaling: RotaryScaling::None }
    }

    /// The number of channels of a head that rotate; all, if frequencies are those of a whole head.
    pub fn channels(&self, head_size: usize) -> usize {
        match self.scaling {
            RotaryScaling::Proportional(_) => head_size,
            _ => (head_size as f64 * self.part) as usize,
        }
    }

    /// The number of pairs of channels that rotate.
    pub fn pairs(&self, head_size: usize) -> usize {
        match self.scaling {
            RotaryScaling::Proportional(_) => (head_size as f64 * self.part / 2.0) as usize,
            _ => self.channels(head_size) / 2,
        }
    }

    /// Whether frequencies depend on the length of a sequence.
    pub fn follows_length(&self) -> bool {
        matches!(self.scaling, RotaryScaling::Dynamic { .. } | RotaryScaling::LongRope(_))
    }

    /// How a head is rotated in a sequence of `length` positions, in transformers' arithmetic.
    pub fn table(&self, head_size: usize, length: usize) -> RotaryTable {
        let channels = self.channels(head_size);
        let pairs = self.pairs(head_size);
        assert!(pairs <= PAIRS, "of a head at most {} channels rotate", 2 * PAIRS);
        let mut frequencies = [0.0; PAIRS];
        let base = self.base(channels, length);
        for (pair, frequency) in frequencies.iter_mut().enumerate().take(pairs) {
            let power = (2 * pair) as f32 / channels as f32;
            *frequency = self.scaled(base.powf(f64::from(power)), pair, channels, length);
        }
        let scale = match self.scaling {
            RotaryScaling::Yarn(Yarn { attention_factor, .. })
            | RotaryScaling::LongRope(LongRope { attention_factor, .. }) => attention_factor,
            _ => 1.0,
        };
        let Rotary { interleaved, growth, .. } = *self;
        let distance = channels / 2;
        RotaryTable { frequencies, pairs, distance, interleaved, growth, scale }
    }

    /// The base of the frequencies in a sequence.
    fn base(&self, channels: usize, length: usize) -> f64 {
        let theta = f64::from(self.theta);
        let RotaryScaling::Dynamic { factor, positions } = self.scaling else { return theta };
        if length <= positions {
            return theta;
        }
        let factor = f64::from(factor);
        let growth = factor * length as f64 / positions as f64 - (factor - 1.0);
        let channels = channels as f64;
        theta * growth.powf(channels / (channels - 2.0))
    }

    /// The frequency of a pair whose period is 2π `inverse`, scaled.
    fn scaled(&self, inverse: f64, pair: usize, channels: usize, length: usize) -> f32 {
        let frequency = (1.0 / inverse) as f32;
        match self.scaling {
            RotaryScaling::None | RotaryScaling::Dynamic { .. } => frequency,
            RotaryScaling::Linear(factor) | RotaryScaling::Proportional(factor) => {
                frequency / factor
            }
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
            RotaryScaling::Yarn(yarn) => {
                let divided = yarn.ramp(self.theta, channels, pair);
                let factor = f64::from(yarn.factor);
                ((divided / factor + (1.0 - divided)) / inverse) as f32
            }
            RotaryScaling::LongRope(LongRope { short, long, positions, .. }) => {
                let divisors = if length > positions { long } else { short };
                (1.0 / (f64::from(divisors[pair]) * inverse)) as f32
            }
        }
    }
}

impl Yarn {
    /// How much a pair's frequency is divided: 0 not at all, 1 by the whole factor.
    fn ramp(&self, theta: f32, channels: usize, pair: usize) -> f64 {
        let Yarn { beta_fast, beta_slow, truncate, positions, .. } = *self;
        // The pair of channels that turns this often over all positions.
        let pair_of = |turns: f32| {
            let period = positions as f64 / (f64::from(turns) * 2.0 * std::f64::consts::PI);
            channels as f64 * period.ln() / (2.0 * f64::from(theta).ln())
        };
        let mut low = pair_of(beta_fast);
        let mut high = pair_of(beta_slow);
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        low = low.max(0.0);
        high = high.min(channels as f64 - 1.0);
        if low == high {
            high += 0.001; // transformers' way around a division by 0
        }
        ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0)
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
    /// True: rotates back, as gradients need it. What is scaled is scaled again: this is the
    /// transposed rotation.
    pub inverse: bool,
}

impl Rotate<'_> {
    /// How the rows are rotated: one table for all, or, where frequencies follow the length of
    /// texts that are generated, one for each sequence.
    pub(crate) fn tables(&self) -> Vec<RotaryTable> {
        let Rotate { rotary, ref shape, .. } = *self;
        let table = |length| rotary.table(shape.head_size, length);
        if !rotary.follows_length() {
            return vec![table(0)];
        }
        shape.batch.rotary_lengths().into_iter().map(table).collect()
    }
}

impl KernelOperation for Rotate<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let Rotate { qkv, shape, .. } = *self;
        views.writes("qkv", qkv, [shape.rows(), shape.qkv_width()], qkv.dtype);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: &[f32], expected: &[f32]) {
        for (pair, (found, expected)) in found.iter().zip(expected).enumerate() {
            let off = (found / expected - 1.0).abs();
            assert!(off < 1e-6, "pair {pair}: {found}, {expected}");
        }
    }

    /// The expected numbers are those of transformers' llama3 scaling: theta 500000, factor 8, low
    /// 1, high 4, 8192 positions.
    #[test]
    fn stretched_frequencies_are_transformers() {
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, positions: 8192 };
        let found = Rotary { scaling, ..Rotary::new(500_000.0) }.table(128, 1).frequencies;
        let at = |pairs: [usize; 4]| pairs.map(|pair| found[pair]);
        close(&at([0, 28, 29, 63]), &[1.0, 3.211_446e-3, 2.166_570_6e-3, 3.068_926e-7]);
        let halved = Rotary { scaling: RotaryScaling::Linear(2.0), ..Rotary::new(100.0) };
        assert_eq!(halved.table(4, 1).frequencies[..3], [0.5, 0.05, 0.0]);
    }

    #[test]
    fn a_part_of_a_head_rotates() {
        let rotary = Rotary { part: 0.75, ..Rotary::new(100.0) };
        let RotaryTable { frequencies, pairs, scale, .. } = rotary.table(8, 1);
        assert_eq!((pairs, scale), (3, 1.0));
        close(&frequencies[..3], &[1.0, 0.215_443_47, 0.046_415_888]);
        assert_eq!(frequencies[3], 0.0);
    }

    /// The frequencies of two of eight pairs of a head: 100^(-2i/16).
    #[test]
    fn a_part_rotates_with_the_frequencies_of_a_whole_head() {
        let scaling = RotaryScaling::Proportional(2.0);
        let rotary = Rotary { part: 0.3, scaling, ..Rotary::new(100.0) };
        let RotaryTable { frequencies, pairs, distance, .. } = rotary.table(16, 1);
        assert_eq!((pairs, distance), (2, 8));
        close(&frequencies[..2], &[0.5, 0.281_170_66]);
        assert_eq!(frequencies[2], 0.0);
    }

    #[test]
    fn the_base_of_dynamic_frequencies_grows_beyond_the_positions() {
        let scaling = RotaryScaling::Dynamic { factor: 2.0, positions: 64 };
        let dynamic = Rotary { scaling, ..Rotary::new(10_000.0) };
        let plain = Rotary::new(10_000.0).table(8, 1);
        assert_eq!(dynamic.table(8, 1), plain);
        assert_eq!(dynamic.table(8, 64), plain);
        // A base of 10000 · 2^(4/3) for 96 positions.
        let longer = dynamic.table(8, 96).frequencies;
        close(&longer[..4], &[1.0, 0.079_370_05, 0.006_299_605, 0.000_5]);
    }

    #[test]
    fn a_divisor_of_longrope_depends_on_the_length() {
        let short = std::array::from_fn(|pair| 1.0 + pair as f32);
        let long = std::array::from_fn(|pair| 4.0 + pair as f32);
        let scaling = LongRope { short, long, attention_factor: 1.5, positions: 16 };
        let scaling = RotaryScaling::LongRope(scaling);
        let rotary = Rotary { scaling, ..Rotary::new(100.0) };
        let table = rotary.table(4, 16);
        assert_eq!(table.scale, 1.5);
        close(&table.frequencies[..2], &[1.0, 0.05]);
        close(&rotary.table(4, 17).frequencies[..2], &[0.25, 0.02]);
    }
}
