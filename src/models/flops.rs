//! The FLOPs of a model's products.

use std::ops::Range;

use l2l_actors::schedule::{LayerId, Phase};

use super::block_tensors::BlockTensors;
use super::layer::{Cuts, Save, Tensor};
use super::model::{Model, ModelLayer};
use super::selection::LayerSelection;

/// The products of a layer for each token, for counting FLOPs.
#[derive(Clone, Copy, Debug, Default)]
struct Products {
    /// Elements of weights that the token is multiplied by.
    weights: f64,
    /// The trained elements among them.
    trained: f64,
    /// Channels of causal attention; attention to both sides has twice as many.
    channels: f64,
    /// The most positions that a position attends to.
    window: Option<usize>,
}

impl Products {
    /// Multiplications of queries with keys, and of their weights with values, for these positions.
    fn attention(&self, Range { start, end }: Range<usize>) -> f64 {
        // Twice the number of keys of all positions before this one, each with half of its own.
        let keys = |position: usize| {
            let within = position.min(self.window.unwrap_or(position)) as f64;
            within * (2.0 * position as f64 - within)
        };
        self.channels * (keys(end) - keys(start))
    }
}

impl Model {
    /// Model FLOPs of training on sequences of these lengths, of which `labelled` positions have a
    /// label: 6 for each weight and token (for the head: each labelled token), and attention (of a
    /// causal model half, of keys before a query), less what a window leaves out. A frozen weight
    /// takes 4; below the lowest layer that is trained, weights and attention take 2. Recomputation
    /// and padding are not counted.
    pub fn training_flops(&self, lengths: &[usize], labelled: usize) -> f64 {
        self.training_flops_of(&LayerSelection::default(), lengths, labelled)
    }

    /// Model FLOPs of a step that uses these layers. The selection must have been checked.
    pub(crate) fn training_flops_of(
        &self,
        layers: &LayerSelection,
        lengths: &[usize],
        labelled: usize,
    ) -> f64 {
        let tokens: usize = lengths.iter().sum();
        let lowest = self.layer_blocks.iter().position(|blocks| self.trains(blocks));
        let of_layer = |layer: LayerId| {
            let layer = layer.0 as usize;
            let products = self.products(layer);
            let Products { weights, trained, .. } = products;
            let positions = if self.layers[layer].is_head() { labelled } else { tokens } as f64;
            let is_passed = lowest.is_some_and(|lowest| layer >= lowest);
            let (passes, of_attention) = if is_passed { (4.0, 6.0) } else { (2.0, 2.0) };
            let attention: f64 = lengths.iter().map(|&len| products.attention(0..len)).sum();
            (passes * weights + 2.0 * trained) * positions + of_attention * attention
        };
        layers.ring_layers(self).into_iter().map(of_layer).sum()
    }

    fn products(&self, layer: usize) -> Products {
        let weights_of = |tensors: fn(&BlockTensors) -> &[Tensor]| -> f64 {
            let all = self.blocks_of(layer).flat_map(tensors);
            let weights = all.filter(|tensor| tensor.kind.is_weight());
            weights.map(Tensor::len).sum::<usize>() as f64
        };
        let [trained, frozen] = [BlockTensors::trained, BlockTensors::frozen].map(weights_of);
        match &self.layers[layer] {
            ModelLayer::Embedding => Products::default(),
            ModelLayer::Stack(layer) => {
                let weights = layer.products() as f64;
                let share = if trained > 0.0 { trained / (trained + frozen) } else { 0.0 };
                let channels = layer.attention_channels() as f64;
                Products { weights, trained: share * weights, channels, window: layer.window() }
            }
            ModelLayer::Head(_) | ModelLayer::Classes(_) => {
                Products { weights: trained + frozen, trained, ..Products::default() }
            }
        }
    }

    /// FLOPs of the products of a visit: of these positions of sequences, at a layer that saves
    /// these activations. A position attends to those before it in its window. In a head, all
    /// positions count. The steps of a layer have the same share of it.
    pub(crate) fn visit_flops(
        &self,
        layer: usize,
        phase: Phase,
        positions: impl IntoIterator<Item = Range<usize>>,
        save: Option<Save>,
    ) -> f64 {
        let visited = &self.layers[layer];
        let steps = self.first_ports[layer].len().max(1) as f64;
        let products = self.products(layer);
        let Products { weights, trained, .. } = products;
        let mut forward = 0.0;
        let mut of_gradients = 0.0;
        let mut rows = 0.0;
        for of in positions {
            let count = of.len() as f64;
            let attention = products.attention(of);
            forward += 2.0 * (weights * count + attention);
            of_gradients += 2.0 * (trained * count + attention);
            rows += count;
        }
        let again = match (visited.is_head(), save) {
            // A head's backward computes its logits, too.
            (true, _) | (_, None) => 1.0,
            (_, Some(Save::All)) => 0.0,
            // Attention has about a third of a block's products.
            (_, Some(Save::AllButAttention)) => 1.0 / 3.0,
        };
        let of_layer = match phase {
            Phase::Forward | Phase::Reference => forward,
            Phase::Keys => {
                let width = visited.stack().map_or(0, |layer| layer.key_channels());
                let of_keys = 2.0 * (self.shape.hidden * width) as f64 * rows;
                let has_keys = |step: &usize| visited.cuts(*step) == Cuts::Causal;
                let count = (0..steps as usize).filter(has_keys).count().max(1);
                of_keys * steps / count as f64
            }
            Phase::Backward => (1.0 + again) * forward + of_gradients,
        };
        of_layer / steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::models::layer::Layer;
    use crate::models::{Shape, TransformerBlock};
    use crate::resolve::shape_of;

    #[test]
    fn attention_to_both_sides_counts_twice() {
        let shape = shape_of(&Config::default()).expect("the built-in model");
        let channels =
            |causal| TransformerBlock::new(1, 0, Shape { causal, ..shape }).attention_channels();
        assert_eq!(channels(false), 2 * channels(true));
    }

    #[test]
    fn attention_counts_the_positions_of_the_window() {
        for window in [None, Some(3), Some(1)] {
            let products = Products { channels: 2.0, window, ..Products::default() };
            for of in [0..8, 0..3, 2..7, 5..8] {
                // Half of a position's own key counts, until the window is full.
                let keys = |at: usize| match window {
                    Some(window) if at >= window => 2 * window,
                    _ => 2 * at + 1,
                };
                let sum: usize = of.clone().map(keys).sum();
                assert_eq!(products.attention(of), 2.0 * sum as f64);
            }
        }
    }
}
