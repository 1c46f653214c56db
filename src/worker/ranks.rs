//! The lanes of exchanges: blocks are completed, gradients and rows of the embedding's gradient
//! exchanged, losses and sums of squares added, with the other ranks of the run.

use std::sync::{Mutex, RwLock};
use std::time::Instant;

use l2l_actors::schedule::{BlockId, MicroBatch, Ranks, Role, Version, Visit, sums_of_spans};
use l2l_actors::work::{Summed, Work};
use l2l_actors::{BoxedError, Operation};

use super::boundaries::Filled;
use super::step::StepState;
use super::{Worker, throttle};
use crate::eps::RankParts;
use crate::fabric::Channel;
use crate::optimizers::{chunks, sum_of_chunks};
use crate::plan::Plan;

/// The number under which rows are exchanged among the gradients of blocks.
const ROWS: u64 = u64::MAX;

/// Memory for numbers from other ranks.
pub(super) struct Received {
    /// For each other rank its share of this rank's part of a gradient; with compression, factors
    /// of matrices.
    pub(super) gradient: Mutex<Vec<f32>>,
    /// Rows of the embedding's gradient, of a whole batch.
    pub(super) embedding_rows: RwLock<Vec<f32>>,
}

impl Received {
    pub(super) fn new(plan: &Plan) -> Received {
        Received {
            gradient: Mutex::new(vec![0.0; plan.received.gradient]),
            embedding_rows: RwLock::new(vec![0.0; plan.received.embedding_rows]),
        }
    }
}

impl Worker {
    fn parts(&self) -> &RankParts {
        self.host.eps.parts().expect("the lanes of exchanges are those of several ranks")
    }

    /// The lanes of exchanges.
    pub(super) fn on_ranks(&self, operation: &Operation) -> Result<f64, BoxedError> {
        let begin = Instant::now();
        let step = operation.step();
        let state = self.steps.of(step.number);
        let beat = &|| operation.still_runs();
        match *operation.work() {
            Work::AllGather { block, version, slot } => {
                self.complete(block, version, slot, beat)?
            }
            Work::ReduceScatter { block, reduced } => self.deal(&state, block, reduced, beat)?,
            Work::AllGatherRows { visit } => {
                self.exchange_rows(operation, &state, &step.plan.schedule.visits[visit], beat)?;
            }
            Work::AllReduce { of: Summed::Losses } => {
                return self.sum_losses(&state, step.plan.schedule.ranks, beat);
            }
            Work::AllReduce { of: Summed::Squares } => return self.sum_squares(&state, beat),
            ref other => unreachable!("{other} is not of the lanes of exchanges"),
        }
        let bytes = operation.work().bytes(&step.plan.schedule);
        throttle(begin, bytes, self.host.fabric_rate);
        Ok(0.0)
    }

    /// Completes the published copy of a block in a staging slot.
    fn complete(
        &self,
        block: BlockId,
        version: Version,
        slot: u32,
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let parts = self.parts();
        let host = self.memory.lease();
        let eps = &self.host.eps;
        let cut = parts.of(block).in_bytes(eps.tensors(block).masters().sent().size());
        let own = cut.of(parts.exchanges.rank());
        let slot = &mut bytemuck::cast_slice_mut(host.read_slot_mut(slot))[..cut.len()];
        if eps.file().is_some() {
            slot.copy_within(..own.len(), own.start); // it was read there; its published half first
        } else {
            let lease = eps.memory().read(block, version);
            let published: &[u8] = bytemuck::cast_slice(&lease.parameters);
            let len = own.len();
            slot[own].copy_from_slice(&published[..len]);
        }
        let exchanges = &parts.exchanges;
        Ok(exchanges.complete(Channel::Blocks, u64::from(block.0), &cut, slot, beat)?)
    }

    /// Leaves this rank's part of a gradient's sum at the begin of its landing block.
    fn deal(
        &self,
        state: &StepState,
        block: BlockId,
        reduced: u32,
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let parts = self.parts();
        let host = self.memory.lease();
        let cut = parts.of_trained(block);
        let own = cut.of(parts.exchanges.rank());
        let gradient = host.landing(reduced, cut.len());
        if let Some(feedback) = self.host.eps.feedback() {
            return self.deal_compressed(feedback, block, gradient, beat);
        }
        if let Some(dealt) = &state.dealt {
            let rank = parts.exchanges.rank() as usize;
            let ranks = parts.exchanges.ranks() as usize;
            let mut received = self.host.received.gradient.lock().expect("nothing panics inside");
            let received = &mut received[..own.len() * (ranks - 1)];
            let sent = bytemuck::cast_slice(gradient);
            let to = bytemuck::cast_slice_mut(received);
            parts.exchanges.deal(block, &cut.in_bytes(size_of::<f32>()), sent, to, beat)?;
            let mut sums: Vec<&mut [f32]> = received.chunks_mut(own.len().max(1)).collect();
            sums.resize_with(ranks - 1, Default::default);
            sums.insert(rank, &mut gradient[own.clone()]);
            for (to, from) in sums_of_spans(&dealt.groups) {
                let [to, from] = sums.get_disjoint_mut([to, from]).expect("two ranks");
                self.host.add(to, from);
            }
            if rank > 0 {
                let [sum, own] = sums.get_disjoint_mut([0, rank]).expect("two ranks");
                own.copy_from_slice(sum);
            }
        }
        gradient.copy_within(own, 0);
        Ok(())
    }

    /// Completes the rows that a scatter adds up: those of all sequences of the batch.
    fn exchange_rows(
        &self,
        operation: &Operation,
        state: &StepState,
        visit: &Visit,
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let step = operation.step();
        let host = self.memory.lease();
        let schedule = &step.plan.schedule;
        let dealt = state.dealt.as_ref().expect("the step is dealt");
        let id = schedule.with_role(&visit.reads, Role::HiddenGradient);
        let boundary = id.expect("a scatter reads it");
        let row = self.packing(schedule.boundary(boundary)).row_bytes();
        let exchanges = &self.parts().exchanges;
        let cut = dealt.rows.in_bytes(row);
        let mut rows = self.host.received.embedding_rows.write().expect("nothing panics inside");
        let rows = &mut bytemuck::cast_slice_mut::<f32, u8>(&mut rows)[..cut.len()];
        let mut at = cut.of(exchanges.rank()).start;
        for micro_batch in 0..schedule.micro_batches.len() as MicroBatch {
            let filled = Filled { step, state, layer: visit.layer, boundary, micro_batch };
            let bytes = state.range(micro_batch, schedule).rows.len() * row;
            let stashed: &[u8] = bytemuck::cast_slice(host.stashed(self.in_stash(filled)));
            rows[at..][..bytes].copy_from_slice(&stashed[..bytes]);
            at += bytes;
        }
        Ok(exchanges.complete(Channel::Gradients, ROWS, &cut, rows, beat)?)
    }

    /// The sum of the losses of all micro-batches, in their order.
    fn sum_losses(
        &self,
        state: &StepState,
        ranks: Ranks,
        beat: &dyn Fn(),
    ) -> Result<f64, BoxedError> {
        let own = state.losses.lock().expect("nothing panics inside").values().copied().collect();
        let all = match ranks.dealt {
            false => own,
            true => self.numbers_of_ranks(own, beat)?.concat(),
        };
        Ok(all.iter().fold(0.0, |sum, loss| sum + loss))
    }

    /// The sum of squares of all gradients: of a block the sums of its chunks, which its ranks
    /// measured, in their order; then over the blocks.
    fn sum_squares(&self, state: &StepState, beat: &dyn Fn()) -> Result<f64, BoxedError> {
        let parts = self.parts();
        let own = state.squares.lock().expect("nothing panics inside").clone();
        let blocks: Vec<BlockId> = own.keys().copied().collect();
        let all = self.numbers_of_ranks(own.into_values().flatten().collect(), beat)?;
        let mut left: Vec<&[f64]> = all.iter().map(Vec::as_slice).collect();
        let mut sum = 0.0;
        let mut group_sums = self.host.clipping.no_sums();
        for block in blocks {
            let tensors = &parts.tensors[block.0 as usize];
            let mut squares = Vec::new();
            for (rank, left) in (0..).zip(&mut left) {
                let part = tensors.part(parts.of(block).of(rank));
                let count = chunks(part.trained()).count();
                squares.extend(left.split_off(..count).ok_or("ranks measured different blocks")?);
            }
            sum += sum_of_chunks(tensors.trained(), &squares);
            self.host.clipping.add(&mut group_sums, tensors.trained(), &squares);
        }
        let _ = state.group_sums.set(group_sums); // the updates of a step come behind this
        Ok(sum)
    }

    /// The numbers of each rank.
    fn numbers_of_ranks(
        &self,
        own: Vec<f64>,
        beat: &dyn Fn(),
    ) -> Result<Vec<Vec<f64>>, BoxedError> {
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.parts().exchanges.gather(Channel::Sums, &own, beat)?;
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        Ok(all.iter().map(|bytes| bytes.chunks_exact(8).map(number).collect()).collect())
    }
}
