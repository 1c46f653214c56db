//! `[device]`: the devices that compute, their memory and their data types.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::check::{must, rate, refuse};
use super::sizes::flops_per_second;
use super::{ByteSize, Config, OnResume};
use crate::error::Error;
use crate::tensor::Dtype;

/// `[device]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// The device that computes layers.
    pub kind: DeviceKind,
    /// The number of devices of kind `cpu` that share the work; 1 when absent. Each has its own
    /// memory and its own share of the threads. `parallel` says how they share the work. Results do
    /// not depend on it.
    pub count: Option<u32>,
    /// Number of the GPU, as the driver counts GPUs from 0.
    pub ordinal: usize,
    /// Numbers of several GPUs that share the work, in place of `ordinal`. `parallel` says how they
    /// share the work. Results do not depend on it.
    pub ordinals: Option<Vec<usize>>,
    /// Folder with CUDA's libraries if they are not on the loader's path, for instance the one of
    /// the Python wheels `nvidia-cuda-nvrtc` and `nvidia-cublas`. Its subfolders are searched, too.
    /// When it is absent, the wheels of the Python environment that has `l2l` are found.
    pub cuda_libraries: Option<PathBuf>,
    /// Folder that keeps compiled GPU kernels and the choices of `l2l bench --products` between
    /// runs. The command line sets it to a folder in the user's cache; the library keeps nothing
    /// when it is absent.
    pub kernel_cache: Option<PathBuf>,
    /// Ceiling of device memory, in bytes or with a unit (`12GiB`). A run that needs more is
    /// refused before it starts. `auto`: the memory of the machine is the ceiling. On a GPU that
    /// other programs use, set it: `schedule.recompute = "auto"` fills what is free.
    pub memory: ByteSize,
    /// Data type of weights and activations on the device, in the stash and over the link: `bf16`
    /// and `f16` halve them. A GPU computes with them on tensor cores. The CPU rounds to them where
    /// a GPU does and computes in f32, so it gains memory and transfers, and no speed. `f16` has a
    /// loss scale (`loss_scale`). Gradients of weights are f32, and so are master weights (see
    /// `optimizer.masters`).
    pub dtype: Dtype,
    /// Data type of gradients of weights on their way from the device to the host: `bf16` halves
    /// that transfer and rounds the gradient of each group of micro-batches. Sums are f32.
    pub gradient_dtype: GradientDtype,
    /// Threads for computing and for updates; all cores when absent. Results do not depend on it.
    pub threads: Option<usize>,
    /// For experiments on the CPU: emulates a slow link, so that each transfer takes at least as
    /// long as at this rate, for instance `12GB/s`.
    pub link: Option<String>,
    /// For experiments on the CPU: emulates a slower device, so that each kernel takes at least as
    /// long as at this rate, for instance `200GFLOP/s`.
    pub flop_rate: Option<String>,
}

/// The data type of gradients between device and host.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum GradientDtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// 16-bit brain floats.
    Bf16,
}

/// The kinds of device.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The host's processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU. CUDA is loaded at run time; `l2l doctor` says what is missing.
    Cuda,
}

impl DeviceConfig {
    pub(super) const ON_RESUME: OnResume = OnResume::free(
        "count cuda_libraries flop_rate kernel_cache kind link memory ordinal ordinals \
         threads",
    )
    .with_changes("dtype gradient_dtype");

    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { threads, count, .. } = *self;
        must(threads != Some(0), "device.threads", "at least 1")?;
        must(threads.is_none_or(|threads| threads <= 1024), "device.threads", "at most 1024")?;
        must(count != Some(0), "device.count", "at least 1")?;
        must(count.is_none_or(|count| count <= 255), "device.count", "at most 255")?;
        self.check_ordinals()?;
        let on_cuda = self.kind == DeviceKind::Cuda;
        let problem = "is for device.kind = \"cpu\": leave it out, device.ordinals says which GPUs";
        refuse(on_cuda && count.is_some(), "device.count", problem)?;
        let problem = "is only emulated on the CPU: leave it out, or set device.kind = \"cpu\"";
        refuse(on_cuda && self.link.is_some(), "device.link", problem)?;
        refuse(on_cuda && self.flop_rate.is_some(), "device.flop_rate", problem)
    }

    fn check_ordinals(&self) -> Result<(), Error> {
        let Some(ordinals) = &self.ordinals else { return Ok(()) };
        must(!ordinals.is_empty(), "device.ordinals", "at least one number")?;
        must(ordinals.len() <= 255, "device.ordinals", "of at most 255 numbers")?;
        if let Some(twice) = (1..ordinals.len()).find(|&at| ordinals[..at].contains(&ordinals[at]))
        {
            let problem = format_args!("has GPU {} twice", ordinals[twice]);
            return Err(Error::config("device.ordinals", problem));
        }
        let problem = "is for device.kind = \"cuda\": leave it out, or set device.count";
        refuse(self.kind == DeviceKind::Cpu, "device.ordinals", problem)?;
        let problem = "is set together with device.ordinals: set only one of them";
        refuse(self.ordinal != 0, "device.ordinal", problem)
    }

    /// The ordinals of the GPUs that compute, if the device is a GPU.
    pub fn gpus(&self) -> Vec<usize> {
        self.ordinals.clone().unwrap_or_else(|| vec![self.ordinal])
    }
}

impl Config {
    /// `device.link` in bytes a second. A text that is no rate is an error.
    pub fn link_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("device.link", self.device.link.as_deref())
    }

    /// `device.flop_rate` in FLOP/s. A text that is no rate is an error.
    pub fn flops_per_second(&self) -> Result<Option<f64>, Error> {
        const KEY: &str = "device.flop_rate";
        let Some(text) = self.device.flop_rate.as_deref() else { return Ok(None) };
        let must = || format!("must be a rate such as \"200GFLOP/s\", not {text:?}");
        flops_per_second(text).map(Some).ok_or_else(|| Error::config(KEY, must()))
    }

    /// The number of devices.
    pub fn devices(&self) -> u32 {
        match self.device.kind {
            DeviceKind::Cpu => self.device.count.unwrap_or(1),
            DeviceKind::Cuda => self.device.gpus().len() as u32,
        }
    }

    /// The devices' names in metrics: `cpu` with the device's number, or `cuda` with its ordinal.
    pub fn device_names(&self) -> Vec<String> {
        match self.device.kind {
            DeviceKind::Cpu => (0..self.devices()).map(|device| format!("cpu{device}")).collect(),
            DeviceKind::Cuda => {
                self.device.gpus().into_iter().map(|ordinal| format!("cuda{ordinal}")).collect()
            }
        }
    }
}
