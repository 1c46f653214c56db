//! Room for layers that are added while a model is trained.
//!
//! The ring has a model with all layers that will ever be added. All other code sees a model with the
//! present layers. Their tensors are in the same blocks, and the blocks of later layers are empty.

use l2l_actors::schedule::BlockId;

use super::block_tensors::BlockTensors;
use super::model::Model;
use super::shape::Shape;
use super::training::Training;
use crate::error::Error;

impl Model {
    /// The model of this shape. Its blocks have the ids that they have in a model of `max_layers`.
    pub(crate) fn with_room(
        shape: Shape,
        max_layers: usize,
        training: &Training,
    ) -> Result<Model, Error> {
        let mut model = Model::for_training(shape, training)?;
        let room = max_layers.saturating_sub(shape.layers);
        let last = model.optional_layers().last().map_or(0, |layer| layer.0 as usize);
        let of_last = &model.layer_blocks[last];
        let first_empty = of_last.iter().map(|block| block.0 + 1).max().unwrap_or(0);
        let room = room * of_last.len();
        for BlockId(block) in model.layer_blocks.iter_mut().flatten() {
            *block += if *block >= first_empty { room as u32 } else { 0 };
        }
        let at = first_empty as usize;
        model.blocks.splice(at..at, (0..room).map(|_| BlockTensors::default()));
        Ok(model)
    }

    /// The blocks of a layer that a step can leave out, counted as in
    /// [`LayerSelection`](super::LayerSelection).
    pub(crate) fn blocks_of_layer(&self, layer: usize) -> &[BlockId] {
        &self.layer_blocks[self.optional_layers()[layer].0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::families;

    #[test]
    fn blocks_are_those_of_the_largest_model() {
        for name in ["gpt2", "bert-base", "llama-7b"] {
            let shape = families::preset(name).expect("it is one");
            let shape = Shape { layers: 2, ..shape };
            let few = Model::with_room(shape, 5, &Training::default()).expect("all is trained");
            let all = Model::new(Shape { layers: 5, ..shape });
            assert_eq!(few.blocks.len(), all.blocks.len());
            let named = |model: &Model| -> Vec<Vec<String>> {
                let names =
                    |block: &BlockTensors| block.iter().map(|tensor| tensor.name.clone()).collect();
                model.blocks.iter().map(names).collect()
            };
            for (few, all) in named(&few).into_iter().zip(named(&all)) {
                assert!(few == all || few.is_empty(), "{few:?}");
            }
            let same = Model::new(shape);
            let used = |model: &Model| model.blocks.iter().filter(|b| !b.is_empty()).count();
            assert_eq!(used(&few), used(&same));
            for (part, blocks) in few.layer_blocks.iter().enumerate() {
                for (spread, own) in blocks.iter().zip(&same.layer_blocks[part]) {
                    let names = |model: &Model, id: &BlockId| named(model)[id.0 as usize].clone();
                    assert_eq!(names(&few, spread), names(&same, own));
                }
            }
        }
    }
}
