//! Real ranks of MPI: `cargo test --features mpi --test fabric`.
//!
//! Without a launcher this program starts itself with `mpirun`, once for each case of the fabric
//! and number of ranks, and checks how the ranks end. Started by one, it is a rank. Then it trains:
//! on several ranks, and with ranks that are killed or stopped.

use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use l2l::fabric::{self, Channel, Fabric, Tag, conformance};
use serde_json::Value;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("rank") => {
            let case = arguments.next().unwrap_or_default();
            let fabric = fabric::open_mpi().expect("a launcher started it");
            rank(&case, &*fabric);
            ExitCode::SUCCESS
        }
        // `cargo test` names tests, or asks for a list of them.
        Some("--list") => ExitCode::SUCCESS,
        _ => {
            launch_all();
            ExitCode::SUCCESS
        }
    }
}

/// Runs a case on so many ranks. Returns whether all ended well, and what they wrote.
fn launch(case: &str, ranks: u32) -> (bool, String) {
    let program = std::env::current_exe().expect("it runs");
    let begin = Instant::now();
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
        .arg(program)
        .args(["rank", case])
        .stdin(Stdio::null())
        .output()
        .expect("mpirun is there: install openmpi-bin");
    let (out, err) = (&output.stdout, &output.stderr);
    let text = String::from_utf8_lossy(out).into_owned() + &String::from_utf8_lossy(err);
    println!("{case} on {ranks} ranks: {:.1} s", begin.elapsed().as_secs_f64());
    (output.status.success(), text)
}

fn launch_all() {
    for ranks in [1, 2, 4] {
        let (is_well, text) = launch("conforms", ranks);
        assert!(is_well, "{text}");
    }
    for (nth, case) in conformance::Misuse::ALL.into_iter().enumerate() {
        let (_, text) = launch(&format!("misuse{nth}"), 3);
        assert_eq!(text.matches("found").count(), 2, "{case:?}: {text}");
    }
    let begin = Instant::now();
    let (is_well, text) = launch("dies", 3);
    assert!(!is_well && begin.elapsed() < Duration::from_secs(20), "{text}");
    let folder = tempfile::tempdir().expect("a place for files");
    let place = |name: &str| folder.path().join(name).display().to_string();
    trains_alike(&place);
    all_ranks_are_seen(&place);
    ranks_that_differ_are_refused_once();
    failures_end_in_bounds(&place);
}

/// `l2l train` with this checkpoint directory, on so many ranks; on none without `mpirun`.
fn train(ranks: u32, directory: &str, more: &[&str]) -> Command {
    const SETTINGS: [&str; 12] = [
        "model.layers=2",
        "model.hidden=32",
        "model.heads=2",
        "data.sequence_length=32",
        "step.batch=8",
        "step.micro_batch=1",
        "step.steps=40",
        "parallel.groups=4",
        "optimizer.clip_norm=1",
        "validation.batches=1",
        "checkpoint.every_steps=4",
        "log.format=json",
    ];
    let program = env!("CARGO_BIN_EXE_l2l");
    let mut command = match ranks {
        0 => Command::new(program),
        _ => {
            let mut command = Command::new("mpirun");
            command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]);
            command.arg(program);
            command
        }
    };
    command.arg("train").stdin(Stdio::null());
    let directory = format!("checkpoint.directory={directory}");
    for setting in SETTINGS.into_iter().chain([&*directory]).chain(more.iter().copied()) {
        command.args(["--set", setting]);
    }
    command
}

/// The digest of the weights that a run ended with; and how many summaries there were.
fn digest(output: &Output) -> (String, usize) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let (_, from) = text.split_once("\"weights_digest\":\"").expect("a run ends with its digest");
    (from[..64].into(), text.matches("weights_digest").count())
}

/// The same bits on any number of ranks, shown once.
fn trains_alike(place: &dyn Fn(&str) -> String) {
    let of = |ranks| {
        let output = train(ranks, &place(&format!("alike-{ranks}")), &[]).output();
        digest(&output.expect("it starts"))
    };
    let alone = of(0);
    for ranks in [1, 2, 4] {
        assert_eq!(of(ranks), alone, "{ranks} ranks");
        println!("{ranks} ranks train as one process does");
    }
}

/// The first rank's timeline and metrics have all ranks.
fn all_ranks_are_seen(place: &dyn Fn(&str) -> String) {
    const RANKS: u64 = 3;
    let (trace, metrics) = (place("trace.json"), place("metrics.txt"));
    let file = format!("metrics.file={metrics}");
    let mut command = train(RANKS as u32, &place("seen"), &[&file]);
    let output = command.args(["--trace", &trace]).output().expect("it starts");
    digest(&output);
    let text = std::fs::read_to_string(&trace).expect("the timeline is there");
    let events: Vec<Value> = serde_json::from_str(&text).expect("an array of objects");
    let metrics = std::fs::read_to_string(&metrics).expect("metrics are there");
    for rank in 0..RANKS {
        let of_rank = |event: &&Value| event["pid"] == 1 + rank && event["ph"] == "X";
        let slices = events.iter().filter(of_rank).count();
        assert!(slices > 1000, "{slices} operations of rank {rank}");
        let steps = format!(",rank=\"{rank}\"}} 40\n");
        assert!(metrics.contains(&steps), "{steps}: {metrics}");
        for series in ["l2l_rank_lane_seconds_total", "l2l_fabric_bytes_total"] {
            let has =
                |line: &str| line.starts_with(series) && line.contains(&format!("rank=\"{rank}\""));
            assert!(metrics.lines().any(has), "{series} of rank {rank}: {metrics}");
        }
    }
    println!("{} events and the metrics of {RANKS} ranks are in one file each", events.len());
}

/// A rank with another config: one message, and all end.
fn ranks_that_differ_are_refused_once() {
    let program = env!("CARGO_BIN_EXE_l2l");
    let own = ["train", "--set", "parallel.groups=2", "--set", "step.micro_batch=1"];
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", "1", program])
        .args(own)
        .args([":", "-n", "1", program])
        .args(own)
        .args(["--set", "optimizer.learning_rate=0.5"])
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text.matches("rank 1 has another config than rank 0").count(), 1, "{text}");
    assert!(!output.status.success());
    println!("a rank with another config is refused once");
}

/// The l2l processes below this launcher, by rank.
fn processes_of(launcher: u32) -> Vec<(u32, u32)> {
    let environment = |process: u32| std::fs::read(format!("/proc/{process}/environ")).ok();
    let parent = |process: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let all = std::fs::read_dir("/proc").expect("Linux").flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let of = |process: u32| {
        let own = environment(process).filter(|_| parent(process) == Some(launcher))?;
        let name = b"OMPI_COMM_WORLD_RANK=";
        let rank = own.split(|&byte| byte == 0).find_map(|word| word.strip_prefix(&name[..]))?;
        Some((String::from_utf8_lossy(rank).parse().ok()?, process))
    };
    all.filter_map(of).collect()
}

/// Ranks are killed or stopped at random moments: all others end within the watchdog's time, none
/// is left, and what a resumed run comes to is what the unbroken one did.
fn failures_end_in_bounds(place: &dyn Fn(&str) -> String) {
    let expected = digest(&train(2, &place("unbroken"), &[]).output().expect("it starts")).0;
    let whole = std::env::var("L2L_TESTS").is_ok_and(|mode| mode == "whole");
    let (kills, stops) = match std::env::var("L2L_FAILURES").ok().map(|count| count.parse()) {
        Some(count) => (count.expect("a number"), 20),
        None if whole => (6, 2),
        None => (2, 1),
    };
    let mut chance = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        chance
    };
    for case in 0..kills + stops {
        let signal = if case < kills { "KILL" } else { "STOP" };
        let directory = place(&format!("broken-{case}"));
        let ranks = 2 + (next() % 2) as u32;
        // Slow enough to be hit on its way.
        let slow = ["device.flop_rate=150MFLOP/s", "watchdog.seconds=2"];
        let (out, err) = (place("out"), place("err"));
        let file = |path: &str| std::fs::File::create(path).expect("room on a disk");
        let mut run = train(ranks, &directory, &slow);
        let mut run = run.stdout(file(&out)).stderr(file(&err)).spawn().expect("it starts");
        let victim = (next() % u64::from(ranks)) as u32;
        let after = Duration::from_millis(500 + next() % 4000);
        std::thread::sleep(after);
        let ranks_of_run = processes_of(run.id());
        let hit = ranks_of_run.iter().find(|(rank, _)| *rank == victim).map(|(_, process)| {
            let mut kill = Command::new("kill");
            let killed = kill.args([format!("-{signal}"), process.to_string()]).status();
            assert!(killed.expect("kill is there").success());
        });
        let begin = Instant::now();
        while run.try_wait().expect("it is ours").is_none() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{signal}: it does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        let took = begin.elapsed();
        let status = run.wait().expect("it is ours");
        let error = std::fs::read_to_string(&err).unwrap_or_default();
        assert!(hit.is_none() || !status.success(), "{signal} of rank {victim}: {error}");
        let left = ranks_of_run.iter().filter(|(_, process)| {
            std::fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|of| !of.is_empty())
        });
        assert_eq!(left.count(), 0, "no process is left");
        if hit.is_some() {
            let named = [format!("rank {victim}"), format!("rank {victim} ")];
            assert!(named.iter().any(|name| error.contains(name)), "{signal} {victim}: {error}");
        }
        let again = 1 + (next() % 3) as u32;
        let mut resumed = train(again, &directory, &[]);
        let resumed = resumed.arg("--resume").output().expect("it starts");
        assert_eq!(digest(&resumed).0, expected, "{signal}");
        println!(
            "{signal} of rank {victim} of {ranks} after {:.1} s: all ended in {:.1} s, resumed on \
             {again}",
            after.as_secs_f64(),
            took.as_secs_f64()
        );
    }
}

fn rank(case: &str, fabric: &dyn Fabric) {
    let (own, ranks) = fabric::launched().unwrap_or((0, 1));
    assert_eq!((own, ranks), (fabric.rank(), fabric.ranks()));
    match case {
        "conforms" => conformance::check(fabric, if ranks == 2 { 300 << 20 } else { 16 << 20 }),
        "dies" => {
            let tag = Tag { channel: Channel::Sums, number: 0 };
            if own == 1 {
                std::process::abort();
            }
            let mut to = [0; 8];
            let begin = Instant::now();
            let goes_on = || begin.elapsed() < Duration::from_secs(15);
            let lost = fabric.exchange(tag, &[], &mut [(1, &mut to)], &goes_on);
            let lost = lost.expect_err("rank 1 is gone");
            eprintln!("{lost}");
            std::process::exit(1);
        }
        case => {
            let nth: usize =
                case.trim_start_matches("misuse").parse().expect("a number of a misuse");
            conformance::Misuse::ALL[nth].check(fabric);
            if own != 1 {
                println!("found");
            }
            // What is on its way stays there, so nobody can finalize MPI.
            std::process::exit(0);
        }
    }
}
