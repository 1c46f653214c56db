//! A directory for others, from a checkpoint or from where a model was loaded.

use std::fs;
use std::path::{Path, PathBuf};

use super::carry::carry;
use super::weights::weight_files;
use crate::error::Error;

/// Copies a model to a new directory, which is there whole or not at all; with the tokenizer's
/// files of `tokenizer` where `from` has none.
///
/// # Errors
/// `to` is there already; there is no model in `from`; a file cannot be copied.
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
    // Beside its place, under a name that is nobody else's.
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
        tokenizer.map_or(Ok(()), |tokenizer| carry(tokenizer, partial))?;
        carry(from, partial)?;
        if to.exists() {
            fs::remove_dir(to)?; // empty, as was seen
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
