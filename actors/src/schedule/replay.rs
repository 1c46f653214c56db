//! Does the walk end? Replays a plan once without tensors and without time.
//!
//! Four actors wait for more than a lane: Fetcher, Prefetcher, Executor, Reducer. Each takes from
//! its pools alone and in a fixed order, and a completed operation never takes anything back. So
//! whether the walk ends does not depend on timing, and one replay, in which lanes are as fast as
//! they can be, decides for all. A property test holds it against the real ring.

use super::device_visits::DeviceVisit;
use super::fetches::{Fetch, Share};
use super::pieces::Piece;
use super::pools::Pools;
use super::reductions::Reduction;
use super::{BlockId, BoundaryId, MicroBatch, Refusal, Schedule, Visit};

/// What the actors of a plan walk.
#[derive(Clone, Copy)]
pub(super) struct Walks<'p> {
    pub(super) schedule: &'p Schedule,
    pub(super) pools: &'p Pools,
    pub(super) fetches: &'p [Fetch],
    pub(super) pieces: &'p [Piece],
    pub(super) device_visits: &'p [DeviceVisit],
    pub(super) reductions: &'p [Reduction],
}

impl Walks<'_> {
    /// Refuses walks that do not end, naming the piece and the pool.
    pub(super) fn replay(self) -> Result<(), Refusal> {
        let boundaries = self.schedule.boundaries.len() * self.schedule.micro_batches.len();
        let mut replay = Replay {
            walks: self,
            fetch: 0,
            staged: 0,
            piece: 0,
            announced: 0,
            inputs_sent: 0,
            inputs_used: 0,
            input_slots: 0,
            reads: 0,
            visit: 0,
            operation: 0,
            gradient_slots: 0,
            closed: Vec::new(),
            reduction: 0,
            landed: vec![false; boundaries],
        };
        loop {
            let fetched = replay.fetch();
            let prefetched = replay.prefetch();
            let executed = replay.execute();
            let reduced = replay.reduce();
            let all = [prefetched, executed, reduced, fetched];
            if all.contains(&Ok(true)) {
                continue;
            }
            return all.into_iter().find_map(Result::err).map_or(Ok(()), Err);
        }
    }
}

/// Where each actor stands, and what is taken.
struct Replay<'p> {
    walks: Walks<'p>,
    fetch: usize,
    /// Masters in read slots that the Prefetcher has not taken.
    staged: usize,
    piece: usize,
    /// Device visits whose weights were sent.
    announced: usize,
    /// Messages with inputs that were sent, and that operations have taken.
    inputs_sent: usize,
    inputs_used: usize,
    input_slots: u32,
    /// Read slots taken.
    reads: u32,
    /// The Executor's device visit, and its next micro-batch within it.
    visit: usize,
    operation: usize,
    gradient_slots: u32,
    /// Gradients that were sent to the Reducer.
    closed: Vec<BlockId>,
    reduction: usize,
    /// Boundary × micro-batch.
    landed: Vec<bool>,
}

/// `Ok(true)`: moved. `Ok(false)`: at the end. `Err`: waits for what the refusal names.
type Progress = Result<bool, Refusal>;

impl<'p> Replay<'p> {
    fn cell(&self, id: BoundaryId, m: MicroBatch) -> usize {
        id.0 as usize * self.walks.schedule.micro_batches.len() + m as usize
    }

    fn all_landed(&self, visit: &Visit, m: MicroBatch) -> bool {
        visit.reads.iter().all(|&id| self.landed[self.cell(id, m)])
    }

    fn land(&mut self, boundaries: &[BoundaryId], m: MicroBatch) {
        for &id in boundaries {
            let cell = self.cell(id, m);
            self.landed[cell] = true;
        }
    }

    fn device_visit(&self, index: usize) -> (&'p DeviceVisit, &'p Visit) {
        let resolved = &self.walks.device_visits[index];
        (resolved, &self.walks.schedule.visits[resolved.visit])
    }

    fn waits(&self, visit: usize, piece: &str, pool: &str) -> Refusal {
        let reason = format!("{piece} would wait for ever for {pool}");
        Refusal::at(self.walks.schedule, visit, reason)
    }

    fn fetch(&mut self) -> Progress {
        let Some(&fetch) = self.walks.fetches.get(self.fetch) else { return Ok(false) };
        match fetch {
            Fetch::Gather { visit, share } => self.gather(visit, share),
            Fetch::Read { visit, .. } => {
                if self.reads == self.walks.pools.reads {
                    return Err(self.waits(visit, "a read", "a slot of pool reads"));
                }
                self.reads += 1;
                self.staged += usize::from(self.walks.schedule.visits[visit].on_device());
            }
        }
        self.fetch += 1;
        Ok(true)
    }

    fn prefetch(&mut self) -> Progress {
        let Some(&piece) = self.walks.pieces.get(self.piece) else { return Ok(false) };
        match piece {
            Piece::Weights { device_visit } => self.announce(device_visit)?,
            Piece::Inputs { device_visit, micro_batch } => self.bring(device_visit, micro_batch)?,
        }
        self.piece += 1;
        Ok(true)
    }

    fn gather(&mut self, visit: usize, share: Share) {
        let schedule = self.walks.schedule;
        let gather = &schedule.visits[visit];
        match share {
            Share::MicroBatch(m) => self.land(&gather.writes, m),
            Share::Block(block) => {
                self.reads -= u32::from(schedule.block(block).staged);
                if gather.blocks().last() == Some(&block) {
                    gather.micro_batches.clone().for_each(|m| self.land(&gather.writes, m));
                }
            }
        }
    }

    fn announce(&mut self, device_visit: usize) -> Result<(), Refusal> {
        let Walks { schedule, pools, .. } = self.walks;
        let (resolved, _) = self.device_visit(device_visit);
        let waits = |pool| Err(self.waits(resolved.visit, "its weights", pool));
        if device_visit - self.visit >= pools.visits as usize {
            return waits("a slot of pool visits");
        }
        let freed = resolved.residences.iter().filter_map(|residence| residence.after).max();
        if freed.is_some_and(|visit| visit >= self.visit) {
            return waits("a slot of pool weights");
        }
        let fetched = resolved.residences.iter().filter(|residence| residence.fetch);
        let staged = fetched.filter(|residence| schedule.block(residence.block).staged).count();
        if staged > self.staged {
            return waits("the read of a block");
        }
        self.staged -= staged;
        self.reads -= staged as u32;
        self.announced += 1;
        Ok(())
    }

    fn bring(&mut self, device_visit: usize, m: MicroBatch) -> Result<(), Refusal> {
        let Walks { schedule, pools, .. } = self.walks;
        let (resolved, visit) = self.device_visit(device_visit);
        let waits = |pool| Err(self.waits(resolved.visit, "an input", pool));
        let slots = schedule.slots(&visit.reads);
        if !self.all_landed(visit, m) {
            return waits("what an earlier visit writes");
        }
        if self.input_slots + slots > pools.inputs {
            return waits("slots of pool inputs");
        }
        self.input_slots += slots;
        self.inputs_sent += 1;
        Ok(())
    }

    fn execute(&mut self) -> Progress {
        let Walks { schedule, pools, device_visits, .. } = self.walks;
        let Some(resolved) = device_visits.get(self.visit) else { return Ok(false) };
        let visit = &schedule.visits[resolved.visit];
        if self.announced <= self.visit {
            return Err(self.waits(resolved.visit, "an operation", "its weights"));
        }
        if !visit.reads.is_empty() && self.inputs_sent <= self.inputs_used {
            return Err(self.waits(resolved.visit, "an operation", "its inputs"));
        }
        if self.operation == 0 {
            let opens = resolved.accumulates.iter().filter(|(_, first)| *first).count() as u32;
            if self.gradient_slots + opens > pools.gradients {
                return Err(self.waits(resolved.visit, "a gradient", "a slot of pool gradients"));
            }
            self.gradient_slots += opens;
        }
        if !visit.reads.is_empty() {
            self.inputs_used += 1;
            self.input_slots -= schedule.slots(&visit.reads);
        }
        let m = visit.micro_batches.start + self.operation as MicroBatch;
        self.land(&visit.writes, m);
        self.operation += 1;
        if self.operation == visit.micro_batches.len() {
            self.closed.extend(&resolved.closes);
            self.visit += 1;
            self.operation = 0;
        }
        Ok(true)
    }

    fn reduce(&mut self) -> Progress {
        let Some(&reduction) = self.walks.reductions.get(self.reduction) else { return Ok(false) };
        match reduction {
            Reduction::Gradient { block, .. } => {
                let Some(at) = self.closed.iter().position(|&closed| closed == block) else {
                    return Err(Refusal::of(format!("the gradient of {block} would never close")));
                };
                self.closed.remove(at);
                self.gradient_slots -= 1;
            }
            Reduction::Loss { visit } | Reduction::Scatter { visit } => {
                let host = &self.walks.schedule.visits[visit];
                if host.micro_batches.clone().any(|m| !self.all_landed(host, m)) {
                    let boundary = "what an earlier visit writes";
                    return Err(self.waits(visit, "a host operation", boundary));
                }
            }
        }
        self.reduction += 1;
        Ok(true)
    }
}
