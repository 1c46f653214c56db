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
    ALL_CHUNKS, BlockId, BoundaryId, Fetch, MicroBatch, Phase, Piece, Reduction, Share, StepPlan,
    relay,
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
        Work::DownloadGradient { portion, .. } => Some(Of::Gradient(portion.block)),
        _ => None,
    };
    records.iter().filter_map(of).collect()
}

/// Positions in the walks.
#[derive(Clone, Copy, Default, PartialEq)]
struct Positions {
    piece: usize,
    visit: usize,
    operation: u32,
    reduction: usize,
}

/// The list scheduler: where each walk stands, and when each thing was or will be done.
struct Reference<'p> {
    plan: &'p StepPlan,
    times: Times,
    deferred: bool,
    at: Positions,
    /// The time of each actor.
    prefetcher: u64,
    executor: u64,
    reducer: u64,
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
                self.give("outputs", 1, landed);
            }
            Of::Gradient(_) => {
                let landed = self.run(Lane::Download, ordered.max(ready), download);
                self.give("gradients", 1, landed);
                let freed = if joins || self.deferred {
                    self.run(Lane::Host, landed, host)
                } else {
                    self.run(Lane::Update, landed, update)
                };
                self.measured = self.measured.max(freed);
                self.give("reduced", 1, freed);
            }
        }
        true
    }

    fn is_free(&self, pool: &str, count: usize) -> bool {
        self.pools[pool].0.len() >= count
    }

    fn take(&mut self, pool: &str, at: u64) -> u64 {
        self.pools.get_mut(pool).expect("a pool").take(1, at)
    }

    fn give(&mut self, pool: &str, count: usize, at: u64) {
        self.pools.get_mut(pool).expect("a pool").give(count, at);
    }

    /// Slots of one operation may only be taken once those who free them are known: so the walks
    /// advance in turn, each as far as what it needs is known.
    fn makespan(mut self) -> u64 {
        self.fetch();
        loop {
            let before = self.at;
            while self.prefetch().is_some() {}
            while self.execute().is_some() {}
            while self.reduce().is_some() {}
            if before == self.at && !self.download() {
                break;
            }
        }
        let all = self.list.is_empty() && self.at.piece == self.plan.walks[0].pieces.len();
        assert!(all, "the reference walked all");
        let resolved = self.measured.max(*self.visit_ends.last().expect("a visit"));
        if self.deferred {
            for _ in &self.plan.updates {
                self.run(Lane::Update, resolved, self.times.update);
            }
        }
        self.free.into_iter().max().expect("five lanes")
    }

    /// The Fetcher: all is in memory, so it waits for nothing.
    fn fetch(&mut self) {
        for fetch in &self.plan.fetches {
            let Fetch::Gather { visit, share: Share::MicroBatch(m) } = *fetch else {
                unreachable!("in memory")
            };
            let end = self.run(Lane::Host, 0, self.times.host);
            for id in &self.plan.schedule.visits[visit].writes {
                self.landed.insert((id.0, m), end);
            }
        }
    }

    /// The Prefetcher's next piece, if what it needs is known.
    fn prefetch(&mut self) -> Option<()> {
        let plan = self.plan;
        match *plan.walks[0].pieces.get(self.at.piece)? {
            Piece::Weights { device_visit } => {
                let residences = &plan.device_visits[device_visit].residences;
                let known = |visit: usize| visit < self.visit_ends.len();
                let all_known = residences.iter().filter_map(|r| r.after).all(known);
                if !all_known || !self.is_free("visits", 1) {
                    return None;
                }
                self.prefetcher = self.take("visits", self.prefetcher);
                let mut arrived = 0;
                for residence in residences.iter().filter(|r| r.upload) {
                    let freed = residence.after.map_or(0, |v| self.visit_ends[v]);
                    self.prefetcher = self.prefetcher.max(freed);
                    arrived = self.run(Lane::Upload, self.prefetcher, self.times.upload);
                }
                self.weights.insert(device_visit, (self.prefetcher, arrived));
            }
            Piece::Inputs { device_visit, micro_batch } => {
                let reads = &plan.visit(device_visit).reads;
                let is_there = |id: &BoundaryId| self.landed.contains_key(&(id.0, micro_batch));
                if !reads.iter().all(is_there) || !self.is_free("inputs", reads.len()) {
                    return None;
                }
                let mut arrived = 0;
                for id in reads {
                    self.prefetcher = self.prefetcher.max(self.landed[&(id.0, micro_batch)]);
                    self.prefetcher = self.take("inputs", self.prefetcher);
                    arrived = self.run(Lane::Upload, self.prefetcher, self.times.stash);
                }
                self.inputs.insert((device_visit, micro_batch), (self.prefetcher, arrived));
            }
        }
        self.at.piece += 1;
        Some(())
    }

    /// The micro-batch of an operation: a run goes backward in the backward pass. With a window, a
    /// visit has its first chunks, or another one.
    fn nth(&self, visit: usize, operation: u32) -> MicroBatch {
        let own = self.plan.visit(visit);
        let mut order: Vec<MicroBatch> = own.micro_batches.clone().collect();
        let runs = self.plan.schedule.runs.iter().filter(|_| own.phase == Phase::Backward);
        for run in runs.filter(|run| own.micro_batches.contains(&run.start)) {
            let at = (run.start - own.micro_batches.start) as usize;
            let end = order.len().min(at + run.len());
            order[at..end].reverse();
        }
        order[operation as usize]
    }

    /// The Executor's next operation, if what it needs is known.
    fn execute(&mut self) -> Option<()> {
        let visit = self.at.visit;
        let resolved = self.plan.device_visits.get(visit)?;
        let own = self.plan.visit(visit);
        let m = self.nth(visit, self.at.operation);
        let is_first = self.at.operation == 0;
        let &(sent, arrived) = self.weights.get(&visit)?;
        let (input_sent, input_arrived) = match own.reads.is_empty() {
            true => (0, 0),
            false => *self.inputs.get(&(visit, m))?,
        };
        let opens = resolved.accumulates.iter().filter(|(_, first)| *first && is_first).count();
        if !self.is_free("gradients", opens) || !self.is_free("outputs", own.writes.len()) {
            return None;
        }
        if is_first {
            let two_before = visit.checked_sub(2).map_or(0, |v| self.visit_ends[v]);
            self.executor = self.executor.max(sent).max(two_before);
        }
        for _ in 0..opens {
            self.executor = self.take("gradients", self.executor);
        }
        self.executor = self.executor.max(input_sent);
        for _ in &own.writes {
            self.executor = self.take("outputs", self.executor);
        }
        let ready = self.executor.max(input_arrived).max(arrived);
        let end = self.run(Lane::Compute, ready, self.times.compute);
        self.give("inputs", own.reads.len(), end);
        for &id in &own.writes {
            let download = Download { ordered: self.executor, ready: end, joins: false };
            self.downloads.push((Of::Boundary(id, m), download));
        }
        self.at.operation += 1;
        if self.at.operation as usize == own.micro_batches.len() {
            for portion in &resolved.closes {
                self.closed.insert(portion.block.0, (self.executor, end));
            }
            self.visit_ends.push(end);
            self.give("visits", 1, end);
            self.at.visit += 1;
            self.at.operation = 0;
        }
        Some(())
    }

    /// The next item of the Reducer, and of the Optimizer behind it, if what it needs is known.
    fn reduce(&mut self) -> Option<()> {
        match *self.plan.reductions.get(self.at.reduction)? {
            Reduction::Balance { .. } => unreachable!("no layer measures anything"),
            Reduction::Objective { .. } => unreachable!("the model has no objective"),
            Reduction::Loss { visit } => {
                let operations = self.plan.schedule.visits[visit].micro_batches.len();
                self.on_host(visit, operations, false)?;
            }
            Reduction::Scatter { visit } => {
                let operations = self.plan.schedule.visits[visit].blocks.len();
                self.on_host(visit, operations, true)?;
            }
            Reduction::Gradient { portion, scattered: joins, .. } => {
                let &(sent, computed) = self.closed.get(&portion.block.0)?;
                if !self.is_free("reduced", 1) {
                    return None;
                }
                self.reducer = self.reducer.max(sent).max(computed);
                self.reducer = self.take("reduced", self.reducer);
                let download = Download { ordered: self.reducer, ready: computed, joins };
                self.downloads.push((Of::Gradient(portion.block), download));
            }
        }
        self.at.reduction += 1;
        Some(())
    }

    /// Operations on the host, behind all that their visit reads.
    fn on_host(&mut self, visit: usize, operations: usize, scatters: bool) -> Option<()> {
        if self.downloads.iter().any(|(of, _)| matches!(of, Of::Gradient(_))) {
            return None; // what was ordered first is sent first
        }
        let own = &self.plan.schedule.visits[visit];
        let mut all = self.reducer;
        for m in own.micro_batches.clone() {
            for id in &own.reads {
                all = all.max(*self.landed.get(&(id.0, m))?);
            }
        }
        self.reducer = all;
        for _ in 0..operations {
            let mut end = self.run(Lane::Host, self.reducer, self.times.host);
            if scatters && !self.deferred {
                end = self.run(Lane::Update, end, self.times.update);
            }
            self.measured = self.measured.max(end);
        }
        Some(())
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
        at: Positions::default(),
        prefetcher: 0,
        executor: 0,
        reducer: 0,
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

    /// The same of sequences in chunks, whose keys are computed again in the backward pass.
    #[test]
    fn makespan_of_chunks_equals_the_list_schedulers(
        times in (0..50_u64, 1..20_u64, 0..50_u64, 0..60_u64, 0..8_u64, 0..5_u64),
        shape in (1..=20_u32, 0..=3_u32, any::<bool>()),
        sequences in prop::collection::vec(1..=6_u32, 1..=4),
        weights in prop::sample::select(vec![1_u32, 2, 3, 1000]),
        depth in (1..=2_u32, 1..=2_u32, 1..=6_u32),
        leaves in any::<u64>(),
        deferred: bool,
    ) {
        let (upload, compute, download, update, stash, host) = times;
        let times = Times { upload, compute, download, update, stash, host, ..Times::default() };
        let (layers, tiles, tied) = shape;
        let model = model(layers, tiles, tied && tiles > 0);
        let reach = [0, ALL_CHUNKS, 1, 2];
        let model = reaching(model, |number| reach[leaves as usize >> number & 3]);
        let schedule = relay(&model, &in_chunks(&model, &sequences)).expect("a model of ours");
        let capacities = depths(weights, depth.0, depth.1, depth.2);
        let plan = StepPlan::new(schedule.clone(), config(&schedule, &capacities, deferred).pools)
            .expect("pools were made for it");
        let records = timeline(&schedule, &capacities, times, deferred, 1);
        let reference = reference(&plan, times, deferred, list_of(&records));
        prop_assert_eq!(end_of(&records), reference);
    }
}
