//! Which device does which visits of a schedule. What the schedule computes stays the same.

use std::collections::BTreeMap;

use super::{DeviceId, Place, Schedule, Visit};

/// Deals the layers of a schedule over devices, one after the other: device `d` of `N` visits the
/// layers `d`, `d + N`, … Of a layer in pieces each piece counts as a layer. Micro-batches follow
/// each other from device to device, so that all devices work at once.
pub fn deal(mut schedule: Schedule, devices: u32) -> Schedule {
    let mut dealt = BTreeMap::new();
    for visit in visits(&mut schedule) {
        let next = dealt.len() as u32 % devices.max(1);
        visit.place = Place::Device(*dealt.entry(visit.stop()).or_insert(next) as DeviceId);
    }
    schedule
}

/// Deals the groups of a schedule over devices: each device visits all layers with groups of its
/// own, next to each other, as many as its weight says (data parallelism). Each visit must be of
/// micro-batches of one group.
pub fn deal_groups(mut schedule: Schedule, weights: &[u32]) -> Schedule {
    let groups = devices_of_groups(schedule.groups.len() as u32, weights);
    let firsts: Vec<_> = schedule.groups.iter().map(|group| group.start).collect();
    for visit in visits(&mut schedule) {
        let group = firsts.partition_point(|&first| first <= visit.micro_batches.start);
        if let Some(&device) = group.checked_sub(1).and_then(|group| groups.get(group)) {
            visit.place = Place::Device(device);
        }
    }
    schedule
}

fn visits(schedule: &mut Schedule) -> impl Iterator<Item = &mut Visit> {
    schedule.visits.iter_mut().filter(|visit| visit.on_device())
}

/// The device of each group: of all weights' shares, the group's middle lies in that of its device.
pub fn devices_of_groups(groups: u32, weights: &[u32]) -> Vec<DeviceId> {
    let total: u64 = weights.iter().map(|&weight| u64::from(weight)).sum();
    let ends = weights.iter().scan(0, |end, &weight| {
        *end += u64::from(weight);
        Some(*end)
    });
    let ends: Vec<u64> = ends.collect();
    let device = |group: u32| {
        let middle = (2 * u64::from(group) + 1) * total;
        let device = ends.partition_point(|&end| 2 * u64::from(groups) * end <= middle);
        device.min(weights.len().saturating_sub(1)) as DeviceId
    };
    (0..groups).map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::devices_of_groups;

    #[test]
    fn groups_are_dealt_by_weight() {
        assert_eq!(devices_of_groups(4, &[1, 1]), [0, 0, 1, 1]);
        assert_eq!(devices_of_groups(4, &[1, 3]), [0, 1, 1, 1]);
        assert_eq!(devices_of_groups(3, &[1, 1]), [0, 1, 1]);
        assert_eq!(devices_of_groups(2, &[1, 0, 1]), [0, 2]);
        assert_eq!(devices_of_groups(1, &[1, 1, 1, 1]), [2]);
    }
}
