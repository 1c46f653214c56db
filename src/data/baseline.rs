//! What counting alone gives: the cross entropies of unigram and bigram models of bytes, fitted on
//! the training part and taken of what was kept aside. A model must end below them.

use super::Dataset;
use crate::error::Error;

/// Cross entropies in nats a byte, over the positions that a validation of the model scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Baseline {
    /// From how often each byte is.
    pub unigram: f64,
    /// From how often it follows the one before.
    pub bigram: f64,
}

/// Sequences that are counted at most: more does not change a count of pairs of bytes.
const COUNTED: u64 = 1 << 16;

/// Fits both on `train`, the counts behind each byte begun at 4 shared out as the unigram says,
/// and scores the first sequences of `held`, at most `most` of them.
///
/// # Errors
/// A file cannot be read.
///
/// # Panics
/// The data is not bytes.
pub fn baselines(train: &Dataset, held: &Dataset, most: u64) -> Result<Baseline, Error> {
    assert!(train.is_bytes() && held.is_bytes(), "baselines of bytes");
    let (mut single, mut pairs) = (vec![0.5_f64; 256], vec![0.0_f64; 256 * 256]);
    for index in 0..train.len().unwrap_or(0).min(COUNTED) {
        let tokens = train.sequence(index)?.tokens;
        tokens.iter().for_each(|&token| single[token as usize] += 1.0);
        for pair in tokens.windows(2) {
            pairs[pair[0] as usize * 256 + pair[1] as usize] += 1.0;
        }
    }
    let all: f64 = single.iter().sum();
    let share: Vec<f64> = single.iter().map(|count| count / all).collect();
    let behind: Vec<f64> = pairs.chunks(256).map(|row| row.iter().sum()).collect();
    const PRIOR: f64 = 4.0;
    let follows =
        |a: usize, b: usize| (pairs[a * 256 + b] + PRIOR * share[b]) / (behind[a] + PRIOR);
    let (mut unigram, mut bigram, mut scored) = (0.0, 0.0, 0_u64);
    for index in 0..held.len().unwrap_or(0).min(most) {
        for pair in held.sequence(index)?.tokens.windows(2) {
            let (a, b) = (pair[0] as usize, pair[1] as usize);
            (unigram, bigram) = (unigram - share[b].ln(), bigram - follows(a, b).ln());
            scored += 1;
        }
    }
    let mean = |sum: f64| sum / scored as f64;
    Ok(Baseline { unigram: mean(unigram), bigram: mean(bigram) })
}
