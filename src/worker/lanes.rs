//! The lanes of the device: uploads, kernels, downloads. What they copy from or to on the host is the
//! operation's until it has ended: the ring lets nobody write or read it meanwhile.

use half::bf16;
use l2l_actors::ports::{Operation, Placed, Trouble, Work};
use l2l_actors::schedule::{BlockId, MicroBatch};

use super::device_side::Crosses;
use super::step::StepState;
use super::{CacheSlot, Worker};
use crate::kernels::{BatchMetadata, DropoutKey, Kernels};
use crate::models::{self, Part, VisitArgs, block_len};
use crate::plan::{Purpose, Recall};
use crate::tensor::{Dtype, View};

impl Worker {
    fn block_len(&self, block: BlockId) -> usize {
        block_len(&self.model.blocks[block.0 as usize])
    }

    /// The upload lane.
    pub(super) fn upload(&self, operation: &Operation) -> Result<(), Trouble> {
        let host = self.memory.lease(self.device.device());
        match *operation.work() {
            Work::UploadBlock { block, version, reads, weights } => {
                let slot = self.device.weights(weights, self.block_len(block));
                let floats = slot.dtype.floats(slot.len());
                if let Some(read) = reads {
                    let read = host.read_slot(read);
                    return self.device.upload(slot, &read[..floats], Crosses::Always);
                }
                let lease = self.host.eps.memory().read(block, version);
                self.device.upload(slot, &lease.parameters[..floats], Crosses::Always)
            }
            Work::UploadBoundary { micro_batch, ref inputs } => {
                let state = self.steps.of(operation.step().number);
                let slot = self.device.input(inputs, floats_of(operation, inputs, micro_batch));
                if let Some(&recall) = state.carries.recalls.get(&inputs.boundary) {
                    return self.copy_cache(operation, &state, recall, slot, micro_batch);
                }
                let from = host.stashed(state.stash.place(inputs.boundary, micro_batch));
                self.device.upload_stashed(slot, from, sequences_of(operation, micro_batch))
            }
            ref other => unreachable!("{other} is not of the upload lane"),
        }
    }

    /// The download lane.
    pub(super) fn download(&self, operation: &Operation) -> Result<(), Trouble> {
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
                if let Some(&recall) = state.carries.recalls.get(&outputs.boundary) {
                    return self.copy_cache(operation, &state, recall, slot, micro_batch);
                }
                let to = host.stashed_mut(state.stash.place(outputs.boundary, micro_batch));
                self.device.download_stashed(to, slot, sequences_of(operation, micro_batch))
            }
            ref other => unreachable!("{other} is not of the download lane"),
        }
    }

    /// Copies the KV cache of a layer's micro-batch to the device, or its new keys and values from
    /// there.
    fn copy_cache(
        &self,
        operation: &Operation,
        state: &StepState,
        recall: Recall,
        slot: View,
        micro_batch: MicroBatch,
    ) -> Result<(), Trouble> {
        let host = self.memory.lease(self.device.device());
        let sequences = state.rows(micro_batch, &operation.step().plan.schedule).sequences;
        let (width, crosses) = (slot.len() / sequences.len(), Crosses::UnlessStashedThere);
        for (index, sequence) in sequences.enumerate() {
            let CacheSlot { slot: place, cached } = state.cache[sequence];
            let on_device = slot.part(index * width..(index + 1) * width);
            match recall {
                Recall::Past(layer) => {
                    let from = host.cached(self.plan.cached_at(layer, place, 0), width);
                    self.device.upload(on_device, from, crosses)?;
                }
                Recall::Fresh(layer) => {
                    let to = host.cached_mut(self.plan.cached_at(layer, place, cached), width);
                    self.device.download(to, on_device, crosses)?;
                }
            }
        }
        Ok(())
    }

    /// The compute lane: one micro-batch at one visit.
    pub(super) fn compute(&self, operation: &Operation) -> Result<(), Trouble> {
        let Work::Compute { device_visit, micro_batch, weights, inputs, outputs, gradients } =
            operation.work()
        else {
            unreachable!("a compute operation computes")
        };
        let (step, m) = (operation.step(), *micro_batch);
        let state = self.steps.of(step.number);
        let visit = step.plan.visit(*device_visit);
        let block = visit.blocks()[0];
        let rows = state.rows(m, &step.plan.schedule);
        let targets = &state.batch.targets[rows.positions.clone()];
        let documents = state.batch.documents.get(rows.positions.clone());
        let key = DropoutKey {
            seed: self.device.seed,
            step: state.trained,
            first_sequence: rows.sequences.start as u32,
        };
        let len = self.block_len(block);
        let batch = BatchMetadata {
            rows: rows.rows,
            lengths: &state.batch.lengths[rows.sequences.clone()],
            kinds: &state.batch.kinds[rows.positions.clone()],
            documents: documents.unwrap_or_default(),
            cached: state.cached.get(rows.sequences.clone()).unwrap_or_default(),
            dropout_key: state.purpose.trains().then_some(key),
        };
        let args = VisitArgs {
            batch: batch.view(),
            labelled: targets.iter().filter(|target| **target >= 0).count(),
            dtype: self.device.dtype,
            weights: self.device.weights(weights[0], len),
            gradient: gradients.first().map(|one| self.device.gradient(one.slot, len)),
            accumulate: gradients.first().is_some_and(|one| !one.first),
            reads: (inputs.iter())
                .map(|placed| self.device.input(placed, floats_of(operation, placed, m)))
                .collect(),
            writes: (outputs.iter())
                .map(|placed| self.device.output(placed, floats_of(operation, placed, m)))
                .collect(),
            scale: state.scale,
            writes_logits: state.purpose.scores(),
            save: self.device.save,
            writes_kv: !state.cache.is_empty(),
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
    fn keep_hidden(&self, layer: usize, args: &VisitArgs<'_>) -> Result<(), Trouble> {
        if self.model.parts.iter().position(Part::is_head) != Some(layer) {
            return Ok(());
        }
        let read = self.device.device().read_back(args.reads[0])?;
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

/// Floats of one micro-batch of a boundary in its slot.
fn floats_of(operation: &Operation, placed: &Placed, micro_batch: MicroBatch) -> usize {
    let schedule = &operation.step().plan.schedule;
    schedule.boundary_bytes(placed.boundary, micro_batch) as usize / size_of::<f32>()
}

/// Sequences of a micro-batch.
fn sequences_of(operation: &Operation, micro_batch: MicroBatch) -> usize {
    operation.step().plan.schedule.micro_batches[micro_batch as usize] as usize
}
