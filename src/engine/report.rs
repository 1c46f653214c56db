//! Reports of a step and of a whole run.

use crate::objectives::ObjectiveMetrics;
use crate::plan::LinkBytes;

/// The report of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The number of the step. The first is 1. With `schedule.window` a report is of the steps of a
    /// window, and this is the last of them.
    pub step: u64,
    /// The mean loss over the labelled positions of the batch. Of a window, the mean over its
    /// batches.
    pub loss: f64,
    /// The loss that balances the experts, with its weight, if there is one. It is no part of
    /// `loss`.
    pub balance_loss: Option<f64>,
    /// The loss of the size of the routers' logits, with its weight, if there is one. It is no part
    /// of `loss`.
    pub z_loss: Option<f64>,
    /// The means of an objective's metrics over the records of the step.
    pub metrics: ObjectiveMetrics,
    /// The global gradient norm, before clipping. Of a window, the root of the mean square over its
    /// batches.
    pub grad_norm: f64,
    /// The factor of the loss, if there is one (`loss_scale`).
    pub loss_scale: Option<f64>,
    /// True if the step changed nothing, as its gradient is not finite.
    pub skipped: bool,
    /// The learning rate of the step, or of the last one of a window.
    pub learning_rate: f64,
    /// The number of input tokens, without padding.
    pub tokens: usize,
    /// The model FLOPs, as [`Model::training_flops`](crate::models::Model::training_flops) counts.
    pub model_flops: f64,
    /// The time from the end of the step before (or the start of the run) to the end of this one.
    pub seconds: f64,
    /// The time in which the compute lane stood idle.
    pub exposed_wait_seconds: f64,
    /// What delayed the step most.
    pub bottleneck: Bottleneck,
    /// The most bytes of device memory in use.
    pub device_peak_bytes: u64,
    /// With several devices: the device that computed longest, and its share of the step's time.
    pub slowest_device: Option<(u8, f64)>,
}

/// What delayed a step most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The kernels: the compute lane hardly waited.
    Compute,
    /// Transfers to the device.
    Upload,
    /// Transfers from the device.
    Download,
    /// Gathers and sums on the host, or the ring itself.
    Host,
    /// Updates of the weights.
    Update,
    /// The disk: checkpoints, or the EPS on file.
    Disk,
}

impl Bottleneck {
    /// The name in events and on pages.
    pub fn name(self) -> &'static str {
        ["compute", "upload", "download", "host", "update", "disk"][self as usize]
    }
}

/// The report of a whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The number of training steps, those before a resumed checkpoint included.
    pub steps: u64,
    /// The number of those steps that changed nothing, because their gradients were not finite.
    pub skipped: u64,
    /// The loss that balanced the experts in the last step, with its weight, if there was one.
    pub balance_loss: Option<f64>,
    /// The loss of the size of the routers' logits in the last step, with its weight, if there was
    /// one.
    pub z_loss: Option<f64>,
    /// The duration of the run, the last updates included.
    pub seconds: f64,
    /// The number of visits, of the device and of the host.
    pub visits: u64,
    /// Bytes that were uploaded to the device.
    pub bytes_uploaded: u64,
    /// Bytes that were downloaded from the device.
    pub bytes_downloaded: u64,
    /// Bytes of each device.
    pub links: Vec<LinkBytes>,
    /// Bytes of the host that were pinned for copies of GPUs.
    pub pinned_bytes: u64,
}
