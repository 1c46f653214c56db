//! An overview of a dataset: how long its sequences are.

use super::batches::order;
use super::dataset::Dataset;
use crate::config::Config;
use crate::error::Error;

/// How long a dataset's sequences are.
#[derive(Clone, Debug, PartialEq)]
pub struct Overview {
    /// The number of sequences that were counted: an epoch, or the first million of it.
    pub sequences: u64,
    /// The number of their tokens.
    pub tokens: u64,
    /// The number of their labels that are scored. A classifier has one a sequence.
    pub labelled: u64,
    /// The number of tokens of the longest.
    pub longest: usize,
    /// A histogram of lengths: the most tokens of each bin, and the sequences in it.
    pub lengths: Vec<(usize, u64)>,
    /// The share that would be padding if all sequences of a batch, in the order of training, were
    /// padded to the longest. Nothing is: a micro-batch has the rows of its tokens alone.
    pub padding_share: f64,
}

/// The most sequences that are counted: an overview of them takes seconds.
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
            let batch_lengths: Vec<usize> = order
                .of_step(data, step)
                .into_iter()
                .filter_map(|(index, _)| lengths.get((index % sequences) as usize).copied())
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
