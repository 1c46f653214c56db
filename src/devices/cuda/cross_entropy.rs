//! Softmax cross entropy over tiles of the vocabulary: logits exist for some labelled positions × one tile.

use std::ops::Range;

use super::driver::{Address, Argument};
use super::kernels::On;
use super::launches::{NEIGHBOURS, int, long};
use super::linear::Table;
use crate::kernels::Scores;
use crate::tensor::{Dtype, View};

/// Positions that are scored at once, of so many: by shape alone. Each time, a tile's weights and the
/// gradient of them are walked through: the more positions, the less that costs.
pub(super) fn chunk_of(rows: usize) -> usize {
    rows.min(2048)
}

/// Elements from a row of a tile's logits to the next: what it takes for products to read them in whole
/// pieces, whatever the tile is.
pub(super) fn stride_of(size: &Scores) -> usize {
    size.tile.next_multiple_of(8)
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

/// Scratch of a tile: where labelled rows are, some of them side by side, and their logits.
pub(super) struct Labelled {
    pub(super) places: View,
    pub(super) h: View,
    pub(super) logits: View,
}

/// Labelled rows that are scored at once.
fn chunks(size: &Scores) -> impl Iterator<Item = Range<usize>> {
    let (rows, chunk) = (size.labelled, chunk_of(size.rows).max(1));
    (0..rows).step_by(chunk).map(move |from| from..rows.min(from + chunk))
}

impl On<'_> {
    /// Finds some of so many rows' labelled ones.
    fn find(&self, places: View, statistics: View, rows: usize, of: &Range<usize>) -> Address {
        let (to, from) = (self.at(places).at, self.at(statistics));
        let [rows, first, count] = [rows, of.start, of.len()].map(int);
        let arguments: [&dyn Argument; 5] = [&to, &from, &rows, &first, &count];
        self.queue.launch("labelled_rows", [1, 1, 1], [512, 1, 1], 0, &arguments);
        to
    }

    /// Copies rows that were found to where they stand side by side.
    fn gather(&self, to: View, x: View, places: Address, [count, channels]: [usize; 2]) {
        let (to, x) = (self.at(to), self.at(x));
        let arguments: [&dyn Argument; 5] = [&to, &x, &places, &int(count), &int(channels)];
        self.queue.columns("gather_rows", [count, 1], channels, &arguments);
    }

    /// Some labelled rows side by side, and their logits; where they are.
    fn logits_of(
        &self,
        [statistics, h, w]: [View; 3],
        rows: &Range<usize>,
        to: &Labelled,
        size: &Scores,
    ) -> Address {
        let (c, v) = (size.channels, size.tile);
        let places = self.find(to.places, statistics, size.rows, rows);
        self.gather(to.h, h, places, [rows.len(), c]);
        let (logits, h) = (Table::of(to.logits, stride_of(size)), Table::of(to.h, c));
        self.product(logits, [h, Table::of(w, c).transposed()], [rows.len(), c, v], None, false);
        places
    }

    /// Takes a tile into the statistics of each labelled position.
    pub(super) fn score(
        &self,
        out: View,
        [statistics, h, w]: [View; 3],
        bias: Option<View>,
        scratch: &Labelled,
        size: &Scores,
    ) {
        self.copy(out, statistics);
        for rows in chunks(size) {
            let places = self.logits_of([statistics, h, w], &rows, scratch, size);
            let (out, logits, bias) = (self.at(out), self.at(scratch.logits), self.maybe(bias));
            let [r, tile, stride, first] =
                [rows.len(), size.tile, stride_of(size), size.first].map(int);
            let arguments: [&dyn Argument; 8] =
                [&out, &logits, &bias, &places, &r, &tile, &stride, &first];
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
        let (told, c, v) = (places.len(), size.channels, size.tile);
        let places = self.find(places, statistics, size.rows, &(0..told));
        self.gather(gathered, h, places, [told, c]);
        let (x, w) = (Table::of(gathered, c), Table::of(w, c).transposed());
        self.product(Table::of(y, v), [x, w], [told, c, v], None, false);
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
        scratch: &Labelled,
        [d, dh_of_rows, parts]: [View; 3],
        scale: f32,
        size: &Scores,
        mut accumulate: bool,
    ) {
        let Rescore { dh, dw, dbias, before, statistics, h, w, bias } = *views;
        let (c, v) = (size.channels, size.tile);
        match before {
            Some(before) => self.copy(dh, before),
            None => self.clear(dh),
        }
        if size.labelled == 0 && !accumulate {
            [Some(dw), dbias].into_iter().flatten().for_each(|gradient| self.clear(gradient));
        }
        for rows in chunks(size) {
            let r = rows.len();
            let places = self.logits_of([statistics, h, w], &rows, scratch, size);
            let (to, from, s) = (self.at(d), self.at(scratch.logits), self.at(statistics));
            let bias = self.maybe(bias);
            let [count, tile, stride, first] = [r, v, stride_of(size), size.first].map(int);
            let arguments: [&dyn Argument; 10] =
                [&to, &s, &from, &bias, &places, &count, &tile, &stride, &first, &scale];
            self.queue.launch("score_gradient", [r, 1, 1], [256, 1, 1], 0, &arguments);
            let (slopes, weights) = (Table::of(d, stride_of(size)), Table::of(w, c));
            self.product(Table::of(dh_of_rows, c), [slopes, weights], [r, v, c], None, false);
            let (to, from) = (self.at(dh), self.at(dh_of_rows));
            let arguments: [&dyn Argument; 5] = [&to, &from, &places, &count, &int(c)];
            self.queue.columns("add_rows", [r, 1], c, &arguments);
            let factors = [slopes.transposed(), Table::of(scratch.h, c)];
            self.product(Table::of(dw, c), factors, [v, r, c], None, accumulate);
            if let Some(dbias) = dbias {
                self.sum_columns(dbias, slopes, [r, v], parts, accumulate);
            }
            accumulate = true;
        }
    }

    /// y = 0.
    pub(super) fn clear(&self, y: View) {
        let kernel = if y.dtype == Dtype::F32 { "clear_floats" } else { "clear" };
        self.queue.each(kernel, y.len(), NEIGHBOURS, &[&self.at(y), &long(y.len())]);
    }
}
