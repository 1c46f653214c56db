//! The plan: every byte that will be held, one named term per holder, summed before anything is
//! allocated; and where in the device's memory each slot lies.

use std::fmt;

use l2l_actors::schedule::{self, BlockId, Capacities, Pools, Schedule, Selection};

use super::{ByteSize, Config, ScheduleKind, StashPlace};
use crate::devices::cpu;
use crate::error::Error;
use crate::machine;
use crate::models::{Model, View, block_len};
use crate::optimizers::UpdateRule;
use crate::stash;

/// What holds memory, and how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// Its name.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: u64,
}

/// Where slots lie, in floats of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// A weight or gradient slot.
    pub(crate) block: usize,
    /// An input or output slot.
    pub(crate) boundary: usize,
    pub(crate) weights: usize,
    pub(crate) gradients: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) workspace: View,
    /// The stash, if it is on the device.
    pub(crate) stash: usize,
    pub(crate) end: usize,
}

/// What a run will hold and move.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The device's memory, term by term.
    pub device: Vec<Term>,
    /// The host's.
    pub host: Vec<Term>,
    /// Bytes to the device in a step of the longest sequences.
    pub upload_bytes: u64,
    /// Bytes from it.
    pub download_bytes: u64,
    /// The longest sequence.
    pub positions: usize,
    /// Sequences of each micro-batch of a step.
    pub micro_batches: Vec<u32>,
    pub(crate) pools: Pools,
    pub(crate) layout: Layout,
    pub(crate) stash_floats: usize,
    pub(crate) stash_on_device: bool,
    pub(crate) deferred: bool,
    budget: ByteSize,
}

const FLOAT: u64 = size_of::<f32>() as u64;

/// Sequences of each micro-batch.
fn micro_batches(batch: usize, micro_batch: usize) -> Vec<u32> {
    (0..batch).step_by(micro_batch).map(|at| micro_batch.min(batch - at) as u32).collect()
}

/// What a step walks over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    pub(crate) sequences: usize,
    pub(crate) positions: usize,
    /// False: forward alone.
    pub(crate) trains: bool,
}

/// The schedule of a step.
pub(crate) fn schedule_of(config: &Config, model: &Model, walk: Walk) -> Result<Schedule, Error> {
    let ring = model.for_ring(walk.positions);
    let sizes = micro_batches(walk.sequences, config.step.micro_batch);
    let mut selection = Selection::all(&ring, sizes);
    selection.recompute = config.schedule.recompute;
    if !walk.trains {
        selection.frozen = (0..ring.blocks.len() as u32).map(BlockId).collect();
    }
    Ok(match config.schedule.kind {
        ScheduleKind::Relay => schedule::relay(&ring, &selection)?,
        ScheduleKind::Resident => schedule::resident(&ring, &selection)?,
    })
}

impl Plan {
    /// Sums everything.
    ///
    /// # Errors
    /// The shapes cannot be: a sequence longer than the model's positions, absurd sizes.
    pub fn new(config: &Config, model: &Model, rule: &dyn UpdateRule) -> Result<Plan, Error> {
        let positions = config.sequence_length(&model.shape)?;
        check_sizes(config, model, positions)?;
        let walk = Walk { sequences: config.step.batch, positions, trains: true };
        let schedule = schedule_of(config, model, walk)?;
        let channels = config.channels;
        let depths = Capacities {
            weights: channels.weights,
            gradients: channels.gradients,
            reduced: channels.reduced,
            stash: channels.stash,
        };
        let pools = Pools::of(&schedule, &depths);
        let traffic = schedule::Plan::new(schedule.clone(), pools)?.traffic;
        let deferred = config.optimizer.clip_norm.is_some();
        let stash_on_device = config.stash.place == StashPlace::Device;
        let stash_floats = stash::layout(&schedule).floats;

        let micro_batches = schedule.micro_batches.clone();
        let largest = micro_batches.iter().copied().max().unwrap_or(1) as usize;
        let block = model.blocks.iter().map(|tensors| block_len(tensors)).max().unwrap_or(0);
        let slot = |boundary: &schedule::Boundary| boundary.bytes_per_sequence / FLOAT;
        let boundary = schedule.boundaries.iter().map(slot).max().unwrap_or(0) as usize * largest;
        let boundary = boundary.next_multiple_of(16);
        let workspace = cpu::workspace(model, largest, positions, config.schedule.recompute);
        let mut end = 0;
        let mut place = |floats: usize| {
            let at = end;
            end += floats.next_multiple_of(16);
            at
        };
        let layout = Layout {
            block,
            boundary,
            weights: place(pools.weights as usize * block),
            gradients: place(pools.gradients as usize * block),
            inputs: place(pools.inputs as usize * boundary),
            outputs: place(pools.outputs as usize * boundary),
            workspace: View { at: place(workspace), len: workspace },
            stash: place(if stash_on_device { stash_floats } else { 0 }),
            end: 0,
        };
        let layout = Layout { end, ..layout };

        let term = |name, floats: usize| Term { name, bytes: floats as u64 * FLOAT };
        let blocks: usize = model.blocks.iter().map(|tensors| block_len(tensors)).sum();
        let regions: usize = model
            .blocks
            .iter()
            .enumerate()
            .filter(|(index, _)| deferred || *index < model.tiles.len())
            .map(|(_, tensors)| block_len(tensors))
            .sum();
        let states = rule.states();
        let (device_stash, host_stash) =
            if stash_on_device { (stash_floats, 0) } else { (0, stash_floats) };
        Ok(Plan {
            device: vec![
                term("weights", pools.weights as usize * block),
                term("gradients", pools.gradients as usize * block),
                term("inputs", pools.inputs as usize * boundary),
                term("outputs", pools.outputs as usize * boundary),
                term("workspace", workspace),
                term("stash", device_stash),
            ],
            host: vec![
                term("masters", blocks),
                term("moments", states * blocks),
                term("gradient_regions", regions),
                term("landing", pools.reduced as usize * block),
                term("stash", host_stash),
            ],
            upload_bytes: traffic.weights.saturating_add(traffic.inputs),
            download_bytes: traffic.gradients.saturating_add(traffic.outputs),
            positions,
            micro_batches,
            pools,
            layout,
            stash_floats,
            stash_on_device,
            deferred,
            budget: config.device.memory,
        })
    }

    /// Bytes of the device.
    pub fn device_bytes(&self) -> u64 {
        self.device.iter().map(|term| term.bytes).sum()
    }

    /// Bytes of the host.
    pub fn host_bytes(&self) -> u64 {
        self.host.iter().map(|term| term.bytes).sum()
    }

    /// Everything that does not fit: into the budget, or into this machine.
    pub fn misfits(&self) -> Vec<String> {
        let mut misfits = Vec::new();
        let needed = self.device_bytes();
        if let Some(budget) = self.budget.bytes().filter(|&budget| budget < needed) {
            misfits.push(format!(
                "device.memory is {}, the plan needs {needed} bytes, most of it for {}: \
                 give it {needed} bytes, or make step.micro_batch or channels smaller",
                ByteSize::from(budget),
                largest(&self.device),
            ));
        }
        // The CPU device's memory is the host's.
        let all = needed.saturating_add(self.host_bytes());
        if let Some(available) = machine::available_memory().filter(|&available| available < all) {
            misfits.push(format!(
                "this machine has {} free, the plan needs {}, most of it for {} and {}",
                ByteSize::from(available),
                ByteSize::from(all),
                largest(&self.device),
                largest(&self.host),
            ));
        }
        misfits
    }
}

/// Refuses what no machine could hold before anything is sized by it.
fn check_sizes(config: &Config, model: &Model, positions: usize) -> Result<(), Error> {
    const VISITS: u128 = 1 << 22;
    const FLOATS: u128 = 1 << 44;
    let shape = &model.shape;
    let turns = config.step.batch.div_ceil(config.step.micro_batch) as u128;
    let visits = turns.saturating_mul(model.parts.len() as u128);
    if visits > VISITS {
        return Err(Error::refused(format_args!(
            "a step of {turns} micro-batches over {} layers is {visits} turns of at most {VISITS}: \
             make step.micro_batch larger or step.batch smaller",
            model.parts.len()
        )));
    }
    let width = 8 * shape.hidden as u128 + 4 * shape.intermediate as u128 + shape.heads as u128;
    let rows = config.step.batch as u128 * positions as u128;
    let floats = rows.saturating_mul(width).saturating_mul(model.parts.len() as u128);
    if floats > FLOATS {
        return Err(Error::refused(format_args!(
            "a step of {rows} positions through {} layers of width {} needs more memory than there \
             is: make step.batch, data.sequence_length or the model smaller",
            model.parts.len(),
            shape.hidden
        )));
    }
    Ok(())
}

fn largest(terms: &[Term]) -> &Term {
    terms.iter().max_by_key(|term| term.bytes).expect("a plan has terms")
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, ByteSize::from(self.bytes))
    }
}
