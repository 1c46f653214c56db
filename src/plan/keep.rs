//! Which layers keep their activations on the device, if `schedule.recompute = "auto"`.
//!
//! A kept layer costs memory of the device and saves the recomputation of its forward pass. So
//! whole layers fill what `device.memory` leaves (or the machine, if it has less), from the last
//! layer downwards: what the last layers keep is read first. Without `device.memory` they fill what
//! a GPU has free when the plan is made. Of several devices, each keeps the last of its own layers.

use std::collections::{BTreeMap, BTreeSet};

use l2l_actors::schedule::{BoundaryId, DeviceId, LayerId, Role, Visit};

use super::fit;
use super::regions::Regions;
use super::spec::PlanSpec;
use crate::config::{DeviceKind, Recompute};
use crate::error::Error;

/// The layers that keep their activations on the device, below a ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// The number of layers that keep them.
    pub kept: usize,
    /// The number of layers that could.
    pub of: usize,
    /// Bytes of the device that one more layer would take; of several devices, one more on each.
    /// `None`: all layers keep theirs.
    pub next_bytes: Option<u64>,
    /// The bytes of a device that the plan may take for it.
    pub ceiling: u64,
}

impl PlanSpec<'_> {
    /// Chooses the layers. `None` if the config leaves no choice: it says itself what is
    /// recomputed, or no ceiling is known.
    pub(super) fn keep(&mut self) -> Result<Option<Keeping>, Error> {
        let config = &self.settings.config;
        let is_auto = config.schedule.recompute == Recompute::AUTO;
        let has_ceiling =
            config.device.memory.bytes().is_some() || config.device.kind == DeviceKind::Cuda;
        if !is_auto || !self.settings.trains || !has_ceiling {
            return Ok(None);
        }
        let layers = self.layers_by_device()?;
        let without = self.keeping(&layers, 0)?;
        let host = without.terms()[1].iter().map(|term| term.bytes).sum();
        let config = &self.settings.config;
        let Some(ceiling) = fit::ceiling(config, self.share.ranks, device_bytes(&without), host)
        else {
            return Ok(None);
        };
        let most = layers.values().map(Vec::len).max().unwrap_or(0);
        let mut least = 0;
        let mut over = most + 1;
        // If all layers fit, the first plan shows it.
        let mut next = most;
        while over - least > 1 {
            if device_bytes(&self.keeping(&layers, next)?) <= ceiling {
                least = next;
            } else {
                over = next;
            }
            next = least.midpoint(over);
        }
        let mut next_bytes = None;
        if least < most {
            let more = device_bytes(&self.keeping(&layers, least + 1)?);
            let bytes = device_bytes(&self.keeping(&layers, least)?);
            next_bytes = Some(more.saturating_sub(bytes));
        }
        self.kept = last_of_each(&layers, least);
        let of = last_of_each(&layers, most).len();
        Ok(Some(Keeping { kept: self.kept.len(), of, next_bytes, ceiling }))
    }

    /// The layers of each device that save activations in a step that trains, the last first.
    fn layers_by_device(&mut self) -> Result<BTreeMap<DeviceId, Vec<LayerId>>, Error> {
        self.kept = (0..self.model.layers.len() as u32).map(LayerId).collect();
        let schedule = self.schedule(self.steps[0], self.share)?;
        let mut found: BTreeMap<DeviceId, BTreeSet<LayerId>> = BTreeMap::new();
        let is_saved = |id: &BoundaryId| schedule.boundary(*id).role == Role::SavedActivations;
        let saves = |visit: &&Visit| visit.keeps.iter().any(is_saved);
        for visit in schedule.visits.iter().filter(saves) {
            let device = visit.device().expect("only devices keep boundaries");
            found.entry(device).or_default().insert(visit.layer);
        }
        let last_first =
            |(device, layers): (_, BTreeSet<_>)| (device, layers.into_iter().rev().collect());
        Ok(found.into_iter().map(last_first).collect())
    }

    /// The memory regions, if each device keeps its last `count` layers.
    fn keeping(
        &mut self,
        layers: &BTreeMap<DeviceId, Vec<LayerId>>,
        count: usize,
    ) -> Result<Regions, Error> {
        self.kept = last_of_each(layers, count);
        let schedules = self.schedules()?;
        let pools = self.pools(&schedules.all);
        self.regions(&schedules, &pools)
    }
}

fn device_bytes(regions: &Regions) -> u64 {
    (regions.device_floats() * size_of::<f32>()) as u64
}

/// The last `count` layers of each device.
fn last_of_each(layers: &BTreeMap<DeviceId, Vec<LayerId>>, count: usize) -> BTreeSet<LayerId> {
    layers.values().flat_map(|of_device| of_device.iter().take(count).copied()).collect()
}
