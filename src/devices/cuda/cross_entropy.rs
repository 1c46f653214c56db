//! Softmax cross entropy over tiles of the vocabulary: logits exist for some positions × one tile.

use std::ops::Range;

use super::driver::Argument;
use super::kernels::On;
use super::launches::int;
use crate::models::{STATISTICS, Scores, View};

/// Positions that are scored at once, of so many: by shape alone. Each time, a tile's weights and the
/// gradient of them are walked through: the more positions, the less that costs.
pub(super) fn chunk_of(rows: usize) -> usize {
    rows.min(2048)
}

/// What a tile's backward writes, and reads.
pub(super) struct Rescore {
    pub(super) dh: View,
    pub(super) dw: View,
    pub(super) dbias: Option<View>,
    pub(super) before: Option<View>,
    pub(super) statistics: View,
    pub(super) h: View,
    pub(super) w: View,
    pub(super) bias: Option<View>,
}

/// Rows that are scored at once.
fn chunks(size: &Scores) -> impl Iterator<Item = Range<usize>> {
    let (rows, chunk) = (size.rows, chunk_of(size.rows));
    (0..rows).step_by(chunk).map(move |from| from..rows.min(from + chunk))
}

/// Some rows of a tensor of so many columns.
fn of_rows(view: View, rows: &Range<usize>, columns: usize) -> View {
    view.part(rows.start * columns..rows.end * columns)
}

impl On<'_> {
    /// Takes a tile into the statistics of each labelled position.
    pub(super) fn score(
        &self,
        [out, logits]: [View; 2],
        [statistics, h, w]: [View; 3],
        bias: Option<View>,
        size: &Scores,
    ) {
        self.copy(out, statistics);
        let (c, v) = (size.channels, size.tile);
        for rows in chunks(size) {
            let h = of_rows(h, &rows, c);
            self.product(logits, [(h, false), (w, true)], [rows.len(), c, v], None, false);
            let out = self.at(of_rows(out, &rows, STATISTICS));
            let (logits, bias) = (self.at(logits), self.maybe(bias));
            let [r, tile, first] = [rows.len(), v, size.first].map(int);
            let arguments: [&dyn Argument; 6] = [&out, &logits, &bias, &r, &tile, &first];
            self.queue.launch("score_rows", [rows.len(), 1, 1], [256, 1, 1], 0, &arguments);
        }
    }

    /// Logits of the labelled positions, in order. `places` and `gathered` are scratch.
    pub(super) fn logits(
        &self,
        [y, places, gathered]: [View; 3],
        [statistics, h, w]: [View; 3],
        bias: Option<View>,
        size: &Scores,
    ) {
        let (told, c, v) = (places.len, size.channels, size.tile);
        let (to, from, rows) = (self.at(places).at, self.at(statistics), int(size.rows));
        let arguments: [&dyn Argument; 4] = [&to, &from, &rows, &int(told)];
        self.queue.launch("labelled_rows", [1, 1, 1], [32, 1, 1], 0, &arguments);
        let (x, places) = (self.at(h), to);
        let arguments: [&dyn Argument; 5] = [&self.at(gathered), &x, &places, &int(told), &int(c)];
        self.queue.columns("gather_rows", [told, 1], c, &arguments);
        self.product(y, [(gathered, false), (w, true)], [told, c, v], None, false);
        if let Some(bias) = bias {
            let (y, bias) = (self.at(y), self.at(bias));
            let arguments: [&dyn Argument; 4] = [&y, &bias, &int(told), &int(v)];
            self.queue.columns("add_bias", [told, 1], v, &arguments);
        }
    }

    /// dh = `before` (or nothing) + scale d w, dw (+)= scale dᵀ h, with d of the cross entropy.
    pub(super) fn score_backward(
        &self,
        views: &Rescore,
        [logits, d, parts]: [View; 3],
        scale: f32,
        size: &Scores,
        accumulate: bool,
    ) {
        let Rescore { dh, dw, dbias, before, statistics, h, w, bias } = *views;
        let (c, v) = (size.channels, size.tile);
        if let Some(before) = before {
            self.copy(dh, before);
        }
        let mut accumulate = accumulate;
        for rows in chunks(size) {
            let (r, h, dh) = (rows.len(), of_rows(h, &rows, c), of_rows(dh, &rows, c));
            self.product(logits, [(h, false), (w, true)], [r, c, v], None, false);
            let s = self.at(of_rows(statistics, &rows, STATISTICS));
            let (to, from) = (self.at(d), self.at(logits));
            let bias = self.maybe(bias);
            let [count, tile, first] = [r, v, size.first].map(int);
            let arguments: [&dyn Argument; 8] =
                [&to, &s, &from, &bias, &count, &tile, &first, &scale];
            self.queue.launch("score_gradient", [r, 1, 1], [256, 1, 1], 0, &arguments);
            self.product(dh, [(d, false), (w, false)], [r, v, c], None, before.is_some());
            self.product(dw, [(d, true), (h, false)], [v, r, c], None, accumulate);
            if let Some(dbias) = dbias {
                self.sum_columns(dbias, d, [r, v], parts, accumulate);
            }
            accumulate = true;
        }
    }
}
