//! Norms: a block for each row; gradients of scales in partial sums over rows.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{PART, dropout_words, int, parts_of, wide};
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
        let (rows, channels, wide) = (sum.rows, sum.columns, wide(sum.dtype));
        let (starts, sequences) = self.mask_sequences(dropout, rows);
        let (y, s, sum, x, a) =
            (self.at(y), self.at(statistics), self.at(sum), self.at(x), self.at(a));
        let (gamma, beta) = (self.at(gamma), self.at_if(beta));
        let ([b, r, c], rms) = ([sequences, rows, channels].map(int), i32::from(rms));
        let words = dropout_words(dropout);
        let tensors: [&dyn Argument; 8] = [&y, &s, &sum, &x, &a, &gamma, &beta, &starts];
        let numbers: [&dyn Argument; 7] = [&b, &r, &c, &epsilon, &rms, &gamma_offset, &words];
        let arguments = [&tensors[..], &numbers[..]].concat();
        self.queue.rows("residual_norm", rows, channels, wide, &arguments);
    }

    pub(super) fn norm(&self, op: &Norm) {
        let Norm { y, statistics, x, gamma, gamma_offset, beta, epsilon, rms } = *op;
        let (rows, channels, wide) = (x.rows, x.columns, wide(x.dtype));
        let (y, s, x) = (self.at(y), self.at(statistics), self.at(x));
        let (gamma, beta) = (self.at(gamma), self.at_if(beta));
        let (r, c, rms) = (int(rows), int(channels), i32::from(rms));
        let arguments: [&dyn Argument; 10] =
            [&y, &s, &x, &gamma, &beta, &r, &c, &epsilon, &rms, &gamma_offset];
        self.queue.rows("norm_forward", rows, channels, wide, &arguments);
    }

    pub(super) fn norm_backward(&self, op: &NormBackward, parts: View) {
        let NormBackward { dx, dgamma, dbeta, residual, dy, x, statistics, gamma, .. } = *op;
        let (rows, c, count, accumulate) = (x.rows, x.columns, parts.rows, op.accumulate);
        let (parts, dy, x, s) = (self.at(parts), self.at(dy), self.at(x), self.at(statistics));
        let (r, channels, rms, part) = (int(rows), int(c), i32::from(op.rms), int(PART));
        let arguments: [&dyn Argument; 7] = [&parts, &dy, &x, &s, &r, &channels, &part];
        self.queue.columns("norm_parts", [count, 1], c, &arguments);
        self.queue.fold(self.at(dgamma), parts, [count, 2 * c, c], accumulate);
        if let Some(dbeta) = dbeta {
            let betas = parts.behind(c);
            self.queue.fold(self.at(dbeta), betas, [count, 2 * c, c], accumulate);
        }
        let (dx, residual, gamma) = (self.at(dx), self.at_if(residual), self.at(gamma));
        let offset = op.gamma_offset;
        let arguments: [&dyn Argument; 10] =
            [&dx, &residual, &dy, &x, &s, &gamma, &r, &channels, &rms, &offset];
        self.queue.rows("norm_backward", rows, c, wide(op.x.dtype), &arguments);
    }
}
