//! Metrics, timelines and reports of the command line agree with the run, and a place that cannot
//! be written is refused before a run starts.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;

use crate::program::{events, good, l2l, output};
use serde_json::Value;
use tempfile::TempDir;

/// A small config, with a comment that a tuned one must keep.
fn config(folder: &TempDir) -> String {
    let path = folder.path().join("config.toml");
    let text = "# of ours\n\
                model = { layers = 3, hidden = 32, heads = 4 }\n\
                data = { train = \"random\", sequence_length = 16 }\n\
                [step]\nbatch = 6\nmicro_batch = 2 # a third\nsteps = 5\n\
                [device]\nlink = \"8MB/s\"\n\
                [channels]\nweights = 1\nstash = 1\n\
                [metrics]\nrun = \"<!--<script></script><b>\\\"x\"\n";
    fs::write(&path, text).expect("a folder of ours");
    path.to_str().expect("UTF-8").into()
}

fn path(folder: &TempDir, name: &str) -> String {
    folder.path().join(name).to_str().expect("UTF-8").into()
}

/// The sum of the series whose lines have this beginning.
fn series(text: &str, begin: &str) -> f64 {
    let values = text.lines().filter(|line| line.starts_with(begin));
    values.map(|line| line.rsplit(' ').next().expect("a value").parse::<f64>().expect("it")).sum()
}

#[test]
fn metrics_timeline_and_report_say_what_the_run_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = path(&folder, "trace.json");
    let report = path(&folder, "report");
    let last = format!("metrics.file={}", path(&folder, "last.prom"));
    let config = config(&folder);
    let arguments = ["train", &config, "--format", "json", "--trace", &trace, "--report", &report];
    let unseen = events(&good(&["train", &config, "--format", "json"]));
    let seen = events(&good(&[&arguments[..], &["--set", &last]].concat()));
    let summary = seen.last().expect("a summary");
    assert_eq!(summary["weights_digest"], unseen.last().expect("a summary")["weights_digest"]);
    let steps: Vec<&Value> = seen.iter().filter(|event| event["event"] == "step").collect();
    let sum = |key: &str| steps.iter().map(|step| step[key].as_f64().expect("some")).sum::<f64>();
    let text = fs::read_to_string(folder.path().join("last.prom")).expect("it is there");
    for (begin, told) in [
        ("l2l_step{", steps.len() as f64),
        ("l2l_loss{", steps[4]["loss"].as_f64().expect("a loss")),
        ("l2l_tokens_total{", sum("tokens")),
        ("l2l_exposed_wait_seconds_total{", sum("exposed_wait_seconds")),
        ("l2l_device_memory_bytes{", steps[4]["device_peak_bytes"].as_f64().expect("some")),
        ("l2l_step_seconds_sum{", sum("seconds")),
    ] {
        let found = series(&text, begin);
        assert!((found - told).abs() <= 0.01 * told.abs(), "{begin}: {found}, told {told}");
    }
    let uploaded =
        "l2l_transfer_bytes_total{run=\"<!--<script></script><b>\\\"x\",direction=\"upload\"} ";
    assert_eq!(series(&text, uploaded), summary["bytes_uploaded"].as_f64().expect("some"));
    assert!(text.contains("state=\"ended\"} 1"));

    let timeline: Vec<Value> =
        serde_json::from_str(&fs::read_to_string(&trace).expect("it is there")).expect("JSON");
    let slices = timeline.iter().filter(|event| event["ph"] == "X").count();
    let counted = series(&text, "l2l_operation_seconds_count{");
    assert_eq!(slices as f64, counted);

    let page = fs::read_to_string(Path::new(&report).join("report.html")).expect("it is there");
    let embedded = page.split("id=\"embedded\">").nth(1).expect("it has its data");
    let embedded = embedded.split("</script>").next().expect("it ends");
    let data: Value = serde_json::from_str(embedded).expect("JSON");
    assert_eq!(data["view"]["run"], "<!--<script></script><b>\"x");
    assert_eq!(data["view"]["step"], 5);
    assert_eq!(data["view"]["state"], "ended");
    let of_step: Vec<u64> = data["view"]["slices"]
        .as_array()
        .expect("slices")
        .iter()
        .map(|slice| slice["step"].as_u64().expect("a step"))
        .collect();
    assert!(!of_step.is_empty() && of_step.iter().all(|&step| step == of_step[0]), "{of_step:?}");
    assert_eq!(
        page.matches("http:").count() + page.matches("https:").count(),
        page.matches("http://www.w3.org").count()
    );
}

/// Each place that cannot be written is named, with exit status 2, before the first step.
#[test]
fn what_cannot_be_written_is_said_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(&folder);
    let missing = path(&folder, "no/such/file");
    let listening = TcpListener::bind("127.0.0.1:0").expect("a port");
    let in_use = listening.local_addr().expect("it has one").to_string();
    let file = format!("metrics.file={missing}");
    let cases: [(&[&str], &str); 8] = [
        (&["--trace", &missing], "--trace"),
        (&["--trace", folder.path().to_str().expect("UTF-8")], "--trace"),
        (&["--report", &config], "--report"),
        (&["--set", &file], "metrics.file"),
        (&["--metrics", &in_use], "metrics.listen"),
        (&["--metrics", "0.0.0.0:0"], "metrics.public"),
        (&["--metrics", "here"], "127.0.0.1:9464"),
        (&["--set", "eps.disk_rate=slow"], "12GB/s"),
    ];
    for (arguments, names) in cases {
        let output = output(&[&["train", &config[..]], arguments].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(names), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty(), "{arguments:?}: a step was made");
    }
}

/// A run that ends well and whose metrics were scraped waits for one more scrape. Without it, the
/// run would look as if it had vanished before its last step.
#[test]
fn a_run_that_ends_well_is_scraped_once_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(&folder);
    let mut child = l2l(&["train", &config, "--format", "json", "--metrics", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs");
    let mut said = BufReader::new(child.stderr.take().expect("it is piped")).lines();
    let address = said.find_map(|line| {
        let line = line.expect("UTF-8");
        Some(line.strip_prefix("live at http://")?.trim_end_matches('/').to_string())
    });
    let address = address.expect("it says where it listens");
    let scrape = || {
        let mut stream = TcpStream::connect(&address).expect("it listens");
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        text
    };
    assert!(!scrape().contains("state=\"ended\"} 1"));
    let mut events = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    let is_summary = |line: &String| line.contains("\"event\":\"summary\"");
    assert!(events.any(|line| is_summary(&line.expect("UTF-8"))), "it ends");
    let last = std::iter::repeat_with(scrape).find(|text| text.contains("state=\"ended\"} 1"));
    assert_eq!(series(&last.expect("it waits for this"), "l2l_step{"), 5.0);
    assert!(child.wait().expect("it is ours").success());
}

/// With `--runbooks`, alerts link their pages at that address.
#[test]
fn runbooks_have_an_address() {
    let folder = tempfile::tempdir().expect("a folder");
    let to = path(&folder, "boards");
    let arguments = ["dashboards", "--to", &to, "--runbooks"];
    good(&[&arguments[..], &["https://example.com/runbooks/"]].concat());
    let alerts = fs::read_to_string(folder.path().join("boards/prometheus/alerts.yml"));
    let alerts = alerts.expect("it is there");
    for line in alerts.lines().filter(|line| line.contains("runbook_url")) {
        let page = line.split("\"https://example.com/runbooks/").nth(1).expect("the address");
        let page = format!("boards/runbooks/{}", page.trim_end_matches('"'));
        assert!(folder.path().join(&page).is_file(), "{page}");
    }
    let refused = output(&[&arguments[..], &["example.com"]].concat());
    assert_eq!(refused.status.code(), Some(2));
}

/// A refused run does not change the report and the timeline of an earlier run.
#[test]
fn what_was_written_before_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(&folder);
    let trace = path(&folder, "trace.json");
    let report = path(&folder, "report");
    let arguments = ["train", &config, "--trace", &trace, "--report", &report];
    good(&arguments);
    let page = path(&folder, "report/report.html");
    let before = [&trace, &page].map(|path| fs::read(path).expect("it is there"));
    let refused = output(&[&arguments[..], &["--set", "device.memory=1KB"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!([&trace, &page].map(|path| fs::read(path).expect("it is there")) == before);
    let same = format!("metrics.file={trace}");
    let refused = output(&[&arguments[..], &["--set", &same]].concat());
    assert_eq!(refused.status.code(), Some(2), "two in one file");
}

#[test]
fn a_step_is_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(&folder);
    let picture = path(&folder, "step.svg");
    let rates = ["--tflops", "1", "--link-gbps", "1", "--host-gbps", "10"];
    good(&[&["plan", &config, "--draw", &picture][..], &rates].concat());
    let drawn = fs::read_to_string(&picture).expect("it is there");
    for lane in ["upload", "compute", "download", "host", "update"] {
        assert!(drawn.contains(&format!(">{lane}</text>")), "{lane}");
    }
    good(&[&["plan", &config, "--draw", &picture][..], &rates].concat());
    assert_eq!(fs::read_to_string(&picture).expect("it is there"), drawn, "time is virtual");
    let output = output(&["plan", &config, "--draw", &picture, "--tflops", "0"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--tflops"));
}

/// A tuned config keeps the user's own text, and trains.
#[test]
fn a_tuned_config_is_the_users_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(&folder);
    let tuned = path(&folder, "tuned.toml");
    // Steps of a third of a second: what other processes take from them is little beside the link.
    let slow = ["--set", "device.link=2MB/s"];
    let arguments = ["--rounds", "2", "--steps", "2", "--format", "json", "--to", &tuned];
    let told = events(&good(&[&["tune", &config][..], &slow, &arguments].concat()));
    let kept = told.last().expect("an end");
    assert_eq!(kept["event"], "tuned");
    assert_eq!(kept["bottleneck"], "upload", "2 MB/s are slow: {kept}");
    assert!(kept["weights"].as_u64() > Some(1) || kept["stash_on_device"] == true, "{kept}");
    for trial in told.iter().filter(|event| event["event"] == "trial").chain([kept]) {
        let grows = trial["device_bytes_a_layer"].as_u64() > Some(0);
        assert_eq!(trial["stash_on_device"] == true, grows, "{trial}");
    }
    let says = kept["warning"].as_str().unwrap_or_default();
    assert_eq!(says.contains("grows with the number of layers"), kept["stash_on_device"] == true);
    let text = fs::read_to_string(&tuned).expect("it is there");
    assert!(text.contains("# of ours") && text.contains("# a third"), "{text}");
    let shown = good(&["config", "show", &tuned]);
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(shown["channels"]["weights"], kept["weights"]);
    assert_eq!(shown["step"]["micro_batch"], kept["micro_batch"]);
    assert_eq!(shown["step"]["steps"], 5, "what was not tuned is as it was");
    good(&["train", &tuned]);
}
