//! A dataset: sequences by index, and the part of them that a run trains on or keeps aside.

use sha2::{Digest, Sha256};

use super::files;
use super::mask::Mask;
use super::pack::join;
use super::reader::Reader;
use super::source::{Part, Source};
use super::vocabulary::Vocabulary;
use super::{Batch, Predicts, Sequence};
use crate::config::{Config, Files, Labels};
use crate::error::Error;
use crate::hf;
use crate::models::{Head, Shape};
use crate::random;

/// Where sequences come from.
enum Kind {
    Sources(Vec<Source>),
    /// Endless, each drawn from this seed.
    Random {
        seed: u64,
        vocabulary: usize,
        positions: usize,
    },
}

/// Sequences by index.
pub struct Dataset {
    kind: Kind,
    name: String,
    /// Which label a position is scored by.
    predicts: Predicts,
    mask: Option<Mask>,
    attend_across: bool,
    vocabulary: Vocabulary,
}

impl Dataset {
    /// What a config trains on, and what it keeps aside.
    ///
    /// # Errors
    /// The file and line, and what is wrong there.
    pub fn open(config: &Config, shape: &Shape) -> Result<(Dataset, Option<Dataset>), Error> {
        let (mut train, mut aside) = Dataset::parts(config, shape)?;
        train.pack(config, shape)?;
        if let Some(aside) = &mut aside {
            aside.pack(config, shape)?;
        }
        let looked_at = config.validation.batches.saturating_mul(config.step.batch as u64);
        match aside {
            Some(aside) if !aside.has_labels(looked_at) => {
                Err(Error::bad_data(&aside.name, "no sequence of the validation set has a label"))
            }
            aside => Ok((train, aside)),
        }
    }

    /// What a config keeps aside, alone: what it trains on is read only if a part of it is meant.
    ///
    /// # Errors
    /// As [`open`](Dataset::open).
    pub fn open_aside(config: &Config, shape: &Shape) -> Result<Dataset, Error> {
        match &config.data.validation {
            Some(files) => {
                let mut only = Dataset::named(config, shape, files, !config.step.seed)?;
                only.pack(config, shape)?;
                Ok(only)
            }
            None => Dataset::open(config, shape)?.1.ok_or_else(|| {
                let problem = "is missing: name the data to evaluate, or set data.validation_split";
                Error::config("data.validation", problem)
            }),
        }
    }

    fn parts(config: &Config, shape: &Shape) -> Result<(Dataset, Option<Dataset>), Error> {
        let data = &config.data;
        let mut train = Dataset::named(config, shape, &data.train, config.step.seed)?;
        if let Some(files) = &data.validation {
            if data.validation_split.is_some() {
                return Err(Error::config(
                    "data.validation_split",
                    "is set together with data.validation: set only one of them",
                ));
            }
            let validation = Dataset::named(config, shape, files, !config.step.seed)?;
            return Ok((train, Some(validation)));
        }
        let Kind::Sources(sources) = &mut train.kind else {
            let split = data.validation_split.unwrap_or(0.0);
            let aside = || Dataset::named(config, shape, &data.train, !config.step.seed);
            return Ok((train, (split > 0.0).then(aside).transpose()?));
        };
        let is_text = sources.iter().all(|source| source.is_text);
        let split = data.validation_split.unwrap_or(if is_text { 0.1 } else { 0.0 });
        let held = |source: &Source| (source.whole() as f64 * split).round() as u64;
        let all: u64 = sources.iter().map(Source::whole).sum();
        let aside: u64 = sources.iter().map(held).sum();
        if aside == 0 {
            return Ok((train, None));
        }
        if aside >= all {
            return Err(Error::config(
                "data.validation_split",
                format_args!("is {split}: of {all} sequences this leaves none to train on"),
            ));
        }
        let mut of_aside = Vec::new();
        for source in sources.iter_mut() {
            let held = held(source);
            source.part = Part::AllBut(held);
            let (spool, digest) = (source.spool.clone(), source.digest.clone());
            let Source { is_text, .. } = *source;
            let part = Part::Held(held);
            of_aside.push(Source { spool, digest, is_text, part, weight: 1.0, packed: None });
        }
        let (kind, name) = (Kind::Sources(of_aside), train.name.clone());
        let (vocabulary, seed) = (train.vocabulary.clone(), !config.step.seed);
        let aside = Dataset::of(config, kind, name, train.predicts, vocabulary, seed)?;
        Ok((train, Some(aside)))
    }

    fn of(
        config: &Config,
        kind: Kind,
        name: String,
        predicts: Predicts,
        vocabulary: Vocabulary,
        seed: u64,
    ) -> Result<Dataset, Error> {
        let masks = match (&kind, predicts) {
            (Kind::Sources(sources), Predicts::Own) => {
                sources.iter().any(|source| source.spool.has_unmasked())
            }
            _ => false,
        };
        let probability = config.data.mask_probability;
        let mask = masks.then(|| Mask::new(vocabulary.clone(), probability, seed)).transpose()?;
        let attend_across = config.data.attend_across;
        Ok(Dataset { kind, name, predicts, mask, attend_across, vocabulary })
    }

    fn named(config: &Config, shape: &Shape, files: &Files, seed: u64) -> Result<Dataset, Error> {
        let positions = config.sequence_length(shape)?;
        let (predicts, classes) = match shape.head {
            Head::Tokens => (Predicts::Next, 0),
            Head::Masked => (Predicts::Own, 0),
            Head::Classes { labels, is_value: false } => (Predicts::Class, labels),
            Head::Classes { labels, is_value: true } => (Predicts::Value, labels),
        };
        let vocabulary = Vocabulary::of(config, shape)?;
        if files.is("random") {
            if positions < 2 {
                return Err(Error::config(
                    "data.sequence_length",
                    "must be at least 2 for random sequences",
                ));
            }
            let kind = Kind::Random { seed, vocabulary: shape.vocabulary, positions };
            return Dataset::of(config, kind, files.to_string(), predicts, vocabulary, seed);
        }
        let reader = Reader {
            vocabulary,
            tokens: shape.vocabulary,
            positions,
            too_long: config.data.too_long,
            end_of_text: config.data.end_of_text,
            kinds: shape.token_types,
            predicts,
            classes,
            names: label_names(config)?,
        };
        let mut sources = Vec::new();
        for (name, weight) in files.each() {
            if name == "random" {
                return Err(Error::bad_data(name, "it cannot be combined with other data"));
            }
            sources.push(Source::new(files::open(name, &reader)?, weight));
        }
        let (kind, name) = (Kind::Sources(sources), files.to_string());
        Dataset::of(config, kind, name, predicts, reader.vocabulary, seed)
    }

    /// Packs sequences, if a config says so.
    fn pack(&mut self, config: &Config, shape: &Shape) -> Result<(), Error> {
        let Kind::Sources(sources) = &mut self.kind else { return Ok(()) };
        if !config.data.packing {
            return Ok(());
        }
        if !shape.scores_tokens() {
            let problem = "puts several texts into one sequence, and this model has one label \
                           for each sequence";
            return Err(Error::config("data.packing", problem));
        }
        let positions = config.sequence_length(shape)?;
        sources.iter_mut().for_each(|source| source.pack(positions));
        Ok(())
    }

    /// A batch of these sequences.
    ///
    /// # Errors
    /// As [`sequence`](Dataset::sequence).
    pub fn batch(&self, indices: impl IntoIterator<Item = u64>) -> Result<Batch, Error> {
        let sequences: Result<Vec<_>, Error> =
            indices.into_iter().map(|index| self.sequence(index)).collect();
        Ok(Batch::of(&sequences?, self.predicts))
    }

    /// What it was opened as.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What its tokens are.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Which label a position is scored by.
    pub fn predicts(&self) -> Predicts {
        self.predicts
    }

    /// True for text whose tokens are its bytes.
    pub fn is_bytes(&self) -> bool {
        let is_text = match &self.kind {
            Kind::Sources(sources) => sources.iter().all(|source| source.is_text),
            Kind::Random { .. } => false,
        };
        is_text && matches!(self.vocabulary, Vocabulary::Bytes)
    }

    /// Sequences of an epoch; `None`: endless.
    pub fn len(&self) -> Option<u64> {
        match &self.kind {
            Kind::Sources(sources) => Some(sources.iter().map(Source::quota).sum()),
            Kind::Random { .. } => None,
        }
    }

    /// Never: an empty one is refused.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The source of a sequence, and which of that source's it is. Sequences are counted on from
    /// epoch to epoch: what one leaves out of a source, the next begins with.
    fn find<'s>(&self, sources: &'s [Source], index: u64) -> (&'s Source, u64) {
        let epoch_len: u64 = sources.iter().map(Source::quota).sum();
        let (epoch, mut at) = (index / epoch_len, index % epoch_len);
        for source in sources {
            let quota = source.quota();
            if at < quota {
                return (source, (epoch * quota + at) % source.len());
            }
            at -= quota;
        }
        unreachable!("an epoch is the sum of its quotas")
    }

    /// A sequence: of the first epoch, or of those behind it.
    ///
    /// # Errors
    /// The spooled data cannot be read any more.
    pub fn sequence(&self, index: u64) -> Result<Sequence, Error> {
        self.drawn(index, index)
    }

    /// A sequence, with the masks of the `nth` that is drawn.
    pub(super) fn drawn(&self, index: u64, nth: u64) -> Result<Sequence, Error> {
        let sources = match &self.kind {
            Kind::Sources(sources) => sources,
            Kind::Random { seed, vocabulary, positions } => {
                let mut state = random::keyed(*seed, index);
                let token = |_| (random::next(&mut state) % *vocabulary as u64) as u32;
                let tokens = (0..*positions).map(token).collect();
                return Ok(match self.predicts {
                    Predicts::Next | Predicts::Own => Sequence::plain(tokens),
                    Predicts::Class | Predicts::Value => Sequence::whole(tokens, 0, Vec::new()),
                });
            }
        };
        let (source, at) = self.find(sources, index);
        let read = |row: u64| source.spool.read(source.place(row));
        let rows: Result<Vec<Sequence>, _> = source.rows_of(at).into_iter().map(read).collect();
        let failed = |error| Error::storage(format_args!("data {}", self.name), error);
        let mut rows = rows.map_err(failed)?;
        if let Some(mask) = &self.mask {
            for (row, one) in rows.iter_mut().enumerate().filter(|(_, one)| one.labels.is_empty()) {
                mask.draw(one, random::keyed(nth, row as u64));
            }
        }
        Ok(match (&source.packed, rows.pop()) {
            (None, Some(one)) => one,
            (_, last) => {
                rows.extend(last);
                join(rows, self.attend_across)
            }
        })
    }

    /// True when this sequence has a label, as far as is known without reading it.
    fn is_labelled(&self, index: u64) -> bool {
        let Kind::Sources(sources) = &self.kind else { return true };
        let (source, at) = self.find(sources, index);
        let rows = source.rows_of(at);
        // What a text begins with is predicted by the text before it.
        if self.attend_across && rows.len() > 1 {
            return true;
        }
        rows.into_iter().any(|row| source.spool.is_labelled(source.place(row)))
    }

    /// Sequences in their order, at most so many a batch, `batches` times or until they end; what
    /// has no label is left out.
    ///
    /// # Panics
    /// `batch` is 0.
    pub fn in_order(
        &self,
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
        let count = self.len().unwrap_or(1);
        (0..count.min(most)).any(|index| self.is_labelled(index))
    }

    /// What the data is: how many sequences, which of them, and a SHA-256 of all its bytes.
    pub fn fingerprint(&self) -> String {
        match &self.kind {
            Kind::Random { seed, .. } => {
                let digest = Sha256::digest(seed.to_le_bytes());
                let digest: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
                format!("random {digest}")
            }
            Kind::Sources(sources) => {
                let each = sources.iter().map(|source| {
                    let (rows, whole, digest) = (source.rows(), source.whole(), &source.digest);
                    format!("{rows} of {whole} sequences of {digest}")
                });
                let each = each.collect::<Vec<_>>().join(", ");
                match self.vocabulary.tokenizer() {
                    Some(tokenizer) => format!("{each}, by tokenizer {}", tokenizer.digest()),
                    None => each,
                }
            }
        }
    }
}

/// What the classes of a config's model are called.
fn label_names(config: &Config) -> Result<Vec<String>, Error> {
    let own = match &config.model.path {
        Some(path) => hf::label_names(&hf::read_config(path)?),
        None => Vec::new(),
    };
    let Some(Labels::Names(names)) = &config.model.labels else { return Ok(own) };
    let sorted = |names: &Vec<String>| {
        let mut names = names.clone();
        names.sort();
        names
    };
    if own != *names && sorted(&own) == sorted(names) {
        let own = own.join(", ");
        return Err(Error::config(
            "model.labels",
            format_args!("must have the order of the model's own labels, {own}"),
        ));
    }
    Ok(names.clone())
}

/// The order of training: which sequences each step sees, epoch after epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) seed: u64,
    pub(super) shuffle: bool,
    pub(super) batch: usize,
}

impl Order {
    /// Indices of a step's sequences, each with how many were drawn before it. A step may begin
    /// in one epoch and end in the next.
    pub(super) fn of_step(self, data: &Dataset, step: u64) -> impl Iterator<Item = (u64, u64)> {
        let from = step * self.batch as u64;
        let count = data.len();
        (from..from + self.batch as u64).map(move |nth| {
            let index = match count.filter(|_| self.shuffle) {
                None => nth,
                Some(count) => {
                    let epoch = nth / count;
                    let seed = random::keyed(self.seed, epoch);
                    epoch * count + random::shuffled(seed, count, nth % count)
                }
            };
            (index, nth)
        })
    }

    /// A step's batch.
    pub(super) fn batch(self, data: &Dataset, step: u64) -> Result<Batch, Error> {
        Ok(Batch::of(&self.sequences(data, step)?, data.predicts))
    }

    /// A step's sequences.
    pub(super) fn sequences(self, data: &Dataset, step: u64) -> Result<Vec<Sequence>, Error> {
        self.of_step(data, step).map(|(index, nth)| data.drawn(index, nth)).collect()
    }

    /// The first of these steps without a label.
    pub(super) fn unlabelled(self, data: &Dataset, steps: u64) -> Option<u64> {
        let Kind::Sources(sources) = &data.kind else { return None };
        if sources.iter().all(|source| source.spool.all_labelled()) {
            return None;
        }
        // A few epochs: what comes behind them is refused when it is met.
        let count = data.len().expect("files end");
        let looked_at = 4 * count.div_ceil(self.batch as u64);
        (0..steps.min(looked_at))
            .find(|&step| !self.of_step(data, step).any(|(index, _)| data.is_labelled(index)))
    }
}
