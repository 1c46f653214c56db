//! What the routers of layers with experts did in the last training step.

use serde::Serialize;

use super::status::RunStatus;

/// A layer with experts in the last training step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RouterView {
    /// The layer's index.
    pub layer: String,
    /// Tokens that chose the most used expert ÷ the mean of all experts.
    pub load_max_ratio: f64,
    /// The share of the tokens that chose the most used expert.
    pub token_share: f64,
    /// Experts that no token chose.
    pub idle: usize,
    /// The entropy of the mean probabilities, in nats.
    pub entropy: f64,
}

/// The layers with experts. `name` gives a layer's name.
pub(super) fn views(status: &RunStatus, name: impl Fn(usize) -> String) -> Vec<RouterView> {
    let layers = status.routers.iter().flat_map(|routers| &routers.layers);
    let view = layers.map(|(layer, sums)| RouterView {
        layer: name(layer.0 as usize),
        load_max_ratio: sums.load_max_ratio(),
        token_share: sums.token_share(),
        idle: sums.idle(),
        entropy: sums.entropy(),
    });
    view.collect()
}
