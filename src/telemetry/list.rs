//! The one list of metrics. The exporter and METRICS.md are made from it, and a test compares the
//! dashboards, rules and alerts with it.

use super::{DeviceView, RunView, State};

/// The kind of a metric, as Prometheus distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that only grows.
    Counter,
    /// A number that goes up and down.
    Gauge,
    /// The number of observations up to each size.
    Histogram,
}

impl MetricKind {
    /// The name of the kind in Prometheus's text format.
    pub fn name(self) -> &'static str {
        ["counter", "gauge", "histogram"][self as usize]
    }
}

/// The unit of a metric's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number of things.
    Count,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// A share: 1 is all.
    Ratio,
    /// A number without a unit.
    None,
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The name of the metric.
    pub name: &'static str,
    /// The kind of the metric.
    pub kind: MetricKind,
    /// The unit of its value.
    pub unit: Unit,
    /// The labels of the metric, beside `run`.
    pub labels: &'static [&'static str],
    /// Upper bounds of a histogram's buckets.
    pub buckets: &'static [f64],
    /// The help text that Prometheus gets.
    pub help: &'static str,
}

impl Metric {
    /// The metric of this name.
    ///
    /// # Panics
    /// If no metric of the list has this name.
    pub fn named(name: &str) -> &'static Metric {
        let found = METRICS.iter().find(|metric| metric.name == name);
        found.unwrap_or_else(|| panic!("{name} is not on the list of metrics"))
    }
}

const OPERATION: [f64; 12] = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0];
const STEP: [f64; 12] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3];

const fn counter(
    name: &'static str,
    unit: Unit,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind: MetricKind::Counter, unit, labels, buckets: &[], help }
}

const fn gauge(
    name: &'static str,
    unit: Unit,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind: MetricKind::Gauge, unit, labels, buckets: &[], help }
}

/// All metrics.
#[rustfmt::skip]
pub const METRICS: &[Metric] = &[
    counter("l2l_visit_seconds_total", Unit::Seconds, &["layer", "phase", "lane"],
        "Time that visits of a layer took on a lane"),
    counter("l2l_exposed_wait_seconds_total", Unit::Seconds, &["layer", "cause"],
        "Time in which the compute lane was idle at a layer, waiting for \
         transfers or for anything else"),
    counter("l2l_transfer_seconds_total", Unit::Seconds, &["layer"],
        "Time of a layer's transfers, to the device and from it"),
    counter("l2l_block_updates_total", Unit::Count, &["layer"],
        "Updates of a layer's blocks"),
    Metric { name: "l2l_operation_seconds", kind: MetricKind::Histogram, unit: Unit::Seconds,
        labels: &["lane"], buckets: &OPERATION, help: "Time of one operation" },
    counter("l2l_lane_seconds_total", Unit::Seconds, &["lane"],
        "Time that a lane was busy with training, the sum of all devices"),
    counter("l2l_compute_wait_seconds_total", Unit::Seconds, &["waited_for"],
        "Time in which the compute lane was idle, by the lane that it waited \
         for, the mean over the devices. `devices`: kernels of other devices; \
         `ring`: the latency of the actors. \
         Between training steps: `checkpoint`, and `outside` for the rest"),
    counter("l2l_device_lane_seconds_total", Unit::Seconds, &["device", "lane"],
        "Time that a device's lane was busy with training"),
    counter("l2l_device_wait_seconds_total", Unit::Seconds, &["device", "waited_for"],
        "Time in which a device's compute lane was idle within training steps, \
         by the lane that it waited for"),
    gauge("l2l_rank_step", Unit::Count, &["rank"],
        "Training steps that a rank has done. Only runs with several ranks have \
         the metrics of ranks, which are up to a second old"),
    counter("l2l_rank_lane_seconds_total", Unit::Seconds, &["rank", "lane"],
        "Time that a rank's lane was busy with training, the sum of its devices"),
    counter("l2l_rank_wait_seconds_total", Unit::Seconds, &["rank", "waited_for"],
        "Time in which a rank's compute lane was idle within training steps, by \
         the lane that it waited for, the mean over its devices"),
    counter("l2l_fabric_bytes_total", Unit::Bytes, &["rank", "direction"],
        "Bytes that a rank sent to other ranks (`sent`) and received from them \
         (`received`)"),
    gauge("l2l_rank_resident_memory_bytes", Unit::Bytes, &["rank"],
        "Resident memory of a rank's process"),
    counter("l2l_actor_seconds_total", Unit::Seconds, &["actor", "state"],
        "Time that an actor was busy, starved (waiting for actors before it) or \
         blocked (by those after it)"),
    gauge("l2l_channel_depth", Unit::Count, &["channel"],
        "Slots in use"),
    gauge("l2l_channel_capacity", Unit::Count, &["channel"],
        "Number of slots"),
    counter("l2l_transfer_bytes_total", Unit::Bytes, &["direction"],
        "Bytes that crossed the link, counted in each copy"),
    gauge("l2l_device_memory_bytes", Unit::Bytes, &["device", "kind"],
        "Highest use of device memory so far"),
    gauge("l2l_device_memory_budget_bytes", Unit::Bytes, &["device"],
        "Device memory that may be used: the ceiling, or else the memory that \
         was free at the start"),
    gauge("l2l_host_memory_bytes", Unit::Bytes, &["kind"],
        "Host memory in use, by its holder in the plan"),
    gauge("l2l_step", Unit::Count, &[],
        "Training steps done"),
    gauge("l2l_steps_target", Unit::Count, &[],
        "Training steps of the whole run"),
    gauge("l2l_state", Unit::None, &["state"],
        "1 for the present state of the run"),
    gauge("l2l_last_step_timestamp_seconds", Unit::Seconds, &[],
        "Time at which the last step ended; before the first step, at which the \
         run began"),
    gauge("l2l_last_step_seconds", Unit::Seconds, &[],
        "Time from the end of the last step but one to the end of the last; with \
         schedule.kind = \"pipedream\" or \"2bw\", of windows"),
    Metric { name: "l2l_step_seconds", kind: MetricKind::Histogram, unit: Unit::Seconds,
        labels: &[], buckets: &STEP, help: "Time from the end of one step to the end of the next; \
         with schedule.kind = \"pipedream\" or \"2bw\", of windows" },
    gauge("l2l_loss", Unit::None, &[],
        "Loss of the last step"),
    gauge("l2l_balance_loss", Unit::None, &[],
        "Loss that balances the experts in the last step, of a run that has one"),
    gauge("l2l_z_loss", Unit::None, &[],
        "Loss of the size of the routers' logits in the last step, of a run that \
         has one"),
    gauge("l2l_expert_load_max_ratio", Unit::None, &["layer"],
        "Tokens of the most used expert of a layer in the last step ÷ the mean of \
         its experts"),
    gauge("l2l_expert_token_share", Unit::Ratio, &["layer"],
        "Share of the tokens of the last step that chose a layer's most used \
         expert"),
    gauge("l2l_idle_experts", Unit::Count, &["layer"],
        "Experts of a layer that no token of the last step chose"),
    gauge("l2l_router_entropy", Unit::None, &["layer"],
        "Entropy of a router's mean probabilities in the last step, in nats: at \
         most the logarithm of the number of experts"),
    counter("l2l_dropped_assignments_total", Unit::Count, &[],
        "Choices of experts that were dropped, of a run with \
         experts.capacity_factor"),
    gauge("l2l_validation_loss", Unit::None, &[],
        "Loss of the last validation"),
    gauge("l2l_validation_metric", Unit::None, &["set", "metric"],
        "Values of the last validation of each set, by metric: loss, perplexity, accuracy, ..."),
    gauge("l2l_grad_norm", Unit::None, &[],
        "Gradient norm of the last step, before clipping"),
    gauge("l2l_loss_scale", Unit::None, &[],
        "Factor of the loss in the last step, of a run that has one"),
    counter("l2l_skipped_steps_total", Unit::Count, &[],
        "Steps that changed nothing, as their gradients were not finite"),
    gauge("l2l_learning_rate", Unit::None, &[],
        "Learning rate of the last step"),
    counter("l2l_tokens_total", Unit::Count, &[],
        "Tokens trained on, without padding"),
    gauge("l2l_tokens_per_second", Unit::Count, &[],
        "Tokens a second in the last step"),
    counter("l2l_model_flops_total", Unit::Count, &[],
        "FLOPs of the model: 6 × weights met by each token, and attention; \
         without recomputation and padding"),
    gauge("l2l_speed_of_light_ratio", Unit::Ratio, &[],
        "Model FLOP/s of the last step ÷ those of a large product on this machine"),
    gauge("l2l_checkpoint_last_success_timestamp_seconds", Unit::Seconds, &[],
        "Time of the last checkpoint; before the first, the time at which the \
         run began; 0 if it writes none"),
    counter("l2l_checkpoint_failures_total", Unit::Count, &[],
        "Checkpoints that could not be written"),
    gauge("l2l_checkpoint_bytes", Unit::Bytes, &[],
        "Size of the last checkpoint"),
    gauge("l2l_checkpoint_disk_free_bytes", Unit::Bytes, &[],
        "Free space of the disk of checkpoints, when the last one was written"),
    counter("l2l_faults_total", Unit::Count, &["kind"],
        "Failures: a loss or gradient that is not finite, an error, a panic, a \
         hang"),
    gauge("l2l_build_info", Unit::None, &["version"],
        "1, with the program's version as label"),
    gauge("l2l_run_info", Unit::None, &["device", "link"],
        "1, with device and link as labels"),
    counter("process_cpu_seconds_total", Unit::Seconds, &[],
        "CPU time of the process, on all cores"),
    gauge("process_resident_memory_bytes", Unit::Bytes, &[],
        "Resident memory of the process"),
    gauge("process_virtual_memory_bytes", Unit::Bytes, &[],
        "Address space of the process"),
    gauge("process_start_time_seconds", Unit::Seconds, &[],
        "Time at which the process began"),
    gauge("process_open_fds", Unit::Count, &[],
        "Open files of the process"),
    gauge("process_max_fds", Unit::Count, &[],
        "Limit of open files"),
    gauge("process_threads", Unit::Count, &[],
        "Threads of the process"),
];

/// Calls `report` with the metric, the values of its labels and its value, for every series of a
/// run except those of histograms.
pub fn samples(view: &RunView, mut report: impl FnMut(&'static Metric, &[&str], f64)) {
    let report = &mut |name: &str, labels: &[&str], value: f64| {
        report(Metric::named(name), labels, value);
    };
    samples_of_layers(view, report);
    samples_of_ring(view, report);
    samples_of_ranks(view, report);
    samples_of_memory(view, report);
    samples_of_training(view, report);
    samples_of_process(report);
}

/// A function of a metric's name, the values of its labels, and its value.
type Report<'r> = dyn FnMut(&str, &[&str], f64) + 'r;

fn samples_of_layers(view: &RunView, report: &mut Report<'_>) {
    for layer in &view.layers {
        let name = &layer.layer[..];
        for &(phase, lane, seconds) in &layer.visits {
            report("l2l_visit_seconds_total", &[name, phase, lane], seconds);
        }
        if layer.on_device {
            let cause = "l2l_exposed_wait_seconds_total";
            report(cause, &[name, "transfer"], layer.waited_transfer);
            report(cause, &[name, "host"], layer.waited_host);
            report("l2l_transfer_seconds_total", &[name], layer.transfer);
        }
        if layer.owns {
            report("l2l_block_updates_total", &[name], layer.updates as f64);
        }
    }
}

fn samples_of_ring(view: &RunView, report: &mut Report<'_>) {
    for lane in &view.lanes {
        report("l2l_lane_seconds_total", &[lane.name], lane.busy);
    }
    for (cause, seconds) in &view.waited {
        report("l2l_compute_wait_seconds_total", &[cause], *seconds);
    }
    report("l2l_compute_wait_seconds_total", &["checkpoint"], view.checkpoints);
    let outside = (view.outside - view.checkpoints).max(0.0);
    report("l2l_compute_wait_seconds_total", &["outside"], outside);
    for device in &view.devices {
        let name = &device.name[..];
        for (lane, seconds) in &device.lanes {
            report("l2l_device_lane_seconds_total", &[name, lane], *seconds);
        }
        for (cause, seconds) in &device.waited {
            report("l2l_device_wait_seconds_total", &[name, cause], *seconds);
        }
    }
    for actor in &view.actors {
        for (state, seconds) in
            [("busy", actor.busy), ("starved", actor.starved), ("blocked", actor.blocked)]
        {
            report("l2l_actor_seconds_total", &[&actor.name, state], seconds);
        }
    }
    for channel in &view.channels {
        report("l2l_channel_depth", &[channel.name], channel.depth as f64);
        report("l2l_channel_capacity", &[channel.name], channel.capacity as f64);
    }
    report("l2l_transfer_bytes_total", &["upload"], view.bytes_uploaded as f64);
    report("l2l_transfer_bytes_total", &["download"], view.bytes_downloaded as f64);
    if view.bytes_between_devices > 0 {
        report("l2l_transfer_bytes_total", &["peer"], view.bytes_between_devices as f64);
    }
}

fn samples_of_ranks(view: &RunView, report: &mut Report<'_>) {
    for rank in &view.ranks {
        let name = &rank.rank.to_string()[..];
        report("l2l_rank_step", &[name], rank.step as f64);
        for (lane, seconds) in &rank.lanes {
            report("l2l_rank_lane_seconds_total", &[name, lane], *seconds);
        }
        for (cause, seconds) in &rank.waited {
            report("l2l_rank_wait_seconds_total", &[name, cause], *seconds);
        }
        report("l2l_fabric_bytes_total", &[name, "sent"], rank.sent_bytes as f64);
        report("l2l_fabric_bytes_total", &[name, "received"], rank.received_bytes as f64);
        report("l2l_rank_resident_memory_bytes", &[name], rank.resident_bytes as f64);
    }
}

fn samples_of_memory(view: &RunView, report: &mut Report<'_>) {
    // The peaks are those of the device that used most, and each device has as much.
    for DeviceView { name, .. } in &view.devices {
        for memory in &view.device_memory {
            report("l2l_device_memory_bytes", &[name, memory.kind], memory.used as f64);
        }
        report("l2l_device_memory_budget_bytes", &[name], view.device_budget as f64);
    }
    for memory in &view.host_memory {
        report("l2l_host_memory_bytes", &[memory.kind], memory.used as f64);
    }
}

fn samples_of_routers(view: &RunView, report: &mut Report<'_>) {
    for router in &view.routers {
        let name = &router.layer[..];
        report("l2l_expert_load_max_ratio", &[name], router.load_max_ratio);
        report("l2l_expert_token_share", &[name], router.token_share);
        report("l2l_idle_experts", &[name], router.idle as f64);
        report("l2l_router_entropy", &[name], router.entropy);
    }
    if !view.routers.is_empty() {
        report("l2l_dropped_assignments_total", &[], view.dropped as f64);
    }
}

fn samples_of_training(view: &RunView, report: &mut Report<'_>) {
    report("l2l_step", &[], view.step as f64);
    report("l2l_steps_target", &[], view.steps as f64);
    for state in State::ALL {
        report("l2l_state", &[state.name()], f64::from(u8::from(state == view.state)));
    }
    report("l2l_last_step_timestamp_seconds", &[], view.last_step);
    for (name, value) in [
        ("l2l_last_step_seconds", view.step_seconds),
        ("l2l_tokens_per_second", view.tokens_per_second),
        ("l2l_loss", view.loss),
        ("l2l_validation_loss", view.validation_loss),
        ("l2l_balance_loss", view.balance_loss),
        ("l2l_z_loss", view.z_loss),
        ("l2l_grad_norm", view.grad_norm),
        ("l2l_loss_scale", view.loss_scale),
        ("l2l_learning_rate", view.learning_rate),
        ("l2l_speed_of_light_ratio", view.speed_of_light),
    ] {
        value.into_iter().for_each(|value| report(name, &[], value));
    }
    for (set, metric, value) in &view.measured {
        report("l2l_validation_metric", &[set, metric], *value);
    }
    let saved = view.checkpoint.or(view.checkpoints_since);
    report("l2l_checkpoint_last_success_timestamp_seconds", &[], saved.unwrap_or(0.0));
    report("l2l_tokens_total", &[], view.tokens as f64);
    report("l2l_skipped_steps_total", &[], view.skipped as f64);
    samples_of_routers(view, report);
    report("l2l_model_flops_total", &[], view.model_flops);
    report("l2l_checkpoint_failures_total", &[], view.checkpoint_failures as f64);
    if let Some((bytes, free)) = view.checkpoint_disk {
        report("l2l_checkpoint_bytes", &[], bytes as f64);
        report("l2l_checkpoint_disk_free_bytes", &[], free as f64);
    }
    for (kind, count) in &view.faults {
        report("l2l_faults_total", &[kind], *count as f64);
    }
    report("l2l_build_info", &[env!("CARGO_PKG_VERSION")], 1.0);
    let device = view.devices.first().map_or("", |device| &device.name);
    report("l2l_run_info", &[device, view.link.as_deref().unwrap_or("none")], 1.0);
}

fn samples_of_process(report: &mut Report<'_>) {
    let Some(process) = crate::machine::process() else { return };
    for (name, value) in [
        ("process_cpu_seconds_total", process.cpu_seconds),
        ("process_resident_memory_bytes", process.resident_bytes as f64),
        ("process_virtual_memory_bytes", process.virtual_bytes as f64),
        ("process_start_time_seconds", process.start_seconds),
        ("process_open_fds", process.open_files as f64),
        ("process_max_fds", process.most_files as f64),
        ("process_threads", process.threads as f64),
    ] {
        report(name, &[], value);
    }
}
