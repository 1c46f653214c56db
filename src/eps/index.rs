//! What says which of a block's two copies on file is the one to go on from.
//!
//! It is written at the end of a step, when all that the step wrote is on the disk, in turns to one of
//! two files; one that was torn does not have its digest, and the other is the state before. So a kill
//! at any moment costs the running step and nothing else.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

/// One block, as its newest copy is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    /// Which of the two copies.
    pub(super) copy: u8,
    /// Updates it has had.
    pub(super) updates: u64,
    /// Of its parts, masters first: digests; none: zeros, of which nothing was written.
    pub(super) digests: Vec<Option<String>>,
}

/// See the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    /// How often it was written.
    pub(super) sequence: u64,
    /// Training steps done.
    pub(super) step: u64,
    /// Floats of each part, parts of each block: what the copies' places follow from.
    pub(super) layout: String,
    /// All blocks.
    pub(super) blocks: Vec<Entry>,
    /// What the run remembers beside.
    pub(super) run: Value,
}

impl Index {
    fn path(folder: &Path, sequence: u64) -> PathBuf {
        folder.join(format!("index.{}", sequence % 2))
    }

    /// The newest that is whole, if there is one.
    ///
    /// # Errors
    /// There are some, and none is whole.
    pub(super) fn read(folder: &Path) -> io::Result<Option<Index>> {
        let mut newest: Option<Index> = None;
        let mut torn = None;
        for nth in 0..2 {
            let path = Index::path(folder, nth);
            match fs::read(&path).and_then(|bytes| Index::parse(&bytes)) {
                Ok(index) if newest.as_ref().is_none_or(|n| n.sequence < index.sequence) => {
                    newest = Some(index);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    torn =
                        Some(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
                }
            }
        }
        match (newest, torn) {
            (None, Some(error)) => Err(error),
            (newest, _) => Ok(newest),
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

    /// Writes it over the older of the two, to the disk.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self).expect("it is plain data");
        let path = Index::path(folder, self.sequence);
        let is_new = !path.exists();
        let mut file = File::create(path)?;
        writeln!(file, "{:032x}", xxh3_128(&text))?;
        file.write_all(&text)?;
        file.sync_data()?;
        if is_new { File::open(folder)?.sync_all() } else { Ok(()) }
    }

    /// Makes it that there is none.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn remove(folder: &Path) -> io::Result<()> {
        for nth in 0..2 {
            match fs::remove_file(Index::path(folder, nth)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        File::open(folder)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_whole_one_counts() {
        let folder = tempfile::tempdir().expect("a place for files");
        let folder = folder.path();
        assert_eq!(Index::read(folder).expect("none is no fault"), None);
        let index = |sequence| Index { sequence, step: 10 * sequence, ..Index::default() };
        for sequence in 1..5 {
            index(sequence).write(folder).expect("a disk with room");
            assert_eq!(Index::read(folder).expect("it is whole"), Some(index(sequence)));
        }
        let newest = Index::path(folder, 4);
        let bytes = fs::read(&newest).expect("it was written");
        for len in 0..bytes.len() {
            fs::write(&newest, &bytes[..len]).expect("a disk with room");
            assert_eq!(Index::read(folder).expect("the other is whole"), Some(index(3)));
        }
        fs::write(Index::path(folder, 3), "no index").expect("a disk with room");
        assert!(Index::read(folder).is_err());
        Index::remove(folder).expect("a folder of ours");
        assert_eq!(Index::read(folder).expect("none is no fault"), None);
    }
}
