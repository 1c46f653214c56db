//! How good a model is on what it was not trained on.

use super::Rest;
use super::quality::{Agreement, Confusion, Quality};
use crate::config::{Config, Plan, Purpose, shape_of};
use crate::data::Batch;
use crate::devices::cpu::Goal;
use crate::error::Error;
use crate::models::{Head, Model};

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
    /// The first of the batches', or one does not fit the model; nothing is labelled; the ring
    /// failed.
    pub async fn evaluate(
        &mut self,
        batches: impl IntoIterator<Item = Result<Batch, Error>>,
    ) -> Result<Evaluation, Error> {
        let mut found =
            Evaluation { loss: 0.0, sequences: 0, tokens: 0, labelled: 0, quality: None };
        let head = self.rest.model.shape.head;
        found.quality = match head {
            Head::Tokens | Head::Masked => None,
            Head::Classes { is_value: true, .. } => Some(Quality::Values(Agreement::default())),
            Head::Classes { labels, .. } => Some(Quality::Classes(Confusion::new(labels))),
        };
        let is_told = found.quality.is_some();
        let (goal, purpose) =
            if is_told { (Goal::Tell, Purpose::Tell) } else { (Goal::Evaluate, Purpose::Evaluate) };
        for batch in batches {
            let batch = batch?;
            batch.check(&self.rest.model, &self.rest.plan, self.rest.config.step.batch)?;
            let labels: Vec<i32> = batch.targets.iter().step_by(batch.positions).copied().collect();
            let scored = batch.labelled as u64;
            found.sequences += batch.lengths.len() as u64;
            found.tokens += batch.token_count() as u64;
            found.labelled += scored;
            let (loss, scores) = self.rest.turn(batch, goal, purpose, Vec::new()).await?;
            found.loss += loss * scored as f64;
            match &mut found.quality {
                None => {}
                Some(Quality::Values(agreement)) => {
                    let values = labels.iter().map(|&bits| f32::from_bits(bits as u32));
                    values.zip(scores).for_each(|(label, score)| agreement.take(label, score));
                }
                Some(Quality::Classes(confusion)) => {
                    let of_each = scores.chunks_exact(confusion.classes());
                    labels.iter().zip(of_each).for_each(|(&label, scores)| {
                        confusion.take(label as usize, scores);
                    });
                }
            }
        }
        found.loss /= found.labelled as f64;
        if found.labelled == 0 {
            return Err(Error::refused("nothing to evaluate: no sequence has a label"));
        }
        Ok(found)
    }

    /// Ends all threads and tasks.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn stop(self) -> Result<(), Error> {
        self.rest.stop().await
    }
}
