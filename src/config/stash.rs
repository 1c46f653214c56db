//! `[stash]`: the place and the data type of activations between forward and backward.

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use super::{Config, Deal, DeviceKind, Dtype, OnResume, ScheduleKind};
use crate::error::Error;

/// `[stash]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StashConfig {
    /// The place where activations wait between visits of layers. `host` keeps device memory
    /// independent of depth and batch size; `device` saves transfers, and device memory grows with
    /// both. `auto` is `host`, except on a GPU (or with `device.link`) in the relay, with a stash
    /// that does not round (`dtype`): there a micro-batch that two visits of a device meet one
    /// after the other stays on the device from the first to the second. That is so where a step is
    /// one micro-batch, and at layers that compute little, which take turns with a neighbour. They
    /// do so on one device of one process, if both have one block, the base is as it is, sequences
    /// are whole, and `channels.weights` and `channels.gradients` are 2 or more. It takes the
    /// memory of a few inputs of one micro-batch. Results are the same, bit for bit.
    pub place: StashPlace,
    /// Data type of activations and their gradients while they wait. `bf16` halves the stash and
    /// its transfers and rounds each value; `int8` keeps about a quarter: `block_size` values share
    /// a scale, and each is off by at most 1/254 of the largest of them. `f32` is exact. Saved
    /// activations inside a layer and the values of the output head stay exact. With
    /// `device.dtype` of 16 bits, `f32` and `bf16` keep the activations as they are.
    pub dtype: StashDtype,
    /// With `dtype = "int8"`: the number of values that share a scale, a divisor of the model's
    /// width.
    pub block_size: u32,
    /// For models with ReLU (OPT) that save activations (`schedule.recompute`): the largest share
    /// of a token's inputs to a feed-forward's ReLU that are positive. The stash then keeps a bit
    /// for each input and only the positive inputs, or the bits alone if the weights behind the
    /// ReLU are not trained. A micro-batch with a token above this share is recomputed, so results
    /// stay the same, bit for bit. When absent, the stash keeps all inputs. The run waits for a GPU
    /// each time that it unpacks.
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

/// The data type of the stash.
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

/// The place of the stash.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum StashPlace {
    /// On the host, but for what the next visit of a device reads.
    #[default]
    Auto,
    /// On the device, whose memory then grows with depth and batch size.
    Device,
    /// On the host.
    Host,
}

impl StashConfig {
    pub(super) const ON_RESUME: OnResume =
        OnResume::free("place relu_density").with_changes("block_size dtype");
}

impl Config {
    pub(super) fn check_stash(&self) -> Result<(), Error> {
        let on_cuda = self.device.kind == DeviceKind::Cuda;
        refuse(
            self.devices() > 1 && self.stash.place == StashPlace::Device,
            "stash.place",
            "cannot be \"device\" with several devices, which pass activations on through the \
             host: leave it out, or set \"host\"",
        )?;
        let problem =
            "cannot be \"device\" with device.kind = \"cuda\": leave it out, or set \"host\"";
        refuse(on_cuda && self.stash.place == StashPlace::Device, "stash.place", problem)?;
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
        Ok(())
    }

    /// True if a link is between the devices and the host: that of GPUs, or an emulated one.
    pub fn has_link(&self) -> bool {
        self.device.kind == DeviceKind::Cuda || self.device.link.is_some()
    }

    /// True if what the next visit of a device reads stays there, where the stash is across a link.
    pub(crate) fn hands_over(&self) -> bool {
        let is_relay = self.schedule.kind == ScheduleKind::Relay;
        self.has_link() && is_relay && self.stash.place == StashPlace::Auto
    }

    /// True if hidden states stay on the device where a layer has one micro-batch: the stash does
    /// not round them, and the next layer is on the same device.
    pub fn keeps_one_micro_batch(&self) -> bool {
        let is_dealt = self.devices() > 1 && self.parallel.deal == Deal::Layers;
        self.hands_over() && !self.stash_rounds() && !is_dealt
    }

    /// True if the stash rounds hidden states. It does not where it has the device's own dtype.
    pub(crate) fn stash_rounds(&self) -> bool {
        match self.stash.dtype {
            StashDtype::F32 => false,
            StashDtype::Bf16 => self.device.dtype == Dtype::F32,
            StashDtype::Int8 => true,
        }
    }
}
