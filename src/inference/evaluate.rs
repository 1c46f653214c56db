//! How good a model is on what it was not trained on.

use super::Rest;
use super::quality::{Agreement, Confusion, Quality};
use crate::config::Config;
use crate::data::Batch;
use crate::error::Error;
use crate::hf::shape_of;
use crate::models::{Head, Model};
use crate::plan::{Plan, Purpose};

/// What an evaluation found.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean over all that is scored: the cross entropy in nats, or the square of what a value is
    /// off.
    pub loss: f64,
    /// Sequences.
    pub sequences: u64,
    /// Input tokens, without padding.
    pub tokens: u64,
    /// What was scored: positions, or sequences.
    pub labelled: u64,
    /// Of whole sequences, how what was predicted agrees with the labels.
    pub quality: Option<Quality>,
}

impl Evaluation {
    /// e to the loss: of how many tokens, equally likely, a token comes as a surprise.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }

    /// What there is to say, by name: always the loss first.
    pub fn values(&self) -> Vec<(&'static str, f64)> {
        let mut values = vec![("loss", self.loss)];
        match &self.quality {
            None => values.push(("perplexity", self.perplexity())),
            Some(Quality::Classes(confusion)) => values.extend([
                ("accuracy", confusion.accuracy()),
                ("f1", confusion.f1()),
                ("matthews", confusion.matthews()),
            ]),
            Some(Quality::Values(agreement)) => values
                .extend([("pearson", agreement.pearson()), ("spearman", agreement.spearman())]),
        }
        values
    }

    /// Of a model with this head, with nothing met.
    pub(crate) fn begin(head: Head) -> Evaluation {
        let quality = match head {
            Head::Tokens | Head::Masked => None,
            Head::Classes { is_value: true, .. } => Some(Quality::Values(Agreement::default())),
            Head::Classes { labels, .. } => Some(Quality::Classes(Confusion::new(labels))),
        };
        Evaluation { loss: 0.0, sequences: 0, tokens: 0, labelled: 0, quality }
    }

    /// Counts a batch; what it is scored by.
    pub(crate) fn meet(&mut self, batch: &Batch) -> Labels {
        self.sequences += batch.lengths.len() as u64;
        self.tokens += batch.token_count() as u64;
        self.labelled += batch.labelled as u64;
        let first = batch.targets.iter().step_by(batch.positions);
        Labels { first: first.copied().collect(), scored: batch.labelled }
    }

    /// Takes what a batch came to: its mean loss, and scores of its sequences.
    pub(crate) fn take(&mut self, labels: &Labels, loss: f64, scores: &[f32]) {
        self.loss += loss * labels.scored as f64;
        match &mut self.quality {
            None => {}
            Some(Quality::Values(agreement)) => {
                let values = labels.first.iter().map(|&bits| f32::from_bits(bits as u32));
                values.zip(scores).for_each(|(label, &score)| agreement.take(label, score));
            }
            Some(Quality::Classes(confusion)) => {
                let of_each = scores.chunks_exact(confusion.classes());
                labels.first.iter().zip(of_each).for_each(|(&label, scores)| {
                    confusion.take(label as usize, scores);
                });
            }
        }
    }

    /// Means of what was taken; of nothing, NaN.
    pub(crate) fn end(mut self) -> Evaluation {
        self.loss /= self.labelled as f64;
        self
    }
}

/// What a batch is scored by.
pub(crate) struct Labels {
    /// Of each sequence's first position.
    first: Vec<i32>,
    /// How many there are, at any position.
    scored: usize,
}

/// Evaluates a config's model.
pub struct Evaluator {
    rest: Rest,
}

impl Evaluator {
    /// Makes everything, with the weights that a config names.
    ///
    /// # Errors
    /// What is wrong with the config or what it names; there is less memory than it takes.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub fn start(config: Config) -> Result<Evaluator, Error> {
        config.check()?;
        let model = Model::new(shape_of(&config)?);
        let plan = Plan::of_evaluation(&config, &model)?;
        Ok(Evaluator { rest: Rest::start(config, model, plan)? })
    }

    /// Evaluates it on these batches, each of at most `step.batch` sequences.
    ///
    /// # Errors
    /// The first of the batches', or one does not fit the model; the ring failed.
    pub async fn evaluate(
        &mut self,
        batches: impl IntoIterator<Item = Result<Batch, Error>>,
    ) -> Result<Evaluation, Error> {
        let mut found = Evaluation::begin(self.rest.model().shape.head);
        let purpose = if found.quality.is_some() { Purpose::Score } else { Purpose::Evaluate };
        for batch in batches {
            let batch = batch?;
            let labels = found.meet(&batch);
            let outcome = self.rest.engine.run(batch, purpose, Vec::new()).await?;
            found.take(&labels, outcome.loss, &outcome.logits);
        }
        Ok(found.end())
    }

    /// Ends all threads and tasks.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn stop(self) -> Result<(), Error> {
        self.rest.stop().await
    }
}
