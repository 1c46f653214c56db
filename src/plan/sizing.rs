//! How a plan is made, in four questions: which schedules are walked, how many slots the pools
//! need, which regions of memory that makes, and how many bytes a step moves.

use std::sync::Arc;

use l2l_actors::schedule::{self, BlockId, Capacities, Pipeline, Pools, Schedule};

use super::checks::check_sizes;
use super::regions::{Holder, Regions, Side};
use super::{
    KvCache, LinkBytes, Plan, RankShare, ReceivedFloats, StepShape, StepSpec, pipelines,
    schedule_of, share,
};
use crate::compression::{Compression, Sizes};
use crate::config::{ChannelsConfig, Config, DeviceKind, EpsTier, StashPlace};
use crate::devices::{self, KernelMemory};
use crate::eps::{cut, part_floats, parts_of};
use crate::error::Error;
use crate::kernels::Rows;
use crate::models::{self, BlockTensors, Measured, Model, ModelLayer, Tensor};
use crate::optimizers::{StateLayout, UpdateRule, room_len};
use crate::stash;

/// What a plan is made of.
pub(super) struct Sizing<'a> {
    pub(super) config: &'a Config,
    pub(super) model: &'a Model,
    /// The update rule, of a plan that trains.
    pub(super) rule: Option<&'a dyn UpdateRule>,
    /// Steps that will be run, the first the one with the longest sequences.
    pub(super) steps: &'a [StepShape],
    /// Which process this is, where several share steps.
    pub(super) share: RankShare,
    pub(super) cache: Option<KvCache>,
    /// What this process has of each block.
    own: Vec<BlockTensors>,
    /// The optimizer's states of that.
    states: StateLayout,
}

impl<'a> Sizing<'a> {
    /// Without a KV cache.
    pub(super) fn new(
        config: &'a Config,
        model: &'a Model,
        rule: Option<&'a dyn UpdateRule>,
        steps: &'a [StepShape],
        share: RankShare,
    ) -> Sizing<'a> {
        let RankShare { rank, ranks } = share;
        let own = |block: &BlockTensors| block.part(cut(block, ranks).of(rank));
        let own: Vec<BlockTensors> = match ranks {
            1 => model.blocks.clone(),
            _ => model.blocks.iter().map(own).collect(),
        };
        let states = rule.map_or_else(StateLayout::default, |rule| StateLayout::new(rule, &own));
        Sizing { config, model, rule, steps, share, cache: None, own, states }
    }
}

/// The schedules of all steps, and the most they need.
struct Schedules {
    all: Vec<Schedule>,
    /// Floats of an input or output slot.
    boundary: usize,
    stash: usize,
}

/// Sizes of the model's blocks, in floats.
struct Blocks {
    /// The largest gradient.
    gradient: usize,
    /// The largest block, as it is published to the device.
    published: usize,
    /// The largest, as it lies on the host: on file in whole pages.
    on_host: usize,
    /// The largest gradient, as it lies on the host.
    landing: usize,
    /// All masters of this process, on the host.
    all: usize,
    /// All optimizer states.
    states: usize,
    /// Those whose gradient waits in a region.
    regions: usize,
}

impl Sizing<'_> {
    pub(super) fn plan(self) -> Result<Plan, Error> {
        let StepShape { sequences, positions, .. } = self.steps[0];
        check_sizes(self.config, self.model, self.steps[0])?;
        self.share.check(self.config, self.model, self.rule)?;
        if self.trains() {
            self.config.check_training()?;
        }
        for group in &self.config.optimizer.groups {
            self.model.check_patterns("optimizer.groups", &group.patterns)?;
        }
        let pipeline = pipelines::read(self.config)?.map(Arc::new);
        let schedules = self.schedules(pipeline.as_deref())?;
        let pools = self.pools(&schedules.all);
        // What moves: in a run its step; in generation what it ends with, a step with a full cache.
        let shown = if self.trains() { 0 } else { self.steps.len() - 1 };
        let schedule = schedules.all[shown].clone();
        let micro_batches = schedule.micro_batches.clone();
        let most_micro_batches =
            schedules.all.iter().map(|schedule| schedule.micro_batches.len()).max().unwrap_or(0);
        let walked = schedule::StepPlan::new(schedule, pools)?;
        self.check_exchanges(&walked, pipeline.as_deref())?;
        let traffic = walked.traffic;
        let file_bytes = walked.file_bytes(self.deferred());
        let links = walked.walks.iter().map(|walk| &walk.traffic);
        let links = links.map(|link| LinkBytes {
            upload: link.to_device(),
            download: link.from_device(),
            peers: link.shards,
        });
        self.check_dtype()?;
        self.check_rank()?;
        // A process that trains on a part of the batch evaluates whole ones.
        let all = schedules.all.iter().flat_map(|schedule| &schedule.micro_batches);
        let largest = all.copied().max().unwrap_or(1) as usize;
        let blocks = self.blocks();
        let regions =
            self.regions(&schedules, &pools, &blocks, Rows { sequences: largest, positions })?;
        let [device, host, file] = regions.terms();
        let is_pinned = self.config.device.kind == DeviceKind::Cuda;
        let plan = Plan {
            device,
            host,
            file,
            pinned_bytes: if is_pinned { regions.copied_bytes() } else { 0 },
            upload_bytes: traffic.to_device(),
            download_bytes: traffic.from_device(),
            link_bytes: links.collect(),
            fabric_bytes: self.share.sends(&walked, self.model, self.compression()),
            read_bytes: file_bytes.0,
            written_bytes: file_bytes.1,
            positions,
            micro_batches,
            sequences,
            most_micro_batches,
            share: self.share,
            received: self.received(),
            devices: self.config.devices(),
            pools,
            regions,
            cache: self.cache,
            trains: self.trains(),
            dtype: self.config.device.dtype,
            gradient_dtype: self.config.device.gradient_dtype,
            stash_on_device: self.stash_on_device(),
            deferred: self.deferred(),
            largest_gradient: blocks.gradient,
            largest_tensor: self.largest_tensor(),
            states: self.states.clone(),
            tied_tiles: self.tied_tiles(),
            pipeline,
            config: self.config.clone(),
        };
        // What is allocated is what was planned, to the byte.
        assert_eq!(plan.device_bytes(), (plan.regions.device_floats() * FLOAT) as u64);
        Ok(plan)
    }

    fn trains(&self) -> bool {
        self.rule.is_some()
    }

    /// Elements of the largest tensor that is trained.
    fn largest_tensor(&self) -> usize {
        self.own.iter().flat_map(BlockTensors::trained).map(Tensor::len).max().unwrap_or(0)
    }

    fn deferred(&self) -> bool {
        self.trains() && self.config.defers()
    }

    fn on_file(&self) -> bool {
        self.config.eps.tier == EpsTier::File
    }

    /// What the workspace of its kernels is measured for.
    fn measured(&self) -> Measured<'_> {
        let freezes = self.model.blocks.iter().any(|block| !block.frozen().is_empty());
        Measured {
            model: self.model,
            dtype: self.config.device.dtype,
            save: self.config.schedule.recompute.keep(),
            trains: self.trains(),
            freezes: freezes || self.config.depth.freezes,
        }
    }

    fn stash_on_device(&self) -> bool {
        self.config.stash.place == StashPlace::Device
    }

    fn tied_tiles(&self) -> usize {
        let tied = self.model.shape.tied && self.model.shape.scores_vocabulary();
        if tied || !self.on_file() { self.model.tiles.len() } else { 0 }
    }

    fn schedules(&self, file: Option<&Pipeline>) -> Result<Schedules, Error> {
        let mut schedules = Schedules { all: Vec::new(), boundary: 0, stash: 0 };
        for step in self.steps {
            let states = &self.states;
            let share = self.share;
            let spec = StepSpec { shape: *step, layers: None, states, share, file };
            let schedule = schedule_of(self.config, self.model, spec)?;
            schedules.stash = schedules.stash.max(stash::layout(&schedule).floats);
            let largest = schedule.micro_batches.iter().copied().max().unwrap_or(1) as usize;
            let tokens = largest * schedule.positions as usize;
            let bytes =
                |boundary: &schedule::Boundary| boundary.bytes(largest as u64, tokens as u64);
            let bytes = schedule.boundaries.iter().map(bytes).max().unwrap_or(0);
            let floats = (bytes as usize / FLOAT).next_multiple_of(16);
            schedules.boundary = schedules.boundary.max(floats);
            schedules.all.push(schedule);
        }
        Ok(schedules)
    }

    /// Refuses a step in which ranks would not exchange the same in the same order.
    fn check_exchanges(
        &self,
        walked: &schedule::StepPlan,
        file: Option<&Pipeline>,
    ) -> Result<(), Error> {
        let own = self.share.rank;
        if self.share.ranks == 1 {
            return Ok(());
        }
        let dealt = self.share.deal(self.config, self.steps[0].sequences)?;
        let differs = |rank: &u32| {
            dealt.sequences[*rank as usize].len() != dealt.sequences[own as usize].len()
        };
        for rank in (0..self.share.ranks).filter(differs) {
            let share = RankShare { rank, ..self.share };
            let spec =
                StepSpec { shape: self.steps[0], layers: None, states: &self.states, share, file };
            let schedule = schedule_of(self.config, self.model, spec)?;
            let pools = Pools { devices: self.config.devices(), ..self.depths(&schedule) };
            let others = schedule::StepPlan::new(schedule, pools)?;
            if share::exchanges(&others) != share::exchanges(walked) {
                let problem = format_args!(
                    "is {}, of which {1} processes have different numbers, and their devices would \
                     need blocks in different orders: set {1}, {2} or another {1} times a power of \
                     two (a relay with one device a process takes any number)",
                    self.config.parallel.groups,
                    self.share.ranks,
                    2 * self.share.ranks
                );
                return Err(Error::config("parallel.groups", problem));
            }
        }
        Ok(())
    }

    /// The pools of a schedule, at the depths of the config.
    fn depths(&self, schedule: &Schedule) -> Pools {
        let ChannelsConfig { weights, gradients, reduced, stash } = self.config.channels;
        Pools::of(schedule, &Capacities { weights, gradients, reduced, stash })
    }

    /// As many slots on each device, also on one that some schedule does not visit.
    fn pools(&self, schedules: &[Schedule]) -> Pools {
        let pools_of = |schedule: &Schedule| self.depths(schedule);
        let first = pools_of(&schedules[0]);
        let pools = match (self.cache, self.share.ranks) {
            (None, 1) => first,
            _ => schedules.iter().map(pools_of).fold(first, Pools::max),
        };
        Pools { devices: self.config.devices(), ..pools }
    }

    fn blocks(&self) -> Blocks {
        let most =
            |len: fn(&BlockTensors) -> usize| self.model.blocks.iter().map(len).max().unwrap_or(0);
        let gradient = most(BlockTensors::trained_len);
        let on_host = |floats: usize| if self.on_file() { part_floats(floats) } else { floats };
        let tied = self.tied_tiles();
        let waits = |index: usize| self.trains() && (self.deferred() || index < tied);
        let waiting = self.own.iter().enumerate().filter(|(index, _)| waits(*index));
        let states = (0..self.own.len()).flat_map(|block| self.states.of(block).lens());
        let published = |block: &BlockTensors| block.published_len(self.config.device.dtype);
        let published = self.model.blocks.iter().map(published);
        Blocks {
            gradient,
            published: published.max().unwrap_or(0).next_multiple_of(16),
            on_host: on_host(most(BlockTensors::host_len)),
            landing: on_host(gradient),
            all: self.own.iter().map(|own| on_host(own.host_len())).sum(),
            states: states.map(|&floats| on_host(floats)).sum(),
            regions: waiting.map(|(_, own)| on_host(own.trained_len())).sum(),
        }
    }

    fn regions(
        &self,
        schedules: &Schedules,
        pools: &Pools,
        blocks: &Blocks,
        rows: Rows,
    ) -> Result<Regions, Error> {
        let mut regions = Regions::default();
        self.device_regions(&mut regions, schedules, pools, blocks, rows);
        self.host_regions(&mut regions, pools, blocks);
        let cache = self.cache.as_ref().map(KvCache::floats);
        // The stash is named on both sides, though one has all of it.
        for place in [Side::Device, Side::Host] {
            let is_here = (place == Side::Device) == self.stash_on_device();
            let floats = |floats: usize| if is_here { floats } else { 0 };
            regions.add(Holder::Stash, place, 1, floats(schedules.stash));
            if let Some(cache) = cache {
                regions.add(Holder::KvCache, place, 1, floats(cache));
            }
        }
        self.eps_regions(&mut regions, blocks);
        let format = self.config.master_format()?;
        let largest = self.largest_tensor();
        let unpacked = self.rule.map_or(0, |rule| room_len(rule, format, largest));
        regions.add_if_any(Holder::UnpackedMasters, Side::HostOwn, unpacked);
        let tensors = || self.own.iter().flat_map(BlockTensors::trained);
        let workspace =
            self.rule.and_then(|rule| tensors().map(|tensor| rule.workspace_len(tensor)).max());
        regions.add_if_any(Holder::UpdateWorkspace, Side::HostOwn, workspace.unwrap_or(0));
        let ReceivedFloats { gradient, embedding_rows } = self.received();
        regions.add_if_any(Holder::Received, Side::HostOwn, gradient + embedding_rows);
        let metadata = devices::overhead_on_host(self.config, rows);
        regions.add_if_any(Holder::BatchMetadata, Side::HostOwn, metadata);
        Ok(regions)
    }

    fn device_regions(
        &self,
        regions: &mut Regions,
        schedules: &Schedules,
        pools: &Pools,
        blocks: &Blocks,
        rows: Rows,
    ) {
        let model = self.model;
        let config = self.config;
        let trains = self.trains();
        let dtype = config.device.dtype;
        let chunk_state = model.layers.iter().map(|part| match part {
            ModelLayer::Stack(layer) => layer.chunk_state_len(rows.positions, trains, dtype),
            _ => 0,
        });
        let chunk_state = chunk_state.max().unwrap_or(0).next_multiple_of(16);
        let KernelMemory { workspace, overhead, widened } =
            devices::kernel_memory(config, rows, |kernels| {
                models::workspace(kernels, self.measured(), rows)
            });
        // The walk has no KV cache: a layer's cached positions, and the new ones.
        let is_cached = self.cache.is_some() && widened > 0;
        let cached = if is_cached { 2 * schedules.boundary } else { 0 };
        let gradients = if trains { pools.gradients as usize } else { 0 };
        let mut add = |holder, count: usize, floats| {
            regions.add(holder, Side::Device, count, floats);
        };
        add(Holder::Weights, pools.weights as usize, blocks.published);
        add(Holder::Gradients, gradients, blocks.gradient);
        add(Holder::Inputs, pools.inputs as usize, schedules.boundary);
        add(Holder::Outputs, pools.outputs as usize, schedules.boundary);
        add(Holder::ChunkState, 1, chunk_state);
        add(Holder::Workspace, 1, workspace);
        regions.add_if_any(Holder::Widened, Side::Device, widened + cached);
        regions.add_if_any(Holder::Overhead, Side::Device, overhead.next_multiple_of(16));
    }

    fn host_regions(&self, regions: &mut Regions, pools: &Pools, blocks: &Blocks) {
        let reduced = if self.trains() { pools.reduced as usize } else { 0 };
        let parts = if self.trains() { pools.parts as usize } else { 0 };
        regions.add(Holder::Landing, Side::Host, reduced, blocks.landing);
        regions.add(Holder::Parts, Side::Host, parts, blocks.landing);
        if self.share.ranks > 1 || self.on_file() {
            regions.add(Holder::FileReads, Side::Host, pools.reads as usize, blocks.on_host);
        }
        if self.on_file() {
            let states = if self.trains() { pools.states as usize } else { 0 };
            let parts = |(index, own)| parts_of(own, self.states.of(index));
            let parts: Vec<Vec<usize>> = self.own.iter().enumerate().map(parts).collect();
            let waits = |own: &BlockTensors| part_floats(own.trained_len());
            let staged = self.own.iter().zip(&parts).map(|(own, parts)| {
                parts.iter().sum::<usize>() + if self.deferred() { waits(own) } else { 0 }
            });
            let slot = staged.max();
            let part = parts.iter().flatten().max();
            regions.add(Holder::FileStates, Side::Host, states, slot.unwrap_or(0));
            regions.add(Holder::FileBuffer, Side::HostOwn, 1, part.copied().unwrap_or(0));
        }
    }

    /// Masters, moments and waiting gradients, in memory or on file.
    fn eps_regions(&self, regions: &mut Regions, blocks: &Blocks) {
        let place = if self.on_file() { Side::File } else { Side::HostOwn };
        // On file a block is there twice, as it is and as it was, unless it never changes.
        let copies = if self.on_file() && self.trains() { 2 } else { 1 };
        regions.add(Holder::Masters, place, copies, blocks.all);
        regions.add(Holder::OptimizerStates, place, copies, blocks.states);
        regions.add(Holder::GradientRegions, place, 1, blocks.regions);
        if let Some(kind) = self.compression() {
            // Errors of the groups that this process computes, of whole blocks.
            let groups = if self.share.ranks > 1 { 1 } else { self.config.parallel.groups };
            let of_group = |block: u32| -> usize {
                let tensors = self.model.computed_gradient(BlockId(block));
                kind.kept(tensors, 0).iter().map(|run| run.len).sum()
            };
            let floats: usize = (0..self.model.blocks.len() as u32).map(of_group).sum();
            regions.add(Holder::GradientErrors, Side::HostOwn, groups as usize, floats);
        }
    }

    /// How gradients are compressed, if they are.
    pub(super) fn compression(&self) -> Option<Compression> {
        self.config.compression().filter(|_| self.trains())
    }

    /// Memory for numbers from other ranks. Compression works in that of the gradient.
    fn received(&self) -> ReceivedFloats {
        let RankShare { rank, ranks } = self.share;
        let compressed = self.compression().map(|kind| {
            let sizes = Sizes { groups: self.config.parallel.groups, ranks };
            let of_block = |(id, block): (u32, &BlockTensors)| {
                let parts = cut(block, ranks).clipped(block.trained_len());
                kind.workspace(self.model.computed_gradient(BlockId(id)), &parts, rank, sizes)
            };
            (0..).zip(&self.model.blocks).map(of_block).max().unwrap_or(0)
        });
        if ranks == 1 || !self.trains() {
            return ReceivedFloats { gradient: compressed.unwrap_or(0), embedding_rows: 0 };
        }
        let parts = self
            .model
            .blocks
            .iter()
            .map(|block| cut(block, ranks).clipped(block.trained_len()).of(rank).len());
        let received = (ranks as usize - 1) * parts.max().unwrap_or(0);
        let StepShape { sequences, positions, .. } = self.steps[0];
        let rows = sequences * positions * self.model.shape.hidden;
        ReceivedFloats {
            gradient: compressed.unwrap_or(received),
            embedding_rows: self.config.device.dtype.floats(rows),
        }
    }
}

const FLOAT: usize = size_of::<f32>();
