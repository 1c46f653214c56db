//! Records whose sequences get a score each: two answers for a reward model, or a query with a
//! document and a label for a reranker. Where a score is asked for, an answer is a record by
//! itself, and a document needs no label.

use serde_json::Value;

use super::Sequence;
use super::pairs::Pair;
use super::reader::{Reader, columns_of_line};
use super::record::{ColumnTexts, Record, columns_of, take};
use super::texts::{TextColumn, take_score};
use super::vocabulary::Vocabulary;
use crate::config::{Config, ScoreRecord, TooLong};
use crate::error::Error;
use crate::hf::Encoded;
use crate::models::Shape;

/// Why other data has no such records.
pub(super) const NEEDED: &str = "objective.kind is a loss of scores, whose records have chosen \
                                 and rejected (reward), or query, document and label (binary)";

const QUERY: TextColumn =
    TextColumn { name: "text", others: &["query", "question", "anchor", "sentence1"] };
const DOCUMENT: TextColumn = TextColumn {
    name: "text_pair",
    others: &["document", "passage", "answer", "response", "positive", "sentence2"],
};

impl Reader {
    /// The sequences of a record, as the documents of one.
    pub(super) fn scored_record(
        &self,
        mut columns: ColumnTexts,
        record: ScoreRecord,
    ) -> Result<Sequence, String> {
        if record == ScoreRecord::Texts {
            return self.two_texts(columns, true);
        }
        let margin = take_margin(&mut columns)?;
        let pair = Pair::take(&mut columns)?;
        let (record, unused) = Record::of(columns, &self.fields)?;
        self.unused.lock().expect("nothing panics inside").extend(unused);
        let [chosen, rejected] = self.answers(&record, &pair)?;
        Ok(Sequence {
            documents: vec![chosen.tokens.len(), rejected.tokens.len()],
            score: Some(margin),
            ..Sequence::classified([chosen.tokens, rejected.tokens].concat(), 0, Vec::new())
        })
    }

    /// A record that gets a score.
    fn to_score(&self, line: &str) -> Result<Sequence, String> {
        let columns = columns_of_line(line)?;
        let sequence = match self.scored {
            Some(ScoreRecord::Texts) => self.two_texts(columns, false)?,
            Some(ScoreRecord::Answers) => {
                let Sequence { tokens, .. } = self.answer(columns)?;
                Sequence { score: Some(0.0), ..Sequence::classified(tokens, 0, Vec::new()) }
            }
            None => return Err(NO_SCORE.into()),
        };
        self.check_known(&sequence.tokens)?;
        Ok(sequence)
    }

    /// An answer by itself, with the tokens that it has in a record of two.
    fn answer(&self, columns: ColumnTexts) -> Result<Sequence, String> {
        let (record, _) = Record::of(columns, &self.fields)?;
        match record.kind()? {
            "prompt" => self.prompted(&record),
            "messages" => {
                let messages = record.with_system(record.messages.clone().unwrap_or_default());
                self.chat(&[], &messages, &record.tools)
            }
            "text" => self.completion("", record.text.as_deref().unwrap_or_default()),
            kind => {
                Err(format!("{kind}: an answer is a text, prompt with completion, or messages"))
            }
        }
    }

    /// Two texts as one sequence, as an encoder of pairs reads them. `labelled`: they have a label.
    fn two_texts(&self, mut columns: ColumnTexts, labelled: bool) -> Result<Sequence, String> {
        let has = columns_of(&columns);
        let known = [QUERY.name, DOCUMENT.name];
        if let Some((ours, _)) = self.fields.iter().find(|(ours, _)| !known.contains(ours)) {
            return Err(format!(
                "data.fields.{ours} is set, and records of objective.kind = \"binary\" have text \
                 and text_pair: leave it out"
            ));
        }
        let missing = |what: &str| format!("{what} is missing: objective.kind needs it; {has}");
        let query = self.take_text(&mut columns, &QUERY)?;
        let query = query.ok_or_else(|| missing("query (or question, anchor, sentence1, text)"))?;
        let document = self.take_text(&mut columns, &DOCUMENT)?;
        let document = document.ok_or_else(|| {
            missing("document (or passage, answer, response, positive, sentence2, text_pair)")
        })?;
        let label = match labelled {
            true => take_score(&mut columns, [0.0, 1.0])?,
            false => Some(0.0), // nobody reads it
        };
        let label = label.ok_or_else(|| missing("label (or score)"))?;
        self.unused.lock().expect("nothing panics inside").extend(columns.into_keys());
        for (name, text) in [("query", &query), ("document", &document)] {
            if text.is_empty() {
                return Err(format!("{name} is empty"));
            }
        }
        let tokenizer = self.vocabulary.tokenizer().filter(|_| self.too_long == TooLong::Cut);
        let Encoded { tokens, kinds, .. } = match tokenizer {
            Some(tokenizer) => tokenizer.encode_cut(&query, Some(&document), self.positions)?,
            None => self.vocabulary.encode(&query, Some(&document), true)?,
        };
        if tokens.len() > self.positions {
            return Err(self.length_error(tokens.len()));
        }
        let kinds = if self.kinds > 1 { kinds } else { Vec::new() };
        Ok(Sequence { score: Some(label), ..Sequence::classified(tokens, 0, kinds) })
    }
}

const NO_SCORE: &str = "scores are of the objectives \"reward\" and \"binary\": set objective.kind \
                        to that of the model";

/// The sequences of records that get a score of a config's model, each a JSON object. With
/// `objective.kind = "reward"` a record is an answer: a `text`, a `prompt` with its `completion`,
/// or `messages`. With `"binary"` it is a query with a document, in the columns of training.
///
/// # Errors
/// A record is none, or has a token that the model does not know; or the tokenizer cannot be used.
pub fn sequences_to_score(
    config: &Config,
    shape: &Shape,
    records: &[String],
) -> Result<Vec<Sequence>, Error> {
    let reader = Reader::of(config, shape, Vocabulary::of(config, shape)?)?;
    let named = |index: usize, what| Error::argument(format_args!("record {}: {what}", index + 1));
    let of_one = |(index, record): (usize, &String)| {
        reader.to_score(record.trim()).map_err(|what| named(index, what))
    };
    records.iter().enumerate().map(of_one).collect()
}

/// The margin of a record, or 0. In a table, each number is a text.
fn take_margin(columns: &mut ColumnTexts) -> Result<f32, String> {
    let number = |value: &Value| match value {
        Value::String(text) => text.parse::<f64>().ok(),
        value => value.as_f64(),
    };
    let Some(value) = take::<Value>(columns, "margin")? else { return Ok(0.0) };
    let margin = number(&value).map(|margin| margin as f32).filter(|margin| margin.is_finite());
    margin.ok_or_else(|| format!("margin is {value}: it must be a finite number"))
}
