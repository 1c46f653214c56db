//! Seals: they show whether a directory is as l2l wrote it.
//!
//! A checkpoint's record, `l2l.json`, has the SHA-256 of each other file of the directory. Its seal
//! is the SHA-256 of its own text with an empty seal. A directory without a record, such as another
//! program's, cannot be checked.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::machine;

/// The file that only a checkpoint has.
pub(crate) const RECORD: &str = "l2l.json";

/// The optimizer's states, which no model needs.
pub(crate) const STATES: &str = "optimizer.safetensors";

/// With a delay, the trained weights before the last update, which no model needs.
pub(crate) const OLDER: &str = "older.safetensors";

/// The bytes of a file that are read and hashed at a time.
const CHUNK: usize = 1 << 20;

/// The files of a directory that are compared with its seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sealed {
    /// All files.
    All,
    /// All files but those that only a run which resumes reads.
    Model,
}

/// The SHA-256 of each file of a directory and of its folders, by its path from there.
pub(crate) fn file_digests(directory: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut digests = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            let inner = file_digests(&path)?.into_iter();
            digests.extend(inner.map(|(file, digest)| (format!("{name}/{file}"), digest)));
        } else {
            digests.insert(name, file_digest(&path)?);
        }
    }
    Ok(digests)
}

pub(super) fn file_digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(hex(&hasher.finalize())),
            Ok(read) => hasher.update(&chunk[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Bytes in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest(text: &str) -> String {
    hex(&Sha256::digest(text))
}

/// The text of a seal in a record.
fn as_written(seal: &str) -> String {
    format!("\"seal\": \"{seal}\"")
}

/// Writes the seal into the text of a record, whose seal is empty.
pub(crate) fn seal(text: &str) -> String {
    text.replacen(&as_written(""), &as_written(&digest(text)), 1)
}

/// Compares a directory with its seal, if it has a record. A record of the first format names no
/// files, so it is checked when a run resumes from it.
///
/// # Errors
/// A file is damaged or changed (the error names it); or the disk fails.
pub(crate) fn check_seal(directory: &Path, which: Sealed) -> Result<(), Error> {
    let refuse = |what: String| {
        let what = format!(
            "it is damaged, or somebody changed it: {what}. Use another checkpoint; a model that \
             was changed with intent is read with --unsealed (model.unsealed = true)"
        );
        Error::bad_checkpoint(format_args!("checkpoint {}", directory.display()), what)
    };
    let cannot_read = |name: &str, error| Error::unusable(directory.join(name).display(), error);
    let text = match fs::read_to_string(directory.join(RECORD)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(refuse(format!("{RECORD}: {error}")));
        }
        text => text.map_err(|error| cannot_read(RECORD, error))?,
    };
    let record: Value =
        serde_json::from_str(&text).map_err(|error| refuse(format!("{RECORD}: {error}")))?;
    let files = match (record["format"].as_u64(), record["files"].as_object()) {
        (_, Some(files)) => files,
        (Some(1), None) => return Ok(()),
        (_, None) => return Err(refuse(format!("{RECORD} is not what was written"))),
    };
    let own = record["seal"].as_str().unwrap_or_default();
    let open = text.replacen(&as_written(own), &as_written(""), 1);
    if open == text || digest(&open) != own {
        return Err(refuse(format!("{RECORD} is not what was written")));
    }
    let mut compared: Vec<(&String, &Value)> = files.iter().collect();
    compared.retain(|(name, _)| which == Sealed::All || ![STATES, OLDER].contains(&&***name));
    let problem = |(name, digest): (&String, &Value)| match file_digest(&directory.join(name)) {
        Ok(found) if digest.as_str() == Some(&found) => None,
        Ok(_) => Some(refuse(format!("{name} is not what was written"))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Some(refuse(format!("{name} is missing")))
        }
        Err(error) => Some(cannot_read(name, error)),
    };
    // The digest of a file takes one thread, so several files are read side by side.
    let count = compared.len().clamp(1, machine::cores());
    let threads = ThreadPoolBuilder::new().num_threads(count).build().map_err(Error::no_thread)?;
    let found = threads.install(|| compared.into_par_iter().find_map_first(problem));
    found.map_or(Ok(()), Err)?;
    // A file of weights that was added later could be read in place of the checkpoint's.
    let is_weights = |name: &str| name.contains(".safetensors");
    for entry in fs::read_dir(directory).map_err(|error| cannot_read(".", error))? {
        let name = entry.map_err(|error| cannot_read(".", error))?.file_name();
        let name = name.to_string_lossy();
        if is_weights(&name) && !files.contains_key(&*name) {
            return Err(refuse(format!("{name} was not written with it")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with a seal, as a checkpoint has it.
    fn sealed() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("1_Pooling")).expect("a folder of ours");
        for name in ["model.safetensors", STATES, "1_Pooling/config.json"] {
            fs::write(at(name), name).expect("a folder of ours");
        }
        let files = file_digests(folder.path()).expect("they were just written");
        let record = serde_json::json!({ "format": 2, "files": files, "seal": "" });
        let text = serde_json::to_string_pretty(&record).expect("plain data");
        fs::write(at(RECORD), seal(&text)).expect("a folder of ours");
        folder
    }

    #[test]
    fn every_changed_byte_of_a_sealed_directory_is_found() {
        let folder = sealed();
        check_seal(folder.path(), Sealed::All).expect("it is as it was written");
        for name in ["model.safetensors", STATES, "1_Pooling/config.json", RECORD] {
            let path = folder.path().join(name);
            let whole = fs::read(&path).expect("it was just written");
            for at in 0..whole.len() {
                let mut changed = whole.clone();
                changed[at] ^= 1;
                fs::write(&path, &changed).expect("a folder of ours");
                let found = check_seal(folder.path(), Sealed::All);
                assert!(found.is_err(), "{name}, byte {at}");
            }
            fs::write(&path, &whole[..whole.len() / 2]).expect("a folder of ours");
            check_seal(folder.path(), Sealed::All).expect_err("half a file");
            fs::remove_file(&path).expect("a folder of ours");
            let found = check_seal(folder.path(), Sealed::All);
            assert!(found.is_err() || name == RECORD, "{name} is missing");
            fs::write(&path, &whole).expect("a folder of ours");
        }
    }

    #[test]
    fn a_model_is_checked_without_the_optimizers_states_and_with_all_weights() {
        let folder = sealed();
        fs::write(folder.path().join(STATES), "changed").expect("a folder of ours");
        check_seal(folder.path(), Sealed::Model).expect("the model is as it was written");
        fs::write(folder.path().join("README.md"), "notes").expect("a folder of ours");
        check_seal(folder.path(), Sealed::Model).expect("notes are nobody's weights");
        let index = "model.safetensors.index.json";
        fs::write(folder.path().join(index), "{}").expect("a folder of ours");
        let error = check_seal(folder.path(), Sealed::Model).expect_err("other weights");
        assert!(error.to_string().contains(index), "{error}");
    }
}
