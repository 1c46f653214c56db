//! Export: writes a model's directory for other programs, from a checkpoint or from the directory
//! that a model was loaded from.

use std::fs;
use std::path::{Path, PathBuf};

use super::companions::copy_companions;
use super::weights::weight_files;
use crate::error::Error;

/// Copies a model to a new directory. The directory appears complete or not at all. Files of the
/// tokenizer that `from` does not have are copied from `tokenizer`.
///
/// # Errors
/// `to` exists and is not empty; there is no model in `from`; a file cannot be copied.
pub fn export(from: &Path, tokenizer: Option<&Path>, to: &Path) -> Result<(), Error> {
    let is_new = fs::read_dir(to).map_or(!to.exists(), |mut entries| entries.next().is_none());
    if !is_new {
        let what = "it exists already: give a new directory";
        return Err(Error::argument(format_args!("{}: {what}", to.display())));
    }
    if !from.join("config.json").is_file() {
        let what = "there is no model to export: config.json is missing";
        return Err(Error::bad_model(from.display(), what));
    }
    let mut names = vec!["config.json".to_string()];
    for weights in weight_files(from)? {
        let name = weights.file_name().and_then(|name| name.to_str()).map(str::to_string);
        names.push(name.ok_or_else(|| {
            Error::bad_model(from.display(), "a weights file's name is not UTF-8")
        })?);
    }
    let index = "model.safetensors.index.json";
    names.extend(
        (names.len() > 2 || !from.join("model.safetensors").exists()).then(|| index.into()),
    );
    // The copy is made beside its place, under a name with this process's id, and then renamed.
    let to = &to.components().collect::<PathBuf>();
    let mut partial = to.clone().into_os_string();
    partial.push(format!(".l2l-{}", std::process::id()));
    let partial = Path::new(&partial);
    let copied = (|| {
        fs::create_dir_all(partial)?;
        for name in &names {
            fs::copy(from.join(name), partial.join(name))?;
            fs::File::open(partial.join(name))?.sync_all()?;
        }
        tokenizer.map_or(Ok(()), |tokenizer| copy_companions(tokenizer, partial))?;
        copy_companions(from, partial)?;
        if to.exists() {
            fs::remove_dir(to)?; // it is empty
        }
        fs::rename(partial, to)?;
        let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
        fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    })();
    copied.map_err(|error: std::io::Error| {
        let _ = fs::remove_dir_all(partial); // it may never have been made
        Error::storage(to.display(), error)
    })
}
