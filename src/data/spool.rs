//! The spool: tokenized sequences in a temporary file, read by index.
//!
//! Data is tokenized once, before a run starts, and may be larger than memory. Memory holds only
//! the place of each sequence. The file has no name, so the system removes it with the process.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::sync::Mutex;

use super::Sequence;
use crate::error::Error;
use crate::folder;

/// The place of a sequence in the file: its tokens, then its labels, then its token types. There is
/// a label for each token, or one for each label of the model.
#[derive(Clone)]
struct Place {
    /// The first byte.
    at: u64,
    tokens: u32,
    /// The number of labels that are stored. Labels that equal the tokens are not.
    labels: u32,
    /// Whether token types are stored.
    has_kinds: bool,
    /// The tokens of each document; empty: there is one document.
    documents: Box<[u32]>,
    /// The tokens at the start of each document that its embedding leaves out; empty: none.
    skipped: Box<[u32]>,
    /// The score of a record.
    score: Option<f32>,
    /// Whether the log-probabilities of two documents by a reference are stored.
    has_reference: bool,
    /// Whether the sequence gets its labels when masks are drawn.
    is_unmasked: bool,
    /// Whether the sequence has a label, or will have one.
    is_labelled: bool,
    /// Whether its first token has a label, which is scored if a text comes before.
    has_first_label: bool,
}

/// The error of the temporary file. It is not the fault of the data.
fn failed(error: io::Error) -> Error {
    let place = folder::temporary();
    let place = format_args!("{place} (tokenized data waits there; set TMPDIR to another folder)");
    Error::storage(place, error)
}

/// A spool that is being written.
pub(super) struct Spooling {
    file: BufWriter<File>,
    places: Vec<Place>,
    end: u64,
}

/// A spool that is complete.
pub(super) struct Spool {
    file: Mutex<File>,
    places: Vec<Place>,
}

impl Spooling {
    pub(super) fn new() -> Result<Spooling, Error> {
        let file = BufWriter::new(tempfile::tempfile().map_err(failed)?);
        Ok(Spooling { file, places: Vec::new(), end: 0 })
    }

    /// Appends a sequence of one document, or of those of a record.
    pub(super) fn push(&mut self, sequence: &Sequence, is_labelled: bool) -> Result<(), Error> {
        let Sequence { tokens, labels, kinds, documents, reference, score, skipped } = sequence;
        let is_equal = |(&label, &token): (&i32, &u32)| label == token as i32;
        let is_plain = labels.is_empty()
            || (labels.len() == tokens.len() && labels.iter().zip(tokens).all(is_equal));
        let stored = if is_plain { &[] } else { &labels[..] };
        let place = Place {
            at: self.end,
            tokens: tokens.len() as u32,
            labels: stored.len() as u32,
            has_kinds: !kinds.is_empty(),
            documents: documents.iter().map(|&tokens| tokens as u32).collect(),
            skipped: skipped.iter().map(|&tokens| tokens as u32).collect(),
            score: *score,
            has_reference: !reference.is_empty(),
            is_unmasked: labels.is_empty(),
            is_labelled,
            has_first_label: labels.first().is_some_and(|&label| label >= 0),
        };
        let mut write = || {
            for token in tokens {
                self.file.write_all(&token.to_le_bytes())?;
            }
            for label in stored {
                self.file.write_all(&label.to_le_bytes())?;
            }
            self.file.write_all(kinds)?;
            reference.iter().try_for_each(|log| self.file.write_all(&log.to_le_bytes()))
        };
        write().map_err(failed)?;
        self.end += place.bytes() as u64;
        self.places.push(place);
        Ok(())
    }

    pub(super) fn finish(self) -> Result<Spool, Error> {
        let file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        Ok(Spool { file: Mutex::new(file), places: self.places })
    }
}

impl Place {
    fn bytes(&self) -> usize {
        let kinds = usize::from(self.has_kinds);
        let labels = self.labels as usize * size_of::<i32>();
        let reference = if self.has_reference { 2 * size_of::<f64>() } else { 0 };
        self.tokens as usize * (size_of::<u32>() + kinds) + labels + reference
    }
}

impl Spool {
    /// The number of sequences.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The number of tokens of a sequence.
    pub(super) fn tokens(&self, index: usize) -> usize {
        self.places[index].tokens as usize
    }

    /// Whether any sequence gets its labels when masks are drawn.
    pub(super) fn has_unmasked(&self) -> bool {
        self.places.iter().any(|place| place.is_unmasked)
    }

    /// Whether each sequence has a label.
    pub(super) fn all_labelled(&self) -> bool {
        self.places.iter().all(|place| place.is_labelled)
    }

    /// Whether a sequence has a label.
    pub(super) fn is_labelled(&self, index: usize) -> bool {
        self.places[index].is_labelled
    }

    /// Whether the first token of a sequence has a label.
    pub(super) fn has_first_label(&self, index: usize) -> bool {
        self.places[index].has_first_label
    }

    /// Whether sequences bring the log-probabilities of their documents by a reference: all do, or
    /// none.
    pub(super) fn has_reference(&self) -> bool {
        self.places.iter().any(|place| place.has_reference)
    }

    /// Reads a sequence.
    pub(super) fn read(&self, index: usize) -> Result<Sequence, Error> {
        let place = &self.places[index];
        let mut bytes = vec![0; place.bytes()];
        {
            let mut file = self.file.lock().expect("nothing panics inside");
            let found = file.seek(SeekFrom::Start(place.at));
            found.and_then(|_| file.read_exact(&mut bytes)).map_err(failed)?;
        }
        let (tokens, rest) = bytes.split_at(place.tokens as usize * 4);
        let (labels, rest) = rest.split_at(place.labels as usize * size_of::<i32>());
        let kinds = if place.has_kinds { place.tokens as usize } else { 0 };
        let (kinds, reference) = rest.split_at(kinds);
        let fours = |bytes: &[u8]| {
            let (fours, _) = bytes.as_chunks::<4>();
            fours.iter().map(|&four| u32::from_le_bytes(four)).collect::<Vec<u32>>()
        };
        let tokens = fours(tokens);
        if place.is_unmasked {
            return Ok(Sequence::unmasked(tokens, kinds.to_vec()));
        }
        let documents = place.documents.iter().map(|&tokens| tokens as usize);
        let plain = Sequence {
            kinds: kinds.to_vec(),
            documents: documents.collect(),
            skipped: place.skipped.iter().map(|&tokens| tokens as usize).collect(),
            score: place.score,
            reference: reference.as_chunks().0.iter().map(|log| f64::from_le_bytes(*log)).collect(),
            ..Sequence::plain(tokens)
        };
        if place.labels == 0 {
            return Ok(plain);
        }
        let labels = fours(labels).into_iter().map(|label| label as i32).collect();
        Ok(Sequence { labels, ..plain })
    }
}
