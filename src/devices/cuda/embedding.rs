//! Rows of tables that are added: by position, and by kind of token.

use super::kernels::{On, arguments};
use super::launches::{PART, parts_of};
use crate::kernels::{AddPositions, AddPositionsBackward, AddTokenTypes, AddTokenTypesBackward};
use crate::tensor::{Scratch, View};

/// Partial sums of the table's gradient.
pub(super) fn backward_scratch(op: &AddTokenTypesBackward<'_>, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(parts_of(op.dy.rows), op.dtable.len())
}

impl On<'_> {
    pub(super) fn add_token_types(&self, op: &AddTokenTypes<'_>) {
        let AddTokenTypes { y, table, ref batch } = *op;
        let [rows, channels] = y.shape();
        let arguments = arguments!(self; y, table, self.metadata.kinds(batch), rows, channels);
        self.queue.columns("add_kinds", [rows, 1], channels, arguments);
    }

    pub(super) fn add_token_types_backward(&self, op: &AddTokenTypesBackward<'_>, parts: View) {
        let AddTokenTypesBackward { dtable, dy, ref batch, accumulate } = *op;
        let chunks = parts.rows;
        let len = dtable.len();
        let [rows, channels] = dy.shape();
        let kinds = self.metadata.kinds(batch);
        let arguments = arguments!(self; parts, dy, kinds, rows, channels, dtable.rows, PART);
        self.queue.columns("kind_parts", [chunks, dtable.rows], channels, arguments);
        self.queue.fold(self.at(dtable), self.at(parts), [chunks, len, len], accumulate);
    }

    pub(super) fn add_positions(&self, op: &AddPositions<'_>) {
        let AddPositions { y, x, table, ref batch } = *op;
        let [rows, channels] = y.shape();
        let documents = self.metadata.documents(batch);
        let cached = self.metadata.cached(batch);
        let starts = self.metadata.starts(batch);
        let before = batch.positions_before(0);
        let b = batch.sequences();
        let arguments =
            arguments!(self; y, x, table, starts, documents, cached, before, b, rows, channels);
        self.queue.columns("add_positions", [rows, 1], channels, arguments);
    }

    pub(super) fn add_positions_backward(&self, op: &AddPositionsBackward<'_>) {
        let AddPositionsBackward { dtable, dy, ref batch, accumulate } = *op;
        let table = dtable.rows;
        let channels = dy.columns;
        let starts = self.metadata.starts(batch);
        let documents = self.metadata.documents(batch);
        let before = batch.positions_before(0);
        let b = batch.sequences();
        let rows = batch.rows();
        let arguments = arguments!(
            self; dtable, dy, starts, documents, before, b, rows, channels, table, accumulate
        );
        self.queue.columns("add_positions_backward", [table, 1], channels, arguments);
    }
}
