//! Norms of heads: a warp for each head; gradients of scales in partial sums over rows.

use super::kernels::{On, arguments};
use super::launches::{PART, attention_words, parts_of};
use crate::kernels::{HeadNorm, HeadNormBackward, QueryKey};
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
        let QueryKey { query, key } = gamma;
        let heads = x.rows * (shape.heads + 2 * shape.kv_heads);
        let sizes = attention_words(shape);
        let arguments =
            arguments!(self; y, statistics, x, query, key, x.rows, epsilon, gamma_offset, sizes);
        let grid = [heads.div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm", grid, [256, 1, 1], 0, arguments);
    }

    pub(super) fn head_norm_backward(&self, op: &HeadNormBackward<'_>, parts: View) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, ref shape, accumulate, .. } = *op;
        let rows = x.rows;
        let count = parts.rows;
        let d = shape.head_size;
        let sizes = attention_words(shape);
        let arguments = arguments!(self; parts, dx, x, statistics, rows, PART, sizes);
        self.queue.launch("head_norm_parts", [count, 2, 1], [256, 1, 1], 0, arguments);
        for (dgamma, at) in [(dgamma.query, 0), (dgamma.key, d)] {
            let parts = self.at(parts).behind(at);
            self.queue.fold(self.at(dgamma), parts, [count, 2 * d, d], accumulate);
        }
        let QueryKey { query, key } = gamma;
        let arguments =
            arguments!(self; dx, x, statistics, query, key, rows, op.gamma_offset, sizes);
        let grid = [(rows * (shape.heads + shape.kv_heads)).div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm_backward", grid, [256, 1, 1], 0, arguments);
    }
}
