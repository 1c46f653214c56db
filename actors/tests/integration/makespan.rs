//! The makespan of the ring in virtual time against a list scheduler written here.
//!
//! The list scheduler knows the rules of the design, not the code: lanes are in order, an
//! operation begins when its lane is free and what it needs is there, and a pool is taken in the
//! order of its one taker. It is written as recurrences over ends of operations, with no message,
//! task, fence or event in it.

use std::collections::{HashMap, VecDeque};

use crate::common::times::*;
use crate::common::*;
use l2l_actors::schedule::{
    BlockId, BoundaryId, Fetch, MicroBatch, Piece, Reduction, Share, StepPlan, relay,
};
use l2l_actors::virtual_time::Record;
use l2l_actors::work::{Lane, Work};
use proptest::prelude::*;

/// A pool as times: when each slot was or will be given back.
struct Slots(Vec<u64>);

impl Slots {
    /// Takes `count` slots no earlier than `at`: when that is possible.
    fn take(&mut self, count: usize, at: u64) -> u64 {
        self.0.sort_unstable();
        let taken: Vec<u64> = self.0.drain(..count).collect();
        at.max(*taken.last().unwrap_or(&0))
    }

    fn give(&mut self, count: usize, at: u64) {
        self.0.extend(std::iter::repeat_n(at, count));
    }
}

/// A download: when it was ordered, and when what it copies is there.
#[derive(Clone, Copy)]
struct Download {
    ordered: u64,
    ready: u64,
    joins: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Boundary(BoundaryId, MicroBatch),
    Gradient(BlockId),
}

/// The download lane's list. Two actors order from that lane, and which comes first of two that
/// are ordered at the same time is nobody's rule: so the list is the ring's own, and the scheduler
/// checks that it is in the order of times.
fn list_of(records: &[Record]) -> VecDeque<Of> {
    let of = |record: &Record| match &record.work {
        Work::DownloadBoundary { micro_batch, outputs } => {
            Some(Of::Boundary(outputs.boundary, *micro_batch))
        }
        Work::DownloadGradient { block, .. } => Some(Of::Gradient(*block)),
        _ => None,
    };
    records.iter().filter_map(of).collect()
}

/// What the reference still has to do: positions in the walks.
struct Reference<'p> {
    plan: &'p StepPlan,
    times: Times,
    deferred: bool,
    free: [u64; Lane::ALL.len()], // when each lane is free
    pools: HashMap<&'static str, Slots>,
    landed: HashMap<(u32, u32), u64>,
    weights: HashMap<usize, (u64, u64)>, // device visit -> sent, arrived
    inputs: HashMap<(usize, u32), (u64, u64)>,
    visit_ends: Vec<u64>,
    /// Downloads that were ordered and not run.
    downloads: Vec<(Of, Download)>,
    list: VecDeque<Of>,
    last_ordered: u64,
    measured: u64,
    closed: HashMap<u32, (u64, u64)>, // block -> sent, computed
}

impl Reference<'_> {
    fn run(&mut self, lane: Lane, ready: u64, takes: u64) -> u64 {
        let begin = self.free[lane as usize].max(ready);
        self.free[lane as usize] = begin + takes;
        begin + takes
    }

    /// Runs the next download of the list, if it is ordered already.
    fn download(&mut self) -> bool {
        let Some(next) = self.list.front() else { return false };
        let is_next = |(of, _): &(Of, Download)| of == next;
        let Some(index) = self.downloads.iter().position(is_next) else { return false };
        let (of, Download { ordered, ready, joins }) = self.downloads.remove(index);
        self.list.pop_front();
        assert!(self.last_ordered <= ordered, "{of:?} was ordered before the one in front of it");
        self.last_ordered = ordered;
        let Times { download, update, stash, host, .. } = self.times;
        match of {
            Of::Boundary(id, m) => {
                let landed = self.run(Lane::Download, ordered.max(ready), stash);
                self.landed.insert((id.0, m), landed);
                self.pools.get_mut("outputs").expect("a pool").give(1, landed);
            }
            Of::Gradient(_) => {
                let landed = self.run(Lane::Download, ordered.max(ready), download);
                self.pools.get_mut("gradients").expect("a pool").give(1, landed);
                let freed = if joins || self.deferred {
                    self.run(Lane::Host, landed, host)
                } else {
                    self.run(Lane::Update, landed, update)
                };
                self.measured = self.measured.max(freed);
                self.pools.get_mut("reduced").expect("a pool").give(1, freed);
            }
        }
        true
    }

    /// Slots of one operation may only be taken once those who free them are known: so the walks
    /// advance in turn, each as far as what it needs is known.
    fn makespan(mut self) -> u64 {
        let plan = self.plan;
        let schedule = &plan.schedule;
        let Times { upload, compute, update, stash, host, .. } = self.times;
        // Fetcher: all is in memory, so it waits for nothing.
        for fetch in &plan.fetches {
            let Fetch::Gather { visit, share: Share::MicroBatch(m) } = *fetch else {
                unreachable!("in memory")
            };
            let end = self.run(Lane::Host, 0, host);
            for id in &schedule.visits[visit].writes {
                self.landed.insert((id.0, m), end);
            }
        }
        let (mut piece, mut prefetcher) = (0, 0); // position, and the actor's own time
        let (mut visit, mut operation, mut executor) = (0, 0_u32, 0);
        let (mut reduction, mut reducer) = (0, 0);
        loop {
            let before = (piece, visit, operation, reduction);
            // Prefetcher.
            while let Some(next) = plan.walks[0].pieces.get(piece) {
                match *next {
                    Piece::Weights { device_visit } => {
                        if self.pools["visits"].0.is_empty() {
                            break;
                        }
                        let residences = &plan.device_visits[device_visit].residences;
                        let known = |v: usize| v < self.visit_ends.len();
                        if residences.iter().any(|r| r.after.is_some_and(|v| !known(v))) {
                            break;
                        }
                        let credits = self.pools.get_mut("visits").expect("a pool");
                        prefetcher = credits.take(1, prefetcher);
                        let mut arrived = 0;
                        for residence in residences.iter().filter(|r| r.upload) {
                            let freed = residence.after.map_or(0, |v| self.visit_ends[v]);
                            prefetcher = prefetcher.max(freed);
                            arrived = self.run(Lane::Upload, prefetcher, upload);
                        }
                        self.weights.insert(device_visit, (prefetcher, arrived));
                    }
                    Piece::Inputs { device_visit, micro_batch } => {
                        let reads = &plan.visit(device_visit).reads;
                        let slots = reads.len();
                        let there =
                            reads.iter().all(|id| self.landed.contains_key(&(id.0, micro_batch)));
                        if !there || self.pools["inputs"].0.len() < slots {
                            break;
                        }
                        let mut arrived = 0;
                        for id in reads {
                            prefetcher = prefetcher.max(self.landed[&(id.0, micro_batch)]);
                            let pool = self.pools.get_mut("inputs").expect("a pool");
                            prefetcher = pool.take(1, prefetcher);
                            arrived = self.run(Lane::Upload, prefetcher, stash);
                        }
                        self.inputs.insert((device_visit, micro_batch), (prefetcher, arrived));
                    }
                }
                piece += 1;
            }
            // Executor.
            while let Some(resolved) = plan.device_visits.get(visit) {
                let own = plan.visit(visit);
                let m = own.micro_batches.start + operation;
                let Some(&(sent, arrived)) = self.weights.get(&visit) else { break };
                let input = match own.reads.is_empty() {
                    true => Some((0, 0)),
                    false => self.inputs.get(&(visit, m)).copied(),
                };
                let writes = own.writes.len();
                let opens = resolved.accumulates.iter().filter(|(_, first)| *first).count();
                let opening = if operation == 0 { opens } else { 0 };
                let Some((input_sent, input_arrived)) = input else { break };
                if self.pools["gradients"].0.len() < opening
                    || self.pools["outputs"].0.len() < writes
                {
                    break;
                }
                if operation == 0 {
                    let two_before = visit.checked_sub(2).map_or(0, |v| self.visit_ends[v]);
                    executor = executor.max(sent).max(two_before);
                    for _ in 0..opening {
                        executor =
                            self.pools.get_mut("gradients").expect("a pool").take(1, executor);
                    }
                }
                executor = executor.max(input_sent);
                for _ in &own.writes {
                    executor = self.pools.get_mut("outputs").expect("a pool").take(1, executor);
                }
                let ready = executor.max(input_arrived).max(arrived);
                let end = self.run(Lane::Compute, ready, compute);
                let reads = own.reads.len();
                self.pools.get_mut("inputs").expect("a pool").give(reads, end);
                for &id in &own.writes {
                    let download = Download { ordered: executor, ready: end, joins: false };
                    self.downloads.push((Of::Boundary(id, m), download));
                }
                operation += 1;
                if operation as usize == own.micro_batches.len() {
                    for block in &resolved.closes {
                        self.closed.insert(block.0, (executor, end));
                    }
                    self.visit_ends.push(end);
                    self.pools.get_mut("visits").expect("a pool").give(1, end);
                    (visit, operation) = (visit + 1, 0);
                }
            }
            // Reducer, and the Optimizer behind it.
            while let Some(next) = plan.reductions.get(reduction) {
                match *next {
                    Reduction::Loss { visit } | Reduction::Scatter { visit } => {
                        let is_gradient = |(of, _): &(Of, Download)| matches!(of, Of::Gradient(_));
                        if self.downloads.iter().any(is_gradient) {
                            break; // what was ordered first is sent first
                        }
                        let own = &schedule.visits[visit];
                        let ends = own
                            .micro_batches
                            .clone()
                            .flat_map(|m| own.reads.iter().map(move |id| (id.0, m)));
                        let Some(all) = ends
                            .map(|key| self.landed.get(&key).copied())
                            .collect::<Option<Vec<u64>>>()
                        else {
                            break;
                        };
                        reducer = all.into_iter().fold(reducer, u64::max);
                        let (operations, scatters) = match next {
                            Reduction::Loss { .. } => (own.micro_batches.len(), false),
                            _ => (own.blocks.len(), true),
                        };
                        for _ in 0..operations {
                            let end = self.run(Lane::Host, reducer, host);
                            self.measured = self.measured.max(end);
                            if scatters && !self.deferred {
                                self.measured =
                                    self.measured.max(self.run(Lane::Update, end, update));
                            }
                        }
                    }
                    Reduction::Gradient { block, scattered: joins, .. } => {
                        let Some(&(sent, computed)) = self.closed.get(&block.0) else { break };
                        if self.pools["reduced"].0.is_empty() {
                            break;
                        }
                        reducer = reducer.max(sent).max(computed);
                        reducer = self.pools.get_mut("reduced").expect("a pool").take(1, reducer);
                        let download = Download { ordered: reducer, ready: computed, joins };
                        self.downloads.push((Of::Gradient(block), download));
                    }
                }
                reduction += 1;
            }
            if before == (piece, visit, operation, reduction) && !self.download() {
                break;
            }
        }
        assert!(
            self.list.is_empty() && piece == plan.walks[0].pieces.len(),
            "the reference walked all"
        );
        let resolved = self.measured.max(*self.visit_ends.last().expect("a visit"));
        if self.deferred {
            for _ in &plan.updates {
                self.run(Lane::Update, resolved, update);
            }
        }
        self.free.into_iter().max().expect("five lanes")
    }
}

fn reference(plan: &StepPlan, times: Times, deferred: bool, list: VecDeque<Of>) -> u64 {
    let p = &plan.pools;
    let pool = |name, count: u32| (name, Slots(vec![0; count as usize]));
    let pools = HashMap::from([
        pool("visits", p.visits),
        pool("inputs", p.inputs),
        pool("outputs", p.outputs),
        pool("gradients", p.gradients),
        pool("reduced", p.reduced),
    ]);
    let reference = Reference {
        plan,
        times,
        deferred,
        free: [0; Lane::ALL.len()],
        pools,
        landed: HashMap::new(),
        weights: HashMap::new(),
        inputs: HashMap::new(),
        visit_ends: Vec::new(),
        downloads: Vec::new(),
        list,
        last_ordered: 0,
        measured: 0,
        closed: HashMap::new(),
    };
    reference.makespan()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(300)
    })]

    #[test]
    fn makespan_equals_the_list_schedulers(
        times in (0..50_u64, 1..20_u64, 0..50_u64, 0..60_u64, 0..8_u64, 0..5_u64),
        shape in (1..=40_u32, 1..=16_u32, 0..=3_u32, any::<bool>()),
        weights in prop::sample::select(vec![1_u32, 2, 3, 1000]),
        depth in (1..=2_u32, 1..=2_u32, 1..=6_u32),
        deferred: bool,
    ) {
        let (upload, compute, download, update, stash, host) = times;
        let times = Times { upload, compute, download, update, stash, host, ..Times::default() };
        let (layers, micro_batches, tiles, tied) = shape;
        let model = model(layers, tiles, tied && tiles > 0);
        let schedule = relay(&model, &everything(&model, micro_batches)).expect("a model of ours");
        let capacities = depths(weights, depth.0, depth.1, depth.2);
        let plan = StepPlan::new(schedule.clone(), config(&schedule, &capacities, deferred).pools)
            .expect("pools were made for it");
        let records = timeline(&schedule, &capacities, times, deferred, 1);
        let reference = reference(&plan, times, deferred, list_of(&records));
        prop_assert_eq!(end_of(&records), reference);
    }
}
