//! A dataset: sequences by index. A config opens one for training, and others for validation.

use super::files;
use super::mask::Mask;
use super::pack::join;
use super::reader::Reader;
use super::remarks::Remarks;
use super::source::{Part, Source};
use super::tally::Tally;
use super::texts::Prompt;
use super::vocabulary::Vocabulary;
use super::{Batch, Predicts, Sequence};
use crate::config::{Config, Files};
use crate::error::Error;
use crate::kernels::ProblemType;
use crate::models::{Head, Shape};
use crate::objectives::Preference;
use crate::random;
use crate::resolve::label_names;

/// The origin of the sequences.
pub(super) enum Kind {
    Sources(Vec<Source>),
    /// Random tokens: an endless dataset, which depends on this seed alone.
    Random {
        seed: u64,
        vocabulary: usize,
        positions: usize,
        /// The labels of a model of [`Predicts::LabelSet`].
        classes: usize,
    },
}

/// The sequences of training or of a validation set, by index.
pub struct Dataset {
    pub(super) kind: Kind,
    /// The entry of the config: files, "random" or the built-in corpus.
    name: String,
    /// The name of the validation set, if there are several.
    set: Option<String>,
    remarks: Remarks,
    predicts: Predicts,
    mask: Option<Mask>,
    attend_across: bool,
    /// The preference loss, if a sequence is the two answers of a preference.
    pub(super) preference: Option<Preference>,
    /// True if records need the log-probabilities of their answers by a reference.
    pub(super) needs_references: bool,
    /// True if an objective reads a score of each sequence.
    pub(super) is_scored: bool,
    vocabulary: Vocabulary,
}

/// What a model with this head predicts, and its classes.
fn predicted(head: Head) -> (Predicts, usize) {
    match head {
        Head::Tokens => (Predicts::Next, 0),
        Head::Masked => (Predicts::Own, 0),
        Head::Classes { labels, problem } => {
            let predicts = match problem {
                ProblemType::SingleLabelClassification => Predicts::Class,
                ProblemType::Regression => Predicts::Value,
                ProblemType::MultiLabelClassification => Predicts::LabelSet,
            };
            (predicts, labels)
        }
        Head::TokenClasses { labels } => (Predicts::TokenClass, labels),
        Head::Embedding { .. } => (Predicts::Embedding, 0),
    }
}

impl Reader {
    /// The reader of a config's records for a model of this shape.
    pub(super) fn of(
        config: &Config,
        shape: &Shape,
        vocabulary: Vocabulary,
    ) -> Result<Reader, Error> {
        let positions = config.sequence_length(shape)?;
        let (predicts, classes) = predicted(shape.head);
        let mut names = label_names(config)?;
        // Names of another number of labels are those of a head that this one replaces.
        if predicts == Predicts::LabelSet && names.len() != classes {
            names.clear();
        }
        Ok(Reader {
            prompts: Prompt::of_columns(config, shape, &vocabulary)?,
            vocabulary,
            tokens: shape.vocabulary,
            positions,
            too_long: config.data.too_long,
            bad_records: config.data.bad_records,
            end_of_text: config.data.end_of_text,
            preference: config.objective.preference(),
            reference: config.objective.reference,
            texts: config.objective.text_record(),
            scored: config.objective.score_record(),
            kinds: shape.token_types,
            predicts,
            classes,
            names,
            fields: config.data.fields.named(),
            unused: Default::default(),
            not_found: Default::default(),
            has_date: config.data.date.is_some(),
        })
    }
}

impl Dataset {
    /// Opens the training set and all validation sets of a config. There may be no validation set.
    ///
    /// # Errors
    /// A file cannot be used (the error has file and line); or a validation set has no label.
    pub fn open(config: &Config, shape: &Shape) -> Result<(Dataset, Vec<Dataset>), Error> {
        let (mut train, mut validation) = Dataset::split(config, shape)?;
        train.pack(config, shape)?;
        let scored = config.validation.batches.saturating_mul(config.step.batch as u64);
        for one in &mut validation {
            one.pack(config, shape)?;
            if !one.has_labels(scored) {
                let problem = "no sequence of the validation set has a label";
                return Err(Error::bad_data(&one.name, problem));
            }
        }
        Ok((train, validation))
    }

    /// Opens only the validation sets. The training set is read only if the validation set is a
    /// share of it.
    ///
    /// # Errors
    /// The errors of [`open`](Dataset::open); or the config has no validation set.
    pub fn open_validation(config: &Config, shape: &Shape) -> Result<Vec<Dataset>, Error> {
        if config.data.validation.is_some() {
            let mut sets = Dataset::validation_sets(config, shape)?;
            sets.iter_mut().try_for_each(|set| set.pack(config, shape))?;
            return Ok(sets);
        }
        let (_, sets) = Dataset::open(config, shape)?;
        if sets.is_empty() {
            return Err(match config.data.validation_split {
                Some(split) if split > 0.0 => {
                    let problem = "holds out no sequence: the data is too small for it";
                    Error::config("data.validation_split", problem)
                }
                _ => {
                    let problem = "is missing: name the data to evaluate, or set \
                                   data.validation_split";
                    Error::config("data.validation", problem)
                }
            });
        }
        Ok(sets)
    }

    /// Opens the sets of `data.validation`, before packing.
    fn validation_sets(config: &Config, shape: &Shape) -> Result<Vec<Dataset>, Error> {
        let sets = config.data.validation.as_ref().map(Files::sets).unwrap_or_default();
        let open = |(name, files): (Option<&str>, Files)| {
            let mut set = Dataset::named(config, shape, &files, !config.step.seed)?;
            set.set = name.map(str::to_string);
            Ok(set)
        };
        sets.into_iter().map(open).collect()
    }

    /// Opens all sets, before packing. A validation split takes its share of each source.
    fn split(config: &Config, shape: &Shape) -> Result<(Dataset, Vec<Dataset>), Error> {
        let data = &config.data;
        let mut train = Dataset::named(config, shape, &data.train, config.step.seed)?;
        if data.validation.is_some() {
            if data.validation_split.is_some() {
                return Err(Error::config(
                    "data.validation_split",
                    "is set together with data.validation: set only one of them",
                ));
            }
            return Ok((train, Dataset::validation_sets(config, shape)?));
        }
        let Kind::Sources(sources) = &mut train.kind else {
            let split = data.validation_split.unwrap_or(0.0);
            let validation = || Dataset::named(config, shape, &data.train, !config.step.seed);
            let validation = (split > 0.0).then(validation).transpose()?;
            return Ok((train, validation.into_iter().collect()));
        };
        let is_text = sources.iter().all(|source| source.is_text);
        let split = data.validation_split.unwrap_or(if is_text { 0.1 } else { 0.0 });
        let held_out = |source: &Source| (source.total() as f64 * split).round() as u64;
        let total: u64 = sources.iter().map(Source::total).sum();
        let total_held_out: u64 = sources.iter().map(held_out).sum();
        if total_held_out == 0 {
            return Ok((train, Vec::new()));
        }
        if total_held_out >= total {
            return Err(Error::config(
                "data.validation_split",
                format_args!("is {split}: of {total} sequences this leaves none to train on"),
            ));
        }
        let mut validation_sources = Vec::new();
        for source in sources.iter_mut() {
            let held_out = held_out(source);
            source.part = Part::Training(held_out);
            let part = Part::HeldOut(held_out);
            validation_sources.push(Source { part, weight: 1.0, ..source.clone() });
        }
        let validation = Dataset::of(
            config,
            shape,
            Kind::Sources(validation_sources),
            train.name.clone(),
            train.predicts,
            train.vocabulary.clone(),
            !config.step.seed,
        )?;
        Ok((train, vec![validation]))
    }

    /// A dataset of these sources. `seed` is the seed of its masks.
    fn of(
        config: &Config,
        shape: &Shape,
        kind: Kind,
        name: String,
        predicts: Predicts,
        vocabulary: Vocabulary,
        seed: u64,
    ) -> Result<Dataset, Error> {
        let draws_masks = match (&kind, predicts) {
            (Kind::Sources(sources), Predicts::Own) => {
                sources.iter().any(|source| source.spool.has_unmasked())
            }
            _ => false,
        };
        let probability = config.data.mask_probability;
        let mask = || Mask::new(vocabulary.clone(), shape.vocabulary, probability, seed);
        let mask = draws_masks.then(mask).transpose()?;
        Ok(Dataset {
            kind,
            name,
            set: None,
            remarks: Remarks::default(),
            predicts,
            mask,
            attend_across: config.data.attend_across,
            preference: config.objective.preference(),
            needs_references: config.objective.needs_references(),
            is_scored: config.objective.score_record().is_some(),
            vocabulary,
        })
    }

    /// Opens and tokenizes all files of an entry of the config (`data.train`, `data.validation`).
    fn named(config: &Config, shape: &Shape, files: &Files, seed: u64) -> Result<Dataset, Error> {
        let positions = config.sequence_length(shape)?;
        let (predicts, classes) = predicted(shape.head);
        let vocabulary = Vocabulary::of(config, shape)?;
        if files.is("random") {
            if positions < 2 {
                return Err(Error::config(
                    "data.sequence_length",
                    "must be at least 2 for random sequences",
                ));
            }
            let kind = Kind::Random { seed, vocabulary: shape.vocabulary, positions, classes };
            return Dataset::of(config, shape, kind, files.to_string(), predicts, vocabulary, seed);
        }
        let reader = Reader::of(config, shape, vocabulary)?;
        let mut remarks = Remarks::default();
        remarks.notes.extend(reader.vocabulary.excess(shape.vocabulary));
        let mut sources = Vec::new();
        for (name, weight) in files.each() {
            if name == "random" {
                return Err(Error::bad_data(name, "it cannot be combined with other data"));
            }
            let mut opened = files::open(name, &reader)?;
            remarks.take(&mut opened);
            sources.push(Source::new(opened, weight));
        }
        remarks.notes.extend(reader.notes_of_chats());
        let kind = Kind::Sources(sources);
        let name = files.to_string();
        let unused = reader.unused.into_inner().expect("nothing panics inside");
        let vocabulary = reader.vocabulary;
        let mut data = Dataset::of(config, shape, kind, name, predicts, vocabulary, seed)?;
        data.remarks = remarks;
        data.remarks.unused = unused.into_iter().collect();
        Ok(data)
    }

    /// Packs sequences, if the config asks for it.
    fn pack(&mut self, config: &Config, shape: &Shape) -> Result<(), Error> {
        let Kind::Sources(sources) = &mut self.kind else { return Ok(()) };
        if !config.data.packing {
            return Ok(());
        }
        if matches!(shape.head, Head::Classes { .. }) {
            let problem = "puts several texts into one sequence, and this model has one label \
                           for each sequence";
            return Err(Error::config("data.packing", problem));
        }
        let positions = config.sequence_length(shape)?;
        sources.iter_mut().for_each(|source| source.pack(positions));
        Ok(())
    }

    /// A batch of the sequences with these indices.
    ///
    /// # Errors
    /// The spooled data cannot be read any more.
    pub fn batch(&self, indices: impl IntoIterator<Item = u64>) -> Result<Batch, Error> {
        let sequences: Result<Vec<_>, Error> =
            indices.into_iter().map(|index| self.sequence(index)).collect();
        Ok(self.batch_of(&sequences?))
    }

    /// Its entry in the config: files, "random" or the built-in corpus.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name of the validation set, if `data.validation` names several.
    pub fn set_name(&self) -> Option<&str> {
        self.set.as_deref()
    }

    /// The columns of its records that are not used.
    pub fn unused_columns(&self) -> &[String] {
        &self.remarks.unused
    }

    /// The number of records that `data.bad_records = "skip"` left out.
    pub fn skipped_records(&self) -> u64 {
        self.remarks.skipped.count
    }

    /// The records that have no label.
    pub(super) fn unlabelled(&self) -> &Tally {
        &self.remarks.unlabelled
    }

    /// What a person should know of the data, in sentences: columns that are not used, files and
    /// records that are left out, records without a label, tokens that the model does not have.
    pub fn notes(&self) -> Vec<String> {
        self.remarks.sentences()
    }

    /// The vocabulary of its tokens.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The kind of the model's predictions.
    pub fn predicts(&self) -> Predicts {
        self.predicts
    }

    /// Whether the data is text whose tokens are bytes.
    pub fn is_bytes(&self) -> bool {
        let is_text = match &self.kind {
            Kind::Sources(sources) => sources.iter().all(|source| source.is_text),
            Kind::Random { .. } => false,
        };
        is_text && matches!(self.vocabulary, Vocabulary::Bytes)
    }

    /// The number of sequences of an epoch. `None` if the data is endless.
    pub fn len(&self) -> Option<u64> {
        match &self.kind {
            Kind::Sources(sources) => Some(sources.iter().map(Source::quota).sum()),
            Kind::Random { .. } => None,
        }
    }

    /// Always false: an empty dataset is refused when it is opened.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The source of a sequence, and its index in the source. In each source an epoch continues
    /// where the epoch before ended, so several epochs together use all of a source whose weight is
    /// below 1.
    fn find<'s>(&self, sources: &'s [Source], index: u64) -> (&'s Source, u64) {
        let epoch_len: u64 = sources.iter().map(Source::quota).sum();
        let epoch = index / epoch_len;
        let mut at = index % epoch_len;
        for source in sources {
            let quota = source.quota();
            if at < quota {
                return (source, (epoch * quota + at) % source.len());
            }
            at -= quota;
        }
        unreachable!("an epoch is the sum of its quotas")
    }

    /// Reads a sequence. Indices continue from epoch to epoch.
    ///
    /// # Errors
    /// The spooled data cannot be read any more.
    pub fn sequence(&self, index: u64) -> Result<Sequence, Error> {
        self.masked(index, index)
    }

    /// Reads a sequence, and draws its masks with the key `nth`.
    pub(super) fn masked(&self, index: u64, nth: u64) -> Result<Sequence, Error> {
        let sources = match &self.kind {
            Kind::Sources(sources) => sources,
            Kind::Random { seed, vocabulary, positions, classes } => {
                let mut state = random::keyed(*seed, index);
                let token = |_| (random::next(&mut state) % *vocabulary as u64) as u32;
                let tokens = (0..*positions).map(token).collect();
                let plain = Sequence::plain(tokens);
                return Ok(match self.predicts {
                    Predicts::Next | Predicts::Own | Predicts::Embedding => plain,
                    Predicts::Class | Predicts::Value => {
                        Sequence::classified(plain.tokens, 0, Vec::new())
                    }
                    Predicts::TokenClass => Sequence { labels: vec![0; *positions], ..plain },
                    // The bits of 0.0: none of the labels.
                    Predicts::LabelSet => Sequence { labels: vec![0; *classes], ..plain },
                });
            }
        };
        let (source, at) = self.find(sources, index);
        let read = |row: u64| source.spool.read(source.place(row));
        let rows: Result<Vec<Sequence>, _> = source.rows_of(at).into_iter().map(read).collect();
        let mut rows = rows?;
        if let Some(mask) = &self.mask {
            for (row, one) in rows.iter_mut().enumerate().filter(|(_, one)| one.labels.is_empty()) {
                mask.draw(one, random::keyed(nth, row as u64));
            }
        }
        Ok(match (&source.packed, rows.pop()) {
            (None, Some(one)) => source.with_reference(one, at),
            (_, last) => {
                rows.extend(last);
                join(rows, self.attend_across)
            }
        })
    }

    /// The number of tokens of a sequence.
    pub(super) fn length(&self, index: u64) -> usize {
        match &self.kind {
            Kind::Random { positions, .. } => *positions,
            Kind::Sources(sources) => {
                let (source, at) = self.find(sources, index);
                let rows = source.rows_of(at).into_iter();
                rows.map(|row| source.spool.tokens(source.place(row))).sum()
            }
        }
    }

    /// Whether each sequence has a label.
    pub(super) fn all_labelled(&self) -> bool {
        match &self.kind {
            Kind::Random { .. } => true,
            Kind::Sources(sources) => sources.iter().all(|source| source.spool.all_labelled()),
        }
    }

    /// Whether a sequence has a label. The spool knows this without reading the sequence.
    pub(super) fn is_labelled(&self, index: u64) -> bool {
        let Kind::Sources(sources) = &self.kind else { return true };
        let (source, at) = self.find(sources, index);
        let rows = source.rows_of(at);
        // The text before predicts the first token of each text but the first.
        let joins = self.attend_across && self.predicts == Predicts::Next;
        let is_joined = |row: &u64| source.spool.has_first_label(source.place(*row));
        if joins && rows.iter().skip(1).any(is_joined) {
            return true;
        }
        rows.into_iter().any(|row| source.spool.is_labelled(source.place(row)))
    }

    /// Batches of `batch` sequences in the order of the files, for evaluation. Ends after `batches`
    /// batches or an epoch. Batches without a label are left out.
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

    /// Whether one of the first `most` sequences has a label.
    fn has_labels(&self, most: u64) -> bool {
        let count = self.len().unwrap_or(1);
        (0..count.min(most)).any(|index| self.is_labelled(index))
    }
}
