//! Attention's sinks.

use super::kernels::{On, arguments};
use super::launches::{attention_words, long};
use crate::kernels::{Sink, SinkBackward};

impl On<'_> {
    /// The outputs come first: they read the log-sum-exps without sinks.
    pub(super) fn sink(&self, op: &Sink<'_>) {
        let Sink { y, lse, sinks, ref shape } = *op;
        let starts = self.metadata.starts(&shape.batch);
        let sizes = attention_words(shape);
        let outputs = arguments!(self; y, lse, sinks, starts, y.columns, sizes);
        self.queue.columns("sink_outputs", [y.rows, 1], y.columns, outputs);
        let count = lse.len();
        let statistics = arguments!(self; lse, sinks, starts, long(count), sizes);
        self.queue.each("sink_statistics", count, 1, statistics);
    }

    pub(super) fn sink_backward(&self, op: &SinkBackward<'_>) {
        let SinkBackward { dsinks, dy, y, lse, sinks, ref shape, accumulate } = *op;
        let starts = self.metadata.starts(&shape.batch);
        let sizes = attention_words(shape);
        let arguments = arguments!(self; dsinks, dy, y, lse, sinks, starts, accumulate, sizes);
        self.queue.launch("sink_backward", [shape.heads, 1, 1], [256, 1, 1], 0, arguments);
    }
}
