//! Reads data files into a spool of sequences. Each file is read once, from beginning to end, and
//! tokenized by all cores.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use sha2::{Digest, Sha256};

use super::reader::Reader;
use super::spool::{Spool, Spooling};
use super::vocabulary::{SpecialTokens, Vocabulary};
use super::{CORPUS, Predicts, Sequence};
use crate::config::DataConfig;
use crate::error::Error;
use crate::hf::hex;

/// The longest line of a `.jsonl` file. A longer one can hardly be a record, and might not fit in
/// memory.
const LONGEST_LINE: u64 = 1 << 28;

/// The number of lines of a `.jsonl` file that the cores tokenize at a time.
pub(super) const LINES_AT_ONCE: usize = 256;

/// The number of pieces of a text that the cores tokenize at a time.
const PIECES_AT_ONCE: usize = 8;

/// The size of the pieces in which a text is tokenized. A piece continues to the end of its line.
const PIECE_BYTES: usize = 1 << 20;

/// File name extensions of data.
const EXTENSIONS: [&str; 8] = ["txt", "md", "jsonl", "json", "csv", "tsv", "parquet", "bin"];

/// The extensions of files that consist of records. All others are one stream of tokens.
const OF_RECORDS: [&str; 5] = ["jsonl", "json", "csv", "tsv", "parquet"];

/// All sequences of a file, a folder or the built-in corpus.
pub(super) struct Opened {
    pub(super) spool: Spool,
    /// The first 8 bytes of the SHA-256 of all bytes that were read.
    pub(super) digest: String,
    /// Whether no file consists of records.
    pub(super) is_text: bool,
}

/// Reads a file, a folder or the built-in corpus.
///
/// # Errors
/// A file cannot be used (the error has file and line); or the temporary file cannot be written.
pub(super) fn open(name: &str, reader: &Reader) -> Result<Opened, Error> {
    let refuse = |what: &dyn std::fmt::Display| Error::bad_data(name, what);
    let spooling = Spooling::new().map_err(|error| {
        let place = "cannot make a temporary file for the data (set TMPDIR to choose its folder)";
        Error::storage(place, error)
    })?;
    let pool = ThreadPoolBuilder::new().build().map_err(Error::system)?;
    let mut opening = Opening { reader, pool, spooling, hasher: Sha256::new() };
    let mut is_text = true;
    if name == DataConfig::BUILT_IN {
        opening.text(name, &mut &*CORPUS)?;
    } else {
        for path in files(Path::new(name)).map_err(|error| refuse(&error))? {
            let at = path.display().to_string();
            let refuse = |error| Error::unusable(format_args!("data {at}"), error);
            let mut file = BufReader::with_capacity(1 << 16, File::open(&path).map_err(refuse)?);
            let extension = extension(&path).unwrap_or_default();
            is_text &= !OF_RECORDS.contains(&extension);
            match extension {
                "jsonl" => opening.lines(&at, &mut file)?,
                "json" => opening.list(&at, &mut file)?,
                "csv" => opening.table(&at, &mut file, b',')?,
                "tsv" => opening.table(&at, &mut file, b'\t')?,
                "parquet" => opening.parquet(&at, file.into_inner())?,
                "bin" => opening.token_ids(&at, &mut file)?,
                _ => opening.text(&at, &mut file)?,
            }
        }
    }
    let Opening { spooling, hasher, .. } = opening;
    let spool = spooling.finish().map_err(|error| refuse(&error))?;
    if spool.len() == 0 {
        return Err(refuse(&if is_text {
            "it is too short: it has fewer than two tokens"
        } else {
            "there is no sequence in it"
        }));
    }
    Ok(Opened { spool, digest: hex(&hasher.finalize()[..8]), is_text })
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|extension| extension.to_str())
}

/// Whether the name of a file has an extension of data.
fn is_data(path: &Path) -> bool {
    extension(path).is_some_and(|known| EXTENSIONS.contains(&known))
}

/// The data files of a path: the file itself, or all data files below the folder.
fn files(path: &Path) -> Result<Vec<PathBuf>, String> {
    if path.is_dir() {
        let mut found = Vec::new();
        add_files(path, &mut found).map_err(|error| error.to_string())?;
        if found.is_empty() {
            return Err("there is no .txt, .md, .jsonl, .json, .csv, .tsv or .bin file in this \
                        folder"
                .into());
        }
        return Ok(found);
    }
    if !is_data(path) {
        return Err(format!(
            "it is not a known kind of data: give a .{} file, a folder of them, \"random\" or \
             \"{}\"",
            EXTENSIONS.join(", ."),
            DataConfig::BUILT_IN
        ));
    }
    if !fs::metadata(path).map_err(|error| error.to_string())?.is_file() {
        return Err("it is neither a file nor a folder".into());
    }
    Ok(vec![path.into()])
}

/// Adds the data files below a folder, in the order of their names. Hidden files and linked folders
/// are left out.
fn add_files(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut entries = entries.collect::<io::Result<Vec<PathBuf>>>()?;
    entries.sort();
    for entry in entries {
        let about = fs::symlink_metadata(&entry)?;
        let name = entry.file_name().unwrap_or_default();
        if name.to_string_lossy().starts_with('.') {
            continue;
        }
        if about.is_dir() {
            add_files(&entry, found)?;
        } else if entry.is_file() && is_data(&entry) {
            found.push(entry);
        }
    }
    Ok(())
}

/// A source that is being read.
pub(super) struct Opening<'r> {
    pub(super) reader: &'r Reader,
    pool: ThreadPool,
    spooling: Spooling,
    pub(super) hasher: Sha256,
}

impl Opening<'_> {
    /// Appends a sequence to the spool. `name` is its file.
    pub(super) fn push(&mut self, name: &str, sequence: &Sequence) -> Result<(), Error> {
        let predicts = self.reader.predicts;
        // A sequence without labels gets some with its masks, if one of its tokens is not special.
        let tokenizer = self.reader.vocabulary.tokenizer();
        let is_text = |token: &u32| tokenizer.is_some_and(|words| !words.is_special(*token));
        let is_labelled = match sequence.labels.is_empty() {
            true => sequence.tokens.iter().any(is_text),
            false => sequence.labelled(predicts) > 0,
        };
        let pushed = self.spooling.push(sequence, is_labelled);
        pushed.map_err(|error| Error::storage(format_args!("data {name}"), error))
    }

    /// Reads records with all cores, and appends their sequences in order.
    pub(super) fn read_all<R: Send>(
        &mut self,
        name: &str,
        records: Vec<R>,
        read: impl Fn(R) -> Result<Vec<Sequence>, Error> + Sync + Send,
    ) -> Result<(), Error> {
        let read: Vec<Result<Vec<Sequence>, Error>> =
            self.pool.install(|| records.into_par_iter().map(read).collect());
        for sequences in read {
            sequences?.iter().try_for_each(|one| self.push(name, one))?;
        }
        Ok(())
    }

    /// Reads the lines of a `.jsonl` file.
    pub(super) fn lines(&mut self, name: &str, file: &mut impl BufRead) -> Result<(), Error> {
        let refuse = |number: u64, what: &dyn std::fmt::Display| Error::BadData {
            file: name.into(),
            line: Some(number),
            problem: what.to_string(),
        };
        let mut number = 0;
        let mut at_end = false;
        // An empty line is refused only if a line follows it: it may end the file.
        let mut blank = None;
        while !at_end {
            let mut lines: Vec<(u64, Vec<u8>)> = Vec::new();
            let mut bytes = 0;
            while lines.len() < LINES_AT_ONCE && bytes < PIECES_AT_ONCE * PIECE_BYTES {
                let mut line = Vec::new();
                number += 1;
                let read = file.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line);
                match read.map_err(|error| refuse(number, &error))? as u64 {
                    0 => {
                        at_end = true;
                        break;
                    }
                    LONGEST_LINE => {
                        let what = format_args!("it is longer than {LONGEST_LINE} bytes");
                        return Err(refuse(number, &what));
                    }
                    _ => {}
                }
                self.hasher.update(&line);
                bytes += line.len();
                // Some editors begin a file with a byte order mark.
                if number == 1 && line.starts_with("\u{feff}".as_bytes()) {
                    line.drain(..3);
                }
                if line.trim_ascii().is_empty() {
                    blank = blank.or(Some(number));
                } else if let Some(blank) = blank {
                    return Err(refuse(blank, &"it is empty: each line must be a JSON object"));
                } else {
                    lines.push((number, line));
                }
            }
            let reader = self.reader;
            self.read_all(name, lines, |(number, line)| {
                let line = std::str::from_utf8(&line)
                    .map_err(|error| refuse(number, &format_args!("it is not UTF-8: {error}")))?;
                reader.read(line.trim()).map_err(|what| refuse(number, &what))
            })?;
        }
        Ok(())
    }

    /// Reads a text, and cuts its tokens into consecutive sequences.
    fn text(&mut self, name: &str, file: &mut impl BufRead) -> Result<(), Error> {
        let refuse = |what: &dyn std::fmt::Display| Error::bad_data(name, what);
        let reader = self.reader;
        let needs = match reader.predicts {
            Predicts::Class | Predicts::Value => Some("text and label"),
            Predicts::LabelSet => Some("text and labels"),
            Predicts::TokenClass => Some("tokens and tags"),
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
        let mut read_bytes = 0;
        while !at_end {
            let mut pieces = Vec::new();
            while pieces.len() < PIECES_AT_ONCE && !at_end {
                let mut piece = Vec::new();
                let read = file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece);
                read.and_then(|_| file.read_until(b'\n', &mut piece)).map_err(|e| refuse(&e))?;
                at_end = piece.is_empty();
                self.hasher.update(&piece);
                let at = read_bytes;
                read_bytes += piece.len();
                pieces.push((at, piece));
            }
            let encode = |(at, piece): &(usize, Vec<u8>)| encode_piece(reader, *at, piece);
            let encoded: Vec<Result<Vec<u32>, String>> =
                self.pool.install(|| pieces.par_iter().map(encode).collect());
            for tokens in encoded {
                let tokens = tokens.map_err(|what| refuse(&what))?;
                windows.take(&tokens).iter().try_for_each(|one| self.push(name, one))?;
            }
        }
        windows.finish().iter().try_for_each(|one| self.push(name, one))
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
            windows.take(&tokens).iter().try_for_each(|one| self.push(name, one))?;
        }
        windows.finish().iter().try_for_each(|one| self.push(name, one))
    }
}

/// Tokenizes a piece of a text, which begins at byte `at` of its file.
fn encode_piece(reader: &Reader, at: usize, piece: &[u8]) -> Result<Vec<u32>, String> {
    match &reader.vocabulary {
        Vocabulary::Bytes => Ok(piece.iter().map(|&byte| u32::from(byte)).collect()),
        words => {
            let text = std::str::from_utf8(piece)
                .map_err(|error| format!("it is not UTF-8 at byte {}", at + error.valid_up_to()))?;
            Ok(words.encode(text, None, false)?.tokens)
        }
    }
}

/// Cuts a stream of tokens into sequences.
///
/// For a causal model the stream is one long text, with special tokens around the whole. For a
/// masked language model each sequence is a text, with special tokens around each.
struct Windows {
    /// Tokens that do not fill a sequence yet.
    waiting: Vec<u32>,
    /// The number of tokens of text in a sequence.
    room: usize,
    around_each: SpecialTokens,
    /// The special tokens after the whole text.
    end_of_text: Vec<u32>,
    is_masked: bool,
}

impl Windows {
    /// `special_tokens` are those that the tokenizer puts around a text.
    fn new(reader: &Reader, special_tokens: SpecialTokens) -> Result<Windows, String> {
        let positions = reader.positions;
        let SpecialTokens { before, after } = special_tokens;
        if reader.predicts == Predicts::Own {
            let room = positions.saturating_sub(before.len() + after.len());
            if room == 0 {
                return Err(format!("data.sequence_length of {positions} leaves no room for text"));
            }
            return Ok(Windows {
                waiting: Vec::new(),
                room,
                around_each: SpecialTokens { before, after },
                end_of_text: Vec::new(),
                is_masked: true,
            });
        }
        if positions < 2 {
            return Err(
                "data.sequence_length must be at least 2, because each token predicts the next one"
                    .into(),
            );
        }
        let mut end_of_text = after;
        if reader.end_of_text {
            reader.push_end(&mut end_of_text)?;
        }
        Ok(Windows {
            waiting: before,
            room: positions,
            around_each: Default::default(),
            end_of_text,
            is_masked: false,
        })
    }

    fn window(&self, tokens: &[u32]) -> Sequence {
        let SpecialTokens { before, after } = &self.around_each;
        let tokens = [before, tokens, after].concat();
        if self.is_masked {
            Sequence::unmasked(tokens, Vec::new())
        } else {
            Sequence::plain(tokens)
        }
    }

    /// Takes more tokens, and returns the sequences that they fill.
    fn take(&mut self, tokens: &[u32]) -> Vec<Sequence> {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.extend(tokens);
        let full = waiting.chunks_exact(self.room);
        self.waiting = full.remainder().to_vec();
        full.map(|window| self.window(window)).collect()
    }

    /// Ends the text, and returns the remaining sequences. The last may be shorter.
    fn finish(mut self) -> Vec<Sequence> {
        let end_of_text = std::mem::take(&mut self.end_of_text);
        let mut left = self.take(&end_of_text);
        // A causal model learns nothing from a single token.
        let least = if self.is_masked { 1 } else { 2 };
        if self.waiting.len() >= least {
            left.push(self.window(&self.waiting));
        }
        left
    }
}
