//! First positions of sequences, and losses of whole sequences.

use super::driver::Argument;
use super::kernels::On;
use super::launches::int;
use crate::kernels::{ClassLoss, ClassLossBackward, FirstRows, FirstRowsBackward};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn first_rows(&self, &FirstRows { y, x }: &FirstRows) {
        self.move_first_rows("first_rows", [y, x], [y.rows, x.rows], y.rows);
    }

    pub(super) fn first_rows_backward(&self, &FirstRowsBackward { dx, dy }: &FirstRowsBackward) {
        self.move_first_rows("first_rows_backward", [dx, dy], [dy.rows, dx.rows], dx.rows);
    }

    /// One way or the other, of so many sequences in so many rows, with a block for each of so many
    /// rows.
    fn move_first_rows(
        &self,
        kernel: &'static str,
        [to, from]: [View; 2],
        [sequences, rows]: [usize; 2],
        blocks: usize,
    ) {
        let channels = to.columns;
        let [b, positions, c] = [sequences, rows / sequences, channels].map(int);
        let (to, from) = (self.at(to), self.at(from));
        let arguments: [&dyn Argument; 5] = [&to, &from, &b, &positions, &c];
        self.queue.columns(kernel, [blocks, 1], channels, &arguments);
    }

    pub(super) fn class_loss(&self, op: &ClassLoss) {
        let ClassLoss { out, statistics, scores, is_value } = *op;
        self.copy(out, statistics);
        let (grid, is_value) = ([scores.rows, 1, 1], i32::from(is_value));
        let positions = statistics.rows / scores.rows;
        let [sequences, positions, labels] = [scores.rows, positions, scores.columns].map(int);
        let (out, scores) = (self.at(out), self.at(scores));
        let arguments: [&dyn Argument; 6] =
            [&out, &scores, &sequences, &positions, &labels, &is_value];
        self.queue.launch("class_loss", grid, [32, 1, 1], 0, &arguments);
    }

    pub(super) fn class_loss_backward(&self, op: &ClassLossBackward) {
        let ClassLossBackward { dscores, scores, statistics, scale, is_value } = *op;
        let (grid, is_value) = ([scores.rows, 1, 1], i32::from(is_value));
        let positions = statistics.rows / scores.rows;
        let [sequences, positions, labels] = [scores.rows, positions, scores.columns].map(int);
        let (d, scores, s) = (self.at(dscores), self.at(scores), self.at(statistics));
        let arguments: [&dyn Argument; 8] =
            [&d, &scores, &s, &scale, &sequences, &positions, &labels, &is_value];
        self.queue.launch("class_loss_backward", grid, [32, 1, 1], 0, &arguments);
    }
}
