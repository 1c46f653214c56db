//! Training in several processes is the same, bit for bit, as in one: any number of ranks and
//! devices, whatever the order in which messages arrive. The ranks here are threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use l2l::config::{Deal, ScheduleKind, StashDtype};
use l2l::data::Batches;
use l2l::fabric::{self, Fabric, Lost, Rank, Tag, ThreadFabric};
use l2l::{Config, Error, Summary, Trainer};
use proptest::prelude::*;

use crate::exact::{Case, Ways, baseline, cases, config, ways};
use crate::whole;

/// A fabric whose messages are late by some pseudo-random time, and that counts its bytes.
struct Late {
    fabric: ThreadFabric,
    chance: AtomicU64,
    /// By channel.
    sent: [AtomicU64; 5],
}

impl Fabric for Late {
    fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    fn exchange(
        &self,
        tag: Tag,
        sends: &[(Rank, &[u8])],
        receives: &mut [(Rank, &mut [u8])],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost> {
        let chance = self.chance.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        thread::sleep(Duration::from_micros((chance >> 40) % 300));
        let bytes = sends.iter().map(|(_, message)| message.len() as u64).sum();
        self.sent[tag.channel as usize].fetch_add(bytes, Relaxed);
        self.fabric.exchange(tag, sends, receives, goes_on)
    }
}

/// What a rank saw: the bits of each step's loss and norm, a loss of evaluation, and the summary.
type Seen = (Vec<[u64; 3]>, Summary);

/// Runs `steps` steps on a rank; the only one if there is no fabric.
fn run(config: Config, fabric: Option<Arc<dyn Fabric>>, steps: usize) -> Result<Seen, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut batches = Batches::open(&config)?;
        let mut builder = Trainer::builder(config);
        if let Some(fabric) = fabric {
            builder = builder.fabric(fabric);
        }
        let mut trainer = builder.start()?;
        let mut bits = Vec::new();
        for _ in 0..steps {
            let batch = batches.next().await?;
            let report = trainer.step(batch.clone()).await?;
            let seen = trainer.evaluate([Ok(batch)]).await?;
            bits.push([report.loss, report.grad_norm, seen.loss].map(f64::to_bits));
        }
        Ok((bits, trainer.stop().await?))
    })
}

/// The same on all ranks of a fabric of threads, with the bytes that each sent, by channel.
fn on_ranks(config: &Config, ranks: u32, steps: usize) -> Vec<(Result<Seen, Error>, [u64; 5])> {
    thread::scope(|scope| {
        let start = |fabric: ThreadFabric| {
            let chance = AtomicU64::new(u64::from(fabric.rank()) << 50);
            let late = Arc::new(Late { fabric, chance, sent: Default::default() });
            scope.spawn(move || {
                let seen = run(config.clone(), Some(late.clone()), steps);
                (seen, late.sent.each_ref().map(|bytes| bytes.load(Relaxed)))
            })
        };
        let all: Vec<_> = fabric::threads(ranks).into_iter().map(start).collect();
        all.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 150 } else { 30 })
    })]

    #[test]
    fn every_number_of_ranks_gives_the_same_bits(
        case in cases(),
        ways in ways(),
        (ranks, groups, each) in (2..=4_u32, 2..=6_u32, 1..=2_usize),
        packs in prop::bool::weighted(0.2),
    ) {
        const STEPS: usize = 3;
        // The last micro-batch has one sequence.
        let batch = (groups as usize * each - 1) * case.micro_batch + 1;
        let case = Case { batch, groups, ..case };
        let ranks = ranks.min(groups);
        let ways = ways.for_ranks(&case, ranks);
        let of = |ways: &Ways| {
            let mut config = config(&case, ways);
            config.stash.dtype = if packs { StashDtype::Bf16 } else { config.stash.dtype };
            config
        };
        let (expected, reference) = run(of(&baseline()), None, STEPS).expect("a case of ours");
        for (seen, _) in on_ranks(&of(&ways), ranks, STEPS) {
            let (bits, summary) = seen.expect("a case of ours");
            prop_assert_eq!(&bits, &expected);
            prop_assert_eq!(summary.weights_digest, reference.weights_digest.clone());
        }
    }
}

fn four_groups() -> Case {
    Case { batch: 8, micro_batch: 2, groups: 4, ..crate::exact::SMALL.clone() }
}

#[test]
fn fewer_groups_than_ranks_are_refused_on_each() {
    let ways = Ways { kind: ScheduleKind::Relay, ..baseline() };
    for (seen, _) in on_ranks(&config(&Case { groups: 2, ..four_groups() }, &ways), 3, 1) {
        let says = seen.expect_err("two groups on three ranks").to_string();
        assert!(
            says.starts_with("parallel.groups is 2, and 3 processes share each step"),
            "{says}"
        );
    }
}

/// Bytes on the fabric do not depend on the number of micro-batches: a rank sends its part of each
/// block to each other rank twice, for forward and backward, and their parts of its gradients.
#[test]
fn bytes_follow_from_the_model_alone() {
    let ways = Ways { kind: ScheduleKind::Relay, deal: Deal::Layers, ..baseline() };
    let sent = |micro_batch: usize, steps: usize| {
        let case = Case { micro_batch, ..four_groups() };
        let all = on_ranks(&config(&case, &ways), 2, steps);
        all.into_iter().map(|(_, sent)| [sent[1], sent[2]]).collect::<Vec<_>>()
    };
    let (few, many) = (sent(2, 2), sent(1, 2));
    assert_eq!(few, many);
}
