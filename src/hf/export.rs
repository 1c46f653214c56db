//! Export: writes a model's directory for other programs, from a checkpoint or from the directory
//! that a model was loaded from.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::adapters::{base_of, has_adapters};
use super::average::Averages;
use super::companions::copy_companions;
use super::merge::Merge;
use super::sealed::{Sealed, check_seal};
use super::shards::{Changed, Dtypes, Source};
use super::tensor_files::SHARD_BYTES;
use super::weights::weight_files;
use crate::config::WeightDtype;
use crate::error::Error;
use crate::lock::DirectoryLock;

const CONFIG: &str = "config.json";

/// How an export is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// The dtype of its weights.
    pub dtype: WeightDtype,
    /// The most bytes of a file of weights. A tensor that is larger has a file of its own.
    pub shard_bytes: u64,
    /// Whether it has the moving averages of the weights in their place, from a checkpoint of a run
    /// with `optimizer.ema`.
    pub average: bool,
    /// Whether it is made also of a damaged or changed checkpoint, and of weights that are not
    /// finite.
    pub unsealed: bool,
}

impl Default for ExportOptions {
    fn default() -> ExportOptions {
        let (dtype, shard_bytes) = (WeightDtype::Source, SHARD_BYTES as u64);
        ExportOptions { dtype, shard_bytes, average: false, unsealed: false }
    }
}

/// Writes a model to a new directory. The directory appears complete or not at all. Files of the
/// tokenizer that `from` does not have are copied from `base`, the model that training began with.
/// Where `from` holds adapters, they are added to the weights of `base`, or else of the model that
/// the adapters name.
///
/// # Errors
/// `to` exists and is not empty; there is no model in `from`, it is damaged, or its weights are not
/// finite; a file cannot be written; averages are asked for, and `from` has none or holds adapters.
pub fn export(
    from: &Path,
    base: Option<&Path>,
    to: &Path,
    options: ExportOptions,
) -> Result<(), Error> {
    let is_new = fs::read_dir(to).map_or(!to.exists(), |mut entries| entries.next().is_none());
    if !is_new {
        let what = "it exists already: give a new directory";
        return Err(Error::argument(format_args!("{}: {what}", to.display())));
    }
    if options.average && has_adapters(from) {
        let what = "it holds adapters, whose averages cannot be exported: leave out --ema";
        return Err(Error::bad_model(from.display(), what));
    }
    if !options.unsealed {
        check_seal(from, if options.average { Sealed::All } else { Sealed::Model })?;
    }
    let averages = options.average.then(|| Averages::of(from)).transpose()?;
    let named = has_adapters(from).then(|| base_of(from)).flatten();
    let base = base.or(named.as_deref());
    if let Some(base) = base.filter(|_| has_adapters(from) && !options.unsealed) {
        check_seal(base, Sealed::Model)?;
    }
    let (weights_from, merge) = match (has_adapters(from), base) {
        (false, _) => (from, None),
        (true, Some(base)) => (base, Some(Merge::new(from, base)?)),
        (true, None) => {
            let what = "it holds adapters, and does not say of which model: set model.path to that \
                        model's directory";
            return Err(Error::bad_model(from.display(), what));
        }
    };
    if !weights_from.join(CONFIG).is_file() {
        let what = "there is no model to export: config.json is missing";
        return Err(Error::bad_model(weights_from.display(), what));
    }
    let files = weight_files(weights_from)?;
    let changed = match (merge, averages) {
        (Some(merge), _) => Changed::Merged(merge),
        (None, Some(averages)) => Changed::Averaged(averages),
        (None, None) => Changed::No,
    };
    let source = Source::open(&files, &changed, !options.unsealed)?;
    // A directory that only describes the model (model.random_weights) has no dtype to keep.
    let has_weights = |base: &&Path| {
        weight_files(base).is_ok_and(|files| files.iter().all(|file| file.is_file()))
    };
    let source_of_dtypes = base.filter(|base| *base != weights_from).filter(has_weights);
    let dtypes = Dtypes::of(options.dtype, source_of_dtypes)?;
    // The copy is made beside its place, in a directory that one export has alone, and renamed.
    let to = &to.components().collect::<PathBuf>();
    let mut partial = to.clone().into_os_string();
    partial.push(".l2l-partial");
    let partial = Path::new(&partial);
    let failed = |error: io::Error| Error::storage(to.display(), error);
    let _lock = DirectoryLock::open(partial, LOCK).map_err(failed)?;
    let copied = (|| {
        clear(partial).map_err(failed)?;
        source.write(&changed, &dtypes, options.shard_bytes, partial)?;
        // A checkpoint of adapters says what its head is; PEFT's directory has no config.json.
        let described = [from, weights_from].into_iter().find(|one| one.join(CONFIG).is_file());
        let path = described.unwrap_or(from).join(CONFIG);
        let text = fs::read_to_string(&path).map_err(|e| Error::bad_model(path.display(), e))?;
        let mut described: Value =
            serde_json::from_str(&text).map_err(|e| Error::bad_model(path.display(), e))?;
        source.describe(&dtypes, &mut described);
        let text = serde_json::to_string_pretty(&described).expect("it is plain JSON");
        write_file(&partial.join(CONFIG), &text)?;
        base.map_or(Ok(()), |base| copy_companions(base, partial)).map_err(failed)?;
        copy_companions(from, partial).map_err(failed)?;
        fs::remove_file(partial.join(LOCK)).map_err(failed)?;
        publish(partial, to).map_err(failed)
    })();
    copied.inspect_err(|_| {
        let _ = fs::remove_dir_all(partial); // it may never have been made
    })
}

/// Writes a file, and waits until it is on the disk.
pub(super) fn write_file(path: &Path, text: &str) -> Result<(), Error> {
    let written = fs::write(path, text).and_then(|()| fs::File::open(path)?.sync_all());
    written.map_err(|error| Error::storage(path.display(), error))
}

/// The file that says who makes a copy.
const LOCK: &str = ".l2l-lock";

/// Removes what a killed export left.
fn clear(partial: &Path) -> io::Result<()> {
    for entry in fs::read_dir(partial)? {
        let entry = entry?;
        match (entry.file_name() == LOCK, entry.file_type()?.is_dir()) {
            (true, _) => {}
            (false, true) => fs::remove_dir_all(entry.path())?,
            (false, false) => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// Gives a complete directory its name, under which there is nothing, or an empty directory.
fn publish(partial: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        fs::remove_dir(to)?;
    }
    fs::rename(partial, to)?;
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}
