//! `[loss_scale]` and the other keys of precision: how master weights are stored, and what happens
//! if a loss or a gradient is not finite.

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use super::{Config, EpsTier, OnResume, ScheduleConfig};
use crate::error::Error;
use crate::models::MasterFormat;
use crate::optimizers::LossScale;
use crate::tensor::Dtype;

/// How masters are stored ([`OptimizerConfig::masters`](super::OptimizerConfig::masters)).
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MasterDtype {
    /// f32, for a device of bf16 in two halves.
    #[default]
    Auto,
    /// f32, beside the copy that is sent to a device of 16 bits.
    F32,
    /// f32 in two halves, one of which is sent to a device of bf16.
    Split,
    /// bf16, rounded at random.
    Bf16,
}

/// What happens if the loss or the gradient of a step is infinite or not a number.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum NonFinite {
    /// The run ends.
    #[default]
    Stop,
    /// The step changes nothing, and counts.
    Skip,
    /// The step updates the weights.
    Continue,
}

/// `[loss_scale]`
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LossScaleConfig {
    /// `dynamic`: the factor rises while gradients are finite, and falls when they are not, as in
    /// PyTorch's `GradScaler`. `fixed`: the factor stays `initial`. `none`: the loss is not scaled.
    /// `auto`: `dynamic` if `device.dtype` is `f16`, else `none`. With a factor, a step whose
    /// gradient is not finite changes nothing.
    pub kind: LossScaleKind,
    /// The factor at the start.
    pub initial: f64,
    /// Multiplies the factor after `growth_interval` steps in a row with finite gradients.
    pub growth_factor: f64,
    /// Multiplies the factor after a step whose gradient is not finite.
    pub backoff_factor: f64,
    /// Number of steps in a row with finite gradients after which the factor grows.
    pub growth_interval: u64,
}

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LossScaleKind {
    /// Dynamic for f16.
    #[default]
    Auto,
    /// The factor follows the gradients.
    Dynamic,
    /// The factor stays the same.
    Fixed,
    /// The loss is not scaled.
    None,
}

impl Default for LossScaleConfig {
    fn default() -> LossScaleConfig {
        LossScaleConfig {
            kind: LossScaleKind::Auto,
            initial: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
        }
    }
}

impl LossScaleConfig {
    pub(super) const ON_RESUME: OnResume =
        OnResume::free("").with_changes("backoff_factor growth_factor growth_interval");

    fn check(&self) -> Result<(), Error> {
        let singles = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
        let is_single = singles.contains(&self.initial);
        must(is_single, "loss_scale.initial", "above 0, and a number that f32 has")?;
        let grows = self.growth_factor.is_finite() && self.growth_factor > 1.0;
        must(grows, "loss_scale.growth_factor", "above 1")?;
        let falls = self.backoff_factor > 0.0 && self.backoff_factor < 1.0;
        must(falls, "loss_scale.backoff_factor", "in (0, 1)")?;
        must(self.growth_interval >= 1, "loss_scale.growth_interval", "at least 1")
    }
}

impl Config {
    /// How the host stores masters.
    ///
    /// # Errors
    /// A device of `device.dtype` cannot use masters of `optimizer.masters`.
    pub fn master_format(&self) -> Result<MasterFormat, Error> {
        let dtype = self.device.dtype;
        let masters = self.optimizer.masters;
        match (dtype, masters) {
            (Dtype::F32, MasterDtype::Auto | MasterDtype::F32) => Ok(MasterFormat::F32),
            (Dtype::Bf16, MasterDtype::Auto | MasterDtype::Split) => Ok(MasterFormat::Split),
            (Dtype::Bf16, MasterDtype::Bf16) => Ok(MasterFormat::Rounded),
            (Dtype::Bf16 | Dtype::F16, MasterDtype::F32) | (Dtype::F16, MasterDtype::Auto) => {
                Ok(MasterFormat::Copied(dtype))
            }
            (_, MasterDtype::Split | MasterDtype::Bf16) => {
                let problem = format_args!(
                    "is {}, which is for a device of bf16, and device.dtype is {dtype}: set \
                     \"f32\" or device.dtype = \"bf16\"",
                    if masters == MasterDtype::Split { "split" } else { "bf16" }
                );
                Err(Error::config("optimizer.masters", problem))
            }
        }
    }

    /// The loss scale at the start of a run, if there is one.
    pub fn loss_scale(&self) -> Option<LossScale> {
        let LossScaleConfig { kind, initial, .. } = self.loss_scale;
        let is_dynamic = match kind {
            LossScaleKind::None => return None,
            LossScaleKind::Auto if self.device.dtype != Dtype::F16 => return None,
            LossScaleKind::Auto | LossScaleKind::Dynamic => true,
            LossScaleKind::Fixed => false,
        };
        let LossScaleConfig { growth_factor, backoff_factor, growth_interval, .. } =
            self.loss_scale;
        let growth = is_dynamic.then_some((growth_factor, growth_interval));
        let backoff_factor = if is_dynamic { backoff_factor } else { 1.0 };
        Some(LossScale { scale: initial as f32, finite_steps: 0, growth, backoff_factor })
    }

    /// The reaction to a loss or a gradient that is not finite. With a loss scale the step is
    /// skipped.
    pub(crate) fn non_finite(&self) -> NonFinite {
        if self.loss_scale().is_some() { NonFinite::Skip } else { self.step.non_finite }
    }

    /// True if updates wait until the norm of all gradients is known, or with a delay until the
    /// step has ended. Those of a window run inside it.
    pub(crate) fn defers(&self) -> bool {
        let ScheduleConfig { kind, delay, .. } = self.schedule;
        let is_delayed = delay > 0 && kind.of_windows().is_none();
        self.optimizer.clips() || self.non_finite() == NonFinite::Skip || is_delayed
    }

    pub(super) fn check_precision(&self) -> Result<(), Error> {
        self.loss_scale.check()?;
        self.master_format()?;
        let is_half = self.device.dtype == Dtype::F16;
        let problem = "is none, and device.dtype is f16, in which small gradients become 0: set \
                       \"dynamic\", or device.dtype = \"bf16\", which needs no scale";
        refuse(is_half && self.loss_scale.kind == LossScaleKind::None, "loss_scale.kind", problem)?;
        refuse(
            self.loss_scale().is_some() && self.step.non_finite == NonFinite::Continue,
            "step.non_finite",
            "is continue, and a loss scale skips steps whose gradient is not finite: leave it out",
        )
    }

    /// Refuses keys that contradict each other in a run that trains.
    pub(crate) fn check_training(&self) -> Result<(), Error> {
        self.check_compressed_training()?;
        refuse(
            self.non_finite() == NonFinite::Skip && self.eps.tier == EpsTier::File,
            "eps.tier",
            "is file, and steps that change nothing (device.dtype = \"f16\", loss_scale, \
             step.non_finite = \"skip\") need the model in memory: set \"memory\", or \
             device.dtype = \"bf16\"",
        )
    }
}
