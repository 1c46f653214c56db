//! What `l2l plan` says of a step's time: simulated, with rates that are given or measured.

use std::path::Path;

use l2l::config::{DeviceKind, EpsTier, ScheduleKind};
use l2l::models::Model;
use l2l::telemetry::{Forecast, Hiding, Lane, Rates, Wait};
use l2l::{Config, Error, Plan, devices, eps, machine, optimizers};
use serde_json::{Value, json};

use super::output::print;
use super::plan::layer_name;
use super::{RateArguments, say};

/// A step simulated with given rates, and the tokens that hide its transfers.
pub(super) struct Outlook {
    pub(super) forecast: Forecast,
    eager: Hiding,
    deferred: Hiding,
    /// Seconds of a batch without `schedule.delay` and with it, if the run has it or would be
    /// faster.
    delay: Option<[f64; 2]>,
    /// The kind whose delay it is, if it is of windows.
    of_windows: Option<&'static str>,
    /// A smaller micro-batch that would make steps faster.
    split: Option<Split>,
}

/// Another micro-batch, and the time of a step with it.
#[derive(Clone, Copy)]
struct Split {
    micro_batch: usize,
    step_seconds: f64,
}

impl Outlook {
    pub(super) fn of(
        config: &Config,
        model: &Model,
        plan: &Plan,
        rates: &Rates,
    ) -> Result<Outlook, Error> {
        let hiding = |deferred| Hiding::of(config, model, plan, rates, deferred);
        let eager = hiding(false)?;
        let deferred = hiding(true)?;
        let forecast = Forecast::of_plan(config, model, plan, rates)?;
        let delay = delay_seconds(config, model, plan, rates, forecast.seconds);
        let of_windows = config.schedule.kind.of_windows();
        let split = split(config, model, plan, rates, forecast.seconds);
        Ok(Outlook { forecast, eager, deferred, delay, of_windows, split })
    }

    /// Adds what it says to the event of a plan.
    pub(super) fn add_to(&self, event: &mut Value, model: &Model) {
        let Outlook { forecast, eager, deferred, delay, split, .. } = self;
        event["step_seconds"] = json!(forecast.seconds);
        event["exposed_wait_seconds"] = json!(forecast.exposed_seconds());
        let wait = |wait: &Wait| {
            let layer = layer_name(model, wait.layer);
            json!({ "layer": layer, "cause": wait.cause.name(), "seconds": wait.seconds })
        };
        event["waits"] = forecast.waits.iter().map(wait).collect();
        event["bound_by"] = bound_by(forecast);
        event["hides"] = json!({ "eager": eager, "deferred": deferred });
        event["delay"] = json!(delay.map(|[without, with]| {
            json!({ "step_seconds_without": without, "step_seconds_with": with })
        }));
        event["faster_micro_batch"] = json!(split.map(|Split { micro_batch, step_seconds }| {
            json!({ "micro_batch": micro_batch, "step_seconds": step_seconds })
        }));
    }

    pub(super) fn print(&self, ranks: u32, model: &Model) {
        let Outlook { forecast, eager, deferred, delay, of_windows, split } = self;
        let step = if ranks > 1 { "a step of each process" } else { "a step" };
        print(format_args!(
            "a step takes {:.4} s in virtual time; the device waits {:.4} s of it",
            forecast.seconds,
            forecast.exposed_seconds()
        ));
        if let Some((lane, share)) = forecast.bound.first() {
            print(format_args!(
                "  {:.0} % of its critical path is on the {} lane",
                100.0 * share,
                lane.name()
            ));
        }
        for wait in forecast.waits.iter().take(SHOWN_WAITS) {
            let layer = layer_name(model, wait.layer);
            let cause = wait.cause.name();
            print(format_args!("  {:.4} s at {layer}, for {cause}", wait.seconds));
        }
        for (how, hiding) in [("eager", eager), ("deferred", deferred)] {
            let Hiding { lane, phase, tokens } = hiding;
            match tokens {
                Some(tokens) => print(format_args!(
                    "{how}: updates and transfers are hidden from {tokens} tokens {step} on \
                     ({lane}, {phase})"
                )),
                None => print(format_args!(
                    "{how}: never hidden: in {phase} each token takes longer on the {lane} lane \
                     than to compute"
                )),
            }
        }
        if let Some([without, with]) = delay {
            let costs = "it changes results and may cost loss (docs/delay.md)";
            match of_windows {
                None => print(format_args!(
                    "schedule.delay = 1: {with:.4} s a step, and {without:.4} s without; {costs}"
                )),
                Some(kind) => print(format_args!(
                    "schedule.kind = \"{kind}\": {with:.4} s a batch, and {without:.4} s with \
                     \"1f1b\" and no delay; {costs}"
                )),
            }
        }
        if let Some(Split { micro_batch, step_seconds }) = split {
            print(format_args!(
                "step.micro_batch = {micro_batch}: {step_seconds:.4} s a step; gradients are then \
                 added up in another order, so the last bits of results change"
            ));
        }
    }
}

/// The lanes of a step's critical path, with their shares of the step.
pub(super) fn bound_by(forecast: &Forecast) -> Value {
    let share = |(lane, share): &(Lane, f64)| (lane.name().to_owned(), json!(share));
    Value::Object(forecast.bound.iter().map(share).collect())
}

/// Seconds of a batch without `schedule.delay` and with it, where a step of the config takes
/// `found`. `None`: it has no delay, and one would hide nothing or cannot be. Windows are compared
/// with steps of 1F1B.
fn delay_seconds(
    config: &Config,
    model: &Model,
    plan: &Plan,
    rates: &Rates,
    found: f64,
) -> Option<[f64; 2]> {
    let has_delay = config.schedule.delay > 0;
    let mut other = config.clone();
    other.schedule.delay = u32::from(!has_delay);
    other.schedule.delay_after = None;
    if has_delay && config.schedule.kind.of_windows().is_some() {
        other.schedule.kind = ScheduleKind::OneForwardOneBackward;
        (other.schedule.stages, other.schedule.window) = (None, None);
    }
    other.check().ok()?;
    let plan = Plan::of_rank(&other, model, &other.update_rule(), plan.share()).ok()?;
    let seconds = Forecast::of_plan(&other, model, &plan, rates).ok()?.seconds;
    match has_delay {
        true => Some([seconds, found / f64::from(config.window())]),
        false => (seconds < WORTH * found).then_some([found, seconds]),
    }
}

/// A change that saves less than this share of a step is not shown.
const WORTH: f64 = 0.98;

/// Half of the micro-batch, or a quarter, if a GPU has one or two in each layer and would be faster
/// with more. `found` is the time of a step as it is.
fn split(config: &Config, model: &Model, plan: &Plan, rates: &Rates, found: f64) -> Option<Split> {
    let of_group = config.sequences().div_ceil(config.parallel.groups as usize);
    let whole = config.step.micro_batch.min(of_group);
    if config.device.kind != DeviceKind::Cuda || of_group > 2 * whole {
        return None;
    }
    let smaller = [2, 4].into_iter().filter(|parts| whole.is_multiple_of(*parts));
    let forecast = smaller.filter_map(|parts| {
        let micro_batch = whole / parts;
        let mut other = config.clone();
        other.step.micro_batch = micro_batch;
        let plan = Plan::of_rank(&other, model, &other.update_rule(), plan.share()).ok()?;
        let step_seconds = Forecast::of_plan(&other, model, &plan, rates).ok()?.seconds;
        Some(Split { micro_batch, step_seconds })
    });
    let fastest = forecast.min_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
    fastest.filter(|split| split.step_seconds < WORTH * found)
}

/// The waits that are printed: most steps have one or two causes that are worth a change.
const SHOWN_WAITS: usize = 4;

/// The rates of the arguments. Rates that are not given are measured.
pub(super) fn rates(
    config: &Config,
    model: &Model,
    arguments: &RateArguments,
) -> Result<Rates, Error> {
    let RateArguments { tflops, link_gbps, host_gbps, disk_gbps, .. } = *arguments;
    let threads = config.device.threads.unwrap_or_else(machine::cores);
    let on_gpu = config.device.kind == DeviceKind::Cuda;
    let asks = on_gpu && (tflops.is_none() || link_gbps.is_none());
    let gpu = asks.then(|| devices::gpu_rates(config)).transpose().map_err(|error| {
        let remedy = "give --tflops and --link-gbps to forecast for a GPU of another machine";
        Error::Argument(format!("{error}; {remedy}"))
    })?;
    let flops = match (tflops, &gpu) {
        (Some(rate), _) => rate * 1e12,
        (None, Some(gpu)) => gpu.product,
        (None, None) => devices::product_flops_per_second(threads)?,
    };
    let host = match host_gbps {
        Some(rate) => rate * 1e9,
        None => optimizers::stream_bytes_per_second(threads)?,
    };
    let link = match (link_gbps, &gpu) {
        (Some(rate), _) => rate * 1e9,
        (None, Some(gpu)) => {
            gpu.pinned.unwrap_or(gpu.pageable).into_iter().fold(f64::MAX, f64::min)
        }
        (None, None) => config.link_bytes_per_second()?.unwrap_or(host),
    };
    let rates = Rates::of(config, model, flops, link, host);
    let folder = config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File);
    let disk = match (disk_gbps, folder) {
        (Some(rate), _) => rate * 1e9,
        (None, None) => return Ok(rates),
        (None, Some(folder)) => {
            let there = folder.ancestors().find(|path| path.is_dir());
            let there = there.unwrap_or(Path::new("."));
            match eps::disk_bytes_per_second(there) {
                Ok((written, read)) => 2.0 / (1.0 / written + 1.0 / read),
                Err(error) => {
                    say(format_args!("{}: cannot measure this disk: {error}", there.display()));
                    return Ok(rates);
                }
            }
        }
    };
    Ok(rates.with_disk(disk))
}

impl RateArguments {
    /// Checks what is given.
    pub(super) fn check(&self) -> Result<(), Error> {
        let RateArguments { tflops, link_gbps, host_gbps, disk_gbps, fabric_gbps } = *self;
        for (name, rate) in [
            ("tflops", tflops),
            ("link-gbps", link_gbps),
            ("host-gbps", host_gbps),
            ("disk-gbps", disk_gbps),
            ("fabric-gbps", fabric_gbps),
        ] {
            if rate.is_some_and(|rate| !(1e-9..=1e9).contains(&rate)) {
                return Err(Error::Argument(format!("--{name} must be from 1e-9 to 1e9")));
            }
        }
        Ok(())
    }

    pub(super) fn any(&self) -> bool {
        let RateArguments { tflops, link_gbps, host_gbps, disk_gbps, fabric_gbps } = self;
        [tflops, link_gbps, host_gbps, disk_gbps, fabric_gbps].into_iter().any(Option::is_some)
    }
}
