//! The live page and the report: one self-contained page. The live page asks the server for a view
//! every second; the report has the view embedded.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::{Value, json};

use super::files::{has_room, may_write, replace};
use super::{RunView, Watch};
use crate::config::Config;
use crate::machine;

const PAGE: &str = include_str!("page.html");

/// The place in the page for an embedded view.
const PLACE: &str = "<script type=\"application/json\" id=\"embedded\"></script>";

/// The page that updates itself from the server's `live.json`.
pub fn live() -> &'static str {
    PAGE
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
        has_room(&path, PAGE)?;
        Ok(Report { path })
    }

    /// Writes the run as it is now, with one typical step, and the config it was made from.
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
    // No text in it can end the script that holds it.
    let data = data.replace('<', "\\u003c");
    let embedded = PLACE.replace("></", &format!(">{data}</"));
    PAGE.replacen(PLACE, &embedded, 1)
}
