//! Does the walk end? Replays a plan once without tensors and without time.
//!
//! Three actors wait for more than a lane: Prefetcher, Executor, Reducer. Each takes from its
//! pools alone and in a fixed order, and a completed operation never takes anything back. So
//! whether the walk ends does not depend on timing, and one replay, in which lanes are as fast as
//! they can be, decides for all. A property test holds it against the real ring.

use super::*;

/// Where each actor stands, and what is taken.
struct Replay<'p> {
    plan: &'p Plan,
    piece: usize,
    announced: usize,     // device visits whose weights were sent
    inputs_sent: usize,   // input messages sent
    inputs_used: usize,   // and taken by operations
    input_slots: u32,     // input slots taken
    reads: u32,           // read slots taken
    visit: usize,         // the Executor's device visit
    operation: usize,     // and its next micro-batch within it
    open: u32,            // gradient slots taken
    closed: Vec<BlockId>, // of them, sent to the Reducer
    reduction: usize,
    landed: Vec<bool>, // boundary × micro-batch
}

/// Refuses a plan whose walk does not end, naming the piece and the pool.
pub(super) fn replay(plan: &Plan) -> Result<(), Refusal> {
    let boundaries = plan.schedule.boundaries.len() * plan.schedule.micro_batches.len();
    let mut replay = Replay {
        plan,
        piece: 0,
        announced: 0,
        inputs_sent: 0,
        inputs_used: 0,
        input_slots: 0,
        reads: 0,
        visit: 0,
        operation: 0,
        open: 0,
        closed: Vec::new(),
        reduction: 0,
        landed: vec![false; boundaries],
    };
    loop {
        let prefetched = replay.prefetch();
        let executed = replay.execute();
        let reduced = replay.reduce();
        let waiting = match (&prefetched, &executed, &reduced) {
            (Ok(false), Ok(false), Ok(false)) => return Ok(()),
            (Ok(true), ..) | (_, Ok(true), _) | (.., Ok(true)) => continue,
            (Err(refusal), ..) | (_, Err(refusal), _) | (.., Err(refusal)) => refusal.clone(),
        };
        return Err(waiting);
    }
}

/// `Ok(true)`: moved. `Ok(false)`: at the end. `Err`: waits for what the refusal names.
type Progress = Result<bool, Refusal>;

impl Replay<'_> {
    fn cell(&self, id: BoundaryId, m: MicroBatch) -> usize {
        id.0 as usize * self.plan.schedule.micro_batches.len() + m as usize
    }

    fn all_landed(&self, visit: &Visit, m: MicroBatch) -> bool {
        visit.reads.iter().all(|&id| self.landed[self.cell(id, m)])
    }

    fn waits(&self, visit: usize, piece: &str, pool: &str) -> Refusal {
        let reason = format!("{piece} would wait for ever for {pool}");
        Refusal::at(&self.plan.schedule, visit, reason)
    }

    fn gathered(&mut self, gather: &Visit) {
        for m in gather.micro_batches.clone() {
            for &id in &gather.writes {
                let cell = self.cell(id, m);
                self.landed[cell] = true;
            }
        }
    }

    fn prefetch(&mut self) -> Progress {
        let plan = self.plan;
        let Some(&piece) = plan.pieces.get(self.piece) else { return Ok(false) };
        match piece {
            Piece::Gather { visit } => self.gathered(&plan.schedule.visits[visit]),
            Piece::Read { visit, .. } => {
                if self.reads == plan.pools.reads {
                    return Err(self.waits(visit, "a read", "a slot of pool reads"));
                }
                self.reads += 1;
            }
            Piece::GatherBlock { visit, block } => {
                self.reads -= 1;
                let gather = &plan.schedule.visits[visit];
                if gather.blocks().last() == Some(&block) {
                    self.gathered(gather);
                }
            }
            Piece::Weights { device_visit } => {
                let resolved = &plan.device_visits[device_visit];
                if device_visit - self.visit >= plan.pools.visits as usize {
                    return Err(self.waits(resolved.visit, "its weights", "a slot of pool visits"));
                }
                let freed =
                    resolved.residences.iter().filter_map(|residence| residence.after).max();
                if freed.is_some_and(|visit| visit >= self.visit) {
                    return Err(self.waits(
                        resolved.visit,
                        "its weights",
                        "a slot of pool weights",
                    ));
                }
                if plan.pools.is_on_file() {
                    let fetched = resolved.residences.iter().filter(|r| r.fetch).count();
                    self.reads -= fetched as u32;
                }
                self.announced += 1;
            }
            Piece::Inputs { device_visit, micro_batch } => {
                let index = plan.device_visits[device_visit].visit;
                let visit = plan.visit(device_visit);
                let slots = plan.schedule.slots(&visit.reads);
                if !self.all_landed(visit, micro_batch) {
                    return Err(self.waits(index, "an input", "what an earlier visit writes"));
                }
                if self.input_slots + slots > plan.pools.inputs {
                    return Err(self.waits(index, "an input", "slots of pool inputs"));
                }
                self.input_slots += slots;
                self.inputs_sent += 1;
            }
        }
        self.piece += 1;
        Ok(true)
    }

    fn execute(&mut self) -> Progress {
        let plan = self.plan;
        let Some(resolved) = plan.device_visits.get(self.visit) else { return Ok(false) };
        let visit = &plan.schedule.visits[resolved.visit];
        if self.announced <= self.visit {
            return Err(self.waits(resolved.visit, "an operation", "its weights"));
        }
        if !visit.reads.is_empty() && self.inputs_sent <= self.inputs_used {
            return Err(self.waits(resolved.visit, "an operation", "its inputs"));
        }
        if self.operation == 0 {
            let opens = resolved.accumulates.iter().filter(|(_, first)| *first).count() as u32;
            if self.open + opens > plan.pools.gradients {
                return Err(self.waits(resolved.visit, "a gradient", "a slot of pool gradients"));
            }
            self.open += opens;
        }
        if !visit.reads.is_empty() {
            self.inputs_used += 1;
            self.input_slots -= plan.schedule.slots(&visit.reads);
        }
        let m = visit.micro_batches.start + self.operation as MicroBatch;
        for &id in &visit.writes {
            let cell = self.cell(id, m);
            self.landed[cell] = true;
        }
        self.operation += 1;
        if self.operation == visit.micro_batches.len() {
            self.closed.extend(&resolved.closes);
            self.visit += 1;
            self.operation = 0;
        }
        Ok(true)
    }

    fn reduce(&mut self) -> Progress {
        let plan = self.plan;
        let Some(&reduction) = plan.reductions.get(self.reduction) else { return Ok(false) };
        match reduction {
            Reduction::Gradient { block, .. } => {
                let Some(at) = self.closed.iter().position(|&closed| closed == block) else {
                    return Err(Refusal::of(format!("the gradient of {block} would never close")));
                };
                self.closed.remove(at);
                self.open -= 1;
            }
            Reduction::Loss { visit } | Reduction::Scatter { visit } => {
                let host = &plan.schedule.visits[visit];
                if host.micro_batches.clone().any(|m| !self.all_landed(host, m)) {
                    return Err(self.waits(
                        visit,
                        "a host operation",
                        "what an earlier visit writes",
                    ));
                }
            }
        }
        self.reduction += 1;
        Ok(true)
    }
}
