//! Softmax cross entropy over tiles of the vocabulary: logits exist for some labelled positions and
//! one tile at a time.

use std::ops::Range;

use super::driver::Address;
use super::kernels::{On, arguments};
use super::launches::parts_of;
use super::linear::Table;
use crate::kernels::{LogitForm, Logits, Score, ScoreBackward, Smoothing};
use crate::tensor::{Scratch, View};

/// Positions that are scored at once, from shapes alone. Each time, the weights of a tile and their
/// gradient are read, so more positions at once cost fewer reads.
fn chunk_of(rows: usize) -> usize {
    rows.min(2048)
}

/// Elements from a row of a tile's logits to the next. A multiple of 8, so that products read
/// aligned rows for every size of a tile.
fn stride_of(tile: usize) -> usize {
    tile.next_multiple_of(8)
}

/// Workspace of a tile.
#[derive(Clone, Copy)]
pub(super) struct Labelled {
    /// The rows that have a label.
    places: View,
    /// Some of these rows side by side. (chunk, C).
    h: View,
    /// The logits of these rows. (chunk, V), a stride apart.
    logits: View,
}

fn labelled_scratch(h: View, w: View, scratch: &Scratch<'_>) -> Labelled {
    let chunk = chunk_of(h.rows);
    Labelled {
        places: scratch.take_floats(1, chunk),
        h: scratch.take(chunk, h.columns),
        logits: scratch.take_floats(chunk, stride_of(w.rows)),
    }
}

pub(super) fn score_scratch(op: &Score, scratch: &Scratch<'_>) -> Labelled {
    labelled_scratch(op.h, op.w, scratch)
}

/// The rows that have a label, and these rows side by side.
pub(super) fn logits_scratch(op: &Logits, scratch: &Scratch<'_>) -> [View; 2] {
    [scratch.take_floats(1, op.y.rows), scratch.take(op.y.rows, op.h.columns)]
}

/// Workspace of a tile's backward.
#[derive(Clone, Copy)]
pub(super) struct BackwardScratch {
    labelled: Labelled,
    /// Gradients of the logits. (chunk, V), a stride apart.
    dlogits: View,
    /// dh of the labelled rows side by side: floats. (chunk, C).
    dh: View,
    /// Partial sums of dbias.
    parts: View,
}

pub(super) fn backward_scratch(op: &ScoreBackward<'_>, scratch: &Scratch<'_>) -> BackwardScratch {
    let chunk = chunk_of(op.h.rows);
    let sums = op.dbias.map_or(0, |_| parts_of(chunk));
    BackwardScratch {
        labelled: labelled_scratch(op.h, op.w, scratch),
        dlogits: scratch.take(chunk, stride_of(op.w.rows)),
        dh: scratch.take_floats(chunk, op.h.columns),
        parts: scratch.take_floats(sums, op.w.rows),
    }
}

/// Ranges of `labelled` rows that are scored at once, of `rows` rows in all.
fn chunks(labelled: usize, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = chunk_of(rows).max(1);
    (0..labelled).step_by(chunk).map(move |from| from..labelled.min(from + chunk))
}

impl On<'_> {
    /// Finds the labelled rows of this range, among all labelled rows.
    fn find(&self, places: View, statistics: View, rows: usize, of: &Range<usize>) -> Address {
        let to = self.at(places).at;
        let arguments = arguments!(self; to, statistics, rows, of.start, of.len());
        self.queue.launch("labelled_rows", [1, 1, 1], [512, 1, 1], 0, arguments);
        to
    }

    /// Copies the rows that were found side by side.
    fn gather(&self, to: View, x: View, places: Address, [count, channels]: [usize; 2]) {
        let arguments = arguments!(self; to, x, places, count, channels);
        self.queue.columns("gather_rows", [count, 1], channels, arguments);
    }

    /// Copies some labelled rows side by side and computes their logits. Returns the numbers of
    /// these rows.
    fn logits_of(
        &self,
        [statistics, h, w]: [View; 3],
        rows: &Range<usize>,
        form: LogitForm,
        to: Labelled,
    ) -> Address {
        let places = self.find(to.places, statistics, h.rows, rows);
        self.gather(to.h, h, places, [rows.len(), h.columns]);
        let logits = Table::of(to.logits);
        let h = Table::of(to.h);
        let sizes = [rows.len(), w.columns, w.rows];
        self.product(logits, [h, Table::of(w).transposed()], sizes, None, false);
        self.form_logits(to.logits, [rows.len(), w.rows], form);
        places
    }

    /// Makes logits of products, in place. (rows, V), or rows further apart.
    fn form_logits(&self, y: View, [rows, v]: [usize; 2], form: LogitForm) {
        if form != LogitForm::PLAIN {
            let LogitForm { scale, cap } = form;
            let arguments = arguments!(self; y, rows, v, y.columns, scale, cap.unwrap_or(0.0));
            self.queue.columns("form_logits", [rows, 1], v, arguments);
        }
    }

    /// Adds a tile to the statistics of each labelled position.
    pub(super) fn score(&self, op: &Score, scratch: Labelled) {
        let Score { out, statistics, h, w, bias, form, .. } = *op;
        let Smoothing { own, each } = op.smoothing;
        self.copy(out, statistics);
        for rows in chunks(op.labelled, h.rows) {
            let places = self.logits_of([statistics, h, w], &rows, form, scratch);
            let count = rows.len();
            let stride = stride_of(w.rows);
            let arguments = arguments!(
                self; out, scratch.logits, bias, places, count, w.rows, stride, op.first, own, each
            );
            self.queue.launch("score_rows", [count, 1, 1], [256, 1, 1], 0, arguments);
        }
    }

    /// Logits of the labelled positions, in order.
    pub(super) fn logits(&self, op: &Logits, [places, gathered]: [View; 2]) {
        let Logits { y, statistics, h, w, bias, form } = *op;
        let count = y.rows;
        let c = h.columns;
        let v = w.rows;
        let places = self.find(places, statistics, h.rows, &(0..count));
        self.gather(gathered, h, places, [count, c]);
        let factors = [Table::of(gathered), Table::of(w).transposed()];
        self.product(Table::of(y), factors, [count, c, v], None, false);
        self.form_logits(y, [count, v], form);
        if let Some(bias) = bias {
            let arguments = arguments!(self; y, bias, count, v, v);
            self.queue.columns("add_bias_to_floats", [count, 1], v, arguments);
        }
    }

    /// dh = `dh_before` (or 0) + scale d w, dw (+)= scale dᵀ h, with d of the cross entropy.
    pub(super) fn score_backward(&self, op: &ScoreBackward<'_>, scratch: BackwardScratch) {
        let ScoreBackward { dh, dw, dbias, dh_before, mut accumulate, .. } = *op;
        match dh_before {
            Some(before) => self.copy(dh, before),
            None => self.clear(dh),
        }
        if op.labelled == 0 && !accumulate {
            [dw, dbias].into_iter().flatten().for_each(|gradient| self.clear(gradient));
        }
        for rows in chunks(op.labelled, op.h.rows) {
            self.score_backward_of(op, &rows, scratch, accumulate);
            accumulate = true;
        }
    }

    /// The backward of some labelled rows.
    fn score_backward_of(
        &self,
        op: &ScoreBackward<'_>,
        rows: &Range<usize>,
        scratch: BackwardScratch,
        accumulate: bool,
    ) {
        let ScoreBackward { dh, dw, dbias, statistics, h, w, bias, form, scale, first, .. } = *op;
        let r = rows.len();
        let c = h.columns;
        let v = w.rows;
        let places = self.logits_of([statistics, h, w], rows, form, scratch.labelled);
        let BackwardScratch { labelled: Labelled { logits, .. }, dlogits, .. } = scratch;
        let smoothing = if op.weighed { Smoothing::NONE } else { op.smoothing };
        let Smoothing { own, each } = smoothing;
        let weighed = usize::from(op.weighed);
        let arguments = arguments!(
            self; dlogits, statistics, logits, bias, places, r, v, dlogits.columns, first, scale,
            own, each, weighed
        );
        self.queue.launch("score_gradient", [r, 1, 1], [256, 1, 1], 0, arguments);
        if form != LogitForm::PLAIN {
            let LogitForm { scale, cap } = form;
            let cap = cap.unwrap_or(0.0);
            let arguments = arguments!(self; dlogits, logits, r, v, dlogits.columns, scale, cap);
            self.queue.columns("form_gradient", [r, 1], v, arguments);
        }
        let dlogits = Table::of(dlogits);
        self.product(Table::of(scratch.dh), [dlogits, Table::of(w)], [r, v, c], None, false);
        let arguments = arguments!(self; dh, scratch.dh, places, r, c);
        self.queue.columns("add_rows", [r, 1], c, arguments);
        if let Some(dw) = dw {
            let factors = [dlogits.transposed(), Table::of(scratch.labelled.h)];
            self.product(Table::of(dw), factors, [v, r, c], None, accumulate);
        }
        if let Some(dbias) = dbias {
            self.sum_columns(dbias, dlogits, [r, v], scratch.parts, accumulate);
        }
    }
}
