//! Norms of heads: a warp for each head; gradients of scales in partial sums over rows.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{PART, attention_words, int, parts_of};
use crate::kernels::{HeadNorm, HeadNormBackward};
use crate::tensor::{Scratch, View};

/// Heads that a block has.
const OF_BLOCK: usize = 8;

/// Partial sums of both dγ.
pub(super) fn backward_scratch(op: &HeadNormBackward<'_>, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(parts_of(op.x.rows), 2 * op.shape.head_size)
}

impl On<'_> {
    pub(super) fn head_norm(&self, op: &HeadNorm<'_>) {
        let HeadNorm { y, statistics, x, gamma, gamma_offset, epsilon, ref shape } = *op;
        let heads = x.rows * (shape.heads + 2 * shape.kv_heads);
        let rows = int(x.rows);
        let y = self.at(y);
        let s = self.at(statistics);
        let x = self.at(x);
        let query = self.at(gamma.query);
        let key = self.at(gamma.key);
        let arguments: [&dyn Argument; 9] =
            [&y, &s, &x, &query, &key, &rows, &epsilon, &gamma_offset, &attention_words(shape)];
        let grid = [heads.div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm", grid, [256, 1, 1], 0, &arguments);
    }

    pub(super) fn head_norm_backward(&self, op: &HeadNormBackward<'_>, parts: View) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, ref shape, accumulate, .. } = *op;
        let rows = x.rows;
        let count = parts.rows;
        let d = shape.head_size;
        let parts = self.at(parts);
        let dx = self.at(dx);
        let x = self.at(x);
        let s = self.at(statistics);
        let r = int(rows);
        let sizes = attention_words(shape);
        let arguments: [&dyn Argument; 7] = [&parts, &dx, &x, &s, &r, &int(PART), &sizes];
        self.queue.launch("head_norm_parts", [count, 2, 1], [256, 1, 1], 0, &arguments);
        for (dgamma, at) in [(dgamma.query, 0), (dgamma.key, d)] {
            let parts = parts.behind(at);
            self.queue.fold(self.at(dgamma), parts, [count, 2 * d, d], accumulate);
        }
        let offset = op.gamma_offset;
        let arguments: [&dyn Argument; 8] =
            [&dx, &x, &s, &self.at(gamma.query), &self.at(gamma.key), &r, &offset, &sizes];
        let grid = [(rows * (shape.heads + shape.kv_heads)).div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm_backward", grid, [256, 1, 1], 0, &arguments);
    }
}
