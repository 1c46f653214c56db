//! Export: writes a model's directory for other programs, from a checkpoint or from the directory
//! that a model was loaded from.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::adapters::{base_of, has_adapters};
use super::average::Averages;
use super::companions::copy_companions;
use super::config::{read_config, read_shape, set_label_names};
use super::json;
use super::merge::Merge;
use super::sealed::{RECORD, Sealed, check_seal};
use super::shards::{Changed, Dtypes, Source, Tables};
use super::tensor_files::SHARD_BYTES;
use super::tied::has_own_head;
use super::weights::{check_format, weight_files};
use crate::config::WeightDtype;
use crate::error::Error;
use crate::folder;
use crate::lock::{DirectoryLock, OWNER};
use crate::models::{DENSE_FOLDERS, Head, Shape, families};

const CONFIG: &str = "config.json";

/// How an export is written.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportOptions {
    /// The dtype of its weights.
    pub dtype: WeightDtype,
    /// The most bytes of a file of weights. A larger tensor has a file of its own.
    pub shard_bytes: u64,
    /// Whether moving averages are written in place of the weights. The checkpoint has them if its
    /// run set `optimizer.ema`.
    pub average: bool,
    /// Whether a damaged or changed checkpoint is exported, too, and weights that are not finite.
    pub unsealed: bool,
    /// The head of the model with adapters. `None`: the one that the adapters bring, or else the
    /// model's own.
    pub head: Option<Head>,
    /// The names of the classes of adapters that do not name them. Empty: those of the model.
    pub labels: Vec<String>,
}

impl Default for ExportOptions {
    fn default() -> ExportOptions {
        let shard_bytes = SHARD_BYTES as u64;
        ExportOptions {
            dtype: WeightDtype::Source,
            shard_bytes,
            average: false,
            unsealed: false,
            head: None,
            labels: Vec::new(),
        }
    }
}

/// Writes a model to a new directory. The directory appears complete or not at all. Tokenizer files
/// that `from` does not have are copied from `base`, the model that training began with. If `from`
/// holds adapters, they are added to the weights of `base`, or else of the model that the adapters
/// name.
///
/// # Errors
/// `to` exists and is not empty; `from` has no model, is damaged, or has weights that are not
/// finite; a file cannot be written; or averages are asked for, and `from` has none or holds
/// adapters.
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
    if options.average {
        check_averages(from)?;
    }
    if !options.unsealed {
        check_seal(from, if options.average { Sealed::All } else { Sealed::Model })?;
    }
    let averages = options.average.then(|| Averages::open(from)).transpose()?;
    let named = has_adapters(from).then(|| base_of(from)).flatten();
    let base = base.or(named.as_deref());
    if let Some(base) = base.filter(|_| has_adapters(from) && !options.unsealed) {
        check_seal(base, Sealed::Model)?;
    }
    let (weights_from, changed) = match (has_adapters(from), base, averages) {
        (false, _, None) => (from, Changed::No),
        (false, _, Some(averages)) => (from, Changed::Averaged(averages)),
        (true, Some(base), _) => {
            (base, Changed::Merged(Box::new(Merge::new(from, base, options.head)?)))
        }
        (true, None, _) => {
            let what = "it holds adapters, and does not say of which model: set model.path to that \
                        model's directory";
            return Err(Error::bad_model(from.display(), what));
        }
    };
    if !weights_from.join(CONFIG).is_file() {
        let what = "there is no model to export: config.json is missing";
        return Err(Error::bad_model(weights_from.display(), what));
    }
    check_format(weights_from)?;
    let mut config = match &changed {
        Changed::Merged(merge) => merged_config(from, weights_from, merge, &options.labels)?,
        Changed::No | Changed::Averaged(_) => json::read(&from.join(CONFIG))?,
    };
    if let Some(keys) = config.as_object_mut() {
        keys.remove("quantization_config"); // weights in MXFP4 are written in floats
    }
    let tables = tables_of(weights_from, &config, &changed);
    let files = weight_files(weights_from)?;
    let shape = read_shape(weights_from).ok();
    let source = Source::open(&files, shape.as_ref(), &changed, tables, !options.unsealed)?;
    // A directory that only describes the model (model.random_weights) has no dtype to keep.
    let has_weights = |base: &&Path| {
        weight_files(base).is_ok_and(|files| files.iter().all(|file| file.is_file()))
    };
    let source_of_dtypes = base.filter(|base| *base != weights_from).filter(has_weights);
    let dtypes = Dtypes::of(options.dtype, source_of_dtypes)?;
    in_place(to, |partial, failed| {
        source.write(&changed, &dtypes, options.shard_bytes, partial)?;
        source.describe(&dtypes, &mut config);
        if tables.is_some_and(|tables| tables.has_own_head) {
            config["tie_word_embeddings"] = false.into();
        }
        json::write(&partial.join(CONFIG), &config)?;
        let all: Vec<&Path> = [from].into_iter().chain(base).collect();
        copy_companions(&all, partial).map_err(failed)
    })
}

/// Refuses averages of weights that an export does not write.
fn check_averages(from: &Path) -> Result<(), Error> {
    let has_dense = DENSE_FOLDERS.iter().any(|folder| from.join(folder).is_dir());
    let what = match (has_adapters(from), has_dense) {
        (true, _) => "it holds adapters, whose averages cannot be exported: leave out --ema",
        (_, true) => "it has Dense modules, whose averages cannot be exported: leave out --ema",
        (false, false) => return Ok(()),
    };
    Err(Error::bad_model(from.display(), what))
}

/// The tables of an exported model whose `config.json` ties its head to its embedding.
fn tables_of(weights_from: &Path, config: &Value, changed: &Changed) -> Option<Tables> {
    let shape = read_shape(weights_from).ok().filter(|shape| shape.tied)?;
    families::read(config).ok().filter(Shape::scores_vocabulary)?;
    let parted = matches!(changed, Changed::Merged(merge) if merge.unties());
    let has_own_head = parted || has_own_head(weights_from, &shape);
    Some(Tables { names: shape.names, has_own_head })
}

const OF_IMAGES: &str = "it also reads images, and adapters with a head of classes cannot be \
                         merged into it: train without train.lora";

/// The `config.json` of a model with adapters. A checkpoint of adapters has its own. PEFT's
/// directory has none, or the base model's, so that the head is described here.
fn merged_config(
    from: &Path,
    base: &Path,
    merge: &Merge,
    labels: &[String],
) -> Result<Value, Error> {
    let source = read_config(base)?;
    if families::text_part(&source).is_some() {
        // The rest of the base is copied, so that the model reads images as before.
        return match merge.shape().scores_vocabulary() {
            true => Ok(source),
            false => Err(Error::bad_model(base.display(), OF_IMAGES)),
        };
    }
    if from.join(RECORD).is_file() {
        return json::read(&from.join(CONFIG));
    }
    let of_base = families::read(&source).map(|shape| shape.head);
    let head = merge.shape().head;
    let mut config = match of_base == Ok(head) {
        true => source,
        false => families::write(merge.shape(), &source),
    };
    if !labels.is_empty() {
        if head.labels() != Some(labels.len()) {
            let problem = format_args!(
                "has {} names, and the head of the adapters in {} has {} classes",
                labels.len(),
                from.display(),
                head.labels().unwrap_or(0)
            );
            return Err(Error::config("model.labels", problem));
        }
        set_label_names(&mut config, labels);
    }
    Ok(config)
}

/// Makes a directory: `fill` writes a partial one beside its place, which is then renamed. A lock
/// keeps a second export out of the partial directory. `fill` gets it, and a function that makes
/// errors about the directory.
fn in_place(
    to: &Path,
    fill: impl FnOnce(&Path, &dyn Fn(io::Error) -> Error) -> Result<(), Error>,
) -> Result<(), Error> {
    let to = &to.components().collect::<PathBuf>();
    let mut partial = to.clone().into_os_string();
    partial.push(".l2l-partial");
    let partial = Path::new(&partial);
    let failed = |error: io::Error| Error::storage(to.display(), error);
    let _lock = DirectoryLock::open(partial, LOCK).map_err(failed)?;
    let made = clear(partial).map_err(failed).and_then(|()| {
        fill(partial, &failed)?;
        fs::remove_file(partial.join(LOCK)).map_err(failed)?;
        publish(partial, to).map_err(failed)?;
        // Where the file system has no locks, the directory was this run's until it had its name.
        let owner = to.join(format!("{LOCK}{OWNER}"));
        if owner.exists() { fs::remove_file(owner).map_err(failed) } else { Ok(()) }
    });
    made.inspect_err(|_| {
        let _ = fs::remove_dir_all(partial); // it may never have been made
    })
}

/// The file in a partial directory that an export has locked.
const LOCK: &str = ".l2l-lock";

/// Removes the files that a killed export left.
fn clear(partial: &Path) -> io::Result<()> {
    for entry in fs::read_dir(partial)? {
        let entry = entry?;
        let is_lock = entry.file_name().to_string_lossy().starts_with(LOCK);
        match (is_lock, entry.file_type()?.is_dir()) {
            (true, _) => {}
            (false, true) => fs::remove_dir_all(entry.path())?,
            (false, false) => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// Gives a complete directory its name. An empty directory of this name is replaced.
fn publish(partial: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        fs::remove_dir(to)?;
    }
    fs::rename(partial, to)?;
    folder::sync(folder::parent(to))
}
