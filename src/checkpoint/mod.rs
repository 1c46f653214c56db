//! Checkpoints: everything that a run resumes from, in a directory that is complete or not there.
//!
//! `config.json` and `model.safetensors` are in transformers' format, so the directory loads there
//! as it is. `optimizer.safetensors` has the optimizer's states under the same names, and
//! `l2l.json` the record of the run, with the digests of all files. A directory is written under
//! another name, flushed to the disk, and renamed.

mod directory;
mod draft;
mod hold;
mod identity;
mod keeper;
mod record;
mod space;

use serde::{Deserialize, Serialize};

pub(crate) use directory::{discard, link};
pub(crate) use draft::Draft;
pub use hold::Hold;
pub(crate) use identity::Identity;
pub use keeper::Keeper;
pub(crate) use record::{Checkpoint, check_seal, recall, remembered, remembered_layers};
pub use space::Space;

use crate::config::BestMetric;
use crate::optimizers::ScaleState;

/// How far a run is, and its validations. Checkpoints keep it beside the parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// The number of training steps done.
    pub step: u64,
    /// The best validation so far.
    pub best: Option<Best>,
    /// The metric of the best validation, and the fingerprint of its data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measure: Option<String>,
    /// The number of validations since the best one.
    #[serde(rename = "looks_since")]
    pub validations_since: u64,
    /// The step of the last validation.
    #[serde(rename = "looked_at")]
    pub validated_at: Option<u64>,
    /// The layers of the model, if the run can add some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerCount>,
    /// The number of steps that changed nothing, because their gradients were not finite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// The loss scale, if the run has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<ScaleState>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The number of layers of a model to which a run adds some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCount {
    /// The number when the run began.
    pub first: usize,
    /// The number now.
    pub now: usize,
}

/// The best validation, by its loss or by the metric that `validation.best` names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// The training step after which it ran.
    pub step: u64,
    /// The loss, or the metric.
    #[serde(alias = "loss")]
    pub value: f64,
}

impl Progress {
    /// Sets the metric and the data of the next validations. Returns true if they are others than
    /// those of the best validation, whose value cannot be compared: the best is then searched
    /// anew.
    pub(crate) fn measure_by(&mut self, metric: BestMetric, data: &str) -> bool {
        let measure = format!("{} on {data}", metric.name());
        let before = self.measure.replace(measure);
        let is_other = self.best.is_some() && before.is_some() && before != self.measure;
        if is_other {
            self.best = None;
            self.validations_since = 0;
        }
        is_other
    }

    /// Records the value of a validation. A lower value is better if `metric` is the loss, else a
    /// higher one. Returns true if it is the best so far.
    pub fn note(&mut self, metric: BestMetric, value: f64) -> bool {
        self.validated_at = Some(self.step);
        let is_better = |best: Best| match metric.is_loss() {
            true => value < best.value,
            false => value > best.value,
        };
        let is_best = value.is_finite() && self.best.is_none_or(is_better);
        if is_best {
            self.best = Some(Best { step: self.step, value });
            self.validations_since = 0;
        } else {
            self.validations_since += 1;
        }
        is_best
    }
}
