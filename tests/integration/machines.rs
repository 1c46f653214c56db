//! `l2l plan --machine`: forecasts for machines that are not at hand.

use std::fs;

use serde_json::Value;

use crate::program::{events, good, output};

const SMALL: [&str; 9] = [
    "plan",
    EMPTY,
    "--set",
    "model.preset=llama-1b",
    "--set",
    "device.dtype=f16",
    "--set",
    "step.batch=16",
    "--machine",
];

/// A config without keys.
const EMPTY: &str = "/dev/null";

/// The rows of a comparison.
fn rows(arguments: &[&str]) -> Vec<Value> {
    events(&good(&[&SMALL[..], arguments, &["--format", "json"]].concat()))
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} of {row}"))
}

/// Of an H100 only the rates are given, and none of them comes from these rows; what was measured
/// is in benches/GPU.md. Rows of BERT wait longer than is foretold: docs/machines.md says why.
#[test]
fn the_speeds_of_an_h100_are_within_a_tenth_of_those_measured() {
    let folder = tempfile::tempdir().expect("a place for files");
    let no_copies = folder.path().join("no-copies.toml");
    let h100 = include_str!("../../machines/h100.toml");
    fs::write(&no_copies, h100.replace("54.7GB/s", "100TB/s")).expect("written");
    let no_copies = no_copies.to_str().expect("UTF-8");
    let of = |machine: &str, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        // At the commit that was measured, all boundaries waited on the host.
        let common = ["data.train=random", "device.dtype=bf16", "stash.place=host"];
        let common: Vec<&str> = common.iter().flat_map(|set| ["--set", *set]).collect();
        let recomputes = ["--set", "schedule.recompute=true", "--set", "model.dropout=0"];
        let more = [&recomputes[..], &["--machine", machine, "--format", "json"]].concat();
        let row = events(&good(&[&["plan", EMPTY], &sets[..], &common, &more].concat()));
        [number(&row[0], "tokens_per_second"), 1.0 - number(&row[0], "computes")]
    };
    let llama = [
        "model.preset=llama-7b",
        "model.intermediate=14336",
        "model.kv_heads=8",
        "model.vocabulary=8192",
        "data.sequence_length=2048",
        "step.batch=32",
    ];
    let bert = ["model.preset=bert-large", "data.sequence_length=128", "step.batch=256"];
    for (machine, sets, [layers, micro], measured, waits) in [
        ("h100", &llama[..], ["model.layers=16", "step.micro_batch=4"], 19_952.0, 0.05),
        ("h100", &llama, ["model.layers=3", "step.micro_batch=4"], 90_039.0, 0.18),
        ("h100", &llama, ["model.layers=6", "step.micro_batch=8"], 49_649.0, 0.105),
        (no_copies, &llama, ["model.layers=3", "step.micro_batch=4"], 100_805.0, 0.095),
        ("h100", &bert, ["model.layers=24", "step.micro_batch=64"], 105_930.0, 0.126),
        ("h100", &bert, ["model.layers=24", "step.micro_batch=256"], 75_791.0, 0.47),
    ] {
        let [speed, waited] = of(machine, &[sets, &[layers, micro]].concat());
        assert!((speed / measured - 1.0).abs() < 0.1, "{layers} {micro}: {speed} of {measured}");
        assert!((waited - waits).abs() < 0.1, "{layers} {micro}: waits {waited} of {waits}");
    }
}

/// A GPU that waits for copies between layers: the plan says what keeps them there and, with rates,
/// which micro-batch would be faster.
#[test]
fn one_micro_batch_a_layer_is_remarked() {
    let of = |sets: &[&str]| {
        let common = ["device.kind=cuda", "device.dtype=f16", "model.preset=bert-large"];
        let step = ["data.train=random", "data.sequence_length=128", "step.batch=256"];
        let more = ["step.micro_batch=256", "schedule.recompute=true", "model.dropout=0"];
        let all = [&common[..], &step, &more, sets].concat();
        let all: Vec<&str> = all.iter().flat_map(|set| ["--set", *set]).collect();
        let rates = ["--forecast", "--tflops", "90", "--link-gbps", "12", "--host-gbps", "60"];
        let json = ["--format", "json"];
        events(&good(&[&["plan", EMPTY], &all[..], &rates, &json].concat())).remove(0)
    };
    let host = of(&["stash.place=host"]);
    let remark = host["remark"].as_str().expect("a remark");
    assert!(remark.contains("with stash.place = \"auto\" they stay"), "{remark}");
    let faster = &host["faster_micro_batch"];
    assert_eq!(faster["micro_batch"], 64);
    assert!(number(faster, "step_seconds") < 0.98 * number(&host, "step_seconds"));
    let auto = of(&[]);
    assert_eq!((&auto["remark"], &auto["faster_micro_batch"]), (&Value::Null, &Value::Null));
    assert!(number(&auto, "step_seconds") < 0.75 * number(&host, "step_seconds"));
    let resident = of(&["schedule.kind=resident"]);
    let remark = resident["remark"].as_str().expect("a remark");
    let stays = "with schedule.kind = \"relay\" and stash.place = \"auto\" they stay";
    assert!(remark.contains(stays), "{remark}");
    // What the stash rounds does not stay.
    for (kind, remedy) in [
        ("relay", ": a smaller step.micro_batch hides"),
        ("resident", "\"relay\" with a smaller step.micro_batch hides"),
    ] {
        let rounded = of(&["stash.dtype=int8", &format!("schedule.kind={kind}")]);
        let remark = rounded["remark"].as_str().expect("a remark");
        assert!(remark.contains(remedy), "{remark}");
    }
}

#[test]
fn machines_and_layouts_are_compared() {
    let found = rows(&["8x4090", "h100", "v100-512gb", "8xh100"]);
    assert_eq!(found.len(), 4);
    let speeds: Vec<f64> = found.iter().map(|row| number(row, "tokens_per_second")).collect();
    assert!(speeds.is_sorted_by(|a, b| a >= b), "{speeds:?}");
    assert_eq!(found[0]["machine"], "8 x H100 80 GB, 2 TB");
    for row in &found {
        assert_eq!(row["fits"], true);
        let shares = row["waits"].as_object().expect("waits").values();
        let waits: f64 = shares.map(|share| share.as_f64().expect("a share")).sum();
        let all = number(row, "computes") + waits;
        // Waits below half a percent are left out.
        assert!((0.95..1.001).contains(&all), "{row}");
        assert_eq!(row["tokens_per_price"], Value::Null);
        // What computes most of the time is bound by that, and a path has one operation at a time.
        let bound = row["bound_by"].as_object().expect("lanes");
        let shares = bound.values().map(|share| share.as_f64().expect("a share"));
        let on_path: f64 = shares.sum();
        assert!((0.99..1.001).contains(&on_path), "{row}");
        let computes = bound.get("compute").and_then(Value::as_f64).unwrap_or(0.0);
        assert!(computes >= number(row, "computes") - 0.6, "{row}");
        let is_measured = row["machine"] == "H100 80 GB, 128 GB";
        assert_eq!(row["rates"], if is_measured { "measured" } else { "assumed" });
    }
    // With layouts: the config's own is among them, and the fastest comes first.
    let layouts = rows(&["8xh100", "--layouts"]);
    let own = |row: &&Value| row["layout"] == "relay, layers dealt";
    let own_row = layouts.iter().find(own).expect("the config's own");
    assert_eq!(own_row["step_seconds"], found[0]["step_seconds"]);
    assert!(layouts.len() > 3);
    assert!(number(&layouts[0], "tokens_per_second") >= speeds[0]);
    // Eight links ask for more than the host's memory moves.
    let alone = rows(&["h100"]);
    let gained = speeds[0] / number(&alone[0], "tokens_per_second");
    assert!((1.0..8.0).contains(&gained), "{gained}");
}

/// The table as CSV has what the events have, and the picture is of the fastest row's step.
#[test]
fn a_comparison_is_a_table_and_a_picture() {
    let folder = tempfile::tempdir().expect("a place for files");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let [table, picture] = [at("rows.csv"), at("step.json")];
    let more = ["h100", "v100-512gb", "--csv", &table, "--trace", &picture];
    let found = rows(&more);
    let mut reader = csv::Reader::from_path(&table).expect("a table");
    let heads = reader.headers().expect("names").clone();
    let lines: Vec<csv::StringRecord> = reader.records().map(|line| line.expect("a row")).collect();
    assert_eq!(lines.len(), found.len());
    for (line, row) in lines.iter().zip(&found) {
        let cell = |name: &str| {
            let at = heads.iter().position(|head| head == name).expect(name);
            line[at].to_owned()
        };
        assert_eq!(cell("machine"), row["machine"].as_str().expect("text"));
        assert_eq!(cell("step_seconds"), row["step_seconds"].to_string());
        assert_eq!(cell("bound_by compute"), row["bound_by"]["compute"].to_string());
        assert_eq!(cell("tokens_per_price"), "");
    }
    let text = fs::read_to_string(&picture).expect("a timeline");
    let events: Vec<Value> = serde_json::from_str(&text).expect("an array");
    let name = events[0]["args"]["name"].as_str().expect("a name");
    assert!(name.starts_with("H100 80 GB") && name.contains("in virtual time"), "{name}");
    assert!(events.iter().any(|event| event["ph"] == "X" && event["cat"] == "backward"));
    // Where nothing fits there is no step.
    let refused = output(
        &[&SMALL[..], &["h100", "--set", "step.batch=100000", "--trace", &picture]].concat(),
    );
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn what_a_machine_lacks_is_said() {
    let folder = tempfile::tempdir().expect("a place for files");
    let path = folder.path().join("small.toml");
    let small = include_str!("../../machines/2x4090.toml");
    let write = |text: String| fs::write(&path, text).expect("written");
    let path = path.to_str().expect("UTF-8");
    let one = |text: String| {
        write(text);
        rows(&[path, "h100"]).into_iter().find(|row| row["machine"] != "H100 80 GB, 128 GB")
    };
    let why = |text: String| one(text).expect("a row")["why_not"].to_string();
    assert!(why(small.replace("\"120GB\"", "\"2GB\"")).contains("the host needs"));
    assert!(why(small.replace("\"22.5GB\"", "\"20MB\"")).contains("a device needs"));
    let no_f16 = why(small.replace("f16 = \"150TFLOP/s\", ", ""));
    assert!(no_f16.contains("device.products.f16 has no such key"), "{no_f16}");
    // A price gives tokens for it.
    let priced = one(small.replace("name =", "price_per_hour = 2.0\nname =")).expect("a row");
    let expected = number(&priced, "tokens_per_second") * 1800.0;
    assert!((number(&priced, "tokens_per_price") / expected - 1.0).abs() < 1e-9);
    // For people, in columns; and a script can ask whether it fits.
    write(small.replace("\"120GB\"", "\"2GB\""));
    let text = good(&[&SMALL[..], &[path, "h100"]].concat());
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("machine") && lines[0].contains("tokens/s"), "{text}");
    assert!(lines[2].contains("no: the host needs"), "{text}");
    let checked = output(&[&SMALL[..], &[path, "--check"]].concat());
    assert_eq!(checked.status.code(), Some(2));
    good(&[&SMALL[..], &[path, "h100", "--check"]].concat());
}

#[test]
fn bad_machines_are_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let path = folder.path().join("bad.toml");
    fs::write(&path, "name = \"a\"\nspeed = 3\n").expect("written");
    let bad = path.to_str().expect("UTF-8");
    for (arguments, says) in [
        (&["10xh100"][..], "it is no name of a machine either: h100, 8xh100"),
        (&[bad], "unknown field `speed`"),
        (&["h100", "--draw", "a.svg"], "cannot be used with"),
        (&["h100", "--tflops", "3"], "cannot be used with"),
        (&["h100", "--set", "step.micro_batch=0"], "step.micro_batch"),
        (&["v100-512gb", "--set", "device.dtype=bf16"], "device.products.bf16"),
    ] {
        let output = output(&[&SMALL[..], arguments].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(says), "{says}: {error}");
    }
}

/// A thousand hosts are one ring in virtual time, if their groups are alike. What they cannot do is
/// refused as a run would refuse it.
#[test]
fn a_thousand_hosts_are_planned() {
    let of = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        let more = ["--set", "device.dtype=bf16", "--set", "data.train=random"];
        let machine = ["--machine", "1000xh100", "--format", "json"];
        output(&[&["plan", EMPTY], &sets[..], &more, &machine].concat())
    };
    let llama = ["model.preset=llama-7b", "step.micro_batch=1", "data.sequence_length=2048"];
    let many = of(&[&llama[..], &["step.batch=1000", "parallel.groups=1000"]].concat());
    let row = &events(&String::from_utf8_lossy(&many.stdout))[0];
    assert_eq!(row["fits"], true, "{row}");
    // Each of some hundred exchanges has a message from every host to every other one.
    let messages = number(row, "messages");
    assert_eq!(messages % (1000.0 * 999.0), 0.0, "{row}");
    assert!((50.0..200.0).contains(&(messages / (1000.0 * 999.0))), "{row}");
    assert!(number(&row["waits"], "fabric") > 0.2, "{row}");
    // All hosts send all others the gradients of their rows of the embedding.
    let long = of(&[&llama[..], &["step.batch=4000", "parallel.groups=1000"]].concat());
    let row = &events(&String::from_utf8_lossy(&long.stdout))[0];
    assert!(row["why_not"].as_str().is_some_and(|why| why.contains("the host needs")), "{row}");
    let small = ["model.preset=gpt2", "step.batch=1000", "parallel.groups=1000"];
    for (refused, says) in [
        (of(&[&llama[..], &["step.batch=1000"]].concat()), "1000 processes share each step"),
        (of(&[&small[..], &["step.micro_batch=1"]].concat()), "has that many parts of 16384"),
    ] {
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && error.contains(says), "{says}: {error}");
    }
}
