//! `[metrics]` and `[log]`: the reports of a run, and their places.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::check::must;
use super::{Config, DataConfig, Files};
use crate::error::Error;
use crate::folder::is_same;

/// `[metrics]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// Address that serves metrics and a live page, for instance `127.0.0.1:9464`; nothing is
    /// served when absent.
    pub listen: Option<String>,
    /// Allows `listen` to be an address that other machines can reach. Off by default, because the
    /// page has no password.
    pub public: bool,
    /// Names of this machine that `listen` answers to, such as `["gpu1.lab"]`. The IP address and
    /// `localhost` need no entry. Other names are refused, because a site whose name points at this
    /// machine could read the run through a visitor's browser.
    pub hosts: Vec<String>,
    /// File that receives the final metrics, for a run that ends between two scrapes.
    pub file: Option<PathBuf>,
    /// Name of the run, a label of every metric; a random name when absent.
    pub run: Option<String>,
}

impl MetricsConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        let is_name = |name: &String| {
            let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !name.is_empty() && name.bytes().all(is_part)
        };
        let be = "names of this machine, as \"gpu1.lab\": without a scheme, a port or a *";
        must(self.hosts.iter().all(is_name), "metrics.hosts", be)
    }
}

/// `[log]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Format of the printed events: lines for people, or one JSON object a line.
    pub format: Format,
    /// File that receives the JSON lines, whatever is printed. A resumed run appends to it.
    pub file: Option<PathBuf>,
    /// Folder that receives an event file for TensorBoard.
    pub tensorboard: Option<PathBuf>,
}

impl Config {
    /// Refuses a file of reports that another key has, too.
    pub(super) fn check_reports(&self) -> Result<(), Error> {
        let DataConfig { train, validation, .. } = &self.data;
        let data = [("data.train", Some(train)), ("data.validation", validation.as_ref())];
        let data = data.into_iter().flat_map(|(key, files)| {
            files.into_iter().flat_map(Files::each).map(move |(file, _)| (key, Path::new(file)))
        });
        let log = self.log.file.as_deref().map(|file| ("log.file", file));
        let metrics = self.metrics.file.as_deref().map(|file| ("metrics.file", file));
        let others: Vec<_> = data.chain(metrics).collect();
        for (key, file) in log.into_iter().chain(metrics) {
            let same = others.iter().find(|(of, other)| *of != key && is_same(file, other));
            if let Some((other, _)) = same {
                let problem = format_args!("and {other} are the same file: give each its own");
                return Err(Error::config(key, problem));
            }
        }
        Ok(())
    }
}

/// The format of printed events.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema, clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Lines for people.
    #[default]
    Pretty,
    /// One JSON object a line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_key() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = |name: &str| Some(folder.path().join(name));
        let mut config = Config::default();
        config.log.file = at("log");
        config.metrics.file = at("metrics");
        config.check().expect("each has its own");
        config.metrics.file = at("./log");
        let error = config.check().expect_err("one file").to_string();
        assert!(error.contains("log.file and metrics.file are the same file"), "{error}");
        let data = folder.path().join("data.jsonl");
        std::fs::write(&data, "{}").expect("a folder of ours");
        config.data.train = data.display().to_string().into();
        config.metrics.file = Some(data);
        let error = config.check().expect_err("one file").to_string();
        assert!(error.contains("metrics.file and data.train"), "{error}");
    }
}
