//! Baselines for models of bytes: the cross entropies of a unigram and a bigram model, fitted on
//! the training set and scored on the validation set. A trained model must have a lower loss.

use super::Dataset;
use crate::error::Error;

/// Cross entropies in nats per byte, over the positions that a validation scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Baseline {
    /// The unigram model: the probability of a byte is its frequency.
    pub unigram: f64,
    /// The bigram model: the probability of a byte is its frequency after the byte before.
    pub bigram: f64,
}

/// The most training sequences that are counted. More would hardly change the frequencies.
const MOST_COUNTED: u64 = 1 << 16;

/// Fits both models on `train`, and scores them on the first `most` sequences of `validation`.
///
/// The bigram counts start from a prior of 4 occurrences after each byte, in the unigram's
/// proportions. The unigram counts start at one half.
///
/// # Errors
/// The spooled data cannot be read any more.
///
/// # Panics
/// The data is not bytes.
pub fn baselines(train: &Dataset, validation: &Dataset, most: u64) -> Result<Baseline, Error> {
    assert!(train.is_bytes() && validation.is_bytes(), "baselines of bytes");
    let mut single = vec![0.5_f64; 256];
    let mut pairs = vec![0.0_f64; 256 * 256];
    for index in 0..train.len().unwrap_or(0).min(MOST_COUNTED) {
        let tokens = train.sequence(index)?.tokens;
        tokens.iter().for_each(|&token| single[token as usize] += 1.0);
        for pair in tokens.windows(2) {
            pairs[pair[0] as usize * 256 + pair[1] as usize] += 1.0;
        }
    }
    let all: f64 = single.iter().sum();
    let share: Vec<f64> = single.iter().map(|count| count / all).collect();
    let successors: Vec<f64> = pairs.chunks(256).map(|row| row.iter().sum()).collect();
    const PRIOR: f64 = 4.0;
    // The probability of byte b after byte a.
    let follows =
        |a: usize, b: usize| (pairs[a * 256 + b] + PRIOR * share[b]) / (successors[a] + PRIOR);
    let mut unigram = 0.0;
    let mut bigram = 0.0;
    let mut scored = 0_u64;
    for index in 0..validation.len().unwrap_or(0).min(most) {
        for pair in validation.sequence(index)?.tokens.windows(2) {
            let [a, b] = [pair[0] as usize, pair[1] as usize];
            unigram -= share[b].ln();
            bigram -= follows(a, b).ln();
            scored += 1;
        }
    }
    let mean = |sum: f64| sum / scored as f64;
    Ok(Baseline { unigram: mean(unigram), bigram: mean(bigram) })
}
