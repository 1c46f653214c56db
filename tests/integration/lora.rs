//! Adapters: PEFT's training on each family, its files, and what is left of them after a merge.
//! `goldens/peft_lora.py` makes what is compared with.

use std::path::{Path, PathBuf};

use l2l::config::{LoraConfig, ScheduleKind, StashPlace};
use l2l::Config;
use serde_json::Value;

use crate::pytorch::{self, check, golden_of};

const CASES: [&str; 10] = [
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
];

fn adapters(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/lora").join(name)
}

/// A case that trains PEFT's adapters, and its golden.
fn case(name: &str) -> (Config, Value) {
    let (mut config, _) = pytorch::case(name);
    let golden = golden_of(&adapters(name));
    config.optimizer.clip_norm = None;
    config.train.lora = Some(LoraConfig { path: Some(adapters(name)), ..LoraConfig::default() });
    (config, golden)
}

#[tokio::test]
async fn every_family_is_pefts() {
    for name in CASES {
        let (config, golden) = case(name);
        let relay = check(config.clone(), &golden).await;
        let mut resident = config;
        resident.schedule.kind = ScheduleKind::Resident;
        resident.schedule.recompute = false.into();
        resident.stash.place = StashPlace::Device;
        resident.device.threads = Some(1);
        assert_eq!(check(resident, &golden).await, relay, "{name}");
    }
}
