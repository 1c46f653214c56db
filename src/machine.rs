//! The memory, limits and cores of this machine and this process, as the operating system reports
//! them.
//!
//! Rates are measured in the room of the thing that is measured: matrix products in
//! [`devices`](crate::devices), updates in [`optimizers`](crate::optimizers), the disk in
//! [`eps`](crate::eps).

use std::fs;
use std::path::Path;

/// The number of kibibytes in the line of a file that begins with `label`, in bytes.
fn kibibytes(file: &str, label: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(label))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes * 1024)
}

/// Bytes of this process that are in memory. `None` if the system does not report them.
pub fn resident_memory() -> Option<u64> {
    kibibytes("/proc/self/status", "VmRSS:")
}

/// Bytes of memory that the machine has.
pub fn total_memory() -> Option<u64> {
    kibibytes("/proc/meminfo", "MemTotal:")
}

/// Bytes that this process can still allocate: the least of what the machine has free, what its
/// control groups allow and what its own limits allow.
pub fn available_memory() -> Option<u64> {
    memory_limit().map(|(bytes, _)| bytes)
}

/// Bytes that this process can still allocate, and the limit, as words before a size in a message.
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

/// Bytes that this process's control group, and all groups above it, still allow.
fn group_memory() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let number = |folder: &Path, file: &str| -> Option<u64> {
        fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    // Pages of the file cache count as used, but the system frees them when memory is needed.
    let cached = |folder: &Path, label: &str| -> Option<u64> {
        let text = fs::read_to_string(folder.join("memory.stat")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(label))?;
        line.trim().parse().ok()
    };
    let left = |folder: &Path, [limit, used, file]: [&str; 3]| {
        let used = number(folder, used)?.saturating_sub(cached(folder, file).unwrap_or(0));
        Some(number(folder, limit)?.saturating_sub(used))
    };
    let left_in_line = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let path = fields.next()?.trim_start_matches('/');
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
    groups.lines().filter_map(left_in_line).min()
}

/// A file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disk {
    /// The system's number of it.
    pub(crate) id: u64,
    /// Bytes that are free.
    pub(crate) free: u64,
}

/// The file system of a path, or of the nearest folder above it that exists.
pub(crate) fn disk(path: &Path) -> Option<Disk> {
    let there = path.ancestors().find(|path| path.exists());
    let there = there.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let about = rustix::fs::statvfs(there).ok()?;
    let id = rustix::fs::stat(there).ok()?.st_dev;
    Some(Disk { id, free: about.f_bavail.saturating_mul(about.f_frsize) })
}

/// Bytes on the disk that files would free if they were removed. A file of several names counts
/// if all of them are among the files.
#[cfg(unix)]
pub(crate) fn bytes_freed<'f>(files: impl IntoIterator<Item = &'f fs::Metadata>) -> u64 {
    use std::collections::HashMap;
    use std::os::unix::fs::MetadataExt;
    const BLOCK: u64 = 512; // the unit of `blocks`, on all file systems
    let mut names: HashMap<(u64, u64), (u64, &fs::Metadata)> = HashMap::new();
    for file in files {
        names.entry((file.dev(), file.ino())).or_insert((0, file)).0 += 1;
    }
    let freed = names.into_values().filter(|(found, file)| *found >= file.nlink());
    freed.map(|(_, file)| file.blocks() * BLOCK).sum()
}

#[cfg(not(unix))]
pub(crate) fn bytes_freed<'f>(files: impl IntoIterator<Item = &'f fs::Metadata>) -> u64 {
    files.into_iter().map(fs::Metadata::len).sum()
}

/// The use of the system by this process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Process {
    /// CPU time of the process, summed over all cores.
    pub cpu_seconds: f64,
    /// Bytes that are in memory.
    pub resident_bytes: u64,
    /// Bytes of the address space.
    pub virtual_bytes: u64,
    /// The Unix time at which it started, in seconds.
    pub start_seconds: f64,
    /// The number of open files.
    pub open_files: u64,
    /// The limit of open files.
    pub most_files: u64,
    /// The number of threads.
    pub threads: u64,
}

/// The use of the system by this process. `None` on systems without `/proc`.
pub fn process() -> Option<Process> {
    /// The unit of times in `/proc`: ticks per second.
    const TICKS: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // Fields from the third on. The second is the program's name in parentheses, which may contain
    // spaces and parentheses itself.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let system = fs::read_to_string("/proc/stat").ok()?;
    let booted = system.lines().find_map(|line| line.strip_prefix("btime "))?;
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

/// The number of cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// The name of the vector instructions that loops use on this processor.
pub fn vector_instructions() -> &'static str {
    crate::simd::Level::best().name()
}
