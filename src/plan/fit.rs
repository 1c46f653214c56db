//! Whether a plan fits its ceiling, the host, the limits of this process and the disk.
//!
//! All limits are checked before a run, so that no run is killed in the middle of its work.

use std::fs;

use crate::config::{
    ByteSize, ChannelsConfig, Config, DeviceConfig, DeviceKind, ScheduleConfig, ScheduleKind,
    StashPlace,
};
use crate::devices;
use crate::error::{Misfit, Resource};
use crate::machine;
use crate::models::{Model, Shape};
use crate::optimizers::UpdateRule;
use crate::plan::{DiskNeed, Plan, Term, disk};

/// Bytes of a process beside its plan: code, stacks, batches that were drawn ahead, telemetry.
const PROGRAM: u64 = 150 << 20;

/// Bytes of a GPU that are left to its driver, which loads code and libraries later.
const DRIVER: u64 = 1 << 30;

/// Bytes of a thread's stack, counted for the threads of kernels and of data.
const STACKS: u64 = 4 << 20;

/// Files that a run opens at once.
const FILES: u64 = 64;

impl Plan {
    /// All limits of the config and of this machine that the plan exceeds, with the checkpoints
    /// that the run writes. Each names the largest term and a remedy.
    pub fn misfits(
        &self,
        model: &Model,
        rule: &dyn UpdateRule,
        checkpoints: Option<DiskNeed>,
    ) -> Vec<Misfit> {
        let memory = [self.device_misfit(model, rule), self.host_misfit(model, rule)];
        let on_disk = disk::misfits(self.file_need().into_iter().chain(checkpoints).collect());
        memory.into_iter().flatten().chain(on_disk).chain(files_misfit()).collect()
    }

    fn device_misfit(&self, model: &Model, rule: &dyn UpdateRule) -> Option<Misfit> {
        let needed = self.device_bytes();
        let set = self.budget().map(|bytes| ("device.memory is", bytes));
        let is_less = |&(_, bytes): &(&str, u64)| bytes < needed;
        let (has, ceiling) = set.filter(is_less).or_else(|| {
            Some(("the GPU has, beside 1 GiB for its driver,", self.gpu_bytes()?)).filter(is_less)
        })?;
        let mut what = format!(
            "{has} {}, the plan needs {needed} bytes, most of it for {}",
            ByteSize::from(ceiling),
            largest(&self.device),
        );
        let cuts = self.has_smaller_chunks(model);
        let kind = self.settings.config.schedule.kind;
        let is_windowed = kind.of_windows().is_some();
        let micro_batch = match kind {
            ScheduleKind::Pipedream => "step.batch and step.micro_batch",
            _ => "step.micro_batch",
        };
        let (with_batch, with_kind) = match (kind, self.settings.config.fewest_micro_batches()) {
            (ScheduleKind::DoubleBuffered, few) => (format!("step.batch = {few}, "), ""),
            (kind, _) if is_windowed || kind == ScheduleKind::Relay => (String::new(), ""),
            _ => (String::new(), "schedule.kind = \"relay\", "),
        };
        if self.trains() {
            let least = Plan::least(&self.settings.config, model, rule);
            what += &match (self.largest_micro_batch(model, rule, ceiling), least) {
                (Some(most), _) => format!(": {micro_batch} = {most} would fit"),
                (None, Some(least)) if least.device_bytes() <= ceiling => format!(
                    ": {with_batch}{micro_batch} and all channels of 1, with {with_kind}\
                     recomputing and the stash on the host, would fit, in {} bytes",
                    least.device_bytes()
                ),
                (None, Some(least)) => {
                    let by = match (cuts, is_windowed) {
                        (true, true) => " with this step.chunk_positions and these schedule.stages",
                        (true, false) => " with this step.chunk_positions",
                        (false, true) => " with these schedule.stages",
                        (false, false) => "",
                    };
                    format!(": {} bytes is the least that works{by}", least.device_bytes())
                }
                (None, None) => String::new(),
            };
        }
        if self.fits_without_staying(model, rule, ceiling) {
            what += "; stash.place = \"host\" would fit";
        }
        if largest(&self.device).name == "keys_and_values"
            && let Some(longest) = self.longest_sequence(model, rule, Some(ceiling), None)
            && let Some(most @ 1..) = longest.device
        {
            what += &format!("; data.sequence_length = {most} would fit");
        }
        let text = format!(
            "{what}; or give it {needed} bytes, or make {micro_batch}{}{} or channels smaller{}",
            if cuts { ", step.chunk_positions" } else { "" },
            if is_windowed { ", schedule.stages" } else { "" },
            if has_all_experts(model) { ", or set schedule.bundles = 1" } else { "" }
        );
        let largest_term = Some(largest(&self.device).name);
        let resource = Resource::DeviceMemory;
        Some(Misfit { resource, largest_term, needed, available: ceiling, text })
    }

    /// Whether what stays on the device is all that does not fit.
    fn fits_without_staying(&self, model: &Model, rule: &dyn UpdateRule, ceiling: u64) -> bool {
        let mut config = self.settings.config.clone();
        if !self.trains() || !config.hands_over() {
            return false;
        }
        config.stash.place = StashPlace::Host;
        Plan::new(&config, model, rule).is_ok_and(|plan| plan.device_bytes() <= ceiling)
    }

    /// Bytes of the config's smallest GPU, without those that its driver takes. `None` without a
    /// GPU or a driver.
    pub(crate) fn gpu_bytes(&self) -> Option<u64> {
        gpu_bytes(&self.settings.config.device)
    }

    /// Whether most of the device's memory is a decoder's workspace, which smaller chunks make
    /// smaller.
    fn has_smaller_chunks(&self, model: &Model) -> bool {
        let chunk = self.batch.positions.min(model.shape.chunk_positions);
        let is_cut = model.shape.causal && chunk > Shape::CHUNK_TILE;
        is_cut && largest(&self.device).name == "workspace"
    }

    fn host_misfit(&self, model: &Model, rule: &dyn UpdateRule) -> Option<Misfit> {
        let is_shared = self.settings.config.device.kind == DeviceKind::Cpu;
        let of_devices = on_host(&self.settings.config, self.device_bytes());
        let planned = of_devices.saturating_add(self.host_bytes());
        let all = planned.saturating_add(program_bytes(&self.settings.config.device));
        let (available, by) = machine::memory_limit()?;
        if available >= all {
            return None;
        }
        let terms = [largest(&self.device), largest(&self.host)];
        let [device, host] = terms;
        let remedy = match host.name {
            "masters" | "optimizer_states" | "gradient_regions"
                if self.settings.config.compression().is_some() =>
            {
                "without compression, or with fewer parallel.groups, it is smaller"
            }
            "masters" | "optimizer_states" | "gradient_regions" => {
                "eps.tier = \"file\" puts it on a disk"
            }
            "stash" => &self.smaller_stash(model, rule, host.bytes),
            _ if is_shared && self.has_smaller_chunks(model) => {
                "a smaller model, step.micro_batch or step.chunk_positions would do"
            }
            _ if is_shared && has_all_experts(model) => {
                "schedule.bundles = 1, a smaller step.batch or step.micro_batch would do"
            }
            _ => "a smaller model, step.batch or step.micro_batch would do",
        };
        let text = format!(
            "{by} {}, the plan needs {} and the program {}, most of it for {device} and {host}: \
             {remedy}",
            ByteSize::from(available),
            ByteSize::from(planned),
            ByteSize::from(all - planned),
        );
        let largest_term = [device, host].into_iter().max_by_key(|term| term.bytes);
        Some(Misfit {
            resource: Resource::HostMemory,
            largest_term: largest_term.map(|term| term.name),
            needed: all,
            available,
            text,
        })
    }

    /// What makes a stash of the host smaller, and how long a sequence fits.
    fn smaller_stash(&self, model: &Model, rule: &dyn UpdateRule, bytes: u64) -> String {
        let config = &self.settings.config;
        let tokens = self.batch.sequences as u64 * self.batch.positions as u64;
        let each = bytes.div_ceil(tokens);
        let longest = self.longest_sequence(model, rule, None, host_bytes(config));
        let fits = match longest.and_then(|longest| longest.host) {
            Some(0) => ", and not even one position fits".to_string(),
            Some(most) if most < self.batch.positions => {
                format!(", and data.sequence_length = {most} would fit")
            }
            _ => String::new(),
        };
        let key = if config.device.kind == DeviceKind::Cpu { "stash" } else { "device" };
        format!(
            "the stash takes {each} bytes for each token of a step{fits}; a smaller step.batch or \
             {key}.dtype = \"bf16\" make it smaller, too"
        )
    }

    /// The room that the EPS needs on the disk of its file.
    fn file_need(&self) -> Option<DiskNeed> {
        let path = self.settings.config.eps.path.as_ref().filter(|_| !self.file.is_empty())?;
        // A training run overwrites an earlier run's file; a run that does not train adds a file.
        let there = fs::metadata(path.join("blocks")).ok().filter(|_| self.trains());
        let term = largest(&self.file);
        Some(DiskNeed {
            key: "eps.path",
            place: path.clone(),
            bytes: self.file_bytes(),
            replaced: there.map_or(0, |file| file.len()),
            term: term.name,
            purpose: format!("the EPS, most of it {term}"),
            remedy: "make the model smaller",
            largest_file: self.file_bytes(),
        })
    }

    /// The smallest plan of this model's training: one sequence, depths of 1, recomputation, and
    /// the stash on the host. A window keeps its kind and its stages, as results depend on them,
    /// and has as few micro-batches as it can. All other kinds have the results of a relay.
    pub fn least(config: &Config, model: &Model, rule: &dyn UpdateRule) -> Option<Plan> {
        let mut least = config.clone();
        least.step.micro_batch = 1;
        least.step.batch = config.fewest_micro_batches();
        if config.schedule.kind.of_windows().is_none() {
            least.schedule = ScheduleConfig::default();
        }
        least.schedule.recompute = true.into();
        least.stash.place = StashPlace::Host;
        let one = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
        least.channels = one;
        Plan::new(&least, model, rule).ok()
    }

    /// Sequences of the largest micro-batch with which the device's memory fits a ceiling. `None`
    /// if one sequence does not fit. With PipeDream-2BW the batch stays as it is.
    pub fn largest_micro_batch(
        &self,
        model: &Model,
        rule: &dyn UpdateRule,
        ceiling: u64,
    ) -> Option<usize> {
        let batch = self.settings.config.step.batch;
        let fits = |sequences: usize| {
            let mut config = self.settings.config.clone();
            config.step.micro_batch = sequences;
            // Layers keep activations only where there is room left.
            config.schedule.recompute = config.schedule.recompute.without_keeping();
            // A smaller batch is planned faster. It is enough if the device's memory does not grow
            // with the batch.
            let grows = config.stash.place == StashPlace::Device
                || config.schedule.kind != ScheduleKind::Relay;
            config.step.batch = match config.schedule.kind {
                ScheduleKind::Pipedream => sequences,
                ScheduleKind::DoubleBuffered => batch,
                _ if grows => config.step.batch.max(sequences),
                _ => sequences,
            };
            let plan = config.check().and_then(|()| Plan::new(&config, model, rule));
            plan.is_ok_and(|plan| plan.device_bytes() <= ceiling)
        };
        if self.settings.config.schedule.kind == ScheduleKind::DoubleBuffered {
            // Its micro-batches are whole parts of a batch.
            let mut parts = (1..=batch).rev().filter(|&sequences| batch.is_multiple_of(sequences));
            return parts.find(|&sequences| fits(sequences));
        }
        let mut least = 1;
        if !fits(least) {
            return None;
        }
        let mut most = 2;
        while most < 1 << 20 && fits(most) {
            (least, most) = (most, 2 * most);
        }
        while most - least > 1 {
            let middle = least.midpoint(most);
            if fits(middle) { least = middle } else { most = middle }
        }
        Some(least)
    }
}

/// The bytes of a device up to which layers keep their activations: `device.memory`, or without it
/// what a GPU has free. The plan without them takes `device` bytes of each device and `host` bytes
/// of the host.
pub(super) fn ceiling(config: &Config, ranks: u32, device: u64, host: u64) -> Option<u64> {
    let Some(set) = config.device.memory.bytes() else {
        // Ranks may share a GPU, and each would count all of its free memory. A CPU device shares
        // its memory with the host, and with all other programs.
        let is_alone = config.device.kind == DeviceKind::Cuda && ranks == 1;
        let free = is_alone.then(|| devices::free_memory(&config.device)).flatten()?;
        return Some(free.saturating_sub(DRIVER));
    };
    let has = match config.device.kind {
        DeviceKind::Cuda => gpu_bytes(&config.device),
        // The memory of a CPU device is the host's. Half of what the plan leaves free there stays
        // free: for the system's file cache and for other programs.
        DeviceKind::Cpu => machine::available_memory().map(|free| {
            let devices = u64::from(config.devices());
            let planned = device.saturating_mul(devices).saturating_add(host);
            let all = planned.saturating_add(program_bytes(&config.device));
            device.saturating_add(free.saturating_sub(all) / 2 / devices)
        }),
    };
    Some(has.map_or(set, |has| set.min(has)))
}

/// Bytes of the host that devices take which share its memory, if each takes `bytes`.
pub(super) fn on_host(config: &Config, bytes: u64) -> u64 {
    match config.device.kind {
        DeviceKind::Cpu => bytes.saturating_mul(config.devices().into()),
        DeviceKind::Cuda => 0,
    }
}

/// Bytes of the host that a plan may take, if the system says how much this process gets.
pub(super) fn host_bytes(config: &Config) -> Option<u64> {
    Some(machine::available_memory()?.saturating_sub(program_bytes(&config.device)))
}

/// Bytes of the smallest GPU, without those that its driver takes.
fn gpu_bytes(device: &DeviceConfig) -> Option<u64> {
    let gpus = (device.kind == DeviceKind::Cuda).then(devices::gpus)?.ok()?;
    let memory = |ordinal: usize| Some(gpus.get(ordinal)?.memory.saturating_sub(DRIVER));
    device.gpus().into_iter().filter_map(memory).min()
}

/// Bytes of this process beside its plan.
fn program_bytes(device: &DeviceConfig) -> u64 {
    PROGRAM + device.threads.unwrap_or_else(machine::cores) as u64 * STACKS
}

fn files_misfit() -> Option<Misfit> {
    let machine::Process { open_files, most_files, .. } = machine::process()?;
    let needed = open_files + FILES;
    (most_files < needed).then(|| Misfit {
        resource: Resource::OpenFiles,
        largest_term: None,
        needed,
        available: most_files,
        text: format!(
            "this process may open {most_files} files and has {open_files}: a run needs {FILES} \
             more (`ulimit -n {needed}` lets it)"
        ),
    })
}

/// Whether a visit has all experts of a layer at once.
fn has_all_experts(model: &Model) -> bool {
    model.shape.experts.is_some_and(|experts| experts.bundles.is_none())
}

fn largest(terms: &[Term]) -> &Term {
    terms.iter().max_by_key(|term| term.bytes).expect("a plan has terms")
}
