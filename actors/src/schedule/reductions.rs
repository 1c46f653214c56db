//! The Reducer's list, and what the Optimizer updates from it.

use std::collections::BTreeMap;

use super::choice::{ChosenBy, of_gradient};
use super::device_visits::DeviceVisit;
use super::spans::{Join, join};
use super::{BlockId, DeviceId, GroupId, Portion, Schedule, VisitKind};

/// One entry of the Reducer's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Take what layers measured of a host visit's micro-batches, and answer.
    Balance {
        /// Index of the host visit.
        visit: usize,
    },
    /// Compute the loss of a host visit's micro-batches.
    Loss {
        /// Index of the host visit.
        visit: usize,
    },
    /// Take what an objective reads of a host visit's micro-batches, compute their loss, and write
    /// the weights of rows.
    Objective {
        /// Index of the host visit.
        visit: usize,
    },
    /// Download a group's gradient of a portion, join it with those of other groups, and merge the
    /// sum into the gradient of its block. The block's own goes on; into its region, when a scatter
    /// adds to it later.
    Gradient {
        /// The block, or its portion.
        portion: Portion,
        /// The group of micro-batches.
        group: GroupId,
        /// The device that it comes from.
        device: DeviceId,
        /// What says which parts of it have contributions; `None`: all may.
        chosen_by: Option<ChosenBy>,
        /// The join with other gradients of the portion.
        join: Join,
        /// True when a scatter follows.
        scattered: bool,
    },
    /// Add a host visit's boundary to the gradients of its blocks, which completes them.
    Scatter {
        /// Index of the host visit.
        visit: usize,
    },
}

impl Reduction {
    /// The block whose gradient, or portion of it, is reduced.
    pub fn block(&self) -> Option<BlockId> {
        match self {
            Reduction::Gradient { portion, .. } => Some(portion.block),
            _ => None,
        }
    }
}

pub(super) fn reductions(schedule: &Schedule, device_visits: &[DeviceVisit]) -> Vec<Reduction> {
    let scatters = schedule.visits.iter().filter(|visit| visit.kind == VisitKind::Scatter);
    let scattered: Vec<BlockId> = scatters.flat_map(|visit| &visit.blocks).copied().collect();
    let mut counts = BTreeMap::new(); // portion -> gradients that close, of all groups
    for &portion in device_visits.iter().flat_map(|visit| &visit.closes) {
        *counts.entry(portion).or_insert(0) += 1;
    }
    let mut came: BTreeMap<Portion, u32> = BTreeMap::new();
    let mut device = device_visits.iter();
    let mut list = Vec::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        match visit.kind {
            VisitKind::Layer | VisitKind::Tile => {
                let closes = device.next().into_iter().flat_map(|visit| &visit.closes);
                let device = visit.device().expect("a device visits layers");
                let group = schedule.group_of(visit.micro_batches.start);
                list.extend(closes.map(|&portion| {
                    let nth = came.entry(portion).or_insert(0);
                    let join = match schedule.in_batches {
                        true => join(0, 1),
                        false => join(*nth, counts[&portion]),
                    };
                    *nth += 1;
                    let scattered = scattered.contains(&portion.block);
                    let chosen_by = of_gradient(schedule, visit, portion);
                    Reduction::Gradient { portion, group, device, chosen_by, join, scattered }
                }));
            }
            VisitKind::Scatter => list.push(Reduction::Scatter { visit: index }),
            VisitKind::Balance { .. } => list.push(Reduction::Balance { visit: index }),
            VisitKind::Loss => list.push(Reduction::Loss { visit: index }),
            VisitKind::Objective { .. } => list.push(Reduction::Objective { visit: index }),
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
            Reduction::Gradient { portion, .. } => updated[portion.block.0 as usize] = true,
            Reduction::Scatter { visit } => {
                for &id in &schedule.visits[visit].blocks {
                    updated[id.0 as usize] |= !schedule.block(id).frozen;
                }
            }
            Reduction::Balance { .. } | Reduction::Loss { .. } | Reduction::Objective { .. } => {}
        }
    }
    let all = || (0..schedule.blocks.len() as u32).map(BlockId);
    let carried = all().filter(|id| !updated[id.0 as usize]).collect();
    let mut in_order = Vec::new();
    for id in schedule.visits.iter().flat_map(|visit| &visit.blocks) {
        if std::mem::take(&mut updated[id.0 as usize]) {
            in_order.push(*id);
        }
    }
    (in_order, carried)
}
