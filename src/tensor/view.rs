//! The place of a tensor in a device's memory, its shape and its dtype.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// Brain floats: the upper half of an f32.
    Bf16,
    /// IEEE half floats: 5 bits of exponent, 10 of mantissa.
    F16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }

    /// Floats whose memory `len` elements take, rounded up.
    pub fn floats(self, len: usize) -> usize {
        (len * self.size()).div_ceil(Dtype::F32.size())
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        })
    }
}

/// A matrix in a device's memory: rows of columns, without gaps. A vector is one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The first element, counted in elements of its own dtype from the begin of the memory.
    pub at: usize,
    /// Rows. Tensors of more dimensions have all but the last here: (B, T, C) has B · T rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// The type of its elements.
    pub dtype: Dtype,
}

impl View {
    /// A vector of floats.
    pub fn floats(at: usize, len: usize) -> View {
        View { at, rows: 1, columns: len, dtype: Dtype::F32 }
    }

    /// The number of rows, and that of columns.
    pub fn shape(self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// The number of its elements.
    pub fn len(self) -> usize {
        self.rows * self.columns
    }

    /// True when it has no element.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The first (`rows`, `columns`) elements of a dtype in the memory of these floats.
    ///
    /// # Panics
    /// The elements do not fit, or this is no view of floats.
    pub fn hold(self, rows: usize, columns: usize, dtype: Dtype) -> View {
        let fits = self.dtype == Dtype::F32 && dtype.floats(rows * columns) <= self.len();
        assert!(fits, "({rows}, {columns}) of {dtype} do not fit in {self}");
        View { at: self.at * (Dtype::F32.size() / dtype.size()), rows, columns, dtype }
    }

    /// This view in rows of another number of columns.
    ///
    /// # Panics
    /// The number of elements is no multiple of `columns`.
    pub fn with_columns(self, columns: usize) -> View {
        let rows = self.len().checked_div(columns).unwrap_or(0);
        assert_eq!(rows * columns, self.len(), "{self} has no whole rows of {columns}");
        View { rows, columns, ..self }
    }

    /// A vector of some of its elements.
    ///
    /// # Panics
    /// The range lies outside of the view.
    pub fn part(self, range: Range<usize>) -> View {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {self}");
        let at = self.at + range.start;
        let columns = range.end - range.start;
        View { at, rows: 1, columns, ..self }
    }

    /// Some of its rows.
    ///
    /// # Panics
    /// The range lies outside of the view.
    pub fn row_range(self, range: Range<usize>) -> View {
        let rows = range.end - range.start;
        let columns = self.columns;
        let elements = self.part(range.start * columns..range.end * columns);
        View { rows, columns, ..elements }
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {}) of {} at {}", self.rows, self.columns, self.dtype, self.at)
    }
}
