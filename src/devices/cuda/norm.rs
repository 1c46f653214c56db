//! Norms: a block for each row; gradients of scales in partial sums over rows.

use super::kernels::{On, arguments};
use super::launches::{PART, dropout_words, parts_of, wide};
use crate::kernels::{Norm, NormBackward, Residual};
use crate::tensor::{Scratch, View};

/// Partial sums of dγ and dβ.
pub(super) fn backward_scratch(op: &NormBackward, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(parts_of(op.x.rows), 2 * op.x.columns)
}

impl On<'_> {
    pub(super) fn residual_norm(&self, sum: &Residual<'_>, norm: &Norm) {
        let Residual { a, x, dropout, .. } = *sum;
        let Norm { y, statistics, x: sum, gamma, gamma_offset, beta, epsilon, rms } = *norm;
        let [rows, channels] = sum.shape();
        let (starts, b) = self.mask_sequences(dropout, rows);
        let words = dropout_words(dropout);
        let arguments = arguments!(
            self; y, statistics, sum, x, a, gamma, beta, starts, b, rows, channels, epsilon, rms,
            gamma_offset, words
        );
        self.queue.rows("residual_norm", rows, channels, wide(sum.dtype), arguments);
    }

    pub(super) fn norm(&self, op: &Norm) {
        let Norm { y, statistics, x, gamma, gamma_offset, beta, epsilon, rms } = *op;
        let [rows, channels] = x.shape();
        let arguments = arguments!(
            self; y, statistics, x, gamma, beta, rows, channels, epsilon, rms, gamma_offset
        );
        self.queue.rows("norm_forward", rows, channels, wide(x.dtype), arguments);
    }

    pub(super) fn norm_backward(&self, op: &NormBackward, parts: View) {
        let NormBackward { dx, dgamma, dbeta, residual, dy, x, statistics, gamma, .. } = *op;
        let NormBackward { gamma_offset, rms, accumulate, .. } = *op;
        let [rows, c] = x.shape();
        let count = parts.rows;
        let arguments = arguments!(self; parts, dy, x, statistics, rows, c, PART);
        self.queue.columns("norm_parts", [count, 1], c, arguments);
        let parts = self.at(parts);
        self.queue.fold(self.at(dgamma), parts, [count, 2 * c, c], accumulate);
        if let Some(dbeta) = dbeta {
            let betas = parts.behind(c);
            self.queue.fold(self.at(dbeta), betas, [count, 2 * c, c], accumulate);
        }
        let arguments =
            arguments!(self; dx, residual, dy, x, statistics, gamma, rows, c, rms, gamma_offset);
        self.queue.rows("norm_backward", rows, c, wide(x.dtype), arguments);
    }
}
