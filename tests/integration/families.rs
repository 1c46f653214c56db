//! Models of every family, in ways drawn at random: the same bits.

use l2l::config::{EpsTier, StashDtype};
use l2l::{Config, Trainer, shape_of};
use proptest::prelude::*;
use safetensors::SafeTensors;

use crate::exact::run;
use crate::pytorch::{self, EXPERTS, FAMILIES};
use crate::ways::{baseline, ways};
use crate::whole;

/// Cases of PEFT's adapters: a model, and `-linear` where all its linear layers have adapters,
/// `-patterns` where ranks and alphas differ by module, or `-layers` where only some layers have
/// adapters.
pub(crate) const ADAPTED: [&str; 42] = [
    "tied",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "bert",
    "roberta",
    "distilbert",
    "bert-classes",
    "roberta-classes",
    "bert-linear",
    "roberta-linear",
    "distilbert-linear",
    "bert-classes-linear",
    "opt",
    "llama-patterns",
    "bert-patterns",
    "qwen2-layers",
    "olmo2",
    "starcoder2",
    "gpt_oss",
    "gemma2",
    "granite",
    "glm4",
    "glm",
    "cohere",
    "cohere2",
    "ministral",
    "gpt_neox",
    "ministral3",
    "modernbert-linear",
    "modernbert-classes",
    "qwen3_5_text",
    "qwen3_5_text-tied",
    "seed_oss",
    "ernie4_5",
    "helium",
    "electra-classes",
    "electra-small-classes",
    "gemma4_text",
    "gemma4_text-inputs",
    "qwen3_next",
];

fn all() -> Vec<&'static str> {
    FAMILIES.into_iter().chain(EXPERTS).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 500 } else { 60 })
    })]

    #[test]
    fn every_family_has_the_same_bits_in_every_way(
        name in prop::sample::select(all()),
        ways in ways(),
    ) {
        const STEPS: usize = 2;
        let (mut config, _) = pytorch::case(name);
        let shape = shape_of(&config).expect("a case of ours");
        let turns = config.step.batch.div_ceil(config.step.micro_batch) as u32;
        let has_experts = shape.experts.is_some();
        // Behind the blocks come a norm and the head.
        let ways = ways.for_sizes(shape.layers as u32 + 2, turns, 1);
        baseline().set(&mut config, has_experts);
        let (expected, reference) = run(config.clone(), STEPS);
        ways.set(&mut config, has_experts);
        config.eps.tier = if ways.on_file { EpsTier::File } else { EpsTier::Memory };
        let (bits, summary) = run(config, STEPS);
        prop_assert_eq!(bits, expected, "{}", name);
        prop_assert_eq!(summary.weights_digest, reference.weights_digest, "{}", name);
    }
}

/// The error of a start.
async fn refused(config: Config) -> String {
    let started = Trainer::start(config).await.map(|_| ());
    started.expect_err("it is refused").to_string()
}

/// A step changes each tensor but the numbers that multiply the outputs of blocks.
#[tokio::test]
async fn constants_are_not_trained() {
    const CONSTANT: &str = "layer_scalar";
    let (mut config, _) = pytorch::case("gemma4_text");
    let from = config.model.path.clone().expect("a case has one");
    let folder = tempfile::tempdir().expect("a place for files");
    let mut batches = l2l::data::Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    trainer.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
    trainer.save(folder.path()).await.expect("a directory of ours");
    trainer.stop().await.expect("nothing fails here");
    let bytes = [from.as_path(), folder.path()].map(|place: &std::path::Path| {
        std::fs::read(place.join("model.safetensors")).expect("a directory has them")
    });
    let [from, to] = bytes.each_ref().map(|b| SafeTensors::deserialize(b).expect("it is whole"));
    let mut constants = 0;
    for (name, tensor) in from.tensors() {
        let is_same = to.tensor(&name).expect("it is written").data() == tensor.data();
        assert_eq!(is_same, name.ends_with(CONSTANT), "{name}");
        constants += usize::from(is_same);
    }
    assert_eq!(constants, 4);
    config.train.only = vec![CONSTANT.into()];
    let error = refused(config).await;
    assert!(error.contains("train.only leaves nothing to train"), "{error}");
}

/// What is packed for the stash has blocks that fit both widths.
#[tokio::test]
async fn narrow_embeddings_have_a_width_of_their_own() {
    let (mut config, _) = pytorch::case("electra-small-classes");
    (config.stash.dtype, config.stash.block_size) = (StashDtype::Int8, 16);
    let error = refused(config).await;
    assert!(error.contains("does not divide the model's width of 24: set 12"), "{error}");
}
