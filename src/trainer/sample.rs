//! Text and encodings from a model in training. Each token takes one step of the ring.

use super::Trainer;
use crate::data::Batch;
use crate::error::Error;
use crate::inference::{Dice, Sampling};
use crate::models::Head;
use crate::plan::Purpose;

impl Trainer {
    /// The last hidden states of a batch, which the head reads, token by token and sequence by
    /// sequence: (tokens, channels). Nothing of the training changes.
    ///
    /// # Errors
    /// As [`step`](Trainer::step).
    pub async fn encode(&mut self, batch: Batch) -> Result<Vec<f32>, Error> {
        Ok(self.run(batch, Purpose::Encode).await?.hidden)
    }

    /// Continues a prompt by `count` tokens. Each follows from the last `data.sequence_length`
    /// tokens. Nothing of the training changes.
    ///
    /// # Errors
    /// The prompt is empty or has a token outside the vocabulary; the ring failed.
    pub async fn sample(
        &mut self,
        prompt: &[u32],
        count: usize,
        temperature: f32,
        seed: u64,
    ) -> Result<Vec<u32>, Error> {
        if prompt.is_empty() {
            return Err(Error::argument("a prompt has at least one token"));
        }
        let sampling = Sampling { temperature, seed, ..Sampling::default() };
        sampling.check()?;
        if self.model.shape.head != Head::Tokens {
            return Err(Error::argument("tokens are drawn from models that predict the next one"));
        }
        let (mut tokens, mut dice) = (prompt.to_vec(), Dice::new(sampling, 0));
        for _ in 0..count {
            let length = tokens.len().min(self.plan.positions);
            let batch = Batch::for_generation(&[&tokens[tokens.len() - length..]]);
            let logits = self.run(batch, Purpose::Score).await?.logits;
            tokens.push(dice.draw(&logits));
        }
        Ok(tokens.split_off(prompt.len()))
    }
}
