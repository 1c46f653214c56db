//! Records of texts whose embeddings are compared: an anchor, its positive, and hard negatives.

use serde_json::Value;

use super::Sequence;
use super::reader::Reader;
use super::record::{ColumnTexts, columns_of, take};
use super::vocabulary::Vocabulary;
use crate::config::{Config, TextRecord, TooLong};
use crate::error::Error;
use crate::models::{Head, Shape};
use crate::resolve::prompts_of;

/// Why other data has no such records.
pub(super) const NEEDED: &str = "objective.kind is a loss of sentence embeddings, which needs \
                                 records with the columns anchor and positive";

/// A text of a record: the name of its column, and the names that data sets have for it.
pub(super) struct TextColumn {
    pub(super) name: &'static str,
    pub(super) others: &'static [&'static str],
}

const ANCHOR: TextColumn =
    TextColumn { name: "anchor", others: &["query", "question", "sentence1"] };
const POSITIVE: TextColumn = TextColumn { name: "positive", others: &["answer", "sentence2"] };
const NEGATIVE: TextColumn = TextColumn { name: "negative", others: &[] };

/// What comes before a text.
#[derive(Default)]
pub(super) struct Prompt {
    text: String,
    /// The tokens that an embedding leaves out.
    skipped: usize,
}

impl Prompt {
    /// The prompts of a config's columns: of an anchor, a positive and a negative.
    pub(super) fn of_columns(
        config: &Config,
        shape: &Shape,
        vocabulary: &Vocabulary,
    ) -> Result<[Prompt; 3], Error> {
        let mut prompts = <[Prompt; 3]>::default();
        for (to, (column, text)) in prompts.iter_mut().zip(config.data.prompts.each()) {
            let named = |what| Error::config(&format!("data.prompts.{column}"), what);
            *to = Prompt::of(text.unwrap_or_default(), shape, vocabulary).map_err(named)?;
        }
        Ok(prompts)
    }

    /// A prompt for texts of a model of this shape. Where an embedding leaves it out, it leaves out
    /// as many tokens as the prompt has by itself, without a special token at its end: so
    /// sentence-transformers counts them.
    fn of(text: &str, shape: &Shape, vocabulary: &Vocabulary) -> Result<Prompt, String> {
        let is_left_out = matches!(shape.head, Head::Embedding { include_prompt: false, .. });
        let mut skipped = 0;
        if is_left_out && !text.is_empty() {
            let tokens = vocabulary.encode(text, None, true)?.tokens;
            let is_special = |token: &u32| {
                vocabulary.tokenizer().is_some_and(|tokenizer| tokenizer.is_special(*token))
            };
            skipped = tokens.len() - usize::from(tokens.last().is_some_and(is_special));
        }
        Ok(Prompt { text: text.into(), skipped })
    }

    /// The tokens of a text behind the prompt, with the special tokens that the tokenizer adds. If
    /// `is_cut`, they are at most `most`.
    fn tokens_of(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        most: usize,
        is_cut: bool,
    ) -> Result<Vec<u32>, String> {
        if text.is_empty() {
            return Err("it is empty".into());
        }
        let text = [&self.text, text].concat();
        let mut tokens = match vocabulary.tokenizer().filter(|_| is_cut) {
            Some(tokenizer) => tokenizer.encode_cut(&text, None, most)?.tokens,
            None => vocabulary.encode(&text, None, true)?.tokens,
        };
        if is_cut {
            tokens.truncate(most);
        }
        if tokens.is_empty() {
            return Err("the tokenizer makes no token of it".into());
        }
        if tokens.len() <= self.skipped {
            return Err(format!(
                "of its {} tokens the embedding leaves out {}, which are the prompt's \
                 (model.include_prompt): make data.sequence_length larger, or the prompt shorter",
                tokens.len(),
                self.skipped
            ));
        }
        Ok(tokens)
    }
}

impl Reader {
    /// The texts of a record, as the documents of one sequence.
    pub(super) fn text_record(
        &self,
        mut columns: ColumnTexts,
        TextRecord { negatives, scores }: TextRecord,
    ) -> Result<Sequence, String> {
        let has = columns_of(&columns);
        let known = [ANCHOR.name, POSITIVE.name, NEGATIVE.name];
        if let Some((ours, _)) = self.fields.iter().find(|(ours, _)| !known.contains(ours)) {
            return Err(format!(
                "data.fields.{ours} is set, and objective.kind is a loss of sentence embeddings, \
                 whose records have anchor, positive and negative: leave it out"
            ));
        }
        let mut texts = Vec::new();
        for column in [&ANCHOR, &POSITIVE] {
            let text = self.take_text(&mut columns, column)?;
            let name = column.name;
            let missing = || {
                let others = column.others.join(", ");
                format!("{name} (or {others}) is missing: objective.kind needs it; {has}")
            };
            texts.push((name.to_string(), text.ok_or_else(missing)?));
        }
        let score = match scores {
            Some(bounds) => Some(take_score(&mut columns, bounds)?.ok_or_else(|| {
                format!("score (or label) is missing: objective.kind needs it; {has}")
            })?),
            None => None,
        };
        let found = self.take_negatives(&mut columns)?;
        if found.len() != negatives {
            return Err(format!(
                "it has {} negatives, and the objective reads {negatives} (objective.negatives): \
                 all records have as many; {has}",
                found.len()
            ));
        }
        texts.extend(found);
        self.unused.lock().expect("nothing panics inside").extend(columns.into_keys());
        let mut tokens = Vec::new();
        let mut documents = Vec::new();
        let mut skipped = Vec::new();
        for (place, (name, text)) in texts.into_iter().enumerate() {
            let prompt = &self.prompts[place.min(2)];
            let of_text = self.text_tokens(prompt, &text);
            let of_text = of_text.map_err(|what| format!("{name}: {what}"))?;
            documents.push(of_text.len());
            skipped.push(prompt.skipped);
            tokens.extend(of_text);
        }
        if skipped.iter().all(|&tokens| tokens == 0) {
            skipped.clear();
        }
        Ok(Sequence { documents, score, skipped, ..Sequence::plain(tokens) })
    }

    pub(super) fn take_text(
        &self,
        columns: &mut ColumnTexts,
        column: &TextColumn,
    ) -> Result<Option<String>, String> {
        let TextColumn { name, others } = *column;
        if let Some((_, theirs)) = self.fields.iter().find(|(ours, _)| *ours == name) {
            return match take(columns, theirs)? {
                None => Err(format!(
                    "column {theirs:?} is missing, which data.fields.{name} names; {}",
                    columns_of(columns)
                )),
                text => Ok(text),
            };
        }
        let is_there = |name: &&str| columns.get(*name).is_some_and(|value| value.get() != "null");
        let name = std::iter::once(&name).chain(others).copied().find(is_there);
        name.map_or(Ok(None), |name| take(columns, name))
    }

    /// Hard negatives: `negative`, `negative_1`, `negative_2` and so on, and the list `negatives`,
    /// each under its name.
    fn take_negatives(&self, columns: &mut ColumnTexts) -> Result<Vec<(String, String)>, String> {
        let first = self.take_text(columns, &NEGATIVE)?;
        let mut found: Vec<_> = first.into_iter().map(|text| ("negative".into(), text)).collect();
        for number in 1.. {
            let name = format!("negative_{number}");
            let Some(text) = take(columns, &name)? else { break };
            found.push((name, text));
        }
        let listed: Option<Vec<String>> = take(columns, "negatives")?;
        found.extend(listed.into_iter().flatten().map(|text| ("negatives".into(), text)));
        Ok(found)
    }

    fn text_tokens(&self, prompt: &Prompt, text: &str) -> Result<Vec<u32>, String> {
        let is_cut = self.too_long == TooLong::Cut;
        let tokens = prompt.tokens_of(&self.vocabulary, text, self.positions, is_cut)?;
        if tokens.len() > self.positions {
            Err(self.length_error(tokens.len()))
        } else {
            Ok(tokens)
        }
    }
}

/// The score of a record, within these bounds. In a table, each number is a text.
pub(super) fn take_score(
    columns: &mut ColumnTexts,
    [low, high]: [f32; 2],
) -> Result<Option<f32>, String> {
    for name in ["score", "label"] {
        let number = |value: Value| match value {
            Value::String(text) => text.parse::<f64>().ok(),
            value => value.as_f64(),
        };
        let Some(value) = take::<Value>(columns, name)? else { continue };
        let must = format!("{name} is {value}: it must be a number from {low} to {high}");
        let score = number(value).map(|score| score as f32);
        let score = score.filter(|score| score.is_finite() && (low..=high).contains(score));
        return score.map(Some).ok_or(must);
    }
    Ok(None)
}

/// The sequences of texts of which a config's model makes embeddings, behind the prompt of
/// `model.default_prompt`. A text of more than `data.sequence_length` tokens is cut, as
/// sentence-transformers does.
///
/// # Errors
/// A text is empty, or has a token that the model does not know; or the tokenizer cannot be used;
/// or the model has no prompt of that name.
pub fn sequences_of_texts(
    config: &Config,
    shape: &Shape,
    texts: &[String],
) -> Result<Vec<Sequence>, Error> {
    let vocabulary = Vocabulary::of(config, shape)?;
    let most = config.sequence_length(shape)?;
    let prompts = prompts_of(config)?;
    let text = prompts.default.and_then(|name| prompts.texts.get(&name).cloned());
    let prompt = Prompt::of(&text.unwrap_or_default(), shape, &vocabulary);
    let prompt = prompt.map_err(|what| Error::config("model.default_prompt", what))?;
    let of_one = |(index, text): (usize, &String)| {
        let tokens = prompt.tokens_of(&vocabulary, text, most, true).and_then(|tokens| {
            vocabulary.check(&tokens, shape.vocabulary)?;
            Ok(tokens)
        });
        let named = |what| Error::argument(format_args!("text {}: {what}", index + 1));
        let skipped = if prompt.skipped > 0 { vec![prompt.skipped] } else { Vec::new() };
        let sequence = |tokens| Sequence { skipped: skipped.clone(), ..Sequence::plain(tokens) };
        tokens.map(sequence).map_err(named)
    };
    texts.iter().enumerate().map(of_one).collect()
}
