//! The plan of a step: a schedule with every choice made.

use super::device_visits::{DeviceVisit, by_device, device_visits};
use super::fetches::{Fetch, fetches};
use super::pieces::{Piece, pieces};
use super::pools::Pools;
use super::reductions::{Reduction, reductions, updates};
use super::replay::Walks;
use super::traffic::Traffic;
use super::{BlockId, Refusal, Schedule, Visit, batches, rules, shards};

/// A schedule that was checked against pools, and what each actor walks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// The schedule.
    pub schedule: Schedule,
    /// The pools it was checked against.
    pub pools: Pools,
    /// The visits of all devices, in order.
    pub device_visits: Vec<DeviceVisit>,
    /// The lists that the actors of each device walk.
    pub walks: Vec<DeviceWalk>,
    /// The Fetcher's list.
    pub fetches: Vec<Fetch>,
    /// The Reducer's list.
    pub reductions: Vec<Reduction>,
    /// The Optimizer's list: updated blocks, in forward order of their first visit.
    pub updates: Vec<BlockId>,
    /// All other blocks: published as of the next version, unchanged.
    pub carried: Vec<BlockId>,
    /// Bytes moved.
    pub traffic: Traffic,
}

/// The lists that the actors of one device walk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceWalk {
    /// The Executor's list: visits in order, as indices in [`StepPlan::device_visits`].
    pub visits: Vec<usize>,
    /// The Prefetcher's list.
    pub pieces: Vec<Piece>,
    /// Bytes that its link moves.
    pub traffic: Traffic,
}

impl StepPlan {
    /// Checks a schedule and makes every choice in it.
    ///
    /// # Errors
    /// The visit and the rule it breaks; or, when the walk does not end in these pools, the piece
    /// and the pool it waits for.
    pub fn new(schedule: Schedule, pools: Pools) -> Result<StepPlan, Refusal> {
        rules::check(&schedule)?;
        pools.check(&schedule)?;
        let device_visits = device_visits(&schedule, &pools);
        shards::check(&schedule, &device_visits)?;
        batches::check_uploads(&schedule, &device_visits)?;
        let reductions = reductions(&schedule, &device_visits);
        let (updates, carried) = updates(&schedule, &reductions);
        let walk = |visits: Vec<usize>| {
            let pieces = pieces(&schedule, &pools, &device_visits, &visits);
            let resolved = visits.iter().map(|&visit| &device_visits[visit]);
            let traffic = Traffic::of_device(&schedule, resolved);
            DeviceWalk { visits, pieces, traffic }
        };
        let walks: Vec<DeviceWalk> = by_device(&schedule, &pools).into_iter().map(walk).collect();
        let replay = |pools: &Pools, fetches: &[Fetch]| {
            let schedule = &schedule;
            let device_visits = &device_visits[..];
            let devices = &walks[..];
            Walks { schedule, pools, fetches, device_visits, devices, reductions: &reductions }
                .replay()
        };
        let fetches = if walks.len() > 1 && schedule.fetches() {
            // With several devices, the order in which they would take blocks that are all there.
            let all_there = Pools { reads: u32::MAX, ..pools };
            let order = replay(&all_there, &fetches(&schedule, &all_there, &device_visits, None))?;
            fetches(&schedule, &pools, &device_visits, Some(&order))
        } else {
            fetches(&schedule, &pools, &device_visits, None)
        };
        replay(&pools, &fetches).map_err(|refusal| shards::hint(&schedule, refusal))?;
        let traffic = Traffic::of(&schedule, &device_visits, &reductions, &updates, &fetches);
        Ok(StepPlan {
            schedule,
            pools,
            device_visits,
            walks,
            fetches,
            reductions,
            updates,
            carried,
            traffic,
        })
    }

    /// Checks that the walk of these lists ends in these pools, as [`new`](StepPlan::new) does: for
    /// a plan that was changed since.
    ///
    /// # Errors
    /// The piece that would wait for ever, and the pool that it would wait for.
    pub fn replay(&self) -> Result<(), Refusal> {
        let StepPlan { schedule, pools, device_visits, walks, fetches, reductions, .. } = self;
        pools.check(schedule)?;
        let devices = walks;
        Walks { schedule, pools, fetches, device_visits, devices, reductions }.replay().map(drop)
    }

    /// Bytes that a step reads from the file of the EPS, and bytes that it writes there. Where
    /// updates are deferred, the gradients of all updated blocks are counted: they wait there.
    pub fn file_bytes(&self, deferred: bool) -> (u64, u64) {
        let waiting = self.updates.iter().map(|&id| self.schedule.block(id).region_bytes);
        let waiting = if deferred { waiting.fold(0, u64::saturating_add) } else { 0 };
        let Traffic { read, written, .. } = self.traffic;
        (read.saturating_add(waiting), written.saturating_add(waiting))
    }

    /// The schedule's entry for a device visit.
    pub fn visit(&self, device_visit: usize) -> &Visit {
        &self.schedule.visits[self.device_visits[device_visit].visit]
    }
}
