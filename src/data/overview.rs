//! An overview of a dataset: the lengths of its sequences.

use super::dataset::Dataset;
use super::order::Order;
use crate::config::Config;
use crate::error::Error;

/// The lengths of a dataset's sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Overview {
    /// The number of sequences counted: an epoch, or the first million of it.
    pub sequences: u64,
    /// The number of their tokens.
    pub tokens: u64,
    /// The number of their scored labels. A classifier has one a sequence.
    pub labelled: u64,
    /// The number of tokens of the longest sequence.
    pub longest: usize,
    /// A histogram of lengths. For each bin, its largest number of tokens and its sequences.
    pub lengths: Vec<(usize, u64)>,
    /// The share of padding, if all sequences of a batch were padded to the longest one. For
    /// information: batches have no padding.
    pub padding_share: f64,
}

/// The most sequences that are counted, so that an overview takes seconds.
const MOST_SEQUENCES: u64 = 1 << 20;

/// The number of bins of the histogram.
const BINS: usize = 10;

impl Overview {
    /// Counts the first epoch, or the first million sequences of it.
    ///
    /// # Errors
    /// The spooled data cannot be read any more.
    pub fn of(config: &Config, data: &Dataset) -> Result<Overview, Error> {
        const OF_ENDLESS_DATA: u64 = 1024;
        let sequences = data.len().unwrap_or(OF_ENDLESS_DATA).min(MOST_SEQUENCES);
        let mut tokens = 0;
        let mut labelled = 0;
        let mut lengths = Vec::new();
        for index in 0..sequences {
            let sequence = data.sequence(index)?;
            tokens += sequence.tokens.len() as u64;
            labelled += sequence.labelled(data.predicts()) as u64;
            lengths.push(sequence.tokens.len());
        }
        let mut positions = 0;
        let mut filled = 0;
        let order = Order::of(config);
        for step in 0..sequences.div_ceil(order.batch as u64).max(1) {
            let batch_lengths: Vec<usize> = order
                .of_step(data, step)
                .into_iter()
                .filter_map(|one| lengths.get((one.index % sequences) as usize).copied())
                .collect();
            positions += batch_lengths.len() * batch_lengths.iter().max().unwrap_or(&0);
            filled += batch_lengths.iter().sum::<usize>();
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let width = longest.div_ceil(BINS).max(1);
        let mut bins: Vec<(usize, u64)> =
            (1..=longest.div_ceil(width)).map(|bin| (bin * width, 0)).collect();
        lengths.iter().for_each(|&length| bins[(length - 1) / width].1 += 1);
        let padding_share = 1.0 - filled as f64 / positions.max(1) as f64;
        Ok(Overview { sequences, tokens, labelled, longest, lengths: bins, padding_share })
    }
}
