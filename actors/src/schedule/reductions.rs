//! The Reducer's list, and what the Optimizer updates from it.

use super::device_visits::DeviceVisit;
use super::{BlockId, DeviceId, Schedule, Visit, VisitKind};

/// One entry of the Reducer's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Compute the loss of a host visit's micro-batches.
    Loss {
        /// Index of the host visit.
        visit: usize,
    },
    /// Download a block's gradient; when a scatter adds to it later, join it in its region.
    Gradient {
        /// The block.
        block: BlockId,
        /// The device that it comes from.
        device: DeviceId,
        /// True when a scatter follows.
        joins: bool,
    },
    /// Add a host visit's boundary to the gradients of its blocks, which completes them.
    Scatter {
        /// Index of the host visit.
        visit: usize,
    },
}

pub(super) fn reductions(schedule: &Schedule, device_visits: &[DeviceVisit]) -> Vec<Reduction> {
    let scatters = schedule.visits.iter().filter(|visit| visit.kind == VisitKind::Scatter);
    let scattered: Vec<BlockId> = scatters.flat_map(Visit::blocks).copied().collect();
    let mut device = device_visits.iter();
    let mut list = Vec::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        match visit.kind {
            VisitKind::Layer | VisitKind::Tile => {
                let closes = device.next().into_iter().flat_map(|visit| &visit.closes);
                let device = visit.device().expect("a device visits layers");
                list.extend(closes.map(|&block| {
                    let joins = scattered.contains(&block);
                    Reduction::Gradient { block, device, joins }
                }));
            }
            VisitKind::Scatter => list.push(Reduction::Scatter { visit: index }),
            VisitKind::Loss => list.push(Reduction::Loss { visit: index }),
            VisitKind::Gather => {}
        }
    }
    list
}

/// Updated blocks in forward order, and the rest.
pub(super) fn updates(
    schedule: &Schedule,
    reductions: &[Reduction],
) -> (Vec<BlockId>, Vec<BlockId>) {
    let mut updated = vec![false; schedule.blocks.len()];
    for reduction in reductions {
        match *reduction {
            Reduction::Gradient { block, .. } => updated[block.0 as usize] = true,
            Reduction::Scatter { visit } => {
                for &id in schedule.visits[visit].blocks() {
                    updated[id.0 as usize] |= !schedule.block(id).frozen;
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
