//! Evaluation: the loss on batches that are not trained on, GLUE's metrics of classes and values,
//! and what embeddings find. A trainer and an [`Evaluator`] call the same function.

use super::quality::{Agreement, Confusion, LabelCount, LabelCounts, Quality};
use super::retrieval::{Retrieval, cosine, number_of};
use super::{Loaded, model_of};
use crate::blocking::unblock;
use crate::config::{BestMetric, Config};
use crate::data::Batch;
use crate::engine::{Engine, Outcome};
use crate::eps::lost;
use crate::error::Error;
use crate::fabric::Exchanges;
use crate::kernels::ProblemType;
use crate::models::{Head, Model};
use crate::objectives::{MOST_METRICS, ObjectiveMetrics};
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
    /// The means of the objective's metrics over all records.
    pub metrics: ObjectiveMetrics,
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
        values.extend(self.metrics.iter());
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
            Some(Quality::Retrieval(found)) => {
                values.extend([("accuracy_1", found.accuracy_1()), ("mrr_10", found.mrr_10())]);
            }
        }
        values
    }

    /// The value of a metric, if the model's head has it.
    pub fn value(&self, metric: BestMetric) -> Option<f64> {
        self.values().into_iter().find(|(name, _)| *name == metric.name()).map(|(_, value)| value)
    }

    /// Whether a model has a metric.
    pub(crate) fn has(model: &Model, metric: BestMetric) -> bool {
        Evaluation::new(model).value(metric).is_some()
    }

    /// An evaluation of a model without a batch.
    fn new(model: &Model) -> Evaluation {
        let objective = model.objective.as_ref();
        let quality = match model.shape.head {
            Head::Tokens | Head::Masked => None,
            Head::Embedding { .. } => objective.map(|objective| match objective.needs_scores() {
                true => Quality::Values(Agreement::default()),
                false => Quality::Retrieval(Retrieval::default()),
            }),
            Head::Classes { problem: ProblemType::Regression, .. } if objective.is_some() => None,
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
            metrics: ObjectiveMetrics::named(
                objective.map_or(&[], |objective| objective.metric_names()),
            ),
            quality,
        }
    }

    /// Counts a batch, and returns its labels: one of each token, or one of each sequence, which is
    /// the label of its first position, or the labels of each sequence.
    fn count(&mut self, batch: &Batch, of_tokens: bool, each: usize) -> Labels {
        let numbers = match &self.quality {
            Some(Quality::Retrieval(_)) => batch.texts().map(number_of).collect(),
            _ => Vec::new(),
        };
        self.sequences += batch.sequences() as u64;
        self.tokens += batch.token_count() as u64;
        self.labelled += batch.labelled as u64;
        let first = || batch.starts[..batch.sequences()].iter().map(|&row| batch.targets[row]);
        let all = match of_tokens {
            true => batch.targets.clone(),
            false if !batch.scores.is_empty() => {
                batch.scores.iter().step_by(each).map(|score| score.to_bits() as i32).collect()
            }
            false if batch.label_sets.is_empty() => first().collect(),
            false => batch.label_sets.clone(),
        };
        let records = batch.sequences() / each;
        let weight = if self.records.is_some() { records } else { batch.labelled };
        self.records = self.records.map(|sum| sum + records as u64);
        Labels { all, weight, numbers, each }
    }

    /// Adds a batch's mean loss and metrics, and its scores or its embeddings.
    fn add(&mut self, labels: &Labels, found: &Found) {
        let Found { loss, metrics, scores } = found;
        self.loss += loss * labels.weight as f64;
        self.metrics.sum(metrics, labels.weight as f64);
        match &mut self.quality {
            None => {}
            Some(Quality::Retrieval(found)) => found.take(scores, &labels.numbers, labels.each),
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
        let weight = self.records.unwrap_or(self.labelled) as f64;
        self.loss /= weight;
        self.metrics.scale(1.0 / weight);
        if let Some(Quality::Retrieval(found)) = &mut self.quality {
            found.find();
        }
        self
    }
}

/// What a batch came to.
struct Found {
    loss: f64,
    /// The means of the objective's metrics.
    metrics: [f64; MOST_METRICS],
    /// Logits, embeddings or cosines.
    scores: Vec<f32>,
}

impl Found {
    fn of(model: &Model, outcome: Outcome) -> Found {
        let loss = outcome.loss;
        let metrics = *outcome.metrics.means();
        Found { loss, metrics, scores: scores_of(model, outcome) }
    }

    /// As bytes for other ranks.
    fn bytes(&self) -> Vec<u8> {
        let numbers = [self.loss].into_iter().chain(self.metrics);
        let mut bytes: Vec<u8> = numbers.flat_map(f64::to_le_bytes).collect();
        bytes.extend(self.scores.iter().flat_map(|score| score.to_le_bytes()));
        bytes
    }

    fn of_bytes(bytes: &[u8]) -> Found {
        let (numbers, scores) = bytes.split_at(8 * (1 + MOST_METRICS));
        let (numbers, _) = numbers.as_chunks();
        let mut numbers = numbers.iter().map(|&bytes| f64::from_le_bytes(bytes));
        let loss = numbers.next().expect("each rank sends a loss");
        let metrics = std::array::from_fn(|_| numbers.next().expect("and its metrics"));
        let (scores, _) = scores.as_chunks();
        let scores = scores.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        Found { loss, metrics, scores }
    }
}

/// The labels of a batch.
struct Labels {
    /// One for each sequence, or for each token: a negative label is not scored. Or those of each
    /// sequence, one behind the other.
    all: Vec<i32>,
    /// The number of labelled positions of the batch, or of records: its loss is their mean.
    weight: usize,
    /// A number for each text, which equal texts share, for a model whose embeddings find texts.
    numbers: Vec<u64>,
    /// Sequences of a record.
    each: usize,
}

/// The logits of a step; of a model that makes embeddings, these, or the cosine of each pair with a
/// score.
fn scores_of(model: &Model, outcome: Outcome) -> Vec<f32> {
    let Outcome { embeddings, logits, .. } = outcome;
    if !model.shape.embeds() {
        return logits;
    }
    if !model.objective.as_ref().is_some_and(|objective| objective.needs_scores()) {
        return embeddings;
    }
    let width = model.shape.hidden;
    let pairs = embeddings.chunks_exact(2 * width);
    pairs.map(|pair| cosine(&pair[..width], &pair[width..])).collect()
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
    let mut evaluation = Evaluation::new(&engine.model);
    evaluation.records = engine.model.objective.as_ref().map(|_| 0);
    let has_scores = evaluation.quality.is_some() && !engine.model.shape.embeds();
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
                    found.push(Found::of(&engine.model, outcome));
                }
                found
            }
        };
        labels.iter().zip(&found).for_each(|(labels, found)| evaluation.add(labels, found));
    }
}

/// What each batch of a round came to. Each rank computes its own batch.
async fn of_all_ranks(
    engine: &mut Engine,
    exchanges: &Exchanges,
    mut round: Vec<Batch>,
    purpose: Purpose,
) -> Result<Vec<Found>, Error> {
    let own = round.swap_remove(exchanges.rank() as usize);
    let outcome = engine.run(own, purpose, Vec::new()).await?;
    let all = exchanges.meet(&Found::of(&engine.model, outcome).bytes()).map_err(lost)?;
    Ok(all.iter().map(|bytes| Found::of_bytes(bytes)).collect())
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

    /// The embedding of each sequence of a batch of at most `step.batch` records, for a model with
    /// the task `sentence-embedding`: (sequences, channels).
    ///
    /// # Errors
    /// The batch does not fit the model, or the model has another task; or the ring failed.
    pub async fn embed(&mut self, batch: Batch) -> Result<Vec<f32>, Error> {
        let engine = &mut self.loaded.engine;
        if !engine.model.shape.embeds() {
            let what = "embeddings are made by models with model.task = \"sentence-embedding\"";
            return Err(Error::argument(what));
        }
        Ok(engine.run(batch, Purpose::Measure, Vec::new()).await?.embeddings)
    }

    /// The scores of each sequence of a batch of at most `step.batch` records, for a model with the
    /// task `sequence-classification`: (sequences, labels).
    ///
    /// # Errors
    /// The batch does not fit the model, or the model has another task; or the ring failed.
    pub async fn scores(&mut self, batch: Batch) -> Result<Vec<f32>, Error> {
        let engine = &mut self.loaded.engine;
        if !matches!(engine.model.shape.head, Head::Classes { .. }) {
            let what = "sequences have scores with model.task = \"sequence-classification\"";
            return Err(Error::argument(what));
        }
        Ok(engine.run(batch, Purpose::Score, Vec::new()).await?.logits)
    }

    /// Ends all threads and tasks.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn stop(self) -> Result<(), Error> {
        self.loaded.stop().await
    }
}
