//! A file that says which process owns a place, for file systems without locks.
//!
//! One call makes the file, and fails if it exists. The file names its process, so a later run can
//! see that the process has ended, and takes the place over. It sees that only from the same boot
//! of the same machine, and from the same container: elsewhere the number of the process means
//! nothing, and a person has to delete the file.

use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// How often a run tries to make the file: others may make and remove it meanwhile.
const ATTEMPTS: usize = 3;

/// A place that this process owns. Dropping it removes the file.
#[derive(Debug)]
pub(super) struct Owner {
    path: PathBuf,
    /// The text of the file.
    text: String,
}

/// The text of the file.
#[derive(Debug, Serialize, Deserialize)]
struct OwnerRecord {
    host: String,
    /// Differs after each start of the machine.
    boot: Option<String>,
    /// The namespaces in which the two numbers of the process have a meaning.
    namespaces: Vec<PathBuf>,
    process: u32,
    /// When the process started, in ticks since the boot. Numbers of processes are used again.
    started: Option<u64>,
    /// Differs between the owners in one process, too.
    nonce: u64,
}

impl Owner {
    /// Takes a place, by making the file at `path`.
    ///
    /// # Errors
    /// Another run has the place, or may have it; or the file cannot be made.
    pub(super) fn take(path: &Path) -> io::Result<Owner> {
        let text = serde_json::to_string(&OwnerRecord::own()).expect("it is plain data");
        for _ in 0..ATTEMPTS {
            match OpenOptions::new().write(true).create_new(true).open(path) {
                Ok(mut file) => {
                    let written = file.write_all(text.as_bytes());
                    written.inspect_err(|_| _ = fs::remove_file(path))?;
                    drop(file); // A network file system shows it to others when it is closed.
                    let owner = Owner { path: path.into(), text };
                    owner.still_held()?;
                    return Ok(owner);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => remove_ended(path)?,
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("other runs take it, too"))
    }

    /// Checks that the file is still the one of this owner.
    ///
    /// # Errors
    /// The file was removed, renamed or replaced.
    pub(super) fn still_held(&self) -> io::Result<()> {
        let at = self.path.display().to_string();
        let what = match fs::read_to_string(&self.path) {
            Ok(text) if text == self.text => return Ok(()),
            Ok(_) => "was replaced by another",
            Err(error) if error.kind() == ErrorKind::NotFound => "was removed or renamed",
            Err(error) => return Err(io::Error::new(error.kind(), format!("{at:?}: {error}"))),
        };
        Err(io::Error::other(format!("{at:?} {what} while this run had it")))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.still_held().is_ok() {
            let _ = fs::remove_file(&self.path); // The next run sees that this process has ended.
        }
    }
}

/// Removes the file of a process that has ended.
///
/// # Errors
/// The process goes on, or may go on.
fn remove_ended(path: &Path) -> io::Result<()> {
    let at = path.display().to_string();
    let refuse = |what: String| {
        let what = format!("{what}. This file system has no file locks. If no run has it, delete");
        Err(io::Error::other(format!("{what} {at:?}")))
    };
    if fs::symlink_metadata(path).is_ok_and(|there| there.is_symlink()) {
        return refuse("a link stands in place of the file that names its run".into());
    }
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) if error.kind() == ErrorKind::InvalidData => String::new(),
        read => read.map_err(|error| io::Error::new(error.kind(), format!("{at:?}: {error}")))?,
    };
    let Ok(owner) = serde_json::from_str::<OwnerRecord>(&text) else {
        return refuse("another run may have it, and does not say which".into());
    };
    if !owner.has_ended() {
        let OwnerRecord { process, host, .. } = owner;
        return refuse(format!("another run has it: process {process} on {host:?}"));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl OwnerRecord {
    /// What this process says of itself.
    fn own() -> OwnerRecord {
        let read = |file: &str| {
            let text = fs::read_to_string(Path::new("/proc/sys/kernel").join(file)).ok()?;
            Some(text.trim().to_string())
        };
        let namespaces = ["pid", "time"].map(|kind| Path::new("/proc/self/ns").join(kind));
        OwnerRecord {
            host: read("hostname").unwrap_or_else(|| "unknown".into()),
            boot: read("random/boot_id"),
            namespaces: namespaces.iter().filter_map(|link| fs::read_link(link).ok()).collect(),
            process: process::id(),
            started: Stat::of(process::id()).map(|stat| stat.started),
            nonce: RandomState::new().hash_one(process::id()),
        }
    }

    /// True if the process has ended for sure.
    fn has_ended(&self) -> bool {
        let here = OwnerRecord::own();
        let is_visible = self.boot.is_some()
            && self.boot == here.boot
            && !self.namespaces.is_empty()
            && self.namespaces == here.namespaces;
        let process = i32::try_from(self.process).ok().and_then(Pid::from_raw);
        let Some(process) = process.filter(|_| is_visible) else { return false };
        // A process of another user is there, although its files may be hidden.
        if test_kill_process(process) == Err(Errno::SRCH) {
            return true;
        }
        let stat = Stat::of(self.process);
        stat.is_some_and(|stat| stat.is_dead || self.started.is_some_and(|at| at != stat.started))
    }
}

/// What the system says of a process.
struct Stat {
    /// True if it has ended, and its parent has not asked for its status.
    is_dead: bool,
    /// When it started, in ticks since the boot.
    started: u64,
}

impl Stat {
    fn of(process: u32) -> Option<Stat> {
        let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The fields from the third on: the second is a name, which may have parentheses itself.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        // A process whose first thread has ended looks dead, and may have others.
        let threads: u64 = field(20)?.parse().ok()?;
        let is_dead = matches!(field(3)?, "Z" | "X") && threads <= 1;
        Some(Stat { is_dead, started: field(22)?.parse().ok()? })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(outcome: io::Result<Owner>, says: &str) {
        let error = outcome.expect_err("somebody else has it").to_string();
        assert!(error.contains(says), "{error}");
    }

    /// Writes the file of another owner.
    fn write(path: &Path, owner: &OwnerRecord) {
        fs::write(path, serde_json::to_string(owner).expect("plain data")).expect("it is ours");
    }

    #[test]
    fn a_place_has_one_owner() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("owner");
        let owner = Owner::take(&at).expect("it is free");
        // The owner is this very process: another run of it is refused, too.
        refused(Owner::take(&at), &format!("another run has it: process {} on", process::id()));
        owner.still_held().expect("nobody touched it");
        drop(owner);
        assert!(!at.exists(), "the end of the owner removes the file");
        Owner::take(&at).expect("it is free again");
    }

    #[test]
    fn an_owner_notices_that_its_file_was_removed_or_replaced() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("owner");
        let owner = Owner::take(&at).expect("it is free");
        fs::remove_file(&at).expect("it is ours");
        let error = owner.still_held().expect_err("it was removed").to_string();
        assert!(error.contains("was removed or renamed"), "{error}");
        let other = Owner::take(&at).expect("nothing says that it is taken");
        let error = owner.still_held().expect_err("it is another's").to_string();
        assert!(error.contains("was replaced by another"), "{error}");
        drop(owner);
        other.still_held().expect("the first owner's end is nothing to it");
    }

    #[test]
    fn the_place_of_a_process_that_has_ended_is_taken_over() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("owner");
        let mut child = process::Command::new("true").spawn().expect("a program");
        let process = child.id();
        // Its parent has not asked for its status: it is a zombie at last.
        while !Stat::of(process).is_some_and(|stat| stat.is_dead) {
            std::thread::yield_now();
        }
        write(&at, &OwnerRecord { process, started: None, ..OwnerRecord::own() });
        drop(Owner::take(&at).expect("it is a zombie"));
        child.wait().expect("it has ended");
        write(&at, &OwnerRecord { process, started: None, ..OwnerRecord::own() });
        drop(Owner::take(&at).expect("there is no such process"));
        let own = OwnerRecord::own();
        let later = own.started.map(|at| at + 1);
        write(&at, &OwnerRecord { started: later, ..own });
        drop(Owner::take(&at).expect("its number is used again"));
    }

    #[test]
    fn what_may_be_of_a_run_is_left_alone() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("owner");
        let ended = OwnerRecord { process: i32::MAX as u32, ..OwnerRecord::own() };
        assert!(ended.has_ended(), "no process has this number");
        let elsewhere = [
            OwnerRecord { boot: Some("another".into()), host: "far".into(), ..ended },
            OwnerRecord {
                namespaces: Vec::new(),
                ..OwnerRecord { process: 9, ..OwnerRecord::own() }
            },
            OwnerRecord { boot: None, ..OwnerRecord::own() },
        ];
        for owner in &elsewhere {
            write(&at, owner);
            refused(
                Owner::take(&at),
                &format!("process {} on {:?}. This", owner.process, owner.host),
            );
        }
        for text in ["", "{}", "\u{fffd}"] {
            fs::write(&at, text).expect("it is ours");
            refused(Owner::take(&at), "does not say which");
        }
        fs::write(&at, [0xff]).expect("it is ours");
        refused(Owner::take(&at), &format!("delete {:?}", at.display().to_string()));
        fs::remove_file(&at).expect("it is ours");
        std::os::unix::fs::symlink("nowhere", &at).expect("a folder of ours");
        refused(Owner::take(&at), "a link stands in place");
        assert!(!folder.path().join("nowhere").exists());
        fs::remove_file(&at).expect("it is ours");
        fs::create_dir(&at).expect("a folder of ours");
        refused(Owner::take(&at), &at.display().to_string());
    }
}
