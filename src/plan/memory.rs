//! The memory regions of a plan: how much each holder needs, and where.

use l2l_actors::schedule::{BlockId, Pools};

use super::regions::{Holder, Regions, Side};
use super::share::RankShare;
use super::spec::PlanSpec;
use super::step::Schedules;
use crate::compression::Sizes;
use crate::devices::{self, KernelMemory};
use crate::eps::{cut, doubled_len, paged, runs_on_file};
use crate::error::Error;
use crate::kernels::Rows;
use crate::models::{self, BlockTensors, Measured, ModelLayer, Tensor};
use crate::optimizers::room_len;
use crate::tensor::ALIGNED;

/// Sizes of the model's blocks, in floats.
struct BlockSizes {
    /// The largest gradient.
    gradient: usize,
    /// The largest block, as it is published to the device.
    published: usize,
    /// The largest block, as it lies on the host.
    on_host: usize,
    /// The largest gradient, as it lies on the host.
    landing: usize,
}

impl PlanSpec<'_> {
    /// The regions of a run with these schedules and pools.
    ///
    /// # Errors
    /// The format of masters does not fit the device's dtype.
    pub(super) fn regions(&self, schedules: &Schedules, pools: &Pools) -> Result<Regions, Error> {
        // A rank that trains on a part of the batch evaluates whole batches.
        let micro_batches = schedules.all.iter().flat_map(|schedule| &schedule.micro_batches);
        let sequences = micro_batches.copied().max().unwrap_or(1) as usize;
        let positions = schedules.all.iter().map(|schedule| schedule.positions).max().unwrap_or(1);
        let rows = Rows { sequences, positions: positions as usize };
        let sizes = self.block_sizes();
        let mut regions = Regions::default();
        self.add_device(&mut regions, schedules, pools, &sizes, rows);
        self.add_host(&mut regions, pools, &sizes);
        // Both sides show the stash, though one of them has all of it.
        for place in [Side::Device, Side::Host] {
            let is_here = (place == Side::Device) == self.settings.stash_on_device();
            let floats = |floats: usize| if is_here { floats } else { 0 };
            regions.add(Holder::Stash, place, 1, floats(schedules.stash));
            if let Some(cache) = &self.cache {
                regions.add(Holder::KvCache, place, 1, floats(cache.floats()));
            }
        }
        regions.add_if_any(Holder::Kept, Side::Device, schedules.kept);
        self.add_eps(&mut regions);
        self.add_updates(&mut regions)?;
        let metadata = devices::overhead_on_host(&self.settings.config, self.described(rows));
        regions.add_if_any(Holder::BatchMetadata, Side::HostOwn, metadata);
        Ok(regions)
    }

    /// The rows that the metadata of a micro-batch describes at most: those of whole sequences, of
    /// which a chunk is computed.
    fn described(&self, rows: Rows) -> Rows {
        let most = self.settings.config.step.micro_batch.min(self.steps[0].sequences);
        let sequences = rows.sequences.max(most);
        Rows { sequences, positions: rows.positions.max(self.steps[0].positions) }
    }

    fn block_sizes(&self) -> BlockSizes {
        let most =
            |len: fn(&BlockTensors) -> usize| self.model.blocks.iter().map(len).max().unwrap_or(0);
        let dtype = self.settings.config.device.dtype;
        let on_device = || self.model.on_device();
        let published = on_device().map(|tensors| tensors.published_len(dtype));
        let gradient = on_device().map(BlockTensors::trained_len).max().unwrap_or(0);
        BlockSizes {
            gradient: gradient.next_multiple_of(ALIGNED),
            published: published.max().unwrap_or(0).next_multiple_of(ALIGNED),
            on_host: self.on_host(most(BlockTensors::host_len)),
            // Aligned slices may take more than their block.
            landing: self.on_host(most(BlockTensors::trained_len).max(gradient)),
        }
    }

    /// Floats that a run of a block takes on the host: whole pages if it is read from a file.
    fn on_host(&self, floats: usize) -> usize {
        if self.settings.on_file() { paged(floats) } else { floats }
    }

    fn add_device(
        &self,
        regions: &mut Regions,
        schedules: &Schedules,
        pools: &Pools,
        sizes: &BlockSizes,
        rows: Rows,
    ) {
        let config = &self.settings.config;
        let trains = self.settings.trains;
        let dtype = config.device.dtype;
        let longest = Rows { sequences: 1, positions: self.steps[0].positions };
        let layers = self.model.layers.iter().filter_map(ModelLayer::stack);
        let most = self.model.shape.chunk_positions;
        let lengths = [longest.positions, most];
        let chunk_state =
            layers.map(|layer| models::chunk_state_len(layer, lengths, trains, dtype));
        let chunk_state = chunk_state.max().unwrap_or(0).next_multiple_of(ALIGNED);
        let is_frozen = |block: &BlockTensors| !block.frozen().is_empty();
        let measured = Measured {
            model: self.model,
            dtype,
            save: config.schedule.recompute.keep(),
            kept: &self.kept,
            trains,
            freezes: config.depth.freezes || self.model.blocks.iter().any(is_frozen),
        };
        let KernelMemory { workspace, overhead, widened } =
            devices::kernel_memory(config, self.described(rows), |kernels| {
                let needs = |rows| models::workspace(kernels, measured, rows);
                needs(rows).max(needs(longest))
            });
        // The measured visits have no KV cache: a layer's cached positions, and the new ones.
        let is_cached = self.cache.is_some() && widened > 0;
        let cached = if is_cached { 2 * schedules.boundary } else { 0 };
        let gradients = if trains { pools.gradients as usize } else { 0 };
        let mut add = |holder, count: usize, floats| {
            regions.add(holder, Side::Device, count, floats);
        };
        add(Holder::Weights, pools.weights as usize, sizes.published);
        add(Holder::Gradients, gradients, sizes.gradient);
        add(Holder::Inputs, pools.inputs as usize, schedules.boundary);
        add(Holder::Outputs, pools.outputs as usize, schedules.boundary);
        add(Holder::Workspace, 1, workspace);
        regions.add_if_any(Holder::ChunkState, Side::Device, chunk_state);
        regions.add_if_any(Holder::Widened, Side::Device, widened + cached);
        regions.add_if_any(Holder::Overhead, Side::Device, overhead.next_multiple_of(ALIGNED));
    }

    fn add_host(&self, regions: &mut Regions, pools: &Pools, sizes: &BlockSizes) {
        let if_trains = |slots: u32| if self.settings.trains { slots as usize } else { 0 };
        let settings = &self.settings;
        let on_file = settings.on_file();
        regions.add(Holder::Landing, Side::Host, if_trains(pools.reduced), sizes.landing);
        regions.add(Holder::Parts, Side::Host, if_trains(pools.parts), sizes.landing);
        if self.share.ranks > 1 || on_file {
            regions.add(Holder::FileReads, Side::Host, pools.reads as usize, sizes.on_host);
        }
        if on_file {
            let lens = |(index, own)| runs_on_file(own, self.states.of(index), settings.delayed());
            let lens: Vec<Vec<usize>> = self.own.iter().enumerate().map(lens).collect();
            let slots = self.own.iter().zip(&lens).map(|(own, lens)| {
                let region = if self.settings.deferred() { own.trained_len() } else { 0 };
                lens.iter().sum::<usize>() + paged(region)
            });
            let slot = slots.max().unwrap_or(0);
            let buffer = lens.iter().flatten().copied().max().unwrap_or(0);
            regions.add(Holder::FileStates, Side::Host, if_trains(pools.states), slot);
            regions.add(Holder::FileBuffer, Side::HostOwn, 1, buffer);
        }
    }

    /// Adds masters, optimizer states and waiting gradients, in memory or on file.
    fn add_eps(&self, regions: &mut Regions) {
        let settings = &self.settings;
        let place = if settings.on_file() { Side::File } else { Side::HostOwn };
        // On file a block is there twice, as it is and as it was, unless it never changes.
        let copies = if settings.on_file() && settings.trains { 2 } else { 1 };
        let masters: usize = self.own.iter().map(|own| self.on_host(own.host_len())).sum();
        let tiles = if settings.on_file() { 0 } else { self.model.tables.len() };
        let blocks = self.own.iter().enumerate().filter(|_| settings.delayed());
        let older = blocks.map(|(block, own)| self.on_host(doubled_len(own, block < tiles)));
        let older: usize = older.sum();
        let states = (0..self.own.len()).flat_map(|block| self.states.of(block).lens());
        let states = states.map(|&floats| self.on_host(floats)).sum();
        let waiting = self.own.iter().enumerate().filter(|(block, _)| settings.has_region(*block));
        let waiting = waiting.map(|(_, own)| self.on_host(own.trained_len())).sum();
        regions.add(Holder::Masters, place, copies, masters + older);
        regions.add(Holder::OptimizerStates, place, copies, states);
        regions.add(Holder::GradientRegions, place, 1, waiting);
        if let Some(kind) = settings.compression() {
            // Errors of the groups that this rank computes, of whole blocks.
            let groups = if self.share.ranks > 1 { 1 } else { settings.config.parallel.groups };
            let of_group = |block: u32| -> usize {
                let tensors = self.model.computed_gradient(BlockId(block));
                kind.kept(tensors, 0).iter().map(|run| run.len).sum()
            };
            let floats: usize = (0..self.model.blocks.len() as u32).map(of_group).sum();
            regions.add(Holder::GradientErrors, Side::HostOwn, groups as usize, floats);
        }
    }

    /// Adds the memory that updates work in, and that for numbers from other ranks.
    fn add_updates(&self, regions: &mut Regions) -> Result<(), Error> {
        let format = self.settings.config.master_format()?;
        let trained = || self.own.iter().flat_map(BlockTensors::trained);
        let largest = trained().map(Tensor::len).max().unwrap_or(0);
        let unpacked = self.rule.map_or(0, |rule| room_len(rule, format, largest));
        let workspace =
            self.rule.and_then(|rule| trained().map(|tensor| rule.workspace_len(tensor)).max());
        let mut add = |holder, floats| regions.add_if_any(holder, Side::HostOwn, floats);
        add(Holder::UnpackedMasters, unpacked);
        add(Holder::UpdateWorkspace, workspace.unwrap_or(0));
        let received = self.compression_workspace().unwrap_or_else(|| self.received_gradient());
        add(Holder::ReceivedGradient, received);
        if self.settings.trains && self.share.ranks > 1 {
            let rows = self.steps[0].sequences * self.steps[0].positions;
            let floats =
                self.settings.config.device.dtype.floats(rows * self.model.shape.gathered_width());
            add(Holder::ReceivedRows, floats);
        }
        Ok(())
    }

    /// Floats of the gradients that other ranks send for this rank's part of a block.
    fn received_gradient(&self) -> usize {
        let RankShare { rank, ranks } = self.share;
        if !self.settings.trains || ranks == 1 {
            return 0;
        }
        let part =
            |block: &BlockTensors| cut(block, ranks).clipped(block.trained_len()).of(rank).len();
        (ranks as usize - 1) * self.model.blocks.iter().map(part).max().unwrap_or(0)
    }

    /// Floats that compression works in, if there is compression. Gradients of other ranks are
    /// received there, too.
    fn compression_workspace(&self) -> Option<usize> {
        let kind = self.settings.compression()?;
        let RankShare { rank, ranks } = self.share;
        let sizes = Sizes { groups: self.settings.config.parallel.groups, ranks };
        let of_block = |(id, block): (u32, &BlockTensors)| {
            let parts = cut(block, ranks).clipped(block.trained_len());
            kind.workspace(self.model.computed_gradient(BlockId(id)), &parts, rank, sizes)
        };
        (0..).zip(&self.model.blocks).map(of_block).max()
    }
}
