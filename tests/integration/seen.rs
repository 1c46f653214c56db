//! A run of several ranks is seen as one: each rank knows what all did. The ranks here are threads.

use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use l2l::Trainer;
use l2l::data::Batches;
use l2l::fabric::{self, Channel, Rank, ThreadFabric};
use l2l::telemetry::{METRICS, RunView, samples};

use crate::ranks::{Late, relay};

/// Trains on several ranks. Returns what each saw after the end, and the bytes that it sent on all
/// channels but that of beats.
fn trained(ranks: u32, steps: usize) -> Vec<(RunView, u64)> {
    let train = |fabric: ThreadFabric| {
        let late = Late::new(fabric);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let view = runtime.block_on(async {
            let config = relay(4, 2);
            let mut batches = Batches::open(&config).expect("random data");
            let builder = Trainer::builder(config).fabric(late.clone());
            let mut trainer = builder.start().expect("a case of ours");
            let watch = trainer.watch();
            for _ in 0..steps {
                let batch = batches.next().await.expect("random data");
                trainer.step(batch).await.expect("no rank is lost");
            }
            trainer.stop().await.expect("no rank is lost");
            watch.view(0)
        });
        let sent = late.sent.each_ref().map(|bytes| bytes.load(Relaxed));
        (view, sent.iter().sum::<u64>() - sent[Channel::Beats as usize])
    };
    thread::scope(|scope| {
        let all = fabric::threads(ranks).into_iter().map(|fabric| scope.spawn(|| train(fabric)));
        let all: Vec<_> = all.collect();
        all.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// After the end, the numbers of all ranks are whole, and those that each rank has of itself.
#[test]
fn each_rank_knows_what_all_did() {
    const STEPS: usize = 3;
    let seen = trained(3, STEPS);
    for (rank, (view, sent)) in (0..).zip(&seen) {
        let rank: Rank = rank;
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
        // The rank's sums are those of its own ledger.
        for lane in &view.lanes {
            assert!(own.lanes.contains(&(lane.name, lane.busy)), "{lane:?} {:?}", own.lanes);
        }
        assert_eq!(own.waited, view.waited);
    }
    let received: u64 = seen[0].0.ranks.iter().map(|rank| rank.received_bytes).sum();
    assert_eq!(received, seen.iter().map(|(_, sent)| sent).sum::<u64>());
    let mut met = std::collections::BTreeSet::new();
    samples(&seen[0].0, |metric, labels, _| {
        if metric.labels.first() == Some(&"rank") {
            met.insert((metric.name, labels[0].to_string()));
        }
    });
    let of_ranks = METRICS.iter().filter(|metric| metric.labels.first() == Some(&"rank"));
    assert_eq!(met.len(), 3 * of_ranks.count(), "{met:?}");
}
