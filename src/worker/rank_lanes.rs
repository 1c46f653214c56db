//! The lanes of exchanges with other ranks: blocks are completed, gradients and rows of the
//! embedding's gradient exchanged, losses and sums of squares added.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use l2l_actors::schedule::{BlockId, MicroBatch, Role, Version, sums_of_spans};
use l2l_actors::work::{Summed, Work};
use l2l_actors::{BoxedError, Operation};
use rayon::prelude::*;

use super::balance::{RouterLosses, RouterReport, RouterSums};
use super::boundaries::Filled;
use super::compressed::{Compressor, packed_ranges, split};
use super::shared::Shared;
use super::step::StepState;
use crate::compression::Compression;
use crate::eps::RankParts;
use crate::fabric::Channel;
use crate::fabric::parts::Parts;
use crate::optimizers::{chunks, sum_of_chunks};
use crate::plan::{Holder, Side};

/// The number under which rows are exchanged among the gradients of blocks.
const ROWS: u64 = u64::MAX;

/// The work of the fetch lane and the exchange lane.
pub(super) struct RankLanes {
    shared: Arc<Shared>,
    /// This rank's part of a gradient as each other rank computed it; with compression, packed
    /// chunks or factors of matrices.
    received: Mutex<Vec<f32>>,
}

impl RankLanes {
    pub(super) fn new(shared: Arc<Shared>) -> RankLanes {
        let is_alone = shared.eps.parts().is_none();
        let planned = shared.plan.regions.slots(Holder::ReceivedGradient, Side::HostOwn).floats();
        let received = if is_alone { 0 } else { planned };
        RankLanes { shared, received: Mutex::new(vec![0.0; received]) }
    }

    fn parts(&self) -> &RankParts {
        self.shared.eps.parts().expect("only a run of several ranks has these lanes")
    }

    /// Does the work of either lane, and returns its value.
    pub(super) fn run(&self, operation: &Operation) -> Result<f64, BoxedError> {
        let state = self.shared.state(operation);
        let beat = &|| operation.still_runs();
        match *operation.work() {
            Work::AllGather { block, version, slot } => {
                self.all_gather(block, version, slot, beat).map(|()| 0.0)
            }
            Work::ReduceScatter { block, reduced } => {
                self.reduce_scatter(&state, block, reduced, beat).map(|()| 0.0)
            }
            Work::AllGatherRows { visit } => {
                self.all_gather_rows(&state, visit, beat).map(|()| 0.0)
            }
            Work::ExchangeMeasures { visit } => {
                match state.schedule().visits[visit].kind.is_objective() {
                    true => self.gather_values(&state, beat).map(|()| 0.0),
                    false => self.exchange_counts(&state, beat).map(|()| 0.0),
                }
            }
            Work::AllReduce { of: Summed::Losses } => self.sum_losses(&state, beat),
            Work::AllReduce { of: Summed::Squares } => self.sum_squares(&state, beat),
            ref other => unreachable!("{other} is not work of the lanes of exchanges"),
        }
    }

    /// Completes the published copy of a block in a staging slot.
    fn all_gather(
        &self,
        block: BlockId,
        version: Version,
        slot: u32,
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let parts = self.parts();
        let host = self.shared.memory.lease();
        let eps = &self.shared.eps;
        let cut = parts.of(block).in_bytes(eps.tensors(block).masters().sent().size());
        let own = cut.of(parts.exchanges.rank());
        let slot = &mut bytemuck::cast_slice_mut(host.read_slot_mut(slot))[..cut.len()];
        if eps.file().is_some() {
            slot.copy_within(..own.len(), own.start); // the file lane has read it, published first
        } else {
            let lease = eps.memory().read(block, version);
            let mut to = &mut slot[own];
            for piece in lease.pieces() {
                let piece: &[u8] = bytemuck::cast_slice(piece);
                let (first, rest) = to.split_at_mut(piece.len().min(to.len()));
                first.copy_from_slice(&piece[..first.len()]);
                to = rest;
            }
        }
        let exchanges = &parts.exchanges;
        Ok(exchanges.all_gather(Channel::Blocks, u64::from(block.0), &cut, slot, beat)?)
    }

    /// Leaves this rank's part of a gradient's sum at the begin of its landing block.
    fn reduce_scatter(
        &self,
        state: &StepState,
        block: BlockId,
        reduced: u32,
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let parts = self.parts();
        let cut = parts.of_trained(block);
        let own = cut.of(parts.exchanges.rank());
        let gradient = self.shared.memory.lease().landing(reduced, cut.len());
        if let Some(compressor) = Compressor::of(&self.shared, block) {
            return self.reduce_scatter_compressed(&compressor, block, gradient, beat);
        }
        if let Some(dealt) = &state.input.dealt {
            let rank = parts.exchanges.rank() as usize;
            let ranks = parts.exchanges.ranks() as usize;
            let mut received = self.received.lock().expect("nothing panics inside");
            let received = &mut received[..own.len() * (ranks - 1)];
            let sent = bytemuck::cast_slice(gradient);
            let to = bytemuck::cast_slice_mut(received);
            parts.exchanges.all_to_all(block, &cut.in_bytes(size_of::<f32>()), sent, to, beat)?;
            let mut sums: Vec<&mut [f32]> = received.chunks_mut(own.len().max(1)).collect();
            sums.resize_with(ranks - 1, Default::default);
            sums.insert(rank, &mut gradient[own.clone()]);
            for (to, from) in sums_of_spans(&dealt.groups) {
                let [to, from] = sums.get_disjoint_mut([to, from]).expect("two ranks");
                self.shared.threads.add(to, from);
            }
            if rank > 0 {
                let [sum, own] = sums.get_disjoint_mut([0, rank]).expect("two ranks");
                own.copy_from_slice(sum);
            }
        }
        gradient.copy_within(own, 0);
        Ok(())
    }

    /// As [`RankLanes::reduce_scatter`], from the numbers that [`Compressor::compress`] left in the
    /// landing block of this rank's one group.
    fn reduce_scatter_compressed(
        &self,
        compressor: &Compressor<'_>,
        block: BlockId,
        gradient: &mut [f32],
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let parts = self.parts();
        let exchanges = &parts.exchanges;
        let cut = parts.of_trained(block);
        let rank = exchanges.rank();
        let ranks = exchanges.ranks();
        let own = cut.of(rank);
        let kind = compressor.kind();
        if let Compression::PowerSgd { .. } = kind {
            let complete = |all: &mut [f32]| {
                let each = size_of_val(all) / ranks as usize;
                let parts = Parts::new((1..=ranks as usize).map(|rank| rank * each).collect());
                let bytes = bytemuck::cast_slice_mut(all);
                let subject = u64::from(block.0);
                exchanges.all_gather(Channel::Gradients, subject, &parts, bytes, beat)
            };
            compressor.factorise(gradient, own.clone(), &self.received, Some(&complete))?;
            gradient.copy_within(own, 0);
            return Ok(());
        }
        let packed_parts = kind.packed_parts(compressor.tensors(), &cut, ranks);
        let packed = packed_parts.of(rank);
        let mut workspace = self.received.lock().expect("nothing panics inside");
        let (unpacked, received) = workspace.split_at_mut(ranks as usize * own.len());
        let received = &mut received[..(ranks as usize - 1) * packed.len()];
        let sent = bytemuck::cast_slice(&gradient[..packed_parts.len()]);
        let to = bytemuck::cast_slice_mut(received);
        exchanges.all_to_all(block, &packed_parts.in_bytes(size_of::<f32>()), sent, to, beat)?;
        let chunks: Vec<Range<usize>> = chunks(compressor.tensors())
            .filter(|chunk| own.contains(&chunk.start))
            .map(|chunk| chunk.start - own.start..chunk.end - own.start)
            .collect();
        let places = packed_ranges(kind, &chunks);
        let mut others = received.chunks_exact(packed.len().max(1));
        for (of_rank, sum) in (0..ranks).zip(unpacked.chunks_exact_mut(own.len().max(1))) {
            let packed = match of_rank == rank {
                true => &gradient[packed.clone()],
                false => others.next().expect("packed chunks of each other rank"),
            };
            let each = split(sum, &chunks).into_par_iter().zip(&places);
            self.shared.threads.install(|| {
                each.for_each(|(chunk, place)| kind.unpack(chunk, &packed[place.clone()]));
            });
        }
        self.shared.threads.sum_groups(unpacked, own.len());
        gradient[..own.len()].copy_from_slice(&unpacked[..own.len()]);
        Ok(())
    }

    /// Receives the rows of other ranks' sequences, which a scatter adds up.
    fn all_gather_rows(
        &self,
        state: &StepState,
        visit: usize,
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let host = self.shared.memory.lease();
        let schedule = state.schedule();
        let visit = &schedule.visits[visit];
        let dealt = state.input.dealt.as_ref().expect("the step is dealt");
        let boundary = schedule.with_role(&visit.reads, Role::HiddenGradient);
        let boundary = boundary.expect("a scatter reads gradients of hidden states");
        let row = self.shared.packing(schedule.boundary(boundary)).row_bytes();
        let exchanges = &self.parts().exchanges;
        let cut = dealt.rows.in_bytes(row);
        let mut rows = self.shared.embedding_rows.write().expect("nothing panics inside");
        let rows = &mut bytemuck::cast_slice_mut::<f32, u8>(&mut rows)[..cut.len()];
        let mut at = cut.of(exchanges.rank()).start;
        for micro_batch in 0..schedule.micro_batches.len() as MicroBatch {
            let filled = Filled { state, layer: visit.layer, boundary, micro_batch };
            let bytes = state.range(micro_batch).rows.len() * row;
            let stashed: &[u8] = bytemuck::cast_slice(host.stashed(filled.stash_range()));
            rows[at..][..bytes].copy_from_slice(&stashed[..bytes]);
            at += bytes;
        }
        Ok(exchanges.all_gather(Channel::Gradients, ROWS, &cut, rows, beat)?)
    }

    /// Adds the counts of all ranks' routers. They are integers, so their order does not matter.
    fn exchange_counts(&self, state: &StepState, beat: &dyn Fn()) -> Result<(), BoxedError> {
        let mut desk = state.routers.lock().expect("nothing panics inside");
        let own = desk.sums.iter().flat_map(|sums| &sums.counts).map(|count| *count as f64);
        let all = self.numbers_of_ranks(own.collect(), beat)?;
        let mut counts =
            desk.sums.iter().map(|sums| vec![0; sums.counts.len()]).collect::<Vec<_>>();
        for of_rank in all {
            let sums = counts.iter_mut().flatten();
            sums.zip(of_rank).for_each(|(sum, count)| *sum += count as u64);
        }
        desk.of_step = Some(counts);
        Ok(())
    }

    /// Gathers what all ranks' objectives measured of their sequences.
    fn gather_values(&self, state: &StepState, beat: &dyn Fn()) -> Result<(), BoxedError> {
        let desk = || state.objective.lock().expect("nothing panics inside");
        let own = desk().own_values();
        let all = self.parts().exchanges.gather(Channel::Sums, &own, beat)?;
        Ok(desk().take_values(&all)?)
    }

    /// Adds what all ranks' routers did, if the step was dealt and they measured anything.
    fn sum_routers(&self, state: &StepState, beat: &dyn Fn()) -> Result<(), BoxedError> {
        let mut desk = state.routers.lock().expect("nothing panics inside");
        if desk.layers.is_empty() || !state.schedule().ranks.dealt {
            return Ok(());
        }
        let own = desk.losses.values().flat_map(|losses| [losses.balance, losses.z]);
        let losses = self.numbers_of_ranks(own.collect(), beat)?.concat();
        let losses =
            losses.chunks_exact(2).map(|pair| RouterLosses { balance: pair[0], z: pair[1] });
        let losses = RouterLosses::sum(losses.collect::<Vec<_>>().iter());
        let numbers = desk.sums.iter().flat_map(RouterSums::numbers).collect();
        let all = self.numbers_of_ranks(numbers, beat)?;
        let rank = self.parts().exchanges.rank() as usize;
        let mut sums = desk.sums.clone();
        let others = all.iter().enumerate().filter(|(other, _)| *other != rank);
        for (_, of_rank) in others {
            let mut left = &of_rank[..];
            for sums in &mut sums {
                let count = sums.numbers().count();
                sums.add_numbers(left.split_off(..count).ok_or("ranks have other experts")?);
            }
        }
        let layers = desk.layers.iter().copied().zip(sums).collect();
        desk.total = Some(RouterReport { losses, layers });
        Ok(())
    }

    /// The sum of the losses of all micro-batches, in their order.
    fn sum_losses(&self, state: &StepState, beat: &dyn Fn()) -> Result<f64, BoxedError> {
        self.sum_routers(state, beat)?;
        let own = state.losses.lock().expect("nothing panics inside").values().copied().collect();
        let all = match state.schedule().ranks.dealt {
            false => own,
            true => {
                self.gather_metrics(state, beat)?;
                self.numbers_of_ranks(own, beat)?.concat()
            }
        };
        Ok(all.iter().fold(0.0, |sum, loss| sum + loss))
    }

    /// Gathers the metrics of the records of all ranks, in their order.
    fn gather_metrics(&self, state: &StepState, beat: &dyn Fn()) -> Result<(), BoxedError> {
        let objective = self.shared.model.objective.as_ref();
        // Of an objective of the step, each rank has computed the metrics of all records.
        if objective.is_none_or(|one| one.metric_names().is_empty()) || state.shared().is_some() {
            return Ok(());
        }
        let desk = || state.objective.lock().expect("nothing panics inside");
        let own = desk().metrics().to_vec();
        let all = self.numbers_of_ranks(own, beat)?;
        desk().set_metrics_of_step(all.concat());
        Ok(())
    }

    /// The sum of squares of all gradients. For each block, the sums of its chunks are added in the
    /// order of the chunks, whichever ranks measured them; then the sums of the blocks.
    fn sum_squares(&self, state: &StepState, beat: &dyn Fn()) -> Result<f64, BoxedError> {
        let parts = self.parts();
        let clipping = &self.shared.clipping;
        let own = state.squares.lock().expect("nothing panics inside").clone();
        let blocks: Vec<BlockId> = own.keys().copied().collect();
        let all = self.numbers_of_ranks(own.into_values().flatten().collect(), beat)?;
        let mut left: Vec<&[f64]> = all.iter().map(Vec::as_slice).collect();
        let mut sum = 0.0;
        let mut group_sums = clipping.no_sums();
        for block in blocks {
            let tensors = &parts.tensors[block.0 as usize];
            let mut squares = Vec::new();
            for (rank, left) in (0..).zip(&mut left) {
                let part = tensors.part(parts.of(block).of(rank));
                let count = chunks(part.trained()).count();
                squares.extend(left.split_off(..count).ok_or("ranks measured different blocks")?);
            }
            sum += sum_of_chunks(tensors.trained(), &squares);
            clipping.add(&mut group_sums, tensors.trained(), &squares);
        }
        let _ = state.group_sums.set(group_sums); // the updates of the step read it later
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
