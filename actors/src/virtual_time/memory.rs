//! The content of every piece of memory, checked at each operation's begin and end.
//!
//! This simulates labels and not contents. An operation that reads a slot asks for a block and
//! version, a boundary and micro-batch, or a gradient. No other operation uses memory that is being
//! written, and none writes memory that is being read. A violation panics, and names the label that
//! was asked for and the one that was there. Every test of the ring relies on this check.

use std::collections::HashMap;

use super::touch::{Cell, Label, Touch};
use crate::operation::Operation;
use crate::schedule::{BoundaryId, MicroBatch, Portion, Version};

#[derive(Clone, Copy, Debug, Default)]
struct State {
    label: Option<Label>,
    readers: u32,
    written: bool,
}

/// The labels of all memory: what each slot holds.
#[derive(Debug, Default)]
pub struct Memory {
    cells: HashMap<Cell, State>,
    running: HashMap<u64, Vec<(Cell, Option<Label>)>>, // operation -> cells, and what to leave
}

impl Memory {
    /// Checks that the memory holds what the operation asks for, and that no other operation uses
    /// it.
    ///
    /// # Panics
    /// It holds something else, or is in use.
    pub fn begin(&mut self, operation: &Operation) {
        let touch = Touch::of(operation, self);

        let what = operation.work();
        let mut running = Vec::new();
        for (cell, label) in touch.reads {
            let state = self.state(cell);
            assert!(!state.written, "{what}: {cell:?} is being written");
            assert!(
                state.label == Some(label),
                "{what}: {label:?} asked, {cell:?} holds {state:?}"
            );
            state.readers += 1;
            running.push((cell, None));
        }
        for (cell, before, after) in touch.writes {
            let state = self.state(cell);
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

    /// Notes what the operation wrote.
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

    fn state(&mut self, cell: Cell) -> &mut State {
        let at_start = || match cell {
            Cell::Master(block, 0) => {
                State { label: Some(Label::Block(block.into(), 0)), ..State::default() }
            }
            _ => State::default(),
        };
        self.cells.entry(cell).or_insert_with(at_start)
    }

    /// Contributions in a gradient, whose label must be of this portion and version.
    pub(super) fn contributions(&self, cell: Cell, portion: Portion, version: Version) -> usize {
        match self.cells.get(&cell).and_then(|state| state.label) {
            Some(Label::Gradient(p, v, count)) if (p, v) == (portion, version) => count,
            other => panic!("gradient of {portion} v{version} asked, {cell:?} holds {other:?}"),
        }
    }

    /// The portions in a partial sum, whose label must be of this micro-batch of this boundary.
    pub(super) fn parts(
        &self,
        cell: Cell,
        boundary: BoundaryId,
        m: MicroBatch,
        version: Version,
    ) -> u128 {
        match self.cells.get(&cell).and_then(|state| state.label) {
            Some(Label::Sum(id, of, v, parts)) if (id, of, v) == (boundary, m, version) => parts,
            other => panic!("{boundary} of micro-batch {m} asked, {cell:?} holds {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::config::RingConfig;
    use crate::names::ActorName;
    use crate::operation::{Order, Step};
    use crate::ring::Ring;
    use crate::schedule::{BlockId, Pools, Ranks, Schedule, Shard, StepPlan, Traffic};
    use crate::work::{GradientAt, MasterAt, Work};

    const BLOCK: BlockId = BlockId(0);
    const POOLS: Pools = Pools {
        devices: 1,
        shards: 1,
        ranks: 1,
        weights: 1,
        visits: 1,
        inputs: 1,
        ahead: 1,
        outputs: 1,
        gradients: 1,
        reduced: 1,
        parts: 0,
        reads: 0,
        states: 0,
    };

    /// A moment of batch `t` of a ring with a delay.
    #[derive(Clone, Copy, Debug)]
    enum Moment {
        /// The upload of what it reads begins, and ends.
        Reads(u64),
        HasRead(u64),
        /// Its gradient goes to the region.
        Waits(u64),
        /// Its update begins, and ends.
        Updates(u64),
        IsUpdated(u64),
    }

    fn operation(ring: &Arc<Ring>, number: u64, work: Work) -> Operation {
        let schedule = Schedule {
            blocks: vec![],
            cuts: [].into(),
            boundaries: vec![],
            positions: 1,
            micro_batches: vec![1],
            runs: vec![],
            last_chunk: 1,
            groups: vec![],
            in_batches: false,
            lag: 0,
            shards: 1,
            ranks: Ranks::ONE,
            trains: true,
            visits: vec![],
        };
        let plan = Arc::new(StepPlan {
            schedule,
            pools: POOLS,
            device_visits: vec![],
            walks: vec![],
            fetches: vec![],
            reductions: vec![],
            updates: vec![],
            carried: vec![],
            traffic: Traffic::default(),
        });
        let reads = number.saturating_sub(1);
        let layers = vec![];
        let step = Arc::new(Step { number, version: number, reads, copies: 2, plan, layers });
        let order = Order::new(&step, work);
        Operation::new(ActorName::Optimizer, order, ring.clone(), Duration::ZERO).0
    }

    fn ring() -> Arc<Ring> {
        let config = RingConfig {
            pools: POOLS,
            blocks: 1,
            max_layers: 1,
            max_micro_batches: 1,
            deferred: true,
            trained: 0,
            delay_from: Some(0),
            watchdog: None,
            inject: None,
        };
        Arc::new(Ring::new(&config, vec![], Duration::ZERO))
    }

    fn upload(ring: &Arc<Ring>, t: u64) -> Operation {
        let work = Work::UploadBlock {
            portion: BLOCK.into(),
            version: t.saturating_sub(1),
            master: MasterAt::Memory,
            weights: 0,
            shard: Shard::WHOLE,
            chosen_by: None,
        };
        operation(ring, t, work)
    }

    fn update(ring: &Arc<Ring>, t: u64) -> Operation {
        let gradient = GradientAt::Region;
        let master = MasterAt::Memory;
        let norm = Some(1.0);
        operation(ring, t, Work::Update { block: BLOCK, version: t, master, gradient, norm })
    }

    /// Whether the oracle finds nothing wrong in these moments.
    fn is_sound(moments: &[Moment]) -> bool {
        let ring = ring();
        let mut memory = Memory::default();
        let mut running = HashMap::new();
        let all = || {
            for moment in moments {
                match *moment {
                    Moment::Reads(t) => {
                        memory.begin(running.entry((false, t)).or_insert(upload(&ring, t)));
                    }
                    Moment::HasRead(t) => memory.end(&running[&(false, t)]),
                    Moment::Waits(t) => {
                        let label = Some(Label::Gradient(BLOCK.into(), t, 0));
                        let landed = State { label, ..State::default() };
                        memory.cells.insert(Cell::Landing(0), landed);
                        let work = Work::Reduce { block: BLOCK, reduced: 0, to_region: true };
                        let reduce = operation(&ring, t, work);
                        memory.begin(&reduce);
                        memory.end(&reduce);
                    }
                    Moment::Updates(t) => {
                        memory.begin(running.entry((true, t)).or_insert(update(&ring, t)));
                    }
                    Moment::IsUpdated(t) => memory.end(&running[&(true, t)]),
                }
            }
        };
        catch_unwind(AssertUnwindSafe(all)).is_ok()
    }

    /// With a delay, an update runs while the next batch reads the version before it. What the rule
    /// of waiting forbids is found.
    #[test]
    fn a_broken_rule_of_versions_is_found() {
        use Moment::{HasRead, IsUpdated, Reads, Updates, Waits};
        let first = [Reads(0), HasRead(0), Waits(0)];
        let second = [Updates(0), Reads(1), HasRead(1), IsUpdated(0), Waits(1)];
        let third = [Updates(1), Reads(2), HasRead(2), IsUpdated(1), Waits(2), Updates(2)];
        assert!(is_sound(&[&first[..], &second, &third].concat()));
        let broken: [&[Moment]; 5] = [
            // A gradient goes to its region while the update of the batch before reads it.
            &[Updates(0), Reads(1), HasRead(1), Waits(1)],
            // Or before that update has begun.
            &[Reads(1), HasRead(1), Waits(1), Updates(0)],
            // A batch reads a version that is not there yet.
            &[Updates(0), Reads(1), HasRead(1), Reads(2)],
            // An update replaces what a batch reads.
            &[Updates(0), IsUpdated(0), Reads(1), Waits(1), Updates(1)],
            // A batch reads a version that was replaced.
            &[Updates(0), IsUpdated(0), Waits(1), Updates(1), IsUpdated(1), Reads(1)],
        ];
        for moments in broken {
            assert!(!is_sound(&[&first[..], moments].concat()), "{moments:?}");
        }
    }
}
