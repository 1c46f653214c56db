//! Dropout, and sums on the residual stream.

use super::driver::{Argument, Place};
use super::kernels::On;
use super::launches::{dropout_words, int};
use crate::kernels::{ApplyDropout, Dropout, Residual};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn residual(&self, &Residual { y, a, x, dropout }: &Residual) {
        self.add_dropout(y, self.at(a), x, dropout);
    }

    pub(super) fn dropout(&self, &ApplyDropout { y, x, dropout }: &ApplyDropout) {
        if dropout.is_some() {
            self.add_dropout(y, Place::NULL, x, dropout);
        } else if y != x {
            self.copy(y, x);
        }
    }

    /// y = a + dropout(x), without `a` where that is null.
    fn add_dropout(&self, y: View, a: Place, x: View, dropout: Option<Dropout>) {
        let (rows, channels) = (y.rows, y.columns);
        let positions = dropout.map_or(rows, |dropout| dropout.positions);
        let [r, positions, c] = [rows, positions, channels].map(int);
        let (y, x, words) = (self.at(y), self.at(x), dropout_words(dropout));
        let arguments: [&dyn Argument; 7] = [&y, &x, &a, &r, &positions, &c, &words];
        self.queue.columns("drop", [rows, 1], channels, &arguments);
    }
}
