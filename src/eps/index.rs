//! The index of an EPS on file: it says which of a block's two copies is valid.
//!
//! The index is written at the end of a step, when all data of the step is on the disk. It is
//! written to two files in turn. A file that was torn by a kill or a power loss does not match its
//! digest, and then the other file has the state before. So a kill or a power loss costs the running
//! step alone.

use std::cmp::Reverse;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

use crate::fabric::Rank;
use crate::folder::sync;

/// The valid copy of one block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    /// Which of the two copies is valid: 0 or 1.
    pub(super) copy: u8,
    /// The number of updates the block has had.
    pub(super) updates: u64,
    /// The digest of each run, masters first. `None`: the run was never written, and is zeros.
    pub(super) digests: Vec<Option<String>>,
}

/// Which copies are valid, and the run that wrote them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    /// The number of times the index was written. The higher one of the two files is newer.
    pub(super) sequence: u64,
    /// The number of training steps done.
    pub(super) step: u64,
    /// The number of runs and their sizes. The places of all copies follow from it.
    pub(super) layout: String,
    pub(super) blocks: Vec<Entry>,
    /// The state of the run beside its blocks (progress, identity), as the checkpoint room writes
    /// it.
    pub(super) run: Value,
}

/// The state of a run that a folder holds.
#[derive(Clone, Debug)]
pub(crate) struct StateOnFile {
    /// The number of training steps done.
    pub(crate) step: u64,
    /// The run's progress and identity.
    pub(crate) run: Value,
}

/// The folder of one rank, if several have an EPS on file.
pub(crate) fn rank_folder(path: &Path, rank: Rank) -> PathBuf {
    path.join(format!("{OF_RANK}{rank}"))
}

const OF_RANK: &str = "rank-";

/// The states that a folder holds, the newest first: after the last step, and after the step before.
/// The folder need not be locked.
///
/// # Errors
/// There is a state, and it is not complete; or there is one of another number of processes.
pub(super) fn states_in(folder: &Path) -> io::Result<Vec<StateOnFile>> {
    let all = Index::all(folder)?;
    let is_of_rank = folder.file_name().is_some_and(|name| {
        name.to_str().and_then(|name| name.strip_prefix(OF_RANK)?.parse::<Rank>().ok()).is_some()
    });
    let other = match folder.parent() {
        Some(whole) if is_of_rank => (whole.to_path_buf(), "the state of one process"),
        _ => (rank_folder(folder, 0), "the states of several processes"),
    };
    if all.is_empty() && !Index::all(&other.0)?.is_empty() {
        let what = format!(
            "{} holds {}: start as many, resume from a checkpoint, or name another folder",
            other.0.display(),
            other.1
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(all.into_iter().map(|Index { step, run, .. }| StateOnFile { step, run }).collect())
}

/// The newest of these states.
///
/// # Errors
/// As [`states_in`].
pub(crate) fn state_in(folder: &Path) -> io::Result<Option<StateOnFile>> {
    Ok(states_in(folder)?.into_iter().next())
}

impl Index {
    fn path(folder: &Path, sequence: u64) -> PathBuf {
        folder.join(format!("index.{}", sequence % 2))
    }

    /// Reads all indexes that are complete, at most two, the newest first.
    ///
    /// # Errors
    /// There is an index, and none is complete; or one cannot be read, which may be the newest.
    pub(super) fn all(folder: &Path) -> io::Result<Vec<Index>> {
        let mut all: Vec<Index> = Vec::new();
        let mut torn = None;
        for nth in 0..2 {
            let path = Index::path(folder, nth);
            match fs::read(&path).and_then(|bytes| Index::parse(&bytes)) {
                Ok(index) => all.push(index),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let kind = error.kind();
                    let error = io::Error::new(kind, format!("{}: {error}", path.display()));
                    if kind != io::ErrorKind::InvalidData {
                        return Err(error);
                    }
                    torn = Some(error);
                }
            }
        }
        all.sort_by_key(|index| Reverse(index.sequence));
        match torn {
            Some(error) if all.is_empty() => Err(error),
            _ => Ok(all),
        }
    }

    fn parse(bytes: &[u8]) -> io::Result<Index> {
        let broken = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        let end = bytes.iter().position(|&byte| byte == b'\n');
        let (digest, text) = bytes.split_at(end.ok_or_else(|| broken("no digest"))?);
        if format!("{:032x}", xxh3_128(&text[1..])).as_bytes() != digest {
            return Err(broken("it is not what was written"));
        }
        serde_json::from_slice(&text[1..]).map_err(|error| broken(&error.to_string()))
    }

    /// Writes the index over the older of the two files, and waits until it is on the disk.
    ///
    /// # Errors
    /// The disk fails or is full.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self).expect("it is plain data");
        let path = Index::path(folder, self.sequence);
        // A new file gets its name when it is complete. So a torn file without another is damage.
        let is_new = !path.try_exists()?;
        let at = if is_new { folder.join("index.new") } else { path.clone() };
        let mut file = File::create(&at)?;
        file.write_all(&[format!("{:032x}\n", xxh3_128(&text)).as_bytes(), &text].concat())?;
        file.sync_all()?;
        if is_new {
            fs::rename(at, path)?;
            sync(folder)?;
        }
        Ok(())
    }

    /// Waits until both files and the folder are on the disk. A run that was killed may have left
    /// the newest one in the system's memory, when the next write is over the other one.
    ///
    /// # Errors
    /// The disk fails.
    pub(super) fn sync(folder: &Path) -> io::Result<()> {
        for nth in 0..2 {
            match sync(&Index::path(folder, nth)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        sync(folder)
    }

    /// Removes both files, so that the folder holds no state.
    ///
    /// # Errors
    /// The disk fails.
    pub(super) fn remove(folder: &Path) -> io::Result<()> {
        for nth in 0..2 {
            match fs::remove_file(Index::path(folder, nth)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        sync(folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_complete_index_is_read() {
        let folder = tempfile::tempdir().expect("a place for files");
        let folder = folder.path();
        assert_eq!(Index::all(folder).expect("none is no fault"), []);
        let index = |sequence| Index { sequence, step: 10 * sequence, ..Index::default() };
        for sequence in 1..5 {
            index(sequence).write(folder).expect("a disk with room");
            let all = Index::all(folder).expect("they are whole");
            let expected = [index(sequence), index(sequence - 1)];
            assert_eq!(all, expected[..if sequence > 1 { 2 } else { 1 }]);
        }
        let newest = Index::path(folder, 4);
        let bytes = fs::read(&newest).expect("it was written");
        for len in 0..bytes.len() {
            fs::write(&newest, &bytes[..len]).expect("a disk with room");
            assert_eq!(Index::all(folder).expect("the other is whole"), [index(3)]);
        }
        fs::write(Index::path(folder, 3), "no index").expect("a disk with room");
        assert!(Index::all(folder).is_err());
        Index::remove(folder).expect("a folder of ours");
        assert_eq!(Index::all(folder).expect("none is no fault"), []);
    }

    /// It may be the newest, and the blocks of the other one are written over then.
    #[test]
    fn an_index_that_cannot_be_read_is_not_taken_for_a_torn_one() {
        let folder = tempfile::tempdir().expect("a place for files");
        let folder = folder.path();
        for sequence in 1..3 {
            let index = Index { sequence, ..Index::default() };
            index.write(folder).expect("a disk with room");
        }
        let newest = Index::path(folder, 2);
        fs::remove_file(&newest).expect("it was written");
        fs::create_dir(&newest).expect("a folder cannot be read as a file");
        let error = Index::all(folder).expect_err("it cannot be read").to_string();
        assert!(error.contains("index.0"), "{error}");
    }
}
