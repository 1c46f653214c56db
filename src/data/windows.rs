//! Cuts a text into sequences: the tokens of its pieces are one stream, which windows cut.

use super::reader::Reader;
use super::vocabulary::{SpecialTokens, Vocabulary};
use super::{Predicts, Sequence};

/// A piece of a text file.
pub(super) struct Piece {
    /// The byte of the file at which the piece begins.
    pub(super) at: usize,
    /// The line of the file at which the piece begins, from 1.
    pub(super) line: u64,
    pub(super) bytes: Vec<u8>,
}

/// The problem of a piece, with the line of the file if it is known.
pub(super) struct BadPiece {
    pub(super) line: Option<u64>,
    pub(super) problem: String,
}

impl From<String> for BadPiece {
    fn from(problem: String) -> BadPiece {
        BadPiece { line: None, problem }
    }
}

impl Piece {
    /// The number of line ends in the piece.
    pub(super) fn line_ends(&self) -> u64 {
        self.bytes.iter().filter(|&&byte| byte == b'\n').count() as u64
    }

    /// The piece as tokens.
    pub(super) fn encode(&self, reader: &Reader) -> Result<Vec<u32>, BadPiece> {
        let words = match &reader.vocabulary {
            Vocabulary::Bytes => {
                return Ok(self.bytes.iter().map(|&byte| u32::from(byte)).collect());
            }
            words => words,
        };
        let text = std::str::from_utf8(&self.bytes).map_err(|error| {
            format!("it is not UTF-8 at byte {}", self.at + error.valid_up_to())
        })?;
        let encoded = words.encode(text, None, false)?;
        match reader.check_known(&encoded.tokens) {
            Ok(()) => Ok(encoded.tokens),
            Err(problem) => {
                let is_unknown = |token: &u32| *token as usize >= reader.tokens;
                let at = encoded.tokens.iter().position(is_unknown).unwrap_or(0);
                let before = &self.bytes[..encoded.spans[at].0];
                let lines = before.iter().filter(|&&byte| byte == b'\n').count() as u64;
                Err(BadPiece { line: Some(self.line + lines), problem })
            }
        }
    }
}

/// Cuts a stream of tokens into sequences.
///
/// For a causal model the stream is one long text, with special tokens around the whole. For a
/// masked language model each sequence is a text, with special tokens around each.
pub(super) struct Windows {
    /// Tokens that do not fill a sequence yet.
    waiting: Vec<u32>,
    /// The number of tokens of text in a sequence.
    room: usize,
    around_each: SpecialTokens,
    /// The special tokens after the whole text.
    pub(super) end_of_text: Vec<u32>,
    is_masked: bool,
}

impl Windows {
    /// `special_tokens` are those that the tokenizer puts around a text.
    pub(super) fn new(reader: &Reader, special_tokens: SpecialTokens) -> Result<Windows, String> {
        let positions = reader.positions;
        let SpecialTokens { before, after } = special_tokens;
        reader.check_known(&before)?;
        reader.check_known(&after)?;
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
            reader.check_known(&end_of_text)?;
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
    pub(super) fn take(&mut self, tokens: &[u32]) -> Vec<Sequence> {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.extend(tokens);
        let full = waiting.chunks_exact(self.room);
        self.waiting = full.remainder().to_vec();
        full.map(|window| self.window(window)).collect()
    }

    /// Ends the text, and returns the remaining sequences. The last may be shorter.
    pub(super) fn finish(mut self) -> Vec<Sequence> {
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
