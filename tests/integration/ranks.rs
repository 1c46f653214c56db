//! Training in several processes is the same, bit for bit, as in one: any number of ranks and
//! devices, whatever the order in which messages arrive. The ranks here are threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use l2l::config::{
    CompressionKind, Deal, Dtype, MasterDtype, OptimizerKind, ScheduleKind, StashPlace, Transfer,
};
use l2l::data::Batches;
use l2l::fabric::{self, Fabric, Lost, Rank, Tag, ThreadFabric};
use l2l::models::{Base, BlockTensors, Model, Tensor};
use l2l::optimizers::{Masters, Update, UpdateRule};
use l2l::plan::{FabricBytes, RankShare, Term};
use l2l::{Config, Error, Plan, Trainer, shape_of};
use proptest::prelude::*;

use crate::balanced::{Routers, all_losses};
use crate::exact::{Case, SMALL, Ways, baseline, cases, config, ways};
use crate::trained::Trained;
use crate::whole;

/// A fabric whose messages are late by some pseudo-random time, and that counts its bytes.
pub(crate) struct Late {
    fabric: ThreadFabric,
    chance: AtomicU64,
    /// By channel.
    pub(crate) sent: [AtomicU64; 6],
}

impl Late {
    pub(crate) fn new(fabric: ThreadFabric) -> Arc<Late> {
        let chance = AtomicU64::new(u64::from(fabric.rank()) << 50);
        Arc::new(Late { fabric, chance, sent: Default::default() })
    }
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

/// What a rank saw: the bits of each step's loss and norm, and of an evaluation; the summary.
pub(crate) type Seen = (Vec<[u64; 3]>, crate::Ending);

/// What a rank is to do.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) config: Config,
    /// Steps that were done before.
    pub(crate) from: usize,
    pub(crate) steps: usize,
    pub(crate) evaluates: bool,
    /// Where it resumes from, and where it leaves a checkpoint.
    pub(crate) resumes: Option<PathBuf>,
    pub(crate) leaves: Option<PathBuf>,
    /// It resumes from the state on file.
    pub(crate) resumes_file: bool,
}

impl Task {
    pub(crate) fn new(config: Config, steps: usize) -> Task {
        let resumes = None;
        let leaves = None;
        Task { config, from: 0, steps, evaluates: false, resumes, leaves, resumes_file: false }
    }

    /// Does it on a rank; on the only one if there is no fabric.
    pub(crate) fn run(self, fabric: Option<Arc<dyn Fabric>>) -> Result<Seen, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let mut batches = Batches::open(&self.config)?;
            let mut builder = Trainer::builder(self.config);
            if let Some(fabric) = fabric {
                builder = builder.fabric(fabric);
            }
            if let Some(checkpoint) = self.resumes {
                builder = builder.resume(checkpoint);
            }
            if self.resumes_file {
                builder = builder.resume_file();
            }
            let mut trainer = builder.start().await?;
            let mut all = Vec::new();
            for _ in 0..self.from {
                all.push(batches.next().await?);
            }
            let mut bits = Vec::new();
            for _ in 0..self.steps {
                let batch = batches.next().await?;
                all.push(batch.clone());
                let report = trainer.step(batch).await?;
                let seen = match self.evaluates {
                    true => trainer.evaluate(all.iter().chain(&all).cloned().map(Ok)).await?.loss,
                    false => 0.0,
                };
                bits.push([all_losses(&report), report.grad_norm, seen].map(f64::to_bits));
            }
            if let Some(checkpoint) = self.leaves {
                trainer.checkpoint(&checkpoint).await?;
            }
            Ok((bits, crate::stop(trainer).await?))
        })
    }
}

/// Does a task on each rank of a fabric of threads; with the bytes that each sent, by channel.
pub(crate) fn on_ranks(
    ranks: u32,
    task: impl Fn(Rank) -> Task + Sync,
) -> Vec<(Result<Seen, Error>, [u64; 6])> {
    thread::scope(|scope| {
        let start = |fabric: ThreadFabric| {
            let rank = fabric.rank();
            let task = &task;
            let late = Late::new(fabric);
            scope.spawn(move || {
                let seen = task(rank).run(Some(late.clone()));
                (seen, late.sent.each_ref().map(|bytes| bytes.load(Relaxed)))
            })
        };
        let all: Vec<_> = fabric::threads(ranks).into_iter().map(start).collect();
        all.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// A case that several ranks can run.
pub(crate) struct Shared {
    pub(crate) case: Case,
    pub(crate) ways: Ways,
    pub(crate) ranks: u32,
}

/// The nearest case and way, and the nearest numbers of ranks and groups, with `each` micro-batches
/// for a group.
pub(crate) fn shared(case: Case, ways: Ways, [ranks, groups]: [u32; 2], each: usize) -> Shared {
    // Blocks as small as these have two parts whatever is trained of them.
    let most = if let Trained::All = case.trained { groups } else { 2 };
    let ranks = ranks.min(groups).min(most);
    // With compression, each rank computes one group.
    let groups = if case.encodings.2 == CompressionKind::None { groups } else { ranks };
    // The last micro-batch has one sequence.
    let batch = (groups as usize * each - 1) * case.micro_batch + 1;
    let rule = match case.rule {
        rule @ (OptimizerKind::Adam | OptimizerKind::Sgd | OptimizerKind::Lion) => rule,
        _ => OptimizerKind::Adamw, // others need whole tensors
    };
    let precision = match case.precision {
        (Dtype::Bf16, MasterDtype::Bf16) => (Dtype::Bf16, MasterDtype::Auto),
        precision => precision,
    };
    // Idle experts are left alone by one process.
    let routers = if case.routers == Routers::Kept { Routers::Plain } else { case.routers };
    let case = Case { batch, groups, rule, base: Base::AsIs, precision, routers, ..case };
    let ways = ways.for_ranks(&case, ranks);
    Shared { case, ways, ranks }
}

/// Checks that each rank has the bits of one process.
pub(crate) fn check_ranks(ranks: u32, ways: &Ways, task: impl Fn(&Ways) -> Task + Sync) {
    let (expected, reference) = task(&baseline()).run(None).expect("a case of ours");
    for (seen, _) in on_ranks(ranks, |_| task(ways)) {
        let (bits, summary) = seen.expect("a case of ours");
        assert_eq!(bits, expected);
        assert_eq!(summary.weights_digest, reference.weights_digest);
    }
}

/// Checks that a run of two steps on each of these numbers of ranks in turn is the run that was not
/// interrupted. `looks` at each checkpoint.
pub(crate) fn check_resumed(config: &Config, all_ranks: &[u32], looks: impl Fn(&Path)) {
    let folder = tempfile::tempdir().expect("a place for files");
    let whole = Task::new(config.clone(), 2 * all_ranks.len()).run(None);
    let (bits, whole) = whole.expect("a case of ours");
    let place = |nth: usize| folder.path().join(format!("after-{nth}"));
    for (nth, &ranks) in all_ranks.iter().enumerate() {
        let task = Task {
            from: 2 * nth,
            resumes: nth.checked_sub(1).map(place),
            leaves: Some(place(nth)),
            ..Task::new(config.clone(), 2)
        };
        for (seen, _) in on_ranks(ranks, |_| task.clone()) {
            let (found, summary) = seen.expect("a case of ours");
            assert_eq!(found, bits[2 * nth..][..2], "{nth}");
            if nth + 1 == all_ranks.len() {
                assert_eq!(summary.weights_digest, whole.weights_digest);
            }
        }
        looks(&place(nth));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 150 } else { 12 })
    })]

    #[test]
    fn every_number_of_ranks_gives_the_same_bits(
        case in cases(),
        ways in ways(),
        (ranks, groups, each) in (2..=4_u32, 2..=6_u32, 1..=2_usize),
        packs in prop::bool::weighted(0.2),
    ) {
        const STEPS: usize = 3;
        let Shared { case, ways, ranks } = shared(case, ways, [ranks, groups], each);
        let folder = tempfile::tempdir().expect("a place for files");
        let of = |ways: &Ways| {
            let mut config = config(&case, ways);
            config.eps.path = ways.on_file.then(|| folder.path().into());
            config.optimizer.ema = packs.then_some(0.9);
            config
        };
        let task = |ways: &Ways| Task { evaluates: true, ..Task::new(of(ways), STEPS) };
        check_ranks(ranks, &ways, task);
    }
}

/// Losses of routers over the step, capacities, and counts of all ranks.
#[test]
fn routers_of_ranks_give_the_same_bits() {
    for routers in [Routers::OfStep, Routers::Limited, Routers::OfSequences] {
        let experts = Some([5, 2]);
        let case = Case { batch: 7, groups: 4, experts, routers, ..SMALL.clone() };
        let task = |ways: &Ways| Task::new(config(&case, ways), 3);
        let (expected, reference) = task(&baseline()).run(None).expect("a case of ours");
        let ways = Ways { kind: ScheduleKind::Relay, recompute: true.into(), ..baseline() };
        for ranks in [2, 3] {
            for (seen, _) in on_ranks(ranks, |_| task(&ways)) {
                let (bits, summary) = seen.expect("a case of ours");
                assert_eq!(bits, expected, "{routers:?} on {ranks} ranks");
                assert_eq!(summary.weights_digest, reference.weights_digest);
            }
        }
    }
}

/// Ranks × devices with as many groups: the same bits over twenty steps, clipped or not, with tied
/// embeddings or without, in memory and on file, with layers or sequences dealt.
#[test]
fn every_layout_of_ranks_and_devices_gives_the_same_bits() {
    let steps = if whole() { 20 } else { 2 };
    let models = [(false, true), (true, false), (true, true), (false, false)];
    for &(clip, is_tied) in if whole() { &models[..] } else { &models[..2] } {
        let of = |folder: &Path, devices: u32, on_file: bool, deal: Deal| {
            let case = Case { batch: 8, micro_batch: 1, groups: 4, clip, ..SMALL.clone() };
            let kind = ScheduleKind::Relay;
            let mut config = config(&case, &Ways { kind, devices, deal, on_file, ..baseline() });
            config.eps.path = on_file.then(|| folder.into());
            if !is_tied {
                config.model.preset = Some("llama-7b".into());
                (config.model.intermediate, config.model.dropout) = (Some(40), None);
            }
            Task::new(config, steps)
        };
        let folder = tempfile::tempdir().expect("a place for files");
        let place = |nth: usize| folder.path().join(nth.to_string());
        let alone = of(folder.path(), 1, false, Deal::Layers);
        let model = Model::new(shape_of(&alone.config).expect("a shape of ours"));
        assert_eq!(model.shape.tied, is_tied);
        let (expected, reference) = alone.run(None).expect("a case of ours");
        let layouts = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)];
        let tiers = [false, true].map(|on_file| layouts.map(|layout| (layout, on_file)));
        for (nth, ((ranks, devices), on_file)) in tiers.into_iter().flatten().enumerate() {
            for deal in [Deal::Layers, Deal::Sequences] {
                let at = place(2 * nth + deal as usize);
                for (seen, _) in on_ranks(ranks, |_| of(&at, devices, on_file, deal)) {
                    let (bits, summary) = seen.expect("a case of ours");
                    assert_eq!(bits, expected, "{ranks} × {devices}, {deal:?}, file {on_file}");
                    assert_eq!(summary.weights_digest, reference.weights_digest);
                }
            }
        }
    }
}

/// A relay of eight sequences in groups.
pub(crate) fn relay(groups: u32, micro_batch: usize) -> Config {
    let case = Case { batch: 8, micro_batch, groups, clip: true, ..SMALL.clone() };
    config(&case, &Ways { kind: ScheduleKind::Relay, ..baseline() })
}

pub(crate) fn refused(ranks: u32, task: impl Fn(Rank) -> Task + Sync) -> Vec<String> {
    let all = on_ranks(ranks, task).into_iter();
    all.map(|(seen, _)| seen.expect_err("it is refused").to_string()).collect()
}

#[test]
fn fewer_groups_than_ranks_are_refused_on_each() {
    for says in refused(3, |_| Task::new(relay(2, 2), 1)) {
        assert!(
            says.starts_with("parallel.groups is 2, and 3 processes share each step"),
            "{says}"
        );
    }
}

#[test]
fn a_rank_with_another_config_is_named_on_each() {
    let task = |rank| {
        let mut config = relay(4, 2);
        config.optimizer.learning_rate *= f64::from(1 + rank / 2);
        Task::new(config, 1)
    };
    for says in refused(3, task) {
        assert!(says.starts_with("rank 2 has another config than rank 0"), "{says}");
    }
}

/// Devices without a group of their own: a validation is dealt to all of them, a step is not.
#[test]
fn ranks_with_one_group_and_two_devices_train_and_validate() {
    let task = || {
        let mut config = relay(2, 2);
        (config.device.count, config.stash.place) = (Some(2), StashPlace::Host);
        (config.parallel.deal, config.parallel.transfer) = (Deal::Sequences, Transfer::Sharded);
        Task { evaluates: true, ..Task::new(config, 2) }
    };
    let (expected, whole) = task().run(None).expect("a case of ours");
    for (seen, _) in on_ranks(2, |_| task()) {
        let (bits, summary) = seen.expect("a case of ours");
        assert_eq!((&bits, &summary.weights_digest), (&expected, &whole.weights_digest));
    }
}

/// A rank that takes longer than the watchdog's time to make an exchange is not a lost one.
#[test]
fn a_rank_may_be_much_slower() {
    let task = |rank| {
        let mut config = relay(2, 2);
        config.watchdog.seconds = 2.0;
        config.device.flop_rate = (rank == 1).then(|| "2MFLOP/s".to_string());
        Task::new(config, 1)
    };
    let (expected, _) = task(0).run(None).expect("a case of ours");
    for (seen, _) in on_ranks(2, task) {
        assert_eq!(seen.expect("no rank is lost").0, expected);
    }
}

/// A rule that needs whole tensors, perhaps.
struct Rule(Box<dyn UpdateRule>);

impl UpdateRule for Rule {
    fn states(&self) -> usize {
        self.0.states()
    }

    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        self.0.apply(tensor, masters, states, gradient, update);
    }
}

#[tokio::test]
async fn a_rule_that_needs_whole_tensors_is_refused() {
    let config = relay(2, 2);
    for fabric in fabric::threads(2) {
        let rule = Rule(config.update_rule());
        let builder = Trainer::builder(config.clone()).update_rule(rule).fabric(Arc::new(fabric));
        let says = builder.start().await.err().expect("it is refused").to_string();
        assert!(says.starts_with("the update rule needs whole tensors"), "{says}");
    }
}

/// A rank that leaves the run, or stays silent, is named by the others within the watchdog's time.
#[test]
fn a_rank_that_is_lost_is_named() {
    let task = |rank| {
        let mut config = relay(4, 2);
        config.watchdog.seconds = 2.0;
        Task::new(config, if rank == 1 { 1 } else { 2 })
    };
    let all = refused(3, task);
    // Whoever gives up first ends, and the other may name that one.
    let first = &all[0];
    let last = &all[2];
    let name_it = |says: &String| says.contains("nothing comes from rank 1");
    assert!(name_it(first) || name_it(last), "{all:?}");
    for says in [first, last] {
        assert!(says.contains("nothing comes from rank"), "{all:?}");
    }
}

/// What a rank sends is the plan's, and does not depend on the number of micro-batches: its parts
/// of blocks, the other ranks' parts of gradients, and its rows of the embedding's gradient.
#[test]
fn bytes_are_the_plans() {
    const STEPS: u64 = 2;
    for ranks in [2, 4] {
        let sent = |micro_batch: usize| {
            let all = on_ranks(ranks, |_| Task::new(relay(4, micro_batch), STEPS as usize));
            all.into_iter().map(|(_, sent)| [sent[1], sent[2]]).collect::<Vec<_>>()
        };
        let found = sent(2);
        assert_eq!(found, sent(1));
        let config = relay(4, 2);
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let mut received = 0;
        for (rank, found) in (0..ranks).zip(found) {
            let share = RankShare { rank, ranks };
            let plan = Plan::of_rank(&config, &model, &config.update_rule(), share);
            let plan = plan.expect("a plan of ours");
            let rows = 8 / ranks * 7 * 24 * 4 * (ranks - 1);
            let FabricBytes { blocks, gradients } = plan.traffic.fabric_bytes;
            assert_eq!(found, [STEPS * blocks, STEPS * (gradients + u64::from(rows))]);
            received += gradients;
        }
        // (N - 1) / N of all gradients leave each rank.
        let parameters: usize = model.blocks.iter().map(BlockTensors::len).sum();
        assert_eq!(received, u64::from(ranks - 1) * 4 * gradients_of(&model, parameters));
    }
}

/// Parameters whose gradients come from devices: all but the embedding's own.
fn gradients_of(model: &Model, parameters: usize) -> u64 {
    let untied = if model.shape.tied { 0 } else { model.blocks[0].len() };
    (parameters - untied) as u64
}

/// A rank holds its part of masters and states.
#[test]
fn masters_and_states_fall_with_the_number_of_ranks() {
    let mut config = relay(4, 2);
    (config.model.hidden, config.model.heads) = (Some(128), Some(4));
    let model = Model::new(shape_of(&config).expect("a shape of ours"));
    let held = |ranks: u32| -> Vec<u64> {
        let of_rank = |rank| {
            let share = RankShare { rank, ranks };
            let plan = Plan::of_rank(&config, &model, &config.update_rule(), share);
            let host = plan.expect("a plan of ours").host;
            let is_eps = |term: &&Term| ["masters", "optimizer_states"].contains(&term.name);
            host.iter().filter(is_eps).map(|term| term.bytes).sum()
        };
        (0..ranks).map(of_rank).collect()
    };
    let all = held(1)[0];
    for ranks in [2, 3, 4] {
        let held = held(ranks);
        assert_eq!(held.iter().sum::<u64>(), all);
        let most = held.into_iter().max().expect("there is a rank");
        assert!(most < all / u64::from(ranks) * 11 / 10, "{most} of {all} on one of {ranks}");
    }
}

/// A run that goes on with other numbers of ranks is the run that was not interrupted.
#[test]
fn a_run_resumes_on_any_number_of_ranks() {
    check_resumed(&relay(8, 1), &[4, 2, 3, 1], |_| ());
}
