//! A dataset: sequences by index, and the part of them that a run trains on or keeps aside.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::jsonl::{Limits, Lines};
use super::text::Text;
use super::{Batch, Predicts, Sequence};
use crate::config::{Config, DataConfig};
use crate::error::Error;
use crate::models::{Head, Shape};
use crate::random;

/// Where sequences come from.
enum Kind {
    Text(Text),
    Lines(Lines),
    /// Endless, each drawn from this seed.
    Random {
        seed: u64,
        vocabulary: usize,
        positions: usize,
    },
}

/// Which sequences of a file are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    All,
    /// All but these many, which are spread evenly.
    AllBut(u64),
    /// These many.
    Held(u64),
}

/// Sequences by index.
pub struct Dataset {
    kind: Kind,
    name: String,
    part: Part,
    /// Which label a position is scored by.
    predicts: Predicts,
}

/// Index of the `nth` of `held` places spread evenly over `count`.
fn held_place(nth: u64, held: u64, count: u64) -> u64 {
    ((2 * u128::from(nth) + 1) * u128::from(count) / (2 * u128::from(held))) as u64
}

/// Index of the `nth` place that is not held.
fn kept_place(nth: u64, held: u64, count: u64) -> u64 {
    // How many held places stand before it: `held_place(j) − j` does not fall.
    let (mut low, mut high) = (0, held);
    while low < high {
        let middle = low.midpoint(high);
        if held_place(middle, held, count) - middle <= nth {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    nth + low
}

impl Dataset {
    /// What a config trains on, and what it keeps aside.
    ///
    /// # Errors
    /// The file and line, and what is wrong there.
    pub fn open(config: &Config, shape: &Shape) -> Result<(Dataset, Option<Dataset>), Error> {
        let (train, aside) = Dataset::parts(config, shape)?;
        let looked_at = config.validation.batches.saturating_mul(config.step.batch as u64);
        match aside {
            Some(aside) if !aside.has_labels(looked_at) => Err(Error::refused(format_args!(
                "data {}: no sequence that is looked at has a label",
                aside.name
            ))),
            aside => Ok((train, aside)),
        }
    }

    fn parts(config: &Config, shape: &Shape) -> Result<(Dataset, Option<Dataset>), Error> {
        let data = &config.data;
        let mut train = Dataset::named(config, shape, &data.train, config.step.seed)?;
        if let Some(file) = &data.validation {
            if data.validation_split.is_some() {
                return Err(Error::config(
                    "data.validation_split",
                    "is given beside data.validation: give one of them",
                ));
            }
            let validation = Dataset::named(config, shape, file, !config.step.seed)?;
            return Ok((train, Some(validation)));
        }
        let is_text = matches!(train.kind, Kind::Text(_));
        let split = data.validation_split.unwrap_or(if is_text { 0.1 } else { 0.0 });
        let Some(count) = train.len() else {
            let aside = || Dataset::named(config, shape, &data.train, !config.step.seed);
            return Ok((train, (split > 0.0).then(aside).transpose()?));
        };
        let held = (count as f64 * split).round() as u64;
        if held == 0 {
            return Ok((train, None));
        }
        if held >= count {
            return Err(Error::config(
                "data.validation_split",
                format_args!("is {split}: of {count} sequences it leaves none to train on"),
            ));
        }
        let mut validation = Dataset::named(config, shape, &data.train, config.step.seed)?;
        (train.part, validation.part) = (Part::AllBut(held), Part::Held(held));
        Ok((train, Some(validation)))
    }

    fn named(config: &Config, shape: &Shape, name: &str, seed: u64) -> Result<Dataset, Error> {
        let (vocabulary, positions) = (shape.vocabulary, config.sequence_length(shape)?);
        let (predicts, classes) = match shape.head {
            Head::Tokens => (Predicts::Next, 0),
            Head::Masked => (Predicts::Own, 0),
            Head::Classes { labels, is_value: false } => (Predicts::Class, labels),
            Head::Classes { labels, is_value: true } => (Predicts::Value, labels),
        };
        let path = Path::new(name);
        let kind = match path.extension().and_then(|extension| extension.to_str()) {
            Some("txt") if predicts != Predicts::Next => return Err(no_labels(name)),
            _ if name == DataConfig::BUILT_IN && predicts != Predicts::Next => {
                return Err(no_labels(name));
            }
            _ if name == DataConfig::BUILT_IN => Kind::Text(Text::built_in(vocabulary, positions)?),
            _ if name == "random" && positions < 2 => {
                return Err(Error::config(
                    "data.sequence_length",
                    "must be at least 2 for random sequences",
                ));
            }
            _ if name == "random" => Kind::Random { seed, vocabulary, positions },
            Some("txt") => Kind::Text(Text::open(path, vocabulary, positions)?),
            Some("jsonl") => {
                let (too_long, kinds) = (config.data.too_long, shape.token_types);
                let limits = Limits { vocabulary, positions, too_long, kinds, predicts, classes };
                Kind::Lines(Lines::open(path, limits)?)
            }
            _ => {
                return Err(Error::refused(format_args!(
                    "data {name}: what kind of data is this? It must be a .txt or a .jsonl file, \
                     \"random\" or \"{}\"",
                    DataConfig::BUILT_IN
                )));
            }
        };
        Ok(Dataset { kind, name: name.into(), part: Part::All, predicts })
    }

    /// A batch of these sequences.
    ///
    /// # Errors
    /// As [`sequence`](Dataset::sequence).
    pub fn batch(&mut self, indices: impl IntoIterator<Item = u64>) -> Result<Batch, Error> {
        let sequences: Result<Vec<_>, Error> =
            indices.into_iter().map(|index| self.sequence(index)).collect();
        Ok(Batch::of(&sequences?, self.predicts))
    }

    /// What it was opened as.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True for text whose tokens are its bytes.
    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Text(_))
    }

    /// Sequences of the whole file; `None`: endless.
    fn whole(&self) -> Option<u64> {
        match &self.kind {
            Kind::Text(text) => Some(text.len()),
            Kind::Lines(lines) => Some(lines.len()),
            Kind::Random { .. } => None,
        }
    }

    /// Sequences; `None`: endless.
    pub fn len(&self) -> Option<u64> {
        self.whole().map(|count| match self.part {
            Part::All => count,
            Part::AllBut(held) => count - held,
            Part::Held(held) => held,
        })
    }

    /// Never: an empty one is refused.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// One of the file's.
    fn place(&self, index: u64) -> u64 {
        match (self.part, self.whole()) {
            (Part::AllBut(held), Some(count)) => kept_place(index, held, count),
            (Part::Held(held), Some(count)) => held_place(index, held, count),
            _ => index,
        }
    }

    /// A sequence.
    ///
    /// # Errors
    /// The file cannot be read any more.
    pub fn sequence(&mut self, index: u64) -> Result<Sequence, Error> {
        let place = self.place(index);
        match &mut self.kind {
            Kind::Text(text) => text.read(place),
            Kind::Lines(lines) => lines.read(place),
            Kind::Random { seed, vocabulary, positions } => {
                let mut state = random::keyed(*seed, place);
                let token = |_| (random::next(&mut state) % *vocabulary as u64) as u32;
                let tokens = (0..*positions).map(token).collect();
                Ok(match self.predicts {
                    Predicts::Next | Predicts::Own => Sequence::plain(tokens),
                    Predicts::Class | Predicts::Value => Sequence::whole(tokens, 0, Vec::new()),
                })
            }
        }
    }

    /// True when this sequence has a label, as far as is known without reading it.
    fn is_labelled(&self, index: u64) -> bool {
        match &self.kind {
            Kind::Lines(lines) => lines.unlabelled.binary_search(&self.place(index)).is_err(),
            _ => true,
        }
    }

    /// Sequences in their order, at most so many a batch, `batches` times or until they end; what
    /// has no label is left out.
    ///
    /// # Panics
    /// `batch` is 0.
    pub fn in_order(
        &mut self,
        batch: usize,
        batches: u64,
    ) -> impl Iterator<Item = Result<Batch, Error>> {
        let end = self.len().unwrap_or(u64::MAX).min(batches.saturating_mul(batch as u64));
        let batches = (0..end)
            .step_by(batch)
            .map(move |first| self.batch(first..end.min(first.saturating_add(batch as u64))));
        batches.filter(|batch| batch.as_ref().map_or(true, |batch| batch.labelled > 0))
    }

    /// True when one of the first `most` sequences has a label.
    fn has_labels(&self, most: u64) -> bool {
        match (&self.kind, self.len()) {
            (Kind::Lines(_), Some(count)) => {
                (0..count.min(most)).any(|index| self.is_labelled(index))
            }
            _ => true,
        }
    }

    /// What the data is: how many sequences, which of them, and a SHA-256 of all its bytes.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn fingerprint(&mut self) -> Result<String, Error> {
        let mut hasher = Sha256::new();
        let read = match &mut self.kind {
            Kind::Text(text) => text.each_bytes(|bytes| hasher.update(bytes)),
            Kind::Lines(lines) => lines.each_bytes(|bytes| hasher.update(bytes)),
            Kind::Random { seed, .. } => {
                hasher.update(seed.to_le_bytes());
                Ok(())
            }
        };
        read.map_err(|error| Error::failed(format_args!("data {}: {error}", self.name)))?;
        let digest: String =
            hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok(match (self.whole(), self.len()) {
            (Some(all), Some(count)) => format!("{count} of {all} sequences of {digest}"),
            _ => format!("random {digest}"),
        })
    }
}

fn no_labels(name: &str) -> Error {
    Error::refused(format_args!(
        "data {name}: text has no labels, and this model does not predict the next token: give a \
         .jsonl of input_ids and labels (of masked tokens), or label (of whole sequences)"
    ))
}

/// The order of training: which sequences each step sees, epoch after epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) seed: u64,
    pub(super) shuffle: bool,
    pub(super) batch: usize,
}

impl Order {
    /// Indices of a step's sequences. A step may begin in one epoch and end in the next.
    pub(super) fn of_step(self, data: &Dataset, step: u64) -> impl Iterator<Item = u64> {
        let from = step * self.batch as u64;
        let count = data.len();
        (from..from + self.batch as u64).map(move |index| match count {
            None => index,
            Some(count) if !self.shuffle => index % count,
            Some(count) => {
                random::shuffled(random::keyed(self.seed, index / count), count, index % count)
            }
        })
    }

    /// The first of these steps without a label.
    pub(super) fn unlabelled(self, data: &Dataset, steps: u64) -> Option<u64> {
        let Kind::Lines(lines) = &data.kind else { return None };
        if lines.unlabelled.is_empty() {
            return None;
        }
        // A few epochs: what comes behind them is refused when it is met.
        let count = data.len().expect("lines end");
        let looked_at = 4 * count.div_ceil(self.batch as u64);
        (0..steps.min(looked_at))
            .find(|&step| !self.of_step(data, step).any(|index| data.is_labelled(index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_and_what_is_not_is_everything_once() {
        for (count, held) in [(2, 1), (10, 1), (10, 3), (11, 10), (1000, 99), (7, 6)] {
            let mut all: Vec<u64> = (0..held).map(|nth| held_place(nth, held, count)).collect();
            all.extend((0..count - held).map(|nth| kept_place(nth, held, count)));
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count), "{held} of {count}");
        }
    }
}
