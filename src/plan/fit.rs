//! Whether a plan fits its ceiling, the host, the limits of this process and the disk.
//!
//! All limits are checked before a run, so that no run is killed in the middle of its work.

use std::path::Path;

use crate::config::{ByteSize, Config, DeviceKind};
use crate::devices;
use crate::error::{Misfit, Resource};
use crate::machine;
use crate::models::{Model, Shape};
use crate::optimizers::UpdateRule;
use crate::plan::{Plan, Term};

/// Bytes of a process beside its plan: code, stacks, batches that were drawn ahead, telemetry.
const PROGRAM: u64 = 150 << 20;

/// Bytes of a GPU that are left to its driver, which loads code and libraries later.
const DRIVER: u64 = 1 << 30;

/// Bytes of a thread's stack, counted for the threads of kernels and of data.
const STACKS: u64 = 4 << 20;

/// Files that a run opens at once.
const FILES: u64 = 64;

impl Plan {
    /// All limits of the config and of this machine that the plan exceeds. Each names the largest
    /// term and a remedy.
    pub fn misfits(&self, model: &Model, rule: &dyn UpdateRule) -> Vec<Misfit> {
        let all = [self.device_misfit(model, rule), self.host_misfit(model), self.disk_misfit()];
        all.into_iter().flatten().chain(files_misfit()).collect()
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
        if self.trains() {
            let least = Plan::least(&self.settings.config, model, rule);
            what += &match (self.largest_micro_batch(model, rule, ceiling), least) {
                (Some(most), _) => format!(": step.micro_batch = {most} would fit"),
                (None, Some(least)) if least.device_bytes() <= ceiling => format!(
                    ": step.micro_batch and all channels of 1, with recomputing and the stash \
                     on the host, would fit, in {} bytes",
                    least.device_bytes()
                ),
                (None, Some(least)) => {
                    let by = if cuts { " with this step.chunk_positions" } else { "" };
                    format!(": {} bytes is the least that works{by}", least.device_bytes())
                }
                (None, None) => String::new(),
            };
        }
        let text = format!(
            "{what}; or give it {needed} bytes, or make step.micro_batch{} or channels smaller",
            if cuts { ", step.chunk_positions" } else { "" }
        );
        let largest_term = Some(largest(&self.device).name);
        let resource = Resource::DeviceMemory;
        Some(Misfit { resource, largest_term, needed, available: ceiling, text })
    }

    /// Bytes of the config's smallest GPU, without those that its driver takes. `None` without a
    /// GPU or a driver.
    pub(crate) fn gpu_bytes(&self) -> Option<u64> {
        let device = &self.settings.config.device;
        let gpus = (device.kind == DeviceKind::Cuda).then(devices::gpus)?.ok()?;
        let memory = |ordinal: usize| Some(gpus.get(ordinal)?.memory.saturating_sub(DRIVER));
        device.gpus().into_iter().filter_map(memory).min()
    }

    /// Whether most of the device's memory is a decoder's workspace, which smaller chunks make
    /// smaller.
    fn has_smaller_chunks(&self, model: &Model) -> bool {
        let chunk = self.batch.positions.min(model.shape.chunk_positions);
        let is_cut = model.shape.causal && chunk > Shape::CHUNK_TILE;
        is_cut && largest(&self.device).name == "workspace"
    }

    fn host_misfit(&self, model: &Model) -> Option<Misfit> {
        // The CPU device's memory is the host's.
        let is_shared = self.settings.config.device.kind == DeviceKind::Cpu;
        let devices = u64::from(self.devices());
        let of_devices = if is_shared { self.device_bytes().saturating_mul(devices) } else { 0 };
        let planned = of_devices.saturating_add(self.host_bytes());
        let threads = self.settings.config.device.threads.unwrap_or_else(machine::cores) as u64;
        let all = planned.saturating_add(PROGRAM + threads * STACKS);
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
            "stash" if is_shared => {
                "a smaller step.batch, data.sequence_length or stash.dtype = \"bf16\" make it \
                 smaller"
            }
            "stash" => {
                "a smaller step.batch, data.sequence_length or device.dtype = \"bf16\" make \
                 it smaller"
            }
            _ if is_shared && self.has_smaller_chunks(model) => {
                "a smaller model, step.micro_batch or step.chunk_positions would do"
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

    fn disk_misfit(&self) -> Option<Misfit> {
        let path = self.settings.config.eps.path.as_ref().filter(|_| !self.file.is_empty())?;
        let needed = self.file_bytes();
        // A training run overwrites an earlier run's file; a run that does not train adds a file.
        let there = std::fs::metadata(path.join("blocks")).map_or(0, |file| file.len());
        let there = if self.trains() { there } else { 0 };
        let free = machine::free_disk(nearest(path))?.saturating_add(there);
        let term = largest(&self.file);
        (free < needed).then(|| Misfit {
            resource: Resource::Disk,
            largest_term: Some(term.name),
            needed,
            available: free,
            text: format!(
                "eps.path {} has {} free, the plan needs {}, most of it for {term}: give it \
                 another disk, or make the model smaller",
                path.display(),
                ByteSize::from(free),
                ByteSize::from(needed),
            ),
        })
    }

    /// The smallest plan of this model's training: one sequence, depths of 1, recomputation, and
    /// the stash on the host.
    pub fn least(config: &Config, model: &Model, rule: &dyn UpdateRule) -> Option<Plan> {
        let mut least = config.clone();
        least.step.micro_batch = 1;
        least.step.batch = 1;
        least.schedule = crate::config::ScheduleConfig::default();
        least.schedule.recompute = true.into();
        least.stash.place = crate::config::StashPlace::Host;
        let one = crate::config::ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
        least.channels = one;
        Plan::new(&least, model, rule).ok()
    }

    /// Sequences of the largest micro-batch with which the device's memory fits a ceiling. `None`
    /// if one sequence does not fit.
    pub fn largest_micro_batch(
        &self,
        model: &Model,
        rule: &dyn UpdateRule,
        ceiling: u64,
    ) -> Option<usize> {
        let fits = |sequences: usize| {
            let mut config = self.settings.config.clone();
            config.step.micro_batch = sequences;
            // Layers keep activations only where there is room left.
            config.schedule.recompute = config.schedule.recompute.without_keeping();
            // A smaller batch is planned faster. It is enough if the device's memory does not grow
            // with the batch.
            let grows = config.stash.place == crate::config::StashPlace::Device
                || config.schedule.kind != crate::config::ScheduleKind::Relay;
            config.step.batch = if grows { config.step.batch.max(sequences) } else { sequences };
            let plan = config.check().and_then(|()| Plan::new(&config, model, rule));
            plan.is_ok_and(|plan| plan.device_bytes() <= ceiling)
        };
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

/// The nearest folder above a path that exists.
fn nearest(path: &Path) -> &Path {
    let there = path.ancestors().find(|path| path.exists());
    there.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."))
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

fn largest(terms: &[Term]) -> &Term {
    terms.iter().max_by_key(|term| term.bytes).expect("a plan has terms")
}
