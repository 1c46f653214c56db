//! The lanes of devices: uploads, copies between devices, kernels, downloads.
//!
//! Host memory that a copy reads or writes belongs to the operation until the operation ends: the
//! ring grants it to no other operation meanwhile.

mod finite;
mod kv_cache;
mod side;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use l2l_actors::schedule::{BoundaryId, MicroBatch, Phase, Portion, Role, Shard};
use l2l_actors::work::{BlockUse, MasterAt, Placed, Work};
use l2l_actors::{BoxedError, Operation};

use self::side::DeviceSide;
use super::Used;
use super::boundaries::Filled;
use super::shared::Shared;
use crate::config::{Config, GradientDtype, NonFinite};
use crate::devices::Device;
use crate::error::Error;
use crate::kernels::Kernels;
use crate::models::{self, BlockTensors, BlockViews, ModelLayer, Port, Save, VisitArgs};
use crate::plan::Purpose;
use crate::tensor::{Dtype, Packing, Slots, View, packed_bf16, widen};

/// The work of the upload, peer, compute and download lanes of all devices.
pub(super) struct DeviceLanes {
    sides: Vec<DeviceSide>,
    shared: Arc<Shared>,
    /// The activations that layers save where the schedule says so.
    save: Save,
    /// The hidden states that the head read in a step that encodes. Devices write theirs at the
    /// same time, so they are ordered by micro-batch.
    hidden: Mutex<BTreeMap<MicroBatch, Vec<f32>>>,
}

impl DeviceLanes {
    pub(super) fn new(
        config: &Config,
        devices: Vec<Box<dyn Device>>,
        shared: Arc<Shared>,
        used: &Arc<Used>,
    ) -> Result<DeviceLanes, Error> {
        let has_link = config.link_bytes_per_second()?.is_some();
        let side = |(index, device)| DeviceSide::new(device, &shared.plan, has_link, used, index);
        Ok(DeviceLanes {
            sides: devices.into_iter().enumerate().map(side).collect(),
            shared,
            save: config.schedule.recompute.keep().unwrap_or(Save::All),
            hidden: Mutex::default(),
        })
    }

    /// The devices, in their order.
    pub(super) fn devices(&self) -> impl Iterator<Item = &dyn Device> {
        self.sides.iter().map(|side| &*side.device)
    }

    /// The first device.
    pub(super) fn first(&self) -> &dyn Device {
        &*self.sides[0].device
    }

    /// The device of an operation; for an operation of the host, the first.
    pub(super) fn device_of(&self, operation: &Operation) -> &dyn Device {
        &*self.side(operation).device
    }

    fn side(&self, operation: &Operation) -> &DeviceSide {
        &self.sides[usize::from(operation.device().unwrap_or_default())]
    }

    /// Replaces a device.
    #[cfg(test)]
    pub(super) fn replace(
        &mut self,
        index: usize,
        by: impl FnOnce(Box<dyn Device>) -> Box<dyn Device>,
    ) {
        let side = self.sides.remove(index);
        self.sides.insert(index, side.with(by));
    }

    /// Takes the hidden states that the head read, in the order of the micro-batches.
    pub(super) fn take_hidden(&self) -> Vec<f32> {
        let hidden = std::mem::take(&mut *self.hidden.lock().expect("nothing panics inside"));
        hidden.into_values().flatten().collect()
    }

    /// The upload lane.
    pub(super) fn upload(&self, operation: &Operation) -> Result<(), BoxedError> {
        let shared = &*self.shared;
        let host = shared.memory.lease();
        let side = self.side(operation);
        match *operation.work() {
            Work::UploadBlock { portion, version, master, weights, shard, chosen_by } => {
                let block = portion.block;
                let slot = side.weights.slot(weights, shared.published_len(portion));
                let dtype = shared.plan.dtype();
                if portion.cut.is_some() {
                    let range = floats_of(shard, slot);
                    return match master {
                        MasterAt::Slot(read) => {
                            self.upload_portion(side, portion, slot, &[host.read_slot(read)], range)
                        }
                        MasterAt::Memory => {
                            let lease = shared.eps.memory().read(block, version);
                            self.upload_portion(side, portion, slot, &lease.pieces(), range)
                        }
                    };
                }
                let needed = shared
                    .needed(operation, block, chosen_by, |tensors| tensors.published_ranges(dtype));
                if needed.is_some() {
                    side.fill_unread(slot)?;
                }
                let ranges = needed.unwrap_or_else(|| vec![floats_of(shard, slot)]);
                match master {
                    MasterAt::Slot(read) => {
                        side.upload_parts(slot, &[host.read_slot(read)], &ranges)
                    }
                    MasterAt::Memory => {
                        let lease = shared.eps.memory().read(block, version);
                        side.upload_parts(slot, &lease.pieces(), &ranges)
                    }
                }
            }
            Work::UploadBoundary { micro_batch, ref inputs } => {
                let state = shared.state(operation);
                let filled = Filled::of(operation, &state, inputs, micro_batch);
                if side.stays_in_stash(filled.declared()) {
                    side.count_upload(filled.slot_floats());
                    return Ok(());
                }
                let slot = side.inputs.slot(inputs.slot, filled.slot_floats());
                if filled.declared().role == Role::CachedKv {
                    return self.read_kv(side, filled, slot);
                }
                let from = host.stashed(filled.stash_range());
                side.upload(slot, from, Some(shared.packing(filled.declared())))
            }
            ref other => unreachable!("{other} is not work of the upload lane"),
        }
    }

    /// Copies a range of a portion to its slot, row by row from the pieces of its block.
    fn upload_portion(
        &self,
        side: &DeviceSide,
        portion: Portion,
        slot: View,
        block: &[&[f32]],
        range: Range<usize>,
    ) -> Result<(), BoxedError> {
        let model = &self.shared.model;
        let of_block = &model.blocks[portion.block.0 as usize];
        let all = model.portion(portion).published(of_block, self.shared.plan.dtype());
        all.into_iter().try_for_each(|rows| side.upload_rows(slot, block, rows, &range))?;
        side.count_upload(range.len());
        Ok(())
    }

    /// The peer lane: copies from other devices.
    pub(super) fn copy_shards(&self, operation: &Operation) -> Result<(), BoxedError> {
        let &Work::CopyShards { portion, weights, ref from, .. } = operation.work() else {
            unreachable!("{} is not work of the peer lane", operation.work())
        };
        let side = self.side(operation);
        let len = self.shared.published_len(portion);
        let slot = side.weights.slot(weights, len);
        for &(shard, weights) in from {
            let peer = &self.sides[usize::from(shard.index)];
            let range = floats_of(shard, slot);
            let uploaded = peer.weights.slot(weights, len).part(range.clone());
            side.copy_from(slot.part(range), peer, uploaded)?;
        }
        Ok(())
    }

    /// The download lane.
    pub(super) fn download(&self, operation: &Operation) -> Result<(), BoxedError> {
        let shared = &*self.shared;
        let host = shared.memory.lease();
        let side = self.side(operation);
        match *operation.work() {
            Work::DownloadGradient { portion, gradients, reduced, chosen_by, .. } => {
                let block = portion.block;
                let len = shared.trained_len(portion);
                let gradient = side.gradients.slot(gradients, len);
                let needed =
                    shared.needed(operation, block, chosen_by, BlockTensors::gradient_ranges);
                let whole = 0..len;
                let needed = needed.unwrap_or_else(|| vec![whole]);
                let landing = host.landing(reduced, len);
                match shared.plan.gradient_dtype() {
                    GradientDtype::F32 => side.download_parts(landing, gradient, &needed, None),
                    GradientDtype::Bf16 => {
                        let packed = &mut landing[len - packed_bf16(len)..];
                        side.download_parts(packed, gradient, &needed, Some(Packing::bf16))
                    }
                }
            }
            Work::DownloadBoundary { micro_batch, ref outputs } => {
                let state = shared.state(operation);
                let filled = Filled::of(operation, &state, outputs, micro_batch);
                if side.stays_in_stash(filled.declared()) {
                    side.count_download(filled.slot_floats());
                    return Ok(());
                }
                let slot = side.outputs.slot(outputs.slot, filled.slot_floats());
                if filled.declared().role == Role::NewKv {
                    return self.write_kv(side, filled, slot);
                }
                let to = host.stashed_mut(filled.stash_range());
                side.download(to, slot, Some(shared.packing(filled.declared())))
            }
            ref other => unreachable!("{other} is not work of the download lane"),
        }
    }

    /// The compute lane: one micro-batch at one visit.
    pub(super) fn compute(&self, operation: &Operation) -> Result<(), BoxedError> {
        let Work::Compute { device_visit, micro_batch, blocks, inputs, outputs, .. } =
            operation.work()
        else {
            unreachable!("{} is not work of the compute lane", operation.work())
        };
        let shared = &*self.shared;
        let step = operation.step();
        let m = *micro_batch;
        let side = self.side(operation);
        let state = shared.state(operation);
        let visit = step.plan.visit(*device_visit);
        let block = |&BlockUse { portion, weights, gradient }: &BlockUse| BlockViews {
            weights: side.weights.slot(weights, shared.published_len(portion)),
            gradient: gradient.map(|accumulator| {
                side.gradients.slot(accumulator.slot, shared.trained_len(portion))
            }),
        };
        let port = |pool: &Slots, placed: &Placed| {
            let filled = Filled::of(operation, &state, placed, m);
            let boundary = *filled.declared();
            let view = match side.stays_in_stash(&boundary) {
                true => shared.memory.in_stash(filled.stash_range()),
                false => pool.slot(placed.slot, filled.slot_floats()),
            };
            Port { boundary, view }
        };
        let kept = |&boundary: &BoundaryId| {
            let filled = Filled { state: &state, layer: visit.layer, boundary, micro_batch: m };
            Port { boundary: *filled.declared(), view: side.kept.part(filled.kept_range()) }
        };
        let ports = |pool: &Slots, placed: &[Placed], stays: &[BoundaryId]| -> Vec<Port> {
            placed.iter().map(|placed| port(pool, placed)).chain(stays.iter().map(kept)).collect()
        };
        let accumulators = blocks.iter().filter_map(|of| of.gradient);
        let accumulate = accumulators.clone().any(|accumulator| !accumulator.first);
        assert!(!accumulate || accumulators.into_iter().all(|accumulator| !accumulator.first));
        let own = state.view(m, shared.seed);
        let batch = if visit.phase == Phase::Reference { own.of_reference() } else { own };
        let args = VisitArgs {
            batch,
            targets: state.targets(m),
            dtype: shared.plan.dtype(),
            blocks: blocks.iter().map(block).collect(),
            dequantises: side.begins_visit(step.number, *device_visit),
            accumulate,
            reads: ports(&side.inputs, inputs, &visit.kept),
            writes: ports(&side.outputs, outputs, &visit.keeps),
            copies: visit.copies.iter().map(|copied| kept(&copied.to).view).collect(),
            scale: state.batch_of(m).scale,
            save: self.save,
            workspace: side.workspace,
            chunk_state: side.chunk_state,
        };
        if state.input.purpose == Purpose::Encode {
            self.keep_hidden(side, visit.layer.0 as usize, m, &args)?;
        }
        let run = |kernels: &dyn Kernels| models::run(&shared.model, visit, kernels, &args);
        side.compute(batch.metadata(), &run)?;
        if shared.non_finite == NonFinite::Stop {
            self.check_finite(operation, *device_visit, batch.metadata(), &args)?;
        }
        Ok(())
    }

    /// Keeps the hidden states that the head reads, at the head's first visit.
    fn keep_hidden(
        &self,
        side: &DeviceSide,
        layer: usize,
        m: MicroBatch,
        args: &VisitArgs<'_>,
    ) -> Result<(), BoxedError> {
        if self.shared.model.layers.iter().position(ModelLayer::is_head) != Some(layer) {
            return Ok(());
        }
        let hidden = args.reads.iter().find(|port| port.boundary.role == Role::Hidden);
        let x = hidden.expect("a head reads a hidden state").view;
        let read = side.device.read_back(x)?;
        let mut hidden = self.hidden.lock().expect("nothing panics inside");
        let hidden = hidden.entry(m).or_default();
        match self.shared.plan.dtype() {
            Dtype::F32 => hidden.extend(read),
            dtype => {
                let halves: &[u16] = bytemuck::cast_slice(&read);
                let begin = hidden.len();
                hidden.resize(begin + halves.len(), 0.0);
                widen(dtype, &mut hidden[begin..], halves);
            }
        }
        Ok(())
    }
}

/// The floats of a shard in the slot of its block.
fn floats_of(shard: Shard, slot: View) -> Range<usize> {
    let bytes = shard.range((slot.len() * size_of::<f32>()) as u64);
    let float = |byte: u64| byte as usize / size_of::<f32>();
    float(bytes.start)..float(bytes.end)
}
