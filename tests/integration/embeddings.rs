//! Sentence embeddings: the numbers of sentence-transformers in f64 (`goldens/embeddings.py`), one
//! result in every order, directories, records and what is refused.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use l2l::config::{
    Deal, Dtype, Duplicates, ObjectiveConfig, ObjectiveKind, Recompute, ScheduleKind, StashDtype,
    StashPlace, Task,
};
use l2l::data::{Batch, Batches, Dataset, Sequence};
use l2l::inference::Evaluator;
use l2l::models::EmbeddingPooling;
use l2l::{Config, Trainer};
use serde_json::{Value, json};

use crate::pytorch::case;

pub(crate) fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/embeddings.json");
    let text = fs::read_to_string(path).expect("it is committed");
    serde_json::from_str(&text).expect("it is JSON")
}

fn floats(list: &Value) -> Vec<f64> {
    let list = list.as_array().expect("a list");
    list.iter().map(|number| number.as_f64().expect("a number")).collect()
}

/// The texts of a golden model.
pub(crate) fn texts(config: &Config) -> Vec<Vec<u32>> {
    let folder = config.model.path.as_ref().expect("a case has one");
    let text = fs::read_to_string(folder.join("data.jsonl")).expect("it is committed");
    let ids = |line: &str| -> Vec<u32> {
        let line: Value = serde_json::from_str(line).expect("it is JSON");
        let ids = line["input_ids"].as_array().expect("a list");
        ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    text.lines().map(ids).collect()
}

/// The records of a step of a golden.
pub(crate) fn records(texts: &[Vec<u32>], step: usize, count: usize, each: usize) -> Vec<Sequence> {
    let record = |nth: usize| {
        let number = step * count + nth;
        let of = |place: usize| texts[(number * each + place) % texts.len()].clone();
        let of_record: Vec<Vec<u32>> = (0..each).map(of).collect();
        Sequence {
            documents: of_record.iter().map(Vec::len).collect(),
            score: Some((7 * number % 5) as f32 / 4.0),
            ..Sequence::plain(of_record.concat())
        }
    };
    (0..count).map(record).collect()
}

/// A golden model that makes embeddings, with the settings of one of its cases.
pub(crate) fn of_case(family: &str, golden: &Value, name: &str) -> Config {
    let (mut config, _) = case(family);
    config.step.batch = golden["records"].as_u64().expect("a number") as usize;
    config.optimizer.clip_norm = None;
    config.model.dropout = Some(0.0);
    config.model.normalise = Some(false);
    let pooling = golden["pooling"][family].clone();
    config.model.pooling = Some(serde_json::from_value(pooling).expect("a pooling"));
    let settings = golden["settings"][name].clone();
    config.objective = serde_json::from_value(settings).expect("a config's keys");
    config
}

fn each(objective: &ObjectiveConfig) -> usize {
    match objective.kind {
        ObjectiveKind::Contrastive => 2 + objective.negatives,
        ObjectiveKind::Triplet => 3,
        _ => 2,
    }
}

/// What some steps came to.
#[derive(Clone, Debug, PartialEq)]
struct Ran {
    losses: Vec<f64>,
    norms: Vec<f64>,
    digest: String,
}

async fn run(config: Config, steps: std::ops::Range<usize>) -> Ran {
    let all = texts(&config);
    let each = each(&config.objective);
    let count = config.step.batch;
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let mut ran = Ran { losses: Vec::new(), norms: Vec::new(), digest: String::new() };
    for step in steps {
        let batch = Batch::of_texts(&records(&all, step, count, each));
        let report = trainer.step(batch).await.expect("nothing fails here");
        ran.losses.push(report.loss);
        ran.norms.push(report.grad_norm);
    }
    ran.digest = trainer.digest().await.expect("nothing fails here");
    ran
}

#[tokio::test]
async fn losses_of_embeddings_are_those_of_sentence_transformers() {
    let golden = golden();
    for family in golden["pooling"].as_object().expect("an object").keys() {
        for name in golden[family].as_object().expect("an object").keys() {
            let config = of_case(family, &golden, name);
            let ran = run(config, 0..10).await;
            let expected = &golden[family][name];
            let losses = floats(&expected["losses"]);
            let norms = floats(&expected["norms"]);
            let off =
                losses.iter().zip(&ran.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            println!("{family} {name}: losses within {off:.1e}: {:?} {:?}", ran.losses, ran.norms);
            for step in 0..losses.len() {
                let loss = losses[step];
                let found = ran.losses[step];
                assert!((found - loss).abs() < 2e-5, "{family} {name} {step}: {found} {loss}");
                let norm = norms[step];
                let found = ran.norms[step];
                let error = (found - norm).abs();
                assert!(error <= 1e-4 * norm, "{family} {name} {step}: norm {found} {norm}");
            }
        }
    }
}

/// The loss is that of the step: micro-batches of one text, of some, and of all have its bits. So
/// do the slopes; gradients of weights are sums over micro-batches, whose order differs.
#[tokio::test]
async fn micro_batches_do_not_change_a_loss() {
    let golden = golden();
    for (family, name) in [("bert", "negatives"), ("qwen3", "contrastive"), ("llama", "cosent")] {
        let mut config = of_case(family, &golden, name);
        config.model.normalise = None;
        let mut found = Vec::new();
        for micro_batch in [1, 4, 12] {
            config.step.micro_batch = micro_batch;
            found.push(run(config.clone(), 0..1).await);
        }
        for other in &found[1..] {
            assert_eq!(found[0].losses, other.losses, "{family} {name}");
            let off = (found[0].norms[0] / other.norms[0] - 1.0).abs();
            assert!(off < 1e-6, "{family} {name}: {off}");
        }
    }
}

/// One digest in every order, on several devices, with every place of the stash.
#[tokio::test]
async fn orders_devices_and_places_do_not_change_a_bit() {
    let golden = golden();
    for (family, name) in
        [("bert", "symmetric"), ("qwen3", "triplet"), ("embeddinggemma", "negatives")]
    {
        let mut config = of_case(family, &golden, name);
        config.parallel.groups = 2;
        config.step.micro_batch = 3;
        let expected = run(config.clone(), 0..3).await;
        let changes: [&dyn Fn(&mut Config); 7] = [
            &|config| config.device.count = Some(2),
            &|config| {
                config.device.count = Some(2);
                config.parallel.deal = Deal::Sequences;
            },
            &|config| config.stash.place = StashPlace::Device,
            &|config| config.schedule.recompute = true.into(),
            &|config| config.schedule.recompute = Recompute::ATTENTION,
            &|config| config.device.threads = Some(1),
            &|config| {
                config.schedule.kind = ScheduleKind::Gpipe;
                config.device.count = Some(2);
            },
        ];
        for (nth, change) in changes.iter().enumerate() {
            let mut other = config.clone();
            change(&mut other);
            assert_eq!(run(other, 0..3).await, expected, "{family} {name} {nth}");
        }
        if name == "triplet" {
            // Each micro-batch has a whole record.
            for kind in [ScheduleKind::Resident, ScheduleKind::OneForwardOneBackward] {
                let mut other = config.clone();
                other.schedule.kind = kind;
                assert_eq!(run(other, 0..3).await, expected, "{kind:?}");
            }
        }
    }
}

/// A stash of fewer bits, and layers that compute in 16 bits, give near numbers.
#[tokio::test]
async fn fewer_bits_give_near_losses() {
    let golden = golden();
    let config = of_case("qwen3", &golden, "contrastive");
    let expected = run(config.clone(), 0..2).await;
    let changes: [&dyn Fn(&mut Config); 4] = [
        &|config| config.stash.dtype = StashDtype::Bf16,
        &|config| (config.stash.dtype, config.stash.block_size) = (StashDtype::Int8, 48),
        &|config| config.device.dtype = Dtype::Bf16,
        &|config| (config.device.dtype, config.loss_scale.initial) = (Dtype::F16, 256.0),
    ];
    for (nth, change) in changes.iter().enumerate() {
        let mut other = config.clone();
        change(&mut other);
        let found = run(other, 0..2).await;
        let off = (found.losses[0] - expected.losses[0]).abs();
        assert!(off < 0.1, "{nth}: {found:?} {expected:?}");
        let off = (found.norms[0] / expected.norms[0] - 1.0).abs();
        assert!(off < 0.1, "{nth}: {found:?} {expected:?}");
    }
}

/// A text of two chunks, which the relay takes one by one, and other orders as a whole.
#[tokio::test]
async fn chunks_of_texts_train_the_same_bits() {
    let folder = tempfile::tempdir().expect("a place for files");
    let line = |n: usize| {
        let text = |more: usize| "abcdefg ".repeat(15 + (n + more) % 3) + &n.to_string();
        json!({ "anchor": text(0), "positive": text(1), "negative": text(2) })
    };
    let lines: Vec<Value> = (0..4).map(line).collect();
    let poolings = [EmbeddingPooling::Mean, EmbeddingPooling::Cls, EmbeddingPooling::Last];
    let poolings = poolings.map(|pooling| (pooling, None)).into_iter();
    for (pooling, prompt) in poolings.chain([(EmbeddingPooling::Mean, Some("q: "))]) {
        let mut config = on_file(folder.path(), ObjectiveKind::Triplet, &lines);
        config.data.prompts.anchor = prompt.map(str::to_string);
        config.model.include_prompt = prompt.map(|_| false);
        (config.model.layers, config.model.positions) = (Some(1), Some(140));
        (config.data.sequence_length, config.step.chunk_positions) = (Some(140), 128);
        (config.step.batch, config.step.micro_batch) = (2, 3);
        config.model.pooling = Some(pooling);
        let mut found = Vec::new();
        for (kind, devices) in
            [(ScheduleKind::Relay, 1), (ScheduleKind::Relay, 2), (ScheduleKind::Resident, 1)]
        {
            config.schedule.kind = kind;
            config.device.count = Some(devices);
            let mut batches = Batches::open(&config).expect("good records");
            let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
            let mut losses = Vec::new();
            for _ in 0..2 {
                let batch = batches.next().await.expect("good records");
                losses.push(trainer.step(batch).await.expect("a step").loss);
            }
            found.push((losses, trainer.digest().await.expect("nothing fails here")));
        }
        assert!(found.iter().all(|one| *one == found[0]), "{pooling:?} {found:?}");
    }
}

/// A candidate with the text of the positive is no negative.
#[tokio::test]
async fn duplicates_are_left_out_unless_they_are_kept() {
    let golden = golden();
    let mut config = of_case("bert", &golden, "contrastive");
    config.step.batch = 3;
    let all = texts(&config);
    let record = |a: usize, b: usize| Sequence {
        documents: vec![all[a].len(), all[b].len()],
        ..Sequence::plain([&all[a][..], &all[b]].concat())
    };
    let loss = async |config: &Config, records: &[Sequence]| {
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let evaluation = trainer.evaluate([Ok(Batch::of_texts(records))]).await.expect("good");
        evaluation.loss
    };
    let same = [record(0, 1), record(2, 1), record(3, 0)];
    let masked = loss(&config, &same).await;
    config.objective.duplicates = Some(Duplicates::Keep);
    let kept = loss(&config, &same).await;
    assert!(masked < kept, "{masked} {kept}");
    let differ = [record(0, 1), record(2, 4), record(3, 5)];
    let kept = loss(&config, &differ).await;
    config.objective.duplicates = None;
    assert_eq!(loss(&config, &differ).await, kept, "there are none");
    config.step.batch = 1;
    assert_eq!(loss(&config, &differ[..1]).await, 0.0, "no text but the positive");
}

/// A run of records in a file.
pub(crate) fn on_file(folder: &Path, kind: ObjectiveKind, lines: &[Value]) -> Config {
    let at = folder.join("pairs.jsonl");
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&at, text).expect("a place for files");
    let mut config = Config::default();
    (config.model.layers, config.model.hidden, config.model.heads) = (Some(2), Some(32), Some(2));
    config.model.dropout = Some(0.0);
    config.data.train = at.display().to_string().into();
    config.data.sequence_length = Some(64);
    (config.step.batch, config.step.micro_batch) = (4, 2);
    config.objective.kind = kind;
    config
}

pub(crate) fn pairs(count: usize) -> Vec<Value> {
    let line =
        |n: usize| json!({ "query": format!("what is {n}?"), "answer": format!("it is {n}") });
    (0..count).map(line).collect()
}

/// An untrained model learns to find answers; a run that resumes is the run that was not stopped.
#[tokio::test]
async fn answers_are_found_and_runs_resume() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = on_file(folder.path(), ObjectiveKind::Contrastive, &pairs(12));
    config.step.batch = 12;
    config.optimizer.learning_rate = 3e-3;
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    assert_eq!(data.sequence(0).expect("it is there").documents, [10, 7]);
    let batches = async || {
        let mut batches = Batches::open(&config).expect("good records");
        let mut all = Vec::new();
        for _ in 0..20 {
            all.push(batches.next().await.expect("good records"));
        }
        all
    };
    let all = batches().await;
    let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
    let validated = async |trainer: &mut Trainer| {
        let evaluation = trainer.evaluate(data.in_order(12, 8)).await.expect("it evaluates");
        let values: std::collections::BTreeMap<_, _> = evaluation.values().into_iter().collect();
        let names: BTreeSet<_> = values.keys().copied().collect();
        assert_eq!(names, BTreeSet::from(["loss", "accuracy_1", "mrr_10"]));
        (values["accuracy_1"], values["mrr_10"])
    };
    let at = folder.path().join("state");
    for (step, batch) in all.iter().enumerate() {
        if step == 10 {
            trainer.checkpoint(&at).await.expect("a place for files");
        }
        trainer.step(batch.clone()).await.expect("a step");
    }
    let digest = trainer.digest().await.expect("nothing fails here");
    let mut other = Trainer::builder(config.clone()).resume(&at).start().await.expect("it resumes");
    for batch in &all[10..] {
        other.step(batch.clone()).await.expect("a step");
    }
    assert_eq!(other.digest().await.expect("nothing fails here"), digest);
    for batch in all.iter().cycle().take(200) {
        other.step(batch.clone()).await.expect("a step");
    }
    let (accuracy, mrr) = validated(&mut other).await;
    assert!(accuracy > 0.9 && mrr > 0.9, "{accuracy} {mrr}");
}

/// Pairs with scores: the cosine follows the score, in training and in validation.
#[tokio::test]
async fn cosines_follow_scores() {
    let folder = tempfile::tempdir().expect("a place for files");
    let line = |n: usize| {
        let other = if n.is_multiple_of(2) { n } else { n + 7 };
        let score = if n.is_multiple_of(2) { 1.0 } else { 0.0 };
        let texts = [format!("number {n}"), other.to_string()];
        json!({ "sentence1": texts[0], "sentence2": texts[1], "score": score })
    };
    let lines: Vec<Value> = (0..8).map(line).collect();
    for kind in [ObjectiveKind::Cosine, ObjectiveKind::Cosent] {
        let mut config = on_file(folder.path(), kind, &lines);
        config.step.batch = 8;
        config.optimizer.learning_rate = 3e-3;
        let mut batches = Batches::open(&config).expect("good records");
        let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
        for _ in 0..40 {
            let batch = batches.next().await.expect("good records");
            trainer.step(batch).await.expect("a step");
        }
        let shape = l2l::shape_of(&config).expect("a shape of ours");
        let (data, _) = Dataset::open(&config, &shape).expect("good records");
        let evaluation = trainer.evaluate(data.in_order(8, 1)).await.expect("it evaluates");
        let values = evaluation.values();
        let spearman = values.iter().find(|(name, _)| *name == "spearman").expect("it has").1;
        assert!(spearman > 0.85, "{kind:?} {values:?}");
    }
}

/// The directory of a run has the modules of sentence-transformers, and the model that is read from
/// there makes the same embeddings.
#[tokio::test]
async fn a_checkpoint_is_a_directory_of_sentence_transformers() {
    let folder = tempfile::tempdir().expect("a place for files");
    let golden = golden();
    for (family, pooling, normalise) in [
        ("bert", EmbeddingPooling::Mean, true),
        ("distilbert", EmbeddingPooling::Cls, false),
        ("qwen3", EmbeddingPooling::Last, true),
    ] {
        let mut config = of_case(family, &golden, "contrastive");
        (config.model.pooling, config.model.normalise) = (Some(pooling), Some(normalise));
        let all = texts(&config);
        let batch = Batch::of_texts(&records(&all, 0, 4, 2));
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        trainer.step(batch.clone()).await.expect("a step");
        let at = folder.path().join(family);
        trainer.checkpoint(&at).await.expect("a place for files");
        let own = trainer.embed(batch.clone()).await.expect("it embeds");
        let lengths: Vec<f32> =
            own.chunks(48).map(|one| one.iter().map(|x| x * x).sum::<f32>()).collect();
        assert_eq!(lengths.iter().all(|one| (one - 1.0).abs() < 1e-5), normalise);
        let read = |path: &str| -> Value {
            let text = fs::read_to_string(at.join(path)).expect("it was written");
            serde_json::from_str(&text).expect("it is JSON")
        };
        let modules = read("modules.json");
        let kinds: Vec<&str> = modules
            .as_array()
            .expect("a list")
            .iter()
            .map(|module| {
                module["type"].as_str().expect("a text").rsplit('.').next().expect("a word")
            })
            .collect();
        let expected = ["Transformer", "Pooling", "Normalize"];
        assert_eq!(kinds, expected[..if normalise { 3 } else { 2 }]);
        let key = match pooling {
            EmbeddingPooling::Mean => "pooling_mode_mean_tokens",
            EmbeddingPooling::Cls => "pooling_mode_cls_token",
            EmbeddingPooling::Last => "pooling_mode_lasttoken",
        };
        assert_eq!(read("1_Pooling/config.json")[key], true);
        let architecture = &read("config.json")["architectures"][0];
        assert!(architecture.as_str().is_some_and(|one| one.ends_with("Model")), "{architecture}");
        // The directory says all of it.
        let mut again = Config::default();
        again.model.path = Some(at);
        again.model.task = Some(Task::SentenceEmbedding);
        again.step.batch = 8;
        let mut evaluator = Evaluator::start(again).await.expect("it is a model");
        assert_eq!(evaluator.embed(batch).await.expect("it embeds"), own);
    }
}

/// Losses of records, and those of the step, whose negatives are the texts of all processes.
#[test]
fn processes_share_records_and_steps() {
    let golden = golden();
    let start = |config: Config, ranks: u32| {
        let one = |fabric: std::sync::Arc<dyn l2l::fabric::Fabric>| {
            let config = config.clone();
            move || -> Result<Ran, String> {
                let runtime = tokio::runtime::Builder::new_current_thread().build();
                runtime.expect("a runtime").block_on(async {
                    let all = texts(&config);
                    let each = each(&config.objective);
                    let count = config.step.batch;
                    let builder = Trainer::builder(config).fabric(fabric);
                    let mut trainer = builder.start().await.map_err(|error| error.to_string())?;
                    let mut ran =
                        Ran { losses: Vec::new(), norms: Vec::new(), digest: String::new() };
                    for step in 0..2 {
                        let batch = Batch::of_texts(&records(&all, step, count, each));
                        let report = trainer.step(batch).await.expect("nothing fails here");
                        ran.losses.push(report.loss);
                        ran.norms.push(report.grad_norm);
                    }
                    ran.digest = trainer.digest().await.expect("nothing fails here");
                    Ok(ran)
                })
            }
        };
        std::thread::scope(|scope| {
            let fabrics = l2l::fabric::threads(ranks).into_iter();
            let all: Vec<_> =
                fabrics.map(|fabric| scope.spawn(one(std::sync::Arc::new(fabric)))).collect();
            all.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
        })
    };
    for name in golden["settings"].as_object().expect("an object").keys() {
        // With 3 texts in a micro-batch, a record lies in two, and on two processes.
        for (family, micro_batch) in [("bert", 2), ("bert", 3), ("llama", 1)] {
            let mut config = of_case(family, &golden, name);
            let turns = (config.step.batch * each(&config.objective)).div_ceil(micro_batch);
            let groups = [4, 2, 3].into_iter().find(|groups| turns.is_multiple_of(*groups));
            config.parallel.groups = groups.expect("a divisor") as u32;
            config.step.micro_batch = micro_batch;
            let alone = start(config.clone(), 1).remove(0).expect("it runs");
            for ran in start(config, 2) {
                let ran = ran.expect("it runs");
                assert_eq!(ran, alone, "{family} {name} in micro-batches of {micro_batch}");
            }
        }
    }
}
