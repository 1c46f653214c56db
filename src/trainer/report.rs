//! What a trainer tells of its steps and of the whole run.

use l2l_actors::ports::Lane;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over the labelled positions of the batch.
    pub loss: f64,
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// The step's learning rate.
    pub learning_rate: f64,
    /// Input tokens, without padding.
    pub tokens: usize,
    /// See [`Model::training_flops`](crate::models::Model::training_flops).
    pub model_flops: f64,
    /// From the end of the step before, or the start, to its end.
    pub seconds: f64,
    /// Time in which the compute lane stood still.
    pub exposed_wait_seconds: f64,
    /// The lane that worked longest.
    pub bottleneck: Lane,
    /// The most bytes of the device that were in use.
    pub device_peak_bytes: u64,
}

/// The lane that worked longest between two counts.
pub(super) fn busiest<const N: usize>(before: [u64; N], now: [u64; N]) -> Lane {
    let worked = |index: &usize| now[*index] - before[*index];
    Lane::ALL[(0..N).max_by_key(worked).expect("there are lanes")]
}

/// What a run did.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Steps, with those before a checkpoint that was resumed from.
    pub steps: u64,
    /// Seconds, with the last updates.
    pub seconds: f64,
    /// SHA-256 of the masters in block order.
    pub weights_digest: String,
    /// Visits of the device and the host.
    pub visits: u64,
    /// Bytes to the device.
    pub bytes_uploaded: u64,
    /// Bytes from the device.
    pub bytes_downloaded: u64,
}
