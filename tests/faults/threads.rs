//! Threads that the system does not start: the run ends with one sentence, and the next one resumes.

use crate::BOTH;
use crate::scenario::{Bench, safe_step};

/// More threads than the run starts.
const MOST: u64 = 200;

/// From each thread on that a run starts, the system starts none any more. Some of these panicked,
/// and others were waited for without end.
#[test]
fn a_thread_that_does_not_start_is_an_error() {
    let Some(bench) = Bench::new() else { return };
    let mut has_resumed = false;
    for started in 0..MOST {
        let place = bench.place(&format!("threads-{started}"));
        let most = started.to_string();
        let ended = bench.train(&BOTH, &place, false, &[("FAULTS_THREADS", &most)]);
        let said = &ended.said;
        if ended.status == Some(0) {
            bench.check_digest(&ended).expect("all threads started");
            assert!(started > 10 && has_resumed, "only {started} threads");
            return;
        }
        assert_eq!(ended.status, Some(1), "{started}: {said}");
        assert!(!said.contains("panicked"), "{started}: {said}");
        let says = "the system starts no further thread for this process (Resource temporarily";
        assert!(said.contains(says), "{started}: {said}");
        let safe = safe_step(&BOTH, &ended.out);
        if safe > 0 {
            has_resumed = true;
            bench.resume(&BOTH, &place, safe).unwrap_or_else(|what| panic!("{started}: {what}"));
        }
    }
    panic!("a small run needs {MOST} threads");
}
