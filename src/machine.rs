//! What the system says of this machine and this process: memory, limits, cores.
//!
//! Rates are measured where the measured thing is: products in [`devices`](crate::devices), updates
//! in [`optimizers`](crate::optimizers), the disk in [`eps`](crate::eps).

use std::fs;
use std::path::Path;

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
