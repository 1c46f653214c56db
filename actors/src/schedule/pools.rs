//! Pools: how many slots of each kind a ring has, and whether they suffice for a schedule.

use std::collections::BTreeMap;

use super::batches::versions_in_use;
use super::portions::landing_slots;
use super::spans::{kept_gradients, open_gradients};
use super::{Phase, Refusal, Schedule, Visit};

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

/// Slots of every pool, one number for each holder. They are allocated at start. Each device has as
/// many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pools {
    /// Devices. Each has its own pools of weights, visits, inputs, outputs and gradients.
    pub devices: u32,
    /// Parts of a block that each device uploads one of; more than 1: each has a PeerCopier.
    pub shards: u32,
    /// Processes of the run; more than 1: each has lanes for exchanges with the others.
    pub ranks: u32,
    /// Blocks on the device.
    pub weights: u32,
    /// Device visits between the announcement of their weights and their end.
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
    /// Gradients on the host that are kept for those of later groups.
    pub parts: u32,
    /// Staging slots on the host for masters that are read from file, or gathered from the parts of
    /// all processes: read ahead, or being uploaded.
    pub reads: u32,
    /// Staging slots on the host for masters of staged blocks with their optimizer state: being
    /// read, updated or written.
    pub states: u32,
}

impl Pools {
    /// The pools that this schedule needs at these depths. Depths too low to run it at all are
    /// raised.
    pub fn of(schedule: &Schedule, depths: &Capacities) -> Pools {
        let visits = || schedule.device_visits();
        let blocks = visits().map(|visit| visit.blocks.len() as u32).max().unwrap_or(0);
        let reads = visits().map(|visit| visit.reads.len() as u32).max().unwrap_or(0);
        let writes = visits().map(|visit| visit.writes.len() as u32).max().unwrap_or(0);
        let all = schedule.portions(); // more slots than portions are never used
        let weights = depths.weights.clamp(blocks, all.max(blocks));
        let weights = weights.max(versions_in_use(schedule));
        let brought = visits().map(|visit| {
            (visit.reads.len() as u32).saturating_mul(visit.micro_batches.len() as u32)
        });
        let ahead = depths.stash.min(brought.fold(0, u32::saturating_add)).max(1);
        let on_file = schedule.blocks.iter().any(|block| block.staged);
        Pools {
            devices: schedule.devices(),
            shards: schedule.shards,
            ranks: schedule.ranks.count,
            weights,
            // One visit runs, and the blocks of the others come; more than three ahead only queue
            // up in front of the inputs of the visit that runs. Visits that are parts of one pass
            // bring blocks once.
            visits: (weights.clamp(2, 4) - 1).saturating_mul(parts_of_a_pass(schedule)) + 1,
            inputs: reads.saturating_add(ahead),
            ahead,
            outputs: writes.saturating_add(writes.max(ahead)),
            gradients: depths.gradients.min(all).max(open_gradients(schedule)).max(1),
            reduced: depths.reduced.min(all).max(landing_slots(schedule)),
            parts: kept_gradients(schedule),
            // One block is read while those of a visit are uploaded.
            reads: if schedule.fetches() {
                host_slots_of_a_visit(schedule).saturating_add(1)
            } else {
                0
            },
            // The state of one block is read or written while another is updated.
            states: if on_file { 2 } else { 0 },
        }
    }

    /// The smallest pools that run either schedule.
    pub fn max(self, other: Pools) -> Pools {
        Pools {
            devices: self.devices.max(other.devices),
            shards: self.shards.max(other.shards),
            ranks: self.ranks.max(other.ranks),
            weights: self.weights.max(other.weights),
            visits: self.visits.max(other.visits),
            inputs: self.inputs.max(other.inputs),
            ahead: self.ahead.max(other.ahead),
            outputs: self.outputs.max(other.outputs),
            gradients: self.gradients.max(other.gradients),
            reduced: self.reduced.max(other.reduced),
            parts: self.parts.max(other.parts),
            reads: self.reads.max(other.reads),
            states: self.states.max(other.states),
        }
    }

    /// Checks that each pool holds all that one operation takes from it at once, and that the pool
    /// of gradients holds all that stay open.
    pub(super) fn check(&self, schedule: &Schedule) -> Result<(), Refusal> {
        let known = |visit: &Visit| visit.device().is_none_or(|d| u32::from(d) < self.devices);
        if let Some(index) = schedule.visits.iter().position(|visit| !known(visit)) {
            let has = self.devices;
            return Err(Refusal::at(
                schedule,
                index,
                format!("this ring has devices 0 to {}", has.saturating_sub(1)),
            ));
        }
        for (index, visit) in schedule.visits.iter().enumerate().filter(|(_, v)| v.on_device()) {
            let needs = [
                ("weights", visit.blocks.len() as u32, self.weights),
                ("inputs", visit.reads.len() as u32, self.inputs),
                ("outputs", visit.writes.len() as u32, self.outputs),
            ];
            for (pool, need, has) in needs {
                if need > has {
                    let reason = format!("takes {need} slots of pool {pool}, which has {has}");
                    return Err(Refusal::at(schedule, index, reason));
                }
            }
        }
        if schedule.shards > 1 && self.shards == 1 {
            return Err(Refusal::of("blocks come in shards, and this ring has no PeerCopiers"));
        }
        let open = open_gradients(schedule);
        let has = self.gradients;
        if open > has {
            let reason = format!(
                "holds {open} gradients of a device open at once; pool gradients has {has}"
            );
            return Err(Refusal::of(reason));
        }
        let kept = kept_gradients(schedule);
        let has = self.parts;
        if kept > has {
            let reason = format!("keeps {kept} gradients for later groups; pool parts has {has}");
            return Err(Refusal::of(reason));
        }
        if schedule.fetches() && self.reads < host_slots_of_a_visit(schedule).max(1) {
            return Err(Refusal::of("pool reads is too small for a visit's blocks"));
        }
        if schedule.blocks.iter().any(|block| block.staged) && self.states < 2 {
            return Err(Refusal::of("pool states is too small: it needs 2 slots"));
        }
        if schedule.ranks.count > self.ranks {
            return Err(Refusal::of("the schedule is for more processes than this ring"));
        }
        if self.visits == 0 || self.reduced == 0 {
            return Err(Refusal::of("pools visits and reduced need at least one slot"));
        }
        let landing = landing_slots(schedule);
        let has = self.reduced;
        if landing > has {
            let reason = format!(
                "merges portions of gradients in {landing} landing slots; pool reduced has {has}"
            );
            return Err(Refusal::of(reason));
        }
        Ok(())
    }
}

/// The most visits of a device that are one backward pass of a layer: visits of keys, each with the
/// visit that needs them.
fn parts_of_a_pass(schedule: &Schedule) -> u32 {
    let mut parts: BTreeMap<_, u32> = BTreeMap::new();
    for visit in schedule.device_visits().filter(|visit| visit.phase == Phase::Keys) {
        *parts.entry((visit.device(), visit.stop())).or_default() += 2;
    }
    parts.into_values().max().unwrap_or(1)
}

/// The most blocks that one visit of the device takes from staging slots.
fn host_slots_of_a_visit(schedule: &Schedule) -> u32 {
    let slots = schedule.device_visits().map(|visit| schedule.host_slots(&visit.blocks) as u32);
    slots.max().unwrap_or(0)
}
