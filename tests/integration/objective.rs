//! Objectives: losses of whole records, computed by the host between forward and backward. The mean
//! cross entropy, run as an objective, trains the same bits as training without one, in every way.

use std::sync::Arc;

use l2l::config::{ByteSize, Deal, Recompute, ScheduleKind, StashPlace};
use l2l::data::{Batch, Batches, Sequence};
use l2l::fabric::Fabric;
use l2l::objectives::{Binary, Measurements, Measures, Objective, ObjectiveMetrics, Scope, Slopes};
use l2l::{Config, Error, Trainer};
use proptest::prelude::*;

use crate::balanced::{Routers, whole_steps};
use crate::exact::{Case, SMALL, Ways, baseline, cases, config, ways};
use crate::ranks::{Late, Shared, shared};
use crate::whole;

/// The mean cross entropy of all labelled tokens, of records of some sequences.
#[derive(Clone, Copy, Debug)]
struct Mean {
    sequences: usize,
    scope: Scope,
    /// The slopes are given by token.
    by_token: bool,
}

const MEAN: Mean = Mean { sequences: 1, scope: Scope::Record, by_token: false };

impl Objective for Mean {
    fn name(&self) -> String {
        "mean".into()
    }

    fn sequences(&self) -> usize {
        self.sequences
    }

    fn measures(&self) -> Measures {
        if self.by_token { Measures::Tokens } else { Measures::LogProbabilities }
    }

    fn scope(&self) -> Scope {
        self.scope
    }

    fn metric_names(&self) -> &'static [&'static str] {
        &["records", "mean_loss"]
    }

    /// 1 of each record, and its loss as a mean over records has it.
    fn metrics(&self, of: &Measurements<'_>) -> Vec<f64> {
        let factor = -(of.records_of_step() as f64) / of.tokens_of_step() as f64;
        let all = (0..of.records()).map(|record| of.sequences_of(record));
        let sums = all.map(|all| all.map(|one| of.log_probability(one)).sum::<f64>());
        sums.flat_map(|sum| [1.0, factor * sum]).collect()
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let tokens = of.tokens_of_step() as f64;
        if self.scope == Scope::Step {
            assert_eq!(of.records(), of.records_of_step());
        }
        let mut losses = Vec::new();
        for record in 0..of.records() {
            let mut loss = 0.0;
            for sequence in of.sequences_of(record) {
                loss -= of.log_probability(sequence) / tokens;
                if self.by_token {
                    assert_eq!(of.of_tokens(sequence).len(), of.tokens(sequence));
                    slopes.of_tokens(sequence).fill(-1.0 / tokens);
                } else {
                    slopes.add(sequence, -1.0 / tokens);
                }
            }
            losses.push(loss);
        }
        Ok(losses)
    }
}

/// What a run came to: the loss of each step, the bits of each norm, a loss that was validated, the
/// digest of the weights.
struct Ran {
    losses: Vec<f64>,
    norms: Vec<u64>,
    validated: f64,
    digest: String,
}

/// Metrics are means over all records of a step or a validation, on all ranks.
fn check_metrics(metrics: &ObjectiveMetrics, loss: f64, mean: Option<Mean>) {
    if mean.is_none() {
        return assert_eq!(metrics.iter().count(), 0);
    }
    assert_eq!(metrics.value("records"), Some(1.0));
    let of_records = metrics.value("mean_loss").expect("a metric");
    assert!((of_records - loss).abs() < 1e-12 * loss, "{of_records} {loss}");
}

fn run(
    mut config: Config,
    mean: Option<Mean>,
    fabric: Option<Arc<dyn Fabric>>,
) -> Result<Ran, Error> {
    let folder = tempfile::tempdir().expect("a place for files");
    config.eps.path = Some(folder.path().into());
    config.train.label_smoothing = 0.0;
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut batches = Batches::open(&config)?;
        if let Some(mean) = mean {
            config.step.batch /= mean.sequences; // it counts records
            // The last tile of the vocabulary has a forward visit more, which writes statistics.
            if let Some(ceiling) = config.device.memory.bytes() {
                config.device.memory = ByteSize::from(ceiling + (1 << 20));
            }
        }
        let mut builder = Trainer::builder(config);
        if let Some(mean) = mean {
            builder = builder.objective(mean);
        }
        if let Some(fabric) = fabric {
            builder = builder.fabric(fabric);
        }
        let mut trainer = builder.start().await?;
        let mut ran =
            Ran { losses: Vec::new(), norms: Vec::new(), validated: 0.0, digest: String::new() };
        for _ in 0..3 {
            let report = trainer.step(batches.next().await?).await?;
            check_metrics(&report.metrics, report.loss, mean);
            ran.losses.push(report.loss);
            ran.norms.push(report.grad_norm.to_bits());
        }
        let validation = [batches.next().await?, batches.next().await?];
        let validated = trainer.evaluate(validation.map(Ok)).await?;
        check_metrics(&validated.metrics, validated.loss, mean);
        ran.validated = validated.loss;
        ran.digest = crate::stop(trainer).await?.weights_digest;
        Ok(ran)
    })
}

fn check(as_objective: Ran, expected: &Ran) {
    let both = as_objective.losses.iter().zip(&expected.losses);
    for (loss, expected) in both.chain([(&as_objective.validated, &expected.validated)]) {
        // The same numbers, added in another order.
        assert!((loss - expected).abs() < 1e-12 * expected, "{loss} {expected}");
    }
    assert_eq!(as_objective.norms, expected.norms);
    assert_eq!(as_objective.digest, expected.digest);
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 300 } else { 20 })
    })]

    #[test]
    fn cross_entropy_as_an_objective_trains_the_same_bits(
        case in cases(),
        ways in ways(),
        (of_step, by_token, pairs) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let mut ways = ways.for_case(&case);
        let mut mean = MEAN;
        mean.by_token = by_token;
        mean.scope = if of_step { Scope::Step } else { Scope::Record };
        mean.sequences = if pairs && case.batch.is_multiple_of(2) { 2 } else { 1 };
        if of_step || !case.micro_batch.is_multiple_of(mean.sequences) {
            ways.kind = whole_steps(ways.kind);
            ways.chunks = None;
            ways = ways.for_case(&case);
        }
        let expected = run(config(&case, &baseline()), None, None).expect("a case of ours");
        check(run(config(&case, &ways), Some(mean), None).expect("a case of ours"), &expected);
    }
}

/// Sequences that are cut into chunks, and several tiles of the vocabulary.
#[test]
fn chunks_and_tiles_of_an_objective_train_the_same_bits() {
    for tied_tiles in [false, true] {
        let case = Case { layers: 1, batch: 2, micro_batch: 2, tied_tiles, ..SMALL.clone() };
        let of = |ways: &Ways| {
            let mut config = config(&case, ways);
            config.model.positions = Some(140);
            config.data.sequence_length = Some(140);
            // A tile has 43,690 rows.
            config.model.vocabulary = Some(if tied_tiles { 44_000 } else { 51 });
            config.step.chunk_positions = 128;
            config
        };
        let expected = run(of(&baseline()), None, None).expect("a case of ours");
        let relay = Ways { kind: ScheduleKind::Relay, ..baseline() };
        check(run(of(&relay), Some(MEAN), None).expect("a case of ours"), &expected);
        let devices = Ways { devices: 2, place: StashPlace::Host, ..relay };
        let mean = Mean { scope: Scope::Step, by_token: true, ..MEAN };
        check(run(of(&devices), Some(mean), None).expect("a case of ours"), &expected);
    }
}

/// Records of a step that several processes share, of which each may have a part of one.
#[test]
fn ranks_share_the_records_of_a_step() {
    let of_step = Mean { scope: Scope::Step, ..MEAN };
    let of_eight = Mean { sequences: 8, by_token: true, ..MEAN }; // on both ranks
    for mean in [MEAN, Mean { sequences: 2, by_token: true, ..MEAN }, of_step, of_eight] {
        let case = Case { micro_batch: 2, ..SMALL.clone() };
        let Shared { mut case, ways, ranks } = shared(case, baseline(), [2, 4], 1);
        case.batch = 8;
        let relay = Ways { kind: ScheduleKind::Relay, recompute: true.into(), ..ways };
        let expected = run(config(&case, &baseline()), None, None).expect("a case of ours");
        let all = std::thread::scope(|scope| {
            let start = |fabric| {
                let config = config(&case, &relay);
                scope.spawn(move || run(config, Some(mean), Some(Late::new(fabric))))
            };
            let all: Vec<_> = l2l::fabric::threads(ranks).into_iter().map(start).collect();
            all.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Vec<_>>()
        });
        for ran in all {
            check(ran.expect("a case of ours"), &expected);
        }
    }
}

fn small() -> Config {
    let mut config = config(&SMALL, &Ways { kind: ScheduleKind::Relay, ..baseline() });
    config.train.label_smoothing = 0.0;
    config
}

async fn refusal(config: Config, mean: Mean) -> String {
    let started = Trainer::builder(config).objective(mean).start().await;
    started.err().expect("it is refused").to_string()
}

#[tokio::test]
async fn what_an_objective_cannot_have_is_refused_by_name() {
    let mut smoothed = small();
    smoothed.train.label_smoothing = 0.1;
    assert!(refusal(smoothed, MEAN).await.contains("leave train.label_smoothing out"));
    let mut classes = small();
    classes.model.task = Some(l2l::config::Task::SequenceClassification);
    assert!(refusal(classes, MEAN).await.contains("set model.task = \"causal-lm\""));
    let started = Trainer::builder(small()).objective(Binary).start().await;
    let text = started.err().expect("it is refused").to_string();
    let says = "objective binary: it reads one score of each sequence";
    assert!(text.contains(says) && text.contains("model.labels = 1"), "{text}");
    let mut resident = small();
    resident.schedule.kind = ScheduleKind::Resident;
    let of_step = Mean { scope: Scope::Step, ..MEAN };
    let text = refusal(resident.clone(), of_step).await;
    assert!(text.contains("objective mean: its loss is of the whole step"), "{text}");
    assert!(text.contains("set schedule.kind = \"relay\""), "{text}");
    let triples = Mean { sequences: 3, ..MEAN };
    let text = refusal(resident, triples).await;
    let says = "a record has 3 sequences and step.micro_batch is 2, which is no multiple";
    assert!(text.contains(says), "{text}");
    assert!(refusal(small(), Mean { sequences: 0, ..MEAN }).await.contains("at least one"));
    let mut grows = small();
    (grows.model.max_layers, grows.model.layers) = (Some(4), Some(2));
    assert!(refusal(grows, MEAN).await.contains("for models without an objective"));
}

fn sequences(count: u32) -> Vec<Sequence> {
    (0..count).map(|n| Sequence::plain(vec![n, 2 * n + 1, 5, 7, 3 + n])).collect()
}

/// The objective of a program sees sequences, labels and references as the batch has them.
#[tokio::test]
async fn batches_have_whole_records_and_references() {
    struct NeedsReference;
    impl Objective for NeedsReference {
        fn name(&self) -> String {
            "drift".into()
        }
        fn sequences(&self) -> usize {
            2
        }
        fn needs_reference(&self) -> bool {
            true
        }
        fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
            let records = of.records_of_step() as f64;
            let mut losses = Vec::new();
            for sequences in (0..of.records()).map(|record| of.sequences_of(record)) {
                let mut loss = 0.0;
                for one in sequences {
                    let drift = of.log_probability(one) - of.reference(one);
                    if drift.abs() > 100.0 {
                        return Err(format!("sequence {one} has drifted by {drift}"));
                    }
                    loss += drift * drift / records;
                    slopes.add(one, 2.0 * drift / records);
                }
                losses.push(loss);
            }
            Ok(losses)
        }
    }
    let mut config = small();
    (config.model.dropout, config.train.neftune_alpha) = (Some(0.0), 0.0);
    (config.step.batch, config.step.micro_batch) = (2, 1);
    config.optimizer.weight_decay = 0.0;
    let started = Trainer::builder(config).objective(NeedsReference).start().await;
    let mut trainer = started.expect("a config of ours");
    let batch = Batch::new(&sequences(4));
    let says = async |trainer: &mut Trainer, batch: Batch| {
        trainer.step(batch).await.expect_err("it is refused").to_string()
    };
    let text = says(&mut trainer, Batch::new(&sequences(2))).await;
    assert!(text.contains("2 sequences: step.batch is 2 records of 2 sequences"), "{text}");
    let text = says(&mut trainer, batch.clone()).await;
    assert!(text.contains("objective drift needs the log-probability of each sequence"), "{text}");
    let odd = trainer.evaluate([Ok(Batch::new(&sequences(3)))]).await.expect_err("no records");
    assert!(odd.to_string().contains("a record of the objective has 2"), "{odd}");
    let reference = trainer.log_probabilities(batch.clone()).await.expect("it measures");
    assert!(reference.len() == 4 && reference.iter().all(|log| *log < 0.0), "{reference:?}");
    let known = batch.clone().with_reference(reference.clone());
    let report = trainer.step(known.clone()).await.expect("a step");
    assert_eq!((report.loss, report.grad_norm), (0.0, 0.0), "the forward pass is the same");
    let moved = reference.iter().map(|log| log - 1.0).collect();
    let report = trainer.step(batch.clone().with_reference(moved)).await.expect("a step");
    assert!((report.loss - 2.0).abs() < 1e-12 && report.grad_norm > 0.0, "{report:?}");
    let evaluation = trainer.evaluate([Ok(known)]).await.expect("it evaluates");
    assert_eq!(evaluation.records, Some(2));
    assert!(evaluation.loss > 0.0 && evaluation.values().len() == 1, "no perplexity");
    let text = says(&mut trainer, batch.with_reference(vec![1e6; 4])).await;
    assert!(text.contains("objective drift: sequence 0 has drifted by -1"), "{text}");
}

/// Room on a device for what layers keep, and devices that share the groups of a step.
#[test]
fn groups_on_devices_that_keep_activations() {
    let case =
        Case { batch: 6, micro_batch: 1, groups: 3, routers: Routers::Plain, ..SMALL.clone() };
    let expected = run(config(&case, &baseline()), None, None).expect("a case of ours");
    for sharded in [false, true] {
        let ways = Ways {
            kind: ScheduleKind::Relay,
            recompute: Recompute::AUTO,
            room: 0.6,
            devices: 3,
            deal: Deal::Sequences,
            sharded,
            ..baseline()
        };
        check(run(config(&case, &ways), Some(MEAN), None).expect("a case of ours"), &expected);
    }
}
