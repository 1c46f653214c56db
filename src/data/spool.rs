//! Sequences in an unnamed file, by index: data is read and made tokens once, before anything
//! starts, and may be larger than memory. What stays in memory is where each begins.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::sync::Mutex;

use super::Sequence;

/// A sequence in the file.
#[derive(Clone, Copy)]
struct Place {
    at: u64,
    tokens: u32,
    /// Whether labels of its own, and kinds, stand behind the tokens.
    has: [bool; 2],
    /// True when it is labelled by masking it.
    is_unmasked: bool,
    is_labelled: bool,
}

/// Sequences while they come.
pub(super) struct Spooling {
    file: BufWriter<File>,
    places: Vec<Place>,
    end: u64,
}

/// All of them.
pub(super) struct Spool {
    file: Mutex<File>,
    places: Vec<Place>,
}

impl Spooling {
    pub(super) fn new() -> io::Result<Spooling> {
        Ok(Spooling { file: BufWriter::new(tempfile::tempfile()?), places: Vec::new(), end: 0 })
    }

    /// Takes one, which has one document.
    pub(super) fn push(&mut self, sequence: &Sequence, is_labelled: bool) -> io::Result<()> {
        let Sequence { tokens, labels, kinds, .. } = sequence;
        let is_plain = labels.iter().zip(tokens).all(|(&label, &token)| label == token as i32);
        let (has, is_unmasked) = ([!is_plain, !kinds.is_empty()], labels.is_empty());
        let tokens_of = tokens.len() as u32;
        let place = Place { at: self.end, tokens: tokens_of, has, is_unmasked, is_labelled };
        for token in tokens {
            self.file.write_all(&token.to_le_bytes())?;
        }
        for label in labels.iter().filter(|_| has[0]) {
            self.file.write_all(&label.to_le_bytes())?;
        }
        self.file.write_all(kinds)?;
        self.end += place.bytes() as u64;
        self.places.push(place);
        Ok(())
    }

    pub(super) fn finish(self) -> io::Result<Spool> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(Spool { file: Mutex::new(file), places: self.places })
    }
}

impl Place {
    fn bytes(&self) -> usize {
        let each = 4 + if self.has[0] { 4 } else { 0 } + usize::from(self.has[1]);
        self.tokens as usize * each
    }
}

impl Spool {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Tokens of one.
    pub(super) fn tokens(&self, index: usize) -> usize {
        self.places[index].tokens as usize
    }

    /// True when one is to be masked.
    pub(super) fn has_unmasked(&self) -> bool {
        self.places.iter().any(|place| place.is_unmasked)
    }

    pub(super) fn all_labelled(&self) -> bool {
        self.places.iter().all(|place| place.is_labelled)
    }

    pub(super) fn is_labelled(&self, index: usize) -> bool {
        self.places[index].is_labelled
    }

    pub(super) fn read(&self, index: usize) -> io::Result<Sequence> {
        let place = self.places[index];
        let mut bytes = vec![0; place.bytes()];
        {
            let mut file = self.file.lock().expect("nothing panics inside");
            file.seek(SeekFrom::Start(place.at))?;
            file.read_exact(&mut bytes)?;
        }
        let (tokens, rest) = bytes.split_at(place.tokens as usize * 4);
        let (labels, kinds) = rest.split_at(if place.has[0] { tokens.len() } else { 0 });
        let fours = |bytes: &[u8]| {
            let (fours, _) = bytes.as_chunks::<4>();
            fours.iter().map(|&four| u32::from_le_bytes(four)).collect::<Vec<u32>>()
        };
        let tokens = fours(tokens);
        if place.is_unmasked {
            return Ok(Sequence::unmasked(tokens, kinds.to_vec()));
        }
        if !place.has[0] {
            return Ok(Sequence { kinds: kinds.to_vec(), ..Sequence::plain(tokens) });
        }
        let labels = fours(labels).into_iter().map(|label| label as i32).collect();
        Ok(Sequence { tokens, labels, kinds: kinds.to_vec(), documents: Vec::new() })
    }
}
