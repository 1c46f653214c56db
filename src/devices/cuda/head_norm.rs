//! Norms of heads: a warp for each head; gradients of scales in partial sums over rows.

use super::kernels::{On, arguments};
use super::launches::{PART, attention_words, parts_of};
use crate::kernels::{HeadNorm, HeadNormBackward, HeadValues, QueryKey};
use crate::tensor::{Scratch, View};

/// Heads that a block has.
const OF_BLOCK: usize = 8;

/// The text's word for what values are.
fn word_of(values: HeadValues) -> usize {
    match values {
        HeadValues::Plain => 0,
        HeadValues::Normed => 1,
        HeadValues::Keys => 2,
    }
}

/// Partial sums of both dγ.
pub(super) fn backward_scratch(op: &HeadNormBackward<'_>, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(parts_of(op.x.rows), 2 * op.shape.head_size)
}

impl On<'_> {
    pub(super) fn head_norm(&self, op: &HeadNorm<'_>) {
        let HeadNorm { y, statistics, x, gamma, gamma_offset, epsilon, values, ref shape } = *op;
        let QueryKey { query, key } = gamma;
        let heads = x.rows * (shape.heads + 2 * shape.kv_heads);
        let sizes = attention_words(shape);
        let rows = x.rows;
        let values = word_of(values);
        let arguments = arguments!(
            self; y, statistics, x, query, key, rows, epsilon, gamma_offset, values, sizes
        );
        let grid = [heads.div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm", grid, [256, 1, 1], 0, arguments);
    }

    pub(super) fn head_norm_backward(&self, op: &HeadNormBackward<'_>, parts: View) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, ref shape, .. } = *op;
        let accumulate = op.accumulate;
        let values = word_of(op.values);
        let rows = x.rows;
        let count = parts.rows;
        let d = shape.head_size;
        let sizes = attention_words(shape);
        let arguments = arguments!(self; parts, dx, x, statistics, rows, PART, values, sizes);
        self.queue.launch("head_norm_parts", [count, 2, 1], [256, 1, 1], 0, arguments);
        for (dgamma, at) in [(dgamma.query, 0), (dgamma.key, d)] {
            let parts = self.at(parts).behind(at);
            self.queue.fold(self.at(dgamma), parts, [count, 2 * d, d], accumulate);
        }
        let QueryKey { query, key } = gamma;
        let arguments =
            arguments!(self; dx, x, statistics, query, key, rows, op.gamma_offset, values, sizes);
        let heads = op.values.normed_heads(shape.heads, shape.kv_heads);
        let grid = [(rows * heads).div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm_backward", grid, [256, 1, 1], 0, arguments);
    }
}
