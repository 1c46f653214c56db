//! Mutations that are the same each time: for tests, which have no coverage to guide them.

/// Numbers, brackets and words on which readers of text trip.
const WORDS: [&[u8]; 28] = [
    b"-1",
    b"0",
    b"1e309",
    b"18446744073709551616",
    b"9223372036854775807",
    b"4294967295",
    b"0.1",
    b"null",
    b"true",
    b"\"\"",
    b"{}",
    b"[]",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b"\\u0000",
    b"\xff",
    b"\n",
    b"\r\n\r\n",
    b": ",
    b",",
    b"{%",
    b"%}",
    b"{{",
    b"}}",
    b"\xe2\x96\x81",
];

/// A generator (xorshift) of mutants.
pub(crate) struct Mutator(u64);

impl Mutator {
    /// With a seed.
    pub(crate) fn new(seed: u64) -> Mutator {
        Mutator(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below another, or 0.
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % most.max(1)
    }

    /// A seed with one to four changes; `other` is another seed, for pieces of it.
    pub(crate) fn mutant(&mut self, seed: &[u8], other: &[u8]) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            let length = 1 + self.below(16);
            let end = (at + length).min(bytes.len());
            match self.below(8) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 if !bytes.is_empty() => bytes[at] = self.below(256) as u8,
                2 => drop(bytes.drain(at..end)),
                3 => bytes.truncate(at),
                4 => {
                    let piece = bytes[at..end].repeat(1 + self.below(200));
                    bytes.splice(at..at, piece);
                }
                5 => {
                    let from = self.below(other.len());
                    let piece = &other[from..other.len().min(from + 4 * length)];
                    bytes.splice(at..end, piece.iter().copied());
                }
                6 => self.change_number(&mut bytes, at),
                _ => {
                    let word = WORDS[self.below(WORDS.len())];
                    let end = if self.below(2) == 0 { at } else { end };
                    bytes.splice(at..end, word.iter().copied());
                }
            }
        }
        bytes
    }

    /// Writes another number over the first one from a place on.
    fn change_number(&mut self, bytes: &mut Vec<u8>, at: usize) {
        let is_digit = |byte: &u8| byte.is_ascii_digit();
        let Some(begin) = bytes[at..].iter().position(is_digit).map(|found| at + found) else {
            return;
        };
        let length = bytes[begin..].iter().take_while(|byte| is_digit(byte)).count();
        let word = WORDS[self.below(11)];
        bytes.splice(begin..begin + length, word.iter().copied());
    }
}
