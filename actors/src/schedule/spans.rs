//! From which visit to which a block's gradient lies open on the device.

use std::collections::BTreeMap;

use super::{BlockId, Phase, Schedule, Visit};

/// First and last backward visit of every trained block, as indices among the device's visits.
pub(super) fn gradient_spans(schedule: &Schedule) -> BTreeMap<BlockId, (usize, usize)> {
    let mut spans = BTreeMap::new();
    for (index, visit) in schedule.device_visits().enumerate() {
        if visit.phase == Phase::Backward {
            for &id in visit.blocks().iter().filter(|&&id| schedule.trains(id)) {
                spans.entry(id).or_insert((index, index)).1 = index;
            }
        }
    }
    spans
}

/// The most gradients that are open at once on one device.
pub(super) fn open_gradients(schedule: &Schedule) -> u32 {
    let devices: Vec<_> = schedule.device_visits().map(Visit::device).collect();
    let mut changes = BTreeMap::new(); // (device, visit, ended) -> opened, closed
    for (first, last) in gradient_spans(schedule).into_values() {
        *changes.entry((devices[first], first, false)).or_insert(0_i64) += 1;
        *changes.entry((devices[first], last, true)).or_insert(0) -= 1;
    }
    // Each device ends with none open, so the next one begins with none.
    let mut open = 0;
    let levels = changes.into_values().map(|change| {
        open += change;
        open as u32
    });
    levels.max().unwrap_or(0)
}
