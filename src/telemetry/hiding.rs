//! How many tokens a step needs so that transfers and updates hide under kernels, or why they never
//! do.
//!
//! While a phase computes, each lane moves blocks, whose bytes do not depend on the tokens, and
//! boundaries, whose bytes do. With `n` sequences a step a lane keeps up when
//! `blocks ÷ rate + n × boundaries ÷ rate ≤ n × compute`, summed over the layers: pools let one
//! layer's spare time serve the next. The slowest lane decides. Waits at the begin and the end of
//! a step are left out here; a [`Forecast`](super::Forecast) has them.

use l2l_actors::schedule::{Block, BlockId, BoundaryId, Cut, Phase, Schedule, Visit};
use l2l_actors::work::WorkKind;
use serde::Serialize;

use super::forecast::Rates;
use crate::config::{Config, EpsTier, ScheduleKind};
use crate::error::Error;
use crate::models::Model;
use crate::plan::{Plan, Purpose, RankShare, StepShape, StepSpec, most_positions, schedule_of};

/// The smallest step in which a config's lanes hide, and the lane that limits it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hiding {
    /// The lane that needs the most tokens.
    pub lane: &'static str,
    /// The phase in which it needs them.
    pub phase: &'static str,
    /// Tokens of a step; with several processes, of each. `None` if the lane never hides, because
    /// each token takes longer to move than to compute.
    pub tokens: Option<u64>,
}

/// The seconds that a lane works in a phase: `fixed` in any step, and `each` for a sequence.
#[derive(Clone, Copy, Debug, Default)]
struct Moves {
    fixed: f64,
    each: f64,
}

const LANES: [&str; 7] = ["upload", "download", "host", "update", "file", "fetch", "exchange"];

impl Hiding {
    /// Finds it for a config's schedule, with updates that are eager or deferred.
    ///
    /// # Errors
    /// There is no schedule for this config.
    pub fn of(
        config: &Config,
        model: &Model,
        plan: &Plan,
        rates: &Rates,
        deferred: bool,
    ) -> Result<Hiding, Error> {
        // In a relay of one sequence, or of one chunk of it, each layer has one visit forward and
        // one backward.
        let mut config = config.clone();
        config.schedule.kind = ScheduleKind::Relay;
        let most = most_positions(&config, model, Purpose::Train).unwrap_or(usize::MAX);
        let positions = plan.batch.positions.min(most);
        let step = StepShape { sequences: 1, positions, purpose: Purpose::Train };
        let share = RankShare::WHOLE;
        let step = StepSpec { file: None, share, may_stay: false, ..plan.step(step) };
        let schedule = schedule_of(&config, model, step)?;
        let rates = &rates.in_plan(model, plan);
        let on_file = config.eps.tier == EpsTier::File;
        let mut lanes = [[Moves::default(); LANES.len()]; 2];
        let mut compute = [0.0; 2];
        for visit in schedule.visits.iter().filter(|visit| visit.on_device()) {
            let backward = visit.phase == Phase::Backward;
            let phase = usize::from(backward);
            let launches = rates.fixed.of_compute(visit.layer.0, visit.phase);
            compute[phase] += rates.compute_of(visit.layer.0, visit.phase).unwrap_or(0.0)
                + launches / micro_batch(plan);
            let updates = Updates { deferred, on_file };
            for of in [moves, starts].map(|of| of(&schedule, visit, plan, rates, updates)) {
                for (lane, moves) in lanes[phase].iter_mut().zip(of) {
                    lane.fixed += moves.fixed;
                    lane.each += moves.each;
                }
            }
        }
        let needed = |(phase, lane): (usize, usize)| {
            let Moves { fixed, each } = lanes[phase][lane];
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
        let tokens = (sequences * positions as f64).ceil();
        Ok(Hiding {
            lane: LANES[lane],
            phase: ["forward", "backward"][phase],
            tokens: tokens.is_finite().then_some(tokens as u64),
        })
    }
}

/// The time of updates in a step, and the place of masters.
#[derive(Clone, Copy)]
struct Updates {
    deferred: bool,
    on_file: bool,
}

/// Sequences of the mean micro-batch of the plan's step.
fn micro_batch(plan: &Plan) -> f64 {
    let all = &plan.batch.micro_batches;
    f64::from(all.iter().sum::<u32>()) / all.len() as f64
}

/// The blocks that the host works at for a visit: once each, however many portions a block has.
fn of_host(visit: &Visit) -> impl Iterator<Item = BlockId> + Clone {
    let blocks = visit.blocks.iter().filter(move |_| visit.cut.is_none_or(|cut| cut == 0));
    blocks.copied()
}

/// The work of each of [`LANES`] for a visit of one sequence.
fn moves(
    schedule: &Schedule,
    visit: &Visit,
    plan: &Plan,
    rates: &Rates,
    Updates { deferred, on_file }: Updates,
) -> [Moves; LANES.len()] {
    let [up, down] = if plan.stash_on_device() { rates.on_device } else { rates.boundaries };
    // The part of a block that this process has; it receives the rest.
    let own = 1.0 / f64::from(plan.share().ranks);
    let portions = || visit.portions().map(|portion| schedule.cut(portion));
    let of_portions = |of: fn(Cut) -> u64| portions().map(of).sum::<u64>() as f64;
    let of_blocks = of_host(visit).map(|id| schedule.block(id));
    let sum = |of: fn(&Block) -> u64| of_blocks.clone().map(of).sum::<u64>() as f64;
    // The reference uses the uploads of the visit before its own.
    let uploads = f64::from(u8::from(visit.phase != Phase::Reference));
    let uploaded = uploads * of_portions(|cut| cut.weight_bytes);
    let landed = of_portions(|cut| cut.download_bytes);
    let merged = visit.cut.map_or(0.0, |_| of_portions(|cut| cut.gradient_bytes));
    let weights = uploads * sum(|block| block.weight_bytes);
    let master = uploads * sum(|block| block.master_bytes);
    let gradient = sum(|block| block.gradient_bytes);
    let state = sum(|block| block.state_bytes) / own;
    let older = sum(|block| block.older_bytes) / own;
    let dealt = sum(|block| block.reduce_scatter_bytes);
    let through = |boundaries: &[BoundaryId]| -> f64 {
        let positions = schedule.positions.into();
        let bytes = |&id: &BoundaryId| schedule.boundary(id).stashed_bytes(1, positions) as f64;
        boundaries.iter().map(bytes).sum()
    };
    let backward = visit.phase == Phase::Backward;
    // Deferred updates run under the next forward pass.
    let updates = uploads * f64::from(u8::from(deferred != backward));
    let lands = f64::from(u8::from(backward));
    let waits = f64::from(u8::from(deferred)) * gradient;
    // Blocks that are frozen are not written.
    let is_written = updates * f64::from(u8::from(gradient > 0.0));
    // A gradient that waits is written by the backward pass, and read by the update.
    let read = master + is_written * (master + state) + (1.0 - lands) * waits;
    let written = is_written * (master + state + older) + lands * waits;
    let file = read / rates.file[0] + written / rates.file[1];
    let fixed = |fixed: f64| Moves { fixed, each: 0.0 };
    [
        Moves { fixed: uploaded / rates.link[0], each: through(&visit.reads) / up },
        Moves { fixed: lands * landed / rates.link[1], each: through(&visit.writes) / down },
        fixed(lands * (merged + waits * own) / rates.reduce),
        fixed(updates * gradient * own / rates.update),
        fixed(if on_file { file * own } else { 0.0 }),
        fixed(weights * (1.0 - own) / rates.fabric),
        fixed(lands * dealt * (1.0 - own) / rates.fabric),
    ]
}

/// What the operations of [`moves`] take whatever their size.
fn starts(
    schedule: &Schedule,
    visit: &Visit,
    plan: &Plan,
    rates: &Rates,
    Updates { deferred, on_file }: Updates,
) -> [Moves; LANES.len()] {
    let backward = visit.phase == Phase::Backward;
    let portions = visit.portions().map(|portion| schedule.cut(portion));
    let landings = portions.filter(|cut| backward && cut.gradient_bytes > 0).count();
    let blocks = || of_host(visit).map(|id| schedule.block(id));
    let uploads = visit.phase != Phase::Reference;
    let masters = if uploads { blocks().count() } else { 0 };
    let trained = blocks().filter(|block| block.gradient_bytes > 0).count();
    let landed = if backward { trained } else { 0 };
    let updated = if uploads && deferred != backward { trained } else { 0 };
    let waiting = if deferred { landed } else { 0 };
    let has_others = plan.share().ranks > 1;
    let of = |kind: WorkKind, count: usize| count as f64 * rates.fixed.of(kind);
    let fixed = |kind, count: usize| Moves { fixed: of(kind, count), each: 0.0 };
    let when = |is: bool, moves: Moves| if is { moves } else { Moves::default() };
    let each = |kind, of_visit: &[BoundaryId]| of(kind, of_visit.len()) / micro_batch(plan);
    let read = of(WorkKind::Read, masters + updated);
    let written = of(WorkKind::Write, updated + waiting);
    [
        Moves {
            each: each(WorkKind::Input, &visit.reads),
            ..fixed(WorkKind::Weights, if uploads { visit.blocks.len() } else { 0 })
        },
        Moves {
            each: each(WorkKind::Output, &visit.writes),
            ..fixed(WorkKind::Gradient, landings)
        },
        fixed(WorkKind::Reduce, waiting + visit.cut.map_or(0, |_| landings)),
        fixed(WorkKind::Update, updated),
        when(on_file, Moves { fixed: read + written, each: 0.0 }),
        when(has_others, fixed(WorkKind::Fetch, masters)),
        when(has_others, fixed(WorkKind::Exchange, landed)),
    ]
}
