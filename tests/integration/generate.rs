//! Generation: greedy decoding gives transformers' tokens, sampling follows its seed, and a model
//! takes the memory that its plan said.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::Config;
use l2l::config::{Deal, ScheduleKind, StashPlace, Transfer};
use l2l::inference::{Ended, Generator, Room, Sampling, Then};
use serde_json::Value;

const MOST: usize = 64;

fn goldens(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/generate").join(family)
}

fn config(family: &str) -> Config {
    let mut config = Config::default();
    config.model.path = Some(goldens(family));
    config.step.micro_batch = 2;
    config
}

fn golden(family: &str) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let text = fs::read_to_string(goldens(family).join("golden.json")).expect("it is committed");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let lists = |key: &str| serde_json::from_value(golden[key].clone()).expect("lists of tokens");
    (lists("prompts"), lists("greedy"))
}

fn room(prompts: &[Vec<u32>], most: usize) -> Room {
    let prompt = prompts.iter().map(Vec::len).max().expect("a prompt");
    Room { prompts: prompts.len(), prompt, tokens: prompt + most }
}

async fn generated(
    config: Config,
    prompts: &[Vec<u32>],
    how: Sampling,
    ends: &[u32],
) -> Vec<(Vec<u32>, Option<Ended>)> {
    let mut generator = Generator::start(config, room(prompts, MOST)).await.expect("good");
    let mut all = vec![(Vec::new(), None); prompts.len()];
    let each = |prompt: usize, token, ended| {
        all[prompt].0.push(token);
        all[prompt].1 = ended;
        Then::GoOn
    };
    generator.generate(prompts, MOST, how, ends, each).await.expect("good prompts");
    generator.stop().await.expect("a clean end");
    all
}

#[tokio::test]
async fn greedy_text_is_transformers() {
    for family in [
        "cohere",
        "cohere2",
        "ernie4_5",
        "gemma2",
        "glm4",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "helium",
        "llama",
        "ministral3",
        "mistral",
        "olmo3",
        "opt",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_text",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "gemma4_text",
        "gemma4_text-inputs",
        "qwen3_next",
    ] {
        let (prompts, greedy) = golden(family);
        let found = generated(config(family), &prompts, Sampling::default(), &[]).await;
        for ((found, ended), expected) in found.iter().zip(&greedy) {
            assert_eq!(found, expected, "{family}");
            assert_eq!(*ended, Some(Ended::Length));
        }
        // It is the same one by one, and with other schedules, stash places and channel depths.
        let mut other = config(family);
        other.schedule.kind = ScheduleKind::Resident;
        other.schedule.recompute = false.into();
        other.schedule.bundles = (family == "qwen2_moe").then_some(1);
        other.stash.place = StashPlace::Device;
        other.channels.weights = 1;
        other.channels.stash = 1;
        other.step.micro_batch = 1;
        let found = generated(other, &prompts[1..2], Sampling::default(), &[]).await;
        assert_eq!(found[0].0, greedy[1], "{family}");
    }
}

/// Families whose blocks can be cut, with the number of slices.
const SLICED: [(&str, u32); 10] = [
    ("cohere", 2),
    ("cohere2", 2),
    ("gpt2", 3),
    ("gpt_neox", 3),
    ("granite", 2),
    ("llama", 2),
    ("ministral3", 2),
    ("opt", 3),
    ("smollm3", 2),
    ("starcoder2", 2),
];

/// The slices of a block have their columns of the KV cache, and pieces have parts of it.
#[tokio::test]
async fn text_is_the_same_in_slices_and_in_pieces() {
    for (family, slices) in SLICED {
        let (prompts, greedy) = golden(family);
        let are_beside = ["cohere", "cohere2", "gpt_neox"].contains(&family);
        let most = if are_beside { 1 } else { slices };
        for tensor in [1, most] {
            let mut config = config(family);
            (config.parallel.slices, config.parallel.tensor) = (slices, tensor);
            let found = generated(config, &prompts, Sampling::default(), &[]).await;
            for ((found, _), expected) in found.iter().zip(&greedy) {
                assert_eq!(found, expected, "{family} {tensor}");
            }
        }
    }
}

/// Experts that the few tokens of a step did not choose are not uploaded.
#[tokio::test]
async fn text_is_the_same_without_idle_experts() {
    for family in ["gpt_oss", "qwen2_moe"] {
        let (prompts, greedy) = golden(family);
        let mut apart = config(family);
        apart.schedule.bundles = Some(1);
        for count in [1, prompts.len()] {
            let prompts = &prompts[..count];
            let found = generated(apart.clone(), prompts, Sampling::default(), &[]).await;
            for ((text, _), expected) in found.iter().zip(&greedy) {
                assert_eq!(text, expected, "{family} {count}");
            }
        }
    }
}

#[tokio::test]
async fn text_is_the_same_on_several_devices() {
    let (prompts, greedy) = golden("llama");
    for (kind, deal) in [
        (ScheduleKind::Relay, Deal::Layers),
        (ScheduleKind::Relay, Deal::Sequences),
        (ScheduleKind::Gpipe, Deal::Layers),
    ] {
        let mut other = config("llama");
        other.schedule.kind = kind;
        (other.parallel.deal, other.parallel.groups) = (deal, 2);
        other.device.count = Some(2);
        (other.step.batch, other.step.micro_batch) = (2, 1);
        let found = generated(other, &prompts, Sampling::default(), &[]).await;
        let texts: Vec<&Vec<u32>> = found.iter().map(|(text, _)| text).collect();
        assert_eq!(texts, greedy.iter().collect::<Vec<_>>(), "{kind:?} {deal:?}");
    }
    // Blocks in shards, and whole where one of the devices has no sequence.
    let mut sharded = config("llama");
    (sharded.parallel.deal, sharded.parallel.groups) = (Deal::Sequences, 2);
    (sharded.parallel.transfer, sharded.device.count) = (Transfer::Sharded, Some(2));
    (sharded.step.batch, sharded.step.micro_batch) = (2, 1);
    for count in [2, 1] {
        let found = generated(sharded.clone(), &prompts[..count], Sampling::default(), &[]).await;
        for ((text, _), expected) in found.iter().zip(&greedy) {
            assert_eq!(text, expected, "{count}");
        }
    }
}

#[tokio::test]
async fn a_seed_draws_the_same_and_ends_end() {
    let (prompts, greedy) = golden("llama");
    let how =
        |seed| Sampling { temperature: 1.0, top_k: 20, top_p: 0.9, seed, ..Sampling::default() };
    let first = generated(config("llama"), &prompts, how(1), &[]).await;
    assert_eq!(first, generated(config("llama"), &prompts, how(1), &[]).await);
    assert_ne!(first, generated(config("llama"), &prompts, how(2), &[]).await);
    let end = greedy[1][9];
    let at = greedy[1].iter().position(|&token| token == end).expect("it is there");
    let ended = generated(config("llama"), &prompts, Sampling::default(), &[end]).await;
    assert_eq!(ended[1].0, greedy[1][..=at]);
    assert_eq!(ended[1].1, Some(Ended::EndOfText));
    for ((found, _), expected) in ended.iter().zip(&greedy) {
        assert_eq!(found[..], expected[..found.len()], "the others go on as they would");
    }
}

/// With the KV cache and the stash on the host, device memory does not grow with layers.
#[test]
fn the_plan_names_the_memory() {
    let plan = |layers: usize| {
        let mut config = Config::default();
        config.model.layers = Some(layers);
        let room = Room { prompts: 3, prompt: 10, tokens: 50 };
        Generator::plan(&config, room).expect("good")
    };
    let few = plan(4);
    let many = plan(40);
    assert_eq!(few.device_bytes(), many.device_bytes());
    let memory = |plan: &l2l::Plan| {
        let term = plan.host.iter().find(|term| term.name == "kv_cache").expect("a term");
        term.bytes
    };
    // Keys and values of 256 channels, of 50 positions of 3 sequences.
    assert_eq!(
        (memory(&few), memory(&many)),
        (4 * 2 * 256 * 50 * 3 * 4, 40 * 2 * 256 * 50 * 3 * 4)
    );
    assert!(many.host.iter().all(|term| term.name != "optimizer_states" || term.bytes == 0));
}

#[tokio::test]
async fn what_does_not_fit_is_refused() {
    let (prompts, _) = golden("gpt2");
    let refused = async |room| match Generator::start(config("gpt2"), room).await {
        Ok(_) => panic!("{room:?}"),
        Err(error) => error.to_string(),
    };
    let long = Room { prompts: 1, prompt: 50, tokens: 5000 };
    assert!(refused(long).await.contains("positions"));
    assert!(refused(Room { prompts: 0, prompt: 1, tokens: 2 }).await.contains("room"));
    let mut generator = Generator::start(config("gpt2"), room(&prompts, 4)).await.expect("good");
    let how = Sampling::default();
    let bad = Sampling { top_p: 0.0, ..how };
    let mut refused = async |prompts: &[Vec<u32>], most, how| {
        let done = generator.generate(prompts, most, how, &[], |_, _, _| Then::GoOn).await;
        done.expect_err("bad").to_string()
    };
    assert!(refused(&prompts, 5, how).await.contains("together (Room::tokens)"));
    assert!(refused(&[vec![]], 1, how).await.contains("has 0 tokens, and there is room for 1 to"));
    assert!(refused(&[vec![5000]], 1, how).await.contains("vocabulary"));
    assert!(refused(&prompts, 1, bad).await.contains("top-p"));
    generator.stop().await.expect("nothing was done");
}
