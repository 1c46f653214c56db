//! The lanes of devices: uploads, kernels, downloads. What they copy from or to on the host is
//! the operation's until it has ended: the ring lets nobody write or read it meanwhile.

use std::ops::Range;
use std::time::Instant;

use l2l_actors::schedule::{BlockId, MicroBatch, Role, Shard};
use l2l_actors::work::{BlockUse, MasterAt, Placed, Work};
use l2l_actors::{BoxedError, Operation};

use super::boundaries::Filled;
use super::device_side::{Crosses, DeviceSide};
use super::step::StepState;
use super::{CacheSlot, Worker};
use crate::config::{GradientDtype, NonFinite};
use crate::kernels::Kernels;
use crate::models::{self, BlockViews, ModelLayer, Port, VisitArgs};
use crate::plan::Purpose;
use crate::tensor::{Dtype, Packing, View, packed_bf16, widen};

impl Worker {
    /// Floats that a device is sent of a block.
    fn published_len(&self, block: BlockId) -> usize {
        self.model.blocks[block.0 as usize].published_len(self.plan.dtype())
    }

    /// Elements of a block's gradient.
    pub(super) fn trained_len(&self, block: BlockId) -> usize {
        self.model.blocks[block.0 as usize].trained_len()
    }

    /// The upload lane.
    pub(super) fn upload(&self, operation: &Operation) -> Result<(), BoxedError> {
        let host = self.memory.lease();
        let device = self.device(operation);
        match *operation.work() {
            Work::UploadBlock { block, version, master, weights, shard } => {
                let slot = device.weights(weights, self.published_len(block));
                let range = floats_of(shard, slot);
                let to = slot.part(range.clone());
                match master {
                    MasterAt::Slot(read) => {
                        device.upload(to, &host.read_slot(read)[range], Crosses::Always)
                    }
                    MasterAt::Memory => {
                        let lease = self.host.eps.memory().read(block, version);
                        device.upload(to, &lease.parameters[range], Crosses::Always)
                    }
                }
            }
            Work::UploadBoundary { micro_batch, ref inputs } => {
                let state = self.steps.of(operation.step().number);
                let filled = filled(operation, &state, inputs, micro_batch);
                if device.stays_in_stash(filled.what()) {
                    device.count_upload(self.in_slot(filled));
                    return Ok(());
                }
                let slot = self.input(device, filled, inputs);
                if filled.what().role == Role::CachedKv {
                    return self.read_kv(device, filled, slot);
                }
                let from = host.stashed(self.in_stash(filled));
                device.upload_stashed(slot, from, self.packing(filled.what()))
            }
            ref other => unreachable!("{other} is not of the upload lane"),
        }
    }

    /// The lane of copies from other devices.
    pub(super) fn copy_shards(&self, operation: &Operation) -> Result<(), BoxedError> {
        let &Work::CopyShards { block, weights, ref from, .. } = operation.work() else {
            unreachable!("{} is not of the lane of peers", operation.work())
        };
        let device = self.device(operation);
        let len = self.published_len(block);
        let slot = device.weights(weights, len);
        for &(shard, weights) in from {
            let peer = &self.devices[usize::from(shard.index)];
            let range = floats_of(shard, slot);
            let uploaded = peer.weights(weights, len).part(range.clone());
            device.copy_from(slot.part(range), peer, uploaded)?;
        }
        Ok(())
    }

    /// The download lane.
    pub(super) fn download(&self, operation: &Operation) -> Result<(), BoxedError> {
        let host = self.memory.lease();
        let device = self.device(operation);
        match *operation.work() {
            Work::DownloadGradient { block, gradients, reduced, .. } => {
                let len = self.trained_len(block);
                let gradient = device.gradient(gradients, len);
                let landing = host.landing(reduced, len);
                match self.plan.gradient_dtype() {
                    GradientDtype::F32 => device.download(landing, gradient, Crosses::Always),
                    GradientDtype::Bf16 => {
                        let packed = &mut landing[len - packed_bf16(len)..];
                        let packing = Packing::bf16(len);
                        device.download_packed(packed, gradient, packing, Crosses::Always)
                    }
                }
            }
            Work::DownloadBoundary { micro_batch, ref outputs } => {
                let state = self.steps.of(operation.step().number);
                let filled = filled(operation, &state, outputs, micro_batch);
                if device.stays_in_stash(filled.what()) {
                    device.count_download(self.in_slot(filled));
                    return Ok(());
                }
                let slot = self.output(device, filled, outputs);
                if filled.what().role == Role::NewKv {
                    return self.write_kv(device, filled, slot);
                }
                let to = host.stashed_mut(self.in_stash(filled));
                device.download_stashed(to, slot, self.packing(filled.what()))
            }
            ref other => unreachable!("{other} is not of the download lane"),
        }
    }

    /// Copies the cached keys and values of a layer's micro-batch to the device.
    fn read_kv(
        &self,
        device: &DeviceSide,
        filled: Filled<'_>,
        slot: View,
    ) -> Result<(), BoxedError> {
        let host = self.memory.lease();
        let slots = filled.state.cache_slots(filled.micro_batch, &filled.step.plan.schedule);
        let width = slot.len() / slots.len();
        for (nth, cached) in slots.iter().enumerate() {
            let on_device = slot.part(nth * width..(nth + 1) * width);
            let from = host.cached(self.plan.cached_at(filled.layer, cached.slot, 0), width);
            device.upload(on_device, from, Crosses::UnlessStashedThere)?;
        }
        Ok(())
    }

    /// Copies the new keys and values of a layer's micro-batch from the device, behind the cached
    /// ones.
    fn write_kv(
        &self,
        device: &DeviceSide,
        filled: Filled<'_>,
        slot: View,
    ) -> Result<(), BoxedError> {
        let host = self.memory.lease();
        let schedule = &filled.step.plan.schedule;
        let slots = filled.state.cache_slots(filled.micro_batch, schedule);
        let lengths = filled.state.lengths(filled.micro_batch, schedule);
        let mut from = 0;
        for (&CacheSlot { slot: cache, cached }, rows) in slots.iter().zip(lengths) {
            let floats = self.plan.dtype().floats(rows * filled.what().width());
            let to = host.cached_mut(self.plan.cached_at(filled.layer, cache, cached), floats);
            let on_device = slot.part(from..from + floats);
            device.download(to, on_device, Crosses::UnlessStashedThere)?;
            from += floats;
        }
        Ok(())
    }

    /// The compute lane: one micro-batch at one visit.
    pub(super) fn compute(&self, operation: &Operation) -> Result<(), BoxedError> {
        let Work::Compute { device_visit, micro_batch, blocks, inputs, outputs, .. } =
            operation.work()
        else {
            unreachable!("a compute operation computes")
        };
        let step = operation.step();
        let m = *micro_batch;
        let device = self.device(operation);
        let state = self.steps.of(step.number);
        let visit = step.plan.visit(*device_visit);
        let schedule = &step.plan.schedule;
        let block = |&BlockUse { block, weights, gradient }: &BlockUse| BlockViews {
            weights: device.weights(weights, self.published_len(block)),
            gradient: gradient
                .map(|accumulator| device.gradient(accumulator.slot, self.trained_len(block))),
        };
        let input = |placed| {
            let filled = filled(operation, &state, placed, m);
            Port { boundary: *filled.what(), view: self.input(device, filled, placed) }
        };
        let output = |placed| {
            let filled = filled(operation, &state, placed, m);
            Port { boundary: *filled.what(), view: self.output(device, filled, placed) }
        };
        let accumulators = blocks.iter().filter_map(|of| of.gradient);
        let accumulate = accumulators.clone().any(|accumulator| !accumulator.first);
        assert!(!accumulate || accumulators.into_iter().all(|accumulator| !accumulator.first));
        let batch = state.metadata(m, schedule, self.seed);
        let args = VisitArgs {
            batch: batch.view(),
            labelled: state.labelled(m, schedule),
            dtype: self.plan.dtype(),
            blocks: blocks.iter().map(block).collect(),
            accumulate,
            reads: inputs.iter().map(input).collect(),
            writes: outputs.iter().map(output).collect(),
            scale: state.scale,
            save: self.save,
            workspace: device.workspace,
            chunk_state: device.chunk_state,
        };
        if state.purpose == Purpose::Encode {
            self.keep_hidden(device, visit.layer.0 as usize, m, &args)?;
        }
        let run = |kernels: &dyn Kernels| models::run(&self.model, visit, kernels, &args);
        let begin = Instant::now();
        device.compute(&batch, &run)?;
        if let Some(emulated) = self.emulated {
            emulated.slow(begin, &self.model, visit, state.lengths(m, schedule));
        }
        if self.host.non_finite == NonFinite::Stop {
            self.check_finite((step, device, *device_visit), &batch, &args)?;
        }
        Ok(())
    }

    /// Keeps what the head reads, at the head's first visit.
    fn keep_hidden(
        &self,
        device: &DeviceSide,
        layer: usize,
        m: MicroBatch,
        args: &VisitArgs<'_>,
    ) -> Result<(), BoxedError> {
        if self.model.layers.iter().position(ModelLayer::is_head) != Some(layer) {
            return Ok(());
        }
        let hidden = args.reads.iter().find(|port| port.boundary.role == Role::Hidden);
        let x = hidden.expect("a head reads a hidden state").view;
        let read = device.read_back(x)?;
        let mut hidden = self.results.hidden.lock().expect("nothing panics inside");
        let hidden = hidden.entry(m).or_default();
        match self.plan.dtype() {
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

/// The floats that a shard of a block is, of all in its slot.
fn floats_of(shard: Shard, slot: View) -> Range<usize> {
    let bytes = shard.range((slot.len() * size_of::<f32>()) as u64);
    let float = |byte: u64| byte as usize / size_of::<f32>();
    float(bytes.start)..float(bytes.end)
}

/// What an operation's micro-batch fills of a boundary.
fn filled<'a>(
    operation: &'a Operation,
    state: &'a StepState,
    placed: &Placed,
    micro_batch: MicroBatch,
) -> Filled<'a> {
    let layer = operation.layer().expect("boundaries are read and written at visits");
    Filled { step: operation.step(), state, layer, boundary: placed.boundary, micro_batch }
}
