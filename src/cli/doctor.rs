//! `l2l doctor`: reports this machine's cores, memory, libraries and GPUs, and their speed.

use std::process::{Command, Stdio};
use std::time::SystemTime;

use l2l::config::{ByteSize, DeviceKind, Dtype, Format};
use l2l::devices::KernelGroup;
use l2l::{Config, Error, devices, eps, machine, optimizers};
use serde_json::{Value, json};

use super::{Common, DoctorArguments, print};

/// Compares every kernel of the GPU with the CPU's. Each group of kernels has a process of its own,
/// so a group that crashes does not end the others.
pub(super) fn check(arguments: &DoctorArguments) -> Result<(), Error> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seed = arguments.seed.unwrap_or(now.as_nanos() as u64);
    if let Some(group) = arguments.group {
        return check_group(&arguments.common, group, seed);
    }
    arguments.common.read()?;
    let of_seed = arguments.seed.is_none().then(|| format!("--seed={seed}"));
    let run = |group: KernelGroup| {
        Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .args(["--group", group.name()])
            .args(&of_seed)
            .stderr(Stdio::piped())
            .spawn()?
            .wait_with_output()
    };
    let mut problems = Vec::new();
    for group in KernelGroup::ALL {
        let ended = run(group).map_err(|error| Error::System(error.to_string()))?;
        let says = String::from_utf8_lossy(&ended.stderr);
        // Before its error a process may have printed which config it uses.
        let says = says.split_once("error: ").map_or(&*says, |(_, says)| says).trim();
        match ended.status.code() {
            Some(0) => {}
            Some(2) if group == KernelGroup::ALL[0] => {
                return Err(Error::Argument(says.to_string()));
            }
            Some(_) => problems.push(says.to_string()),
            None => problems.push(format!("{} ended with {}: {says}", group.name(), ended.status)),
        }
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(Error::Device(format!("{} (--seed {seed})", problems.join("; ")))),
    }
}

/// Compares the kernels of a group, in this process.
fn check_group(common: &Common, group: KernelGroup, seed: u64) -> Result<(), Error> {
    let (config, _) = common.read()?;
    let mut problems = Vec::new();
    devices::check_kernels(&config, group, seed, &mut |check| {
        let devices::Check { kernel, cases, off, most, error } = check;
        problems.extend(check.problem());
        if config.log.format == Format::Json {
            print(json!({
                "event": "check",
                "kernel": kernel,
                "cases": cases,
                "off": off,
                "dtype": config.device.dtype,
                "tolerance": most,
                "seed": seed,
                "error": error,
            }));
        } else if let Some(error) = error {
            print(format_args!("{kernel:<26} {cases:>3} sizes, then it failed: {error}"));
        } else {
            print(format_args!("{kernel:<26} {cases:>3} sizes, largest deviation {off:.1e}"));
        }
    })
    .map_err(|error| match problems.is_empty() {
        true => error,
        false => Error::Device(format!("{}; {error}", problems.join("; "))),
    })?;
    match problems.is_empty() {
        true => Ok(()),
        false => Err(Error::Device(problems.join("; "))),
    }
}

/// The report about this machine.
struct Machine {
    threads: usize,
    /// FLOP/s of a matrix product.
    product: f64,
    /// Bytes a second of the host's memory.
    stream: f64,
    /// Bytes a second of AdamW's update: with f32 masters, and with split ones.
    updates: [Option<f64>; 2],
    /// Bytes a second that a disk writes and reads, or the reason why they were not measured.
    disk: Result<(f64, f64), String>,
    libraries: Vec<devices::Library>,
    gpus: Result<Vec<devices::Gpu>, Error>,
    /// The rates of the config's GPU, if there is a GPU or the config asks for one.
    gpu_rates: Option<Result<devices::GpuRates, Error>>,
    dtype: Dtype,
}

pub(super) fn doctor(common: &Common) -> Result<(), Error> {
    let (config, _) = common.read()?;
    let machine = Machine::measure(&config)?;
    match config.log.format {
        Format::Json => print(machine.event()),
        Format::Pretty => machine.show(),
    }
    machine.gpu_error().map_or(Ok(()), |error| Err(Error::Device(error.to_string())))
}

fn line(what: &str, value: impl std::fmt::Display) {
    print(format_args!("{what:<22} {value}"));
}

impl Machine {
    fn measure(config: &Config) -> Result<Machine, Error> {
        let threads = machine::cores();
        let product = devices::product_flops_per_second(threads)?;
        let stream = optimizers::stream_bytes_per_second(threads)?;
        let update = |split| optimizers::update_bytes_per_second(threads, split).ok();
        let updates = [false, true].map(update);
        let disk = eps::disk_bytes_per_second(&std::env::temp_dir());
        let libraries = devices::cuda_libraries(config.device.cuda_libraries.as_deref());
        let gpus = devices::gpus();
        let has_gpu = gpus.as_ref().is_ok_and(|gpus| !gpus.is_empty());
        let tries_gpu = has_gpu || config.device.kind == DeviceKind::Cuda;
        Ok(Machine {
            threads,
            product,
            stream,
            updates,
            disk: disk.map_err(|error| error.to_string()),
            libraries,
            gpus,
            gpu_rates: tries_gpu.then(|| devices::gpu_rates(config)),
            dtype: config.device.dtype,
        })
    }

    /// The reason why GPUs cannot be listed or the config's GPU cannot be used.
    fn gpu_error(&self) -> Option<&Error> {
        let unusable = self.gpu_rates.as_ref().and_then(|rates| rates.as_ref().err());
        self.gpus.as_ref().err().or(unusable)
    }

    fn event(&self) -> Value {
        let libraries = self.libraries.iter().map(|one| {
            let version = one.version.map(|(major, minor)| format!("{major}.{minor}"));
            (one.name.to_string(), json!({ "path": one.path, "version": version }))
        });
        let gpus = self.gpus.as_deref().unwrap_or_default().iter().map(|gpu| {
            json!({
                "name": gpu.name,
                "architecture": gpu.architecture,
                "memory_bytes": gpu.memory,
            })
        });
        let disk = self.disk.as_ref().ok();
        let gpu_rates = self.gpu_rates.as_ref().and_then(|rates| rates.as_ref().ok());
        json!({
            "event": "doctor",
            "cores": self.threads,
            "vector_instructions": machine::vector_instructions(),
            "memory_bytes": machine::total_memory(),
            "available_memory_bytes": machine::available_memory(),
            "matmul_flops_per_second": self.product,
            "stream_bytes_per_second": self.stream,
            "adamw_bytes_per_second": self.updates[0],
            "adamw_bf16_bytes_per_second": self.updates[1],
            "disk_write_bytes_per_second": disk.map(|(write, _)| write),
            "disk_read_bytes_per_second": disk.map(|(_, read)| read),
            "disk_error": self.disk.as_ref().err(),
            "cuda_libraries": libraries.collect::<serde_json::Map<String, Value>>(),
            "gpus": gpus.collect::<Vec<Value>>(),
            "gpu_rates": gpu_rates.map(|rates| json!({
                "pageable_bytes_per_second": rates.pageable,
                "pinned_bytes_per_second": rates.pinned,
                "matmul_flops_per_second": rates.product,
                "dtype": self.dtype,
            })),
            "gpu_error": self.gpu_error().map(Error::to_string),
        })
    }

    fn show(&self) {
        self.show_host();
        self.show_libraries();
        self.show_gpus();
    }

    fn show_host(&self) {
        let Machine { threads, product, stream, .. } = self;
        let size = |bytes: Option<u64>| match bytes {
            Some(bytes) => ByteSize::from(bytes).to_string(),
            None => "unknown".into(),
        };
        line("cores", threads);
        line("vector instructions", machine::vector_instructions());
        line("memory", size(machine::total_memory()));
        line("  available", size(machine::available_memory()));
        let [product, stream] = [product, stream].map(|rate| rate / 1e9);
        line("matrix product", format_args!("{product:.0} GFLOP/s, f32, {threads} threads"));
        line("memory stream", format_args!("{stream:.1} GB/s, {threads} threads"));
        if let [Some(update), Some(split)] = self.updates.map(|rate| rate.map(|rate| rate / 1e9)) {
            let bf16 = format_args!("with device.dtype = \"bf16\" {split:.1}");
            line("  AdamW's update", format_args!("{update:.1} GB/s; {bf16}"));
        }
        match &self.disk {
            Ok((write, read)) => {
                let [write, read] = [write, read].map(|rate| rate / 1e9);
                let place = std::env::temp_dir();
                let rates = format_args!("{write:.2} GB/s written, {read:.2} read");
                line("disk", format_args!("{rates}, {}", place.display()));
            }
            Err(error) => line("disk", format_args!("not measured: {error}")),
        }
    }

    fn show_libraries(&self) {
        for library in &self.libraries {
            let devices::Library { name, path, version, .. } = library;
            let place = path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
            match version {
                Some((major, minor)) => line(name, format_args!("{major}.{minor} {place}")),
                None => line(name, library.problem().unwrap_or_default()),
            }
        }
    }

    fn show_gpus(&self) {
        match &self.gpus {
            Ok(gpus) if gpus.is_empty() && self.libraries.is_empty() => {
                line("cuda", "this program was built without the feature cuda");
            }
            Ok(gpus) if gpus.is_empty() => line("cuda", "no device"),
            Ok(gpus) => {
                for (ordinal, gpu) in gpus.iter().enumerate() {
                    let devices::Gpu { name, architecture, memory } = gpu;
                    let memory = ByteSize::from(*memory);
                    let device = format!("cuda device {ordinal}");
                    line(&device, format_args!("{name}, sm_{architecture}, {memory}"));
                }
            }
            Err(error) => line("cuda", error),
        }
        match &self.gpu_rates {
            Some(Ok(devices::GpuRates { pageable, pinned, product })) => {
                let both =
                    |[up, down]: [f64; 2]| format!("{:.1} up, {:.1} down", up / 1e9, down / 1e9);
                let pinned = pinned.map_or("not available".into(), both);
                let pageable = both(*pageable);
                line("  link, GB/s", format_args!("pinned {pinned}; pageable {pageable}"));
                line("  product", format_args!("{:.1} TFLOP/s, {}", product / 1e12, self.dtype));
            }
            Some(Err(error)) => line("  not usable", error),
            None => {}
        }
    }
}
