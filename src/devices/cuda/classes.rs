//! Positions that stand for their sequences, and losses of whole sequences or of tokens.

use super::driver::Argument;
use super::kernels::On;
use super::launches::int;
use crate::kernels::{
    BatchView, ClassLoss, ClassLossBackward, PooledRows, PooledRowsBackward, Pooling, Samples,
    Smoothing,
};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn pooled_rows(&self, op: &PooledRows<'_>) {
        let PooledRows { y, x, pool, ref batch } = *op;
        self.move_pooled_rows("pooled_rows", [y, x], pool, batch);
    }

    pub(super) fn pooled_rows_backward(&self, op: &PooledRowsBackward<'_>) {
        let PooledRowsBackward { dx, dy, pool, ref batch } = *op;
        self.move_pooled_rows("pooled_rows_backward", [dx, dy], pool, batch);
    }

    /// Copies pooled rows forward, or their gradients back, with a block for each row written.
    fn move_pooled_rows(
        &self,
        kernel: &'static str,
        [to, from]: [View; 2],
        pool: Pooling,
        batch: &BatchView<'_>,
    ) {
        let blocks = to.rows;
        let channels = to.columns;
        let [b, r, c] = [batch.sequences(), batch.rows(), channels].map(int);
        let from = self.at(from);
        let last = i32::from(pool == Pooling::Last);
        let arguments: [&dyn Argument; 7] =
            [&self.at(to), &from, &self.metadata.starts(batch), &b, &r, &c, &last];
        self.queue.columns(kernel, [blocks, 1], channels, &arguments);
    }

    pub(super) fn class_loss(&self, op: &ClassLoss<'_>) {
        let ClassLoss { out, statistics, scores, samples, is_value, ref batch, .. } = *op;
        let Smoothing { own, each } = op.smoothing;
        self.copy(out, statistics);
        let grid = [scores.rows, 1, 1];
        let [b, r, labels] = [sequences(samples, batch), batch.rows(), scores.columns].map(int);
        let scores = self.at(scores);
        let starts = self.metadata.starts(batch);
        let arguments: [&dyn Argument; 9] =
            [&self.at(out), &scores, &starts, &b, &r, &labels, &i32::from(is_value), &own, &each];
        self.queue.launch("class_loss", grid, [32, 1, 1], 0, &arguments);
    }

    pub(super) fn class_loss_backward(&self, op: &ClassLossBackward<'_>) {
        let ClassLossBackward { dscores, scores, statistics, scale, ref batch, .. } = *op;
        let ClassLossBackward { samples, is_value, .. } = *op;
        let Smoothing { own, each } = op.smoothing;
        let grid = [scores.rows, 1, 1];
        let [b, r, labels] = [sequences(samples, batch), batch.rows(), scores.columns].map(int);
        let d = self.at(dscores);
        let scores = self.at(scores);
        let s = self.at(statistics);
        let starts = self.metadata.starts(batch);
        let arguments: [&dyn Argument; 11] =
            [&d, &scores, &s, &scale, &starts, &b, &r, &labels, &i32::from(is_value), &own, &each];
        self.queue.launch("class_loss_backward", grid, [32, 1, 1], 0, &arguments);
    }
}

/// The kernels' number of sequences: 0 where each row is a sample of its own.
fn sequences(samples: Samples, batch: &BatchView<'_>) -> usize {
    match samples {
        Samples::Sequences => batch.sequences(),
        Samples::Tokens => 0,
    }
}
