//! Dropout, and sums on the residual stream.

use super::driver::{Address, Argument, Place};
use super::kernels::On;
use super::launches::{NULL, dropout_words, int, wide};
use crate::kernels::{ApplyDropout, Dropout, MaskRows, Residual};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn residual(&self, &Residual { y, a, x, dropout }: &Residual<'_>) {
        self.add_dropout(y, self.at(a), x, dropout);
    }

    pub(super) fn dropout(&self, &ApplyDropout { y, x, dropout }: &ApplyDropout<'_>) {
        if dropout.is_some() {
            self.add_dropout(y, Place::NULL, x, dropout);
        } else if y != x {
            self.copy(y, x);
        }
    }

    /// The first rows of the sequences of a mask, and the number of sequences.
    pub(super) fn mask_sequences(
        &self,
        dropout: Option<Dropout<'_>>,
        rows: usize,
    ) -> (Address, usize) {
        match dropout.map(|dropout| dropout.rows) {
            Some(MaskRows::Positions(batch)) => (self.metadata.starts(&batch), batch.sequences()),
            Some(MaskRows::Sequences) => (NULL, rows),
            None => (NULL, 1),
        }
    }

    /// y = a + dropout(x), without `a` where that is null.
    fn add_dropout(&self, y: View, a: Place, x: View, dropout: Option<Dropout<'_>>) {
        let rows = y.rows;
        let channels = y.columns;
        let (starts, sequences) = self.mask_sequences(dropout, rows);
        let [b, r, c] = [sequences, rows, channels].map(int);
        let wide = wide(y.dtype);
        let arguments: [&dyn Argument; 8] =
            [&self.at(y), &self.at(x), &a, &starts, &b, &r, &c, &dropout_words(dropout)];
        self.queue.wide_columns("drop", [rows, 1], channels, wide, &arguments);
    }
}
