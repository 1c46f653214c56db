//! The plan: every byte that will be held, one named term per holder, summed before anything is
//! allocated; and where in the device's memory each slot lies.

use std::fmt;

use l2l_actors::schedule::{self, Capacities, Pools};

use super::walk::{Purpose, Walk, schedule_of};
use super::{ByteSize, ChannelsConfig, Config, StashPlace};
use crate::devices::cpu;
use crate::error::Error;
use crate::machine;
use crate::models::{Model, Part, View, block_len};
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
    pub(crate) memory: Option<Memory>,
    /// False: it holds no gradients and no optimizer state.
    pub(crate) trains: bool,
    pub(crate) stash_on_device: bool,
    pub(crate) deferred: bool,
    budget: ByteSize,
}

/// Keys and values that attention remembers: by layer, sequence and position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    layers: usize,
    sequences: usize,
    capacity: usize,
    width: usize,
}

impl Memory {
    fn floats(&self) -> usize {
        self.layers * self.sequences * self.capacity * self.width
    }
}

const FLOAT: u64 = size_of::<f32>() as u64;

impl Plan {
    /// Sums everything that training holds.
    ///
    /// # Errors
    /// The shapes cannot be: a sequence longer than the model's positions, absurd sizes.
    pub fn new(config: &Config, model: &Model, rule: &dyn UpdateRule) -> Result<Plan, Error> {
        let positions = config.sequence_length(&model.shape)?;
        let (sequences, purpose) = (config.step.batch, Purpose::Train);
        let train = Walk { sequences, positions, purpose };
        // A look at logits between steps fits, too.
        let sequences = if model.shape.scores_tokens() { 1 } else { config.step.batch };
        let tell = Walk { sequences, purpose: Purpose::Tell, ..train };
        Plan::of(config, model, Some(rule.states()), &[train, tell], None)
    }

    /// Sums everything that evaluation holds.
    ///
    /// # Errors
    /// As [`new`](Plan::new).
    pub fn of_evaluation(config: &Config, model: &Model) -> Result<Plan, Error> {
        let positions = config.sequence_length(&model.shape)?;
        let is_classes = !model.shape.scores_tokens();
        let purpose = if is_classes { Purpose::Tell } else { Purpose::Evaluate };
        let walk = Walk { sequences: config.step.batch, positions, purpose };
        Plan::of(config, model, None, &[walk], None)
    }

    /// Sums everything that generating from so many prompts at once holds, the longest of
    /// `prompt` tokens, each with room for `capacity`.
    ///
    /// # Errors
    /// As [`new`](Plan::new).
    pub fn of_generation(
        config: &Config,
        model: &Model,
        sequences: usize,
        prompt: usize,
        capacity: usize,
    ) -> Result<Plan, Error> {
        let read = Walk { sequences, positions: prompt, purpose: Purpose::Remember { past: 0 } };
        let past = capacity.saturating_sub(1);
        let write = Walk { sequences, positions: 1, purpose: Purpose::Remember { past } };
        let remembered = model.parts.iter().filter_map(|part| match part {
            Part::Stack(layer) => Some(layer.remembered()),
            _ => None,
        });
        let layers = remembered.clone().filter(|&floats| floats > 0).count();
        let width = remembered.max().unwrap_or(0);
        let memory = Memory { layers, sequences, capacity, width };
        Plan::of(config, model, None, &[read, write], Some(memory))
    }

    /// Sums what walks of the ring hold, the first the longest. `states`: of the update rule, when
    /// it trains.
    fn of(
        config: &Config,
        model: &Model,
        states: Option<usize>,
        walks: &[Walk],
        memory: Option<Memory>,
    ) -> Result<Plan, Error> {
        let trains = states.is_some();
        let Walk { sequences, positions, .. } = walks[0];
        check_sizes(config, model, sequences, positions)?;
        let ChannelsConfig { weights, gradients, reduced, stash } = config.channels;
        let depths = Capacities { weights, gradients, reduced, stash };
        let (mut boundary, mut stash_floats) = (0, 0);
        let mut schedules = Vec::new();
        for walk in walks {
            let (schedule, carries) = schedule_of(config, model, *walk)?;
            let is_elsewhere = |id| carries.recalls.contains_key(&id);
            stash_floats = stash_floats.max(stash::layout(&schedule, is_elsewhere).floats);
            let largest = schedule.micro_batches.iter().copied().max().unwrap_or(1) as usize;
            let slot = |boundary: &schedule::Boundary| boundary.bytes_per_sequence / FLOAT;
            let floats = schedule.boundaries.iter().map(slot).max().unwrap_or(0) as usize;
            boundary = boundary.max((floats * largest).next_multiple_of(16));
            schedules.push(schedule);
        }
        let of_first = Pools::of(&schedules[0], &depths);
        let pools = match memory {
            None => of_first,
            Some(_) => {
                schedules.iter().map(|one| Pools::of(one, &depths)).fold(of_first, Pools::max)
            }
        };
        // Of a run its step; of generation what it ends with, a step with all its memory.
        let schedule = schedules.swap_remove(if trains { 0 } else { walks.len() - 1 });
        let micro_batches = schedule.micro_batches.clone();
        let traffic = schedule::Plan::new(schedule, pools)?.traffic;
        let deferred = trains && config.optimizer.clip_norm.is_some();
        let stash_on_device = config.stash.place == StashPlace::Device;

        let largest = micro_batches.iter().copied().max().unwrap_or(1) as usize;
        let block = model.blocks.iter().map(|tensors| block_len(tensors)).max().unwrap_or(0);
        let recompute = config.schedule.recompute;
        let workspace = cpu::workspace(model, largest, positions, recompute, trains);
        let memory_floats = memory.map_or(0, |memory| memory.floats());
        let (gradients, reduced) = if trains { (pools.gradients, pools.reduced) } else { (0, 0) };
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
            gradients: place(gradients as usize * block),
            inputs: place(pools.inputs as usize * boundary),
            outputs: place(pools.outputs as usize * boundary),
            workspace: View { at: place(workspace), len: workspace },
            stash: place(if stash_on_device { stash_floats + memory_floats } else { 0 }),
            end: 0,
        };
        let layout = Layout { end, ..layout };

        let term = |name, floats: usize| Term { name, bytes: floats as u64 * FLOAT };
        let blocks: usize = model.blocks.iter().map(|tensors| block_len(tensors)).sum();
        let regions: usize = model
            .blocks
            .iter()
            .enumerate()
            .filter(|(index, _)| trains && (deferred || *index < model.tiles.len()))
            .map(|(_, tensors)| block_len(tensors))
            .sum();
        let on = |device: bool, floats: usize| if device == stash_on_device { floats } else { 0 };
        let mut device = vec![
            term("weights", pools.weights as usize * block),
            term("gradients", gradients as usize * block),
            term("inputs", pools.inputs as usize * boundary),
            term("outputs", pools.outputs as usize * boundary),
            term("workspace", workspace),
            term("stash", on(true, stash_floats)),
        ];
        let mut host = vec![
            term("masters", blocks),
            term("moments", states.unwrap_or(0) * blocks),
            term("gradient_regions", regions),
            term("landing", reduced as usize * block),
            term("stash", on(false, stash_floats)),
        ];
        if memory.is_some() {
            device.push(term("memory", on(true, memory_floats)));
            host.push(term("memory", on(false, memory_floats)));
        }
        Ok(Plan {
            device,
            host,
            upload_bytes: traffic.weights.saturating_add(traffic.inputs),
            download_bytes: traffic.gradients.saturating_add(traffic.outputs),
            positions,
            micro_batches,
            trains,
            pools,
            layout,
            stash_floats,
            memory,
            stash_on_device,
            deferred,
            budget: config.device.memory,
        })
    }

    /// Floats of the blocks that land on the host.
    pub(crate) fn landing(&self) -> usize {
        if self.trains { self.pools.reduced as usize * self.layout.block } else { 0 }
    }

    /// Floats of stash and memory, one behind the other.
    pub(crate) fn stash_and_memory(&self) -> usize {
        self.stash_floats + self.memory.map_or(0, |memory| memory.floats())
    }

    /// Where a layer's memory of a position begins, in floats behind the stash's first.
    pub(crate) fn memory_at(&self, layer: usize, sequence: usize, position: usize) -> usize {
        let memory = self.memory.expect("who remembers has planned for it");
        let Memory { layers, sequences, capacity, width } = memory;
        assert!(layer < layers && sequence < sequences && position < capacity, "{memory:?}");
        self.stash_floats + ((layer * sequences + sequence) * capacity + position) * width
    }

    /// The ceiling that was set for the device, if one was.
    pub fn budget(&self) -> Option<u64> {
        self.budget.bytes()
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
fn check_sizes(
    config: &Config,
    model: &Model,
    sequences: usize,
    positions: usize,
) -> Result<(), Error> {
    const VISITS: u128 = 1 << 22;
    const FLOATS: u128 = 1 << 44;
    let shape = &model.shape;
    let turns = sequences.div_ceil(config.step.micro_batch) as u128;
    let visits = turns.saturating_mul(model.parts.len() as u128);
    if visits > VISITS {
        return Err(Error::refused(format_args!(
            "a step of {turns} micro-batches over {} layers is {visits} turns of at most {VISITS}: \
             make step.micro_batch larger or step.batch smaller",
            model.parts.len()
        )));
    }
    let width = 8 * shape.hidden as u128 + 4 * shape.intermediate as u128 + shape.heads as u128;
    let rows = sequences as u128 * positions as u128;
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
