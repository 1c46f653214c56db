//! The memory that each kind of work reads and writes, and the content that it must find there.

use super::gradients::{Contributions, complete, gradient_cell, of_groups};
use super::memory::Memory;
use crate::operation::{Operation, Step};
use crate::schedule::{
    BlockId, BoundaryId, ChosenBy, DeviceId, LayerId, MicroBatch, Phase, Portion, Shard, Share,
    StepPlan, Version, Visit, VisitKind,
};
use crate::work::{Accumulator, BlockUse, MasterAt, Stored, Work};

/// A piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Cell {
    /// The part of a weight slot that a shard fills.
    Weights(DeviceId, u32, DeviceId),
    Input(DeviceId, u32),
    Output(DeviceId, u32),
    Gradient(DeviceId, u32),
    Landing(u32),
    /// A slot of pool `parts`.
    Part(u32),
    /// A staging slot of pool `reads`.
    Read(u32),
    /// A staging slot of pool `states`, and the gradient that was read beside the state.
    State(u32),
    StateGradient(u32),
    Region(BlockId),
    /// A copy of a block in the EPS: version `v` is in copy `v % copies`.
    Master(BlockId, u64),
    Stash(BoundaryId, MicroBatch),
    /// The keys of a chunk, by its place in the region that a device has for them. With a window,
    /// chunks behind it have left their places to others. The run of another layer takes the same
    /// cells.
    Keys(DeviceId, u32),
    KeysGradient(DeviceId, u32),
    /// What the host took of a micro-batch's measures. Each step has its own.
    Measures(Version, MicroBatch),
    /// What the host took of a micro-batch for the step's objective.
    Values(Version, MicroBatch),
}

/// The content of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Label {
    Block(Portion, Version),
    Boundary(BoundaryId, MicroBatch, Version),
    /// A gradient, with the number of contributions in it.
    Gradient(Portion, Version, usize),
    /// A gradient that has that of all portions from this one on, with the contributions in it.
    Merged(Portion, Version, usize),
    /// A partial sum of a micro-batch, with the portions in it, each a bit.
    Sum(BoundaryId, MicroBatch, Version, u128),
    /// The place of a partial sum that was read.
    Taken,
    /// The keys that a chunk left at a step of a layer, in the forward pass or behind it.
    Keys(Chunk, Pass),
    /// The gradient of a chunk's keys, with the number of later chunks that have added to it.
    KeysGradient(Chunk, usize),
    Measures,
}

/// A chunk at one step of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    layer: LayerId,
    step: u16,
    micro_batch: MicroBatch,
    version: Version,
}

/// The pass in which keys were computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Reference,
    Backward,
}

/// The cells that one operation reads and writes, and what each must hold.
#[derive(Default)]
pub(super) struct Touch {
    pub(super) reads: Vec<(Cell, Label)>,
    /// Each with the label before (`None`: anything) and the label after.
    pub(super) writes: Vec<(Cell, Option<Label>, Label)>,
}

impl Touch {
    /// The table: each kind of work, and its cells, by what the memory holds.
    pub(super) fn of(operation: &Operation, memory: &Memory) -> Touch {
        let count = |cell, portion, version| memory.contributions(cell, portion, version);
        let step = operation.step();
        let mut touch = Touch::default();
        let now = step.number;
        let plan = &*step.plan;
        // Host work names no slot of a device.
        let device = operation.device().unwrap_or_default();
        let input = |slot| Cell::Input(device, slot);
        let output = |slot| Cell::Output(device, slot);
        match operation.work() {
            &Work::Gather { visit, share, master } => touch.gather(step, visit, share, master),
            &Work::Stage { block, version, stored, slot } => {
                touch.stage(step, block, version, stored, slot, &count);
            }
            &Work::UploadBlock { portion, version, master, weights, shard, chosen_by } => {
                touch.read_choice(chosen_by, now);
                touch.read_master(step, portion.block, version, master);
                let label = Label::Block(portion, version);
                touch.write(Cell::Weights(device, weights, shard.index), label);
            }
            &Work::CopyShards { portion, version, weights, ref from, .. } => {
                let label = Label::Block(portion, version);
                for &(Shard { index, .. }, slot) in from {
                    touch.read(Cell::Weights(index, slot, index), label);
                    touch.write(Cell::Weights(device, weights, index), label);
                }
            }
            Work::UploadBoundary { micro_batch, inputs } => {
                let stash = Cell::Stash(inputs.boundary, *micro_batch);
                let label =
                    Touch::boundary(plan, memory, stash, inputs.boundary, *micro_batch, now);
                match label {
                    Label::Sum(..) => touch.writes.push((stash, Some(label), Label::Taken)),
                    _ => touch.read(stash, label),
                }
                touch.write(input(inputs.slot), label);
            }
            Work::Compute { device_visit, micro_batch: m, blocks, inputs, outputs, .. } => {
                let visit = plan.visit(*device_visit);
                touch.read_stash(&visit.kept, *m, now);
                touch.write_stash(&visit.stays().collect::<Vec<_>>(), *m, now);
                let inputs = inputs.iter().map(|of| (of.boundary, input(of.slot)));
                let outputs = outputs.iter().map(|of| (of.boundary, output(of.slot)));
                touch.ports(plan, visit, *m, now, inputs, outputs);
                blocks.iter().for_each(|of| touch.compute(step, device, visit, of, &count));
                if visit.reach > 0 {
                    touch.attend(plan, device, visit, *m, now);
                }
            }
            Work::DownloadBoundary { micro_batch: m, outputs } => {
                let from = output(outputs.slot);
                let label = Touch::boundary(plan, memory, from, outputs.boundary, *m, now);
                touch.read(from, label);
                touch.write(Cell::Stash(outputs.boundary, *m), label);
            }
            &Work::DownloadGradient { portion, group, gradients, reduced, chosen_by } => {
                touch.read_choice(chosen_by, now);
                let of = step.version_of(plan.schedule.batch(group));
                let label = Label::Gradient(portion, of, of_groups(plan, portion, Some(group)));
                touch.read(Cell::Gradient(device, gradients), label);
                touch.write(Cell::Landing(reduced), label);
            }
            &Work::Measure { visit, micro_batch } => {
                let visit = &plan.schedule.visits[visit];
                touch.read_stash(&visit.reads, micro_batch, now);
                let cell = match visit.kind {
                    VisitKind::Objective { .. } => Cell::Values(now, micro_batch),
                    _ => Cell::Measures(now, micro_batch),
                };
                touch.write(cell, Label::Measures);
            }
            &Work::Loss { visit, micro_batch } => {
                let visit = &plan.schedule.visits[visit];
                touch.read_stash(&visit.reads, micro_batch, now);
                touch.read_values(visit, now);
            }
            &Work::Answer { visit, micro_batch } => {
                let visit = &plan.schedule.visits[visit];
                touch.read_stash(&visit.reads, micro_batch, now);
                touch.read_values(visit, now);
                touch.write_stash(&visit.writes, micro_batch, now);
            }
            Work::Join { portion, group, reduced, parts, keep } => {
                let of = step.version_of(plan.schedule.batch(*group));
                touch.join(*portion, of, *reduced, parts, *keep, &count);
            }
            &Work::Merge { portion, reduced, into } => {
                touch.merge(plan, portion, step.version, reduced, into);
            }
            &Work::Reduce { block, reduced, to_region } => {
                let label = complete(plan, block, step.version);
                touch.read(Cell::Landing(reduced), label);
                if to_region {
                    touch.write(Cell::Region(block), label);
                }
            }
            &Work::Scatter { visit, block, first, gradient } => {
                let visit = &plan.schedule.visits[visit];
                touch.scatter(visit, now);
                let cell = gradient_cell(block, gradient, MasterAt::Memory);
                touch.add(cell, block.into(), step.gradient_of(visit), first, &count);
            }
            &Work::Update { block, version, master, gradient, .. } => {
                let cell = gradient_cell(block, gradient, master);
                let block_count = count(cell, block.into(), version);
                touch.read(cell, Label::Gradient(block.into(), version, block_count));
                touch.read_measures(plan, now);
                match master {
                    MasterAt::Memory => touch.publish(step, block, version),
                    MasterAt::Slot(slot) => touch.move_on(Cell::State(slot), block, version),
                }
            }
            &Work::Store { block, version, stored, slot } => {
                touch.store(step, block, version, stored, slot, &count);
            }
            &Work::AllGather { block, version, slot } => {
                let label = Label::Block(block.into(), version);
                let whole = Cell::Read(slot);
                if plan.schedule.block(block).staged {
                    touch.writes.push((whole, Some(label), label));
                } else {
                    touch.read_master(step, block, version, MasterAt::Memory);
                    touch.write(whole, label);
                }
            }
            &Work::ReduceScatter { block, reduced } => {
                let label = complete(plan, block, step.version);
                touch.writes.push((Cell::Landing(reduced), Some(label), label));
            }
            &Work::AllGatherRows { visit } => {
                let visit = &plan.schedule.visits[visit];
                visit.micro_batches.clone().for_each(|m| touch.read_stash(&visit.reads, m, now));
            }
            Work::ExchangeMeasures { .. } | Work::AllReduce { .. } | Work::Seal => {}
            &Work::Carry { version } => {
                let carried = plan.carried.iter();
                carried.for_each(|&block| touch.publish(step, block, version));
            }
        }
        touch
    }

    pub(super) fn read(&mut self, cell: Cell, label: Label) {
        self.reads.push((cell, label));
    }

    /// Replaces the content of a cell.
    pub(super) fn write(&mut self, cell: Cell, label: Label) {
        self.writes.push((cell, None, label));
    }

    /// A block goes from one version to the next, in its place.
    fn move_on(&mut self, cell: Cell, block: BlockId, version: Version) {
        let of = |version| Label::Block(block.into(), version);
        self.writes.push((cell, Some(of(version)), of(version + 1)));
    }

    /// The EPS publishes the next version of a block. If it keeps two, the next one replaces the
    /// version before this one, which must have been read for the last time.
    fn publish(&mut self, step: &Step, block: BlockId, version: Version) {
        let before = (version + 1).checked_sub(step.copies);
        let before = before.map(|v| Label::Block(block.into(), v));
        if step.copies > 1 {
            self.read_master(step, block, version, MasterAt::Memory);
        }
        let after = Label::Block(block.into(), version + 1);
        let cell = master_cell(step, block, version + 1, MasterAt::Memory);
        self.writes.push((cell, before, after));
    }

    fn read_master(&mut self, step: &Step, block: BlockId, version: Version, at: MasterAt) {
        let label = Label::Block(block.into(), version);
        self.read(master_cell(step, block, version, at), label);
    }

    fn read_stash(&mut self, boundaries: &[BoundaryId], m: MicroBatch, now: Version) {
        let cell = |&id: &BoundaryId| (Cell::Stash(id, m), Label::Boundary(id, m, now));
        self.reads.extend(boundaries.iter().map(cell));
    }

    fn read_choice(&mut self, chosen_by: Option<ChosenBy>, now: Version) {
        if let Some(choice) = chosen_by {
            choice.micro_batches().for_each(|m| self.read_stash(&[choice.boundary], m, now));
        }
    }

    /// An update may leave parts of its block alone, by the measures of the whole step.
    fn read_measures(&mut self, plan: &StepPlan, now: Version) {
        let is_balance = |visit: &&Visit| matches!(visit.kind, VisitKind::Balance { .. });
        for visit in plan.schedule.visits.iter().filter(is_balance) {
            let cell = |m| (Cell::Measures(now, m), Label::Measures);
            self.reads.extend(visit.micro_batches.clone().map(cell));
        }
    }

    /// An objective needs what was taken of all micro-batches of its visit.
    fn read_values(&mut self, visit: &Visit, now: Version) {
        if matches!(visit.kind, VisitKind::Objective { .. }) {
            let cell = |m| (Cell::Values(now, m), Label::Measures);
            self.reads.extend(visit.micro_batches.clone().map(cell));
        }
    }

    fn write_stash(&mut self, boundaries: &[BoundaryId], m: MicroBatch, now: Version) {
        boundaries.iter().for_each(|&id| {
            self.write(Cell::Stash(id, m), Label::Boundary(id, m, now));
        });
    }

    fn gather(&mut self, step: &Step, visit: usize, share: Share, at: MasterAt) {
        let visit = &step.plan.schedule.visits[visit];
        let (blocks, micro_batches) = match share {
            Share::MicroBatch(m) => (visit.blocks.clone(), m..m + 1),
            Share::Block(block) => (vec![block], visit.micro_batches.clone()),
        };
        blocks.into_iter().for_each(|block| {
            let version = step.version_read(step.plan.schedule.ahead(visit, block));
            self.read_master(step, block, version, at);
        });
        micro_batches.for_each(|m| self.write_stash(&visit.writes, m, step.number));
    }

    fn compute(
        &mut self,
        step: &Step,
        device: DeviceId,
        visit: &Visit,
        of: &BlockUse,
        count: &impl Contributions,
    ) {
        let &BlockUse { portion, weights, gradient } = of;
        let version = step.version_read(step.plan.schedule.ahead(visit, portion.block));
        for shard in 0..step.plan.schedule.shards {
            let part = Cell::Weights(device, weights, shard as DeviceId);
            self.read(part, Label::Block(portion, version));
        }
        if let Some(Accumulator { slot, first }) = gradient {
            let version = step.gradient_of(visit);
            self.add(Cell::Gradient(device, slot), portion, version, first, count);
        }
    }

    /// The region of a device for the keys of a run, and for their gradients. A chunk attends to
    /// those before it that the layer reaches; in the backward pass it adds to the gradients of
    /// their keys, and its own keys' gradient is complete by then. A sequence that is no run is a
    /// run of one chunk.
    fn attend(
        &mut self,
        plan: &StepPlan,
        device: DeviceId,
        &Visit { layer, step, phase, reach, .. }: &Visit,
        m: MicroBatch,
        now: Version,
    ) {
        let run = plan.schedule.run_of(m).unwrap_or(m..m + 1);
        let is_last = m + 1 == run.end;
        let pass = match phase {
            Phase::Forward => Pass::Forward,
            Phase::Reference => Pass::Reference,
            Phase::Keys | Phase::Backward => Pass::Backward,
        };
        let chunk = |micro_batch| Chunk { layer, step, micro_batch, version: now };
        let place = |c| (c - run.start) % reach.saturating_add(1);
        let keys = |c| (Cell::Keys(device, place(c)), Label::Keys(chunk(c), pass));
        let gradient =
            |c, count| (Cell::KeysGradient(device, place(c)), Label::KeysGradient(chunk(c), count));
        let earlier = run.start.max(m.saturating_sub(reach))..m;
        if phase != Phase::Keys {
            self.reads.extend(earlier.clone().map(keys));
        }
        let (cell, label) = keys(m);
        if phase != Phase::Backward || is_last {
            self.write(cell, label);
        } else {
            self.read(cell, label);
        }
        if phase != Phase::Backward {
            return;
        }
        // The chunks behind this one that attend to a chunk.
        let behind = |c: MicroBatch| {
            let last = (run.end - 1).min(c.saturating_add(reach));
            last.saturating_sub(m) as usize
        };
        self.reads.extend((!is_last).then(|| gradient(m, behind(m))));
        self.writes.extend(earlier.map(|c| {
            let (cell, after) = gradient(c, behind(c) + 1);
            let before = (behind(c) > 0).then(|| gradient(c, behind(c)).1);
            (cell, before, after)
        }));
    }

    fn scatter(&mut self, visit: &Visit, now: Version) {
        visit.micro_batches.clone().for_each(|m| self.read_stash(&visit.reads, m, now));
    }

    fn stage(
        &mut self,
        step: &Step,
        block: BlockId,
        version: Version,
        stored: Stored,
        slot: u32,
        count: &impl Contributions,
    ) {
        let now = step.version;
        let whole = block.into();
        let gradient = || Label::Gradient(whole, now, count(Cell::Region(block), whole, now));
        let label = Label::Block(whole, version);
        match stored {
            Stored::Master => {
                self.read_master(step, block, version, MasterAt::Memory);
                self.write(Cell::Read(slot), label);
            }
            Stored::Gradient => {
                self.read(Cell::Region(block), gradient());
                self.write(Cell::Landing(slot), gradient());
            }
            Stored::State { with_gradient } => {
                self.read_master(step, block, version, MasterAt::Memory);
                self.write(Cell::State(slot), label);
                if with_gradient {
                    self.read(Cell::Region(block), gradient());
                    self.write(Cell::StateGradient(slot), gradient());
                }
            }
        }
    }

    fn store(
        &mut self,
        step: &Step,
        block: BlockId,
        version: Version,
        stored: Stored,
        slot: u32,
        count: &impl Contributions,
    ) {
        match stored {
            Stored::Gradient => {
                let cell = Cell::Landing(slot);
                let whole = block.into();
                let label = Label::Gradient(whole, step.version, count(cell, whole, step.version));
                self.read(cell, label);
                self.write(Cell::Region(block), label);
            }
            Stored::Master | Stored::State { .. } => {
                self.read(Cell::State(slot), Label::Block(block.into(), version + 1));
                self.publish(step, block, version);
            }
        }
    }
}

/// The place of a block's master: among the copies of the EPS, or where it was read to.
fn master_cell(step: &Step, block: BlockId, version: Version, at: MasterAt) -> Cell {
    match at {
        MasterAt::Slot(slot) => Cell::Read(slot),
        MasterAt::Memory => Cell::Master(block, version % step.copies),
    }
}
