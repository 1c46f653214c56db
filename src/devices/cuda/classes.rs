//! Positions that stand for their sequences, and losses of whole sequences or of tokens.

use super::kernels::{On, arguments};
use crate::kernels::{
    BatchView, ClassLoss, ClassLossBackward, PooledRows, PooledRowsBackward, Pooling, ProblemType,
    Samples, Smoothing,
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

    /// Moves pooled rows forward, or their gradients back, with a block for each row written.
    fn move_pooled_rows(
        &self,
        kernel: &'static str,
        [to, from]: [View; 2],
        pool: Pooling,
        batch: &BatchView<'_>,
    ) {
        let [blocks, channels] = to.shape();
        let starts = self.metadata.starts(batch);
        let b = batch.sequences();
        let pool: i32 = match pool {
            Pooling::First => 0,
            Pooling::Last => 1,
            Pooling::Mean => 2,
        };
        let arguments = arguments!(self; to, from, starts, b, batch.rows(), channels, pool);
        self.queue.columns(kernel, [blocks, 1], channels, arguments);
    }

    pub(super) fn class_loss(&self, op: &ClassLoss<'_>) {
        let ClassLoss { out, statistics, scores, samples, problem, weighed, ref batch, .. } = *op;
        let problem = kind_of_labels(problem, weighed);
        let Smoothing { own, each } = op.smoothing;
        self.copy(out, statistics);
        let [samples_count, labels] = scores.shape();
        let starts = self.metadata.starts(batch);
        let b = sequences(samples, batch);
        let arguments =
            arguments!(self; out, scores, starts, b, batch.rows(), labels, problem, own, each);
        self.queue.launch("class_loss", [samples_count, 1, 1], [32, 1, 1], 0, arguments);
    }

    pub(super) fn class_loss_backward(&self, op: &ClassLossBackward<'_>) {
        let ClassLossBackward { dscores, scores, statistics, scale, ref batch, .. } = *op;
        let ClassLossBackward { samples, problem, weighed, .. } = *op;
        let problem = kind_of_labels(problem, weighed);
        let Smoothing { own, each } = op.smoothing;
        let [samples_count, labels] = scores.shape();
        let starts = self.metadata.starts(batch);
        let b = sequences(samples, batch);
        let r = batch.rows();
        let arguments = arguments!(
            self; dscores, scores, statistics, scale, starts, b, r, labels, problem, own, each
        );
        self.queue.launch("class_loss_backward", [samples_count, 1, 1], [32, 1, 1], 0, arguments);
    }
}

/// The kernels' number of a kind of labels, or of scores that an objective reads.
fn kind_of_labels(problem: ProblemType, weighed: bool) -> i32 {
    match problem {
        _ if weighed => 3,
        ProblemType::SingleLabelClassification => 0,
        ProblemType::Regression => 1,
        ProblemType::MultiLabelClassification => 2,
    }
}

/// The kernels' number of sequences: 0 where each row is a sample of its own.
fn sequences(samples: Samples, batch: &BatchView<'_>) -> usize {
    match samples {
        Samples::Sequences => batch.sequences(),
        Samples::Tokens => 0,
    }
}
