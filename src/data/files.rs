//! Reads data files into a spool of sequences. Each file is read once, from beginning to end, and
//! tokenized by all cores.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::Path;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use sha2::{Digest, Sha256};

use super::reader::{DROPPED, NOTHING_LEARNT, Reader, SKIP_THEM};
use super::spool::{Spool, Spooling};
use super::tally::{Place, Tally};
use super::vocabulary::SpecialTokens;
use super::windows::{BadPiece, Piece, Windows};
use super::{CORPUS, Predicts, Sequence, listing, pairs, reference, scored, texts};
use crate::config::{BadRecords, DataConfig};
use crate::error::Error;
use crate::hf::hex;
use crate::lfs;

/// The longest line of a `.jsonl` file. A longer one can hardly be a record, and might not fit in
/// memory.
const LONGEST_LINE: u64 = 1 << 28;

/// The number of lines of a `.jsonl` file that the cores tokenize at a time.
pub(super) const LINES_AT_ONCE: usize = 256;

/// The number of pieces of a text that the cores tokenize at a time.
const PIECES_AT_ONCE: usize = 8;

/// The size of the pieces in which a text is tokenized. A piece continues to the end of its line.
const PIECE_BYTES: usize = 1 << 20;

/// Some editors begin a file with these bytes: a byte order mark in UTF-8.
pub(super) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The message about bytes that are no text.
pub(super) fn not_utf8(bytes: &[u8], error: std::str::Utf8Error) -> String {
    match bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        true => "it is UTF-16: save it as UTF-8".into(),
        false => format!("it is not UTF-8: {error}"),
    }
}

/// All sequences of a file, a folder or the built-in corpus.
pub(super) struct Opened {
    pub(super) spool: Spool,
    /// The first 8 bytes of the SHA-256 of all bytes that were read.
    pub(super) digest: String,
    /// Whether no file consists of records.
    pub(super) is_text: bool,
    /// The records that were left out.
    pub(super) skipped: Tally,
    /// The records that have no label and were not left out.
    pub(super) unlabelled: Tally,
    /// The records whose two answers are the same.
    pub(super) same: Tally,
    /// A sentence about the files of the folder that were left out.
    pub(super) left_out: Option<String>,
}

/// Reads a file, a folder or the built-in corpus.
///
/// # Errors
/// A file cannot be used (the error has file and line); or the temporary file cannot be written.
pub(super) fn open(name: &str, reader: &Reader) -> Result<Opened, Error> {
    let refuse = |what: &dyn std::fmt::Display| Error::bad_data(name, what);
    let spooling = Spooling::new()?;
    let pool = ThreadPoolBuilder::new().build().map_err(Error::no_thread)?;
    let mut opening = Opening {
        reader,
        pool,
        spooling,
        hasher: Sha256::new(),
        skipped: Tally::default(),
        unlabelled: Tally::default(),
        same: Tally::default(),
        brings_reference: None,
    };
    let mut is_text = true;
    let mut left_out = None;
    if name == DataConfig::BUILT_IN {
        opening.text(name, &mut &*CORPUS)?;
    } else {
        let found = listing::files(Path::new(name)).map_err(|error| refuse(&error))?;
        left_out = found.note(Path::new(name));
        for path in found.files {
            is_text &= !opening.file(&path)?;
        }
    }
    if is_text && reader.preference.is_some() {
        return Err(refuse(&pairs::NEEDED));
    }
    let Opening { spooling, hasher, skipped, unlabelled, same, .. } = opening;
    let spool = spooling.finish()?;
    if spool.len() == 0 {
        return Err(refuse(&match (is_text, skipped.count) {
            (true, _) => "it is too short: it has fewer than two tokens".into(),
            (false, 0) => "there is no sequence in it".to_string(),
            (false, count) => format!(
                "there is no sequence in it: data.bad_records or data.too_long left out all of its \
                 {count} records: {skipped}"
            ),
        }));
    }
    let digest = hex(&hasher.finalize()[..8]);
    Ok(Opened { spool, digest, is_text, skipped, unlabelled, same, left_out })
}

/// A source that is being read.
pub(super) struct Opening<'r> {
    pub(super) reader: &'r Reader,
    pool: ThreadPool,
    spooling: Spooling,
    pub(super) hasher: Sha256,
    skipped: Tally,
    unlabelled: Tally,
    same: Tally,
    /// Whether the sequences before bring a reference.
    brings_reference: Option<bool>,
}

impl Opening<'_> {
    /// Reads a file, and returns whether it consists of records.
    fn file(&mut self, path: &Path) -> Result<bool, Error> {
        let at = path.display().to_string();
        let refuse = |error| Error::unusable(format_args!("data {at}"), error);
        let mut file = BufReader::with_capacity(1 << 16, File::open(path).map_err(refuse)?);
        if lfs::is_pointer(file.fill_buf().map_err(refuse)?) {
            return Err(Error::bad_data(&at, lfs::INSTEAD));
        }
        let extension = listing::extension(path).unwrap_or_default();
        match &*extension {
            "jsonl" => self.lines(&at, &mut file)?,
            "json" => self.list(&at, &mut file)?,
            "csv" => self.table(&at, &mut file, b',')?,
            "tsv" => self.table(&at, &mut file, b'\t')?,
            "parquet" => {
                file.rewind().map_err(refuse)?;
                self.parquet(&at, file.into_inner())?;
            }
            "bin" => self.token_ids(&at, &mut file)?,
            _ => self.text(&at, &mut file)?,
        }
        Ok(listing::has_records(&extension))
    }

    /// Appends the sequences of a record, or of a text, to the spool. `name` is the file. If
    /// records may be left out, sequences without a label are.
    fn push(&mut self, name: &str, place: Place, sequences: &[Sequence]) -> Result<(), Error> {
        let predicts = self.reader.predicts;
        // A sequence without labels gets some with its masks, if one of its tokens is not special.
        let tokenizer = self.reader.vocabulary.tokenizer();
        let is_text = |token: &u32| tokenizer.is_some_and(|words| !words.is_special(*token));
        let is_labelled = |sequence: &Sequence| match sequence.labels.is_empty() {
            true => sequence.tokens.iter().any(is_text),
            false => sequence.labelled(predicts) > 0,
        };
        let labelled: Vec<bool> = sequences.iter().map(is_labelled).collect();
        let skips = self.reader.bad_records == BadRecords::Skip;
        if !sequences.is_empty() && !labelled.contains(&true) {
            let tally = if skips { &mut self.skipped } else { &mut self.unlabelled };
            tally.add(name, place, NOTHING_LEARNT);
        }
        for (sequence, is_labelled) in sequences.iter().zip(labelled) {
            let brings = !sequence.reference.is_empty();
            if *self.brings_reference.get_or_insert(brings) != brings {
                return Err(place.error(name, &reference::IN_SOME));
            }
            if self.reader.compares_answers() && pairs::are_same(sequence) {
                self.same.add(name, place, "both answers are the same");
            }
            if is_labelled || !skips {
                self.spooling.push(sequence, is_labelled)?;
            }
        }
        Ok(())
    }

    /// Reads records with all cores, and appends their sequences in order. A record that cannot be
    /// read is refused, or left out and counted.
    pub(super) fn read_all<R: Send>(
        &mut self,
        name: &str,
        records: Vec<(Place, R)>,
        read: impl Fn(R) -> Result<Vec<Sequence>, String> + Sync + Send,
    ) -> Result<(), Error> {
        let read = |(place, record)| (place, read(record));
        let read: Vec<(Place, Result<Vec<Sequence>, String>)> =
            self.pool.install(|| records.into_par_iter().map(read).collect());
        for (place, sequences) in read {
            match (sequences, self.reader.bad_records) {
                (Ok(sequences), _) => self.push(name, place, &sequences)?,
                (Err(problem), _) if problem.ends_with(DROPPED) => {
                    self.skipped.add(name, place, problem);
                }
                (Err(problem), BadRecords::Error) if problem == NOTHING_LEARNT => {
                    let problem = format_args!("{problem}: {SKIP_THEM}");
                    return Err(place.error(name, &problem));
                }
                (Err(problem), BadRecords::Error) => return Err(place.error(name, &problem)),
                (Err(problem), BadRecords::Skip) => self.skipped.add(name, place, problem),
            }
        }
        Ok(())
    }

    /// Reads the lines of a `.jsonl` file.
    pub(super) fn lines(&mut self, name: &str, file: &mut impl BufRead) -> Result<(), Error> {
        let mut number = 0;
        let mut at_end = false;
        // An empty line counts as a bad record only if a line follows it: it may end the file.
        let mut blank = Vec::new();
        while !at_end {
            let mut lines: Vec<(Place, Vec<u8>)> = Vec::new();
            let mut bytes = 0;
            while lines.len() < LINES_AT_ONCE && bytes < PIECES_AT_ONCE * PIECE_BYTES {
                let mut line = Vec::new();
                number += 1;
                let place = Place::of_line(number);
                let read = file.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line);
                match read.map_err(|error| place.error(name, &error))? as u64 {
                    0 => {
                        at_end = true;
                        break;
                    }
                    LONGEST_LINE => {
                        let what = format_args!("it is longer than {LONGEST_LINE} bytes");
                        return Err(place.error(name, &what));
                    }
                    _ => {}
                }
                self.hasher.update(&line);
                bytes += line.len();
                if number == 1 && line.starts_with(BYTE_ORDER_MARK) {
                    line.drain(..BYTE_ORDER_MARK.len());
                }
                if line.trim_ascii().is_empty() {
                    blank.push((place, Vec::new()));
                } else {
                    lines.append(&mut blank);
                    lines.push((place, line));
                }
            }
            let reader = self.reader;
            self.read_all(name, lines, |line| {
                let text = std::str::from_utf8(&line).map_err(|error| not_utf8(&line, error))?;
                reader.read(text.trim())
            })?;
        }
        Ok(())
    }

    /// Reads a text, and cuts its tokens into consecutive sequences.
    fn text(&mut self, name: &str, file: &mut impl BufRead) -> Result<(), Error> {
        let refuse = |what: &dyn std::fmt::Display| Error::bad_data(name, what);
        let reader = self.reader;
        let needs = match reader.predicts {
            _ if reader.scored.is_some() => return Err(refuse(&scored::NEEDED)),
            Predicts::Class | Predicts::Value => Some("text and label"),
            Predicts::LabelSet => Some("text and labels"),
            Predicts::TokenClass => Some("tokens and tags"),
            Predicts::Embedding => return Err(refuse(&texts::NEEDED)),
            Predicts::Next | Predicts::Own => None,
        };
        if let Some(needs) = needs {
            return Err(refuse(&format_args!(
                "text files have no labels, and this model has classes: give a .jsonl file with \
                 {needs}"
            )));
        }
        let special_tokens = reader.vocabulary.special_tokens().map_err(|why| refuse(&why))?;
        let mut windows = Windows::new(reader, special_tokens).map_err(|why| refuse(&why))?;
        let mut at_end = false;
        let mut at = 0;
        let mut line = 1;
        while !at_end {
            let mut pieces = Vec::new();
            while pieces.len() < PIECES_AT_ONCE && !at_end {
                let mut bytes = Vec::new();
                let read = file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut bytes);
                read.and_then(|_| file.read_until(b'\n', &mut bytes)).map_err(|e| refuse(&e))?;
                at_end = bytes.is_empty();
                self.hasher.update(&bytes);
                let piece = Piece { at, line, bytes };
                at += piece.bytes.len();
                line += piece.line_ends();
                pieces.push(piece);
            }
            let encode = |piece: &Piece| piece.encode(reader);
            let encoded: Vec<Result<Vec<u32>, BadPiece>> =
                self.pool.install(|| pieces.par_iter().map(encode).collect());
            for tokens in encoded {
                let tokens = tokens.map_err(|bad| Error::BadData {
                    file: name.into(),
                    line: bad.line,
                    problem: bad.problem,
                })?;
                self.push_windows(name, &windows.take(&tokens))?;
            }
        }
        self.push_windows(name, &windows.finish())
    }

    /// Appends sequences that are cut from a text.
    fn push_windows(&mut self, name: &str, windows: &[Sequence]) -> Result<(), Error> {
        let each = windows.chunks(1);
        each.into_iter().try_for_each(|one| self.push(name, Place::default(), one))
    }

    /// Reads a `.bin` file of 16-bit little-endian token ids, and cuts them into consecutive
    /// sequences.
    fn token_ids(&mut self, name: &str, file: &mut impl Read) -> Result<(), Error> {
        let refuse = |what: &dyn std::fmt::Display| Error::bad_data(name, what);
        if self.reader.predicts != Predicts::Next {
            return Err(refuse(&"a .bin file is only for models that predict the next token"));
        }
        let mut windows =
            Windows::new(self.reader, SpecialTokens::default()).map_err(|what| refuse(&what))?;
        windows.end_of_text.clear();
        loop {
            let mut bytes = Vec::new();
            let read = file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut bytes);
            read.map_err(|error| refuse(&error))?;
            if bytes.is_empty() {
                break;
            }
            self.hasher.update(&bytes);
            let (pairs, rest) = bytes.as_chunks::<2>();
            if !rest.is_empty() {
                return Err(refuse(&"it has an odd number of bytes, and a token is two bytes"));
            }
            let tokens: Vec<u32> =
                pairs.iter().map(|&pair| u32::from(u16::from_le_bytes(pair))).collect();
            let known = self.reader.tokens;
            if let Some(token) = tokens.iter().find(|token| **token as usize >= known) {
                let what = format_args!("token {token} is outside the vocabulary of {known}");
                return Err(refuse(&what));
            }
            self.push_windows(name, &windows.take(&tokens))?;
        }
        self.push_windows(name, &windows.finish())
    }
}
