//! Export: writes a model's directory for other programs, from a checkpoint or from the directory
//! that a model was loaded from.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::adapters::{base_of, has_adapters};
use super::average::Averages;
use super::companions::copy_companions;
use super::merge::Merge;
use super::weights::weight_files;
use crate::error::Error;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";

/// Copies a model to a new directory. The directory appears complete or not at all. Files of the
/// tokenizer that `from` does not have are copied from `base`, the model that training began with.
/// Where `from` holds adapters, they are added to the weights of `base`, or else of the model that
/// the adapters name.
///
/// # Errors
/// `to` exists and is not empty; there is no model in `from`; a file cannot be copied.
pub fn export(from: &Path, base: Option<&Path>, to: &Path) -> Result<(), Error> {
    export_with(from, base, to, None)
}

/// The same for a checkpoint of a run with `optimizer.ema`, with the moving averages of the weights
/// in their place.
///
/// # Errors
/// As [`export`]; or the checkpoint has no averages, or is of adapters.
pub fn export_average(from: &Path, base: Option<&Path>, to: &Path) -> Result<(), Error> {
    if has_adapters(from) {
        let what = "it holds adapters, whose averages cannot be exported: leave out --ema";
        return Err(Error::bad_model(from.display(), what));
    }
    export_with(from, base, to, Some(Averages::of(from)?))
}

fn export_with(
    from: &Path,
    base: Option<&Path>,
    to: &Path,
    averages: Option<Averages>,
) -> Result<(), Error> {
    let is_new = fs::read_dir(to).map_or(!to.exists(), |mut entries| entries.next().is_none());
    if !is_new {
        let what = "it exists already: give a new directory";
        return Err(Error::argument(format_args!("{}: {what}", to.display())));
    }
    let named = has_adapters(from).then(|| base_of(from)).flatten();
    let base = base.or(named.as_deref());
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
    let has_index = files.len() > 1 || !weights_from.join("model.safetensors").exists();
    // The copy is made beside its place, under a name with this process's id, and then renamed.
    let to = &to.components().collect::<PathBuf>();
    let mut partial = to.clone().into_os_string();
    partial.push(format!(".l2l-{}", std::process::id()));
    let partial = Path::new(&partial);
    let failed = |error: io::Error| Error::storage(to.display(), error);
    let copied = (|| {
        fs::create_dir_all(partial).map_err(failed)?;
        let mut new = Vec::new();
        match &merge {
            Some(merge) => new = merge.write(&files, partial)?,
            None => copy(from, &files_of(&files), partial).map_err(failed)?,
        }
        for name in files_of(&files) {
            averages.as_ref().map_or(Ok(()), |all| all.write_over(&partial.join(name)))?;
        }
        if has_index {
            write_index(weights_from, &files, &new, partial)?;
        }
        // A checkpoint of adapters says what its head is; PEFT's directory has no config.json.
        let described = [from, weights_from].into_iter().find(|one| one.join(CONFIG).is_file());
        copy(described.unwrap_or(from), &[CONFIG.into()], partial).map_err(failed)?;
        base.map_or(Ok(()), |base| copy_companions(base, partial)).map_err(failed)?;
        copy_companions(from, partial).map_err(failed)?;
        publish(partial, to).map_err(failed)
    })();
    copied.inspect_err(|_| {
        let _ = fs::remove_dir_all(partial); // it may never have been made
    })
}

/// Copies files of these names, and waits until they are on the disk.
fn copy(from: &Path, names: &[PathBuf], to: &Path) -> io::Result<()> {
    for name in names {
        fs::copy(from.join(name), to.join(name))?;
        fs::File::open(to.join(name))?.sync_all()?;
    }
    Ok(())
}

/// The names of files.
fn files_of(files: &[PathBuf]) -> Vec<PathBuf> {
    files.iter().filter_map(|file| Some(file.file_name()?.into())).collect()
}

/// Copies the index of several files of weights. `new` tensors are in the last.
fn write_index(from: &Path, files: &[PathBuf], new: &[String], to: &Path) -> Result<(), Error> {
    let path = from.join(INDEX);
    let refuse = |what: String| Error::bad_model(path.display(), what);
    let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
    let mut index: Value =
        serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    let last = files_of(files).pop().unwrap_or_default().display().to_string();
    for name in new {
        index["weight_map"][name] = last.clone().into();
    }
    let text = serde_json::to_string_pretty(&index).expect("it is plain JSON");
    let path = to.join(INDEX);
    let written = fs::write(&path, text).and_then(|()| fs::File::open(&path)?.sync_all());
    written.map_err(|error| Error::storage(path.display(), error))
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
