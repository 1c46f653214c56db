//! The live page and the report: one self-contained page. The live page asks the server for a view
//! every second; the report has the view embedded.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::{fs, io};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::files::{has_room, may_write, replace};
use super::{RunView, Watch};
use crate::config::Config;
use crate::machine;

const TEXT: &str = include_str!("page.html");

/// The page, with its policy filled in.
static PAGE: LazyLock<String> = LazyLock::new(|| TEXT.replacen("{policy}", policy(), 1));

/// The content security policy: a browser lets the page run this script, use this style and ask its
/// own server. So text of a run that got into the page as markup could do nothing.
pub(super) fn policy() -> &'static str {
    static POLICY: LazyLock<String> = LazyLock::new(|| {
        let hash = |begin, end| {
            let (_, text) = TEXT.split_once(begin).expect("the page has one");
            let (text, _) = text.split_once(end).expect("it ends");
            base64(&Sha256::digest(text))
        };
        let script = hash("<script>", "</script>");
        let style = hash("<style>", "</style>");
        format!(
            "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; \
             connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
        )
    });
    &POLICY
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let mut padded = [0; 4];
        padded[1..=three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes(padded);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit <= three.len() { DIGITS[index].into() } else { '=' });
        }
    }
    text
}

/// The place in the page for an embedded view.
const PLACE: &str = "<script type=\"application/json\" id=\"embedded\"></script>";

/// The page that updates itself from the server's `live.json`.
pub fn live() -> &'static str {
    &PAGE
}

/// A report of a run, `report.html`, that is written at its end.
pub struct Report {
    path: PathBuf,
}

impl Report {
    /// Creates the folder and checks that the report can be written there. A report of an earlier
    /// run stays until this one is written.
    ///
    /// # Errors
    /// The folder cannot be created, or the file cannot be written.
    pub fn create(folder: &Path) -> io::Result<Report> {
        fs::create_dir_all(folder)?;
        let path = folder.join("report.html");
        may_write(&path)?;
        has_room(&path, &PAGE)?;
        Ok(Report { path })
    }

    /// Writes a view of the run, with the slices of one typical step, and its config.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, watch: &Watch, config: &Config) -> io::Result<()> {
        let view = watch.view(u64::MAX).typical();
        let versions = json!({
            "l2l": env!("CARGO_PKG_VERSION"),
            "system": std::env::consts::OS,
            "architecture": std::env::consts::ARCH,
            "vector instructions": machine::vector_instructions(),
            "cores": machine::cores(),
        });
        let host = view.host_memory.iter().map(|term| (term.kind.to_string(), json!(term.planned)));
        let tables = [
            ("Host memory by the plan, in bytes", Value::Object(host.collect())),
            ("Configuration", serde_json::to_value(config).expect("a config is plain data")),
            ("Versions", versions),
        ];
        replace(&self.path, &page_of(&view, &tables))
    }
}

/// The page with a view embedded, and further tables, each under its title.
fn page_of(view: &RunView, tables: &[(&str, Value)]) -> String {
    let more = tables.iter().map(|(title, value)| json!([title, value])).collect::<Value>();
    let data = json!({ "view": view, "more": more }).to_string();
    // Without `<`, no text in the data can end the script element around it.
    let data = data.replace('<', "\\u003c");
    let embedded = PLACE.replace("></", &format!(">{data}</"));
    PAGE.replacen(PLACE, &embedded, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        let cases =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")];
        for (bytes, text) in cases {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }

    /// A browser hashes the text between the tags. So there is one of each, and no markup that the
    /// policy would block.
    #[test]
    fn the_page_keeps_its_policy() {
        assert_eq!(live().matches("<script>").count(), 1);
        assert_eq!(live().matches("<style>").count(), 1);
        assert!(live().contains(policy()) && !policy().contains("unsafe"));
        for blocked in [" style=", "style:", " onclick=", " onload=", "{policy}"] {
            assert!(!live().contains(blocked), "{blocked}");
        }
    }
}
