//! A directory for others, from a checkpoint or from where a model was loaded.

use std::fs;
use std::path::Path;

use super::carry::carry;
use crate::error::Error;

/// What of a directory is the model.
fn is_of_the_model(name: &str) -> bool {
    name == "config.json"
        || name == "model.safetensors.index.json"
        || (name.starts_with("model") && name.ends_with(".safetensors"))
}

/// Copies a model to a new directory, which is there whole or not at all; with the tokenizer's
/// files of `tokenizer` where `from` has none.
///
/// # Errors
/// `to` is there already; there is no model in `from`; a file cannot be copied.
pub fn export(from: &Path, tokenizer: Option<&Path>, to: &Path) -> Result<(), Error> {
    let is_new = fs::read_dir(to).map_or(!to.exists(), |mut entries| entries.next().is_none());
    if !is_new {
        let what = "it is there already: give a new directory";
        return Err(Error::refused(format_args!("{}: {what}", to.display())));
    }
    let refuse = |error: std::io::Error| {
        Error::refused(format_args!("{}: no model to export: {error}", from.display()))
    };
    let entries = fs::read_dir(from).map_err(refuse)?.flatten();
    let names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| is_of_the_model(name))
        .collect();
    if !names.iter().any(|name| name.ends_with(".safetensors")) {
        let what = "no model to export: no .safetensors in it";
        return Err(Error::refused(format_args!("{}: {what}", from.display())));
    }
    let mut partial = to.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let copied = (|| {
        if partial.exists() {
            fs::remove_dir_all(partial)?;
        }
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
        fs::rename(partial, to)
    })();
    copied.map_err(|error| Error::failed(format_args!("{}: {error}", to.display())))
}
