//! Which parts of a block cross the link: with experts, those that have rows.
//!
//! The stash has the choice of a micro-batch's rows. It is read once a step.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use l2l_actors::Operation;
use l2l_actors::schedule::{BlockId, BoundaryId, ChosenBy, MicroBatch};

use super::boundaries::Filled;
use super::shared::Shared;
use crate::models::{BlockTensors, TensorFloats};

/// The parts that rows of a step chose, of each micro-batch of the boundaries that say so.
pub(super) type Choices = Mutex<BTreeMap<(BoundaryId, MicroBatch), Arc<[bool]>>>;

impl Shared {
    /// The ranges of a block that rows need, of those that `ranges` lists, in their order. Ranges
    /// that follow each other are one. `None`: rows need all of it.
    pub(super) fn needed(
        &self,
        operation: &Operation,
        block: BlockId,
        chosen_by: Option<ChosenBy>,
        ranges: impl FnOnce(&BlockTensors) -> Vec<TensorFloats>,
    ) -> Option<Vec<Range<usize>>> {
        let choice = chosen_by?;
        let layer = operation.layer()?.0 as usize;
        let index = self.model.layer_blocks[layer].iter().position(|id| *id == block)?;
        let parts = self.model.layers[layer].stack()?.parts_of_block(index);
        let chosen = self.chosen_parts(operation, choice);
        let has_rows = chosen.get(parts).filter(|parts| !parts.is_empty())?;
        let tensors = &self.model.blocks[block.0 as usize];
        let tensors_of_part = tensors.iter().count() / has_rows.len();
        let mut needed: Vec<Range<usize>> = Vec::new();
        for TensorFloats { tensor, floats } in ranges(tensors) {
            match needed.last_mut() {
                _ if !has_rows[tensor / tensors_of_part] => {}
                Some(last) if last.end == floats.start => last.end = floats.end,
                _ => needed.push(floats),
            }
        }
        Some(needed)
    }

    /// For each part of a layer, whether a row of these micro-batches chose it.
    fn chosen_parts(&self, operation: &Operation, choice: ChosenBy) -> Vec<bool> {
        let layer = operation.layer().expect("blocks are of layers");
        let state = self.state(operation);
        let host = self.memory.lease();
        let mut choices = state.choices.lock().expect("nothing panics inside");
        let mut all: Vec<bool> = Vec::new();
        for micro_batch in choice.micro_batches() {
            let boundary = choice.boundary;
            let of_micro_batch = choices.entry((boundary, micro_batch)).or_insert_with(|| {
                let filled = Filled { state: &state, layer, boundary, micro_batch };
                let layer = self.model.layers[layer.0 as usize].stack();
                let rows = host.stashed(filled.stash_range());
                layer.map_or_else(Vec::new, |layer| layer.chosen_parts(rows)).into()
            });
            all.resize(of_micro_batch.len(), false);
            all.iter_mut().zip(&**of_micro_batch).for_each(|(all, one)| *all |= one);
        }
        all
    }
}
