//! The layers of the stack that a step uses.

use std::collections::BTreeSet;

use l2l_actors::schedule::{BlockId, LayerId};

use super::model::{Model, ModelLayer};
use crate::error::Error;

/// The layers of a step, by their numbers: 0 is the first layer of the stack that can be left out
/// (transformer blocks can, and layers of your own; embedding, final norm and head cannot). A layer
/// that is left out passes the hidden states on, and neither its parameters nor their optimizer
/// state change in that step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerSelection {
    /// The layers in the order in which hidden states pass them, each at most once; `None`: all, in
    /// the model's order.
    pub layers: Option<Vec<usize>>,
    /// Layers whose parameters stay as they are in this step.
    pub frozen: Vec<usize>,
}

impl LayerSelection {
    /// These layers, in this order, all trained.
    pub fn of(layers: impl Into<Vec<usize>>) -> LayerSelection {
        LayerSelection { layers: Some(layers.into()), frozen: Vec::new() }
    }

    /// Refuses layers that the model does not have, or that are named twice.
    ///
    /// # Errors
    /// The message names the layer.
    pub fn check(&self, model: &Model) -> Result<(), Error> {
        let optional = model.optional_layers();
        let count = optional.len();
        let mut met = BTreeSet::new();
        for &layer in self.layers.iter().flatten() {
            if !met.insert(layer) {
                return Err(Error::argument(format_args!("layer {layer} is selected twice")));
            }
        }
        let follow = |pair: &[LayerId]| pair[0].0 + 1 == pair[1].0;
        if !self.is_in_order() && !optional.windows(2).all(follow) {
            let what = "layers can be used in another order only where no layer stands between \
                        them that is always used";
            return Err(Error::argument(what));
        }
        match met.into_iter().chain(self.frozen.iter().copied()).find(|&layer| layer >= count) {
            None => Ok(()),
            Some(layer) if count == 0 => Err(Error::argument(format_args!(
                "layer {layer} is selected, and the model has no layers that can be left out"
            ))),
            Some(layer) => Err(Error::argument(format_args!(
                "layer {layer} is selected, and the model has layers 0 to {}",
                count.saturating_sub(1)
            ))),
        }
    }

    /// True for layers in the model's order.
    fn is_in_order(&self) -> bool {
        self.layers.as_ref().is_none_or(|layers| layers.is_sorted())
    }

    /// The layers of the ring, in order; the selection must have been checked.
    pub(crate) fn ring_layers(&self, model: &Model) -> Vec<LayerId> {
        let optional = model.optional_layers();
        let all = (0..model.layers.len() as u32).map(LayerId);
        let Some(layers) = &self.layers else { return all.collect() };
        if self.is_in_order() {
            let is_used = |layer: &LayerId| match optional.binary_search(layer) {
                Ok(nth) => layers.contains(&nth),
                Err(_) => true,
            };
            return all.filter(is_used).collect();
        }
        let (first, last) = match (optional.first(), optional.last()) {
            (Some(&first), Some(&last)) => (first, last),
            _ => return all.collect(),
        };
        let before = all.clone().take_while(|&layer| layer < first);
        let after = all.clone().skip_while(|&layer| layer <= last);
        before.chain(layers.iter().map(|&layer| optional[layer])).chain(after).collect()
    }

    /// The blocks that stay as they are; the selection must have been checked.
    pub(crate) fn frozen_blocks(&self, model: &Model) -> Vec<BlockId> {
        let optional = model.optional_layers();
        let blocks = |&layer: &usize| model.layer_blocks[optional[layer].0 as usize].clone();
        self.frozen.iter().flat_map(blocks).collect()
    }
}

impl Model {
    /// The layers of the stack that a step can leave out, in order.
    pub(crate) fn optional_layers(&self) -> Vec<LayerId> {
        let is_optional =
            |layer: &ModelLayer| layer.stack().is_some_and(|layer| layer.is_optional());
        let layers = (0..).zip(&self.layers).filter(|(_, layer)| is_optional(layer));
        layers.map(|(index, _)| LayerId(index)).collect()
    }
}
