//! Sequences from a `.jsonl` file: `{"input_ids": [...]}`, with `"labels"` where they differ.
//!
//! Every line is read and checked once before anything starts. What stays in memory is where each
//! begins, so that a file may be larger than memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

use serde::Deserialize;

use super::{Predicts, Sequence};
use crate::config::TooLong;
use crate::error::Error;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    input_ids: Vec<i64>,
    labels: Option<Vec<i64>>,
    /// Of the whole sequence: a class, or a value.
    label: Option<f64>,
    token_type_ids: Option<Vec<i64>>,
    /// Tokenizers write it; a line has no padding, so it must be all ones.
    attention_mask: Option<Vec<i64>>,
}

/// What a line must be.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) vocabulary: usize,
    pub(super) positions: usize,
    pub(super) too_long: TooLong,
    /// Kinds of tokens that the model knows.
    pub(super) kinds: usize,
    pub(super) predicts: Predicts,
    /// Classes that the model knows.
    pub(super) classes: usize,
}

/// The longest line: more is no line of tokens.
const LINE_BYTES: u64 = 1 << 28;

/// See the [module](self).
pub(super) struct Lines {
    file: BufReader<File>,
    name: String,
    limits: Limits,
    /// First byte and number of each line that has a sequence.
    places: Vec<(u64, u64)>,
    /// Lines without a label, by place in `places`.
    pub(super) unlabelled: Vec<u64>,
    line: Vec<u8>,
}

impl Lines {
    /// Reads and checks all of a file.
    pub(super) fn open(path: &Path, limits: Limits) -> Result<Lines, Error> {
        let name = path.display().to_string();
        let file = File::open(path)
            .map_err(|error| Error::refused(format_args!("data {name}: {error}")))?;
        let (file, line) = (BufReader::new(file), Vec::new());
        let (places, unlabelled) = (Vec::new(), Vec::new());
        let mut lines = Lines { file, name, limits, places, unlabelled, line };
        let (mut at, mut number) = (0, 1);
        loop {
            let bytes = lines.fill(number)?;
            if bytes == 0 {
                break;
            }
            if !lines.line.trim_ascii().is_empty() {
                if lines.parse(number)?.labelled(limits.predicts) == 0 {
                    lines.unlabelled.push(lines.places.len() as u64);
                }
                lines.places.push((at, number));
            }
            (at, number) = (at + bytes, number + 1);
        }
        if lines.places.is_empty() {
            return Err(Error::refused(format_args!("data {}: no sequence in it", lines.name)));
        }
        Ok(lines)
    }

    pub(super) fn len(&self) -> u64 {
        self.places.len() as u64
    }

    pub(super) fn read(&mut self, index: u64) -> Result<Sequence, Error> {
        let (at, number) = self.places[index as usize];
        self.file.seek(SeekFrom::Start(at)).map_err(|error| self.refuse(number, error))?;
        let read = self.fill(number).and_then(|_| self.parse(number));
        // It was good when the run began: somebody writes to it.
        read.map_err(|error| Error::failed(format_args!("{error} (it was changed meanwhile)")))
    }

    /// Takes all bytes of the file.
    pub(super) fn each_bytes(&mut self, take: impl FnMut(&[u8])) -> std::io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        super::each_bytes(&mut self.file, take)
    }

    fn refuse(&self, number: u64, what: impl std::fmt::Display) -> Error {
        Error::refused(format_args!("data {}, line {number}: {what}", self.name))
    }

    /// Reads the next line; its bytes, 0 at the end.
    fn fill(&mut self, number: u64) -> Result<u64, Error> {
        self.line.clear();
        let mut rest = std::io::Read::take(&mut self.file, LINE_BYTES);
        match rest.read_until(b'\n', &mut self.line) {
            Ok(bytes) if bytes as u64 == LINE_BYTES => {
                Err(self.refuse(number, format_args!("longer than {LINE_BYTES} bytes")))
            }
            Ok(bytes) => Ok(bytes as u64),
            Err(error) => Err(self.refuse(number, error)),
        }
    }

    fn parse(&self, number: u64) -> Result<Sequence, Error> {
        let text = std::str::from_utf8(&self.line);
        let text = text.map_err(|error| self.refuse(number, format_args!("not UTF-8: {error}")))?;
        let line = serde_json::from_str(text.trim()).map_err(|e| self.refuse(number, e))?;
        sequence(line, self.limits).map_err(|what| self.refuse(number, what))
    }
}

fn sequence(line: Line, limits: Limits) -> Result<Sequence, String> {
    let Limits { vocabulary, positions, too_long, kinds, .. } = limits;
    let Line { mut input_ids, labels, label, token_type_ids, attention_mask } = line;
    let of_sequence = matches!(limits.predicts, Predicts::Class | Predicts::Value);
    match (&labels, label, of_sequence) {
        (_, None, true) => return Err("label is missing: the model scores whole sequences".into()),
        (Some(_), _, true) => {
            return Err("labels: the model scores whole sequences by label".into());
        }
        (None, _, false) if limits.predicts == Predicts::Own => {
            return Err("labels is missing: which tokens are masked, and what they were".into());
        }
        (_, Some(_), false) => return Err("label: the model scores tokens, by labels".into()),
        _ => {}
    }
    if attention_mask.is_some_and(|mask| mask != vec![1; input_ids.len()]) {
        return Err("attention_mask is not all ones: leave padding out of input_ids".into());
    }
    let mut labels = labels.unwrap_or_else(|| input_ids.clone());
    if input_ids.is_empty() {
        return Err("input_ids is empty".into());
    }
    if labels.len() != input_ids.len() {
        return Err(format!("{} labels for {} input_ids", labels.len(), input_ids.len()));
    }
    let mut types = token_type_ids.unwrap_or_default();
    if !types.is_empty() && types.len() != input_ids.len() {
        return Err(format!("{} token_type_ids for {} input_ids", types.len(), input_ids.len()));
    }
    let is_kind = |kind: &i64| (0..kinds.clamp(1, 256) as i64).contains(kind);
    if let Some((at, kind)) = types.iter().enumerate().find(|(_, kind)| !is_kind(kind)) {
        return Err(format!("token type {kind} at {at}: the model has {kinds}"));
    }
    if input_ids.len() > positions {
        if too_long == TooLong::Error {
            return Err(format!(
                "{} tokens, of at most {positions}: set data.too_long = \"cut\" to cut them off",
                input_ids.len()
            ));
        }
        input_ids.truncate(positions);
        labels.truncate(positions);
        types.truncate(positions);
    }
    let is_token = |id: &i64| (0..vocabulary as i64).contains(id);
    if let Some((at, id)) = input_ids.iter().enumerate().find(|(_, id)| !is_token(id)) {
        return Err(format!("token {id} at {at} is outside the vocabulary of {vocabulary}"));
    }
    if let Some((at, id)) = labels.iter().enumerate().find(|(_, id)| **id != -100 && !is_token(id))
    {
        return Err(format!("label {id} at {at} is outside the vocabulary of {vocabulary}"));
    }
    let tokens: Vec<u32> = input_ids.into_iter().map(|id| id as u32).collect();
    if let Some(label) = label {
        let class = (0..limits.classes).find(|&class| class as f64 == label);
        let label = match (limits.predicts, class) {
            (Predicts::Value, _) if (label as f32).is_finite() => (label as f32).to_bits() as i32,
            (Predicts::Class, Some(class)) => class as i32,
            (Predicts::Class, None) => {
                let classes = limits.classes;
                return Err(format!("label {label} is none of the {classes} classes, from 0 on"));
            }
            _ => return Err(format!("label {label} is no value")),
        };
        return Ok(Sequence::whole(
            tokens,
            label,
            types.into_iter().map(|kind| kind as u8).collect(),
        ));
    }
    let labels = labels.into_iter().map(|label| label as i32).collect();
    Ok(Sequence { tokens, labels, kinds: types.into_iter().map(|kind| kind as u8).collect() })
}
