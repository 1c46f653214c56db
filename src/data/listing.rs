//! Which files of a folder are data. A folder that was cloned or downloaded also has a card,
//! hidden files and links. They are left out, and the user is told which.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::config::DataConfig;

/// File name extensions of data.
const EXTENSIONS: [&str; 8] = ["txt", "md", "jsonl", "json", "csv", "tsv", "parquet", "bin"];

/// The extensions of files that consist of records. All others are one stream of tokens.
const OF_RECORDS: [&str; 5] = ["jsonl", "json", "csv", "tsv", "parquet"];

/// Files that describe a data set, as the library `datasets` writes them.
const DESCRIPTIONS: [&str; 2] = ["dataset_dict.json", "dataset_infos.json"];

/// The number of files that a message names.
const NAMED: usize = 5;

/// The data files of a path, and what was left out of it.
#[derive(Debug, Default)]
pub(super) struct DataFiles {
    pub(super) files: Vec<PathBuf>,
    /// Each thing that was left out, with the reason.
    left_out: Vec<String>,
}

/// The extension of a file in small letters.
pub(super) fn extension(path: &Path) -> Option<String> {
    Some(path.extension()?.to_str()?.to_ascii_lowercase())
}

/// Whether a file of this extension consists of records.
pub(super) fn has_records(extension: &str) -> bool {
    OF_RECORDS.contains(&extension)
}

/// Whether the name of a file has an extension of data.
fn is_data(path: &Path) -> bool {
    extension(path).is_some_and(|known| EXTENSIONS.contains(&&*known))
}

/// The data files of a path: the file itself, or all data files below the folder.
pub(super) fn files(path: &Path) -> Result<DataFiles, String> {
    let mut found = DataFiles::default();
    if path.is_dir() {
        found.add_folder(path, path)?;
        found.leave_out_cards(path)?;
        if found.files.is_empty() {
            let left_out = found.note(path).map_or_else(String::new, |note| format!(" ({note})"));
            return Err(format!(
                "there is no .txt, .md, .jsonl, .json, .csv, .tsv or .bin file in this \
                 folder{left_out}"
            ));
        }
        return Ok(found);
    }
    if !is_data(path) {
        let problem = match path.exists() {
            true => "it is not a known kind of data",
            false => "no file or folder of this name is there",
        };
        return Err(format!(
            "{problem}: give a .{} file, a folder of them, \"random\" or \"{}\"",
            EXTENSIONS.join(", ."),
            DataConfig::BUILT_IN
        ));
    }
    if !fs::metadata(path).map_err(|error| error.to_string())?.is_file() {
        return Err("it is neither a file nor a folder".into());
    }
    found.files.push(path.into());
    Ok(found)
}

impl DataFiles {
    /// A sentence about what was left out, if anything was.
    pub(super) fn note(&self, root: &Path) -> Option<String> {
        let (named, more) = self.left_out.split_at(NAMED.min(self.left_out.len()));
        let more = match more.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let named = named.join(", ");
        (!named.is_empty()).then(|| format!("left out of {}: {named}{more}", root.display()))
    }

    /// Adds the data files below a folder, in the order of their names. Hidden folders are not
    /// searched.
    fn add_folder(&mut self, root: &Path, folder: &Path) -> Result<(), String> {
        let failed = |error: io::Error| error.to_string();
        let entries = fs::read_dir(folder).map_err(failed)?.map(|entry| Ok(entry?.path()));
        let mut entries = entries.collect::<io::Result<Vec<PathBuf>>>().map_err(failed)?;
        entries.sort();
        for entry in entries {
            let about = fs::symlink_metadata(&entry).map_err(failed)?;
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_hidden = name.starts_with('.');
            if about.is_dir() {
                if !is_hidden {
                    self.add_folder(root, &entry)?;
                }
                continue;
            }
            let shown = entry.strip_prefix(root).unwrap_or(&entry).display().to_string();
            let why = match () {
                () if is_hidden && is_data(&entry) => "hidden",
                () if is_hidden => continue,
                () if entry.is_dir() => "a linked folder",
                () if !is_data(&entry) => "no known kind of data",
                () if DESCRIPTIONS.contains(&&*name) => "it describes the data set",
                () if about.is_symlink() && !entry.exists() => {
                    let target = fs::read_link(&entry).map_err(failed)?;
                    return Err(format!(
                        "{shown} is a link to {}, which does not exist: restore that file, or \
                         remove the link",
                        target.display()
                    ));
                }
                () if !entry.is_file() => "neither a file nor a folder",
                () => {
                    self.files.push(entry);
                    continue;
                }
            };
            self.left_out.push(format!("{shown} ({why})"));
        }
        Ok(())
    }

    /// Leaves out each `README.md` that describes the data set: all those beside records, and the
    /// one of the top folder if it opens with metadata between lines of `---`, as on the Hub.
    fn leave_out_cards(&mut self, root: &Path) -> Result<(), String> {
        let is_of_records = |path: &PathBuf| extension(path).is_some_and(|one| has_records(&one));
        let beside_records = self.files.iter().any(is_of_records);
        for path in std::mem::take(&mut self.files) {
            let is_readme = path.file_name().is_some_and(|name| name == "README.md");
            let is_card = is_readme
                && (beside_records || path.parent() == Some(root) && has_metadata(&path)?);
            if is_card {
                let shown = path.strip_prefix(root).unwrap_or(&path).display();
                self.left_out.push(format!("{shown} (it describes the data set)"));
            } else {
                self.files.push(path);
            }
        }
        Ok(())
    }
}

/// Whether a Markdown file opens with metadata: a line of three hyphens.
fn has_metadata(path: &Path) -> Result<bool, String> {
    let mut begins = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(5).read_to_end(&mut begins));
    read.map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(begins.starts_with(b"---\n") || begins.starts_with(b"---\r\n"))
}
