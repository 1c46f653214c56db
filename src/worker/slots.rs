//! Where the ring's slots are in the device's memory and the host's.

use std::ops::Range;

use l2l_actors::ports::{Operation, Placed, Work};
use l2l_actors::schedule::BlockId;

use super::Worker;
use crate::eps::FileTier;
use crate::tensor::Arena;
use crate::tensor::View;

impl Worker {
    pub(super) fn weights(&self, block: BlockId, slot: u32) -> View {
        let (layout, of) = (&self.plan.layout, self.plan.dtype);
        let at = layout.weights + slot as usize * layout.published;
        View::floats(at, layout.published).hold(self.block_len(block), of)
    }

    pub(super) fn gradient(&self, block: BlockId, slot: u32) -> View {
        let at = self.plan.layout.gradients + slot as usize * self.plan.layout.block;
        View::floats(at, self.block_len(block))
    }

    pub(super) fn landing(&self, block: BlockId, slot: u32) -> View {
        View::floats(slot as usize * self.plan.layout.host_block, self.block_len(block))
    }

    /// A landing block to its end: of a file, pages are read and written.
    pub(super) fn whole_landing(&self, slot: u32) -> View {
        let len = self.plan.layout.host_block;
        View::floats(slot as usize * len, len)
    }

    /// With the EPS on file, a slot that blocks are read to.
    pub(super) fn read_slot(&self, slot: u32) -> View {
        let len = self.plan.layout.host_block;
        View::floats(self.plan.layout.reads + slot as usize * len, len)
    }

    /// And one for a block with its states, and its gradient behind them where that waits.
    pub(super) fn state_slot(&self, slot: u32) -> View {
        let len = self.plan.state_parts() * self.plan.layout.host_block;
        View::floats(self.plan.layout.states + slot as usize * len, len)
    }

    /// The EPS's file.
    pub(super) fn file(&self) -> &FileTier {
        self.eps.file().expect("the plan has blocks on file")
    }

    pub(super) fn block_len(&self, block: BlockId) -> usize {
        crate::models::block_len(self.eps.tensors(block))
    }

    /// The slot of a boundary, in floats whatever it holds; every boundary fills one.
    pub(super) fn boundary(&self, from: usize, placed: &Placed, len: usize) -> View {
        let [slot] = placed.slots[..] else { unreachable!("a boundary fills one slot") };
        assert!(len <= self.plan.layout.boundary, "{len} floats in a slot for a boundary");
        View::floats(from + slot as usize * self.plan.layout.boundary, len)
    }

    /// The arena that has the stash, and a place in it.
    pub(super) fn stash(&self, (at, len): (usize, usize)) -> (&Arena, View) {
        if self.plan.stash_on_device {
            let memory = self.device.stash().expect("the plan has it there");
            (memory, View::floats(self.plan.layout.stash + at, len))
        } else {
            (&self.host, View::floats(self.plan.layout.host_stash + at, len))
        }
    }

    /// The slot of a boundary that is remembered, and the sequences of its micro-batch.
    pub(super) fn recalled(&self, operation: &Operation, from: usize) -> (View, Range<usize>) {
        let (Work::UploadBoundary { micro_batch, inputs: placed }
        | Work::DownloadBoundary { micro_batch, outputs: placed }) = operation.work()
        else {
            unreachable!("boundaries alone are remembered")
        };
        let schedule = &operation.step().plan.schedule;
        let slot = self.boundary_slot(operation, from, placed);
        let first: u32 = schedule.micro_batches[..*micro_batch as usize].iter().sum();
        let last = first + schedule.micro_batches[*micro_batch as usize];
        (slot, first as usize..last as usize)
    }

    /// The slot of a boundary that an operation moves.
    pub(super) fn boundary_slot(
        &self,
        operation: &Operation,
        from: usize,
        placed: &Placed,
    ) -> View {
        let (Work::UploadBoundary { micro_batch, .. } | Work::DownloadBoundary { micro_batch, .. }) =
            operation.work()
        else {
            unreachable!("it moves a boundary")
        };
        let schedule = &operation.step().plan.schedule;
        let bytes = schedule.boundary_bytes(placed.boundary, *micro_batch) as usize;
        self.boundary(from, placed, bytes / size_of::<f32>())
    }
}
