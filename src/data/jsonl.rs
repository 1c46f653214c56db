//! Sequences from a `.jsonl` file: `{"input_ids": [...]}`, with `"labels"` where they differ.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

use super::Sequence;
use crate::config::TooLong;
use crate::error::Error;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    input_ids: Vec<i64>,
    labels: Option<Vec<i64>>,
    /// Tokenizers write it; a line has no padding, so it must be all ones.
    attention_mask: Option<Vec<i64>>,
}

/// Reads and checks all sequences.
pub(super) fn read(
    path: &Path,
    vocabulary: usize,
    positions: usize,
    too_long: TooLong,
) -> Result<Vec<Sequence>, Error> {
    let file = File::open(path)
        .map_err(|error| Error::refused(format_args!("data {}: {error}", path.display())))?;
    let mut sequences = Vec::new();
    for (index, line) in BufReader::new(file).lines().enumerate() {
        let at = format!("data {}, line {}", path.display(), index + 1);
        let refuse = |what: String| Error::refused(format_args!("{at}: {what}"));
        let line = line.map_err(|error| refuse(error.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(&line).map_err(|error| refuse(error.to_string()))?;
        sequences.push(sequence(line, vocabulary, positions, too_long).map_err(refuse)?);
    }
    if sequences.is_empty() {
        return Err(Error::refused(format_args!("data {}: no sequence in it", path.display())));
    }
    Ok(sequences)
}

fn sequence(
    line: Line,
    vocabulary: usize,
    positions: usize,
    too_long: TooLong,
) -> Result<Sequence, String> {
    let Line { mut input_ids, labels, attention_mask } = line;
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
    if input_ids.len() > positions {
        if too_long == TooLong::Error {
            return Err(format!(
                "{} tokens, of at most {positions}: set data.too_long = \"cut\" to cut them off",
                input_ids.len()
            ));
        }
        input_ids.truncate(positions);
        labels.truncate(positions);
    }
    let is_token = |id: &i64| (0..vocabulary as i64).contains(id);
    if let Some((at, id)) = input_ids.iter().enumerate().find(|(_, id)| !is_token(id)) {
        return Err(format!("token {id} at {at} is outside the vocabulary of {vocabulary}"));
    }
    if let Some((at, id)) = labels.iter().enumerate().find(|(_, id)| **id != -100 && !is_token(id))
    {
        return Err(format!("label {id} at {at} is outside the vocabulary of {vocabulary}"));
    }
    let tokens = input_ids.into_iter().map(|id| id as u32).collect();
    Ok(Sequence { tokens, labels: labels.into_iter().map(|label| label as i32).collect() })
}
