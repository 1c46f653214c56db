//! What the host does of a step: it gathers and scatters embeddings, takes losses and what heads
//! told, remembers keys and values, reduces gradients and updates blocks.

use std::ops::Range;
use std::time::Instant;

use l2l_actors::ports::{Source, Step, Trouble};
use l2l_actors::schedule::{BlockId, MicroBatch, Version, Visit};

use super::{Cpu, Goal, Remembered, StepData, classes, cross_entropy, embedding};
use crate::config::Recall;
use crate::models::{STATISTICS, View};
use crate::optimizers::Update;
use crate::telemetry::NotFinite;

impl Cpu {
    /// Embeddings and fresh statistics of a micro-batch.
    pub(super) fn gather(&self, step: &Step, visit: &Visit, m: MicroBatch) {
        let data = self.step(step.number);
        let (_, first, rows) = data.micro(m, &step.plan.schedule);
        let range = first as usize * rows.positions..first as usize * rows.positions + rows.count();
        let tokens = &data.batch.tokens[range.clone()];
        let (arena, x) = self.stash(data.stash.place(visit.writes[0], m));
        // SAFETY: the ring has nobody read this place before this gather has ended.
        let x = unsafe { arena.write(x) };
        let channels = self.model.shape.hidden;
        self.threads.install(|| {
            for (tile, &block) in self.model.tiles.iter().zip(visit.blocks()) {
                let lease = self.eps.read(block, step.number);
                let table = &lease.parameters[..tile.rows * channels];
                embedding::gather(x, tokens, table, tile.first, channels);
            }
        });
        let (arena, statistics) = self.stash(data.stash.place(visit.writes[1], m));
        // SAFETY: as above.
        let statistics = unsafe { arena.write(statistics) };
        let positions = statistics.chunks_exact_mut(STATISTICS).zip(&data.batch.targets[range]);
        positions.for_each(|(statistics, &target)| cross_entropy::begin(statistics, target));
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
                cross_entropy::loss_of(statistics, &*self.model.loss)
            } else {
                classes::loss_of(statistics)
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
    ) {
        let width = slot.len / sequences.len();
        for (index, sequence) in sequences.enumerate() {
            let Remembered { slot: place, past } = data.memory[sequence];
            let on_device = slot.part(index * width..(index + 1) * width);
            let super::Used { uploaded, downloaded, .. } = &*self.used;
            let over_link = !self.plan.stash_on_device;
            match memory {
                Recall::Past(layer) => {
                    let (arena, from) = self.stash((self.plan.memory_at(layer, place, 0), width));
                    // SAFETY: the ring gives the slot to this upload alone, and a step remembers
                    // nothing more before the one before has ended.
                    let (to, from) = unsafe { (self.device.write(on_device), arena.read(from)) };
                    self.copy(to, from, uploaded, over_link);
                }
                Recall::Fresh(layer) => {
                    let (arena, to) = self.stash((self.plan.memory_at(layer, place, past), width));
                    // SAFETY: the ring holds the slot for this download, which alone writes what
                    // this sequence remembers of this step.
                    let (from, to) = unsafe { (self.device.read(on_device), arena.write(to)) };
                    self.copy(to, from, downloaded, over_link);
                }
            }
        }
    }

    /// Adds the embedding's gradient to a tile's region.
    pub(super) fn scatter(&self, step: &Step, visit: &Visit, block: BlockId, first: bool) -> f64 {
        let data = self.step(step.number);
        let (arena, dx) = self.stash(data.stash.whole(visit.reads[0]));
        // SAFETY: the ring has it written before this scatter, and not after.
        let dx = unsafe { arena.read(dx) };
        let mut region = self.eps.region_mut(block);
        if first {
            region.fill(0.0);
        }
        let (tile, channels) = (self.model.tiles[block.0 as usize], self.model.shape.hidden);
        let table = &mut region[..tile.rows * channels];
        embedding::scatter(self.level, table, data.batch.known(), dx, tile.first, channels);
        let tensors = self.eps.tensors(block);
        self.threads.install(|| self.rule.measure(tensors, &region))
    }

    pub(super) fn reduce(&self, block: BlockId, slot: u32) -> f64 {
        // SAFETY: the ring holds the landing block for this operation.
        let landed = unsafe { self.host.read(self.landing(block, slot)) };
        let mut region = self.eps.region_mut(block);
        region.copy_from_slice(landed);
        self.threads.install(|| self.rule.measure(self.eps.tensors(block), &region))
    }

    pub(super) fn update(
        &self,
        block: BlockId,
        version: Version,
        gradient: Source,
        norm: Option<f64>,
    ) -> Result<f64, Trouble> {
        let begin = Instant::now();
        let region;
        let gradient = match gradient {
            // SAFETY: the ring holds the landing block for this operation.
            Source::Landing(slot) => unsafe { self.host.read(self.landing(block, slot)) },
            Source::Region => {
                region = self.eps.region(block);
                &region[..]
            }
        };
        let tensors = self.eps.tensors(block);
        let squares = self.threads.install(|| self.rule.measure(tensors, gradient));
        if !squares.is_finite() || norm.is_some_and(|norm| !norm.is_finite()) {
            return Err(NotFinite("the gradient is not finite".into()).into());
        }
        let scale = match (norm, self.clip_norm) {
            (Some(norm), Some(clip)) => (clip / (norm + 1e-6)).min(1.0) as f32,
            _ => 1.0,
        };
        let mut lease = self.eps.write(block, version);
        let lease = &mut *lease;
        let learning_rate = self.step(version).learning_rate;
        let update = Update { step: lease.updates, learning_rate, scale, level: self.level };
        let (parameters, states) = (&mut lease.parameters, &mut lease.states);
        self.threads.install(|| {
            self.rule.apply(tensors, parameters, states, gradient, update);
        });
        lease.version = version + 1;
        lease.updates += 1;
        super::take_as_long(begin, size_of_val(gradient) as u64, self.update_rate);
        Ok(squares)
    }
}
