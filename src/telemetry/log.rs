//! The run's log: every event as a JSON line in `log.file`, and its numbers in `log.tensorboard`.
//!
//! A file that can no longer be written ends there, with a warning. Training goes on.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use serde_json::Value;

use super::tensorboard::EventFile;
use crate::config::LogConfig;
use crate::error::Error;
use crate::limits::named;

/// The files of a run's events: JSON lines, and an event file of TensorBoard.
pub struct EventLog {
    lines: Option<File>,
    board: Option<EventFile>,
}

impl EventLog {
    /// Opens the files that a config asks for. Events are appended to a `log.file` that exists.
    ///
    /// # Errors
    /// One of them cannot be written.
    pub fn open(config: &LogConfig) -> Result<EventLog, Error> {
        let refused = |key: &str, path: &Path, error: io::Error| {
            let path = path.display().to_string();
            Error::config(key, format_args!("{path:?} cannot be written to: {error}"))
        };
        let lines = config
            .file
            .as_deref()
            .map(|path| open_lines(path).map_err(|error| refused("log.file", path, error)));
        let board = config.tensorboard.as_deref().map(|folder| {
            EventFile::create(folder).map_err(|error| refused("log.tensorboard", folder, error))
        });
        Ok(EventLog { lines: lines.transpose()?, board: board.transpose()? })
    }

    /// Writes an event. Returns a warning for each file that ends here because it cannot be
    /// written.
    pub fn write(&mut self, event: &Value) -> Vec<String> {
        let mut warnings = Vec::new();
        let line = self.lines.as_mut().map(|file| file.write_all(format!("{event}\n").as_bytes()));
        if let Some(Err(error)) = line {
            warnings.push(format!("log.file: {}; it ends here", named(error)));
            self.lines = None;
        }
        let scalars = scalars(event);
        let step = event["step"].as_u64().filter(|_| !scalars.is_empty());
        if let (Some(step), Some(board)) = (step, &mut self.board)
            && let Err(error) = board.scalars(step, &scalars)
        {
            warnings.push(format!("log.tensorboard: {}; it ends here", named(error)));
            self.board = None;
        }
        warnings
    }
}

fn open_lines(path: &Path) -> io::Result<File> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent)?;
    }
    OpenOptions::new().append(true).create(true).open(path)
}

/// The values of an event that TensorBoard draws, by tag.
fn scalars(event: &Value) -> Vec<(String, f64)> {
    let value = |key: &str| event[key].as_f64();
    let a_second = |key: &str| value(key).zip(value("seconds")).map(|(of, s)| of / s);
    let all = match event["event"].as_str() {
        Some("step") => vec![
            ("loss/train", value("loss")),
            ("learning_rate", value("learning_rate")),
            ("grad_norm", value("grad_norm")),
            ("tokens_per_second", a_second("tokens")),
            ("exposed_wait_share", a_second("exposed_wait_seconds")),
        ],
        Some("validation") => {
            let set = event["set"].as_str().unwrap_or("validation");
            let metrics = event.as_object().into_iter().flatten();
            let metrics = metrics.filter(|(name, _)| *name != "step");
            return metrics
                .filter_map(|(name, value)| Some((format!("{name}/{set}"), value.as_f64()?)))
                .collect();
        }
        _ => Vec::new(),
    };
    all.into_iter().filter_map(|(tag, value)| Some((tag.to_string(), value?))).collect()
}
