//! What a run leaves behind to be looked at: its JSON lines in a file, and an event file for
//! TensorBoard.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use l2l::Error;
use l2l::config::LogConfig;
use serde_json::Value;

use super::say;

/// See the [module](self). What cannot be written any more is said once, and costs no step.
pub(super) struct Journal {
    lines: Option<File>,
    board: Option<File>,
}

impl Journal {
    /// Of what a config asks for.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn open(log: &LogConfig) -> Result<Journal, Error> {
        let bad = |key: &str, path: &Path, error: io::Error| Error::Config {
            key: key.into(),
            problem: format!("{:?} cannot be written to: {error}", path.display().to_string()),
        };
        let lines = log.file.as_ref().map(|path| {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let made = parent.map_or(Ok(()), fs::create_dir_all);
            let open = |()| OpenOptions::new().append(true).create(true).open(path);
            made.and_then(open).map_err(|error| bad("log.file", path, error))
        });
        let board = log
            .tensorboard
            .as_ref()
            .map(|folder| board(folder).map_err(|error| bad("log.tensorboard", folder, error)));
        Ok(Journal { lines: lines.transpose()?, board: board.transpose()? })
    }

    /// Notes an event.
    pub(super) fn note(&mut self, event: &Value) {
        let line = self.lines.as_mut().map(|file| file.write_all(format!("{event}\n").as_bytes()));
        if let Some(Err(error)) = line {
            say(format_args!("log.file: {error}; it ends here"));
            self.lines = None;
        }
        let scalars = scalars(event);
        let step = event["step"].as_u64().filter(|_| !scalars.is_empty());
        if let (Some(step), Some(file)) = (step, &mut self.board)
            && let Err(error) = record(file, &summary(step, &scalars))
        {
            say(format_args!("log.tensorboard: {error}; it ends here"));
            self.board = None;
        }
    }
}

/// What TensorBoard draws of an event.
fn scalars(event: &Value) -> Vec<(&'static str, f64)> {
    let value = |key: &str| event[key].as_f64();
    let all = match event["event"].as_str() {
        Some("step") => vec![
            ("loss/train", value("loss")),
            ("learning_rate", value("learning_rate")),
            ("grad_norm", value("grad_norm")),
            ("tokens_per_second", value("tokens").zip(value("seconds")).map(|(t, s)| t / s)),
            (
                "exposed_wait_share",
                value("exposed_wait_seconds").zip(value("seconds")).map(|(w, s)| w / s),
            ),
        ],
        Some("validation") => vec![
            ("loss/validation", value("loss")),
            ("perplexity/validation", value("perplexity")),
            ("accuracy/validation", value("accuracy")),
            ("f1/validation", value("f1")),
            ("matthews/validation", value("matthews")),
            ("pearson/validation", value("pearson")),
            ("spearman/validation", value("spearman")),
        ],
        _ => Vec::new(),
    };
    all.into_iter().filter_map(|(tag, value)| Some((tag, value?))).collect()
}

/// A new event file, with the version that readers look for.
fn board(folder: &Path) -> io::Result<File> {
    fs::create_dir_all(folder)?;
    let now = now();
    let name = format!("events.out.tfevents.{:010}.l2l.{}", now as u64, std::process::id());
    let mut file = OpenOptions::new().append(true).create(true).open(folder.join(name))?;
    let mut event = double(1, now);
    event.extend(bytes(3, b"brain.Event:2"));
    record(&mut file, &event)?;
    Ok(file)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A record of an event file: its length and its bytes, each with a checksum.
fn record(file: &mut File, event: &[u8]) -> io::Result<()> {
    let checksum = |bytes: &[u8]| {
        let sum = crc32c::crc32c(bytes);
        sum.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
    };
    let length = (event.len() as u64).to_le_bytes();
    file.write_all(&[&length[..], &checksum(&length), event, &checksum(event)].concat())
}

/// An `Event` with a `Summary` of simple values, as `tensorflow/core/util/event.proto` has them.
fn summary(step: u64, scalars: &[(&str, f64)]) -> Vec<u8> {
    let value = |&(tag, value): &(&str, f64)| {
        let mut inner = bytes(1, tag.as_bytes());
        inner.push(2 << 3 | 5);
        inner.extend((value as f32).to_le_bytes());
        bytes(1, &inner)
    };
    let values: Vec<u8> = scalars.iter().flat_map(value).collect();
    let mut event = double(1, now());
    event.push(2 << 3);
    event.extend(varint(step));
    event.extend(bytes(5, &values));
    event
}

fn double(field: u8, value: f64) -> Vec<u8> {
    [&[field << 3 | 1][..], &value.to_le_bytes()].concat()
}

fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    [&[field << 3 | 2][..], &varint(value.len() as u64), value].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            all.push(low);
            return all;
        }
        all.push(low | 0x80);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the wire format of protocol buffers has fields 1, 2 and 5 of an `Event`.
    #[test]
    fn an_event_is_as_protocol_buffers_write_it() {
        let event = summary(300, &[("loss", 0.5)]);
        let behind =
            [&[0x10, 0xac, 0x02, 0x2a, 13, 0x0a, 11, 0x0a, 4][..], b"loss", &[0x15, 0, 0, 0, 0x3f]];
        assert_eq!(event[0], 0x09);
        assert_eq!(event[9..], behind.concat());
    }
}
