//! The plan of a step: a schedule with every choice made.
//!
//! **The upload lane's list.** Inputs of each visit in order; the blocks of a coming visit stand
//! (a) behind the last input of the visit that last used their slot, (b) behind the last input of
//! the visit `visit credits` before their own, (c) never before their own step. What is behind
//! can complete without what is in front, so the list cannot end in a circle. Within that, a
//! block stands behind as many inputs of the visit running meanwhile as the pool fetches ahead:
//! the lane is in order, and a whole block in front of them would starve the compute lane.
//! A block is one piece; when long visits with few stash slots ask for it, a piece becomes a
//! share and this list is the one place that changes.

use std::collections::BTreeMap;

use super::*;

/// Channel depths as a user sets them, each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities {
    /// Blocks on the device.
    pub weights: u32,
    /// Gradient accumulators on the device.
    pub gradients: u32,
    /// Landing blocks on the host.
    pub reduced: u32,
    /// Boundary inputs fetched ahead, and outputs that may be leaving.
    pub stash: u32,
}

impl Default for Capacities {
    fn default() -> Capacities {
        Capacities { weights: 2, gradients: 2, reduced: 2, stash: 4 }
    }
}

/// Slots of every pool: what is allocated at start, one number a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pools {
    /// Blocks on the device.
    pub weights: u32,
    /// Device visits between their weights' announcement and their end.
    pub visits: u32,
    /// Boundary inputs on the device: the largest working set + `ahead`.
    pub inputs: u32,
    /// Of the inputs, those fetched ahead of the operation that runs.
    pub ahead: u32,
    /// Boundary outputs on the device: the largest set while it is written, and as many leaving
    /// as `ahead` come, at least one set. Few would stall compute behind a gradient's download.
    pub outputs: u32,
    /// Gradient accumulators on the device.
    pub gradients: u32,
    /// Landing blocks on the host.
    pub reduced: u32,
    /// With the EPS on file, published blocks on the host: read ahead, or being uploaded. Else 0.
    pub reads: u32,
    /// With the EPS on file, blocks on the host with their states: read, updated, or being written.
    /// Else 0.
    pub states: u32,
}

impl Pools {
    /// What this schedule needs at these depths; depths too low to run it at all are raised.
    pub fn of(schedule: &Schedule, depths: &Capacities) -> Pools {
        let visits = || schedule.visits.iter().filter(|visit| visit.on_device());
        let blocks = visits().map(|visit| visit.blocks().len() as u32).max().unwrap_or(0);
        let reads = visits().map(|visit| schedule.slots(&visit.reads)).max().unwrap_or(0);
        let writes = visits().map(|visit| schedule.slots(&visit.writes)).max().unwrap_or(0);
        let all = schedule.blocks.len() as u32; // more slots than blocks are never used
        let weights = depths.weights.clamp(blocks, all.max(blocks));
        let carried = visits().map(|visit| {
            schedule.slots(&visit.reads).saturating_mul(visit.micro_batches.len() as u32)
        });
        let ahead = depths.stash.min(carried.fold(0, u32::saturating_add)).max(1);
        Pools {
            weights,
            // One visit runs, the others' blocks come; more than three ahead only queue up in
            // front of the inputs of the visit that runs.
            visits: weights.clamp(2, 4),
            inputs: reads.saturating_add(ahead),
            ahead,
            outputs: writes.saturating_add(writes.max(ahead)),
            gradients: depths.gradients.min(all).max(open_gradients(schedule)).max(1),
            reduced: depths.reduced.min(all).max(1),
            reads: 0,
            states: 0,
        }
    }

    /// The same with the EPS on file: one block is read while those of a visit are uploaded, and
    /// the state of one while another is updated.
    pub fn on_file(self, schedule: &Schedule) -> Pools {
        let visits = schedule.visits.iter().filter(|visit| visit.on_device());
        let blocks = visits.map(|visit| visit.blocks().len() as u32).max().unwrap_or(0);
        Pools { reads: blocks.saturating_add(1), states: 2, ..self }
    }

    /// Whether blocks come from a file.
    pub fn is_on_file(&self) -> bool {
        self.reads > 0
    }

    /// The smallest pools that run either schedule.
    pub fn max(self, other: Pools) -> Pools {
        Pools {
            weights: self.weights.max(other.weights),
            visits: self.visits.max(other.visits),
            inputs: self.inputs.max(other.inputs),
            ahead: self.ahead.max(other.ahead),
            outputs: self.outputs.max(other.outputs),
            gradients: self.gradients.max(other.gradients),
            reduced: self.reduced.max(other.reduced),
            reads: self.reads.max(other.reads),
            states: self.states.max(other.states),
        }
    }
}

/// One entry of the Prefetcher's list. Visits are indices in [`Schedule::visits`], device visits
/// in [`Plan::device_visits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// The gather of one host visit.
    Gather {
        /// Index of the host visit.
        visit: usize,
    },
    /// With the EPS on file, the read of a block that a coming piece needs: they are taken in the
    /// order they were read in.
    Read {
        /// Index of the visit that needs it.
        visit: usize,
        /// The block.
        block: BlockId,
    },
    /// With the EPS on file, the share of one block in the gather of a host visit.
    GatherBlock {
        /// Index of the host visit.
        visit: usize,
        /// The block.
        block: BlockId,
    },
    /// The blocks of a device visit that are not there yet, and its announcement.
    Weights {
        /// Index of the device visit.
        device_visit: usize,
    },
    /// The boundaries one micro-batch brings to a device visit.
    Inputs {
        /// Index of the device visit.
        device_visit: usize,
        /// The micro-batch.
        micro_batch: MicroBatch,
    },
}

/// A visit of the device, resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceVisit {
    /// Index in [`Schedule::visits`].
    pub visit: usize,
    /// Its blocks and their slots.
    pub residences: Vec<Residence>,
    /// Blocks whose gradient it adds to, with whether it is the first to.
    pub accumulates: Vec<(BlockId, bool)>,
    /// Blocks whose gradient is complete on the device when it ends.
    pub closes: Vec<BlockId>,
}

/// One entry of the Reducer's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Take the loss of a host visit's micro-batches.
    Loss {
        /// Index of the host visit.
        visit: usize,
    },
    /// Land a block's gradient; when a scatter adds to it later, join it in its region.
    Gradient {
        /// The block.
        block: BlockId,
        /// True when a scatter follows.
        joins: bool,
    },
    /// Scatter a host visit's boundary into its blocks' regions, completing them.
    Scatter {
        /// Index of the host visit.
        visit: usize,
    },
}

/// Bytes each edge moves in a step, as its schedule says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Blocks, to the device.
    pub weights: u64,
    /// Boundaries, from the stash.
    pub inputs: u64,
    /// Boundaries, to the stash.
    pub outputs: u64,
    /// Gradients, to the host.
    pub gradients: u64,
    /// With the EPS on file, blocks, states and gradient regions read.
    pub read: u64,
    /// And written, eagerly.
    pub written: u64,
}

/// A schedule that was checked against pools, and what each actor walks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The schedule.
    pub schedule: Schedule,
    /// The pools it was checked against.
    pub pools: Pools,
    /// The device's visits, in order: what the Executor walks.
    pub device_visits: Vec<DeviceVisit>,
    /// What the Prefetcher walks.
    pub pieces: Vec<Piece>,
    /// What the Reducer walks.
    pub reductions: Vec<Reduction>,
    /// Blocks updated, in forward order of their first visit: what the Optimizer walks.
    pub updates: Vec<BlockId>,
    /// All other blocks: published as of the next version, unchanged.
    pub carried: Vec<BlockId>,
    /// Bytes moved.
    pub traffic: Traffic,
}

impl Plan {
    /// Checks a schedule and makes every choice in it.
    ///
    /// # Errors
    /// The visit and the rule it breaks; or, when the walk does not end in these pools, the piece
    /// and the pool it waits for.
    pub fn new(schedule: Schedule, pools: Pools) -> Result<Plan, Refusal> {
        super::rules::check(&schedule)?;
        pools_suffice(&schedule, &pools)?;
        let device_visits = device_visits(&schedule, &pools);
        let reductions = reductions(&schedule, &device_visits);
        let (updates, carried) = updates(&schedule, &reductions);
        let mut traffic = traffic(&schedule, &device_visits);
        let mut pieces = pieces(&schedule, &pools, &device_visits);
        if pools.is_on_file() {
            super::reads::on_file(&schedule, &device_visits, &reductions, &updates, &mut traffic);
            pieces = super::reads::with_reads(pieces, &schedule, &pools, &device_visits);
        }
        let plan =
            Plan { schedule, pools, device_visits, pieces, reductions, updates, carried, traffic };
        super::replay::replay(&plan)?;
        Ok(plan)
    }

    /// Bytes that a step reads from the EPS's file, and writes to it: deferred gradients wait there.
    pub fn file_bytes(&self, deferred: bool) -> (u64, u64) {
        let waiting = self.updates.iter().map(|&id| self.schedule.block(id).gradient_bytes);
        let waiting = if deferred { waiting.fold(0, u64::saturating_add) } else { 0 };
        let Traffic { read, written, .. } = self.traffic;
        (read.saturating_add(waiting), written.saturating_add(waiting))
    }

    /// The schedule's entry for a device visit.
    pub fn visit(&self, device_visit: usize) -> &Visit {
        &self.schedule.visits[self.device_visits[device_visit].visit]
    }
}

/// Each pool holds what one operation takes from it at once, and gradients all that stay open.
fn pools_suffice(schedule: &Schedule, pools: &Pools) -> Result<(), Refusal> {
    for (index, visit) in schedule.visits.iter().enumerate().filter(|(_, v)| v.on_device()) {
        let needs = [
            ("weights", visit.blocks().len() as u32, pools.weights),
            ("inputs", schedule.slots(&visit.reads), pools.inputs),
            ("outputs", schedule.slots(&visit.writes), pools.outputs),
        ];
        for (pool, need, has) in needs {
            if need > has {
                let reason = format!("takes {need} slots of pool {pool}, which has {has}");
                return Err(Refusal::at(schedule, index, reason));
            }
        }
    }
    let open = open_gradients(schedule);
    if open > pools.gradients {
        return Err(Refusal::of(format!(
            "holds {open} gradients open at once; pool gradients has {}",
            pools.gradients
        )));
    }
    let most = schedule.visits.iter().filter(|v| v.on_device()).map(|v| v.blocks().len()).max();
    if pools.is_on_file() && ((pools.reads as usize) < most.unwrap_or(0) || pools.states < 2) {
        return Err(Refusal::of("pools reads and states are too small for a visit's blocks"));
    }
    if pools.visits == 0 || pools.reduced == 0 {
        return Err(Refusal::of("pools visits and reduced need at least one slot"));
    }
    Ok(())
}

/// First and last backward visit of every trained block, among the device's visits.
fn contributions(schedule: &Schedule) -> BTreeMap<BlockId, (usize, usize)> {
    let mut spans = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().filter(|visit| visit.on_device()).enumerate() {
        if visit.phase == Phase::Backward {
            for &id in visit.blocks().iter().filter(|&&id| schedule.trains(id)) {
                spans.entry(id).or_insert((index, index)).1 = index;
            }
        }
    }
    spans
}

/// The most gradients that are open at once.
fn open_gradients(schedule: &Schedule) -> u32 {
    let mut changes = BTreeMap::new(); // (visit, ended) -> opened, closed
    for (first, last) in contributions(schedule).into_values() {
        *changes.entry((first, false)).or_insert(0_i64) += 1;
        *changes.entry((last, true)).or_insert(0) -= 1;
    }
    let mut open = 0;
    let levels = changes.into_values().map(|change| {
        open += change;
        open as u32
    });
    levels.max().unwrap_or(0)
}

fn device_visits(schedule: &Schedule, pools: &Pools) -> Vec<DeviceVisit> {
    let visits: Vec<(usize, &Visit)> =
        schedule.visits.iter().enumerate().filter(|(_, visit)| visit.on_device()).collect();
    let blocks: Vec<&[BlockId]> = visits.iter().map(|(_, visit)| visit.blocks()).collect();
    let spans = contributions(schedule);
    let residences = super::residency::residency(&blocks, pools.weights);
    let mut resolved = Vec::with_capacity(visits.len());
    for (now, ((index, visit), residences)) in visits.into_iter().zip(residences).enumerate() {
        let backward = visit.phase == Phase::Backward;
        let trained = || visit.blocks().iter().filter(|id| backward && spans.contains_key(id));
        resolved.push(DeviceVisit {
            visit: index,
            residences,
            accumulates: trained().map(|&id| (id, spans[&id].0 == now)).collect(),
            closes: trained().filter(|id| spans[id].1 == now).copied().collect(),
        });
    }
    resolved
}

fn reductions(schedule: &Schedule, device_visits: &[DeviceVisit]) -> Vec<Reduction> {
    let scattered: Vec<BlockId> = schedule
        .visits
        .iter()
        .filter(|visit| !visit.on_device() && visit.phase == Phase::Backward)
        .flat_map(|visit| visit.blocks().iter().copied())
        .collect();
    let mut device = device_visits.iter();
    let mut list = Vec::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        match (visit.on_device(), visit.phase) {
            (true, _) => {
                let closes = device.next().into_iter().flat_map(|visit| &visit.closes);
                list.extend(closes.map(|&block| {
                    let joins = scattered.contains(&block);
                    Reduction::Gradient { block, joins }
                }));
            }
            (false, Phase::Backward) => list.push(Reduction::Scatter { visit: index }),
            (false, Phase::Forward) if visit.writes.is_empty() => {
                list.push(Reduction::Loss { visit: index });
            }
            (false, Phase::Forward) => {}
        }
    }
    list
}

/// Updated blocks in forward order, and the rest.
fn updates(schedule: &Schedule, reductions: &[Reduction]) -> (Vec<BlockId>, Vec<BlockId>) {
    let mut updated = vec![false; schedule.blocks.len()];
    for reduction in reductions {
        match *reduction {
            Reduction::Gradient { block, .. } => updated[block.0 as usize] = true,
            Reduction::Scatter { visit } => {
                for id in schedule.visits[visit].blocks() {
                    updated[id.0 as usize] |= !schedule.block(*id).frozen;
                }
            }
            Reduction::Loss { .. } => {}
        }
    }
    let all = || (0..schedule.blocks.len() as u32).map(BlockId);
    let carried = all().filter(|id| !updated[id.0 as usize]).collect();
    let mut in_order = Vec::new();
    for id in schedule.visits.iter().flat_map(Visit::blocks) {
        if std::mem::take(&mut updated[id.0 as usize]) {
            in_order.push(*id);
        }
    }
    (in_order, carried)
}

fn traffic(schedule: &Schedule, device_visits: &[DeviceVisit]) -> Traffic {
    let mut traffic = Traffic::default();
    for resolved in device_visits {
        let visit = &schedule.visits[resolved.visit];
        let fetched = resolved.residences.iter().filter(|residence| residence.fetch);
        let sum = |edge: &mut u64, bytes: u64| *edge = edge.saturating_add(bytes);
        fetched.for_each(|r| sum(&mut traffic.weights, schedule.block(r.block).bytes));
        let closed = resolved.closes.iter();
        closed.for_each(|&id| sum(&mut traffic.gradients, schedule.block(id).gradient_bytes));
        for m in visit.micro_batches.clone() {
            let bytes = |id: &BoundaryId| schedule.stashed_bytes(*id, m);
            visit.reads.iter().for_each(|id| sum(&mut traffic.inputs, bytes(id)));
            visit.writes.iter().for_each(|id| sum(&mut traffic.outputs, bytes(id)));
        }
    }
    traffic
}

/// The order of pieces on the upload lane: see the head of this file.
fn pieces(schedule: &Schedule, pools: &Pools, device_visits: &[DeviceVisit]) -> Vec<Piece> {
    // For each visit, how many of its inputs come first, and in front of which visit's.
    let mut places = Vec::with_capacity(device_visits.len());
    let mut earliest = (0, 0);
    for (own, resolved) in device_visits.iter().enumerate() {
        let freed = resolved.residences.iter().filter_map(|residence| residence.after);
        let behind = freed.chain(own.checked_sub(pools.visits as usize)).max();
        let meanwhile = behind.map_or(0, |visit| visit + 1);
        let place = if meanwhile >= own {
            (own, 0)
        } else {
            let visit = &schedule.visits[device_visits[meanwhile].visit];
            let slots = schedule.slots(&visit.reads).max(1);
            let inputs = (pools.ahead / slots).max(1).min(visit.micro_batches.len() as u32);
            (meanwhile, inputs)
        };
        earliest = place.max(earliest);
        places.push(earliest);
    }
    let mut coming = places.into_iter().enumerate().peekable();
    let mut list = Vec::new();
    let mut own = 0;
    for (index, visit) in schedule.visits.iter().enumerate() {
        if !visit.on_device() {
            if visit.is_gather() {
                list.push(Piece::Gather { visit: index });
            }
            continue;
        }
        for (before, micro_batch) in (0..).zip(visit.micro_batches.clone()) {
            while let Some((device_visit, _)) = coming.next_if(|(_, place)| *place <= (own, before))
            {
                list.push(Piece::Weights { device_visit });
            }
            if !visit.reads.is_empty() {
                list.push(Piece::Inputs { device_visit: own, micro_batch });
            }
        }
        own += 1;
    }
    list
}
