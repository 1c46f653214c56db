//! From how many tokens a step on transfers and updates hide under kernels, or why they never will.
//!
//! While a phase computes, its lanes move blocks, whatever the tokens, and boundaries of each token. With
//! `n` sequences a step a lane keeps up when `blocks ÷ rate + n × boundaries ÷ rate ≤ n × compute`,
//! summed over the layers: pools let one layer's spare time serve the next. The lane that asks for most
//! decides. What a step's ends leave exposed, a [`Forecast`](super::Forecast) shows.

use serde::Serialize;

use super::forecast::Rates;
use crate::config::{Config, EpsTier, Plan, StashDtype};
use crate::models::{Keep, Model, Part, block_len};

/// What a step needs for its lanes to hide.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hiding {
    /// The lane that asks for most.
    pub lane: &'static str,
    /// The phase in which it does.
    pub phase: &'static str,
    /// Tokens a step; `None`: it never hides, for each token takes longer to move than to compute.
    pub tokens: Option<u64>,
}

/// What a lane moves in a phase: seconds whatever the tokens, and for each sequence.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    fixed: f64,
    each: f64,
}

const LANES: [&str; 5] = ["upload", "download", "host", "update", "file"];

impl Hiding {
    /// Of a config's schedule, with updates that are eager or deferred.
    pub fn of(
        config: &Config,
        model: &Model,
        plan: &Plan,
        rates: &Rates,
        deferred: bool,
    ) -> Hiding {
        let on_file = config.eps.tier == EpsTier::File;
        let states = 1.0 + plan.states as f64;
        let [up, down] = if plan.stash_on_device { rates.on_device } else { rates.boundaries };
        let (mut shares, mut compute) = ([[Share::default(); LANES.len()]; 2], [0.0; 2]);
        let parts = model.parts.iter().zip(&model.part_blocks).enumerate();
        for (index, (part, blocks)) in parts.filter(|(_, (part, _))| part.is_on_device()) {
            let block = blocks.iter().map(|id| block_len(&model.blocks[id.0 as usize]));
            let bytes = (block.sum::<usize>() * size_of::<f32>()) as f64;
            let [read, written] = boundaries(config, model, plan, part);
            for backward in [false, true] {
                let at = usize::from(backward);
                compute[at] += rates.compute_of(index as u32, backward).unwrap_or(0.0);
                // Deferred updates run under the next forward.
                let updates = f64::from(u8::from(deferred != backward));
                let lands = f64::from(u8::from(backward));
                let waits = f64::from(u8::from(deferred)) * bytes;
                let file = bytes + updates * 2.0 * states * bytes + waits;
                let moved = [
                    (bytes / rates.link[0], read[at] / up),
                    (lands * bytes / rates.link[1], written[at] / down),
                    (lands * waits / rates.reduce, 0.0),
                    (updates * bytes / rates.update, 0.0),
                    (if on_file { file / rates.file } else { 0.0 }, 0.0),
                ];
                for (share, (fixed, each)) in shares[at].iter_mut().zip(moved) {
                    share.fixed += fixed;
                    share.each += each;
                }
            }
        }
        let needed = |(phase, lane): (usize, usize)| {
            let Share { fixed, each } = shares[phase][lane];
            let spare = compute[phase] - each;
            let sequences = if fixed == 0.0 && spare >= 0.0 {
                0.0
            } else if spare <= 0.0 {
                f64::INFINITY
            } else {
                fixed / spare
            };
            (sequences, phase, lane)
        };
        let all = (0..2).flat_map(|phase| (0..LANES.len()).map(move |lane| (phase, lane)));
        let most = all.map(needed).max_by(|one, other| one.0.total_cmp(&other.0));
        let (sequences, phase, lane) = most.expect("there are lanes");
        let tokens = (sequences * plan.positions as f64).ceil();
        Hiding {
            lane: LANES[lane],
            phase: ["forward", "backward"][phase],
            tokens: tokens.is_finite().then_some(tokens as u64),
        }
    }
}

/// Bytes of a sequence that a layer's visits read and write through the stash, forward and backward.
fn boundaries(config: &Config, model: &Model, plan: &Plan, part: &Part) -> [[f64; 2]; 2] {
    let keep = config.schedule.recompute.keep();
    let positions = plan.positions;
    let ring = model.for_ring(positions, keep.unwrap_or(Keep::All), 0);
    let hidden = match config.stash.dtype {
        StashDtype::F32 => ring.hidden.stashed_per_sequence,
        StashDtype::Bf16 => ring.hidden.stashed_per_sequence / 2,
    } as f64;
    let statistics = ring.statistics.stashed_per_sequence as f64;
    let dx = ring.head_gradient.stashed_per_sequence as f64;
    let kept = match (part, keep) {
        (Part::Stack(layer), Some(keep)) => {
            (layer.kept_len(positions, keep) * size_of::<f32>()) as f64
        }
        _ => 0.0,
    };
    match part {
        Part::Head(_) => [[hidden + statistics, hidden + statistics + dx], [statistics, dx]],
        Part::Classes(_) => [[hidden + statistics, hidden + statistics], [statistics, dx]],
        Part::Stack(_) | Part::Embedding => {
            [[hidden, 2.0 * hidden + kept], [hidden + kept, hidden]]
        }
    }
}
