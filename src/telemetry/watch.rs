//! A snapshot of a run, as plain data, and the handle that takes it.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use l2l_actors::work::Lane;
use l2l_actors::{Observer, pool};
use serde::Serialize;

use super::ledger::Ledger;
use super::routers::{self, RouterView};
use super::status::{FAULTS, RunStatus, unix_seconds};
use super::tally::{DeviceTally, LayerTally};
use super::{Point, RankView, Slice, State, Tally, WaitCause};
use crate::fabric::Reports;
use crate::plan::{Plan, Term};
use crate::worker::Used;

/// A handle that takes views of a run, from any thread, also after the run's end.
#[derive(Clone)]
pub struct Watch(pub(crate) Arc<Watched>);

/// The sources of a view.
pub(crate) struct Watched {
    pub(crate) run: String,
    /// The devices' names, such as `cpu0`.
    pub(crate) devices: Vec<String>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) used: Arc<Used>,
    pub(crate) status: Mutex<RunStatus>,
    pub(crate) observer: Observer,
    pub(crate) plan: Arc<Plan>,
    /// The reports of all ranks, if there are several.
    pub(crate) reports: Option<Arc<Reports>>,
    pub(crate) link: Option<String>,
    /// For each layer, whether the device visits it, and whether it is the first to use a block.
    pub(crate) layers: Vec<(bool, bool)>,
    /// Bytes of the device that may be in use: the ceiling, or else the memory that was free.
    pub(crate) budget: u64,
    /// FLOP/s of a large matrix product on the device, once it was measured.
    pub(crate) peak_flops: Mutex<Option<f64>>,
}

/// A run at one moment. Times are in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct RunView {
    /// The run's name.
    pub run: String,
    /// The present state of the run.
    pub state: State,
    /// The time at which it began, in Unix time.
    pub started: f64,
    /// The time of this view, in Unix time.
    pub now: f64,
    /// The time since its lanes began.
    pub seconds: f64,
    /// Training steps done.
    pub step: u64,
    /// Training steps of the whole run.
    pub steps: u64,
    /// Training steps in each of the ring's: those of a window, or 1.
    pub window: u64,
    /// Training steps that were done before it resumed.
    pub resumed: u64,
    /// The loss of the last step.
    pub loss: Option<f64>,
    /// The loss of the last validation.
    pub validation_loss: Option<f64>,
    /// The values of each set's last validation: set, metric, value.
    pub measured: Vec<(String, &'static str, f64)>,
    /// The loss that balances the experts, in the last step, if there is one.
    pub balance_loss: Option<f64>,
    /// The loss of the size of the routers' logits, in the last step, if there is one.
    pub z_loss: Option<f64>,
    /// The layers with experts.
    pub routers: Vec<RouterView>,
    /// Choices of experts that were dropped.
    pub dropped: u64,
    /// The gradient norm of the last step, before clipping.
    pub grad_norm: Option<f64>,
    /// The factor of the loss in the last step, if the run scales it.
    pub loss_scale: Option<f64>,
    /// Steps of this process's run that changed nothing, as their gradients were not finite.
    pub skipped: u64,
    /// The learning rate of the last step.
    pub learning_rate: Option<f64>,
    /// The time of the last step.
    pub step_seconds: Option<f64>,
    /// The time in the last step that the compute lane waited.
    pub exposed_wait_seconds: Option<f64>,
    /// The lane that limited the last step.
    pub bottleneck: Option<&'static str>,
    /// The time at which the last step ended, or else the run began, in Unix time.
    pub last_step: f64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Tokens a second in the last step.
    pub tokens_per_second: Option<f64>,
    /// The FLOPs of all training steps so far, as
    /// [`Model::training_flops`](crate::models::Model::training_flops) counts them.
    pub model_flops: f64,
    /// The model FLOP/s of the last step ÷ [`peak_flops`](RunView::peak_flops).
    pub speed_of_light: Option<f64>,
    /// FLOP/s of a large matrix product on the device, once it was measured.
    pub peak_flops: Option<f64>,
    /// The time at which the last checkpoint was written, in Unix time.
    pub checkpoint: Option<f64>,
    /// The time at which the run began, in Unix time, if it writes checkpoints.
    pub checkpoints_since: Option<f64>,
    /// Checkpoints that could not be written.
    pub checkpoint_failures: u64,
    /// Bytes of the last checkpoint, and bytes that were free on its disk afterwards.
    pub checkpoint_disk: Option<(u64, u64)>,
    /// The number of failures of each kind.
    pub faults: Vec<(&'static str, u64)>,
    /// The devices.
    pub devices: Vec<DeviceView>,
    /// The ranks of a run that has several.
    pub ranks: Vec<RankView>,
    /// The memory of the device that used most, by holder.
    pub device_memory: Vec<MemoryView>,
    /// Bytes of the device's memory that may be in use.
    pub device_budget: u64,
    /// The host's memory, by holder.
    pub host_memory: Vec<MemoryView>,
    /// Bytes copied to the devices.
    pub bytes_uploaded: u64,
    /// Bytes copied from the devices.
    pub bytes_downloaded: u64,
    /// Bytes that devices copied from each other.
    pub bytes_between_devices: u64,
    /// The rate of the emulated link, if there is one.
    pub link: Option<String>,
    /// Pools of slots.
    pub channels: Vec<ChannelView>,
    /// Actors, by role.
    pub actors: Vec<ActorView>,
    /// Lanes.
    pub lanes: Vec<LaneView>,
    /// The time that the compute lane waited within steps, by cause.
    pub waited: Vec<(&'static str, f64)>,
    /// Time outside steps.
    pub outside: f64,
    /// The part of [`outside`](RunView::outside) in which the run waited for a checkpoint.
    pub checkpoints: f64,
    /// Layers.
    pub layers: Vec<LayerView>,
    /// Loss by step; of a long run, not of every step.
    pub losses: Vec<Point>,
    /// Validation loss by step.
    pub validations: Vec<Point>,
    /// True while every slice of training is still kept.
    pub kept_all: bool,
    /// Slices of the last steps, if the caller asked for them.
    pub slices: Vec<Slice>,
    /// The last steps: number in the ring, begin and end.
    pub bounds: Vec<(u64, f64, f64)>,
}

impl RunView {
    /// Keeps the slices of one step: of the steps that have all their slices, the one with the
    /// median time. Keeps no slice if there is no such step.
    pub fn typical(mut self) -> RunView {
        let first = self.slices.first().map_or(0, |slice| slice.step);
        // The first kept step may have lost slices, except where no slice was dropped at all.
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
    /// The name of the holder in the plan.
    pub kind: &'static str,
    /// The most bytes it used so far.
    pub used: u64,
    /// Bytes that the plan gives it.
    pub planned: u64,
}

/// A pool of slots.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChannelView {
    /// The name of the pool.
    pub name: &'static str,
    /// Slots in use.
    pub depth: usize,
    /// The most slots that were in use so far.
    pub peak: u32,
    /// Number of slots.
    pub capacity: usize,
}

/// An actor's time.
#[derive(Clone, Debug, Serialize)]
pub struct ActorView {
    /// The name of the role.
    pub name: String,
    /// The time it ran.
    pub busy: f64,
    /// The time it waited for actors before it.
    pub starved: f64,
    /// The time it waited for actors after it.
    pub blocked: f64,
}

/// A device's work.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceView {
    /// The name of the device, such as `cpu0`.
    pub name: String,
    /// The time that each of its lanes worked.
    pub lanes: Vec<(&'static str, f64)>,
    /// The time that its compute lane waited within steps, by cause.
    pub waited: Vec<(&'static str, f64)>,
}

/// A lane's work.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LaneView {
    /// The name of the lane.
    pub name: &'static str,
    /// The time it worked.
    pub busy: f64,
    /// The number of operations.
    pub operations: u64,
}

/// A layer's work.
#[derive(Clone, Debug, Serialize)]
pub struct LayerView {
    /// The index of the layer, padded with zeros so that names sort.
    pub layer: String,
    /// True when the device computes it.
    pub on_device: bool,
    /// True when it is the first layer that uses a block.
    pub owns: bool,
    /// Phase, lane and time of its visits, without zeros.
    pub visits: Vec<(&'static str, &'static str, f64)>,
    /// Time of its transfers.
    pub transfer: f64,
    /// The time that the compute lane waited for its transfers.
    pub waited_transfer: f64,
    /// The time that the compute lane waited for anything else.
    pub waited_host: f64,
    /// The share of its transfers' time in which the compute lane worked.
    pub overlap: Option<f64>,
    /// The number of updates of its blocks.
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

    /// All sums so far.
    pub fn tally(&self) -> Tally {
        self.0.ledger.tally(self.0.observer.now())
    }

    /// Sets the FLOP/s of a large matrix product on this device, which the run is compared with.
    pub fn set_peak_flops(&self, flops_per_second: f64) {
        *self.0.peak_flops.lock().expect("nothing panics inside") = Some(flops_per_second);
    }

    /// Notes that the run ended well.
    pub(crate) fn set_ended(&self) {
        let mut status = self.status();
        if status.state != State::Failed {
            status.state = State::Ended;
        }
    }

    /// Notes that the run failed.
    pub(crate) fn set_failed(&self) {
        let mut status = self.status();
        if status.state != State::Failed {
            status.faults[1] += 1;
            status.state = State::Failed;
        }
    }

    /// The peak use of device memory, by the plan's terms, on the device that used most.
    pub(crate) fn device_memory(&self) -> Vec<MemoryView> {
        let pools = self.0.observer.pools();
        let peak = |name: &str| {
            let peaks = pools.iter().filter(|pool| pool.name == name).map(|pool| pool.peak);
            peaks.max().unwrap_or(0) as usize
        };
        let plan = &self.0.plan;
        let used = plan.regions.peaks(peak, self.0.used.workspace() as usize);
        let terms = used.into_iter().zip(&plan.device);
        let view = |(used, planned): (Term, &Term)| MemoryView {
            kind: planned.name,
            used: used.bytes,
            planned: planned.bytes,
        };
        terms.map(view).collect()
    }

    /// The use of host memory, which is taken at the start.
    fn host_memory(&self) -> Vec<MemoryView> {
        let view =
            |term: &Term| MemoryView { kind: term.name, used: term.bytes, planned: term.bytes };
        self.0.plan.host.iter().map(view).collect()
    }

    /// The name of a layer: its index, with as many digits as the largest has.
    fn layer_name(&self, index: usize) -> String {
        let digits = self.0.layers.len().saturating_sub(1).to_string().len();
        format!("{index:0digits$}")
    }

    fn layers(&self, tally: &Tally) -> Vec<LayerView> {
        let all = tally.layers.iter().zip(&self.0.layers).enumerate();
        let view = |(index, (of, &(on_device, owns))): (usize, (&LayerTally, &(bool, bool)))| {
            layer(self.layer_name(index), on_device, owns, of)
        };
        all.map(view).collect()
    }

    /// The run now, with the slices of its last `steps` steps.
    pub fn view(&self, steps: u64) -> RunView {
        let tally = self.tally();
        let slices = if steps > 0 { self.0.ledger.recent(steps) } else { Vec::new() };
        let status = self.status().clone();
        let last = status.last;
        let peak_flops = *self.0.peak_flops.lock().expect("nothing panics inside");
        let flops = last.map(|step| step.model_flops / step.seconds);
        let moved = self.0.used.all_links();
        RunView {
            run: self.0.run.clone(),
            state: status.state,
            started: status.started,
            now: unix_seconds(),
            seconds: self.0.observer.now().as_secs_f64(),
            step: status.step(),
            steps: status.steps,
            window: status.window,
            resumed: status.resumed,
            loss: last.map(|step| step.loss),
            validation_loss: status.validation_loss,
            measured: status.measured.clone(),
            balance_loss: last.and_then(|step| step.balance_loss),
            z_loss: last.and_then(|step| step.z_loss),
            routers: routers::views(&status, |index| self.layer_name(index)),
            dropped: status.dropped,
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
            host_memory: self.host_memory(),
            bytes_uploaded: moved.upload,
            bytes_downloaded: moved.download,
            bytes_between_devices: moved.peers,
            link: self.0.link.clone(),
            channels: channels(&self.0.observer.pools()),
            actors: actors(self.0.observer.spent()),
            lanes: lanes(&tally).map(|track| lane(track, &tally)).collect(),
            waited: waited(&tally.waited),
            outside: tally.outside.as_secs_f64(),
            checkpoints: tally.checkpoints.as_secs_f64(),
            layers: self.layers(&tally),
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

/// The lanes that every run has, and further ones that did something.
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
        waited: waited(&of.waited),
    };
    names.iter().zip(&tally.devices).map(view).collect()
}

fn waited(times: &[Duration; WaitCause::ALL.len()]) -> Vec<(&'static str, f64)> {
    WaitCause::ALL.map(|cause| (cause.name(), times[cause as usize].as_secs_f64())).into()
}

/// The pools by name, each the sum over all devices.
fn channels(pools: &[pool::Occupancy]) -> Vec<ChannelView> {
    let mut channels: Vec<ChannelView> = Vec::new();
    for pool in pools {
        let name = if pool.name == "inputs" { "stash" } else { pool.name };
        let depth = pool.holders.iter().flatten().count();
        let capacity = pool.holders.len();
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

/// The actors by role, each the sum over all devices.
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

fn layer(name: String, on_device: bool, owns: bool, of: &LayerTally) -> LayerView {
    let lanes = [Lane::Upload, Lane::Compute, Lane::Download, Lane::Host].map(Lane::name);
    let mut visits = Vec::new();
    for (phase, times) in ["forward", "backward"].into_iter().zip(of.visits) {
        let times = lanes.into_iter().zip(times).filter(|(_, time)| !time.is_zero());
        visits.extend(times.map(|(lane, time)| (phase, lane, time.as_secs_f64())));
    }
    let transfer = of.transfer().as_secs_f64();
    let waited = of.waited(true).as_secs_f64();
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
