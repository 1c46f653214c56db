//! What `l2l plan` says of layers in pieces: how large these are, what they cost where whole layers
//! fit, and which device has which.

use l2l::models::Model;
use l2l::plan::DevicePart;
use l2l::{Config, Plan, largest_shape_of, model_of};
use serde_json::{Value, json};

/// Ranges of layers or pieces that a line names.
const SHOWN: usize = 8;

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

/// A device's part, in the event of a plan.
pub(super) fn field(device: &str, part: &DevicePart) -> Value {
    let DevicePart { layers, weight_bytes, weight_slots } = part;
    let layer = |(layer, piece): &(usize, Option<u16>)| json!({ "layer": layer, "piece": piece });
    json!({
        "device": device, "weight_bytes": weight_bytes, "weight_slots": weight_slots,
        "layers": layers.iter().map(layer).collect::<Vec<_>>(),
    })
}

/// What a device's part is of: numbers of layers, as the plan names these, and `layer.piece` for
/// pieces.
pub(super) fn words_of_part(part: &DevicePart) -> String {
    let mut names = Vec::new();
    let mut ranges: Vec<[(usize, Option<u16>); 2]> = Vec::new();
    for &one in &part.layers {
        let is_next = |(layer, piece): (usize, Option<u16>)| match piece {
            None => one == (layer + 1, None),
            Some(piece) => one == (layer, Some(piece + 1)),
        };
        match ranges.last_mut().filter(|range| is_next(range[1])) {
            Some(range) => range[1] = one,
            None => ranges.push([one; 2]),
        }
    }
    for [first @ (layer, piece), last] in ranges {
        let name = piece.map_or(format!("{layer}"), |piece| format!("{layer}.{piece}"));
        let end = last.1.map_or(last.0, usize::from);
        names.push(if first == last { name } else { format!("{name}-{end}") });
    }
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let slots = match part.weight_slots {
        1 => "a slot".into(),
        slots => format!("{slots} slots"),
    };
    format!("bytes of weights, by way of {slots}: layers {}{more}", names.join(", "))
}
