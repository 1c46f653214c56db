//! Records of preferences: a chosen and a rejected answer to one prompt.

use super::reader::Reader;
use super::record::{ColumnTexts, Record, Turns, columns_of, take};
use super::{Batch, Dataset, Predicts, Sequence};
use crate::config::{ReferenceKind, ScoreRecord};
use crate::hf::Message;
use crate::objectives::{Objective, Preference};

/// Why other data has no preferences.
pub(super) const NEEDED: &str =
    "objective.kind is a preference, which needs records with the columns chosen and rejected";

/// The columns of a preference beside those that other records have.
pub(super) struct Pair {
    chosen: Turns,
    rejected: Turns,
    /// The log-probabilities of both by a reference.
    reference: [Option<f64>; 2],
    /// The columns that the record has, for messages.
    has: String,
}

impl Pair {
    /// Takes the columns of a preference.
    pub(super) fn take(columns: &mut ColumnTexts) -> Result<Pair, String> {
        let has = columns_of(columns);
        let mut answer = |name: &str| -> Result<Turns, String> {
            take(columns, name)?.ok_or_else(|| {
                format!("{name} is missing: objective.kind is a preference, which needs it; {has}")
            })
        };
        let chosen = answer("chosen")?;
        let rejected = answer("rejected")?;
        let mut log = |name| -> Result<Option<f64>, String> {
            let log: Option<f64> = take(columns, name)?;
            match log.filter(|log| !log.is_finite() || *log > 0.0) {
                Some(log) => Err(format!("{name} is {log}: the log of a probability is at most 0")),
                None => Ok(log),
            }
        };
        let reference = [log("ref_chosen_logps")?, log("ref_rejected_logps")?];
        Ok(Pair { chosen, rejected, reference, has })
    }
}

/// The bytes of the prompt of two texts without one: the part in which they begin alike, without a
/// space at its end, as TRL takes it. Of texts that are the same, none.
fn shared_text(a: &str, b: &str) -> usize {
    let differ = |(x, y): (char, char)| x != y;
    let Some(at) = a.chars().zip(b.chars()).position(differ) else { return 0 };
    let shared: String = a.chars().take(at).collect();
    shared.strip_suffix(' ').unwrap_or(&shared).len()
}

/// True if both answers of a record have the same tokens.
pub(super) fn are_same(record: &Sequence) -> bool {
    let chosen = record.documents.first().copied().unwrap_or_default();
    let (chosen, rejected) = record.tokens.split_at(chosen);
    chosen == rejected
}

impl Dataset {
    /// A batch of these sequences.
    pub(super) fn batch_of(&self, sequences: &[Sequence]) -> Batch {
        match (self.preference, self.predicts()) {
            (Some(_), _) => Batch::of_records(sequences),
            (None, Predicts::Embedding) => Batch::of_texts(sequences),
            (None, Predicts::Value) if self.is_scored => Batch::of_scored(sequences),
            (None, predicts) => Batch::of(sequences, predicts),
        }
    }
}

impl Reader {
    /// Whether a record is a chosen and a rejected answer.
    pub(super) fn compares_answers(&self) -> bool {
        self.preference.is_some() || self.scored == Some(ScoreRecord::Answers)
    }

    /// Both answers behind their prompt.
    pub(super) fn answers(&self, record: &Record, pair: &Pair) -> Result<[Sequence; 2], String> {
        let Pair { chosen, rejected, has, .. } = pair;
        let both = match (&record.prompt, chosen, rejected) {
            (Some(Turns::Text(prompt)), Turns::Text(chosen), Turns::Text(rejected)) => {
                [chosen, rejected].map(|answer| self.completion(prompt, answer))
            }
            (None, Turns::Text(chosen), Turns::Text(rejected)) => {
                // A score is of the whole text.
                let is_whole = self.scored.is_some();
                let shared = if is_whole { 0 } else { shared_text(chosen, rejected) };
                if shared == 0 && !is_whole {
                    let what = "prompt is missing, which answers that are texts need unless they \
                                begin alike";
                    return Err(format!("{what}; {has}"));
                }
                [chosen, rejected].map(|answer| {
                    let (prompt, answer) = answer.split_at(shared);
                    self.completion(prompt, answer)
                })
            }
            (Some(Turns::Messages(prompt)), Turns::Messages(chosen), Turns::Messages(rejected)) => {
                let prompt = record.with_system(prompt.clone());
                [chosen, rejected].map(|answer| self.chat(&prompt, answer, &record.tools))
            }
            // The prompt is the part of both chats that is the same, also where a text repeats it.
            (_, Turns::Messages(chosen), Turns::Messages(rejected)) => {
                let [chosen, rejected] =
                    [chosen, rejected].map(|chat| record.with_system(chat.clone()));
                let same = |(a, b): &(&Message, &Message)| a == b;
                let shared = chosen.iter().zip(&rejected).take_while(same).count();
                let is_whole = shared == chosen.len() || shared == rejected.len();
                if (shared == 0 || is_whole) && self.scored.is_none() {
                    let what = "chosen and rejected are chats without a prompt: they must begin \
                                alike, and end differently";
                    return Err(what.into());
                }
                // A score is of the whole chat.
                let shared = if self.scored.is_some() { 0 } else { shared };
                [chosen, rejected].map(|chat| {
                    let (prompt, answer) = chat.split_at(shared);
                    self.chat(prompt, answer, &record.tools)
                })
            }
            _ => {
                let what = "prompt, chosen and rejected: all must be texts, or all messages";
                return Err(what.into());
            }
        };
        let [chosen, rejected] = both;
        let named = |name| move |what: String| format!("{name}: {what}");
        let chosen = chosen.map_err(named("chosen"))?;
        let rejected = rejected.map_err(named("rejected"))?;
        Ok([chosen, rejected])
    }

    /// The two answers of a preference, as the documents of one sequence.
    pub(super) fn pair(
        &self,
        record: &Record,
        pair: Pair,
        preference: Preference,
    ) -> Result<Sequence, String> {
        let Pair { reference, ref has, .. } = pair;
        let [chosen, rejected] = self.answers(record, &pair)?;
        let reference = match (self.reference, reference) {
            _ if !preference.needs_reference() => Vec::new(),
            (Some(ReferenceKind::Before | ReferenceKind::InStep), _) => Vec::new(),
            (None, [None, None]) => Vec::new(),
            (_, [Some(chosen), Some(rejected)]) => vec![chosen, rejected],
            (of, _) => {
                let why = match of {
                    Some(_) => "objective.reference = \"columns\" needs both",
                    None => "the record has one of them alone: give both or neither",
                };
                return Err(format!(
                    "ref_chosen_logps or ref_rejected_logps is missing: {why}; {has}"
                ));
            }
        };
        Ok(Sequence {
            documents: vec![chosen.tokens.len(), rejected.tokens.len()],
            tokens: [chosen.tokens, rejected.tokens].concat(),
            labels: [chosen.labels, rejected.labels].concat(),
            reference,
            ..Sequence::default()
        })
    }
}
