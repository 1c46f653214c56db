//! Dropout, and sums on the residual stream.

use super::driver::{Address, Place};
use super::kernels::{On, arguments};
use super::launches::{NEIGHBOURS, NULL, dropout_words, long, wide};
use crate::kernels::{ApplyDropout, Dropout, MaskRows, Residual, Scale};
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

    pub(super) fn scale(&self, &Scale { y, x, factor, by }: &Scale) {
        let length = x.len();
        let arguments = arguments!(self; y, x, long(length), factor, by);
        self.queue.each("scale", length, NEIGHBOURS, arguments);
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
        let [rows, channels] = y.shape();
        let (starts, b) = self.mask_sequences(dropout, rows);
        let words = dropout_words(dropout);
        let arguments = arguments!(self; y, x, a, starts, b, rows, channels, words);
        self.queue.wide_columns("drop", [rows, 1], channels, wide(y.dtype), arguments);
    }
}
