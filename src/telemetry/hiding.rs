//! From how many tokens a step on transfers and updates hide under kernels, or why they never will.
//!
//! A visit of a layer computes for as long as it has tokens; what must pass meanwhile is a block for the
//! layer behind it, whatever the tokens, and boundaries of each token. With `n` sequences a visit, a
//! lane keeps up when `block ÷ rate + n × boundary ÷ rate ≤ n × compute`. The layer that asks for most
//! decides. Pools smooth this over a few layers, so it is an upper bound; a
//! [`Forecast`](super::Forecast) runs the schedule.

use serde::Serialize;

use super::forecast::Rates;
use crate::config::{Config, EpsTier, Plan};
use crate::models::{Model, Part, block_len};

/// What a step needs for a lane to hide.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hiding {
    /// The lane that asks for most.
    pub lane: &'static str,
    /// The layer and phase where it does.
    pub at: String,
    /// Tokens a step; `None`: it never hides, for each token brings more to move than to compute.
    pub tokens: Option<u64>,
}

/// One lane's share of a visit: seconds whatever the tokens, and for each sequence.
struct Share {
    lane: &'static str,
    fixed: f64,
    each: f64,
}

impl Hiding {
    /// Of a config's schedule, with updates that are eager or deferred.
    pub fn of(
        config: &Config,
        model: &Model,
        plan: &Plan,
        rates: &Rates,
        deferred: bool,
    ) -> Hiding {
        const FLOAT: f64 = size_of::<f32>() as f64;
        let bytes = |index: usize| -> f64 {
            let blocks = model.part_blocks[index].iter();
            blocks.map(|id| block_len(&model.blocks[id.0 as usize]) as f64 * FLOAT).sum()
        };
        let on_file = config.eps.tier == EpsTier::File;
        let states = 1.0 + plan.states as f64;
        let sent = |boundaries: f64, rate: f64| boundaries / rate;
        let [up, down] = if plan.stash_on_device { rates.on_device } else { rates.boundaries };
        let mut most: Option<(f64, Hiding)> = None;
        let last = model.parts.len() - 1;
        for (index, part) in model.parts.iter().enumerate() {
            if matches!(part, Part::Embedding) {
                continue;
            }
            let [read, written] = boundaries(config, model, plan, part);
            for backward in [false, true] {
                let Some(compute) = rates.compute_of(index as u32, backward) else { continue };
                // The block of the visit behind this one comes meanwhile.
                let next = match (backward, index) {
                    (false, index) if index == last => 0.0,
                    (false, index) => bytes(index + 1),
                    (true, 0 | 1) => 0.0,
                    (true, index) => bytes(index - 1),
                };
                let own = bytes(index);
                let mut shares = vec![
                    Share {
                        lane: "upload",
                        fixed: next / rates.link[0],
                        each: sent(read[usize::from(backward)], up),
                    },
                    Share {
                        lane: "download",
                        fixed: if backward { own / rates.link[1] } else { 0.0 },
                        each: sent(written[usize::from(backward)], down),
                    },
                ];
                // Deferred updates run under the next forward.
                let updates = deferred != backward;
                let mut share = |lane, fixed| shares.push(Share { lane, fixed, each: 0.0 });
                if updates {
                    share("update", own / rates.update);
                }
                if deferred && backward {
                    share("host", own / rates.reduce);
                }
                if on_file {
                    let waits = f64::from(u8::from(deferred)) * own;
                    let moved = if updates { 2.0 * states * own + waits } else { waits };
                    share("file", (next + moved) / rates.file);
                }
                for Share { lane, fixed, each } in shares {
                    let spare = compute - each;
                    let needed = match fixed {
                        0.0 if spare >= 0.0 => 0.0,
                        _ if spare <= 0.0 => f64::INFINITY,
                        fixed => fixed / spare,
                    };
                    if most.as_ref().is_none_or(|(found, _)| *found < needed) {
                        let tokens = (needed * plan.positions as f64).ceil();
                        let tokens = tokens.is_finite().then_some(tokens as u64);
                        let phase = if backward { "backward" } else { "forward" };
                        let at = format!("layer {index} {phase}");
                        most = Some((needed, Hiding { lane, at, tokens }));
                    }
                }
            }
        }
        most.map(|(_, hiding)| hiding).expect("a model has a layer on the device")
    }
}

/// Bytes of a sequence that a layer's visits read and write through the stash, forward and backward.
fn boundaries(config: &Config, model: &Model, plan: &Plan, part: &Part) -> [[f64; 2]; 2] {
    let keep = config.schedule.recompute.keep();
    let positions = plan.positions;
    let ring = model.for_ring(positions, keep.unwrap_or(crate::models::Keep::All), 0);
    let hidden = match config.stash.dtype {
        crate::config::StashDtype::F32 => ring.hidden.stashed_per_sequence,
        crate::config::StashDtype::Bf16 => ring.hidden.stashed_per_sequence / 2,
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
