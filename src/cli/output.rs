//! The output of the command line: the only way to standard output, and files that flags name.
//!
//! A command that loses output does not end with status 0. Each loss is reported on standard error
//! when it is found, and a command that did its work all the same ends with status 1. A reader that
//! went away (`| head`) is not a loss: the command ends early and quietly, with the status of
//! SIGPIPE, as other tools do.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use l2l::Error;
use l2l::limits::{named, named_error};
use l2l::telemetry::files;

use super::say;

/// The status of a command whose reader went away: 128 and the number of SIGPIPE.
const READER_GONE: u8 = 141;

/// True once standard output is a pipe that nobody reads any more.
static READER_IS_GONE: AtomicBool = AtomicBool::new(false);

/// True once standard output cannot be written for another reason.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// True once any output is lost.
static IS_LOST: AtomicBool = AtomicBool::new(false);

/// Prints a line and flushes it.
pub(super) fn print(line: impl Display) {
    print_part(format_args!("{line}\n"));
}

/// Prints a part of a line and flushes it. Once a write has failed, nothing more is printed, so the
/// output has no gaps.
pub(super) fn print_part(text: impl Display) {
    if has_ended() {
        return;
    }
    let mut out = io::stdout().lock();
    let written = write!(out, "{text}").and_then(|()| out.flush());
    drop(out);
    match written {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => READER_IS_GONE.store(true, Relaxed),
        Err(error) => {
            HAS_FAILED.store(true, Relaxed);
            lose(format_args!("standard output: {}; it ends here", named(error)));
        }
    }
}

/// True once nothing more can be printed. Commands that only print end then.
pub(super) fn has_ended() -> bool {
    reader_is_gone() || HAS_FAILED.load(Relaxed)
}

/// True once nobody reads standard output any more.
pub(super) fn reader_is_gone() -> bool {
    READER_IS_GONE.load(Relaxed)
}

/// Reports lost output and the reason. The command goes on, and ends with status 1.
pub(super) fn lose(what: impl Display) {
    IS_LOST.store(true, Relaxed);
    say(format_args!("error: {}", named(what)));
}

/// The exit status of a command that did its work.
pub(super) fn status() -> u8 {
    match (IS_LOST.load(Relaxed), reader_is_gone()) {
        (true, _) => 1,
        (false, true) => READER_GONE,
        (false, false) => 0,
    }
}

/// The error for a file or folder that a flag names and that cannot be written. It is a bad
/// argument (status 2), unless the disk is full (status 1).
pub(super) fn refused(flag: &str, path: &Path, source: io::Error) -> Error {
    use ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    let started = matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge);
    let place = format!("{flag} {}", path.display());
    Error::Storage { place, source: named_error(source), started }
}

/// A file that a flag names, for one text. Its old content stays until the text is complete.
pub(super) struct OutputFile<'p> {
    flag: &'static str,
    path: &'p Path,
    /// The open file, if it is a device or a pipe.
    stream: Option<File>,
}

impl<'p> OutputFile<'p> {
    /// Checks that the file can be opened for writing.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(super) fn open(flag: &'static str, path: &'p Path) -> Result<OutputFile<'p>, Error> {
        let there = match OpenOptions::new().append(true).open(path) {
            Ok(file) => Some(file),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(refused(flag, path, error)),
        };
        let is_stream = |file: &File| file.metadata().is_ok_and(|it| !it.is_file());
        Ok(OutputFile { flag, path, stream: there.filter(is_stream) })
    }

    /// Checks that there is room for a text of this length, before the work that makes the text. A
    /// device or a pipe gets `comment`, with which the text begins.
    ///
    /// # Errors
    /// There is no room.
    pub(super) fn check_room(&mut self, like: &str, comment: &str) -> Result<(), Error> {
        let found = match &mut self.stream {
            Some(stream) => stream.write_all(comment.as_bytes()),
            None => files::has_room(self.path, like),
        };
        found.map_err(|error| refused(self.flag, self.path, error))
    }

    /// Writes the text.
    ///
    /// # Errors
    /// It could not be written.
    pub(super) fn write(self, text: &str) -> Result<(), Error> {
        let written = match self.stream {
            Some(mut stream) => stream.write_all(text.as_bytes()),
            None => files::replace(self.path, text),
        };
        written.map_err(|error| refused(self.flag, self.path, error))
    }
}

/// Writes a text to a file that a flag names.
///
/// # Errors
/// It cannot be written.
pub(super) fn write_file(flag: &'static str, path: &Path, text: &str) -> Result<(), Error> {
    OutputFile::open(flag, path)?.write(text)
}
