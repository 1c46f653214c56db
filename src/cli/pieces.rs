//! What `l2l plan` says of layers in pieces: how large these are, and what they cost where whole
//! layers fit.

use l2l::models::Model;
use l2l::{Config, Plan, largest_shape_of, model_of};

/// The pieces of a plan.
pub(super) struct Pieces {
    /// Bytes of the largest one on a device, and of its gradient.
    pub(super) largest: Option<[u64; 2]>,
    /// Where whole layers fit: how many times fewer bytes of activations move with them.
    pub(super) times_fewer: Option<f64>,
}

impl Pieces {
    pub(super) fn of(config: &Config, plan: &Plan, model: &Model) -> Pieces {
        let largest = model.largest_piece(config.device.dtype);
        let times_fewer = largest.and_then(|_| times_fewer(config, plan));
        Pieces { largest, times_fewer }
    }

    /// A remark for the reader of a plan, if whole layers fit.
    pub(super) fn words(&self) -> Option<String> {
        self.times_fewer.map(|times| {
            format!(
                "whole layers fit: parallel.tensor = 1 moves {times:.1} times fewer bytes of \
                 activations"
            )
        })
    }
}

/// The bytes of activations that a plan moves, divided by those of the plan with whole layers.
/// `None` if that one does not fit.
fn times_fewer(config: &Config, plan: &Plan) -> Option<f64> {
    let mut config = config.clone();
    config.parallel.tensor = 1;
    let shape = largest_shape_of(&config).ok()?;
    let model = model_of(&config, shape).ok()?;
    let rule = config.update_rule();
    let whole = Plan::of_rank(&config, &model, &rule, plan.share()).ok()?;
    let fits = whole.trains() && whole.misfits(&model, &rule, None).is_empty();
    let bytes = [plan, &whole].map(|plan| plan.traffic.activation_bytes as f64);
    fits.then(|| bytes[0] / bytes[1].max(1.0))
}
