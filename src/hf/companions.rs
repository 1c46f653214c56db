//! The other files of a model's directory (tokenizer, chat template, generation settings, pooling).
//! They are copied to each directory that is written, so that other programs can use it like the
//! first one.

use std::fs;
use std::io;
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
/// and waits until they are on the disk.
pub(crate) fn copy_companions(from: &Path, to: &Path) -> io::Result<()> {
    for file in FILES.iter().filter(|file| from.join(file).is_file()) {
        copy(&from.join(file), &to.join(file))?;
    }
    let templates = from.join(MORE_TEMPLATES).is_dir().then(|| MORE_TEMPLATES.to_string());
    for module in modules(from).into_iter().chain(templates) {
        fs::create_dir_all(to.join(&module))?;
        for entry in fs::read_dir(from.join(&module))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                copy(&entry.path(), &to.join(&module).join(entry.file_name()))?;
            }
        }
        folder::sync(&to.join(&module))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to)?;
    folder::sync(to)
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
    use super::*;

    #[test]
    fn templates_beside_the_default_one_are_copied() {
        let from = tempfile::tempdir().expect("a place for files");
        let to = tempfile::tempdir().expect("a place for files");
        fs::create_dir(from.path().join(MORE_TEMPLATES)).expect("a directory of ours");
        for file in ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"] {
            fs::write(from.path().join(file), file).expect("a directory of ours");
        }
        copy_companions(from.path(), to.path()).expect("both are ours");
        for file in ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"] {
            assert_eq!(fs::read_to_string(to.path().join(file)).expect("it was copied"), file);
        }
    }
}
