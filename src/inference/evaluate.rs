//! Evaluation: the loss on batches that are not trained on, and GLUE's metrics of classes and
//! values. A trainer and an [`Evaluator`] call the same function.

use super::quality::{Agreement, Confusion, LabelCount, LabelCounts, Quality};
use super::{Loaded, model_of};
use crate::blocking::unblock;
use crate::config::{BestMetric, Config};
use crate::data::Batch;
use crate::engine::Engine;
use crate::eps::lost;
use crate::error::Error;
use crate::fabric::Exchanges;
use crate::kernels::ProblemType;
use crate::models::{Head, Model};
use crate::plan::{Plan, Purpose};

/// The results of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The name of the validation set, if there are several.
    pub set: Option<String>,
    /// The mean over all labelled positions of the cross entropy in nats, over all sequences of the
    /// squared error of a value, or over all labels of all sequences of the binary cross entropy.
    pub loss: f64,
    /// The number of sequences.
    pub sequences: u64,
    /// Input tokens, without padding.
    pub tokens: u64,
    /// Labelled positions, or labelled sequences.
    pub labelled: u64,
    /// The number of records, for a model with an [objective](crate::objectives::Objective). Then
    /// the loss is the mean over records.
    pub records: Option<u64>,
    /// How predictions agree with labels, for a model that predicts classes, values or labels.
    pub quality: Option<Quality>,
}

impl Evaluation {
    /// The perplexity: e to the loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }

    /// The loss and further metrics, by name. The loss comes first.
    pub fn values(&self) -> Vec<(&'static str, f64)> {
        let mut values = vec![("loss", self.loss)];
        match &self.quality {
            None if self.records.is_some() => {}
            None => values.push(("perplexity", self.perplexity())),
            Some(Quality::Classes(confusion)) => values.extend([
                ("accuracy", confusion.accuracy()),
                ("f1", confusion.f1()),
                ("matthews", confusion.matthews()),
            ]),
            Some(Quality::Values(agreement)) => values
                .extend([("pearson", agreement.pearson()), ("spearman", agreement.spearman())]),
            Some(Quality::LabelSets(counts)) => values.extend([
                ("subset_accuracy", counts.subset_accuracy()),
                ("precision_micro", counts.all().precision()),
                ("precision_macro", counts.mean(LabelCount::precision)),
                ("recall_micro", counts.all().recall()),
                ("recall_macro", counts.mean(LabelCount::recall)),
                ("f1_micro", counts.all().f1()),
                ("f1_macro", counts.mean(LabelCount::f1)),
            ]),
        }
        values
    }

    /// The value of a metric, if the model's head has it.
    pub fn value(&self, metric: BestMetric) -> Option<f64> {
        self.values().into_iter().find(|(name, _)| *name == metric.name()).map(|(_, value)| value)
    }

    /// Whether a model with this head has a metric.
    pub(crate) fn has(head: Head, metric: BestMetric) -> bool {
        Evaluation::new(head).value(metric).is_some()
    }

    /// An evaluation without a batch, for a model with this head.
    fn new(head: Head) -> Evaluation {
        let quality = match head {
            Head::Tokens | Head::Masked => None,
            Head::Classes { problem: ProblemType::Regression, .. } => {
                Some(Quality::Values(Agreement::default()))
            }
            Head::Classes { problem: ProblemType::MultiLabelClassification, labels } => {
                Some(Quality::LabelSets(LabelCounts::new(labels)))
            }
            Head::Classes { labels, .. } | Head::TokenClasses { labels } => {
                Some(Quality::Classes(Confusion::new(labels)))
            }
        };
        Evaluation {
            set: None,
            loss: 0.0,
            sequences: 0,
            tokens: 0,
            labelled: 0,
            records: None,
            quality,
        }
    }

    /// Counts a batch, and returns its labels: one of each token, or one of each sequence, which is
    /// the label of its first position, or the labels of each sequence.
    fn count(&mut self, batch: &Batch, of_tokens: bool, each: usize) -> Labels {
        self.sequences += batch.sequences() as u64;
        self.tokens += batch.token_count() as u64;
        self.labelled += batch.labelled as u64;
        let first = || batch.starts[..batch.sequences()].iter().map(|&row| batch.targets[row]);
        let all = match of_tokens {
            true => batch.targets.clone(),
            false if batch.label_sets.is_empty() => first().collect(),
            false => batch.label_sets.clone(),
        };
        let records = batch.sequences() / each;
        let weight = if self.records.is_some() { records } else { batch.labelled };
        self.records = self.records.map(|sum| sum + records as u64);
        Labels { all, weight }
    }

    /// Adds a batch's mean loss, and its scores.
    fn add(&mut self, labels: &Labels, loss: f64, scores: &[f32]) {
        self.loss += loss * labels.weight as f64;
        match &mut self.quality {
            None => {}
            Some(Quality::Values(agreement)) => {
                let values = labels.all.iter().map(|&bits| f32::from_bits(bits as u32));
                values.zip(scores).for_each(|(label, &score)| agreement.take(label, score));
            }
            Some(Quality::LabelSets(counts)) => {
                let width = counts.labels().len();
                let known: Vec<f32> =
                    labels.all.iter().map(|&bits| f32::from_bits(bits as u32)).collect();
                let sequences = known.chunks_exact(width).zip(scores.chunks_exact(width));
                sequences.for_each(|(known, scores)| counts.take(known, scores));
            }
            Some(Quality::Classes(confusion)) => {
                let of_each = scores.chunks_exact(confusion.classes());
                let labelled = labels.all.iter().zip(of_each).filter(|(label, _)| **label >= 0);
                labelled.for_each(|(&label, scores)| confusion.take(label as usize, scores));
            }
        }
    }

    /// Makes a mean of the sum of losses. Without labels it is NaN.
    fn finish(mut self) -> Evaluation {
        self.loss /= self.records.unwrap_or(self.labelled) as f64;
        self
    }
}

/// The labels of a batch.
struct Labels {
    /// One for each sequence, or for each token: a negative label is not scored. Or those of each
    /// sequence, one behind the other.
    all: Vec<i32>,
    /// The number of labelled positions of the batch, or of records: its loss is their mean.
    weight: usize,
}

/// Evaluates an engine's model on these batches, in order. With several ranks each computes one
/// batch at a time.
///
/// # Errors
/// A batch is an error, or does not fit the model; or the ring failed.
pub(crate) async fn evaluate(
    engine: &mut Engine,
    batches: impl IntoIterator<Item = Result<Batch, Error>>,
) -> Result<Evaluation, Error> {
    let head = engine.model.shape.head;
    let of_tokens = matches!(head, Head::TokenClasses { .. });
    let each = engine.model.sequences_of_record();
    let mut evaluation = Evaluation::new(head);
    evaluation.records = engine.model.objective.as_ref().map(|_| 0);
    let has_scores = evaluation.quality.is_some();
    let purpose = if has_scores { Purpose::Score } else { Purpose::Evaluate };
    let exchanges = engine.worker().eps().parts().map(|parts| parts.exchanges.clone());
    let at_once = exchanges.as_ref().map_or(1, |exchanges| exchanges.ranks() as usize);
    let mut batches = batches.into_iter();
    loop {
        let round = batches.by_ref().take(at_once).collect::<Result<Vec<Batch>, Error>>()?;
        let Some(first) = round.first() else { return Ok(evaluation.finish()) };
        // All ranks make the same exchanges only if their batches have as many sequences.
        let is_alike = round.iter().all(|batch| batch.sequences() == first.sequences());
        let labels: Vec<Labels> =
            round.iter().map(|batch| evaluation.count(batch, of_tokens, each)).collect();
        let found = match &exchanges {
            Some(exchanges) if is_alike && round.len() == at_once => {
                of_all_ranks(engine, exchanges, round, purpose).await?
            }
            _ => {
                let mut found = Vec::new();
                for batch in round {
                    let outcome = engine.run(batch, purpose, Vec::new()).await?;
                    found.push((outcome.loss, outcome.logits));
                }
                found
            }
        };
        for (labels, (loss, scores)) in labels.iter().zip(found) {
            evaluation.add(labels, loss, &scores);
        }
    }
}

/// The loss and the logits of each batch of a round. Each rank computes its own batch.
async fn of_all_ranks(
    engine: &mut Engine,
    exchanges: &Exchanges,
    mut round: Vec<Batch>,
    purpose: Purpose,
) -> Result<Vec<(f64, Vec<f32>)>, Error> {
    let own = round.swap_remove(exchanges.rank() as usize);
    let outcome = engine.run(own, purpose, Vec::new()).await?;
    let mut bytes = outcome.loss.to_le_bytes().to_vec();
    bytes.extend(outcome.logits.iter().flat_map(|logit| logit.to_le_bytes()));
    let all = exchanges.meet(&bytes).map_err(lost)?;
    let found = all.iter().map(|bytes| {
        let (loss, logits) = bytes.split_first_chunk().expect("each rank sends a loss");
        let (logits, _) = logits.as_chunks();
        let logits = logits.iter().map(|&bytes| f32::from_le_bytes(bytes));
        (f64::from_le_bytes(*loss), logits.collect())
    });
    Ok(found.collect())
}

/// A model that is only evaluated.
pub struct Evaluator {
    loaded: Loaded,
}

impl Evaluator {
    /// Starts the ring of a config's model, and loads the weights that the config names.
    ///
    /// # Errors
    /// The config or the weights cannot be used; or there is too little memory.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn start(config: Config) -> Result<Evaluator, Error> {
        Evaluator::start_with(config, None).await
    }

    /// Starts the ring of a model that the program built. Its weights are read from `model.path`,
    /// under the names of its tensors. Without this key they are random.
    ///
    /// # Errors
    /// As [`start`](Evaluator::start).
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn of_model(config: Config, model: Model) -> Result<Evaluator, Error> {
        Evaluator::start_with(config, Some(model)).await
    }

    async fn start_with(config: Config, model: Option<Model>) -> Result<Evaluator, Error> {
        unblock(move || {
            config.check()?;
            let model = model_of(&config, model)?;
            let plan = Plan::of_evaluation(&config, &model)?;
            Ok(Evaluator { loaded: Loaded::start(config, model, plan)? })
        })
        .await?
    }

    /// Evaluates the model on these batches, each of at most `step.batch` sequences.
    ///
    /// # Errors
    /// A batch is an error, or does not fit the model; or the ring failed.
    pub async fn evaluate(
        &mut self,
        batches: impl IntoIterator<Item = Result<Batch, Error>>,
    ) -> Result<Evaluation, Error> {
        evaluate(&mut self.loaded.engine, batches).await
    }

    /// Ends all threads and tasks.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn stop(self) -> Result<(), Error> {
        self.loaded.stop().await
    }
}
