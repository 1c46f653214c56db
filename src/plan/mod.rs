//! The plan: every byte that will be held, one named term per holder, summed before anything is
//! allocated; and where in the device's memory each slot lies.

mod fit;
mod walk;

use std::fmt;

use l2l_actors::schedule::{self, BlockId, Capacities, Pools, Schedule};

use crate::config::{ByteSize, ChannelsConfig, Config, DeviceKind, EpsTier, StashPlace};
use crate::devices;
use crate::eps::part_floats;
use crate::error::Error;
use crate::kernels::Rows;
use crate::models::{self, Model, Part, Tensor, block_len};
use crate::optimizers::UpdateRule;
use crate::stash;
use crate::tensor::{Dtype, View};
pub(crate) use walk::{Carries, Purpose, Recall, Walk, schedule_of};

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
    /// A weight slot.
    pub(crate) published: usize,
    /// A gradient slot.
    pub(crate) block: usize,
    /// An input or output slot.
    pub(crate) boundary: usize,
    pub(crate) weights: usize,
    pub(crate) gradients: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Keys, values and their gradients that stretches of a long sequence leave to each other.
    pub(crate) chunk_state: View,
    pub(crate) workspace: View,
    /// What a device takes beside what is computed.
    pub(crate) beside: View,
    /// The stash, if it is on the device.
    pub(crate) stash: usize,
    pub(crate) end: usize,
    /// On the host: a landing block, or a part of a block of a file. Landing blocks come first.
    pub(crate) host_block: usize,
    /// Published blocks of a file.
    pub(crate) reads: usize,
    /// Blocks of a file with their states.
    pub(crate) states: usize,
    /// The stash, if it is on the host.
    pub(crate) host_stash: usize,
    pub(crate) host_end: usize,
}

/// What a run will hold and move.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The device's memory, term by term.
    pub device: Vec<Term>,
    /// The host's.
    pub host: Vec<Term>,
    /// That of files, with the EPS there.
    pub file: Vec<Term>,
    /// Of the host's bytes those that a GPU copies from and to, to be pinned where the system lets them.
    pub pinned_bytes: u64,
    /// Bytes to the device in a step of the longest sequences.
    pub upload_bytes: u64,
    /// Bytes from it.
    pub download_bytes: u64,
    /// Bytes that such a step reads from the EPS's file.
    pub read_bytes: u64,
    /// Bytes that it writes there.
    pub written_bytes: u64,
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
    /// What weights and activations are.
    pub(crate) dtype: Dtype,
    pub(crate) stash_on_device: bool,
    pub(crate) deferred: bool,
    /// States of the update rule.
    pub(crate) states: usize,
    /// Tiles whose gradients are joined, from the head and the embedding.
    tied_tiles: usize,
    pub(super) config: Config,
}

/// Keys and values that attention remembers, in floats: by layer, sequence and position.
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
        let states = rule.states();
        let (sequences, purpose) = (config.step.batch, Purpose::Train { states });
        let train = Walk { sequences, positions, purpose };
        // A look at logits between steps fits, too.
        let sequences = if model.shape.scores_tokens() { 1 } else { config.step.batch };
        let tell = Walk { sequences, purpose: Purpose::Tell, ..train };
        Plan::of(config, model, Some(rule), &[train, tell], None)
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
            Part::Stack(layer) => Some(config.device.dtype.floats(layer.kv_width())),
            _ => None,
        });
        let layers = remembered.clone().filter(|&floats| floats > 0).count();
        let width = remembered.clone().max().unwrap_or(0);
        if remembered.filter(|&floats| floats > 0).any(|floats| floats != width) {
            let problem =
                "cannot go on with text: its layers remember keys and values of different widths";
            return Err(Error::refused(format_args!("the model {problem}")));
        }
        let memory = Memory { layers, sequences, capacity, width };
        Plan::of(config, model, None, &[read, write], Some(memory))
    }

    /// Sums what walks of the ring hold, the first the longest. `rule`: when it trains.
    fn of(
        config: &Config,
        model: &Model,
        rule: Option<&dyn UpdateRule>,
        walks: &[Walk],
        memory: Option<Memory>,
    ) -> Result<Plan, Error> {
        let (trains, states) = (rule.is_some(), rule.map_or(0, UpdateRule::states));
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
        let on_file = config.eps.tier == EpsTier::File;
        let pools_of = |schedule: &Schedule| {
            let pools = Pools::of(schedule, &depths);
            if on_file { pools.on_file(schedule) } else { pools }
        };
        let of_first = pools_of(&schedules[0]);
        let pools = match memory {
            None => of_first,
            Some(_) => schedules.iter().map(pools_of).fold(of_first, Pools::max),
        };
        // Of a run its step; of generation what it ends with, a step with all its memory.
        let schedule = schedules.swap_remove(if trains { 0 } else { walks.len() - 1 });
        let micro_batches = schedule.micro_batches.clone();
        let deferred = trains && config.optimizer.clip_norm.is_some();
        let walked = schedule::Plan::new(schedule, pools)?;
        let (traffic, file_bytes) = (walked.traffic, walked.file_bytes(deferred));
        let stash_on_device = config.stash.place == StashPlace::Device;

        let largest = micro_batches.iter().copied().max().unwrap_or(1) as usize;
        let dtype = config.device.dtype;
        if dtype == Dtype::Bf16 && !model.shape.hidden.is_multiple_of(2) {
            let problem = format_args!(
                "is bf16, and the model's width of {} is odd: set \"f32\"",
                model.shape.hidden
            );
            return Err(Error::config("device.dtype", problem));
        }
        let block = model.blocks.iter().map(|tensors| block_len(tensors)).max().unwrap_or(0);
        let published = dtype.floats(block).next_multiple_of(16);
        let keep = config.schedule.recompute.keep();
        let workspace = {
            let kernels = devices::kernels_to_plan(config);
            models::workspace(&*kernels, dtype, model, largest, positions, keep, trains)
        };
        let chunk_state = model.parts.iter().map(|part| match part {
            Part::Stack(layer) => layer.chunk_state_len(positions, trains, dtype),
            _ => 0,
        });
        let chunk_state = chunk_state.max().unwrap_or(0).next_multiple_of(16);
        let rows = Rows { sequences: largest, positions };
        let beside = devices::overhead(config, rows).next_multiple_of(16);
        let notes = devices::overhead_on_host(config, rows);
        let memory_floats = memory.map_or(0, |memory| memory.floats().next_multiple_of(16));
        let (gradients, reduced) = if trains { (pools.gradients, pools.reduced) } else { (0, 0) };
        let place_in = |end: &mut usize, floats: usize| {
            let at = *end;
            *end += floats.next_multiple_of(16);
            at
        };
        let (mut end, mut host_end) = (0, 0);
        let host_block = if on_file { part_floats(block) } else { block };
        let parts = 1 + states + usize::from(deferred);
        let of_states = if trains { pools.states as usize * parts * host_block } else { 0 };
        place_in(&mut host_end, reduced as usize * host_block);
        let reads = place_in(&mut host_end, pools.reads as usize * host_block);
        let states_at = place_in(&mut host_end, of_states);
        let in_stash = stash_floats + memory_floats;
        let host_stash = place_in(&mut host_end, if stash_on_device { 0 } else { in_stash });
        let mut place = |floats: usize| place_in(&mut end, floats);
        let layout = Layout {
            block,
            boundary,
            published,
            weights: place(pools.weights as usize * published),
            gradients: place(gradients as usize * block),
            inputs: place(pools.inputs as usize * boundary),
            outputs: place(pools.outputs as usize * boundary),
            chunk_state: View::floats(place(chunk_state), chunk_state),
            workspace: View::floats(place(workspace), workspace),
            beside: View::floats(place(beside), beside),
            stash: place(if stash_on_device { in_stash } else { 0 }),
            end: 0,
            host_block,
            reads,
            states: states_at,
            host_stash,
            host_end,
        };
        let layout = Layout { end, ..layout };

        let term = |name, floats: usize| Term { name, bytes: floats as u64 * FLOAT };
        let tied = model.shape.tied && model.shape.scores_tokens();
        let tied_tiles = if tied || !on_file { model.tiles.len() } else { 0 };
        let has_region = |index: usize| trains && (deferred || index < tied_tiles);
        let floats = |tensors: &Vec<Tensor>| {
            if on_file { part_floats(block_len(tensors)) } else { block_len(tensors) }
        };
        let blocks: usize = model.blocks.iter().map(floats).sum();
        let with_region = model.blocks.iter().enumerate().filter(|(index, _)| has_region(*index));
        let regions: usize = with_region.map(|(_, tensors)| floats(tensors)).sum();
        let on = |device: bool, floats: usize| if device == stash_on_device { floats } else { 0 };
        let mut device = vec![
            term("weights", pools.weights as usize * published),
            term("gradients", gradients as usize * block),
            term("inputs", pools.inputs as usize * boundary),
            term("outputs", pools.outputs as usize * boundary + chunk_state),
            term("workspace", workspace),
            term("stash", on(true, stash_floats)),
        ];
        if beside > 0 {
            device.push(term("driver", beside));
        }
        let (masters, moments) = (blocks, states * blocks);
        let landing = term("landing", reduced as usize * host_block);
        let stash = term("stash", on(false, stash_floats));
        let (mut host, mut file) = (Vec::new(), Vec::new());
        if on_file {
            // What it is and what it was; what is not trained does not change.
            let copies = if trains { 2 } else { 1 };
            file.push(term("masters", copies * masters));
            file.push(term("moments", copies * moments));
            file.push(term("gradient_regions", regions));
            host.push(term("file_reads", pools.reads as usize * host_block));
            host.push(term("file_states", of_states));
            host.push(term("file_desk", host_block));
        } else {
            host.push(term("masters", masters));
            host.push(term("moments", moments));
            host.push(term("gradient_regions", regions));
        }
        let desk = rule.filter(|_| dtype == Dtype::Bf16).map_or(0, |rule| rule.desk(block));
        host.extend([landing, stash]);
        let beside = [term("desk", desk), term("notes", notes)];
        host.extend(beside.into_iter().filter(|term| term.bytes > 0));
        let is_pinned = config.device.kind == DeviceKind::Cuda;
        let copied = host_end + notes + if on_file { 0 } else { masters };
        let pinned_bytes = if is_pinned { copied as u64 * FLOAT } else { 0 };
        if memory.is_some() {
            device.push(term("memory", on(true, memory_floats)));
            host.push(term("memory", on(false, memory_floats)));
        }
        let plan = Plan {
            device,
            host,
            pinned_bytes,
            upload_bytes: traffic.weights.saturating_add(traffic.inputs),
            file,
            download_bytes: traffic.gradients.saturating_add(traffic.outputs),
            positions,
            micro_batches,
            trains,
            dtype,
            pools,
            layout,
            stash_floats,
            memory,
            stash_on_device,
            read_bytes: file_bytes.0,
            written_bytes: file_bytes.1,
            deferred,
            states,
            tied_tiles,
            config: config.clone(),
        };
        // What is allocated is what was planned, to the byte.
        assert_eq!(plan.device_bytes(), end as u64 * FLOAT, "{:?}", plan.device);
        let in_arena = ["landing", "stash", "memory", "file_reads", "file_states"];
        let in_arena = plan.host.iter().filter(|term| in_arena.contains(&term.name));
        let in_arena: u64 = in_arena.map(|term| term.bytes).sum();
        assert_eq!(in_arena, host_end as u64 * FLOAT, "{:?}", plan.host);
        Ok(plan)
    }

    /// Whether it is training's: with gradients and the optimizer's state.
    pub fn trains(&self) -> bool {
        self.trains
    }

    /// Whether a block's gradient waits in a region.
    pub(crate) fn has_region(&self, id: BlockId) -> bool {
        self.trains && (self.deferred || (id.0 as usize) < self.tied_tiles)
    }

    /// Parts of a slot for a block of a file: masters, states, and the gradient where it waits.
    pub(crate) fn state_parts(&self) -> usize {
        1 + self.states + usize::from(self.deferred)
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
        self.config.device.memory.bytes()
    }

    /// Bytes of the device.
    pub fn device_bytes(&self) -> u64 {
        self.device.iter().map(|term| term.bytes).sum()
    }

    /// Bytes of the host.
    pub fn host_bytes(&self) -> u64 {
        self.host.iter().map(|term| term.bytes).sum()
    }

    /// Bytes of files.
    pub fn file_bytes(&self) -> u64 {
        self.file.iter().map(|term| term.bytes).sum()
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

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, ByteSize::from(self.bytes))
    }
}
