//! What every piece of memory holds, checked at each operation's begin and end.
//!
//! Not a simulation of contents but of labels: an operation that reads a slot asks for a block and
//! version, a boundary and micro-batch, or a gradient; memory that is being written is nobody
//! else's, and memory that is being read is not written. A violation panics and says what was
//! asked and what was there. It is the oracle under every test of the ring.

use std::collections::HashMap;

use crate::ports::{Operation, Placed, Source, Work};
use crate::schedule::{BlockId, BoundaryId, MicroBatch, Plan, Version};

/// A piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Cell {
    Weights(u32),
    Input(u32),
    Output(u32),
    Gradient(u32),
    Landing(u32),
    /// With the EPS on file: a block that was read; one with its state, and its gradient beside it.
    Read(u32),
    State(u32),
    Beside(u32),
    Region(BlockId),
    Master(BlockId),
    Stash(BoundaryId, MicroBatch),
}

/// What it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    Block(BlockId, Version),
    Boundary(BoundaryId, MicroBatch, Version),
    /// With the number of contributions that are in it.
    Gradient(BlockId, Version, usize),
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    label: Option<Label>,
    readers: u32,
    written: bool,
}

/// What one operation touches: what it finds, and what it leaves.
#[derive(Default)]
struct Touch {
    reads: Vec<(Cell, Label)>,
    writes: Vec<(Cell, Option<Label>, Label)>, // must hold before, if anything; after
}

/// See [`virtual_time`](super).
#[derive(Debug, Default)]
pub struct Memory {
    cells: HashMap<Cell, State>,
    running: HashMap<u64, Vec<(Cell, Option<Label>)>>, // operation -> cells, and what to leave
}

impl Memory {
    /// Checks that the operation finds what it asks for, and that nobody is in its way.
    ///
    /// # Panics
    /// It does not, or somebody is.
    pub fn begin(&mut self, operation: &Operation) {
        let touch = self.touch(operation);
        let what = operation.work();
        let mut running = Vec::new();
        for (cell, label) in touch.reads {
            let state = self.state(cell, what);
            assert!(!state.written, "{what}: {cell:?} is being written");
            assert!(
                state.label == Some(label),
                "{what}: {label:?} asked, {cell:?} holds {state:?}"
            );
            state.readers += 1;
            running.push((cell, None));
        }
        for (cell, before, after) in touch.writes {
            let state = self.state(cell, what);
            assert!(!state.written && state.readers == 0, "{what}: {cell:?} is in use");
            assert!(
                before.is_none() || state.label == before,
                "{what}: {before:?} asked, {cell:?} holds {state:?}"
            );
            state.written = true;
            running.push((cell, Some(after)));
        }
        self.running.insert(operation.number(), running);
    }

    /// Leaves behind what the operation wrote.
    pub fn end(&mut self, operation: &Operation) {
        for (cell, after) in self.running.remove(&operation.number()).expect("it began") {
            let state = self.cells.get_mut(&cell).expect("it was there at the begin");
            match after {
                None => state.readers -= 1,
                Some(label) => {
                    state.written = false;
                    state.label = Some(label);
                }
            }
        }
    }

    fn state(&mut self, cell: Cell, _what: &Work) -> &mut State {
        let fresh = || match cell {
            Cell::Master(block) => {
                State { label: Some(Label::Block(block, 0)), ..State::default() }
            }
            _ => State::default(),
        };
        self.cells.entry(cell).or_insert_with(fresh)
    }

    /// Contributions in a gradient, whose label must be of this block and version.
    fn contributions(&self, cell: Cell, block: BlockId, version: Version) -> usize {
        match self.cells.get(&cell).and_then(|state| state.label) {
            Some(Label::Gradient(b, v, count)) if (b, v) == (block, version) => count,
            other => panic!("gradient of {block} v{version} asked, {cell:?} holds {other:?}"),
        }
    }

    fn touch(&self, operation: &Operation) -> Touch {
        let step = operation.step();
        let now = step.number;
        let plan = &*step.plan;
        let mut touch = Touch::default();
        let place = |placed: &Placed, m: MicroBatch, cell: fn(u32) -> Cell| {
            let label = Label::Boundary(placed.boundary, m, now);
            placed.slots.iter().map(move |&slot| (cell(slot), label)).collect::<Vec<_>>()
        };
        match operation.work() {
            Work::ReadBlock { block, version, reads } => {
                let label = Label::Block(*block, *version);
                touch.reads.push((Cell::Master(*block), label));
                touch.writes.push((Cell::Read(*reads), None, label));
            }
            Work::UploadBlock { block, version, reads, weights } => {
                let label = Label::Block(*block, *version);
                touch.reads.push((reads.map_or(Cell::Master(*block), Cell::Read), label));
                touch.writes.push((Cell::Weights(*weights), None, label));
            }
            Work::UploadBoundary { micro_batch, inputs } => {
                let label = Label::Boundary(inputs.boundary, *micro_batch, now);
                touch.reads.push((Cell::Stash(inputs.boundary, *micro_batch), label));
                let places = place(inputs, *micro_batch, Cell::Input);
                touch.writes.extend(places.into_iter().map(|(cell, label)| (cell, None, label)));
            }
            Work::Compute { device_visit, micro_batch, weights, inputs, outputs, gradients } => {
                let blocks = plan.visit(*device_visit).blocks();
                for (&slot, &block) in weights.iter().zip(blocks) {
                    touch.reads.push((Cell::Weights(slot), Label::Block(block, now)));
                }
                for placed in inputs {
                    touch.reads.extend(place(placed, *micro_batch, Cell::Input));
                }
                for placed in outputs {
                    let places = place(placed, *micro_batch, Cell::Output);
                    touch
                        .writes
                        .extend(places.into_iter().map(|(cell, label)| (cell, None, label)));
                }
                for accumulate in gradients {
                    let (block, cell) = (accumulate.block, Cell::Gradient(accumulate.slot));
                    let before = match accumulate.first {
                        true => None,
                        false => Some(self.contributions(cell, block, now)),
                    };
                    let after = Label::Gradient(block, now, before.unwrap_or(0) + 1);
                    let before = before.map(|count| Label::Gradient(block, now, count));
                    touch.writes.push((cell, before, after));
                }
            }
            Work::DownloadBoundary { micro_batch, outputs } => {
                touch.reads.extend(place(outputs, *micro_batch, Cell::Output));
                let label = Label::Boundary(outputs.boundary, *micro_batch, now);
                touch.writes.push((Cell::Stash(outputs.boundary, *micro_batch), None, label));
            }
            Work::DownloadGradient { block, gradients, reduced } => {
                let label = Label::Gradient(*block, now, contributions(plan, *block));
                touch.reads.push((Cell::Gradient(*gradients), label));
                touch.writes.push((Cell::Landing(*reduced), None, label));
            }
            Work::Gather { visit, micro_batch } => {
                let visit = &plan.schedule.visits[*visit];
                for &block in visit.blocks() {
                    touch.reads.push((Cell::Master(block), Label::Block(block, now)));
                }
                for &id in &visit.writes {
                    let label = Label::Boundary(id, *micro_batch, now);
                    touch.writes.push((Cell::Stash(id, *micro_batch), None, label));
                }
            }
            Work::GatherBlock { visit, block, reads } => {
                touch.reads.push((Cell::Read(*reads), Label::Block(*block, now)));
                let visit = &plan.schedule.visits[*visit];
                let all = visit.micro_batches.clone();
                for (m, &id) in all.flat_map(|m| visit.writes.iter().map(move |id| (m, id))) {
                    let label = Label::Boundary(id, m, now);
                    touch.writes.push((Cell::Stash(id, m), None, label));
                }
            }
            Work::Loss { visit, micro_batch } => {
                for &id in &plan.schedule.visits[*visit].reads {
                    let label = Label::Boundary(id, *micro_batch, now);
                    touch.reads.push((Cell::Stash(id, *micro_batch), label));
                }
            }
            Work::Reduce { block, reduced } => {
                let label = Label::Gradient(*block, now, contributions(plan, *block));
                touch.reads.push((Cell::Landing(*reduced), label));
                touch.writes.push((Cell::Region(*block), None, label));
            }
            Work::Measure { block, reduced } => {
                let label = Label::Gradient(*block, now, contributions(plan, *block));
                touch.reads.push((Cell::Landing(*reduced), label));
            }
            Work::ReadRegion { block, reduced } => {
                let count = self.contributions(Cell::Region(*block), *block, now);
                let label = Label::Gradient(*block, now, count);
                touch.reads.push((Cell::Region(*block), label));
                touch.writes.push((Cell::Landing(*reduced), None, label));
            }
            Work::WriteRegion { block, reduced } => {
                let count = self.contributions(Cell::Landing(*reduced), *block, now);
                let label = Label::Gradient(*block, now, count);
                touch.reads.push((Cell::Landing(*reduced), label));
                touch.writes.push((Cell::Region(*block), None, label));
            }
            Work::ReadState { block, version, states, region } => {
                let label = Label::Block(*block, *version);
                touch.reads.push((Cell::Master(*block), label));
                touch.writes.push((Cell::State(*states), None, label));
                if *region {
                    let count = self.contributions(Cell::Region(*block), *block, now);
                    let label = Label::Gradient(*block, now, count);
                    touch.reads.push((Cell::Region(*block), label));
                    touch.writes.push((Cell::Beside(*states), None, label));
                }
            }
            Work::WriteState { block, version, states } => {
                touch.reads.push((Cell::State(*states), Label::Block(*block, version + 1)));
                touch.writes.push(published(*block, *version));
            }
            Work::Seal => {}
            Work::Scatter { visit, block, first, reduced } => {
                let host = &plan.schedule.visits[*visit];
                for m in host.micro_batches.clone() {
                    for &id in &host.reads {
                        touch.reads.push((Cell::Stash(id, m), Label::Boundary(id, m, now)));
                    }
                }
                let cell = reduced.map_or(Cell::Region(*block), Cell::Landing);
                let joined = (!first).then(|| self.contributions(cell, *block, now));
                let before = joined.map(|count| Label::Gradient(*block, now, count));
                let after = Label::Gradient(*block, now, joined.unwrap_or(0) + 1);
                touch.writes.push((cell, before, after));
            }
            Work::Update { block, version, gradient, states, .. } => {
                let cell = match (gradient, states) {
                    (Source::Landing(slot), _) => Cell::Landing(*slot),
                    (Source::Region, None) => Cell::Region(*block),
                    (Source::Region, Some(slot)) => Cell::Beside(*slot),
                };
                let count = self.contributions(cell, *block, now);
                touch.reads.push((cell, Label::Gradient(*block, now, count)));
                let (master, before, after) = published(*block, *version);
                touch.writes.push((states.map_or(master, Cell::State), before, after));
            }
            Work::Carry { version } => {
                touch.writes.extend(plan.carried.iter().map(|&block| published(block, *version)));
            }
        }
        touch
    }
}

/// A block goes from one version to the next.
fn published(block: BlockId, version: Version) -> (Cell, Option<Label>, Label) {
    let (before, after) = (Label::Block(block, version), Label::Block(block, version + 1));
    (Cell::Master(block), Some(before), after)
}

/// How many operations add to a block's gradient on the device.
fn contributions(plan: &Plan, block: BlockId) -> usize {
    let adds = |(_, visit): &(usize, &crate::schedule::DeviceVisit)| {
        visit.accumulates.iter().any(|(b, _)| *b == block)
    };
    let visits = plan.device_visits.iter().enumerate().filter(adds);
    visits.map(|(index, _)| plan.visit(index).micro_batches.len()).sum()
}
