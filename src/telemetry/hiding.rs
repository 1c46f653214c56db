//! How many tokens a step needs so that transfers and updates hide under kernels, or why they never
//! do.
//!
//! While a phase computes, its lanes move blocks, whose bytes do not depend on the tokens, and
//! boundaries, whose bytes do. With `n` sequences a step a lane keeps up when
//! `blocks ÷ rate + n × boundaries ÷ rate ≤ n × compute`, summed over the layers: pools let one
//! layer's spare time serve the next. The slowest lane decides. A [`Forecast`](super::Forecast)
//! shows what the begin and the end of a step leave exposed.

use l2l_actors::schedule::{Block, BoundaryId, Phase};
use serde::Serialize;

use super::forecast::Rates;
use crate::config::{Config, EpsTier, ScheduleKind};
use crate::error::Error;
use crate::models::Model;
use crate::plan::{Plan, Purpose, RankShare, StepShape, StepSpec, schedule_of};

/// What a step needs for its lanes to hide.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hiding {
    /// The lane that asks for most.
    pub lane: &'static str,
    /// The phase in which it does.
    pub phase: &'static str,
    /// Tokens a step, of several processes for each; `None`: it never hides, for each token takes
    /// longer to move than to compute.
    pub tokens: Option<u64>,
}

/// What a lane moves in a phase: seconds whatever the tokens, and for each sequence.
#[derive(Clone, Copy, Debug, Default)]
struct Moves {
    fixed: f64,
    each: f64,
}

const LANES: [&str; 7] = ["upload", "download", "host", "update", "file", "fetch", "exchange"];

impl Hiding {
    /// Of a config's schedule, with updates that are eager or deferred.
    ///
    /// # Errors
    /// The schedule cannot be.
    pub fn of(
        config: &Config,
        model: &Model,
        plan: &Plan,
        rates: &Rates,
        deferred: bool,
    ) -> Result<Hiding, Error> {
        let on_file = config.eps.tier == EpsTier::File;
        let [up, down] = if plan.stash_on_device { rates.on_device } else { rates.boundaries };
        let (mut shares, mut compute) = ([[Moves::default(); LANES.len()]; 2], [0.0; 2]);
        // One sequence: each layer is visited once each way, in whatever order.
        let mut config = config.clone();
        config.schedule.kind = ScheduleKind::Relay;
        let (positions, purpose) = (plan.positions, Purpose::Train);
        let step = StepShape { sequences: 1, positions, purpose };
        let step = StepSpec { file: None, share: RankShare::WHOLE, ..plan.step(step) };
        let schedule = schedule_of(&config, model, step)?;
        // What this process has of a block, of which it receives the rest.
        let own = 1.0 / f64::from(plan.share().ranks);
        for visit in schedule.visits.iter().filter(|visit| visit.on_device()) {
            let backward = visit.phase == Phase::Backward;
            let at = usize::from(backward);
            compute[at] += rates.compute_of(visit.layer.0, backward).unwrap_or(0.0);
            let of_blocks = visit.blocks.iter().map(|&id| schedule.block(id));
            let sum = |of: fn(&Block) -> u64| of_blocks.clone().map(of).sum::<u64>() as f64;
            let (weights, master) =
                (sum(|block| block.weight_bytes), sum(|block| block.master_bytes));
            let (gradient, state) =
                (sum(|block| block.gradient_bytes), sum(|block| block.state_bytes) / own);
            let (landed, dealt) =
                (sum(|block| block.download_bytes), sum(|block| block.reduce_scatter_bytes));
            let through = |boundaries: &[BoundaryId]| -> f64 {
                let bytes = |&id: &BoundaryId| schedule.boundary(id).stashed_bytes(1, schedule.positions.into()) as f64;
                boundaries.iter().map(bytes).sum()
            };
            // Deferred updates run under the next forward.
            let updates = f64::from(u8::from(deferred != backward));
            let lands = f64::from(u8::from(backward));
            let waits = f64::from(u8::from(deferred)) * gradient;
            // Blocks that are frozen are not written.
            let is_written = updates * f64::from(u8::from(gradient > 0.0));
            let file = master + is_written * 2.0 * (master + state) + waits;
            let moved = [
                (weights / rates.link[0], through(&visit.reads) / up),
                (lands * landed / rates.link[1], through(&visit.writes) / down),
                (lands * waits * own / rates.reduce, 0.0),
                (updates * gradient * own / rates.update, 0.0),
                (if on_file { file * own / rates.file } else { 0.0 }, 0.0),
                (weights * (1.0 - own) / rates.fabric, 0.0),
                (lands * dealt * (1.0 - own) / rates.fabric, 0.0),
            ];
            for (share, (fixed, each)) in shares[at].iter_mut().zip(moved) {
                share.fixed += fixed;
                share.each += each;
            }
        }
        let needed = |(phase, lane): (usize, usize)| {
            let Moves { fixed, each } = shares[phase][lane];
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
        Ok(Hiding {
            lane: LANES[lane],
            phase: ["forward", "backward"][phase],
            tokens: tokens.is_finite().then_some(tokens as u64),
        })
    }
}
