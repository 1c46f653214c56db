//! Rows of tables that are added: by position, and by kind of token.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{PART, int, parts_of};
use crate::kernels::{AddPositions, AddPositionsBackward, AddTokenTypes, AddTokenTypesBackward};
use crate::tensor::{Scratch, View};

/// Partial sums of the table's gradient.
pub(super) fn backward_scratch(op: &AddTokenTypesBackward<'_>, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(parts_of(op.dy.rows), op.dtable.len())
}

impl On<'_> {
    pub(super) fn add_token_types(&self, op: &AddTokenTypes<'_>) {
        let AddTokenTypes { y, table, ref batch } = *op;
        let rows = y.rows;
        let channels = y.columns;
        let arguments: [&dyn Argument; 5] =
            [&self.at(y), &self.at(table), &self.metadata.kinds(batch), &int(rows), &int(channels)];
        self.queue.columns("add_kinds", [rows, 1], channels, &arguments);
    }

    pub(super) fn add_token_types_backward(&self, op: &AddTokenTypesBackward<'_>, parts: View) {
        let AddTokenTypesBackward { dtable, dy, ref batch, accumulate } = *op;
        let chunks = parts.rows;
        let len = dtable.len();
        let c = dy.columns;
        let [r, channels, count, part] = [dy.rows, c, dtable.rows, PART].map(int);
        let parts = self.at(parts);
        let arguments: [&dyn Argument; 7] =
            [&parts, &self.at(dy), &self.metadata.kinds(batch), &r, &channels, &count, &part];
        self.queue.columns("kind_parts", [chunks, dtable.rows], c, &arguments);
        self.queue.fold(self.at(dtable), parts, [chunks, len, len], accumulate);
    }

    pub(super) fn add_positions(&self, op: &AddPositions<'_>) {
        let AddPositions { y, x, table, ref batch } = *op;
        let rows = y.rows;
        let channels = y.columns;
        let table = self.at(table);
        let documents = self.metadata.documents(batch);
        let cached = self.metadata.cached(batch);
        let starts = self.metadata.starts(batch);
        let before = batch.positions_before(0);
        let sequences = batch.sequences();
        let [before, b, r, c] = [before, sequences, rows, channels].map(int);
        let arguments: [&dyn Argument; 10] =
            [&self.at(y), &self.at(x), &table, &starts, &documents, &cached, &before, &b, &r, &c];
        self.queue.columns("add_positions", [rows, 1], channels, &arguments);
    }

    pub(super) fn add_positions_backward(&self, op: &AddPositionsBackward<'_>) {
        let AddPositionsBackward { dtable, dy, ref batch, accumulate } = *op;
        let table = dtable.rows;
        let channels = dy.columns;
        let starts = self.metadata.starts(batch);
        let documents = self.metadata.documents(batch);
        let dtable = self.at(dtable);
        let dy = self.at(dy);
        let before = batch.positions_before(0);
        let sequences = batch.sequences();
        let rows = batch.rows();
        let [before, b, r, c, table_rows] = [before, sequences, rows, channels, table].map(int);
        let accumulate = i32::from(accumulate);
        let arguments: [&dyn Argument; 10] =
            [&dtable, &dy, &starts, &documents, &before, &b, &r, &c, &table_rows, &accumulate];
        self.queue.columns("add_positions_backward", [table, 1], channels, &arguments);
    }
}
