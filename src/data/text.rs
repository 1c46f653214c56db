//! Text as bytes: a byte is a token, a sequence is a window of them.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::Path;

use super::Sequence;
use crate::error::Error;

/// Tokens there are.
const BYTES: usize = 256;

/// The project's own source and documentation, one file behind the other.
pub const CORPUS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/corpus.txt"));

/// What is read at any place.
trait Source: Read + Seek + Send {}
impl<T: Read + Seek + Send> Source for T {}

/// Windows of a text, one behind the other; what is left at its end is no window.
pub(super) struct Text {
    source: Box<dyn Source>,
    name: String,
    windows: u64,
    positions: usize,
}

impl Text {
    /// A file's.
    pub(super) fn open(path: &Path, vocabulary: usize, positions: usize) -> Result<Text, Error> {
        let name = path.display().to_string();
        let refuse = |error: io::Error| Error::refused(format_args!("data {name}: {error}"));
        let file = File::open(path).map_err(refuse)?;
        let about = file.metadata().map_err(refuse)?;
        if !about.is_file() {
            return Err(Error::refused(format_args!("data {name}: it is not a file")));
        }
        Text::new(Box::new(file), name, about.len(), vocabulary, positions)
    }

    /// The built-in corpus's.
    pub(super) fn built_in(vocabulary: usize, positions: usize) -> Result<Text, Error> {
        let (source, bytes) = (Box::new(Cursor::new(CORPUS)), CORPUS.len() as u64);
        Text::new(source, "built-in".into(), bytes, vocabulary, positions)
    }

    fn new(
        source: Box<dyn Source>,
        name: String,
        bytes: u64,
        vocabulary: usize,
        positions: usize,
    ) -> Result<Text, Error> {
        if vocabulary < BYTES {
            return Err(Error::refused(format_args!(
                "data {name}: text is read by bytes, the model knows {vocabulary} tokens: \
                 model.vocabulary must be at least {BYTES}"
            )));
        }
        let windows = bytes / positions as u64;
        if windows == 0 || positions < 2 {
            return Err(Error::refused(format_args!(
                "data {name}: {bytes} bytes are too short for one sequence of {positions} (of at \
                 least 2): give it more text, or set data.sequence_length"
            )));
        }
        Ok(Text { source, name, windows, positions })
    }

    pub(super) fn len(&self) -> u64 {
        self.windows
    }

    /// Takes all bytes of the text.
    pub(super) fn each_bytes(&mut self, take: impl FnMut(&[u8])) -> io::Result<()> {
        self.source.seek(SeekFrom::Start(0))?;
        super::each_bytes(&mut self.source, take)
    }

    pub(super) fn read(&mut self, window: u64) -> Result<Sequence, Error> {
        let mut bytes = vec![0; self.positions];
        let read = self
            .source
            .seek(SeekFrom::Start(window * self.positions as u64))
            .and_then(|_| self.source.read_exact(&mut bytes));
        read.map_err(|error| Error::failed(format_args!("data {}: {error}", self.name)))?;
        Ok(Sequence::plain(bytes.into_iter().map(u32::from).collect()))
    }
}
