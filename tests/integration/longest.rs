//! How long a sequence fits: with the length that a plan names it fits, and with one chunk more it
//! does not.

use l2l::config::{Dtype, ScheduleKind, StashDtype, StashPlace};
use l2l::models::Model;
use l2l::plan::LengthEnd;
use l2l::telemetry::{Forecast, Lane, Rates, Slice};
use l2l::{Config, Plan, model_of, shape_of};

use crate::whole;

const CHUNK: usize = 128;

/// A small model with so many positions, and sequences of one chunk.
fn config(preset: &str, positions: usize) -> Config {
    let kv_heads = if preset == "gpt-small" { "" } else { ", kv_heads = 1" };
    let text = format!(
        "model = {{ preset = \"{preset}\", layers = 3, hidden = 32, heads = 2{kv_heads}, \
         vocabulary = 97 }}\n\
         data.train = \"random\"\nstep = {{ batch = 2, micro_batch = 1 }}"
    );
    let mut config = Config::parse(&text).expect("good");
    config.model.positions = Some(positions);
    config.data.sequence_length = Some(CHUNK);
    config.step.chunk_positions = CHUNK;
    config
}

fn model(config: &Config) -> Model {
    model_of(config, shape_of(config).expect("a shape of ours")).expect("a model of ours")
}

/// The plan, and the bytes that it takes of each device and of the host, in which the devices are.
fn plan(config: &Config, length: usize) -> (Plan, [u64; 2]) {
    let mut config = config.clone();
    config.data.sequence_length = Some(length);
    let plan = Plan::new(&config, &model(&config), &config.update_rule()).expect("a plan of ours");
    let bytes = plan.device_bytes();
    let host = plan.host_bytes() + u64::from(plan.devices()) * bytes;
    (plan, [bytes, host])
}

/// The longest lengths for a device and for a host that have room for sequences of `length`, and
/// for half of what `more` positions take besides.
fn longest(config: &Config, length: usize, more: usize) -> [usize; 2] {
    let (plan_of, bytes) = plan(config, length);
    let (_, over) = plan(config, length + more);
    let rule = config.update_rule();
    let of = |device: Option<u64>, host: Option<u64>| {
        let found = plan_of.longest_sequence(&model(config), &rule, device, host);
        let found = found.expect("a plan for training");
        found.device.or(found.host).expect("a ceiling was given")
    };
    let [device, host] = [0, 1].map(|at| bytes[at].midpoint(over[at]));
    [of(Some(device), None), of(None, Some(host))]
}

fn set_devices(config: &mut Config, devices: u32) {
    config.device.count = Some(devices);
}

#[test]
fn one_chunk_more_does_not_fit() {
    let positions = 25 * CHUNK;
    let mut all = Vec::new();
    for preset in ["gpt-small", "llama-1b", "qwen", "moe-small"] {
        all.push((preset, config(preset, positions)));
    }
    for devices in 2..=3 {
        let mut config = config("llama-1b", positions);
        set_devices(&mut config, devices);
        all.push(("devices", config));
    }
    let llama = || config("llama-1b", positions);
    let mut packed = llama();
    (packed.stash.dtype, packed.stash.block_size) = (StashDtype::Int8, 16);
    let mut saving = llama();
    saving.schedule.recompute = false.into();
    let mut on_device = llama();
    on_device.stash.place = StashPlace::Device;
    let mut half = llama();
    half.device.dtype = Dtype::Bf16;
    let mut resident = llama();
    resident.schedule.kind = ScheduleKind::Resident;
    all.extend([("packed", packed), ("saving", saving), ("on device", on_device)]);
    all.extend([("half", half), ("resident", resident)]);
    let lengths: &[usize] = if whole() { &[2, 7, 23] } else { &[5] };
    for (name, config) in all {
        for &chunks in lengths {
            let found = longest(&config, chunks * CHUNK, CHUNK);
            assert_eq!(found, [chunks * CHUNK; 2], "{name}, {chunks} chunks");
        }
    }
}

/// Less than one chunk fits: the length is not a multiple of one.
#[test]
fn lengths_below_a_chunk_are_found() {
    let mut config = config("llama-1b", 4096);
    config.step.chunk_positions = 2048;
    let [device, host] = longest(&config, 384, 128);
    assert_eq!([device, host], [384; 2]);
    for length in [device, host] {
        assert!(length < 2048);
    }
    let [device, host] = longest(&config, 60, 1);
    assert!((60..64).contains(&device) && host == 60, "{device} {host}");
    // Not even the model's own weights fit.
    let (plan, _) = plan(&config, 128);
    let rule = config.update_rule();
    let none = plan.longest_sequence(&model(&config), &rule, Some(1 << 10), Some(1 << 10));
    let none = none.expect("a plan for training");
    assert_eq!((none.device, none.host, none.first_end().0), (Some(0), Some(0), 0));
}

/// Rotary positions could be more than those of the model; vectors that are learned could not.
#[test]
fn the_first_end_is_found() {
    const CHUNK: usize = 2048; // to a million positions these are few
    let config = |preset: &str| {
        let mut config = config(preset, 8 * CHUNK);
        config.step.chunk_positions = CHUNK;
        config
    };
    let first = |preset: &str, device: u64, host: u64| {
        let config = config(preset);
        let (plan, _) = plan(&config, CHUNK);
        let rule = config.update_rule();
        let found = plan.longest_sequence(&model(&config), &rule, Some(device), Some(host));
        let found = found.expect("a plan for training");
        (found.first_end(), found.tried)
    };
    let much = 1 << 40;
    let whole = (8 * CHUNK, LengthEnd::Model);
    assert_eq!(first("llama-1b", much, much), (whole, 1 << 20));
    assert_eq!(first("gpt-small", much, much), (whole, 8 * CHUNK));
    let llama = config("llama-1b");
    let (_, [device, host]) = plan(&llama, 3 * CHUNK);
    assert_eq!(first("llama-1b", device, much).0, (3 * CHUNK, LengthEnd::Device));
    assert_eq!(first("llama-1b", much, host).0, (3 * CHUNK, LengthEnd::Host));
}

/// Capacities need whole sequences: no longer one is planned.
#[test]
fn what_cannot_be_cut_ends_at_a_chunk() {
    let mut config = config("moe-small", 8 * CHUNK);
    config.experts.capacity_factor = Some(1.0);
    let (plan, _) = plan(&config, CHUNK);
    let found = plan.longest_sequence(&model(&config), &config.update_rule(), None, Some(1 << 40));
    assert_eq!(found.expect("a plan for training").first_end(), (CHUNK, LengthEnd::Model));
}

/// In virtual time one sequence of 16 chunks is shared by four devices, and a chunk that attends to
/// more keys takes longer.
#[test]
fn devices_share_one_sequence_in_virtual_time() {
    let forecast = |devices: u32| {
        let mut config = config("llama-1b", 16 * CHUNK);
        config.model.layers = Some(16);
        config.step.batch = 1;
        config.data.sequence_length = Some(16 * CHUNK);
        config.device.flop_rate = Some("1GFLOP/s".into()); // of each device
        set_devices(&mut config, devices);
        let model = model(&config);
        let rates = Rates::of(&config, &model, 1e9, 1e12, 1e12);
        Forecast::of(&config, &model, &rates).expect("a schedule of ours")
    };
    let alone = forecast(1);
    let four = forecast(4);
    assert!(alone.seconds > 3.4 * four.seconds, "{} {}", alone.seconds, four.seconds);
    let is_first = |slice: &&Slice| {
        let is_forward = slice.phase == Some("forward");
        slice.lane == Lane::Compute && slice.layer == Some(5) && is_forward
    };
    let times: Vec<_> = four.slices.iter().filter(is_first).map(Slice::took).collect();
    assert_eq!(times.len(), 16);
    assert!(times.windows(2).all(|pair| pair[0] < pair[1]), "{times:?}");
    // Each layer takes as long in all as it does on one device.
    let sum = |forecast: &Forecast| -> std::time::Duration {
        let compute = forecast.slices.iter().filter(|slice| slice.lane == Lane::Compute);
        compute.map(Slice::took).sum()
    };
    assert!(sum(&alone).abs_diff(sum(&four)).as_secs_f64() < 1e-3 * alone.seconds);
}

/// The command says the length, and a refusal says it with the bytes of a token.
#[cfg(all(feature = "cli", target_os = "linux"))]
#[test]
fn the_command_and_its_refusals_say_how_long_a_sequence_fits() {
    use std::process::{Command, Output};

    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join("run.toml");
    let text = "model = { preset = \"llama-1b\", layers = 6, hidden = 256, heads = 4, \
                kv_heads = 4, vocabulary = 97, positions = 65536 }\ndata.train = \"random\"\n\
                step = { batch = 1, micro_batch = 1, chunk_positions = 1024 }";
    std::fs::write(&file, text).expect("it is ours");
    let plan = |length: usize, more: &[&str]| -> Output {
        // Of memory, the system leaves this process 400 MB.
        Command::new("sh")
            .args(["-c", "ulimit -v 600000; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_l2l")])
            .args([std::ffi::OsStr::new("plan"), file.as_os_str()])
            .args(["--check", "--set", &format!("data.sequence_length={length}")])
            .args(more)
            .output()
            .expect("there is a shell")
    };
    let told = |output: &Output| String::from_utf8(output.stdout.clone()).expect("text");
    let long = plan(65536, &[]);
    let said = told(&long);
    assert!(!long.status.success() && said.contains("ulimit -v"), "{said}");
    // Hidden states of seven layers and the gradients of two, in floats.
    assert!(said.contains("the stash takes 9"), "{said}");
    let longest = said.split("data.sequence_length = ").nth(1).expect(&said);
    let longest: usize = longest.split(' ').next().and_then(|n| n.parse().ok()).expect(&said);
    assert!(longest > 1024 && longest.is_multiple_of(1024), "{said}");
    assert!(said.contains("longest sequence") && said.contains("the host has memory"), "{said}");
    let fits = plan(longest - 1024, &["--format", "json"]);
    let event: serde_json::Value = serde_json::from_str(&told(&fits)).expect("an event");
    assert!(fits.status.success(), "{event}");
    let found = &event["longest_sequence"];
    assert_eq!((&found["ends"], &found["model"]), (&"host".into(), &65536.into()), "{event}");
    let host = found["host"].as_u64().expect("a length") as usize;
    assert!(host.abs_diff(longest) <= 1024, "{host} {longest}");
    assert!(!plan(longest + 2048, &[]).status.success());
    // A device's memory ends first.
    let limit = ["--set", "device.memory=105MB"];
    let said = told(&plan(12288, &limit));
    let of_device = said.split("data.sequence_length = ").nth(1).expect(&said);
    let of_device: usize = of_device.split(' ').next().and_then(|n| n.parse().ok()).expect(&said);
    assert!(said.contains("for which a device has memory"), "{said}");
    let fits = plan(of_device, &limit);
    assert!(fits.status.success(), "{}", told(&fits));
    assert!(!plan(of_device + 1024, &limit).status.success());
}
