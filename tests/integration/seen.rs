//! A run of several ranks is shown as one: each rank has the numbers of all, and the timeline has
//! the operations of all in the time of one clock. The ranks here are threads.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use l2l::data::Batches;
use l2l::fabric::{self, Channel, Fabric, Lost, Rank, Tag, ThreadFabric};
use l2l::telemetry::{METRICS, Observe, RunView, Slice, Trace, samples};
use l2l::{Error, Trainer};
use serde_json::Value;

use crate::ranks::{Late, relay};

/// A fabric of ranks whose lanes start at different times. Ranks agree on the run in the first two
/// exchanges between steps, and then each sleeps for a time of its own.
struct Apart(Arc<Late>);

impl Fabric for Apart {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn ranks(&self) -> u32 {
        self.0.ranks()
    }

    fn exchange(
        &self,
        tag: Tag,
        sends: &[(Rank, &[u8])],
        receives: &mut [(Rank, &mut [u8])],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost> {
        self.0.exchange(tag, sends, receives, goes_on)?;
        if tag == Tag::new(Channel::Control, 1) {
            thread::sleep(Duration::from_millis(70) * ((self.rank() + 1) % 3));
        }
        Ok(())
    }
}

/// Counts slices.
#[derive(Default)]
struct Counted(AtomicUsize);

impl Observe for Counted {
    fn heard(&self, _: &Slice) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// The results of one rank.
struct Saw {
    /// The view after the end.
    view: Result<RunView, Error>,
    /// Bytes that it sent on all channels but that of heartbeats.
    sent: u64,
    slices: usize,
}

/// Trains on one rank for each element of `steps`, for that number of steps. The first rank writes
/// a timeline. A rank with fewer steps than the first leaves the run.
fn trained(steps: &[usize], path: &Path) -> Vec<Saw> {
    let train = |fabric: ThreadFabric| {
        let late = Late::new(fabric);
        let rank = late.rank();
        let trace = match rank {
            0 => Trace::create(path, "tested").expect("a folder of ours"),
            _ => Trace::unnamed().expect("room for temporary files"),
        };
        let counted = Arc::new(Counted::default());
        let run = async || {
            let mut config = relay(4, 2);
            config.watchdog.seconds = 5.0;
            let mut batches = Batches::open(&config)?;
            let builder = Trainer::builder(config).fabric(Arc::new(Apart(late.clone())));
            let mut trainer = builder.trace(trace.clone()).observe(counted.clone()).start().await?;
            let watch = trainer.watch();
            for _ in 0..steps[rank as usize] {
                trainer.step(batches.next().await?).await?;
            }
            if steps[rank as usize] < steps[0] {
                return Err(Error::System("this rank leaves".into()));
            }
            trainer.stop().await?;
            Ok(watch.view(0))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let view = runtime.block_on(run());
        if rank == 0 {
            assert_eq!(trace.finish().expect("it was written"), 0);
        }
        let sent = late.sent.each_ref().map(|bytes| bytes.load(Relaxed));
        let sent = sent.iter().sum::<u64>() - sent[Channel::Beats as usize];
        Saw { view, sent, slices: counted.0.load(Relaxed) }
    };
    thread::scope(|scope| {
        let all = fabric::threads(steps.len() as u32).into_iter();
        let all: Vec<_> = all.map(|fabric| scope.spawn(|| train(fabric))).collect();
        all.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// A place for a timeline.
fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    (folder, path)
}

fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("it is there");
    serde_json::from_str(&text).expect("an array of objects")
}

/// The events of a rank with this `ph`.
fn of<'e>(events: &'e [Value], ph: &'e str, rank: usize) -> impl Iterator<Item = &'e Value> {
    events.iter().filter(move |event| event["pid"] == 1 + rank && event["ph"] == *ph)
}

/// The texts of the events of this name about a rank and its rows.
fn texts<'e>(events: &'e [Value], name: &str, rank: usize) -> Vec<&'e str> {
    let about = of(events, "M", rank).filter(|event| event["name"] == *name);
    let text = |event: &'e Value| event["args"].as_object()?.values().next()?.as_str();
    about.filter_map(text).collect()
}

/// After the end, each rank has the final numbers of all ranks.
#[test]
fn each_rank_knows_what_all_did() {
    const STEPS: usize = 3;
    let (_folder, path) = place();
    let seen: Vec<(RunView, u64)> = trained(&[STEPS; 3], &path)
        .into_iter()
        .map(|saw| (saw.view.expect("no rank is lost"), saw.sent))
        .collect();
    for (rank, (view, sent)) in (0 as Rank..).zip(&seen) {
        let own = &view.ranks[rank as usize];
        assert_eq!(own.sent_bytes, *sent, "all bytes are counted");
        assert_eq!(view.ranks.len(), 3);
        for (other, _) in &seen {
            let told = &other.ranks[rank as usize];
            assert_eq!((told.rank, told.step), (rank, STEPS as u64));
            assert_eq!((told.sent_bytes, told.received_bytes), (*sent, own.received_bytes));
            assert_eq!((&told.lanes, &told.waited), (&own.lanes, &own.waited));
            assert_eq!(told.device_bytes, own.device_bytes);
            assert!(told.resident_bytes > 0);
        }
        // The rank's sums equal those of its own ledger.
        for lane in &view.lanes {
            assert!(own.lanes.contains(&(lane.name, lane.busy)), "{lane:?} {:?}", own.lanes);
        }
        assert_eq!(own.waited, view.waited);
    }
    let received: u64 = seen[0].0.ranks.iter().map(|rank| rank.received_bytes).sum();
    assert_eq!(received, seen.iter().map(|(_, sent)| sent).sum::<u64>());
    let mut met = BTreeSet::new();
    samples(&seen[0].0, |metric, labels, _| {
        if metric.labels.first() == Some(&"rank") {
            met.insert((metric.name, labels[0].to_string()));
        }
    });
    let of_ranks = METRICS.iter().filter(|metric| metric.labels.first() == Some(&"rank"));
    assert_eq!(met.len(), 3 * of_ranks.count(), "{met:?}");
}

/// One file has the operations of all ranks, each as a process with names and arrows of its own.
/// An exchange ends on no rank before it began on all others.
#[test]
fn the_timeline_has_all_ranks_in_one_time() {
    let (_folder, path) = place();
    let seen = trained(&[3; 3], &path);
    let events = events(&path);
    let mut exchanges = BTreeMap::<(&str, usize), Vec<[f64; 2]>>::new();
    let mut threads = BTreeSet::new();
    let mut arrows = BTreeSet::new();
    let mut within = 0.0;
    for (rank, saw) in seen.iter().enumerate() {
        let name = if rank == 0 { "l2l tested, rank 0".into() } else { format!("rank {rank}") };
        assert_eq!(texts(&events, "process_name", rank), [name]);
        for lane in ["compute", "fetch", "exchange"] {
            assert!(texts(&events, "thread_name", rank).contains(&lane), "{lane} of rank {rank}");
        }
        assert_eq!(of(&events, "X", rank).count(), saw.slices);
        for row in of(&events, "M", rank).filter(|event| event["name"] == "thread_name") {
            assert!(threads.insert(row["tid"].as_u64()), "a thread is of one process: {row}");
        }
        for arrow in of(&events, "s", rank) {
            assert!(arrows.insert(arrow["id"].as_u64()), "an arrow is of one process: {arrow}");
        }
        for label in texts(&events, "process_labels", rank) {
            let micros = label.strip_prefix("clock within ").expect("the only label");
            let micros = micros.split(' ').next().expect("a number").parse::<f64>();
            within = micros.expect("a number").max(within);
        }
        let mut counts = BTreeMap::<&str, usize>::new();
        for slice in of(&events, "X", rank) {
            let kind = slice["cat"].as_str().expect("a kind");
            if ["fetch", "exchange", "sum"].contains(&kind) {
                let count = counts.entry(kind).or_default();
                let [begin, took] = ["ts", "dur"].map(|key| slice[key].as_f64().expect("a time"));
                exchanges.entry((kind, *count)).or_default().push([begin, begin + took]);
                *count += 1;
            }
        }
    }
    assert!(exchanges.len() > 30, "{}", exchanges.len());
    for (exchange, times) in exchanges {
        assert_eq!(times.len(), 3, "{exchange:?}");
        let last_begin = times.iter().map(|time| time[0]).fold(f64::MIN, f64::max);
        let first_end = times.iter().map(|time| time[1]).fold(f64::MAX, f64::min);
        // The clocks of two ranks may deviate in opposite directions.
        assert!(last_begin <= first_end + 2.0 * within, "{exchange:?}, {within} µs: {times:?}");
    }
    println!("clocks within {within} µs");
    assert!(within < 20_000.0, "less than lanes start apart: {within} µs");
}

/// When a rank is lost, the timeline has the operations of the first rank, and its last bracket.
#[test]
fn the_timeline_of_a_run_that_failed_is_whole() {
    let (_folder, path) = place();
    let seen = trained(&[2, 1], &path);
    let says = seen[0].view.as_ref().expect_err("rank 1 is gone").to_string();
    assert!(says.contains("nothing comes from rank 1"), "{says}");
    let events = events(&path);
    assert!(events.iter().all(|event| event["pid"] == 1));
    let slices = events.iter().filter(|event| event["ph"] == "X").count();
    assert_eq!(slices, seen[0].slices);
}
