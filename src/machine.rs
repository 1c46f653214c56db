//! What this machine has: memory as the system tells it, and rates as they are measured.

use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

use crate::config::{Config, DeviceKind};
use crate::devices::{self, cpu};
use crate::eps;
use crate::error::Error;
use crate::models::{Init, Kind, Tensor};
use crate::optimizers::{Planes, Update, UpdateRule};
use crate::simd::Level;

/// Bytes that a line of one of the system's tables says.
fn kibibytes(file: &str, label: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(label))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes * 1024)
}

/// Bytes that are in this process's memory, where the system tells.
pub fn resident_memory() -> Option<u64> {
    kibibytes("/proc/self/status", "VmRSS:")
}

/// Bytes of memory the machine has.
pub fn total_memory() -> Option<u64> {
    kibibytes("/proc/meminfo", "MemTotal:")
}

/// Bytes this process can still have: what the machine has free, its control groups and its own limits
/// allow.
pub fn available_memory() -> Option<u64> {
    memory_limit().map(|(bytes, _)| bytes)
}

/// The same, with what it is that allows so little, to be told in front of a size.
pub(crate) fn memory_limit() -> Option<(u64, &'static str)> {
    let machine = kibibytes("/proc/meminfo", "MemAvailable:");
    let machine = machine.map(|bytes| (bytes, "this machine has free"));
    let group = group_memory().map(|bytes| (bytes, "this process's control group allows"));
    let limit = |name: &str, used: &str| {
        let limits = fs::read_to_string("/proc/self/limits").ok()?;
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        let limit: u64 = line.split_whitespace().next()?.parse().ok()?; // or "unlimited"
        Some(limit.saturating_sub(kibibytes("/proc/self/status", used)?))
    };
    let data = limit("Max data size", "VmData:");
    let data = data.map(|bytes| (bytes, "this process's limit of data (ulimit -d) allows"));
    let space = limit("Max address space", "VmSize:");
    let space = space.map(|bytes| (bytes, "this process's limit of memory (ulimit -v) allows"));
    machine.into_iter().chain(group).chain(data).chain(space).min_by_key(|(bytes, _)| *bytes)
}

/// Bytes that control groups allow, this process's own and those above it.
fn group_memory() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let number = |folder: &Path, file: &str| -> Option<u64> {
        fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    // What the system's cache has of files makes way for whoever needs it.
    let cached = |folder: &Path, label: &str| -> Option<u64> {
        let text = fs::read_to_string(folder.join("memory.stat")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(label))?;
        line.trim().parse().ok()
    };
    let left = |folder: &Path, [most, used, file]: [&str; 3]| {
        let used = number(folder, used)?.saturating_sub(cached(folder, file).unwrap_or(0));
        Some(number(folder, most)?.saturating_sub(used))
    };
    let of_line = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        let (root, files) = if controllers.is_empty() {
            ("/sys/fs/cgroup", ["memory.max", "memory.current", "inactive_file "])
        } else if controllers.split(',').any(|controller| controller == "memory") {
            const FILES: [&str; 3] =
                ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];
            ("/sys/fs/cgroup/memory", FILES)
        } else {
            return None;
        };
        let own = Path::new(root).join(path);
        let above = own.ancestors().take_while(|folder| folder.starts_with(root));
        above.filter_map(|folder| left(folder, files)).min()
    };
    groups.lines().filter_map(of_line).min()
}

/// Bytes that a file in a folder may still take.
pub(crate) fn free_disk(folder: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(folder).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Bytes a second that the disk under a folder writes and reads in order: past the system's cache, where
/// its file system lets us.
///
/// # Errors
/// The disk's.
pub fn disk_bytes_per_second(folder: &Path) -> io::Result<(f64, f64)> {
    eps::disk_rates(folder)
}

/// What the system says of this process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Process {
    /// Time of all cores that it used.
    pub cpu_seconds: f64,
    /// Bytes of it that are in memory.
    pub resident_bytes: u64,
    /// Bytes of its address space.
    pub virtual_bytes: u64,
    /// When it began, by the world's clock.
    pub start_seconds: f64,
    /// Files it has open.
    pub open_files: u64,
    /// Files it may have open.
    pub most_files: u64,
    /// Its threads.
    pub threads: u64,
}

/// This process, where the system tells: on Linux, `/proc`.
pub fn process() -> Option<Process> {
    /// Ticks a second, of all that `/proc` tells in ticks.
    const TICKS: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // What comes behind the program's name, which may have anything in it: field 3 and on.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let of_system = fs::read_to_string("/proc/stat").ok()?;
    let booted = of_system.lines().find_map(|line| line.strip_prefix("btime "))?;
    let booted: f64 = booted.trim().parse().ok()?;
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    Some(Process {
        cpu_seconds: (field(14)? + field(15)?) as f64 / TICKS,
        resident_bytes: resident_memory()?,
        virtual_bytes: field(23)?,
        start_seconds: booted + field(22)? as f64 / TICKS,
        open_files: fs::read_dir("/proc/self/fd").ok()?.count() as u64,
        most_files: files.split_whitespace().next()?.parse().unwrap_or(u64::MAX),
        threads: field(20)?,
    })
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// The vector instructions that loops run with here.
pub fn vector_instructions() -> &'static str {
    crate::simd::Level::best().name()
}

/// FLOP/s of a large f32 product on so many threads: the best of a few.
///
/// # Errors
/// The system gives no threads.
pub fn product_flops_per_second(threads: usize) -> Result<f64, crate::Error> {
    const SIZE: usize = 1024;
    const ROUNDS: usize = 8;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(crate::Error::failed)?;
    let (a, b) = (vec![0.5_f32; SIZE * SIZE], vec![0.25_f32; SIZE * SIZE]);
    let mut c = vec![0.0_f32; SIZE * SIZE];
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        pool.install(|| cpu::product(&mut c, &a, &b, SIZE));
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(2.0 * (SIZE as f64).powi(3) / best)
}

/// Bytes a second that an update of parameters moves on so many threads (a += b over arrays far
/// larger than caches): the best of a few.
///
/// # Errors
/// The system gives no threads.
pub fn stream_bytes_per_second(threads: usize) -> Result<f64, crate::Error> {
    use rayon::prelude::*;
    const FLOATS: usize = 16 << 20;
    const CHUNK: usize = 1 << 14;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(crate::Error::failed)?;
    let (mut a, b) = (vec![0.5_f32; FLOATS], vec![0.25_f32; FLOATS]);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let begin = Instant::now();
        pool.install(|| {
            a.par_chunks_mut(CHUNK).zip(b.par_chunks(CHUNK)).for_each(|(a, b)| {
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            });
        });
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok((3 * FLOATS * size_of::<f32>()) as f64 / best)
}

/// Bytes a second that AdamW's update moves on so many threads, of blocks far larger than caches: 28 a
/// parameter, whether masters are f32 or lie in two planes. The best of a few.
///
/// # Errors
/// The system gives no threads.
pub fn update_bytes_per_second(threads: usize, in_planes: bool) -> Result<f64, Error> {
    const PARAMETERS: usize = 16 << 20;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(Error::failed)?;
    let rule = Config::default().update_rule();
    let (kind, init, joined) = (Kind::Weight, Init::Zeros, false);
    let tensors = [Tensor { name: "w".into(), shape: vec![PARAMETERS], kind, init, joined }];
    let [mut masters, mut m, mut v, gradient] = [0.5, 0.0, 0.0, 0.25].map(|x| vec![x; PARAMETERS]);
    let mut best = f64::INFINITY;
    for step in 0..5 {
        let update = Update { step, learning_rate: 1e-4, scale: 1.0, level: Level::best() };
        let states = &mut [&mut m[..], &mut v[..]];
        let begin = Instant::now();
        pool.install(|| {
            if in_planes {
                let planes = &mut Planes::of(&mut masters);
                rule.apply_in_planes(&tensors, planes, states, &gradient, update, &mut []);
            } else {
                rule.apply(&tensors, &mut masters, states, &gradient, update);
            }
        });
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok((7 * PARAMETERS * size_of::<f32>()) as f64 / best)
}

/// A library of CUDA's, and what it was found to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its file's name without version.
    pub name: &'static str,
    /// The file that was loaded, where the system tells.
    pub path: Option<PathBuf>,
    /// Its version; `None`: it is not there, or cannot be loaded.
    pub version: Option<(u32, u32)>,
    /// What to do where it is not there.
    pub install: &'static str,
}

/// A GPU, as the driver tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Its architecture: 90 of 9.0.
    pub architecture: u32,
    /// Bytes of memory.
    pub memory: u64,
}

/// The libraries that a CUDA device needs, looked for on the loader's path, then in a folder: the driver
/// first. None: this program was built without.
pub fn cuda_libraries(folder: Option<&Path>) -> Vec<Library> {
    devices::cuda_libraries(folder)
}

/// The GPUs that the driver tells of; none where there is no driver.
///
/// # Errors
/// The driver's.
pub fn gpus() -> Result<Vec<Gpu>, Error> {
    devices::gpus().map_err(Error::failed)
}

/// How a kernel of a GPU compares with the CPU's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Check {
    /// Its name.
    pub kernel: &'static str,
    /// Sizes that it was run at.
    pub cases: usize,
    /// The largest difference, relative to values above 1; infinite where it wrote what is not its own.
    pub off: f64,
    /// The most that it may be: in bf16, some roundings.
    pub most: f64,
}

impl Check {
    /// Fails for the first that is off by more.
    ///
    /// # Errors
    /// Which, and by how much.
    pub fn judge(checks: &[Check]) -> Result<(), Error> {
        match checks.iter().find(|check| check.off > check.most) {
            None => Ok(()),
            Some(Check { kernel, off, most, .. }) => {
                Err(Error::failed(format_args!("{kernel} is off by {off:e}, of at most {most:e}")))
            }
        }
    }
}

/// Runs every kernel of the GPU that a config says against the CPU's, at odd sizes, on values of this
/// seed.
///
/// # Errors
/// There is no such GPU, or it failed.
pub fn check_kernels(config: &Config, seed: u64) -> Result<Vec<Check>, Error> {
    devices::check_kernels(config, seed)
}

/// How fast a GPU is, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// Bytes a second to the device and from it, of memory as it comes.
    pub pageable: [f64; 2],
    /// The same of pinned memory, where the system gives some.
    pub pinned: Option<[f64; 2]>,
    /// FLOP/s of a large product of the config's `device.dtype`.
    pub product: f64,
}

/// Measures link and products of the GPU that a config says.
///
/// # Errors
/// There is no such GPU, or it failed.
pub fn gpu_rates(config: &Config) -> Result<GpuRates, Error> {
    devices::gpu_rates(config)
}

/// FLOP/s of a large product on the device that a config says.
///
/// # Errors
/// There is no such device, or it failed.
pub fn device_flops_per_second(config: &Config) -> Result<f64, Error> {
    match config.device.kind {
        DeviceKind::Cpu => product_flops_per_second(config.device.threads.unwrap_or_else(cores)),
        DeviceKind::Cuda => Ok(gpu_rates(config)?.product),
    }
}
