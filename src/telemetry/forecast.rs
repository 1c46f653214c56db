//! Forecasts the time of a config's step: the real actors run its real schedule in virtual time,
//! and rates give each operation its duration.

use std::collections::{BTreeSet, HashMap};
use std::iter;
use std::time::Duration;

use l2l_actors::schedule::{LayerId, Phase, Share};
use l2l_actors::virtual_time::{Cost, JoinedRing};
use l2l_actors::work::{Lane, Work, WorkKind};
use l2l_actors::{Operation, Record, Relay, RingError};

use super::chunk_costs::ChunkCosts;
use super::critical::bound;
use super::fixed::Fixed;
use super::machine::Sharing;
use super::{LayerTally, Ledger, Slice, SliceKind, Tally, WaitCause};
use crate::config::{Config, StashPlace};
use crate::engine::ring_config;
use crate::error::Error;
use crate::models::{BlockTensors, LayerSelection, Model, Save};
use crate::plan::{Plan, Purpose, RankShare, StepShape, StepSpec, schedule_of, share_of_piece};
use crate::resolve::shape_of;

/// The speed of each lane. Times are in seconds, rates in bytes a second.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// Seconds of one sequence in a layer and a phase; of the mean chunk if sequences are cut.
    pub(super) compute: HashMap<(u32, Phase), f64>,
    /// The chunks that a sequence was cut into.
    pub(super) chunks: usize,
    /// The layers whose seconds are those without recomputation.
    pub(super) kept: BTreeSet<LayerId>,
    /// The rate of blocks to the device, and of gradients from it.
    pub(super) link: [f64; 2],
    /// The rate of copies between devices.
    pub(super) peers: f64,
    /// The rates of boundaries to the device, and from it, if the stash is on the host.
    pub(super) boundaries: [f64; 2],
    /// The rates of boundaries from the stash to the slots, and back, if the stash is on the
    /// device.
    pub(super) on_device: [f64; 2],
    /// Seconds of one sequence, or of a chunk, on the host lane: gathers and losses.
    pub(super) host: f64,
    /// The rate of sums of gradients, and of scatters.
    pub(super) reduce: f64,
    /// The rate of updates.
    pub(super) update: f64,
    /// The rates of reads of the EPS's file, and of writes.
    pub(super) file: [f64; 2],
    /// The rate at which data come from the other processes of a run, on each of the two lanes of
    /// exchanges.
    pub(super) fabric: f64,
    /// What operations take whatever their size.
    pub(super) fixed: Fixed,
    /// What lanes share; `None`: nothing.
    pub(super) sharing: Option<Sharing>,
}

/// The phases of a layer.
pub(super) const PHASES: [Phase; 3] = [Phase::Forward, Phase::Keys, Phase::Backward];

impl Rates {
    /// Seconds of one sequence in a layer, forward or backward.
    pub(super) fn compute_of(&self, layer: u32, phase: Phase) -> Option<f64> {
        let phase = if phase == Phase::Reference { Phase::Forward } else { phase };
        self.compute.get(&(layer, phase)).copied()
    }

    /// Replaces the rate of the disk under the EPS's file, in bytes a second.
    #[must_use]
    pub fn with_disk(self, rate: f64) -> Rates {
        Rates { file: [rate; 2], ..self }
    }

    /// Replaces the rate of the fabric, in bytes a second.
    #[must_use]
    pub fn with_fabric(self, rate: f64) -> Rates {
        Rates { fabric: rate, ..self }
    }

    /// Takes what operations share into account.
    pub(super) fn with_sharing(self, sharing: Sharing) -> Rates {
        Rates { sharing: Some(sharing), ..self }
    }

    /// Takes rates from the slices of whole steps of this config, and those that no slice shows
    /// from `else_by`.
    pub fn measured(
        slices: &[Slice],
        config: &Config,
        model: &Model,
        plan: &Plan,
        else_by: Rates,
    ) -> Rates {
        let mut rates = else_by;
        let set = |rate: &mut f64, kind: WorkKind| {
            let Sums { seconds, bytes, .. } = Sums::of(slices, &[kind]);
            if seconds > 0.0 && bytes > 0.0 {
                *rate = bytes / seconds;
            }
        };
        set(&mut rates.link[0], WorkKind::Weights);
        set(&mut rates.link[1], WorkKind::Gradient);
        set(&mut rates.peers, WorkKind::Shards);
        let boundaries = match config.stash.place {
            StashPlace::Device => &mut rates.on_device,
            StashPlace::Auto | StashPlace::Host => &mut rates.boundaries,
        };
        set(&mut boundaries[0], WorkKind::Input);
        set(&mut boundaries[1], WorkKind::Output);
        if config.stash.place == StashPlace::Device {
            rates.boundaries = rates.link;
        }
        rates.measure_sequences(slices, plan);
        let gradients = model.blocks.iter().map(BlockTensors::gradient_bytes);
        let gradients: Vec<u64> = gradients.collect();
        let largest = gradients.iter().copied().max().unwrap_or(0);
        let reduces = &[WorkKind::Reduce, WorkKind::Scatter][..];
        let updates = &[WorkKind::Update][..];
        for (rate, kinds) in [(&mut rates.reduce, reduces), (&mut rates.update, updates)] {
            let of_kind =
                slices.iter().filter(|slice| kinds.iter().any(|&kind| slice.kind == kind));
            let bytes = of_kind.map(|slice| slice.block.map_or(largest, |b| gradients[b as usize]));
            let bytes: u64 = bytes.sum();
            let Sums { seconds, .. } = Sums::of(slices, kinds);
            if seconds > 0.0 && bytes > 0 {
                *rate = bytes as f64 / seconds;
            }
        }
        rates
    }

    /// Takes the seconds of one sequence, in each layer and on the host lane, from slices.
    fn measure_sequences(&mut self, slices: &[Slice], plan: &Plan) {
        let sequences = |slice: &Slice| {
            let micro_batch = slice.micro_batch.map_or(0, |m| m as usize);
            plan.batch.micro_batches.get(micro_batch).map_or(1.0, |&count| f64::from(count))
        };
        let mut layers: HashMap<(u32, Phase), PerSequence> = HashMap::new();
        let mut host = PerSequence::default();
        for slice in slices {
            match (slice.lane, slice.kind, slice.layer) {
                (Lane::Compute, _, Some(layer)) => {
                    let phase = match slice.phase {
                        _ if slice.kind == WorkKind::Keys => Phase::Keys,
                        Some("backward") => Phase::Backward,
                        _ => Phase::Forward,
                    };
                    layers.entry((layer, phase)).or_default().add(slice, sequences(slice));
                }
                (_, SliceKind::Work(WorkKind::Gather), _) => host.add(slice, sequences(slice)),
                _ => {}
            }
        }
        for ((layer, phase), sum) in layers {
            self.compute.insert((layer, phase), sum.mean());
            if plan.kept.contains(&LayerId(layer)) {
                self.kept.insert(LayerId(layer));
            }
        }
        if host.sequences > 0.0 {
            self.host = host.mean();
        }
    }

    /// The same rates in a plan whose chunks may have another length, and whose layers may keep
    /// other activations. The seconds of a backward pass, and of its launches, change as its FLOPs
    /// do.
    pub(super) fn in_plan(&self, model: &Model, plan: &Plan) -> Rates {
        let mut rates = self.clone();
        rates.chunks = plan.chunks(model);
        let shorter = self.chunks as f64 / rates.chunks as f64;
        rates.compute.values_mut().for_each(|seconds| *seconds *= shorter);
        rates.host *= shorter;
        for &layer in self.kept.symmetric_difference(&plan.kept) {
            let flops = |save| {
                let positions = iter::once(0..plan.batch.positions);
                model.visit_flops(layer.0 as usize, Phase::Backward, positions, save)
            };
            let kept = flops(Some(Save::All));
            let recomputed = flops(None);
            let keeps = plan.kept.contains(&layer);
            // A layer without products has no FLOPs.
            let ratio = if keeps { kept / recomputed } else { recomputed / kept };
            let ratio = if ratio.is_finite() { ratio } else { 1.0 };
            for of in [&mut rates.compute, &mut rates.fixed.compute] {
                of.get_mut(&(layer.0, Phase::Backward)).into_iter().for_each(|one| *one *= ratio);
            }
        }
        rates.kept = plan.kept.clone();
        rates
    }

    /// What an operation costs.
    fn cost(&self, operation: &Operation, of: &StepCosts) -> Cost {
        let alone = self.time(operation, of);
        let Some(sharing) = self.sharing else { return alone.into() };
        let row = operation.work().row();
        let bytes = row.bytes(&operation.step().plan.schedule) as f64;
        let uses = sharing.uses(row.kind, operation.device(), bytes / alone.as_secs_f64());
        Cost { alone, uses }
    }

    /// The time of an operation that runs alone.
    fn time(&self, operation: &Operation, of: &StepCosts) -> Duration {
        let plan = &operation.step().plan;
        let row = operation.work().row();
        let bytes = row.bytes(&plan.schedule) as f64;
        let sequences = |m: u32| f64::from(plan.schedule.micro_batches[m as usize]);
        let boundaries = if of.on_device { self.on_device } else { self.boundaries };
        let largest = || plan.schedule.blocks.iter().map(|block| block.gradient_bytes).max();
        let ranks = f64::from(plan.schedule.ranks.count);
        let own = match *operation.work() {
            Work::Join { portion, .. } => Some(plan.schedule.cut(portion).gradient_bytes),
            _ => row.block().map(|id| plan.schedule.block(id).gradient_bytes),
        };
        let block = || own.or_else(largest).unwrap_or(0) as f64 / ranks;
        let seconds = match (row.kind, operation.work()) {
            (WorkKind::Weights, _) => bytes / self.link[0],
            (WorkKind::Shards, _) => bytes / self.peers,
            (WorkKind::Gradient, _) => bytes / self.link[1],
            (WorkKind::Input, _) => bytes / boundaries[0],
            (WorkKind::Output, _) => bytes / boundaries[1],
            (_, &Work::Compute { device_visit, micro_batch, phase, .. }) => {
                let visit = plan.visit(device_visit);
                let layer = visit.layer.0;
                let mean = self.compute_of(layer, phase).unwrap_or(0.0) * sequences(micro_batch);
                let piece = share_of_piece(&plan.schedule, visit);
                mean * piece * of.chunks.share(&plan.schedule, micro_batch, visit)
                    + self.fixed.of_compute(layer, phase)
            }
            (_, &Work::Gather { visit, share: Share::Block(_), .. }) => {
                let visit = &plan.schedule.visits[visit];
                let all: u32 = plan.schedule.micro_batches.iter().sum();
                self.host * f64::from(all) / visit.blocks.len() as f64
            }
            (_, &Work::Gather { share: Share::MicroBatch(micro_batch), .. })
            | (_, &Work::Measure { micro_batch, .. })
            | (_, &Work::Answer { micro_batch, .. })
            | (_, &Work::Loss { micro_batch, .. }) => self.host * sequences(micro_batch),
            // Processes merge whole gradients before they exchange them.
            (_, &Work::Merge { portion, .. }) => {
                plan.schedule.cut(portion).gradient_bytes as f64 / self.reduce
            }
            (WorkKind::Reduce | WorkKind::Scatter, _) => block() / self.reduce,
            (WorkKind::Read, _) => bytes / self.file[0],
            (WorkKind::Write, _) => bytes / self.file[1],
            (WorkKind::Update, _) => block() / self.update,
            (_, &Work::AllGatherRows { visit }) => {
                let schedule = &plan.schedule;
                let own = u64::from(schedule.micro_batches.iter().sum::<u32>());
                let others = (of.sequences * self.chunks as u64).saturating_sub(own);
                let tokens = others * u64::from(schedule.positions);
                let reads = schedule.visits[visit].reads.iter();
                let bytes = reads.map(|&id| schedule.boundary(id).stashed_bytes(others, tokens));
                bytes.sum::<u64>() as f64 / self.fabric
            }
            (WorkKind::Fetch | WorkKind::Exchange, _) => bytes / self.fabric,
            _ => 0.0,
        };
        Duration::try_from_secs_f64(seconds + self.fixed.of(row.kind)).unwrap_or(ENDLESS)
    }
}

/// What the costs of a step's operations depend on beside its schedule.
struct StepCosts {
    chunks: ChunkCosts,
    /// True if the stash is on the device.
    on_device: bool,
    /// Sequences of the step, of all processes.
    sequences: u64,
}

/// Operations of some kinds, added up.
#[derive(Default)]
struct Sums {
    seconds: f64,
    bytes: f64,
}

impl Sums {
    fn of(slices: &[Slice], kinds: &[WorkKind]) -> Sums {
        let mut sums = Sums::default();
        for slice in slices.iter().filter(|slice| kinds.iter().any(|&kind| slice.kind == kind)) {
            sums.seconds += slice.took().as_secs_f64();
            sums.bytes += slice.bytes as f64;
        }
        sums
    }
}

/// The time that operations took, and the sequences that they were for.
#[derive(Default)]
struct PerSequence {
    seconds: f64,
    sequences: f64,
}

impl PerSequence {
    fn add(&mut self, slice: &Slice, sequences: f64) {
        self.seconds += slice.took().as_secs_f64();
        self.sequences += sequences;
    }

    fn mean(&self) -> f64 {
        self.seconds / self.sequences
    }
}

/// Stands for durations that are not finite; longer than any run.
const ENDLESS: Duration = Duration::from_secs(1 << 32);

/// A step in virtual time.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Seconds from the end of one step to the end of the next, once the ring is warm.
    pub seconds: f64,
    /// The operations of that step.
    pub slices: Vec<Slice>,
    /// The sums over all steps that the forecast ran.
    pub tally: Tally,
    /// The waits of that step, the longest first.
    pub waits: Vec<Wait>,
    /// The lanes of that step's critical path, and their shares of it, the largest first.
    pub bound: Vec<(Lane, f64)>,
    /// The number of devices.
    pub devices: u32,
}

/// The time in a step in which compute lanes were idle at one layer for one cause.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wait {
    /// The index of the layer in the model.
    pub layer: usize,
    /// What they waited for.
    pub cause: WaitCause,
    /// Seconds, the mean over the devices.
    pub seconds: f64,
}

/// Steps that a forecast runs. In the first the ring is cold.
const STEPS: usize = 3;

impl Forecast {
    /// Seconds of that step in which a compute lane was idle, the mean over the devices.
    pub fn exposed_seconds(&self) -> f64 {
        let busy = self.slices.iter().filter(|slice| slice.lane == Lane::Compute).map(Slice::took);
        let busy = busy.sum::<Duration>().as_secs_f64() / f64::from(self.devices);
        (self.seconds - busy).max(0.0)
    }

    /// Forecasts a config's step of the longest sequences, with the layers that a run begins with.
    ///
    /// # Errors
    /// There is no schedule or no plan for this config.
    pub fn of(config: &Config, model: &Model, rates: &Rates) -> Result<Forecast, Error> {
        Forecast::of_plan(config, model, &Plan::new(config, model, &config.update_rule())?, rates)
    }

    /// Forecasts a step of a plan for this config. The plan may be that of one of several
    /// processes. The others have the same rates, and those with other groups have rings of their
    /// own: an exchange waits for all of them.
    ///
    /// # Errors
    /// There is no schedule for this config.
    pub fn of_plan(
        config: &Config,
        model: &Model,
        plan: &Plan,
        rates: &Rates,
    ) -> Result<Forecast, Error> {
        let sequences = model.sequences_of(config.records_of_window());
        let kinds = plan.share().kinds(config, sequences)?;
        Forecast::of_shares(config, model, plan, rates, &kinds)
    }

    /// Forecasts a step of a plan, beside rings of these other ranks.
    pub(super) fn of_shares(
        config: &Config,
        model: &Model,
        plan: &Plan,
        rates: &Rates,
        others: &[RankShare],
    ) -> Result<Forecast, Error> {
        let mut rings = vec![ring_of(config, model, plan, rates)?];
        for &share in others {
            let plan = Plan::of_rank(config, model, &config.update_rule(), share)?;
            rings.push(ring_of(config, model, &plan, rates)?);
        }
        let run = JoinedRing::run(rings);
        let mut run = run.map_err(|actors| {
            Error::system(format_args!("virtual time stood still: {actors:?}"))
        })?;
        let (ended, records) = run.swap_remove(0);
        let ends = ended?;
        Ok(Forecast::of_records(&records, &ends, model.layers.len(), config.devices()))
    }

    fn of_records(records: &[Record], ends: &[Duration], layers: usize, devices: u32) -> Forecast {
        let ledger = Ledger::new(layers, devices, Vec::new());
        ledger.begins(Duration::ZERO, 0, true);
        let mut slices = Vec::new();
        let mut before = Tally::default();
        let mut resolved = ends.iter().copied().peekable();
        for record in records {
            while let Some(end) = resolved.next_if(|&end| end < record.end) {
                ledger.resolves(end);
                // Records of the last step may end after it, so the loop may see all ends.
                if end <= ends[STEPS - 2] {
                    before = ledger.tally(end);
                }
                ledger.begins(end, 0, true);
            }
            let slice = Slice::of(record);
            ledger.heard(&slice);
            if record.step as usize == STEPS - 1 {
                slices.push(slice);
            }
        }
        resolved.for_each(|end| ledger.resolves(end));
        let seconds = (ends[STEPS - 1] - ends[STEPS - 2]).as_secs_f64();
        let tally = ledger.tally(ends[STEPS - 1]);
        let waits = waits(&before, &tally);
        let bound = bound(records, ends[STEPS - 2], ends[STEPS - 1]);
        Forecast { seconds, slices, tally, waits, bound, devices }
    }
}

/// The ends of a ring's steps.
type Ends = Result<Vec<Duration>, RingError>;

/// The ring of a plan, with its own schedule.
fn ring_of(
    config: &Config,
    model: &Model,
    plan: &Plan,
    rates: &Rates,
) -> Result<JoinedRing<Ends>, Error> {
    let sequences = model.sequences_of(config.records_of_window());
    let step = StepShape { sequences, positions: plan.batch.positions, purpose: Purpose::Train };
    let begins_with = match config.model.max_layers {
        Some(_) => LayerSelection::of((0..shape_of(config)?.layers).collect::<Vec<_>>()),
        None => LayerSelection::default(),
    };
    let step = StepSpec { layers: Some(&begins_with), ..plan.step(step) };
    let schedule = schedule_of(config, model, step)?;
    let rates = rates.in_plan(model, plan);
    let costs = StepCosts {
        chunks: ChunkCosts::of(model, plan, &schedule),
        on_device: plan.stash_on_device(),
        sequences: sequences as u64,
    };
    let mut ring = ring_config(config, model, plan, 0, None);
    ring.delay_from = ring.delay_from.map(|_| 0); // a step behind the first ones
    Ok(JoinedRing::new(
        ring,
        move |operation| rates.cost(operation, &costs),
        async move |mut relay: Relay<_>| {
            let observer = relay.observer();
            let plan = relay.plan(schedule)?;
            let mut ends = Vec::new();
            for _ in 0..STEPS {
                relay.step(plan.clone(), ()).await?;
                ends.push(observer.now());
            }
            relay.stop().await?;
            Ok(ends)
        },
    ))
}

/// The waits between two tallies, the longest first.
fn waits(before: &Tally, tally: &Tally) -> Vec<Wait> {
    let none = LayerTally::default();
    let mut waits = Vec::new();
    for (layer, of) in tally.layers.iter().enumerate() {
        let before = before.layers.get(layer).unwrap_or(&none);
        for cause in WaitCause::ALL {
            let time = of.waited[cause as usize].saturating_sub(before.waited[cause as usize]);
            waits.push(Wait { layer, cause, seconds: time.as_secs_f64() });
        }
    }
    waits.retain(|wait| wait.seconds > 0.0);
    waits.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    waits
}
