//! How many bytes each edge moves in a step, as the schedule says.

use super::device_visits::DeviceVisit;
use super::fetches::Fetch;
use super::reductions::Reduction;
use super::{BlockId, BoundaryId, Schedule};

/// Bytes that each edge moves in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Blocks, to the device.
    pub weights: u64,
    /// Shards of blocks, to the device from other devices.
    pub shards: u64,
    /// Boundaries, from the stash.
    pub inputs: u64,
    /// Boundaries, to the stash.
    pub outputs: u64,
    /// Gradients, to the host.
    pub gradients: u64,
    /// Masters, states and gradient regions of staged blocks, read from their file. Deferred
    /// updates read more: see [`StepPlan::file_bytes`](super::StepPlan::file_bytes).
    pub read: u64,
    /// The same, written to their file.
    pub written: u64,
}

impl Traffic {
    /// Blocks and boundaries to the device.
    pub fn to_device(&self) -> u64 {
        self.weights.saturating_add(self.inputs)
    }

    /// Boundaries and gradients from it.
    pub fn from_device(&self) -> u64 {
        self.outputs.saturating_add(self.gradients)
    }

    pub(super) fn of(
        schedule: &Schedule,
        device_visits: &[DeviceVisit],
        reductions: &[Reduction],
        updates: &[BlockId],
        fetches: &[Fetch],
    ) -> Traffic {
        let mut traffic = Traffic::of_device(schedule, device_visits);
        traffic.add_file(schedule, reductions, updates, fetches);
        traffic
    }

    /// The bytes that cross between the host and the device of these visits.
    pub(super) fn of_device<'v>(
        schedule: &Schedule,
        device_visits: impl IntoIterator<Item = &'v DeviceVisit>,
    ) -> Traffic {
        let mut traffic = Traffic::default();
        let add = |edge: &mut u64, bytes: u64| *edge = edge.saturating_add(bytes);
        for resolved in device_visits {
            let visit = &schedule.visits[resolved.visit];
            let shard = schedule.shard_of(visit.device().expect("it is a device's"));
            for residence in resolved.uploads() {
                let all = schedule.cut(residence.portion).weight_bytes;
                let uploaded = shard.bytes(all);
                add(&mut traffic.weights, uploaded);
                add(&mut traffic.shards, all - uploaded);
            }
            let closed = resolved.closes.iter();
            closed.for_each(|&id| add(&mut traffic.gradients, schedule.cut(id).download_bytes));
            for m in visit.micro_batches.clone() {
                let bytes = |id: &BoundaryId| schedule.stashed_bytes(*id, m);
                visit.reads.iter().for_each(|id| add(&mut traffic.inputs, bytes(id)));
                visit.writes.iter().for_each(|id| add(&mut traffic.outputs, bytes(id)));
            }
        }
        traffic
    }

    /// Adds the bytes that staged blocks move if updates are eager.
    fn add_file(
        &mut self,
        schedule: &Schedule,
        reductions: &[Reduction],
        updates: &[BlockId],
        fetches: &[Fetch],
    ) {
        let staged = |id: BlockId| Some(schedule.block(id)).filter(|block| block.staged);
        for block in fetches.iter().filter_map(Fetch::read).filter_map(staged) {
            self.read = self.read.saturating_add(block.master_bytes);
        }
        for block in updates.iter().copied().filter_map(staged) {
            self.written = self.written.saturating_add(block.older_bytes);
        }
        let mut both_ways = |bytes: u64| {
            self.read = self.read.saturating_add(bytes);
            self.written = self.written.saturating_add(bytes);
        };
        for block in updates.iter().copied().filter_map(staged) {
            both_ways(block.master_bytes.saturating_add(block.state_bytes));
        }
        for reduction in reductions {
            if let Reduction::Gradient { portion, join, scattered: true, .. } = *reduction
                && !join.keeps
            {
                staged(portion.block).into_iter().for_each(|block| both_ways(block.region_bytes));
            }
        }
    }
}
