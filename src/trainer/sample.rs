//! Text and encodings from a model in training.

use super::Trainer;
use crate::data::Batch;
use crate::error::Error;
use crate::inference::{Dice, Ended, Sampling, Then, generate};
use crate::models::Head;
use crate::plan::Purpose;

impl Trainer {
    /// The hidden states that the head reads, for each token of a batch: (tokens, channels). The
    /// training does not change.
    ///
    /// # Errors
    /// As [`step`](Trainer::step); or the model has no head.
    pub async fn encode(&mut self, batch: Batch) -> Result<Vec<f32>, Error> {
        if self.run.model.shape.embeds() {
            let what = "this model has no head: take its embeddings (Trainer::embed)";
            return Err(Error::argument(what));
        }
        Ok(self.run(batch, Purpose::Encode).await?.hidden)
    }

    /// The embedding of each sequence of a batch, for a model with the task `sentence-embedding`:
    /// (sequences, channels). The training does not change.
    ///
    /// # Errors
    /// As [`step`](Trainer::step); or the model has another task.
    pub async fn embed(&mut self, batch: Batch) -> Result<Vec<f32>, Error> {
        if !self.run.model.shape.embeds() {
            let what = "embeddings are made by models with model.task = \"sentence-embedding\"";
            return Err(Error::argument(what));
        }
        Ok(self.run(batch, Purpose::Measure).await?.embeddings)
    }

    /// Continues prompts with a KV cache, as
    /// [`Generator::generate`](crate::inference::Generator::generate) does. The run has
    /// [room](crate::Builder::generates) for it. The training does not change.
    ///
    /// # Errors
    /// The run has no room; or as [`Generator::generate`](crate::inference::Generator::generate).
    pub async fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        most: usize,
        how: Sampling,
        ends: &[u32],
        each: impl FnMut(usize, u32, Option<Ended>) -> Then,
    ) -> Result<(), Error> {
        let Some(room) = self.room else {
            let what = "the run has no room to generate: tell its builder (Builder::generates)";
            return Err(Error::argument(what));
        };
        let done = generate(&mut self.engine, room, prompts, most, how, ends, each).await;
        self.count(done)
    }

    /// Continues a prompt by `count` tokens without a KV cache. Each token costs a step of the ring
    /// on the last `data.sequence_length` tokens, and needs no memory beside that of training. The
    /// training does not change.
    ///
    /// # Errors
    /// The prompt is empty or has a token outside the vocabulary; `how` has an invalid value; the
    /// ring failed.
    pub async fn sample(
        &mut self,
        prompt: &[u32],
        count: usize,
        how: Sampling,
    ) -> Result<Vec<u32>, Error> {
        if prompt.is_empty() {
            return Err(Error::argument("a prompt has at least one token"));
        }
        how.check()?;
        if self.run.model.shape.head != Head::Tokens {
            return Err(Error::argument("tokens are drawn from models that predict the next one"));
        }
        let mut tokens = prompt.to_vec();
        let mut dice = Dice::new(how, 0);
        dice.see(prompt);
        for _ in 0..count {
            let length = tokens.len().min(self.plan.batch.positions);
            let batch = Batch::for_generation(&[&tokens[tokens.len() - length..]]);
            let logits = self.run(batch, Purpose::Score).await?.logits;
            tokens.push(dice.draw(&logits));
        }
        Ok(tokens.split_off(prompt.len()))
    }
}
