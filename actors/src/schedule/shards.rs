//! Sharded transfer: each device uploads a part of a block over its own link, and copies the other
//! parts from the devices that uploaded them (the paper's L2L-p).

use std::collections::BTreeSet;
use std::ops::Range;

use super::device_visits::DeviceVisit;
use super::{DeviceId, Portion, Refusal, Schedule, Visit};

/// One of the parts of a block, which have about the same size: the part that device `index`
/// uploads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The number of the part, and of the device that uploads it.
    pub index: DeviceId,
    /// The number of parts.
    pub of: u32,
}

/// Shards are cut at multiples of this number of bytes.
const ALIGNED: u64 = 256;

impl Shard {
    /// The shard that is all of a block.
    pub const WHOLE: Shard = Shard { index: 0, of: 1 };

    /// The range of the shard in a block of `bytes` bytes.
    pub fn range(self, bytes: u64) -> Range<u64> {
        if self == Shard::WHOLE {
            return 0..bytes;
        }
        let each = bytes.div_ceil(u64::from(self.of)).div_ceil(ALIGNED).saturating_mul(ALIGNED);
        let end = |index: u64| index.saturating_mul(each).min(bytes);
        end(self.index.into())..end(u64::from(self.index) + 1)
    }

    /// The bytes of the shard in a block of `bytes` bytes.
    pub fn bytes(self, bytes: u64) -> u64 {
        let Range { start, end } = self.range(bytes);
        end - start
    }

    /// The shards of the other devices.
    pub fn others(self) -> impl Iterator<Item = Shard> {
        let all = (0..self.of).map(move |index| Shard { index: index as DeviceId, of: self.of });
        all.filter(move |&shard| shard != self)
    }
}

impl Schedule {
    /// The shard of a block that a device uploads.
    pub fn shard_of(&self, device: DeviceId) -> Shard {
        match self.shards {
            1 => Shard::WHOLE,
            of => Shard { index: device, of },
        }
    }

    /// True when each of the first `devices` devices visits a layer.
    pub fn keeps_busy(&self, devices: u32) -> bool {
        self.idle_device(devices).is_none()
    }

    fn idle_device(&self, devices: u32) -> Option<u32> {
        let busy: BTreeSet<_> = self.visits.iter().filter_map(Visit::device).collect();
        (0..devices).find(|&device| !busy.contains(&(device as DeviceId)))
    }
}

/// Checks that all devices upload the same blocks in the same order, if blocks are sharded.
pub(super) fn check(schedule: &Schedule, device_visits: &[DeviceVisit]) -> Result<(), Refusal> {
    let shards = schedule.shards;
    let devices = schedule.devices();
    if shards == 1 {
        return Ok(());
    }
    if let Some(device) = schedule.idle_device(shards.max(devices)) {
        let reason = format!("blocks come in {shards} shards, and device {device} visits no layer");
        return Err(Refusal::of(reason));
    }
    if shards != devices {
        let reason = format!("blocks come in {shards} shards to {devices} devices");
        return Err(Refusal::of(reason));
    }
    let uploads: Vec<Vec<(Portion, usize)>> =
        (0..schedule.devices()).map(|d| fetches(schedule, device_visits, d as DeviceId)).collect();
    for (device, of_device) in uploads.iter().enumerate().skip(1) {
        let differs = |nth: &usize| {
            let block = |of: &[(Portion, usize)]| of.get(*nth).map(|(block, _)| *block);
            block(of_device) != block(&uploads[0])
        };
        let longest = of_device.len().max(uploads[0].len());
        let Some(nth) = (0..longest).find(differs) else { continue };
        let (block, visit) = of_device.get(nth).or(uploads[0].get(nth)).expect("it is not behind");
        let reason = format!(
            "{block} comes in shards, and devices 0 and {device} do not upload it in the same \
             order: all devices have to visit the same layers, with as many micro-batches each or \
             with weight slots for all blocks"
        );
        return Err(Refusal::at(schedule, *visit, reason));
    }
    Ok(())
}

/// Adds advice to a refusal of the replay if blocks come in shards.
pub(super) fn hint(schedule: &Schedule, mut refusal: Refusal) -> Refusal {
    if schedule.shards > 1 {
        let hint = "; blocks come in shards, so devices wait for each other: more slots of pool \
                    gradients would do, or whole blocks";
        refusal.reason.push_str(hint);
    }
    refusal
}

/// The blocks that a device fetches, each with the visit it is for.
fn fetches(
    schedule: &Schedule,
    device_visits: &[DeviceVisit],
    device: DeviceId,
) -> Vec<(Portion, usize)> {
    let is_own = |visit: &&DeviceVisit| schedule.visits[visit.visit].device() == Some(device);
    let own = device_visits.iter().filter(is_own);
    own.flat_map(|visit| visit.uploads().map(|residence| (residence.portion, visit.visit)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::Shard;

    #[test]
    fn shards_cover_a_block_once() {
        for bytes in [0, 4, 256, 1000, 5000, 1 << 20] {
            for of in 1..6 {
                let mut next = 0;
                for index in 0..of {
                    let range = Shard { index, of: of.into() }.range(bytes);
                    assert_eq!(range.start, next);
                    next = range.end;
                }
                assert_eq!(next, bytes);
            }
        }
    }
}
