//! Masks of masked language models. They are drawn anew each time a sequence is used (dynamic
//! masking, Liu et al. 2019), in the proportions of transformers. The same seed gives the same
//! masks.

use super::Sequence;
use super::vocabulary::Vocabulary;
use crate::error::Error;
use crate::random;

/// Draws the masks of a dataset.
pub(super) struct Mask {
    /// The probability that a token is chosen for prediction.
    probability: f64,
    seed: u64,
    mask_token: u32,
    vocabulary: Vocabulary,
    /// The number of tokens of the vocabulary, from which random replacements are drawn.
    tokens: usize,
}

impl Mask {
    /// Masks with the tokenizer's mask token.
    ///
    /// # Errors
    /// The vocabulary has no tokenizer; or the tokenizer has no mask token, or one that the model
    /// of `known` tokens does not have.
    pub(super) fn new(
        vocabulary: Vocabulary,
        known: usize,
        probability: f64,
        seed: u64,
    ) -> Result<Mask, Error> {
        let tokenizer = vocabulary.tokenizer();
        let mask_token = tokenizer.and_then(crate::hf::Tokenizer::mask);
        let (Some(tokenizer), Some(mask_token)) = (tokenizer, mask_token) else {
            return Err(Error::argument(
                "masking needs a tokenizer with a mask_token, and the model's directory has none: \
                 add one, or give .jsonl files of input_ids and labels",
            ));
        };
        let in_model = vocabulary.check(&[mask_token], known);
        in_model.map_err(|what| Error::Argument(format!("mask_token: {what}")))?;
        let tokens = tokenizer.vocabulary().min(known);
        Ok(Mask { probability, seed, mask_token, tokens, vocabulary })
    }

    /// Chooses at least one token of a sequence, and never a special token. Labels the chosen
    /// tokens, and replaces 8 in 10 of them by the mask token and 1 in 10 by a random token. `nth`
    /// is the key of this draw.
    pub(super) fn draw(&self, sequence: &mut Sequence, nth: u64) {
        let tokenizer =
            self.vocabulary.tokenizer().expect("new() refuses a vocabulary without one");
        let mut state = random::keyed(self.seed, nth);
        let candidates: Vec<usize> = (0..sequence.tokens.len())
            .filter(|&at| !tokenizer.is_special(sequence.tokens[at]))
            .collect();
        let mut chosen = candidates.clone();
        chosen.retain(|_| random::unit(&mut state) < self.probability);
        let mut below = |count: usize| (random::next(&mut state) % count.max(1) as u64) as usize;
        if chosen.is_empty() {
            chosen.extend(candidates.get(below(candidates.len())));
        }
        sequence.labels = vec![-100; sequence.tokens.len()];
        for at in chosen {
            sequence.labels[at] = sequence.tokens[at] as i32;
            match below(10) {
                0 => sequence.tokens[at] = below(self.tokens) as u32,
                1 => {}
                _ => sequence.tokens[at] = self.mask_token,
            }
        }
    }
}
