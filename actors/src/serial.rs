//! A step on one page: all work of a plan, one operation after the other.
//!
//! The ring does the same work. There each actor has its own part of it, and lanes overlap. This
//! walk is the place to read what a step is; tests hold the ring against it. It covers one process
//! whose blocks are in memory and are uploaded whole. With a file, ranks or shards the same
//! operations run in the same order, with other places of masters, and further ones between them.

use std::collections::{BTreeMap, BTreeSet};

use crate::messages::Resolved;
use crate::schedule::{
    BlockId, BoundaryId, DeviceId, DeviceVisit, MicroBatch, Portion, Reduction, Shard, Share,
    StepPlan, Version, VisitKind,
};
use crate::work::{Accumulator, BlockUse, GradientAt, MasterAt, Placed, Work};

/// Walks a plan, with blocks of this version. `perform` does the work of each operation, on a
/// device or on the host (`None`), and returns its value: a loss, or a sum of squares.
pub fn step(
    plan: &StepPlan,
    version: Version,
    deferred: bool,
    perform: impl FnMut(Option<DeviceId>, Work) -> f64,
) -> Resolved {
    let is_gradient = |reduction: &&Reduction| matches!(reduction, Reduction::Gradient { .. });
    let reductions: Vec<&Reduction> = plan.reductions.iter().filter(is_gradient).collect();
    let mut walk = Walk {
        plan,
        version,
        deferred,
        perform,
        open: BTreeMap::new(),
        kept: BTreeMap::new(),
        merging: BTreeMap::new(),
        reductions: reductions.into_iter(),
        squares: BTreeMap::new(),
    };
    let mut device_visits = plan.device_visits.iter().enumerate();
    let mut loss = 0.0;
    for (index, visit) in plan.schedule.visits.iter().enumerate() {
        match visit.kind {
            VisitKind::Gather => {
                for m in visit.micro_batches.clone() {
                    let share = Share::MicroBatch(m);
                    walk.on_host(Work::Gather { visit: index, share, master: MasterAt::Memory });
                }
            }
            VisitKind::Layer | VisitKind::Tile => {
                let (at, resolved) = device_visits.next().expect("each has its choices");
                walk.device_visit(at, resolved);
            }
            VisitKind::Balance { .. } | VisitKind::Objective { .. } => {
                for micro_batch in visit.micro_batches.clone() {
                    walk.on_host(Work::Measure { visit: index, micro_batch });
                }
                let is_objective = matches!(visit.kind, VisitKind::Objective { .. });
                for micro_batch in visit.micro_batches.clone().filter(|_| is_objective) {
                    loss += walk.on_host(Work::Loss { visit: index, micro_batch });
                }
                let answers = visit.micro_batches.clone().filter(|_| !visit.writes.is_empty());
                for micro_batch in answers {
                    walk.on_host(Work::Answer { visit: index, micro_batch });
                }
            }
            VisitKind::Loss => {
                for micro_batch in visit.micro_batches.clone() {
                    loss += walk.on_host(Work::Loss { visit: index, micro_batch });
                }
            }
            VisitKind::Scatter => walk.scatter(index),
        }
    }
    if plan.schedule.trains {
        // Blocks that no update changed go to the next version.
        for batch in 0..plan.schedule.batches() {
            walk.on_host(Work::Carry { version: version + u64::from(batch) });
        }
    }
    let norm = walk.squares.values().sum::<f64>().sqrt();
    if deferred {
        plan.updates.iter().for_each(|&block| {
            walk.update(block, version, GradientAt::Region, Some(norm));
        });
    }
    Resolved { step: version, loss, norm }
}

struct Walk<'p, P> {
    plan: &'p StepPlan,
    version: Version,
    deferred: bool,
    perform: P,
    /// Accumulators between a portion's first and last contribution, by device.
    open: BTreeMap<(DeviceId, Portion), u32>,
    /// Sums of earlier groups that wait on the host, the youngest last. They merge like the carries
    /// of a binary counter: of four groups, (4 + 3) + (2 + 1).
    kept: BTreeMap<Portion, Vec<u32>>,
    /// Landing blocks of gradients that are merged portion by portion.
    merging: BTreeMap<BlockId, u32>,
    /// The gradients of the plan, in the order in which visits complete them.
    reductions: std::vec::IntoIter<&'p Reduction>,
    /// The sum of squares of each gradient, by block and the version that it moves on.
    squares: BTreeMap<(BlockId, Version), f64>,
}

impl<P: FnMut(Option<DeviceId>, Work) -> f64> Walk<'_, P> {
    fn on_host(&mut self, work: Work) -> f64 {
        (self.perform)(None, work)
    }

    /// Uploads blocks that are not there, runs all micro-batches, and reduces the gradients that
    /// are complete.
    fn device_visit(&mut self, at: usize, resolved: &DeviceVisit) {
        let visit = self.plan.visit(at);
        let device = visit.device().expect("it is a device's");
        for residence in resolved.uploads() {
            let version = self.plan.schedule.version_read(self.version, residence.ahead);
            let portion = residence.portion;
            let weights = residence.slot;
            let master = MasterAt::Memory;
            let shard = Shard::WHOLE;
            let chosen_by = residence.chosen_by;
            let work = Work::UploadBlock { portion, version, master, weights, shard, chosen_by };
            (self.perform)(Some(device), work);
        }
        for &(portion, _) in resolved.accumulates.iter().filter(|(_, first)| *first) {
            let taken = self.open.iter().filter(|((of, _), _)| *of == device);
            let slot = lowest_free(taken.map(|(_, &slot)| slot));
            self.open.insert((device, portion), slot);
        }
        for (nth, m) in self.plan.schedule.units(visit).enumerate() {
            let inputs = placed(&visit.reads);
            let outputs = placed(&visit.writes);
            for &inputs in &inputs {
                (self.perform)(Some(device), Work::UploadBoundary { micro_batch: m, inputs });
            }
            let blocks = self.block_uses(device, resolved, nth == 0);
            let compute = Work::Compute {
                device_visit: at,
                phase: visit.phase,
                micro_batch: m,
                blocks,
                inputs,
                outputs: outputs.clone(),
            };
            (self.perform)(Some(device), compute);
            for outputs in outputs {
                (self.perform)(Some(device), Work::DownloadBoundary { micro_batch: m, outputs });
            }
        }
        for &portion in &resolved.closes {
            self.reduce(device, portion, visit.micro_batches.start);
        }
    }

    /// The visit's blocks in their slots. The first contribution of a group replaces what its
    /// accumulator held; the others are added.
    fn block_uses(
        &self,
        device: DeviceId,
        resolved: &DeviceVisit,
        is_first: bool,
    ) -> Vec<BlockUse> {
        let of = |portion: Portion, weights: u32| {
            let trained = resolved.accumulates.iter().find(|(trained, _)| *trained == portion);
            let gradient = trained.map(|&(_, first)| Accumulator {
                slot: self.open[&(device, portion)],
                first: first && is_first,
            });
            BlockUse { portion, weights, gradient }
        };
        resolved.residences.iter().map(|residence| of(residence.portion, residence.slot)).collect()
    }

    /// Brings a group's gradient to the host, and adds it to those of other groups. The sum of all
    /// is applied at once, or waits: for the norm, or for the gradient that a scatter adds.
    fn reduce(&mut self, device: DeviceId, portion: Portion, micro_batch: MicroBatch) {
        let block = portion.block;
        let group = self.plan.schedule.group_of(micro_batch);
        let gradients = self.open.remove(&(device, portion)).expect("it was opened");
        let mut reduced = 0; // the only landing block, because nothing overlaps here
        let Some(&Reduction::Gradient { chosen_by, join, scattered, .. }) = self.reductions.next()
        else {
            unreachable!("the plan has a reduction for each gradient that closes")
        };
        let download = Work::DownloadGradient { portion, group, gradients, reduced, chosen_by };
        (self.perform)(Some(device), download);
        // A compressed gradient is decompressed there, even if it is the only one.
        if join.adds > 0 || join.keeps || self.plan.schedule.block(block).encoded {
            let free = lowest_free(self.kept.values().flatten().copied());
            let kept = self.kept.entry(portion).or_default();
            let mut parts = kept.split_off(kept.len() - join.adds as usize);
            parts.reverse();
            let keep = join.keeps.then_some(free);
            kept.extend(keep);
            self.on_host(Work::Join { portion, group, reduced, parts, keep });
        }
        if join.keeps {
            return;
        }
        if let Some(cut) = portion.cut {
            let free = lowest_free(self.merging.values().copied().chain([reduced]));
            let into = *self.merging.entry(block).or_insert(free);
            self.on_host(Work::Merge { portion, reduced, into });
            if cut > 0 {
                return; // the block's is complete when all portions are there
            }
            self.merging.remove(&block);
            reduced = into;
        }
        let version = self.version + u64::from(self.plan.schedule.batch(group));
        let squares = if scattered || self.deferred {
            self.on_host(Work::Reduce { block, reduced, to_region: true })
        } else {
            self.update(block, version, GradientAt::Landing(reduced), None)
        };
        self.squares.insert((block, version), squares);
    }

    /// Adds the gradient of gathered rows to each block they came from.
    fn scatter(&mut self, index: usize) {
        let schedule = &self.plan.schedule;
        for &block in schedule.visits[index].blocks.iter().filter(|&&id| !schedule.block(id).frozen)
        {
            let batch = schedule.batch_of(schedule.visits[index].micro_batches.start);
            let version = self.version + u64::from(batch);
            let first = !self.squares.contains_key(&(block, version));
            let gradient = GradientAt::Region;
            let mut squares = self.on_host(Work::Scatter { visit: index, block, first, gradient });
            if !self.deferred {
                squares = self.update(block, version, gradient, None);
            }
            self.squares.insert((block, version), squares);
        }
    }

    fn update(
        &mut self,
        block: BlockId,
        version: Version,
        gradient: GradientAt,
        norm: Option<f64>,
    ) -> f64 {
        let master = MasterAt::Memory;
        self.on_host(Work::Update { block, version, master, gradient, norm })
    }
}

/// Each boundary in a slot of its own: one operation uses them at a time.
fn placed(boundaries: &[BoundaryId]) -> Vec<Placed> {
    (0..).zip(boundaries).map(|(slot, &boundary)| Placed { boundary, slot }).collect()
}

fn lowest_free(taken: impl Iterator<Item = u32>) -> u32 {
    let taken: BTreeSet<u32> = taken.collect();
    (0..).find(|slot| !taken.contains(slot)).expect("there are few")
}
