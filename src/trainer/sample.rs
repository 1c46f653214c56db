//! Text from a model in training, a token a walk of the ring.

use super::{Error, Goal, Head, Sampling, Trainer};
use crate::data::{Batch, Sequence};

impl Trainer {
    /// What the head reads of a batch: (sequences, positions, channels), with padding. Training's
    /// state is not touched.
    ///
    /// # Errors
    /// As [`step`](Trainer::step).
    pub async fn encode(&mut self, batch: Batch) -> Result<Vec<f32>, Error> {
        self.turn(batch, Goal::Encode).await?;
        Ok(std::mem::take(&mut *self.cpu().encoded.lock().expect("nothing panics inside")))
    }

    /// Continues a prompt by so many tokens. Each is drawn with the last `data.sequence_length` − 1
    /// tokens in view. Training's state is not touched.
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
            return Err(Error::refused("a prompt has at least one token"));
        }
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(Error::refused(format_args!(
                "a temperature of {temperature}: it must be 0 or more"
            )));
        }
        if self.model.shape.head != Head::Tokens {
            return Err(Error::refused("tokens are drawn from models that predict the next one"));
        }
        if self.plan.positions < 2 {
            return Err(Error::config("data.sequence_length", "must be at least 2 to draw tokens"));
        }
        let mut tokens = prompt.to_vec();
        for drawn in 0..count as u64 {
            // One position is looked at, so that one more must fit behind it as its label.
            let view = tokens.len().min(self.plan.positions - 1);
            let mut seen = tokens[tokens.len() - view..].to_vec();
            seen.push(0);
            let mut labels = vec![-100; view];
            labels.push(0);
            let batch = Batch::new(&[Sequence { tokens: seen, labels, kinds: Vec::new() }]);
            let sampling = Sampling { temperature, seed: crate::random::keyed(seed, drawn) };
            self.turn(batch, Goal::Sample(sampling)).await?;
            let drawn = std::mem::take(&mut *self.cpu().drawn.lock().expect("nothing panics"));
            tokens.extend(drawn);
        }
        Ok(tokens.split_off(prompt.len()))
    }
}
