//! Real ranks of MPI: `cargo test --features mpi --test fabric`.
//!
//! Without a launcher this program starts itself with `mpirun`, once for each case of the fabric
//! and number of ranks, and checks how the ranks end. Started by one, it is a rank. Then it trains:
//! on several ranks, with ranks that are killed, stopped or cut off, and with disks that are full.
//! `L2L_FAILURES=60,20,20` kills 60 times, stops 20 times and cuts 20 times.

mod disks;
mod failures;
mod links;
mod runs;

use std::path::Path;
use std::process::{self, ExitCode};
use std::time::{Duration, Instant};
use std::{fs, thread};

use l2l::fabric::{self, Channel, Fabric, Tag, conformance};
use serde_json::Value;

use crate::runs::{Chance, PROGRAM, STEPS, digest, mpirun, train};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("rank") => {
            let case = arguments.next().unwrap_or_default();
            if case == "absent" {
                without_a_rank();
            } else {
                let seconds = if case == "stays" { 2 } else { 10 };
                let fabric = fabric::open_mpi(Duration::from_secs(seconds));
                rank(&case, fabric.expect("a launcher started it"));
            }
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

/// Runs a case on a number of ranks. Returns whether all ended well, and what they wrote.
fn launch(case: &str, ranks: u32) -> (bool, String) {
    let program = std::env::current_exe().expect("it runs");
    let begin = Instant::now();
    let output = mpirun(ranks)
        .arg(program)
        .args(["rank", case])
        .output()
        .expect("mpirun is there: install openmpi-bin");
    let out = &output.stdout;
    let err = &output.stderr;
    let text = String::from_utf8_lossy(out).into_owned() + &String::from_utf8_lossy(err);
    println!("{case} on {ranks} ranks: {:.1} s", begin.elapsed().as_secs_f64());
    (output.status.success(), text)
}

fn launch_all() {
    thread::scope(|scope| {
        // These two compute nothing, and take many seconds.
        scope.spawn(|| ends("absent", "MPI: not all ranks started within 10 s"));
        scope.spawn(|| ends("stays", "left"));
        for ranks in [1, 2, 4] {
            let (is_well, text) = launch("conforms", ranks);
            assert!(is_well, "{text}");
        }
        for (nth, case) in conformance::Misuse::ALL.into_iter().enumerate() {
            let (_, text) = launch(&format!("misuse{nth}"), 3);
            assert_eq!(text.matches("found").count(), 2, "{case:?}: {text}");
        }
    });
    let begin = Instant::now();
    let (is_well, text) = launch("dies", 3);
    assert!(!is_well && begin.elapsed() < Duration::from_secs(20), "{text}");
    let folder = tempfile::tempdir().expect("a place for files");
    let folder = folder.path();
    let expected = trains_alike(folder);
    all_ranks_are_seen(folder);
    ranks_that_differ_are_refused_once();
    disks::problems_are_said_once(folder, &expected);
    let mut chance = Chance(0x2545_f491_4f6c_dd1d);
    let [kills, stops, cuts] = runs::counts();
    failures::end_in_bounds("KILL", kills, folder, &expected, &mut chance);
    failures::end_in_bounds("STOP", stops, folder, &expected, &mut chance);
    links::cuts_end_in_bounds(cuts, folder, &expected, &mut chance);
}

/// A rank that waits for another one in vain ends, and says why.
fn ends(case: &str, says: &str) {
    let (is_well, text) = launch(case, 2);
    assert!(!is_well && text.contains(says), "{case}: {text}");
}

/// The same bits on any number of ranks, shown once. Returns the digest.
fn trains_alike(folder: &Path) -> String {
    let of = |ranks| {
        let output = train(ranks, &folder.join(format!("alike-{ranks}")), &[]).output();
        digest(&output.expect("it starts"))
    };
    let alone = of(0);
    for ranks in [1, 2, 4] {
        assert_eq!(of(ranks), alone, "{ranks} ranks");
        println!("{ranks} ranks train as one process does");
    }
    assert_eq!(alone.1, 1, "one summary");
    alone.0
}

/// The first rank's timeline and metrics have all ranks.
fn all_ranks_are_seen(folder: &Path) {
    const RANKS: u64 = 3;
    let trace = folder.join("trace.json");
    let metrics = folder.join("metrics.txt");
    let file = format!("metrics.file={}", metrics.display());
    let mut command = train(RANKS as u32, &folder.join("seen"), &[&file]);
    digest(&command.arg("--trace").arg(&trace).output().expect("it starts"));
    let text = fs::read_to_string(&trace).expect("the timeline is there");
    let events: Vec<Value> = serde_json::from_str(&text).expect("an array of objects");
    let metrics = fs::read_to_string(&metrics).expect("metrics are there");
    for rank in 0..RANKS {
        let of_rank = |event: &&Value| event["pid"] == 1 + rank && event["ph"] == "X";
        let slices = events.iter().filter(of_rank).count();
        assert!(slices > 1000, "{slices} operations of rank {rank}");
        let steps = format!(",rank=\"{rank}\"}} {STEPS}\n");
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
    let own = ["train", "--set", "parallel.groups=2", "--set", "step.micro_batch=1"];
    let output = mpirun(1)
        .arg(PROGRAM)
        .args(own)
        .args([":", "-n", "1", PROGRAM])
        .args(own)
        .args(["--set", "optimizer.learning_rate=0.5"])
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text.matches("rank 1 has another config than rank 0").count(), 1, "{text}");
    assert!(!output.status.success());
    println!("a rank with another config is refused once");
}

/// The last of the ranks does not start MPI: the others do not wait for it for ever.
fn without_a_rank() {
    let (own, ranks) = fabric::launched().expect("a launcher started several");
    if own == ranks - 1 {
        thread::sleep(Duration::from_secs(120));
    }
    let error = fabric::open_mpi(Duration::from_secs(1)).err().expect("a rank is absent");
    println!("{error}");
    process::exit(1);
}

fn rank(case: &str, fabric: Box<dyn Fabric>) {
    let (own, ranks) = fabric::launched().unwrap_or((0, 1));
    assert_eq!((own, ranks), (fabric.rank(), fabric.ranks()));
    match case {
        "conforms" => conformance::check(&*fabric, if ranks == 2 { 300 << 20 } else { 16 << 20 }),
        // A rank does not finalize MPI: the others do not wait for it for ever.
        "stays" => {
            if own == 1 {
                thread::sleep(Duration::from_secs(120));
            }
            drop(fabric);
            println!("left");
        }
        "dies" => {
            let tag = Tag::new(Channel::Sums, 0);
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
            conformance::Misuse::ALL[nth].check(&*fabric);
            if own != 1 {
                println!("found");
            }
            // What is on its way stays there, so nobody can finalize MPI.
            std::process::exit(0);
        }
    }
}
