//! No deadlock, for any depth of any pool: random models, depths, times and orders of moves.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::common::*;
use l2l_actors::schedule::{
    ALL_CHUNKS, BlockId, Capacities, LayerId, Pipeline, Pools, Ranks, Schedule, StepPlan, deal,
    deal_groups, hand_over, pipeline, relay, resident,
};
use l2l_actors::virtual_time::{self, Move, VirtualLanes, World};
use l2l_actors::work::Queue;
use l2l_actors::{ActorName, Relay, RingConfig};
use proptest::prelude::*;

/// A ring and what it runs.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    layers: u32,
    tiles: u32,
    tied: bool,
    micro_batches: u32,
    depths: Capacities,
    pub(crate) deferred: bool,
    recompute: bool,
    resident: bool,
    pub(crate) on_file: bool,
    frozen: Vec<u32>,
    devices: u32,
    groups: u32,
    by_groups: bool,
    /// Blocks come in shards, where all devices visit the same layers.
    sharded: bool,
    /// Other processes have parts of the blocks.
    pub(crate) several: bool,
    /// Pieces of the two sums of some layers.
    pieces: [u16; 2],
    /// 0: none.
    pipeline: u32,
    answers: Answers,
    /// Chunks of each sequence, in turns: micro-batches are the chunks of long sequences.
    chunks: u32,
    pub(crate) seed: u64,
}

pub(crate) fn cases() -> impl Strategy<Value = Case> {
    let shape = (1..=6_u32, 0..=8_u32, any::<bool>(), 1..=5_u32);
    let depths = (1..=4_u32, 1..=3_u32, 1..=3_u32, 1..=5_u32);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let flags = (flags, any::<bool>());
    let frozen = prop::collection::vec(0..6_u32, 0..3);
    let answers = prop::sample::select(vec![
        Answers::Nothing,
        Answers::Read,
        Answers::MicroBatch,
        Answers::Step,
    ]);
    let answers = (answers, 1..=4_u32, (1..=2_u16, 1..=4_u16));
    let rest = (frozen, 1..=3_u32, (1..=4_u32, any::<bool>(), 0..=8_u32), answers, any::<u64>());
    (shape, depths, flags, rest).prop_map(|(shape, depths, flags, rest)| {
        let (frozen, devices, (groups, by_groups, pipeline), (answers, chunks, pieces), seed) =
            rest;
        let (layers, tiles, tied, micro_batches) = shape;
        let (weights, gradients, reduced, stash) = depths;
        let ((deferred, recompute, resident, on_file, sharded), several) = flags;
        let depths = Capacities { weights, gradients, reduced, stash };
        Case {
            layers,
            tiles,
            tied,
            micro_batches,
            depths,
            deferred,
            recompute,
            resident,
            on_file,
            frozen,
            devices,
            groups,
            by_groups,
            sharded,
            pieces: pieces.into(),
            several,
            pipeline,
            answers,
            chunks,
            seed,
        }
    })
}

impl Case {
    /// That of one of two ranks, in some cases: its exchanges are operations like others.
    pub(crate) fn schedule(&self) -> Schedule {
        let mut schedule = self.schedule_of_one();
        // In some cases what the next visit of a device reads stays there.
        if self.seed >> 40 & 1 == 1 {
            schedule = hand_over(schedule);
        }
        if self.several {
            schedule.ranks = Ranks { count: 2, dealt: true };
        }
        schedule
    }

    fn schedule_of_one(&self) -> Schedule {
        let model = model(self.layers, self.tiles, self.tied && self.tiles > 0);
        let model = if self.on_file { on_file(model) } else { model };
        let model = if self.recompute { model } else { saving(model, |_| true) };
        // Some layers keep on the device what they save, by bits of the seed.
        let model = keeping(model, |number| self.seed >> (number % 64) & 1 == 1);
        let model = measuring(model, self.answers(), |number| self.seed >> (number % 61) & 2 == 0);
        // The loss of some is an objective: of the whole step, where that can be.
        let of_step = self.answers() == Answers::Step;
        let model = if self.seed & 12 == 12 { aiming(model, of_step) } else { model };
        // Some of these have a reference in the step, which differs from some layer on.
        let refers = self.seed & 28 == 28;
        let first = self.seed as u32 / 32 % (self.layers + 1);
        let model = if refers { referring(model, first) } else { model };
        let reach = [0, 1, 2, ALL_CHUNKS];
        let model = reaching(model, |number| reach[self.seed as usize >> (number % 59) & 3]);
        // Rows of some layers choose parts of blocks, and uploads of some schedules wait for it.
        let model = choosing(model, |number| self.seed >> (number % 59) & 5 == 5);
        // Some layers are in pieces.
        let model = in_pieces(model, self.pieces, |number| self.seed >> (number % 57) & 3 == 3);
        let mut selection = everything(&model, self.micro_batches);
        selection.waits_for_choice = self.seed & 2 == 0;
        if !self.by_groups {
            let is_light = |layer: &u32| self.seed >> (41 + layer % 16) & 1 == 1;
            selection.light = (1..=self.layers).filter(is_light).map(LayerId).collect();
        }
        selection.set_groups(self.groups);
        let blocks = model.blocks.len() as u32;
        selection.frozen = self.frozen.iter().map(|&id| BlockId(id % blocks)).collect();
        if let Some(order) = self.order()
            && let Ok(schedule) = pipeline(&model, &selection, &order)
        {
            return schedule;
        }
        let generate = if self.resident { resident } else { relay };
        selection.runs = if self.resident { Vec::new() } else { self.runs() };
        selection.set_groups(self.groups);
        let schedule = generate(&model, &selection).expect("a model of ours has a schedule");
        if self.by_groups {
            let mut dealt = deal_groups(schedule, &vec![1; self.devices as usize]);
            if self.sharded && dealt.keeps_busy(dealt.devices()) {
                dealt.shards = dealt.devices();
            }
            // By micro-batch, devices with more of them may fetch more often: refused.
            let fits = StepPlan::new(dealt.clone(), Pools::of(&dealt, &self.depths)).is_ok();
            assert!(fits || self.resident, "a relay fetches the same on all devices");
            Schedule { shards: if fits { dealt.shards } else { 1 }, ..dealt }
        } else {
            deal(schedule, self.devices)
        }
    }
}

impl Case {
    /// Only orders whose backward passes begin behind all forward passes have answers of the step.
    fn answers(&self) -> Answers {
        let mixes = self.resident || self.pipeline > 1;
        match self.answers {
            Answers::Step if mixes && self.micro_batches > 1 => Answers::MicroBatch,
            answers => answers,
        }
    }

    /// The first micro-batch by itself in some cases, then runs, the last of what is left.
    fn runs(&self) -> Vec<Range<u32>> {
        let begins = (self.seed as u32 % 2..self.micro_batches).step_by(self.chunks as usize);
        let run = |at: u32| at..(at + self.chunks).min(self.micro_batches);
        begins.map(run).filter(|run| run.len() > 1).collect()
    }

    /// The pipeline of some cases; others have none.
    fn order(&self) -> Option<Pipeline> {
        let devices = self.devices;
        let count = self.micro_batches;
        match self.pipeline {
            1 => Some(Pipeline::gpipe(devices, 1, count)),
            2 => Some(Pipeline::one_forward_one_backward(devices, count)),
            3 => Pipeline::interleaved(devices, 2, count).ok(),
            _ => None,
        }
    }

    pub(crate) fn config(&self, schedule: &Schedule) -> RingConfig {
        config(schedule, &self.depths, self.deferred)
    }
}

/// A small generator: what proptest's seed chooses must be the same on every run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }
}

/// Runs `steps` steps in a random or adversarial order of moves. The order an adversary takes:
/// one task or lane is left for last as long as anything else can move.
pub(crate) fn run_in_any_order(
    config: RingConfig,
    case: &Case,
    steps: u64,
) -> Result<Vec<u64>, Vec<String>> {
    let plan = StepPlan::new(case.schedule(), config.pools).expect("a schedule that fits");
    run_plan(config, Arc::new(plan), case.seed, steps)
}

pub(crate) fn run_plan(
    config: RingConfig,
    plan: Arc<StepPlan>,
    seed: u64,
    steps: u64,
) -> Result<Vec<u64>, Vec<String>> {
    let lanes = Arc::new(VirtualLanes::new(|_| ticks(1)));
    let queues = Queue::all(&config.pools);
    let tasks = ActorName::all(&config.pools).len() + 1;
    let (mut relay, actors) = Relay::wire(config, lanes.clone());
    let mut world = World::new(lanes);
    for task in actors {
        world.spawn(task.name.to_string(), task.future);
    }
    let versions = Arc::new(Mutex::new(Vec::new()));
    let out = versions.clone();
    world.spawn("main".into(), async move {
        for _ in 0..steps {
            relay.step(plan.clone(), ()).await.expect("nothing fails here");
        }
        relay.settle().await.expect("nothing fails here");
        *out.lock().expect("one writer") = relay.snapshot().versions;
        relay.stop().await.expect("nothing fails here");
    });
    let mut chance = Chance(seed);
    let mut hated = chance.below(tasks + queues.len());
    let is_hated = |chosen: &Move, hated: usize| match *chosen {
        Move::Poll(index) => index == hated,
        Move::Begin(queue) | Move::End(queue) => {
            hated.checked_sub(tasks).is_some_and(|index| queues[index] == queue)
        }
    };
    loop {
        let moves = world.moves();
        if moves.is_empty() {
            break;
        }
        let liked: Vec<Move> =
            moves.iter().copied().filter(|chosen| !is_hated(chosen, hated)).collect();
        let from = if seed.is_multiple_of(2) || liked.is_empty() { &moves } else { &liked };
        world.make(from[chance.below(from.len())]);
        if chance.below(50) == 0 {
            hated = chance.below(tasks + queues.len());
        }
    }
    match world.unfinished() {
        left if left.is_empty() => Ok(versions.lock().expect("one writer").clone()),
        left => Err(left),
    }
}

/// No file of failing cases: a case prints itself, and belongs into a test of its own.
pub(crate) fn config_of_cases() -> ProptestConfig {
    let cases = ProptestConfig::with_cases(if whole() { 2000 } else { 400 });
    ProptestConfig { failure_persistence: None, max_global_rejects: 100_000, ..cases }
}

proptest! {
    #![proptest_config(config_of_cases())]

    #[test]
    fn every_ring_ends_in_any_order(case in cases()) {
        let schedule = case.schedule();
        let config = case.config(&schedule);
        let versions = run_in_any_order(config, &case, 2);
        // With every block frozen, a step is an evaluation.
        let newest = if schedule.trains { 2 } else { 0 };
        prop_assert_eq!(versions, Ok(vec![newest; schedule.blocks.len()]));
    }

    /// The replay and the ring agree, on pools too small as well: what the replay passes ends.
    #[test]
    fn what_the_replay_passes_ends(
        case in cases(),
        less in (0..=1_u32, 0..=3_u32, 0..=5_u32, 0..=4_u32, 0..=1_u32, 0..=1_u32),
    ) {
        let schedule = case.schedule();
        let full = case.config(&schedule).pools;
        let pools = Pools {
            weights: full.weights.saturating_sub(less.0),
            visits: full.visits.saturating_sub(less.1),
            inputs: full.inputs.saturating_sub(less.2),
            outputs: full.outputs.saturating_sub(less.3),
            gradients: full.gradients.saturating_sub(less.4),
            reads: full.reads.saturating_sub(less.4),
            states: full.states.saturating_sub(less.4),
            reduced: full.reduced.saturating_sub(less.5).max(1),
            ..full
        };
        let passed = StepPlan::new(schedule.clone(), pools).is_ok();
        prop_assume!(passed);
        let config = RingConfig { pools, ..case.config(&schedule) };
        prop_assert!(run_in_any_order(config, &case, 1).is_ok());
    }

    /// The same lists in pools that they were not made for: the ring ends where the replay does,
    /// and nowhere else.
    #[test]
    fn the_ring_ends_where_the_replay_does(
        case in cases(),
        less in (0..=3_u32, 0..=5_u32, 0..=4_u32, 0..=1_u32, 0..=1_u32),
    ) {
        let schedule = case.schedule();
        let full = case.config(&schedule).pools;
        let mut plan = StepPlan::new(schedule.clone(), full).expect("pools were made for it");
        plan.pools = Pools {
            visits: full.visits.saturating_sub(less.0).max(1),
            inputs: full.inputs.saturating_sub(less.1),
            outputs: full.outputs.saturating_sub(less.2),
            gradients: full.gradients.saturating_sub(less.3),
            reduced: full.reduced.saturating_sub(less.4).max(1),
            ..full
        };
        let replayed = plan.replay();
        let config = RingConfig { pools: plan.pools, ..case.config(&schedule) };
        let ran = run_plan(config, Arc::new(plan), case.seed, 1);
        prop_assert_eq!(replayed.is_ok(), ran.is_ok(), "{:?} and {:?}", replayed, ran);
    }

    /// Loss, norm, versions and traffic do not depend on depths; bytes are the schedule's.
    #[test]
    fn bytes_are_a_function_of_the_schedule(case in cases()) {
        let schedule = case.schedule_of_one();
        let config = case.config(&schedule);
        let plan = StepPlan::new(schedule.clone(), config.pools).expect("pools were made for it");
        let (resolved, records) = virtual_time::run(config, |_| ticks(3), async |mut relay| {
            let resolved = step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            relay.stop().await.expect("nothing fails here");
            (resolved, schedule)
        }).expect("it ends");
        let (resolved, _) = resolved;
        prop_assert_eq!(resolved.loss, f64::from(case.micro_batches));
        prop_assert_eq!(resolved.norm, (plan.updates.len() as f64).sqrt());
        let moved: u64 = records.iter().map(|record| record.bytes).sum();
        for (device, walk) in (0..).zip(&plan.walks) {
            let own = records.iter().filter(|record| record.device == Some(device));
            let moved: u64 = own.map(|record| record.bytes).sum();
            let t = walk.traffic;
            prop_assert_eq!(moved, t.weights + t.shards + t.inputs + t.outputs + t.gradients);
        }
        let t = plan.traffic;
        let (read, written) = plan.file_bytes(case.deferred);
        prop_assert!(case.on_file || plan.traffic.read + plan.traffic.written == 0);
        let of_file = if case.on_file { read + written } else { 0 };
        prop_assert_eq!(moved, t.weights + t.shards + t.inputs + t.outputs + t.gradients + of_file);
    }
}

/// No read of a block waits in its slot for a device that others keep waiting.
#[test]
fn devices_share_reads_only_in_turn() {
    let case = Case {
        layers: 5,
        tiles: 6,
        tied: false,
        micro_batches: 2,
        depths: depths(1, 2, 1, 1),
        deferred: false,
        recompute: false,
        resident: false,
        on_file: true,
        frozen: Vec::new(),
        devices: 3,
        groups: 2,
        by_groups: false,
        sharded: false,
        several: false,
        pieces: [1, 3],
        pipeline: 3,
        answers: Answers::Nothing,
        chunks: 1,
        seed: 14_976_070_410_806_418_614,
    };
    let schedule = case.schedule_of_one();
    let pools = case.config(&schedule).pools;
    StepPlan::new(schedule, pools).expect("pools were made for it");
}

#[test]
fn a_96_layer_step_takes_well_under_a_second() {
    let model = model(96, 4, true);
    let schedule = relay(&model, &everything(&model, 16)).expect("a model of ours");
    let config = config(&schedule, &Capacities::default(), false);
    let (_, records) = virtual_time::run(
        config,
        |_| ticks(3),
        async move |mut relay| {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            relay.stop().await.expect("nothing fails here");
        },
    )
    .expect("it ends");
    assert!(records.len() > 96 * 16 * 2 * 3);
}
