//! Locks of files and directories, so that one process uses them at a time.
//!
//! A lock belongs to the file that a path led to when the lock was taken. If the file is removed,
//! renamed or replaced, the path may lead to a file that another process uses. So a process checks
//! [`Lock::still_held`] before it writes.
//!
//! Some file systems have no locks: NFS without a lock manager, Lustre, some in user space. There
//! a file beside the one to be locked names the process that has it ([`Owner`]).

mod owner;

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::folder;
use owner::Owner;

/// A locked file or directory.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    held: Held,
}

/// How a file is locked.
#[derive(Debug)]
enum Held {
    /// By the system.
    Locked(File),
    /// By a file beside it.
    Owned(Owner),
}

/// What the name of an [`Owner`]'s file has behind that of the locked file.
pub(crate) const OWNER: &str = ".owner";

impl Lock {
    /// Locks a file that was opened at this path.
    ///
    /// # Errors
    /// Another process has locked it, or the path leads elsewhere by now.
    pub(crate) fn of(path: &Path, file: File) -> io::Result<Lock> {
        match Lock::by_system(path, file) {
            Err(error) if says_no_locks(&error) => {
                let mut beside = path.as_os_str().to_owned();
                beside.push(OWNER);
                let owner = Owner::take(Path::new(&beside))?;
                Ok(Lock { path: path.into(), held: Held::Owned(owner) })
            }
            locked => locked,
        }
    }

    /// Locks a file or a directory that was opened at this path, if the file system has locks.
    fn by_system(path: &Path, file: File) -> io::Result<Lock> {
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another run has it"),
            TryLockError::Error(error) => error,
        })?;
        let lock = Lock { path: path.into(), held: Held::Locked(file) };
        lock.still_held()?;
        Ok(lock)
    }

    /// True if the file system has locks.
    pub(crate) fn is_by_system(&self) -> bool {
        matches!(self.held, Held::Locked(_))
    }

    /// Checks that this process still has what it locked: the path leads to the same file, or the
    /// file beside it still names this owner.
    ///
    /// # Errors
    /// The file was removed, renamed or replaced.
    pub(crate) fn still_held(&self) -> io::Result<()> {
        let file = match &self.held {
            Held::Locked(file) => file,
            Held::Owned(owner) => return owner.still_held(),
        };
        let at = self.path.display().to_string();
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("{at:?}: {error}"));
        let what = match fs::metadata(&self.path) {
            Ok(there) if is_same(&there, &file.metadata().map_err(failed)?) => return Ok(()),
            Ok(_) => "was replaced by another",
            Err(error) if error.kind() == ErrorKind::NotFound => "was removed or renamed",
            Err(error) => return Err(failed(error)),
        };
        Err(io::Error::other(format!("{at:?} {what} while this run had it")))
    }
}

/// True if the error of a lock means that the file system has no locks.
fn says_no_locks(error: &io::Error) -> bool {
    let is = |none: Errno| error.raw_os_error() == Some(none.raw_os_error());
    error.kind() == ErrorKind::Unsupported || [Errno::NOSYS, Errno::NOLCK].into_iter().any(is)
}

/// A directory that only this process uses.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    /// The directory itself is locked, too, because somebody may remove the file. `None` if the
    /// system locks no directories.
    itself: Option<Lock>,
    file: Lock,
}

impl DirectoryLock {
    /// Makes the directory if it does not exist, and locks it and a file `name` in it.
    ///
    /// # Errors
    /// The directory cannot be made or written to, or another process has locked it.
    pub(crate) fn open(directory: &Path, name: &str) -> io::Result<DirectoryLock> {
        folder::create(directory)?;
        // Network file systems lock no directories, and some systems do not open them.
        let itself = match File::open(directory).map(|file| Lock::by_system(directory, file)) {
            Ok(Err(error)) if error.kind() == ErrorKind::Other => return Err(error),
            opened => opened.and_then(|locked| locked).ok(),
        };
        let path = directory.join(name);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path)?;
        let lock = DirectoryLock { itself, file: Lock::of(&path, file)? };
        lock.still_held()?;
        Ok(lock)
    }

    /// Checks that the path still leads to this directory.
    ///
    /// # Errors
    /// The directory was removed, renamed or replaced.
    pub(crate) fn still_held(&self) -> io::Result<()> {
        self.itself.as_ref().unwrap_or(&self.file).still_held()
    }
}

#[cfg(unix)]
fn is_same(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Other systems do not remove or rename a file that is open.
#[cfg(not(unix))]
fn is_same(_: &fs::Metadata, _: &fs::Metadata) -> bool {
    true
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn open(directory: &Path) -> io::Result<DirectoryLock> {
        DirectoryLock::open(directory, "lock")
    }

    #[track_caller]
    fn refused<T>(outcome: io::Result<T>, says: &str) {
        let error = outcome.err().expect("somebody else has it").to_string();
        assert!(error.contains(says), "{error}");
    }

    #[test]
    fn a_directory_belongs_to_one_process() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("new/deep");
        let lock = open(&at).expect("it is free");
        refused(open(&at), "another run has it");
        lock.still_held().expect("nobody touched it");
        drop(lock);
        open(&at).expect("it is free again");
    }

    /// The lock holds if somebody removes the file, or renames the directory.
    #[test]
    fn nobody_enters_a_directory_that_is_held() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("one");
        let other = folder.path().join("other");
        let lock = open(&at).expect("it is free");
        fs::remove_file(at.join("lock")).expect("it is ours");
        refused(open(&at), "another run has it");
        lock.still_held().expect("the directory is there");
        fs::rename(&at, &other).expect("a folder of ours");
        refused(open(&other), "another run has it");
        refused(lock.still_held(), "was removed or renamed");
        fs::rename(&other, &at).expect("a folder of ours");
        lock.still_held().expect("it is back");
    }

    #[test]
    fn a_directory_that_is_gone_or_replaced_is_noticed() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("one");
        let lock = open(&at).expect("it is free");
        fs::remove_dir_all(&at).expect("it is ours");
        refused(lock.still_held(), "was removed or renamed");
        let second = open(&at).expect("this is a new one");
        refused(lock.still_held(), "was replaced");
        drop(lock);
        second.still_held().expect("the first one's end is nothing to it");
        refused(open(&at), "another run has it");
    }

    /// A process that locks a file after its removal would use it beside another process.
    #[test]
    fn a_file_that_is_removed_between_open_and_lock_is_not_held() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = folder.path().join("lock");
        let file = File::create(&at).expect("a folder of ours");
        fs::remove_file(&at).expect("it is ours");
        refused(Lock::of(&at, file), "was removed");
        let file = File::create(&at).expect("a folder of ours");
        fs::remove_file(&at).expect("it is ours");
        File::create(&at).expect("a folder of ours");
        refused(Lock::of(&at, file), "was replaced");
    }

    #[test]
    fn file_systems_without_locks_are_told_from_other_errors() {
        let says = |error: Errno| says_no_locks(&io::Error::from(error));
        assert!([Errno::NOSYS, Errno::NOLCK, Errno::OPNOTSUPP].into_iter().all(says));
        assert!(![Errno::IO, Errno::WOULDBLOCK, Errno::STALE].into_iter().any(says));
    }
}
