//! What a dataset looks like: how long its sequences are, and what share of batches is padding.

use super::batches::order;
use super::dataset::Dataset;
use crate::config::Config;
use crate::error::Error;

/// How many sequences there are, how long, and how much of a batch is padding.
#[derive(Clone, Debug, PartialEq)]
pub struct Overview {
    /// Sequences of an epoch, or as many as were looked at.
    pub sequences: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Of these, those that are scored; of whole sequences one each.
    pub labelled: u64,
    /// Tokens of the longest.
    pub longest: usize,
    /// How many have up to so many tokens, and more than the one before.
    pub lengths: Vec<(usize, u64)>,
    /// Padding's share of the positions of batches, in the order of training.
    pub padding_share: f64,
}

/// Sequences that are looked at, at most.
const LOOKED_AT: u64 = 1 << 20;

/// Steps of the histogram.
const STEPS: usize = 10;

impl Overview {
    /// Of the first epoch, or of the first million sequences.
    ///
    /// # Errors
    /// The data cannot be read any more.
    pub fn of(config: &Config, data: &Dataset) -> Result<Overview, Error> {
        const OF_ENDLESS: u64 = 1024;
        let sequences = data.len().unwrap_or(OF_ENDLESS).min(LOOKED_AT);
        let (mut tokens, mut labelled, mut lengths) = (0, 0, Vec::new());
        for index in 0..sequences {
            let sequence = data.sequence(index)?;
            tokens += sequence.tokens.len() as u64;
            labelled += sequence.labelled(data.predicts()) as u64;
            lengths.push(sequence.tokens.len());
        }
        let (mut positions, mut filled) = (0, 0);
        let order = order(config);
        for step in 0..sequences.div_ceil(order.batch as u64).max(1) {
            let of_batch: Vec<usize> = order
                .of_step(data, step)
                .filter_map(|(index, _)| lengths.get((index % sequences) as usize).copied())
                .collect();
            positions += of_batch.len() * of_batch.iter().max().unwrap_or(&0);
            filled += of_batch.iter().sum::<usize>();
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let width = longest.div_ceil(STEPS).max(1);
        let mut steps: Vec<(usize, u64)> =
            (1..=longest.div_ceil(width)).map(|step| (step * width, 0)).collect();
        lengths.iter().for_each(|&length| steps[(length - 1) / width].1 += 1);
        let padding_share = 1.0 - filled as f64 / positions.max(1) as f64;
        Ok(Overview { sequences, tokens, labelled, longest, lengths: steps, padding_share })
    }
}
