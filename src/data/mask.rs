//! What a masked language model has to find: drawn anew whenever a sequence is met (Liu et al.
//! 2019), as transformers draws it, and the same again for the same seed.

use super::Sequence;
use super::vocabulary::Vocabulary;
use crate::error::Error;
use crate::random;

/// Draws masks.
pub(super) struct Mask {
    probability: f64,
    seed: u64,
    mask: u32,
    vocabulary: Vocabulary,
    tokens: usize,
}

impl Mask {
    /// Through a tokenizer with a mask token.
    pub(super) fn new(vocabulary: Vocabulary, probability: f64, seed: u64) -> Result<Mask, Error> {
        let tokenizer = vocabulary.tokenizer();
        let mask = tokenizer.and_then(crate::hf::Tokenizer::mask);
        let (Some(tokenizer), Some(mask)) = (tokenizer, mask) else {
            return Err(Error::argument(
                "masking needs a tokenizer with a mask_token, and the model's directory has none: \
                 add one, or give .jsonl files of input_ids and labels",
            ));
        };
        let tokens = tokenizer.vocabulary();
        Ok(Mask { probability, seed, mask, tokens, vocabulary })
    }

    /// Masks tokens of a sequence and labels them: of those that are to be found 8 in 10 are
    /// masked, 1 is another token, 1 stays. At least one is to be found.
    pub(super) fn draw(&self, sequence: &mut Sequence, nth: u64) {
        let tokenizer = self.vocabulary.tokenizer().expect("a mask is of a tokenizer");
        let mut state = random::keyed(self.seed, nth);
        let text: Vec<usize> = (0..sequence.tokens.len())
            .filter(|&at| !tokenizer.is_special(sequence.tokens[at]))
            .collect();
        let mut found = text.clone();
        found.retain(|_| random::unit(&mut state) < self.probability);
        let mut below = |count: usize| (random::next(&mut state) % count.max(1) as u64) as usize;
        if found.is_empty() {
            found.extend(text.get(below(text.len())));
        }
        sequence.labels = vec![-100; sequence.tokens.len()];
        for at in found {
            sequence.labels[at] = sequence.tokens[at] as i32;
            match below(10) {
                0 => sequence.tokens[at] = below(self.tokens) as u32,
                1 => {}
                _ => sequence.tokens[at] = self.mask,
            }
        }
    }
}
