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
        let rows = sum.rows;
        let channels = sum.columns;
        let wide = wide(sum.dtype);
        let (starts, sequences) = self.mask_sequences(dropout, rows);
        let x = self.at(x);
        let a = self.at(a);
        let gamma = self.at(gamma);
        let beta = self.at_if(beta);
        let [b, r, c] = [sequences, rows, channels].map(int);
        let words = dropout_words(dropout);
        let tensors: [&dyn Argument; 8] =
            [&self.at(y), &self.at(statistics), &self.at(sum), &x, &a, &gamma, &beta, &starts];
        let numbers: [&dyn Argument; 7] =
            [&b, &r, &c, &epsilon, &i32::from(rms), &gamma_offset, &words];
        let arguments = [&tensors[..], &numbers[..]].concat();
        self.queue.rows("residual_norm", rows, channels, wide, &arguments);
    }

    pub(super) fn norm(&self, op: &Norm) {
        let Norm { y, statistics, x, gamma, gamma_offset, beta, epsilon, rms } = *op;
        let rows = x.rows;
        let channels = x.columns;
        let wide = wide(x.dtype);
        let s = self.at(statistics);
        let gamma = self.at(gamma);
        let beta = self.at_if(beta);
        let r = int(rows);
        let c = int(channels);
        let rms = i32::from(rms);
        let arguments: [&dyn Argument; 10] =
            [&self.at(y), &s, &self.at(x), &gamma, &beta, &r, &c, &epsilon, &rms, &gamma_offset];
        self.queue.rows("norm_forward", rows, channels, wide, &arguments);
    }

    pub(super) fn norm_backward(&self, op: &NormBackward, parts: View) {
        let NormBackward { dx, dgamma, dbeta, residual, dy, x, statistics, gamma, .. } = *op;
        let rows = x.rows;
        let c = x.columns;
        let count = parts.rows;
        let accumulate = op.accumulate;
        let parts = self.at(parts);
        let dy = self.at(dy);
        let x = self.at(x);
        let s = self.at(statistics);
        let r = int(rows);
        let channels = int(c);
        let arguments: [&dyn Argument; 7] = [&parts, &dy, &x, &s, &r, &channels, &int(PART)];
        self.queue.columns("norm_parts", [count, 1], c, &arguments);
        self.queue.fold(self.at(dgamma), parts, [count, 2 * c, c], accumulate);
        if let Some(dbeta) = dbeta {
            let betas = parts.behind(c);
            self.queue.fold(self.at(dbeta), betas, [count, 2 * c, c], accumulate);
        }
        let dx = self.at(dx);
        let residual = self.at_if(residual);
        let gamma = self.at(gamma);
        let offset = op.gamma_offset;
        let arguments: [&dyn Argument; 10] =
            [&dx, &residual, &dy, &x, &s, &gamma, &r, &channels, &i32::from(op.rms), &offset];
        self.queue.rows("norm_backward", rows, c, wide(op.x.dtype), &arguments);
    }
}
