//! The limits that the system sets to this process, and the sentences that name them.
//!
//! The system's own messages, such as "Resource temporarily unavailable", do not say which limit
//! was met, and what raises it.

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// The most bytes that this process may write to a file (`ulimit -f`). `None`: no limit.
pub(crate) fn file_bytes() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// A message of the system. If it comes from a limit of this process, the limit's name is added.
pub fn named(message: impl Display) -> String {
    let message = message.to_string();
    let is = |error: Errno| message.contains(&format!("(os error {})", error.raw_os_error()));
    let limit = if message.contains("`ulimit -") {
        return message; // It has the name already.
    } else if is(Errno::FBIG) {
        match file_bytes() {
            Some(most) => format!("a file of this process may have {most} bytes (`ulimit -f`)"),
            None => "the file system takes no larger file".into(),
        }
    } else if is(Errno::MFILE) {
        match getrlimit(Resource::Nofile).current {
            Some(most) => format!("this process may open {most} files (`ulimit -n`)"),
            None => "this process may open no more files (`ulimit -n`)".into(),
        }
    } else if is(Errno::NFILE) {
        "this machine may open no more files (fs.file-max)".into()
    } else {
        return message;
    };
    format!("{message}: {limit}")
}

/// An error of a file or a folder. If it comes from a limit of this process, its message has the
/// limit's name.
pub fn named_error(error: io::Error) -> io::Error {
    let message = error.to_string();
    let named = named(&message);
    if named == message { error } else { io::Error::new(error.kind(), named) }
}

/// The message about a thread that the system did not start. It has the names of all limits of
/// threads: the system does not say which one was met.
pub fn no_thread(error: impl Display) -> String {
    let in_group = |folder: PathBuf| number_in(&folder.join("pids.max"));
    let groups = control_groups("pids").into_iter();
    let group = groups.filter_map(|group| group.up().filter_map(in_group).min()).min();
    let user = getrlimit(Resource::Nproc).current;
    let memory = getrlimit(Resource::As).current;
    let limits = [
        group.map(|most| format!("{most} processes and threads of its control group (pids.max)")),
        user.map(|most| format!("{most} processes and threads of its user (`ulimit -u`)")),
        memory.map(|most| format!("{most} bytes of memory with all stacks (`ulimit -v`)")),
    ];
    let mut limits: Vec<String> = limits.into_iter().flatten().collect();
    if limits.is_empty() {
        limits.push("kernel.threads-max and the machine's memory".into());
    }
    format!(
        "the system starts no further thread for this process ({error}): the limits are {}",
        limits.join(", ")
    )
}

/// A control group that this process is in.
pub(crate) struct ControlGroup {
    /// Where the groups of its hierarchy begin.
    root: PathBuf,
    folder: PathBuf,
    /// True for the one hierarchy of cgroup v2, false for a hierarchy of v1.
    pub(crate) is_unified: bool,
}

impl ControlGroup {
    /// The folders of the group and of all groups above it, whose limits count, too.
    pub(crate) fn up(&self) -> impl Iterator<Item = PathBuf> {
        let above = self.folder.ancestors().take_while(|folder| folder.starts_with(&self.root));
        above.map(Path::to_path_buf)
    }
}

/// The control groups of this process that may limit what a controller counts.
pub(crate) fn control_groups(controller: &str) -> Vec<ControlGroup> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_line = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let path = fields.next()?.trim_start_matches('/');
        let is_unified = controllers.is_empty();
        let root = match is_unified {
            true => PathBuf::from("/sys/fs/cgroup"),
            false => Path::new("/sys/fs/cgroup").join(controller),
        };
        let counts = is_unified || controllers.split(',').any(|each| each == controller);
        counts.then(|| ControlGroup { folder: root.join(path), root, is_unified })
    };
    groups.lines().filter_map(of_line).collect()
}

/// The number in a file of a control group; `None` if it says "max".
pub(crate) fn number_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_limits_have_their_names() {
        let said = |error: Errno| named(io::Error::from(error));
        assert!(said(Errno::MFILE).ends_with("files (`ulimit -n`)"));
        assert!(said(Errno::NFILE).ends_with("(fs.file-max)"));
        assert!(said(Errno::FBIG).starts_with("File too large (os error 27): "));
        let plain = io::Error::from(Errno::NOSPC).to_string();
        assert_eq!(said(Errno::NOSPC), plain);
        assert_eq!(named(said(Errno::MFILE)), said(Errno::MFILE), "the name is added once");
        let error = named_error(io::Error::from(Errno::FBIG));
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), said(Errno::FBIG));
        assert!(
            no_thread(io::Error::from(Errno::AGAIN)).contains("(os error 11)): the limits are ")
        );
    }
}
