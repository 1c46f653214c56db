//! The content of every piece of memory, checked at each operation's begin and end.
//!
//! This simulates labels and not contents. An operation that reads a slot asks for a block and
//! version, a boundary and micro-batch, or a gradient. No other operation uses memory that is being
//! written, and none writes memory that is being read. A violation panics, and names the label that
//! was asked for and the one that was there. Every test of the ring relies on this check.

use std::collections::HashMap;

use super::touch::{Cell, Label, Touch};
use crate::operation::Operation;
use crate::schedule::{BlockId, Version};

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
        let touch =
            Touch::of(operation, |cell, block, version| self.contributions(cell, block, version));
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
                State { label: Some(Label::Block(block, 0)), ..State::default() }
            }
            _ => State::default(),
        };
        self.cells.entry(cell).or_insert_with(at_start)
    }

    /// Contributions in a gradient, whose label must be of this block and version.
    fn contributions(&self, cell: Cell, block: BlockId, version: Version) -> usize {
        match self.cells.get(&cell).and_then(|state| state.label) {
            Some(Label::Gradient(b, v, count)) if (b, v) == (block, version) => count,
            other => panic!("gradient of {block} v{version} asked, {cell:?} holds {other:?}"),
        }
    }
}
