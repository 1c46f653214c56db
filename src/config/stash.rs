//! `[stash]`: what waits between forward and backward, where, and as what.

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use super::{Config, DeviceKind};
use crate::error::Error;
use crate::tensor::Dtype;

/// `[stash]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StashConfig {
    /// Where activations wait between forward and backward. `host` (and `auto`) keeps device memory
    /// independent of depth and batch size; `device` saves transfers, and its memory grows with
    /// both.
    pub place: StashPlace,
    /// Data type of activations and their gradients while they wait. `bf16` halves the stash and
    /// its transfers and rounds each value; `int8` keeps about a quarter: `block_size` values share
    /// a scale, and each is off by at most 1/254 of the largest of them. `f32` is exact. Saved
    /// activations inside a layer and the values of the output head stay exact. On `cuda` it
    /// follows `device.dtype`.
    pub dtype: StashDtype,
    /// With `dtype = "int8"`: values that share a scale, a divisor of the model's width.
    pub block_size: u32,
    /// For models with ReLU (OPT) whose saved activations wait here (`schedule.recompute`): of what
    /// a feed-forward's ReLU reads, a bit for each number waits and the positive numbers, up to
    /// this share of each token's; bits alone where the weights behind the ReLU are not trained.
    /// Results stay the same, bit for bit: a micro-batch with a token that has more is recomputed,
    /// so the share is that of the token with most. All
    /// numbers wait when it is absent. For the CPU device.
    pub relu_density: Option<f64>,
}

impl Default for StashConfig {
    fn default() -> StashConfig {
        StashConfig {
            place: StashPlace::Auto,
            dtype: StashDtype::F32,
            block_size: 64,
            relu_density: None,
        }
    }
}

/// See [`StashConfig::dtype`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum StashDtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// 16-bit brain floats.
    Bf16,
    /// Blocks of bytes, each with a scale.
    Int8,
}

/// See [`StashConfig::place`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum StashPlace {
    /// On the host.
    #[default]
    Auto,
    /// On the device, whose memory then grows with depth and batch size.
    Device,
    /// On the host.
    Host,
}

impl Config {
    pub(super) fn check_stash(&self) -> Result<(), Error> {
        let on_cuda = self.device.kind == DeviceKind::Cuda;
        let in_bf16 = self.device.dtype == Dtype::Bf16;
        refuse(
            self.devices() > 1 && self.stash.place == StashPlace::Device,
            "stash.place",
            "must be \"host\" with several devices, which pass activations on through it",
        )?;
        refuse(
            on_cuda && self.stash.place == StashPlace::Device,
            "stash.place",
            "must be \"host\" with device.kind = \"cuda\"",
        )?;
        refuse(
            on_cuda && !in_bf16 && self.stash.dtype == StashDtype::Bf16,
            "stash.dtype",
            "follows device.dtype with device.kind = \"cuda\": set device.dtype = \"bf16\", \
             or leave it out",
        )?;
        refuse(
            on_cuda && self.stash.dtype == StashDtype::Int8,
            "stash.dtype",
            "is int8, which is for device.kind = \"cpu\": set device.dtype = \"bf16\", which the \
             stash of a GPU follows",
        )?;
        must(self.stash.block_size >= 1, "stash.block_size", "at least 1")?;
        let density = self.stash.relu_density;
        let is_share = density.is_none_or(|density| density > 0.0 && density <= 1.0);
        must(is_share, "stash.relu_density", "in (0, 1]")?;
        refuse(
            density.is_some() && self.schedule.recompute.keep().is_none(),
            "stash.relu_density",
            "has no effect while everything is recomputed: set schedule.recompute = false or \
             \"attention\", or leave it out",
        )?;
        refuse(
            density.is_some() && on_cuda,
            "stash.relu_density",
            "is for device.kind = \"cpu\": leave it out",
        )?;
        Ok(())
    }
}
