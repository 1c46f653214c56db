//! What the host does of a step: it gathers and scatters embeddings, takes losses and what heads
//! told, remembers keys and values, reduces gradients and updates blocks.

use std::ops::Range;
use std::time::Instant;

use half::bf16;
use l2l_actors::ports::{Operation, Source, Step, Trouble, Work};
use l2l_actors::schedule::{BlockId, BoundaryId, MicroBatch, Version, Visit};
use rayon::prelude::*;

use super::host_math::{begin_statistics, gather, scatter, sequence_loss, token_loss};
use super::{Goal, Remembered, StepData, Worker};
use crate::kernels::{Rows, STATISTICS};
use crate::models::Tensor;
use crate::optimizers::planes::published;
use crate::optimizers::{Planes, Update};
use crate::plan::Recall;
use crate::telemetry::NotFinite;
use crate::tensor::{View, packed, packed_mut};

/// Floats that a thread copies at once.
const COPIED: usize = 1 << 18;

impl Worker {
    /// Embeddings and fresh statistics of a micro-batch.
    pub(super) fn gather(&self, step: &Step, visit: &Visit, m: MicroBatch) {
        let data = self.step(step.number);
        let (_, first, rows) = data.micro(m, &step.plan.schedule);
        let range = first as usize * rows.positions..first as usize * rows.positions + rows.count();
        let tokens = &data.batch.tokens[range.clone()];
        for (index, &block) in visit.blocks().iter().enumerate() {
            let lease = self.eps.memory().read(block, step.number);
            self.gather_tile(&data, visit.writes[0], m, rows, tokens, index, &lease.parameters);
        }
        self.begin_statistics(&data, visit, m, range);
    }

    /// Embeddings of one tile, as it was read, of all micro-batches; with the first, fresh statistics.
    pub(super) fn gather_block(&self, step: &Step, visit: &Visit, block: BlockId, slot: u32) {
        let data = self.step(step.number);
        // SAFETY: the ring has it read before this gather, and not after.
        let table = unsafe { self.host.read(self.read_slot(slot)) };
        let table = &table[..self.block_len(block)];
        let index = visit.blocks().iter().position(|&id| id == block).expect("a block of its");
        for m in visit.micro_batches.clone() {
            let (_, first, rows) = data.micro(m, &step.plan.schedule);
            let from = first as usize * rows.positions;
            let range = from..from + rows.count();
            let tokens = &data.batch.tokens[range.clone()];
            self.gather_tile(&data, visit.writes[0], m, rows, tokens, index, table);
            if index == 0 {
                self.begin_statistics(&data, visit, m, range);
            }
        }
    }

    /// Copies the rows of a micro-batch's tokens that lie in a tile, which `table` is the block of.
    #[allow(clippy::too_many_arguments, reason = "what both gathers share")]
    fn gather_tile(
        &self,
        data: &StepData,
        to: BoundaryId,
        m: MicroBatch,
        rows: Rows,
        tokens: &[u32],
        tile: usize,
        table: &[f32],
    ) {
        let (arena, x) = self.stash(data.stash.place(to, m));
        // SAFETY: the ring has nobody read this place before its gather has ended.
        let x = unsafe { arena.write(x) };
        let (tile, channels) = (self.model.tiles[tile], self.model.shape.hidden);
        let (rows_of_tile, sequence) = (tile.rows * channels, rows.positions * channels);
        self.threads.install(|| {
            if x.len() == rows.sequences * sequence {
                let table = &table[..rows_of_tile];
                return gather(x, tokens, table, tile.first, channels, |x| x);
            }
            let tokens = tokens.chunks_exact(rows.positions);
            for (x, tokens) in packed_mut(x, rows.sequences).zip(tokens) {
                let (x, first) = (&mut x[..sequence], tile.first);
                if self.eps.in_planes {
                    let table = &published(table)[..rows_of_tile];
                    gather(x, tokens, table, first, channels, |x| x);
                } else {
                    let table = &table[..rows_of_tile];
                    gather(x, tokens, table, first, channels, bf16::from_f32);
                }
            }
        });
    }

    fn begin_statistics(&self, data: &StepData, visit: &Visit, m: MicroBatch, range: Range<usize>) {
        let (arena, statistics) = self.stash(data.stash.place(visit.writes[1], m));
        // SAFETY: as above.
        let statistics = unsafe { arena.write(statistics) };
        let positions = statistics.chunks_exact_mut(STATISTICS).zip(&data.batch.targets[range]);
        positions.for_each(|(statistics, &target)| begin_statistics(statistics, target));
    }

    /// A micro-batch's share of the loss.
    pub(super) fn loss(&self, step: &Step, visit: &Visit, m: MicroBatch) -> f64 {
        let data = self.step(step.number);
        let (arena, statistics) = self.stash(data.stash.place(visit.reads[0], m));
        // SAFETY: the ring has it written before this loss is taken, and not after.
        let statistics = unsafe { arena.read(statistics) };
        let statistics = statistics.chunks_exact(STATISTICS);
        if data.goal == Goal::Tell {
            self.hear(&data, m);
            if self.model.shape.scores_tokens() {
                return 0.0; // tiles told their logits and summed nothing
            }
        }
        let of_position = |statistics: &[f32]| {
            if self.model.shape.scores_tokens() {
                token_loss(statistics, &*self.model.loss)
            } else {
                sequence_loss(statistics)
            }
        };
        let losses = statistics.filter_map(of_position);
        losses.map(f64::from).sum::<f64>() / data.batch.labelled as f64
    }

    /// Takes the logits of a micro-batch, sequence by sequence, tile behind tile.
    fn hear(&self, data: &StepData, m: MicroBatch) {
        let mut told = self.told.lock().expect("nothing panics inside");
        let tiles: Vec<(&[f32], usize)> = data
            .carries
            .told
            .iter()
            .map(|&(id, floats)| {
                let (arena, view) = self.stash(data.stash.place(id, m));
                // SAFETY: the ring has it written before this loss is taken, and not after.
                (unsafe { arena.read(view) }, floats)
            })
            .collect();
        let sequences = tiles.first().map_or(0, |(tile, floats)| tile.len() / floats);
        for sequence in 0..sequences {
            for (tile, floats) in &tiles {
                told.extend(&tile[sequence * floats..][..*floats]);
            }
        }
    }

    /// Copies a micro-batch's memory of a layer to the device, or what is new of it from there.
    pub(super) fn recall(
        &self,
        data: &StepData,
        memory: Recall,
        slot: View,
        sequences: Range<usize>,
    ) -> Result<(), Trouble> {
        let width = slot.len() / sequences.len();
        let over_link = !self.plan.stash_on_device;
        for (index, sequence) in sequences.enumerate() {
            let Remembered { slot: place, past } = data.memory[sequence];
            let on_device = slot.part(index * width..(index + 1) * width);
            match memory {
                Recall::Past(layer) => {
                    let (arena, from) = self.stash((self.plan.memory_at(layer, place, 0), width));
                    // SAFETY: a step remembers nothing more before the one before has ended.
                    self.upload(on_device, unsafe { arena.read(from) }, over_link)?;
                }
                Recall::Fresh(layer) => {
                    let (arena, to) = self.stash((self.plan.memory_at(layer, place, past), width));
                    // SAFETY: this download alone writes what this sequence remembers of this step.
                    self.download(unsafe { arena.write(to) }, on_device, over_link)?;
                }
            }
        }
        Ok(())
    }

    /// Adds the embedding's gradient to a tile's region.
    pub(super) fn scatter(
        &self,
        step: &Step,
        visit: &Visit,
        block: BlockId,
        first: bool,
        landing: Option<u32>,
    ) -> f64 {
        let data = self.step(step.number);
        let (arena, dx) = self.stash(data.stash.whole(visit.reads[0]));
        // SAFETY: the ring has it written before this scatter, and not after.
        let dx = unsafe { arena.read(dx) };
        let mut region;
        let gradient = match landing {
            // SAFETY: the ring gives the landing block to this operation alone.
            Some(slot) => unsafe { self.host.write(self.landing(block, slot)) },
            None => {
                region = self.eps.memory().region_mut(block);
                &mut region[..]
            }
        };
        if first {
            gradient.fill(0.0);
        }
        let (tile, channels) = (self.model.tiles[block.0 as usize], self.model.shape.hidden);
        let table = &mut gradient[..tile.rows * channels];
        let (level, first, known) = (self.level, tile.first, &*data.known);
        let (sequences, positions) = (data.batch.lengths.len(), data.batch.positions);
        self.threads.install(|| {
            if dx.len() == sequences * positions * channels {
                let of = |at: usize| &dx[at * channels..][..channels];
                scatter(level, table, known, of, first, channels, |dx| dx);
            } else {
                let dx: Vec<&[bf16]> = packed(dx, sequences).collect();
                let of = |at: usize| &dx[at / positions][at % positions * channels..][..channels];
                scatter(level, table, known, of, first, channels, bf16::to_f32);
            }
        });
        let tensors = self.eps.tensors(block);
        self.threads.install(|| self.rule.measure(tensors, gradient))
    }

    /// What the lane of files does.
    pub(super) fn on_file(&self, operation: &Operation) -> Result<(), Trouble> {
        let (begin, file) = (Instant::now(), self.file());
        let beat = &|| operation.still_runs();
        let share = self.plan.layout.host_block;
        match *operation.work() {
            Work::ReadBlock { block, version, reads } => {
                // SAFETY: the ring gives the slot to this operation alone.
                let to = unsafe { self.host.write(self.read_slot(reads)) };
                file.read_parameters(block, version, to, beat)?;
            }
            Work::ReadRegion { block, reduced } => {
                // SAFETY: as above.
                let to = unsafe { self.host.write(self.whole_landing(reduced)) };
                file.read_region(block, to, beat)?;
            }
            Work::WriteRegion { block, reduced } => {
                // SAFETY: the ring holds the landing block for this operation.
                let from = unsafe { self.host.read(self.whole_landing(reduced)) };
                file.write_region(block, from, beat)?;
            }
            Work::ReadState { block, version, states, region } => {
                // SAFETY: the ring gives the slot to this operation alone.
                let to = unsafe { self.host.write(self.state_slot(states)) };
                file.read_state(block, version, to, share, region, beat)?;
            }
            Work::WriteState { block, version, states } => {
                // SAFETY: the ring has it updated before this, and not after.
                let from = unsafe { self.host.read(self.state_slot(states)) };
                file.write_state(block, version, from, share, beat)?;
            }
            Work::Seal => file.seal(self.step(operation.step().number).trained + 1)?,
            _ => unreachable!("it is of another lane"),
        }
        let bytes = operation.work().bytes(&operation.step().plan);
        super::take_as_long(begin, bytes, self.disk_rate);
        Ok(())
    }

    pub(super) fn reduce(&self, block: BlockId, slot: u32) -> f64 {
        // SAFETY: the ring holds the landing block for this operation.
        let landed = unsafe { self.host.read(self.landing(block, slot)) };
        let mut region = self.eps.memory().region_mut(block);
        let region = &mut region[..];
        self.threads.install(|| {
            let chunks = region.par_chunks_mut(COPIED).zip(landed.par_chunks(COPIED));
            chunks.for_each(|(to, from)| to.copy_from_slice(from));
            self.rule.measure(self.eps.tensors(block), region)
        })
    }

    pub(super) fn update(
        &self,
        block: BlockId,
        version: Version,
        gradient: Source,
        states: Option<u32>,
        norm: Option<f64>,
    ) -> Result<f64, Trouble> {
        let begin = Instant::now();
        let (tensors, len) = (self.eps.tensors(block), self.block_len(block));
        let mut parts: Vec<&mut [f32]> = match states {
            Some(slot) => {
                // SAFETY: the ring gives the slot to this update alone.
                let all = unsafe { self.host.write(self.state_slot(slot)) };
                all.chunks_mut(self.plan.layout.host_block).map(|part| &mut part[..len]).collect()
            }
            None => Vec::new(),
        };
        let (region, beside);
        let gradient = match gradient {
            // SAFETY: the ring holds the landing block for this operation.
            Source::Landing(slot) => unsafe { self.host.read(self.landing(block, slot)) },
            Source::Region if states.is_some() => {
                beside = parts.pop().expect("a slot has a part for what waited");
                &*beside
            }
            Source::Region => {
                region = self.eps.memory().region(block);
                &region[..]
            }
        };
        let squares = self.threads.install(|| self.rule.measure(tensors, gradient));
        if !squares.is_finite() || norm.is_some_and(|norm| !norm.is_finite()) {
            return Err(NotFinite("the gradient is not finite".into()).into());
        }
        let scale = match (norm, self.clip_norm) {
            (Some(norm), Some(clip)) => (clip / (norm + 1e-6)).min(1.0) as f32,
            _ => 1.0,
        };
        let (learning_rate, level) = (self.step(version).learning_rate, self.level);
        let update = |updates| Update { step: updates, learning_rate, scale, level };
        if let Some((parameters, states)) = parts.split_first_mut() {
            let update = update(self.file().updates_of(block));
            let states = &mut states[..self.eps.states()];
            self.apply(tensors, parameters, states, gradient, update);
        } else {
            let mut lease = self.eps.memory().write(block, version);
            let lease = &mut *lease;
            let update = update(lease.updates);
            let mut states: Vec<&mut [f32]> =
                lease.states.iter_mut().map(Vec::as_mut_slice).collect();
            self.apply(tensors, &mut lease.parameters, &mut states, gradient, update);
            lease.version = version + 1;
            lease.updates += 1;
        }
        super::take_as_long(begin, size_of_val(gradient) as u64, self.update_rate);
        Ok(squares)
    }

    fn apply(
        &self,
        tensors: &[Tensor],
        masters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let rule = &self.rule;
        self.threads.install(|| {
            if self.eps.in_planes {
                let desk = &mut self.desk.lock().expect("nothing panics inside");
                let planes = &mut Planes::of(masters);
                rule.apply_in_planes(tensors, planes, states, gradient, update, desk);
            } else {
                rule.apply(tensors, masters, states, gradient, update);
            }
        });
    }
}
