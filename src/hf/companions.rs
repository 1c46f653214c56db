//! The other files of a model's directory (tokenizer, chat template, generation settings, pooling).
//! They are copied to each directory that is written, so that other programs can use it like the
//! first one.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Component, Path};

use serde_json::Value;

use crate::folder;

/// The files that transformers and sentence-transformers look for beside `config.json` and the
/// weights.
const FILES: [&str; 15] = [
    "added_tokens.json",
    "chat_template.jinja",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "sentence_bert_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// The folder of a model's chat templates beside the default one.
pub(super) const MORE_TEMPLATES: &str = "additional_chat_templates";

/// Copies the files that exist, the modules of sentence-transformers and further chat templates,
/// to a new directory, and waits until they are on the disk. A file that several directories have
/// is the first one's.
pub(crate) fn copy_companions(from: &[&Path], to: &Path) -> io::Result<()> {
    for from in from {
        for file in FILES.iter().filter(|file| from.join(file).is_file()) {
            copy_new(&from.join(file), &to.join(file))?;
        }
        let templates = from.join(MORE_TEMPLATES).is_dir().then(|| MORE_TEMPLATES.to_string());
        for inner in modules(from).into_iter().chain(templates) {
            fs::create_dir_all(to.join(&inner))?;
            for entry in fs::read_dir(from.join(&inner))? {
                let path = entry?.path();
                if let Some(name) = path.file_name().filter(|_| path.is_file()) {
                    copy_new(&path, &to.join(&inner).join(name))?;
                }
            }
            folder::sync(&to.join(&inner))?;
        }
    }
    Ok(())
}

/// Copies a file's bytes, unless there is a file already. The copy has the mode of a new file: the
/// files of a shared cache may be read-only.
fn copy_new(from: &Path, to: &Path) -> io::Result<()> {
    let mut new = match File::create_new(to) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    };
    io::copy(&mut File::open(from)?, &mut new)?;
    new.sync_all()
}

/// The folders of the steps that sentence-transformers adds behind the model, such as `1_Pooling`.
fn modules(directory: &Path) -> Vec<String> {
    let Ok(text) = fs::read_to_string(directory.join("modules.json")) else { return Vec::new() };
    let all: Value = serde_json::from_str(&text).unwrap_or_default();
    let paths = all.as_array().into_iter().flatten().filter_map(|one| one["path"].as_str());
    let is_folder_of_it = |path: &&str| {
        let mut parts = Path::new(path).components();
        matches!(parts.next(), Some(Component::Normal(_)))
            && parts.next().is_none()
            && directory.join(path).is_dir()
    };
    paths.filter(is_folder_of_it).map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// A model in a shared cache: links to files that nobody may write.
    fn cache(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a place for files");
        let blobs = folder.path().join("blobs");
        fs::create_dir_all(&blobs).expect("a folder of ours");
        for (number, (name, text)) in files.iter().enumerate() {
            let blob = blobs.join(number.to_string());
            fs::write(&blob, text).expect("a folder of ours");
            fs::set_permissions(&blob, fs::Permissions::from_mode(0o444)).expect("it is ours");
            let link = folder.path().join(name);
            fs::create_dir_all(folder::parent(&link)).expect("a folder of ours");
            symlink(blob, link).expect("a folder of ours");
        }
        folder
    }

    #[test]
    fn copies_have_their_own_mode_and_are_the_first_directorys() {
        let modules = r#"[{"path": ""}, {"path": "1_Pooling"}]"#;
        let base = cache(&[
            ("tokenizer.json", "base"),
            ("vocab.txt", "base"),
            ("modules.json", modules),
            ("1_Pooling/config.json", "{}"),
            ("README.md", "not a companion"),
        ]);
        let run = cache(&[("tokenizer.json", "run"), ("modules.json", modules)]);
        let to = tempfile::tempdir().expect("a place for files");
        copy_companions(&[run.path(), base.path()], to.path()).expect("all can be read");
        for (name, text) in [
            ("tokenizer.json", "run"),
            ("vocab.txt", "base"),
            ("modules.json", modules),
            ("1_Pooling/config.json", "{}"),
        ] {
            let path = to.path().join(name);
            assert_eq!(fs::read_to_string(&path).expect("it was copied"), text, "{name}");
            let about = fs::symlink_metadata(&path).expect("it was copied");
            assert!(about.is_file() && !about.permissions().readonly(), "{name}");
        }
        assert!(!to.path().join("README.md").exists());
    }

    #[test]
    fn templates_beside_the_default_one_are_copied() {
        let from = tempfile::tempdir().expect("a place for files");
        let to = tempfile::tempdir().expect("a place for files");
        fs::create_dir(from.path().join(MORE_TEMPLATES)).expect("a directory of ours");
        for file in ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"] {
            fs::write(from.path().join(file), file).expect("a directory of ours");
        }
        copy_companions(&[from.path()], to.path()).expect("both are ours");
        for file in ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"] {
            assert_eq!(fs::read_to_string(to.path().join(file)).expect("it was copied"), file);
        }
    }
}
