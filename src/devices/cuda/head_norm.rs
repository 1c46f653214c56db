//! Norms of queries and keys: a warp for each part of a row; gradients of scales in partial sums
//! over rows.

use super::kernels::{On, arguments};
use super::launches::{PART, Words, parts_of};
use crate::kernels::{HeadNorm, HeadNormBackward, HeadValues, QkNorm, QueryKey};
use crate::tensor::{Scratch, View};

/// Parts that a block has.
const OF_BLOCK: usize = 8;

/// The text's `NormParts`.
fn words_of([count, channels]: [QueryKey<usize>; 2], norm: QkNorm, values: HeadValues) -> Words<6> {
    let norm = match norm {
        QkNorm::ByHead => 0,
        QkNorm::Joint => 1,
        QkNorm::LayerNorm => 2,
    };
    let values = match values {
        HeadValues::Plain => 0,
        HeadValues::Normed => 1,
        HeadValues::Keys => 2,
    };
    let sizes = [count.query, count.key, channels.query, channels.key, norm, values];
    let words = sizes.map(|size| u32::try_from(size).expect("sizes are checked"));
    Words { name: "NormParts", words }
}

/// Partial sums of both dγ.
pub(super) fn backward_scratch(op: &HeadNormBackward<'_>, scratch: &Scratch<'_>) -> View {
    let QueryKey { query, key } = op.gamma;
    scratch.take_floats(parts_of(op.x.rows), query.len() + key.len())
}

impl On<'_> {
    pub(super) fn head_norm(&self, op: &HeadNorm<'_>) {
        let HeadNorm { y, statistics, x, gamma, gamma_offset, epsilon, norm, values, .. } = *op;
        let QueryKey { query, key } = gamma;
        let parts = op.parts();
        let rows = x.rows;
        let words = words_of([parts.count, parts.channels], norm, values);
        let arguments =
            arguments!(self; y, statistics, x, query, key, rows, epsilon, gamma_offset, words);
        let grid = [(rows * (parts.scaled() + parts.count.key)).div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm", grid, [256, 1, 1], 0, arguments);
    }

    pub(super) fn head_norm_backward(&self, op: &HeadNormBackward<'_>, sums: View) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, norm, accumulate, .. } = *op;
        let QueryKey { query, key } = gamma;
        let rows = x.rows;
        let parts = op.parts();
        let words = words_of([parts.count, parts.channels], norm, op.values);
        let kinds = query.rows + key.rows;
        let arguments = arguments!(self; sums, dx, x, statistics, rows, PART, kinds, words);
        self.queue.launch("head_norm_parts", [sums.rows, kinds, 1], [256, 1, 1], 0, arguments);
        for (dgamma, at) in [(dgamma.query, 0), (dgamma.key, query.len())] {
            let first = self.at(sums).behind(at);
            let sizes = [sums.rows, sums.columns, dgamma.len()];
            self.queue.fold(self.at(dgamma), first, sizes, accumulate);
        }
        let arguments =
            arguments!(self; dx, x, statistics, query, key, rows, op.gamma_offset, words);
        let grid = [(rows * parts.normed(op.values)).div_ceil(OF_BLOCK), 1, 1];
        self.queue.launch("head_norm_backward", grid, [256, 1, 1], 0, arguments);
    }
}
