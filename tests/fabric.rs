//! The fabric of MPI, with real ranks: `cargo test --features mpi --test fabric`.
//!
//! Without a launcher this program starts itself with `mpirun`, once for each case and number of
//! ranks, and checks how the ranks end. Started by one, it is a rank.

use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use l2l::fabric::{self, Channel, Fabric, Tag, conformance};

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
