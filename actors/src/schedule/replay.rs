//! A check that a walk ends: replays a plan once, without tensors and without time.
//!
//! Five kinds of actors wait for more than a lane: Fetcher, Prefetchers, PeerCopiers, Executors,
//! Reducer. Each takes from its pools alone and in a fixed order, and a completed operation never
//! takes anything back. So whether the walk ends does not depend on timing, and one replay, in
//! which lanes are as fast as they can be, decides for all. The Optimizer is not among them: an
//! update waits for its gradient alone. Where blocks wait for updates of their own step, the replay
//! counts these. A property test compares it with the
//! real ring.

use std::collections::{BTreeMap, VecDeque};

use super::device_visits::DeviceVisit;
use super::fetches::{Fetch, Share, uses};
use super::pieces::Piece;
use super::plan::DeviceWalk;
use super::pools::Pools;
use super::portions::Merging;
use super::reductions::Reduction;
use super::{
    BlockId, BoundaryId, ChosenBy, DeviceId, MicroBatch, Portion, Refusal, Schedule, Visit,
    VisitKind,
};

/// The lists that the actors of a plan walk.
#[derive(Clone, Copy)]
pub(super) struct Walks<'p> {
    pub(super) schedule: &'p Schedule,
    pub(super) pools: &'p Pools,
    pub(super) fetches: &'p [Fetch],
    pub(super) device_visits: &'p [DeviceVisit],
    pub(super) devices: &'p [DeviceWalk],
    pub(super) reductions: &'p [Reduction],
}

impl Walks<'_> {
    /// Refuses lists whose walk does not end, and names the piece and the pool. Returns the order
    /// in which weights are announced, as indices of device visits.
    pub(super) fn replay(self) -> Result<Vec<usize>, Refusal> {
        let boundaries = self.schedule.boundaries.len() * self.schedule.micro_batches.len();
        let mut replay = Replay {
            walks: self,
            is_sharded: self.schedule.shards > 1,
            fetch: 0,
            reads: 0,
            left: Vec::new(),
            merging: Merging::default(),
            devices: self.devices.iter().map(|_| OfDevice::default()).collect(),
            reduction: 0,
            landed: vec![false; boundaries],
            updates: vec![0; self.schedule.blocks.len()],
            announced: Vec::with_capacity(self.device_visits.len()),
        };
        loop {
            let mut all = Vec::new();
            for device in 0..self.devices.len() {
                all.extend([replay.prefetch(device), replay.execute(device)]);
            }
            all.extend([replay.reduce(), replay.fetch()]);
            if !all.contains(&Ok(true)) {
                let refusal = all.into_iter().find_map(Result::err);
                return refusal.map_or(Ok(replay.announced), Err);
            }
        }
    }
}

/// The progress of each actor, and the slots that are taken.
struct Replay<'p> {
    walks: Walks<'p>,
    /// Whether blocks come in shards.
    is_sharded: bool,
    fetch: usize,
    /// Read slots taken.
    reads: u32,
    /// For each read, the uploads that have not taken from it.
    left: Vec<u32>,
    merging: Merging,
    devices: Vec<OfDevice>,
    reduction: usize,
    /// Boundary × micro-batch.
    landed: Vec<bool>,
    /// The updates that each block has had.
    updates: Vec<u32>,
    /// Device visits whose weights were announced.
    announced: Vec<usize>,
}

/// The progress of the actors of one device, and the slots that they have taken.
#[derive(Default)]
struct OfDevice {
    /// Masters in read slots that the Prefetcher has not taken, one for each upload.
    staged: VecDeque<usize>,
    /// Blocks that were uploaded, or their shards.
    uploaded: usize,
    /// The fetches that each weight slot holds.
    tenants: BTreeMap<u32, usize>,
    /// For each announced visit, the number of blocks that were uploaded for it and for earlier
    /// visits.
    needs: Vec<usize>,
    piece: usize,
    /// Visits whose weights were sent.
    announced: usize,
    inputs_sent: usize,
    inputs_used: usize,
    input_slots: u32,
    /// The Executor's visit, among the device's.
    visit: usize,
    /// The operations of that visit that were done.
    operation: usize,
    gradient_slots: u32,
    /// Gradients that were sent to the Reducer.
    closed: Vec<Portion>,
}

/// `Ok(true)`: the actor moved. `Ok(false)`: it is at its end. `Err`: it waits, and the refusal
/// says for what.
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

    /// The devices that upload the other shards of what this one fetches; none for whole blocks.
    fn peers(&self, device: usize) -> impl Iterator<Item = &OfDevice> {
        let is_sharded = self.is_sharded;
        let all = self.devices.iter().enumerate();
        all.filter(move |(other, _)| is_sharded && *other != device).map(|(_, peer)| peer)
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
        let Some(fetch) = self.walks.fetches.get(self.fetch) else { return Ok(false) };
        match *fetch {
            Fetch::Gather { visit, share } => self.gather(visit, share)?,
            Fetch::Read { ref visits, .. } => {
                if self.reads == self.walks.pools.reads {
                    return Err(self.waits(visits[0], "a read", "a slot of pool reads"));
                }
                self.reads += 1;
                if self.walks.schedule.visits[visits[0]].on_device() {
                    self.stage(visits);
                }
            }
        }
        self.fetch += 1;
        Ok(true)
    }

    /// A master comes to the devices that upload from it.
    fn stage(&mut self, visits: &[usize]) {
        let mut left = 0;
        for (device, of) in self.devices.iter_mut().enumerate() {
            let uses = uses(self.walks.schedule, visits, device as DeviceId);
            of.staged.extend((0..uses).map(|_| self.left.len()));
            left += uses;
        }
        self.left.push(left);
    }

    fn gather(&mut self, visit: usize, share: Share) -> Result<(), Refusal> {
        let schedule = self.walks.schedule;
        let gather = &schedule.visits[visit];
        if !gather.blocks.iter().all(|&id| self.is_updated(id, schedule.ahead(gather, id))) {
            return Err(self.waits(visit, "a gather", "an update of a block"));
        }
        match share {
            Share::MicroBatch(m) => self.land(&gather.writes, m),
            Share::Block(block) => {
                self.reads -= u32::from(schedule.passes_host_slot(block));
                if gather.blocks.last() == Some(&block) {
                    gather.micro_batches.clone().for_each(|m| self.land(&gather.writes, m));
                }
            }
        }
        Ok(())
    }

    /// True if a block has the version that is `ahead` updates ahead.
    fn is_updated(&self, block: BlockId, ahead: u32) -> bool {
        self.updates[block.0 as usize] >= ahead.saturating_sub(self.walks.schedule.lag)
    }

    fn prefetch(&mut self, device: usize) -> Progress {
        let pieces = &self.walks.devices[device].pieces;
        let Some(&piece) = pieces.get(self.devices[device].piece) else { return Ok(false) };
        match piece {
            Piece::Weights { device_visit } => self.announce(device, device_visit)?,
            Piece::Inputs { device_visit, micro_batch } => {
                self.bring(device, device_visit, micro_batch)?;
            }
        }
        self.devices[device].piece += 1;
        Ok(true)
    }

    fn announce(&mut self, device: usize, device_visit: usize) -> Result<(), Refusal> {
        let Walks { schedule, pools, devices, .. } = self.walks;
        let (resolved, _) = self.device_visit(device_visit);
        let waits = |pool| Err(self.waits(resolved.visit, "its weights", pool));
        let of = &self.devices[device];
        if of.announced - of.visit >= pools.visits as usize {
            return waits("a slot of pool visits");
        }
        let freed = resolved.residences.iter().filter_map(|residence| residence.after).max();
        let runs = devices[device].visits.get(of.visit);
        if freed.is_some_and(|after| runs.is_some_and(|&runs| after >= runs)) {
            return waits("a slot of pool weights");
        }
        let is_copied = |nth: &usize| self.peers(device).all(|peer| peer.uploaded > *nth);
        let tenants = resolved.uploads().filter_map(|residence| of.tenants.get(&residence.slot));
        if !tenants.into_iter().all(is_copied) {
            return waits("other devices, which copy from its slot of pool weights");
        }
        let mut choices = resolved.uploads().filter_map(|residence| residence.chosen_by);
        let is_chosen = |choice: ChosenBy| {
            choice.micro_batches().all(|m| self.landed[self.cell(choice.boundary, m)])
        };
        if !choices.all(is_chosen) {
            return waits("what rows choose of a block");
        }
        let mut uploads = resolved.uploads();
        if !uploads.all(|of| self.is_updated(of.portion.block, of.ahead)) {
            return waits("an update of a block");
        }
        let uploads = resolved.uploads();
        let staged =
            uploads.filter(|residence| schedule.passes_host_slot(residence.portion.block)).count();
        if staged > of.staged.len() {
            return waits("the read of a block");
        }
        let of = &mut self.devices[device];
        for residence in resolved.uploads() {
            of.tenants.insert(residence.slot, of.uploaded);
            of.uploaded += 1;
        }
        of.needs.push(of.uploaded);
        of.announced += 1;
        // A slot of pool reads is free when the last upload has taken its portion from there.
        for read in of.staged.drain(..staged) {
            self.left[read] -= 1;
            self.reads -= u32::from(self.left[read] == 0);
        }
        self.announced.push(device_visit);
        Ok(())
    }

    fn bring(&mut self, device: usize, device_visit: usize, m: MicroBatch) -> Result<(), Refusal> {
        let pools = self.walks.pools;
        let (resolved, visit) = self.device_visit(device_visit);
        let waits = |pool| Err(self.waits(resolved.visit, "an input", pool));
        let slots = visit.reads.len() as u32;
        if !self.all_landed(visit, m) {
            return waits("what an earlier visit writes");
        }
        if self.devices[device].input_slots + slots > pools.inputs {
            return waits("slots of pool inputs");
        }
        let of = &mut self.devices[device];
        of.input_slots += slots;
        of.inputs_sent += 1;
        Ok(())
    }

    fn execute(&mut self, device: usize) -> Progress {
        let Walks { pools, devices, .. } = self.walks;
        let of = &self.devices[device];
        let Some(&device_visit) = devices[device].visits.get(of.visit) else { return Ok(false) };
        let (resolved, visit) = self.device_visit(device_visit);
        if of.announced <= of.visit {
            return Err(self.waits(resolved.visit, "an operation", "its weights"));
        }
        if !self.peers(device).all(|peer| peer.uploaded >= of.needs[of.visit]) {
            return Err(self.waits(resolved.visit, "an operation", "shards of other devices"));
        }
        if !visit.reads.is_empty() && of.inputs_sent <= of.inputs_used {
            return Err(self.waits(resolved.visit, "an operation", "its inputs"));
        }
        let opens = resolved.accumulates.iter().filter(|(_, first)| *first).count() as u32;
        let opens = if of.operation == 0 { opens } else { 0 };
        if of.gradient_slots + opens > pools.gradients {
            return Err(self.waits(resolved.visit, "a gradient", "a slot of pool gradients"));
        }
        let m = self.walks.schedule.unit(visit, of.operation);
        self.land(&visit.writes, m);
        let of = &mut self.devices[device];
        of.gradient_slots += opens;
        if !visit.reads.is_empty() {
            of.inputs_used += 1;
            of.input_slots -= visit.reads.len() as u32;
        }
        of.operation += 1;
        if of.operation == visit.micro_batches.len() {
            of.closed.extend(&resolved.closes);
            of.visit += 1;
            of.operation = 0;
        }
        Ok(true)
    }

    fn reduce(&mut self) -> Progress {
        let Some(&reduction) = self.walks.reductions.get(self.reduction) else { return Ok(false) };
        match reduction {
            Reduction::Gradient { portion, device, join, scattered, .. } => {
                let of = &mut self.devices[usize::from(device)];
                let Some(at) = of.closed.iter().position(|&closed| closed == portion) else {
                    let reason = format!("the gradient of {portion} would never close");
                    return Err(Refusal::of(reason));
                };
                let mut merging = self.merging.clone();
                let slots = merging.slots(self.walks.schedule, portion, !join.keeps);
                if slots > self.walks.pools.reduced {
                    let reason = format!(
                        "the gradient of {portion} would wait for ever for a slot of pool reduced"
                    );
                    return Err(Refusal::of(reason));
                }
                self.merging = merging;
                of.closed.remove(at);
                let is_complete =
                    !join.keeps && !scattered && portion.cut.is_none_or(|cut| cut == 0);
                self.updates[portion.block.0 as usize] += u32::from(is_complete);
                of.gradient_slots -= 1;
            }
            Reduction::Balance { visit }
            | Reduction::Loss { visit }
            | Reduction::Objective { visit }
            | Reduction::Scatter { visit } => {
                let host = &self.walks.schedule.visits[visit];
                if host.micro_batches.clone().any(|m| !self.all_landed(host, m)) {
                    let boundary = "what an earlier visit writes";
                    return Err(self.waits(visit, "a host operation", boundary));
                }
                host.micro_batches.clone().for_each(|m| self.land(&host.writes, m));
                let scatters = host.kind == VisitKind::Scatter;
                let is_trained = |id: &&BlockId| !self.walks.schedule.block(**id).frozen;
                let ended = host.blocks.iter().filter(|id| scatters && is_trained(id));
                ended.for_each(|id| self.updates[id.0 as usize] += 1);
            }
        }
        self.reduction += 1;
        Ok(true)
    }
}
