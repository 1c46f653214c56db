//! The lanes of the device: uploads, kernels, downloads. What they copy from or to on the host is
//! the operation's until it has ended: the ring lets nobody write or read it meanwhile.

use half::bf16;
use l2l_actors::schedule::{BlockId, Boundary, MicroBatch, Role};
use l2l_actors::work::{BlockUse, MasterAt, Placed, Work};
use l2l_actors::{BoxedError, Operation};

use super::device_side::Crosses;
use super::step::StepState;
use super::{CacheSlot, Worker};
use crate::kernels::Kernels;
use crate::models::{self, Part, VisitArgs, block_len};
use crate::plan::Purpose;
use crate::tensor::{Dtype, View};

impl Worker {
    fn block_len(&self, block: BlockId) -> usize {
        block_len(&self.model.blocks[block.0 as usize])
    }

    /// The upload lane.
    pub(super) fn upload(&self, operation: &Operation) -> Result<(), BoxedError> {
        let host = self.memory.lease(self.device.device());
        match *operation.work() {
            Work::UploadBlock { block, version, master, weights } => {
                let slot = self.device.weights(weights, self.block_len(block));
                let floats = slot.dtype.floats(slot.len());
                match master {
                    MasterAt::Slot(read) => {
                        let read = &host.read_slot(read)[..floats];
                        self.device.upload(slot, read, Crosses::Always)
                    }
                    MasterAt::Memory => {
                        let lease = self.host.eps.memory().read(block, version);
                        let published = &lease.parameters[..floats];
                        self.device.upload(slot, published, Crosses::Always)
                    }
                }
            }
            Work::UploadBoundary { micro_batch, ref inputs } => {
                let state = self.steps.of(operation.step().number);
                let slot = self.device.input(inputs, floats_of(operation, inputs, micro_batch));
                let &Boundary { role, encoding, .. } = boundary_of(operation, inputs);
                if role == Role::CachedKv {
                    return self.read_kv(operation, &state, slot, micro_batch);
                }
                let from = host.stashed(state.stash.place(inputs.boundary, micro_batch));
                let sequences = sequences_of(operation, micro_batch);
                self.device.upload_stashed(slot, from, encoding, sequences)
            }
            ref other => unreachable!("{other} is not of the upload lane"),
        }
    }

    /// The download lane.
    pub(super) fn download(&self, operation: &Operation) -> Result<(), BoxedError> {
        let host = self.memory.lease(self.device.device());
        match *operation.work() {
            Work::DownloadGradient { block, gradients, reduced } => {
                let len = self.block_len(block);
                let gradient = self.device.gradient(gradients, len);
                self.device.download(host.landing(reduced, len), gradient, Crosses::Always)
            }
            Work::DownloadBoundary { micro_batch, ref outputs } => {
                let state = self.steps.of(operation.step().number);
                let slot = self.device.output(outputs, floats_of(operation, outputs, micro_batch));
                let &Boundary { role, encoding, .. } = boundary_of(operation, outputs);
                if role == Role::NewKv {
                    return self.write_kv(operation, &state, slot, micro_batch);
                }
                let to = host.stashed_mut(state.stash.place(outputs.boundary, micro_batch));
                let sequences = sequences_of(operation, micro_batch);
                self.device.download_stashed(to, slot, encoding, sequences)
            }
            ref other => unreachable!("{other} is not of the download lane"),
        }
    }

    /// Copies the cached keys and values of a layer's micro-batch to the device.
    fn read_kv(
        &self,
        operation: &Operation,
        state: &StepState,
        slot: View,
        micro_batch: MicroBatch,
    ) -> Result<(), BoxedError> {
        let host = self.memory.lease(self.device.device());
        let layer = self.cache_layer(operation);
        for (on_device, CacheSlot { slot, .. }) in state.cached(operation, slot, micro_batch) {
            let from = host.cached(self.plan.cached_at(layer, slot, 0), on_device.len());
            self.device.upload(on_device, from, Crosses::UnlessStashedThere)?;
        }
        Ok(())
    }

    /// Copies the new keys and values of a layer's micro-batch from the device, behind the cached
    /// ones.
    fn write_kv(
        &self,
        operation: &Operation,
        state: &StepState,
        slot: View,
        micro_batch: MicroBatch,
    ) -> Result<(), BoxedError> {
        let host = self.memory.lease(self.device.device());
        let layer = self.cache_layer(operation);
        for (on_device, CacheSlot { slot, cached }) in state.cached(operation, slot, micro_batch) {
            let to = host.cached_mut(self.plan.cached_at(layer, slot, cached), on_device.len());
            self.device.download(to, on_device, Crosses::UnlessStashedThere)?;
        }
        Ok(())
    }

    /// Which of the layers with a KV cache an operation serves.
    fn cache_layer(&self, operation: &Operation) -> usize {
        let layer = operation.layer().expect("keys and values are of a layer").0 as usize;
        let has_cache = |part: &&Part| matches!(part, Part::Stack(of) if of.kv_width() > 0);
        self.model.parts[..layer].iter().filter(has_cache).count()
    }

    /// The compute lane: one micro-batch at one visit.
    pub(super) fn compute(&self, operation: &Operation) -> Result<(), BoxedError> {
        let Work::Compute { device_visit, micro_batch, blocks, inputs, outputs, .. } =
            operation.work()
        else {
            unreachable!("a compute operation computes")
        };
        let [BlockUse { block, weights, gradient }] = blocks[..] else {
            unreachable!("every layer of this crate's models has one block")
        };
        let (step, m) = (operation.step(), *micro_batch);
        let state = self.steps.of(step.number);
        let (visit, schedule) = (step.plan.visit(*device_visit), &step.plan.schedule);
        let len = self.block_len(block);
        let input = |placed| {
            let slot = self.device.input(placed, floats_of(operation, placed, m));
            (boundary_of(operation, placed).role, slot)
        };
        let output = |placed| {
            let slot = self.device.output(placed, floats_of(operation, placed, m));
            (boundary_of(operation, placed).role, slot)
        };
        let batch = state.metadata(m, schedule, self.device.seed);
        let args = VisitArgs {
            batch: batch.view(),
            labelled: state.labelled(m, schedule),
            dtype: self.device.dtype,
            weights: self.device.weights(weights, len),
            gradient: gradient.map(|accumulator| self.device.gradient(accumulator.slot, len)),
            accumulate: gradient.is_some_and(|accumulator| !accumulator.first),
            reads: inputs.iter().map(input).collect(),
            writes: outputs.iter().map(output).collect(),
            scale: state.scale,
            save: self.device.save,
            workspace: self.device.workspace,
            chunk_state: self.device.chunk_state,
        };
        if state.purpose == Purpose::Encode {
            self.keep_hidden(visit.layer.0 as usize, &args)?;
        }
        let run = |kernels: &dyn Kernels| models::run(&self.model, visit, kernels, &args);
        self.device.compute(&batch, &run)
    }

    /// Keeps what the head reads, at the head's first visit.
    fn keep_hidden(&self, layer: usize, args: &VisitArgs<'_>) -> Result<(), BoxedError> {
        if self.model.parts.iter().position(Part::is_head) != Some(layer) {
            return Ok(());
        }
        let x = args.reads.hidden.expect("a head reads a hidden state");
        let read = self.device.device().read_back(x)?;
        let mut hidden = self.results.hidden.lock().expect("nothing panics inside");
        match self.device.dtype {
            Dtype::F32 => hidden.extend(read),
            Dtype::Bf16 => {
                hidden.extend(bytemuck::cast_slice(&read).iter().map(|x: &bf16| x.to_f32()));
            }
        }
        Ok(())
    }
}

/// What a boundary is.
fn boundary_of<'o>(operation: &'o Operation, placed: &Placed) -> &'o Boundary {
    operation.step().plan.schedule.boundary(placed.boundary)
}

/// Floats of one micro-batch of a boundary in its slot.
fn floats_of(operation: &Operation, placed: &Placed, micro_batch: MicroBatch) -> usize {
    let schedule = &operation.step().plan.schedule;
    schedule.boundary_bytes(placed.boundary, micro_batch) as usize / size_of::<f32>()
}

/// Sequences of a micro-batch.
fn sequences_of(operation: &Operation, micro_batch: MicroBatch) -> usize {
    operation.step().plan.schedule.micro_batches[micro_batch as usize] as usize
}
