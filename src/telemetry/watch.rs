//! A snapshot of a run, as plain data, and the handle that takes it.

use std::sync::{Arc, Mutex, MutexGuard};

use l2l_actors::work::Lane;
use l2l_actors::{Observer, pool};
use serde::Serialize;

use super::ledger::Ledger;
use super::status::{FAULTS, RunStatus, unix_seconds};
use super::tally::DeviceTally;
use super::{Point, RankView, Slice, State, Tally, WaitCause};
use crate::fabric::Reports;
use crate::plan::Plan;
use crate::worker::Used;

/// A handle that shows a run, from any thread, also after its end.
#[derive(Clone)]
pub struct Watch(pub(crate) Arc<Watched>);

/// What is watched.
pub(crate) struct Watched {
    pub(crate) run: String,
    /// The devices' names, such as `cpu0`.
    pub(crate) devices: Vec<String>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) used: Arc<Used>,
    pub(crate) status: Mutex<RunStatus>,
    pub(crate) observer: Observer,
    pub(crate) plan: Arc<Plan>,
    /// What all ranks report, if there are several.
    pub(crate) reports: Option<Arc<Reports>>,
    pub(crate) link: Option<String>,
    /// Of each layer, whether the device meets it, and whether a block is its own.
    pub(crate) layers: Vec<(bool, bool)>,
    /// Bytes of the device that may be in use: the ceiling, or what the machine had.
    pub(crate) budget: u64,
    /// FLOP/s that the machine's product reaches, once it was measured.
    pub(crate) peak_flops: Mutex<Option<f64>>,
}

/// A run at one moment. Times are in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct RunView {
    /// The run's name.
    pub run: String,
    /// What it does now.
    pub state: State,
    /// When it began, in Unix time.
    pub started: f64,
    /// Now, in Unix time.
    pub now: f64,
    /// The age of its lanes.
    pub seconds: f64,
    /// Training steps done.
    pub step: u64,
    /// Training steps of the whole run.
    pub steps: u64,
    /// Training steps that were done before it resumed.
    pub resumed: u64,
    /// Of the last step.
    pub loss: Option<f64>,
    /// The loss of the last validation.
    pub validation_loss: Option<f64>,
    /// What the last validation of each set found: set, metric, value.
    pub measured: Vec<(String, &'static str, f64)>,
    /// Of the last step.
    pub grad_norm: Option<f64>,
    /// Of the last step, if there is one.
    pub loss_scale: Option<f64>,
    /// Steps of this process's run that changed nothing, as their gradients were not finite.
    pub skipped: u64,
    /// Of the last step.
    pub learning_rate: Option<f64>,
    /// Of the last step.
    pub step_seconds: Option<f64>,
    /// Of the last step.
    pub exposed_wait_seconds: Option<f64>,
    /// Of the last step.
    pub bottleneck: Option<&'static str>,
    /// When the last step ended, or else the run began, in Unix time.
    pub last_step: f64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Tokens a second in the last step.
    pub tokens_per_second: Option<f64>,
    /// See [`Model::training_flops`](crate::models::Model::training_flops).
    pub model_flops: f64,
    /// The last step's model FLOP/s ÷ those of the machine's product.
    pub speed_of_light: Option<f64>,
    /// FLOP/s of the machine's product, once it was measured.
    pub peak_flops: Option<f64>,
    /// When the last checkpoint was written, in Unix time.
    pub checkpoint: Option<f64>,
    /// When the run began, if it writes checkpoints.
    pub checkpoints_since: Option<f64>,
    /// Checkpoints that could not be written.
    pub checkpoint_failures: u64,
    /// Bytes of the last checkpoint, and bytes that its disk had free behind it.
    pub checkpoint_disk: Option<(u64, u64)>,
    /// What failed, by kind.
    pub faults: Vec<(&'static str, u64)>,
    /// The devices.
    pub devices: Vec<DeviceView>,
    /// The ranks of a run that has several.
    pub ranks: Vec<RankView>,
    /// The device's memory.
    pub device_memory: Vec<MemoryView>,
    /// Bytes of it that may be in use.
    pub device_budget: u64,
    /// The host's memory.
    pub host_memory: Vec<MemoryView>,
    /// Bytes to the device.
    pub bytes_uploaded: u64,
    /// Bytes from the device.
    pub bytes_downloaded: u64,
    /// Bytes that devices copied from each other.
    pub bytes_between_devices: u64,
    /// The emulated link.
    pub link: Option<String>,
    /// Pools of slots.
    pub channels: Vec<ChannelView>,
    /// Actors.
    pub actors: Vec<ActorView>,
    /// Lanes.
    pub lanes: Vec<LaneView>,
    /// The time that the compute lane waited within steps, by cause.
    pub waited: Vec<(&'static str, f64)>,
    /// Time outside steps.
    pub outside: f64,
    /// The part of it in which the run waited for a checkpoint.
    pub checkpoints: f64,
    /// Layers.
    pub layers: Vec<LayerView>,
    /// Loss by step, thinned out.
    pub losses: Vec<Point>,
    /// Validation loss by step.
    pub validations: Vec<Point>,
    /// True while every slice of training is still there.
    pub kept_all: bool,
    /// Slices of the last steps, if the caller asked for them.
    pub slices: Vec<Slice>,
    /// Number in the ring, begin and end of the last steps.
    pub bounds: Vec<(u64, f64, f64)>,
}

impl RunView {
    /// With the slices of one step alone: of those that are there whole, the one whose time is in
    /// the middle; with none, if none is.
    pub fn typical(mut self) -> RunView {
        let first = self.slices.first().map_or(0, |slice| slice.step);
        // Of a run's first step nothing is gone if nothing at all is.
        let is_whole =
            |(step, ..): &&(u64, f64, f64)| *step > first || (*step == 1 && self.kept_all);
        let mut whole: Vec<_> = self.bounds.iter().filter(is_whole).collect();
        whole.sort_by(|a, b| (a.2 - a.1).total_cmp(&(b.2 - b.1)));
        if let Some(&&(typical, ..)) = whole.get(whole.len() / 2) {
            self.slices.retain(|slice| slice.step == typical);
        } else {
            self.slices.clear();
        }
        self
    }
}

/// A holder of memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MemoryView {
    /// Its name in the plan.
    pub kind: &'static str,
    /// Bytes it uses at most, so far.
    pub used: u64,
    /// Bytes it has.
    pub planned: u64,
}

/// A pool of slots.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChannelView {
    /// Its name.
    pub name: &'static str,
    /// Slots in use.
    pub depth: usize,
    /// Slots in use at most, so far.
    pub peak: u32,
    /// Slots.
    pub capacity: usize,
}

/// An actor's time.
#[derive(Clone, Debug, Serialize)]
pub struct ActorView {
    /// Its name.
    pub name: String,
    /// It ran.
    pub busy: f64,
    /// It waited for whoever is before it.
    pub starved: f64,
    /// It waited for whoever is after it.
    pub blocked: f64,
}

/// A device's work.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceView {
    /// Its name, such as `cpu0`.
    pub name: String,
    /// The time that each of its lanes worked.
    pub lanes: Vec<(&'static str, f64)>,
    /// The time that its compute lane waited within steps, by cause.
    pub waited: Vec<(&'static str, f64)>,
}

/// A lane's work.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LaneView {
    /// Its name.
    pub name: &'static str,
    /// Time it worked.
    pub busy: f64,
    /// Operations.
    pub operations: u64,
}

/// A layer's work.
#[derive(Clone, Debug, Serialize)]
pub struct LayerView {
    /// Its index, padded so that layers sort.
    pub layer: String,
    /// True when the device computes it.
    pub on_device: bool,
    /// True when it is the first layer that uses a block.
    pub owns: bool,
    /// Time by phase and lane; of what it has.
    pub visits: Vec<(&'static str, &'static str, f64)>,
    /// Time of its transfers.
    pub transfer: f64,
    /// The time that the compute lane waited for its transfers.
    pub waited_transfer: f64,
    /// The time that the compute lane waited for anything else.
    pub waited_host: f64,
    /// The share of its transfers' time in which the compute lane worked.
    pub overlap: Option<f64>,
    /// Updates.
    pub updates: u64,
}

impl Watch {
    /// The run's name.
    pub fn run(&self) -> &str {
        &self.0.run
    }

    pub(crate) fn status(&self) -> MutexGuard<'_, RunStatus> {
        self.0.status.lock().expect("nothing panics inside")
    }

    /// Everything that was added up so far.
    pub fn tally(&self) -> Tally {
        self.0.ledger.tally(self.0.observer.now())
    }

    /// Sets the FLOP/s of the fastest matrix product on this device, to compare the run with.
    pub fn set_peak_flops(&self, flops_per_second: f64) {
        *self.0.peak_flops.lock().expect("nothing panics inside") = Some(flops_per_second);
    }

    /// The run ended well.
    pub(crate) fn set_ended(&self) {
        let mut status = self.status();
        if status.state != State::Failed {
            status.state = State::Ended;
        }
    }

    /// The run failed.
    pub(crate) fn set_failed(&self) {
        let mut status = self.status();
        if status.state != State::Failed {
            status.faults[1] += 1;
            status.state = State::Failed;
        }
    }

    /// The peak use of device memory, by the plan's terms.
    pub(crate) fn device_memory(&self) -> Vec<MemoryView> {
        let pools = self.0.observer.pools();
        // Of the device that used most.
        let peak = |name: &str| {
            let peaks = pools.iter().filter(|pool| pool.name == name).map(|pool| pool.peak);
            peaks.max().unwrap_or(0) as usize
        };
        let plan = &self.0.plan;
        let used = plan.regions.peaks(peak, self.0.used.workspace() as usize);
        let terms = used.into_iter().zip(&plan.device);
        terms
            .map(|(used, planned)| MemoryView {
                kind: planned.name,
                used: used.bytes,
                planned: planned.bytes,
            })
            .collect()
    }

    /// The run now, with slices of so many of its last steps.
    pub fn view(&self, steps: u64) -> RunView {
        let tally = self.tally();
        let slices = if steps > 0 { self.0.ledger.recent(steps) } else { Vec::new() };
        let status = self.status().clone();
        let last = status.last;
        let plan = &self.0.plan;
        let peak_flops = *self.0.peak_flops.lock().expect("nothing panics inside");
        let flops = last.map(|step| step.model_flops / step.seconds);
        let host = plan.host.iter();
        let digits = tally.layers.len().saturating_sub(1).to_string().len();
        let layers = tally.layers.iter().enumerate();
        let moved = self.0.used.all_links();
        RunView {
            run: self.0.run.clone(),
            state: status.state,
            started: status.started,
            now: unix_seconds(),
            seconds: self.0.observer.now().as_secs_f64(),
            step: status.step(),
            steps: status.steps,
            resumed: status.resumed,
            loss: last.map(|step| step.loss),
            validation_loss: status.validation_loss,
            measured: status.measured.clone(),
            grad_norm: last.map(|step| step.grad_norm),
            loss_scale: last.and_then(|step| step.loss_scale),
            skipped: status.skipped,
            learning_rate: last.map(|step| step.learning_rate),
            step_seconds: last.map(|step| step.seconds),
            exposed_wait_seconds: last.map(|step| step.exposed_wait_seconds),
            bottleneck: last.map(|step| step.bottleneck.name()),
            last_step: status.last_step.unwrap_or(status.started),
            tokens: status.tokens,
            tokens_per_second: last.map(|step| step.tokens as f64 / step.seconds),
            model_flops: status.model_flops,
            speed_of_light: flops.zip(peak_flops).map(|(flops, peak_flops)| flops / peak_flops),
            peak_flops,
            checkpoint: status.checkpoint,
            checkpoints_since: status.checkpoints_since,
            checkpoint_failures: status.checkpoint_failures,
            checkpoint_disk: status.checkpoint_disk,
            faults: FAULTS.into_iter().zip(status.faults).collect(),
            devices: devices(&self.0.devices, &tally),
            ranks: self.ranks(),
            device_memory: self.device_memory(),
            device_budget: self.0.budget,
            host_memory: host
                .map(|term| MemoryView { kind: term.name, used: term.bytes, planned: term.bytes })
                .collect(),
            bytes_uploaded: moved.upload,
            bytes_downloaded: moved.download,
            bytes_between_devices: moved.peers,
            link: self.0.link.clone(),
            channels: channels(&self.0.observer.pools()),
            actors: actors(self.0.observer.spent()),
            lanes: lanes(&tally).map(|track| lane(track, &tally)).collect(),
            waited: WaitCause::ALL
                .map(|cause| (cause.name(), tally.waited[cause as usize].as_secs_f64()))
                .into(),
            outside: tally.outside.as_secs_f64(),
            checkpoints: tally.checkpoints.as_secs_f64(),
            layers: layers
                .map(|(index, of)| layer(format!("{index:0digits$}"), self.0.layers[index], of))
                .collect(),
            losses: status.losses.points().to_vec(),
            validations: status.validation.points().to_vec(),
            kept_all: self.0.ledger.kept_all(),
            slices,
            bounds: status
                .bounds
                .iter()
                .map(|(step, begin, end)| (*step, begin.as_secs_f64(), end.as_secs_f64()))
                .collect(),
        }
    }
}

/// The lanes that every run has, and those of others that did something.
fn lanes(tally: &Tally) -> impl Iterator<Item = Lane> + Clone {
    let worked = Lane::ALL.map(|lane| tally.lanes[lane as usize].operations > 0);
    Lane::ALL.into_iter().filter(move |&lane| lane.is_always_there() || worked[lane as usize])
}

fn devices(names: &[String], tally: &Tally) -> Vec<DeviceView> {
    let of_device = lanes(tally).filter(|lane| lane.is_of_device());
    let view = |(name, of): (&String, &DeviceTally)| DeviceView {
        name: name.clone(),
        lanes: of_device
            .clone()
            .map(|lane| (lane.name(), of.lanes[lane as usize].busy.as_secs_f64()))
            .collect(),
        waited: WaitCause::ALL
            .map(|cause| (cause.name(), of.waited[cause as usize].as_secs_f64()))
            .into(),
    };
    names.iter().zip(&tally.devices).map(view).collect()
}

/// The pools by name, those of all devices in one.
fn channels(pools: &[pool::Occupancy]) -> Vec<ChannelView> {
    let mut channels: Vec<ChannelView> = Vec::new();
    for pool in pools {
        let name = if pool.name == "inputs" { "stash" } else { pool.name };
        let (depth, capacity) = (pool.holders.iter().flatten().count(), pool.holders.len());
        match channels.iter_mut().find(|channel| channel.name == name) {
            Some(channel) => {
                channel.depth += depth;
                channel.peak += pool.peak;
                channel.capacity += capacity;
            }
            None => channels.push(ChannelView { name, depth, peak: pool.peak, capacity }),
        }
    }
    channels
}

/// The actors by role, those of all devices in one.
fn actors(spent: Vec<(l2l_actors::ActorName, l2l_actors::meter::Spent)>) -> Vec<ActorView> {
    let mut actors: Vec<ActorView> = Vec::new();
    for (actor, spent) in spent {
        let name = actor.role();
        let [busy, starved, blocked] =
            [spent.busy, spent.starved, spent.blocked].map(|time| time.as_secs_f64());
        match actors.iter_mut().find(|view| view.name == name) {
            Some(view) => {
                view.busy += busy;
                view.starved += starved;
                view.blocked += blocked;
            }
            None => actors.push(ActorView { name: name.into(), busy, starved, blocked }),
        }
    }
    actors
}

fn lane(track: Lane, tally: &Tally) -> LaneView {
    let of = tally.lanes[track as usize];
    LaneView { name: track.name(), busy: of.busy.as_secs_f64(), operations: of.operations }
}

fn layer(name: String, is: (bool, bool), of: &super::LayerTally) -> LayerView {
    let (on_device, owns) = is;
    let lanes = [Lane::Upload, Lane::Compute, Lane::Download, Lane::Host].map(Lane::name);
    let mut visits = Vec::new();
    for (phase, times) in ["forward", "backward"].into_iter().zip(of.visits) {
        let times = lanes.into_iter().zip(times).filter(|(_, time)| !time.is_zero());
        visits.extend(times.map(|(lane, time)| (phase, lane, time.as_secs_f64())));
    }
    let (transfer, waited) = (of.transfer().as_secs_f64(), of.waited(true).as_secs_f64());
    LayerView {
        layer: name,
        on_device,
        owns,
        visits,
        transfer,
        waited_transfer: waited,
        waited_host: of.waited(false).as_secs_f64(),
        overlap: (transfer > 0.0).then(|| (1.0 - waited / transfer).max(0.0)),
        updates: of.updates,
    }
}
