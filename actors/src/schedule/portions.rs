//! Portions: what a visit needs of a block on its device.
//!
//! A layer may be larger than a device. Then its blocks are cut, and each of its steps needs one
//! portion of them alone. On devices everything is of portions: weight slots, gradients, uploads
//! and downloads. On the host everything is of blocks: versions, masters, optimizer states, files,
//! ranks. Two operations stand between. An upload takes its portion from the block's master. A
//! merge puts the gradient of a portion, when it has that of all groups, into the gradient of its
//! block, which goes on with the last of them.
//!
//! Portions merge from the last to the first: the backward pass meets them in this order, so few
//! gradients are incomplete at once, and sums over portions have one order in every schedule.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::spans::gradient_spans;
use super::{BlockId, MicroBatch, Phase, Refusal, RingStep, Schedule, Visit};

/// What a visit needs of a block on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Portion {
    /// The block.
    pub block: BlockId,
    /// The index among the [cuts](Schedule::cuts) of the block; `None`: the block is not cut.
    pub cut: Option<u16>,
}

impl From<BlockId> for Portion {
    fn from(block: BlockId) -> Portion {
        Portion { block, cut: None }
    }
}

impl fmt::Display for Portion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(cut) = self.cut {
            write!(f, "portion {cut} of ")?;
        }
        self.block.fmt(f)
    }
}

/// One of the portions of a block: its sizes, and the sum that it is a part of. A layer adds up
/// what it computes with the portions of a sum, in their order: each step hands the sum so far to
/// the next, as [`Role::Partial`](super::Role). In the backward pass all of them read the gradient
/// of the sum, and [`Role::PartialGradient`](super::Role) goes from the last to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of the published copy: what one upload moves.
    pub weight_bytes: u64,
    /// Bytes of the f32 gradient of the trainable part.
    pub gradient_bytes: u64,
    /// Bytes of that gradient as it leaves the device.
    pub download_bytes: u64,
    /// The number of the sum. Portions of one sum follow each other.
    pub sum: u16,
}

/// The most portions of a block: of two sums, 64 each.
const MOST_PORTIONS: usize = 128;

impl RingStep {
    /// What it needs of each of its blocks.
    pub fn portions(&self) -> impl Iterator<Item = Portion> {
        self.needs.iter().map(|&block| Portion { block, cut: self.cut })
    }
}

impl Visit {
    /// What it needs of each of its blocks.
    pub fn portions(&self) -> impl Iterator<Item = Portion> {
        self.blocks.iter().map(|&block| Portion { block, cut: self.cut })
    }
}

impl Schedule {
    /// The sizes of a portion. Panics on an unknown one: a plan holds none.
    pub fn cut(&self, Portion { block, cut }: Portion) -> Cut {
        if let Some(cut) = cut {
            return self.cuts[&block][usize::from(cut)];
        }
        let block = self.block(block);
        let weight_bytes = block.weight_bytes;
        let gradient_bytes = block.gradient_bytes;
        let download_bytes = block.download_bytes;
        Cut { weight_bytes, gradient_bytes, download_bytes, sum: 0 }
    }

    /// True for the portion of a block whose gradient is the first to be merged.
    pub fn is_first_merged(&self, Portion { block, cut }: Portion) -> bool {
        let cuts = self.cuts.get(&block).map_or(0, Vec::len);
        cut.is_some_and(|cut| usize::from(cut) + 1 == cuts)
    }

    /// All portions: a whole block counts as one.
    pub(super) fn portions(&self) -> u32 {
        let more = self.cuts.values().map(|cuts| (cuts.len() as u32).saturating_sub(1));
        self.blocks.len() as u32 + more.sum::<u32>()
    }
}

/// Checks the names of portions: a device needs one of each block that is cut, and the host needs
/// blocks that are not.
pub(super) fn names(
    cuts: &BTreeMap<BlockId, Vec<Cut>>,
    portions: impl Iterator<Item = Portion>,
) -> Result<(), String> {
    for Portion { block, cut } in portions {
        match (cuts.get(&block), cut) {
            (None, None) => {}
            (None, Some(_)) => return Err(format!("needs a portion of {block}, which is whole")),
            (Some(_), None) => return Err(format!("needs all of {block}, which is cut")),
            (Some(cuts), Some(cut)) if usize::from(cut) >= cuts.len() => {
                let cuts = cuts.len();
                return Err(format!("needs portion {cut} of {block}, which has {cuts}"));
            }
            (Some(_), Some(_)) => {}
        }
    }
    Ok(())
}

/// Checks the cuts of blocks.
pub(super) fn cuts(schedule: &Schedule) -> Result<(), Refusal> {
    for (id, cuts) in &schedule.cuts {
        if id.0 as usize >= schedule.blocks.len() {
            return Err(Refusal::of(format!("{id} is cut, and the schedule has no such block")));
        }
        if cuts.is_empty() || cuts.len() > MOST_PORTIONS {
            let count = cuts.len();
            let reason = format!("{id} is cut into {count} portions, not 1 to {MOST_PORTIONS}");
            return Err(Refusal::of(reason));
        }
        if !cuts.is_sorted_by_key(|cut| cut.sum) {
            return Err(Refusal::of(format!("portions of {id} that are one sum are apart")));
        }
    }
    Ok(())
}

/// Checks that a pass meets all portions of a block or none, and that portions complete their
/// gradients from the last to the first.
pub(super) fn check(schedule: &Schedule) -> Result<(), Refusal> {
    let mut met: BTreeMap<(BlockId, Phase, MicroBatch), BTreeSet<u16>> = BTreeMap::new();
    let mut layers: BTreeMap<BlockId, &Visit> = BTreeMap::new();
    let mut last = BTreeMap::new(); // portion -> the last visit that adds to its gradient
    for (index, visit) in schedule.visits.iter().enumerate() {
        for portion in visit.portions() {
            let Portion { block, cut: Some(cut) } = portion else { continue };
            if visit.phase != Phase::Keys {
                for m in visit.micro_batches.clone() {
                    met.entry((block, visit.phase, m)).or_default().insert(cut);
                }
            }
            let first = *layers.entry(block).or_insert(visit);
            if first.layer != visit.layer {
                let reason = format!("needs {portion}, and {} needs the block, too", first.layer);
                return Err(Refusal::at(schedule, index, reason));
            }
            if visit.phase == Phase::Backward && schedule.is_trained(block) {
                last.insert(portion, index);
            }
        }
    }
    for ((block, phase, m), met) in met {
        let all = schedule.cuts[&block].len();
        if let Some(cut) = (0..all as u16).find(|cut| !met.contains(cut)) {
            let missing = Portion { block, cut: Some(cut) };
            let reason = format!("no {phase} visit of micro-batch {m} needs {missing}");
            return Err(Refusal::of(reason));
        }
    }
    let ends = last.iter().zip(last.iter().skip(1));
    for ((portion, &index), (next, &before)) in ends {
        if portion.block == next.block && index < before {
            let reason = format!(
                "completes the gradient of {portion} before that of {next}: portions merge from \
                 the last to the first"
            );
            return Err(Refusal::at(schedule, index, reason));
        }
    }
    Ok(())
}

/// The blocks whose gradients are being merged, while the Reducer walks its list. Each holds a
/// landing slot.
#[derive(Clone, Default)]
pub(super) struct Merging(BTreeSet<BlockId>);

impl Merging {
    /// Goes on by a gradient of a portion, which is that of all groups where it `completes`.
    /// Returns the landing slots that it needs: its own, and those of blocks.
    pub(super) fn slots(&mut self, schedule: &Schedule, portion: Portion, completes: bool) -> u32 {
        if completes && schedule.is_first_merged(portion) {
            self.0.insert(portion.block);
        }
        let slots = self.0.len() as u32 + 1;
        if completes && portion.cut == Some(0) {
            self.0.remove(&portion.block);
        }
        slots
    }
}

/// The most landing slots that are needed at once, at least one.
pub(super) fn landing_slots(schedule: &Schedule) -> u32 {
    let mut completed = BTreeMap::new(); // portion -> the visit of a device that completes it
    for ((portion, _), (_, last)) in gradient_spans(schedule) {
        let end = completed.entry(portion).or_insert(last);
        *end = last.max(*end);
    }
    let mut merging = Merging::default();
    let mut most = 1;
    for (index, visit) in schedule.device_visits().enumerate() {
        for portion in visit.portions().filter(|one| completed.get(one) == Some(&index)) {
            most = most.max(merging.slots(schedule, portion, true));
        }
    }
    most
}
