//! Where numbers are in a device's memory, and what they are made of.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What numbers are made of.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// Brain floats: the upper half of an f32.
    Bf16,
}

impl Dtype {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }

    /// Floats that so many numbers take the place of.
    pub fn floats(self, len: usize) -> usize {
        (len * self.size()).div_ceil(Dtype::F32.size())
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        })
    }
}

/// A range of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Its first element, counted from the memory's begin in elements as its own.
    pub at: usize,
    /// Its elements.
    pub len: usize,
    /// What they are.
    pub of: Dtype,
}

impl View {
    /// Floats.
    pub fn floats(at: usize, len: usize) -> View {
        View { at, len, of: Dtype::F32 }
    }

    /// The first `len` numbers of these in the place that begins with its first float.
    ///
    /// # Panics
    /// It has not that many, or is of no floats.
    pub fn place(self, len: usize, of: Dtype) -> View {
        assert!(self.of == Dtype::F32 && of.floats(len) <= self.len, "{len} {of:?} in {self:?}");
        View { at: self.at * (Dtype::F32.size() / of.size()), len, of }
    }

    /// A part of it.
    ///
    /// # Panics
    /// The part lies outside.
    pub fn part(self, range: Range<usize>) -> View {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {self:?}");
        View { at: self.at + range.start, len: range.end - range.start, ..self }
    }
}
