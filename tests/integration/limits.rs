//! Memory limits of the system: a config is refused before it starts, or it finishes and takes no
//! more memory than its plan says. No run is killed for something that was known before it.

use std::process::{Command, Output};

use crate::program::{events, good, of_kind};
use proptest::prelude::*;
use serde_json::Value;

/// The program under a limit of data, in KiB: what `RLIMIT_DATA` counts.
fn limited(kibibytes: u64, arguments: &[String]) -> Output {
    Command::new("sh")
        .args(["-c", "ulimit -d \"$1\"; shift; exec \"$@\"", "sh", &kibibytes.to_string()])
        .arg(env!("CARGO_BIN_EXE_l2l"))
        .args(arguments)
        .output()
        .expect("there is a shell")
}

fn arguments(command: &str, config: &str, settings: &[(&str, String)]) -> Vec<String> {
    let mut all: Vec<String> = [command, config, "--format", "json"].map(String::from).into();
    for (key, value) in settings {
        all.extend(["--set".to_string(), format!("{key}={value}")]);
    }
    all
}

fn config_of_cases() -> ProptestConfig {
    let cases = if crate::whole() { 100 } else { 20 };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

proptest! {
    #![proptest_config(config_of_cases())]

    #[test]
    fn a_config_is_refused_or_finishes(
        (layers, heads, size) in (1..=10_usize, 1..=4_usize, 1..=9_usize),
        (vocabulary, positions) in (2..=20_000_usize, 2..=64_usize),
        (batch, micro_batch) in (1..=8_usize, 1..=4_usize),
        (recompute, place) in (
            prop::sample::select(vec!["true", "false", "\"attention\""]),
            prop::sample::select(vec!["device", "host"]),
        ),
        (tier, clip) in (prop::sample::select(vec!["memory", "file"]), prop::bool::ANY),
        mebibytes in 150..=500_u64,
    ) {
        let folder = tempfile::tempdir().expect("a place for files");
        let mut settings = vec![
            ("data.train", "random".to_string()),
            ("model.layers", layers.to_string()),
            ("model.hidden", (heads * 16 * size).to_string()),
            ("model.heads", heads.to_string()),
            ("model.vocabulary", vocabulary.to_string()),
            ("model.positions", positions.to_string()),
            ("step.batch", batch.to_string()),
            ("step.micro_batch", micro_batch.min(batch).to_string()),
            ("step.steps", "2".to_string()),
            ("schedule.recompute", recompute.to_string()),
            ("stash.place", place.to_string()),
            ("eps.tier", tier.to_string()),
            ("eps.path", folder.path().join("eps").display().to_string()),
        ];
        if clip {
            settings.push(("optimizer.clip_norm", "0.5".to_string()));
        }
        let file = folder.path().join("run.toml");
        std::fs::write(&file, "").expect("it is ours");
        let config = file.display().to_string();
        let run = limited(mebibytes << 10, &arguments("train", &config, &settings));
        let said = String::from_utf8_lossy(&run.stderr);
        match run.status.code() {
            Some(2) => prop_assert!(said.contains("the plan needs"), "{said}"),
            Some(0) => {
                let planned = events(&good(&arguments("plan", &config, &settings)));
                let total = |kind: &str| of_kind(&planned, "plan")[0][kind]["total"].as_u64();
                let planned = total("device_bytes").zip(total("host_bytes"));
                let (device, host) = planned.expect("numbers");
                let told = events(&String::from_utf8_lossy(&run.stdout));
                let resident = |step: &&Value| step["host_rss_bytes"].as_u64().expect("a number");
                let most = of_kind(&told, "step").iter().map(resident).max().expect("two steps");
                prop_assert!(most <= device + host + (150 << 20), "{most} of {device} and {host}");
            }
            code => prop_assert!(false, "{code:?} under {mebibytes} MiB: {settings:?}\n{said}"),
        }
    }
}

/// Each refusal names the largest term, and what would fit.
#[test]
fn a_refusal_says_what_would_fit() {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join("run.toml");
    let text = "data.train = \"random\"\nmodel = { layers = 2, hidden = 256, heads = 4 }\n";
    std::fs::write(&file, text).expect("it is ours");
    let config = file.display().to_string();
    let refused = |settings: &[(&str, String)]| {
        let output = crate::program::output(&arguments("train", &config, settings));
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).expect("text")
    };
    let said = refused(&[("device.memory", "32MiB".into()), ("step.micro_batch", "32".into())]);
    let most = said.split("step.micro_batch = ").nth(1).expect(&said);
    let most: u32 = most.split(' ').next().and_then(|most| most.parse().ok()).expect(&said);
    for (micro_batch, code) in [(most, Some(0)), (most + 1, Some(2))] {
        let settings = [
            ("device.memory", "32MiB".to_string()),
            ("step.micro_batch", micro_batch.to_string()),
            ("step.steps", "1".to_string()),
        ];
        let output = crate::program::output(&arguments("train", &config, &settings));
        assert_eq!(output.status.code(), code, "{}", String::from_utf8_lossy(&output.stderr));
    }
    // What is too large is one sequence: smaller chunks of it are what helps.
    let long = |chunk: u32| {
        let all = [
            ("device.memory", "48MiB"),
            ("model.positions", "1024"),
            ("data.sequence_length", "1024"),
            ("step.batch", "1"),
            ("step.micro_batch", "1"),
            ("step.steps", "1"),
        ];
        let all = all.map(|(key, value)| (key, value.to_string()));
        [&all[..], &[("step.chunk_positions", chunk.to_string())]].concat()
    };
    let said = refused(&long(8192));
    assert!(said.contains("make step.micro_batch, step.chunk_positions or channels"), "{said}");
    good(&arguments("train", &config, &long(128)));
    let short = [("device.memory", "1MiB".into()), ("data.sequence_length", "128".into())];
    assert!(!refused(&short).contains("chunk_positions"));
    let said = refused(&[("device.memory", "1MiB".into())]);
    let least = said.split(" bytes is the least that works").next().expect("text");
    let least: u64 = least.rsplit(' ').next().and_then(|l| l.parse().ok()).expect(&said);
    let mut all = vec![("device.memory", least.to_string()), ("step.batch", "1".into())];
    all.extend(["weights", "gradients", "reduced", "stash"].map(|pool| {
        let key = ["channels.weights", "channels.gradients", "channels.reduced", "channels.stash"];
        (key.into_iter().find(|key| key.ends_with(pool)).expect("a pool"), "1".to_string())
    }));
    all.extend([("step.micro_batch", "1".to_string()), ("step.steps", "1".to_string())]);
    good(&arguments("train", &config, &all));
    let files = Command::new("sh")
        .args(["-c", "ulimit -n 40; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_l2l")])
        .args(arguments("train", &config, &[("step.steps", "1".to_string())]))
        .output()
        .expect("there is a shell");
    let said = String::from_utf8_lossy(&files.stderr);
    assert_eq!(files.status.code(), Some(2), "{said}");
    assert!(said.contains("ulimit -n"), "{said}");
}
