//! Blocks in pieces, which a device holds one by one: the same bits as whole blocks in as many
//! slices, on any devices, in every kind of schedule.

use l2l::config::{ChannelsConfig, Deal, Dtype, LoraConfig, Recompute, ScheduleKind, TrainConfig};
use l2l::models::{Base, Model};
use l2l::{Config, Plan, Trainer, model_of, shape_of};

use crate::exact::{Case, SMALL, baseline, check_way, config, long_sequences, run};
use crate::program::good;
use crate::pytorch;
use crate::ranks::{Task, on_ranks};
use crate::trained::Trained;
use crate::ways::Ways;

fn case() -> Case {
    Case { layers: 2, slices: 4, ..SMALL.clone() }
}

fn relay() -> Ways {
    let channels = ChannelsConfig { weights: 2, ..baseline().channels };
    Ways { kind: ScheduleKind::Relay, recompute: true.into(), channels, ..baseline() }
}

/// A device, with and without recomputation. It moves the bytes of the plan.
#[test]
fn pieces_give_the_bits_of_slices() {
    let plain = config(&case(), &baseline());
    for tensor in [1, 2, 4] {
        for recompute in [true.into(), false.into(), Recompute::ATTENTION] {
            let ways = Ways { tensor, recompute, ..relay() };
            check_way(plain.clone(), config(&case(), &ways), 3);
        }
    }
}

/// Devices that share pieces or groups, on file, with adapters, and with bases of 16 bits.
#[test]
fn pieces_on_devices_give_the_bits_of_slices() {
    let adapters = Trained::AdaptersAndNorms;
    for (trained, base, precision) in [
        (Trained::All, Base::AsIs, SMALL.precision),
        (adapters, Base::AsIs, SMALL.precision),
        (adapters, Base::Bf16, SMALL.precision),
        (adapters, Base::Int8, SMALL.precision),
        (adapters, Base::Nf4, SMALL.precision),
        (adapters, Base::Nf4, (Dtype::Bf16, SMALL.precision.1)),
        (Trained::Biases, Base::Bf16, (Dtype::Bf16, SMALL.precision.1)),
    ] {
        let case = Case { batch: 8, groups: 2, trained, base, precision, ..case() };
        let plain = config(&case, &baseline());
        for (devices, deal, on_file, sharded) in [
            (2, Deal::Layers, false, false),
            (3, Deal::Layers, true, false),
            (4, Deal::Layers, false, false),
            (2, Deal::Sequences, true, false),
            (2, Deal::Sequences, false, true),
        ] {
            for tensor in [2, 4] {
                let ways = Ways { tensor, devices, deal, on_file, sharded, ..relay() };
                check_way(plain.clone(), config(&case, &ways), 2);
            }
        }
    }
}

/// Adapters over a base of these numbers.
fn adapters(base: Base) -> TrainConfig {
    let lora = LoraConfig { dropout: 0.0, ..LoraConfig::default() };
    TrainConfig { lora: Some(lora), base, ..TrainConfig::default() }
}

/// Quantised matrices, which have scales of several elements: joined, fused and transposed ones.
/// Rows and columns of a slice may be odd in number, but in numbers of 4 bits.
#[test]
fn pieces_of_quantised_bases_give_the_bits_of_slices() {
    for (name, slices) in [("llama", 2), ("phi3", 2), ("qwen2-slices", 4), ("opt-slices", 2)] {
        for base in [Base::Int8, Base::Nf4] {
            let (mut config, _) = pytorch::case(name);
            (config.parallel.slices, config.train) = (slices, adapters(base));
            let bits = |config| {
                let (bits, ending) = run(config, 2);
                (bits, ending.weights_digest)
            };
            let expected = bits(config.clone());
            for tensor in [2, 4].into_iter().filter(|tensor| tensor <= &slices) {
                config.parallel.tensor = tensor;
                assert_eq!(bits(config.clone()), expected, "{name} {base:?} {tensor}");
            }
        }
    }
    for (base, dtype) in [(Base::Int8, Dtype::F32), (Base::AsIs, Dtype::Bf16)] {
        let of = |tensor| {
            let mut config = config(&case(), &Ways { tensor, ..relay() });
            config.train = adapters(base);
            (config.model.intermediate, config.device.dtype) = (Some(20), dtype);
            run(config, 2).1.weights_digest
        };
        assert_eq!([of(2), of(4)], [of(1), of(1)], "{base:?}");
    }
}

/// Families with norms of queries and keys, and without biases.
#[tokio::test]
async fn pieces_of_families_are_pytorchs() {
    for (name, slices) in [
        ("glm", 2),
        ("llama", 2),
        ("modernbert-slices", 4),
        ("opt-slices", 4),
        ("qwen2-slices", 4),
        ("qwen3-slices", 4),
        ("untied", 2),
    ] {
        let (mut config, golden) = pytorch::case(name);
        config.parallel.slices = slices;
        let whole = pytorch::check(config.clone(), &golden).await;
        for tensor in [2, 4].into_iter().filter(|tensor| tensor <= &slices) {
            config.parallel.tensor = tensor;
            assert_eq!(pytorch::check(config.clone(), &golden).await, whole, "{name} {tensor}");
        }
    }
}

/// Long sequences in chunks, which are visits of their own, or are walked in a visit; also with
/// adapters, whose sums pass from piece to piece chunk by chunk.
#[test]
fn long_sequences_in_pieces_give_the_bits_of_slices() {
    let folder = tempfile::tempdir().expect("a place for files");
    let data = long_sequences(folder.path());
    for trained in [Trained::All, Trained::AdaptersAndNorms] {
        let of = |ways: &Ways| {
            let mut config = config(&Case { batch: 3, trained, ..case() }, ways);
            config.model.hidden = Some(8);
            (config.model.positions, config.data.sequence_length) = (Some(400), Some(400));
            config.step.chunk_positions = 128;
            config.data.train = data.display().to_string().into();
            run(config, 2).1.weights_digest
        };
        let expected = of(&baseline());
        for (tensor, kind, devices, recompute) in [
            (2, ScheduleKind::Relay, 1, true.into()),
            (4, ScheduleKind::Relay, 3, false.into()),
            (4, ScheduleKind::Relay, 2, Recompute::ATTENTION),
            (4, ScheduleKind::Resident, 1, false.into()),
            (2, ScheduleKind::OneForwardOneBackward, 2, true.into()),
        ] {
            let ways = Ways { tensor, kind, devices, recompute, ..relay() };
            assert_eq!(of(&ways), expected, "{ways:?}");
        }
    }
}

/// Megatron's PTD-P: pipelines of so many stages, each of the pieces of its layers, with groups on
/// ranks, and several chunks of layers on a device.
#[test]
fn every_pipeline_of_pieces_gives_the_same_bits() {
    let case = Case { layers: 4, batch: 8, micro_batch: 1, groups: 2, ..case() };
    let task = |ways: &Ways| Task::new(config(&case, ways), 2);
    let (expected, reference) = task(&baseline()).run(None).expect("a case of ours");
    for stages in [1, 2] {
        for tensor in [1, 2, 4] {
            for chunks in [1, 2] {
                let kind = match chunks {
                    1 => ScheduleKind::OneForwardOneBackward,
                    _ => ScheduleKind::Interleaved,
                };
                let devices = stages * tensor;
                let chunks = Some(chunks).filter(|chunks| *chunks > 1);
                let ways = Ways { kind, devices, tensor, chunks, ..relay() };
                for ranks in [1, 2] {
                    for (seen, _) in on_ranks(ranks, |_| task(&ways)) {
                        let (bits, summary) = seen.expect("a case of ours");
                        assert_eq!(bits, expected, "{ways:?} on {ranks}");
                        assert_eq!(summary.weights_digest, reference.weights_digest);
                    }
                }
            }
        }
    }
}

/// The number of pieces is free: a run resumes with another one, and goes on with the same bits.
#[tokio::test]
async fn a_run_resumes_in_other_pieces() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let of = |tensor| config(&case(), &Ways { tensor, ..relay() });
    let mut batches = l2l::data::Batches::open(&of(1)).expect("random data");
    let mut trainer = Trainer::start(of(2)).await.expect("a run of ours");
    trainer.step(batches.next().await.expect("random data")).await.expect("nothing fails here");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    let batch = batches.next().await.expect("random data");
    trainer.step(batch.clone()).await.expect("nothing fails here");
    let expected = trainer.digest().await.expect("nothing fails here");
    trainer.stop().await.expect("nothing fails here");
    for tensor in [1, 2, 4] {
        let resumed = Trainer::builder(of(tensor)).resume(&place).start().await;
        let mut resumed = resumed.expect("another number of pieces may be");
        resumed.step(batch.clone()).await.expect("nothing fails here");
        assert_eq!(resumed.digest().await.expect("nothing fails here"), expected, "{tensor}");
        resumed.stop().await.expect("nothing fails here");
    }
}

/// Slots of a layer as large as Llama-3.1-405B's: two for weights and two for gradients.
#[test]
fn slots_have_the_size_of_pieces() {
    let gigabytes = |tensor: u32| {
        let mut config = Config::default();
        config.model.preset = Some("llama-70b".into());
        config.model.hidden = Some(16_384);
        config.model.heads = Some(128);
        config.model.kv_heads = Some(8);
        config.model.intermediate = Some(53_248);
        config.model.layers = Some(2);
        config.device.dtype = Dtype::Bf16;
        config.data.train = "random".into();
        config.data.sequence_length = Some(128);
        config.channels = ChannelsConfig { weights: 2, gradients: 2, ..config.channels };
        (config.parallel.slices, config.parallel.tensor) = (8, tensor);
        let model = model_of(&config, shape_of(&config).expect("a shape of ours"));
        let model = model.expect("a model of ours");
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        let slots = plan.device.iter().filter(|term| ["weights", "gradients"].contains(&term.name));
        (slots.map(|term| term.bytes).sum::<u64>() as f64 / 1e8).round() / 10.0
    };
    assert_eq!([1, 2, 4, 8].map(gigabytes), [38.3, 15.7, 7.9, 3.9]);
}

fn refused(config: &Config) -> String {
    let found = shape_of(config).and_then(|shape| model_of(config, shape).map(drop));
    found.expect_err("it cannot be in pieces").to_string()
}

/// Each refusal names what would do.
#[tokio::test]
async fn what_cannot_be_in_pieces_is_refused() {
    for (text, expected) in [
        ("parallel.tensor = 0", "parallel.tensor must be at least 1"),
        (
            "parallel.tensor = 3\nparallel.slices = 4",
            "parallel.tensor is 3, and parallel.slices is 4: set a divisor of it (1, 2, 4)",
        ),
        ("parallel.tensor = 2", "parallel.slices is 1: set a divisor of it (1)"),
        (
            "parallel = { tensor = 2, slices = 2 }\ncompression.kind = \"int8\"",
            "compression.kind compresses gradients of whole blocks: leave it out, or set",
        ),
    ] {
        let says = Config::parse(text).expect_err("it cannot be").to_string();
        assert!(says.contains(expected), "{text}: {says}");
    }
    for name in ["cohere", "gpt_neox-slices"] {
        let (mut config, _) = pytorch::case(name);
        (config.parallel.slices, config.parallel.tensor) = (2, 2);
        let says = refused(&config);
        assert!(says.contains("their feed-forward stands beside attention"), "{says}");
    }
    let mut config = config(&case(), &Ways { tensor: 2, ..relay() });
    config.train = adapters(Base::Nf4);
    config.model.intermediate = Some(20);
    let says = refused(&config);
    let words = "a slice of transformer.h.0.mlp.c_fc.weight has an odd number of rows or columns";
    assert!(says.starts_with("parallel.tensor is 2") && says.contains(words), "{says}");
    assert!(says.contains("train.base = \"int8\", or it to 1"), "{says}");
    config.train = TrainConfig::default();
    let own = Trainer::builder(config.clone()).model(Model::new(shape_of(&config).expect("ours")));
    let says = own.start().await.map(drop).expect_err("it is not the config's").to_string();
    assert!(says.contains("parallel.slices is for a model that the config names"), "{says}");
}

/// A plan shows the size of pieces. Where whole layers fit, it says what pieces cost.
#[test]
fn a_plan_shows_pieces() {
    let of = |more: &[&str]| {
        let sets = ["data.train=random", "parallel.slices=4"].iter().chain(more);
        let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
        good(&[&["plan"], &sets[..]].concat())
    };
    let says = of(&["parallel.tensor=4"]);
    assert!(says.contains("largest piece"), "{says}");
    let words = "whole layers fit: parallel.tensor = 1 moves";
    assert!(says.contains(words), "{says}");
    assert!(!of(&["parallel.tensor=4", "device.memory=1KB"]).contains(words));
    assert!(!of(&[]).contains("piece"));
}

/// A plan names the layers and pieces of each device, whose weights are those of one device, and
/// the bytes of its link.
#[test]
fn a_plan_shows_the_part_of_each_device() {
    let of = |more: &[&str]| {
        let sets =
            ["data.train=random", "model.layers=2", "parallel.slices=4", "parallel.tensor=2"];
        let sets: Vec<&str> = sets.iter().chain(more).flat_map(|set| ["--set", set]).collect();
        good(&[&["plan"], &sets[..]].concat())
    };
    let parts = |more: &[&str]| {
        let event: serde_json::Value =
            serde_json::from_str(&of(&[&["log.format=json"], more].concat())).expect("an event");
        let list = |key: &str| event[key].as_array().expect("a list").clone();
        let moved =
            list("links").iter().map(|link| link["upload_bytes"].as_u64()).sum::<Option<u64>>();
        assert_eq!(moved, event["upload_bytes"].as_u64());
        list("parts")
    };
    let [whole] = &parts(&[])[..] else { panic!("one device") };
    let layers = whole["layers"].as_array().expect("a list");
    let pieces = layers.iter().filter(|one| one["piece"].is_u64()).count();
    assert!(pieces >= 6 && pieces < layers.len(), "{layers:?}");
    for more in [&["device.count=2"][..], &["device.count=3", "schedule.kind=1f1b"]] {
        let parts = parts(more);
        let mut found = Vec::new();
        let mut bytes = 0;
        for part in &parts {
            let own = part["layers"].as_array().expect("a list");
            assert!(!own.is_empty() && own.len() < layers.len());
            found.extend(own.iter().cloned());
            bytes += part["weight_bytes"].as_u64().expect("a number");
        }
        found.sort_by_key(|one| (one["layer"].as_u64(), one["piece"].as_u64()));
        assert_eq!(&found, layers);
        assert_eq!(Some(bytes), whole["weight_bytes"].as_u64());
    }
    let says = of(&["device.count=2"]);
    assert!(
        says.contains("  part of cpu1") && says.contains("bytes of weights, by way of"),
        "{says}"
    );
    assert!(says.contains("layers 1, 2.1,"), "{says}");
}

/// Attention may be in more pieces than a half, and in as many as the feed-forward.
#[test]
fn digests_do_not_depend_on_pieces_of_attention() {
    // Attention is as large as the feed-forward, and is in as many pieces.
    let of = |tensor| {
        let mut config = config(&case(), &Ways { tensor, ..relay() });
        config.model.intermediate = Some(32);
        run(config, 2).1.weights_digest
    };
    assert_eq!(of(4), of(1));
    assert_eq!(of(2), of(1));
}
