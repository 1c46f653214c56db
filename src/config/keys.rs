//! Every key of the config, with its default and what it means: the schema and the reference page
//! are made from this file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{ByteSize, DataConfig, ScheduleConfig};
use crate::tensor::Dtype;

/// All of it.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What is trained.
    pub model: ModelConfig,
    /// On what.
    pub data: DataConfig,
    /// One step, and how many.
    pub step: StepConfig,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// The device.
    pub device: DeviceConfig,
    /// The order of visits.
    pub schedule: ScheduleConfig,
    /// Where boundaries wait.
    pub stash: StashConfig,
    /// Depths of the ring's pools.
    pub channels: ChannelsConfig,
    /// The host's eager param-server.
    pub eps: EpsConfig,
    /// Looking at what was kept aside.
    pub validation: ValidationConfig,
    /// What survives the run.
    pub checkpoint: CheckpointConfig,
    /// Where others look in.
    pub metrics: MetricsConfig,
    /// When a standstill is a failure.
    pub watchdog: WatchdogConfig,
    /// What is printed.
    pub log: LogConfig,
}

/// `[model]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A directory with `config.json` and `model.safetensors`, as transformers writes it.
    pub path: Option<PathBuf>,
    /// Whether the weights are random all the same: then the directory gives shape and tokenizer
    /// alone.
    pub random_weights: bool,
    /// Random weights of a known shape, `gpt-small` without a path: `gpt2` to `gpt2-xl`,
    /// `bert-base`, `bert-large`, `llama-1b`, `llama-7b`, `llama-70b`, `qwen`,
    /// `turing-nlg-17b`, `gpt3-175b`.
    pub preset: Option<String>,
    /// Transformer blocks. This and the sizes below override a preset's.
    pub layers: Option<usize>,
    /// Channels of the residual stream: a multiple of `heads`.
    pub hidden: Option<usize>,
    /// Attention heads.
    pub heads: Option<usize>,
    /// Heads of keys and values, where a family shares them; as many as `heads` when absent.
    pub kv_heads: Option<usize>,
    /// Channels of the feed-forward; 4 × `hidden` when that is given and this is not.
    pub intermediate: Option<usize>,
    /// Tokens there are.
    pub vocabulary: Option<usize>,
    /// The longest sequence.
    pub positions: Option<usize>,
    /// Probability of every dropout, in [0, 1); the model's own when absent.
    pub dropout: Option<f32>,
    /// What the model is trained to do; what its family does when absent.
    pub task: Option<Task>,
    /// Classes of `sequence-classification`: how many, 1 for a value, or a list of their names;
    /// what the model says when absent.
    pub labels: Option<Labels>,
}

/// The classes of whole sequences.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected how many there are, or a list of their names")]
pub enum Labels {
    /// How many; 1: a value.
    Count(usize),
    /// What each is called.
    Names(Vec<String>),
}

impl Labels {
    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Labels::Count(count) => *count,
            Labels::Names(names) => names.len(),
        }
    }
}

/// What the model is trained to do.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// To predict the next token.
    CausalLm,
    /// To predict tokens that are labelled.
    MaskedLm,
    /// To predict a class, or a value, of each sequence.
    SequenceClassification,
}

impl Task {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Task::CausalLm => "causal-lm",
            Task::MaskedLm => "masked-lm",
            Task::SequenceClassification => "sequence-classification",
        }
    }
}

/// `[step]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StepConfig {
    /// Sequences a step.
    pub batch: usize,
    /// Sequences of a micro-batch; the last of a step may have fewer.
    pub micro_batch: usize,
    /// Steps of the run; 100 when neither these nor `epochs` are given.
    pub steps: Option<u64>,
    /// Or how often it sees all of its data.
    pub epochs: Option<f64>,
    /// What all chance is drawn from: weights, order of data, dropout.
    pub seed: u64,
}

impl Default for StepConfig {
    fn default() -> StepConfig {
        StepConfig { batch: 32, micro_batch: 4, steps: None, epochs: None, seed: 0 }
    }
}

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule.
    pub kind: OptimizerKind,
    /// The learning rate at its highest.
    pub learning_rate: f64,
    /// What the learning rate does behind the warm-up.
    pub schedule: RateSchedule,
    /// Steps in which the learning rate rises from 0.
    pub warmup_steps: u64,
    /// The learning rate at the end of the run, unless it is constant.
    pub min_learning_rate: f64,
    /// Decay of the first and the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decay of parameters a step, times the learning rate.
    pub weight_decay: f64,
    /// Tensors that do not decay: kinds (`bias`, `norm`, `weight`), or patterns of names with `*`.
    pub no_decay: Vec<String>,
    /// The most the global gradient norm may be; a larger one is scaled down, exactly. Not clipped
    /// when absent: then each block is updated as soon as its gradient is complete.
    pub clip_norm: Option<f64>,
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig {
            kind: OptimizerKind::Adamw,
            learning_rate: 3e-4,
            schedule: RateSchedule::Constant,
            warmup_steps: 0,
            min_learning_rate: 0.0,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.01,
            no_decay: vec!["bias".into(), "norm".into()],
            clip_norm: None,
        }
    }
}

/// The update rules there are.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    Adamw,
}

/// What the learning rate does behind the warm-up.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "named after the shapes of optimizers::Decay")]
pub enum RateSchedule {
    Constant,
    Linear,
    Cosine,
    Wsd,
}

/// `[device]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// Where layers are computed.
    pub kind: DeviceKind,
    /// Which of several GPUs, as the driver counts them.
    pub ordinal: usize,
    /// A folder with CUDA's libraries, where they are not on the loader's path: that of the wheels
    /// `nvidia-cuda-nvrtc` and `nvidia-cublas`, say. It is searched with the folders in it.
    pub cuda_libraries: Option<PathBuf>,
    /// A folder where compiled kernels are kept from run to run; the command line has one in the user's
    /// cache.
    pub kernel_cache: Option<PathBuf>,
    /// A ceiling of the device's memory, in bytes or with a unit (`12GiB`); a plan above it is
    /// refused. `auto`: what the plan needs.
    pub memory: ByteSize,
    /// What weights and activations on the device are made of; masters, the optimizer's states and gradients
    /// are f32 whatever it is. `bf16` is for `cuda`: half the bytes of weights and activations, on the
    /// device, in the stash and over the link, and tensor cores; a master is then the bf16 that is published
    /// and what that leaves of it.
    pub dtype: Dtype,
    /// Threads; all cores when absent.
    pub threads: Option<usize>,
    /// Emulated: a transfer takes at least as long as over a link this fast, say `12GB/s`.
    pub link: Option<String>,
}

/// The devices there are.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The host's processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU; what it needs is loaded when it is asked for (`l2l doctor` says what is missing).
    Cuda,
}

/// `[stash]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StashConfig {
    /// Where activations wait between two visits: on the host (`auto` too), so that the device's
    /// memory does not grow with depth or batch; or on the device.
    pub place: StashPlace,
    /// What activations and their gradients are made of while they wait: `f32`, exact; `bf16`, of half
    /// the size on the host and over the link, each rounded. Intermediates that are kept and what heads
    /// hand on stay exact.
    pub dtype: StashDtype,
}

/// See [`StashConfig::dtype`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum StashDtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// Brain floats.
    Bf16,
}

/// See [`StashConfig::place`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum StashPlace {
    /// The host.
    #[default]
    Auto,
    /// In the device's memory, which then grows with depth.
    Device,
    /// In the host's.
    Host,
}

/// `[channels]`
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ChannelsConfig {
    /// Blocks on the device at once: 1 runs, 2 let a block arrive under the layer before it.
    pub weights: u32,
    /// Gradient accumulators on the device: 2 let one leave under the next layer.
    pub gradients: u32,
    /// Gradients on the host that wait to be added or applied.
    pub reduced: u32,
    /// Activations fetched ahead, beyond those in use.
    pub stash: u32,
}

impl Default for ChannelsConfig {
    fn default() -> ChannelsConfig {
        ChannelsConfig { weights: 2, gradients: 2, reduced: 2, stash: 4 }
    }
}

/// `[eps]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EpsConfig {
    /// Where masters and the optimizer's state are: in the host's memory, or in a file, of which the
    /// host sees a few blocks at a time.
    pub tier: EpsTier,
    /// The folder of the file, for one run at a time; when the updates of a step are done
    /// it holds a state that `--resume` goes on from.
    pub path: Option<PathBuf>,
    /// Emulated: an update takes at least as long as at so many bytes of gradient, say `1GB/s`.
    pub update_rate: Option<String>,
    /// Emulated: checkpoints are written, and a file is read and written, no faster than this, say
    /// `200MB/s`.
    pub disk_rate: Option<String>,
}

/// See [`EpsConfig::tier`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum EpsTier {
    /// The host's memory.
    #[default]
    Memory,
    /// A file.
    File,
}

/// `[watchdog]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct WatchdogConfig {
    /// The run fails, naming who waits for what, when nothing moved for this long.
    pub seconds: f64,
}

impl Default for WatchdogConfig {
    fn default() -> WatchdogConfig {
        WatchdogConfig { seconds: 60.0 }
    }
}

/// `[validation]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ValidationConfig {
    /// Steps between two looks; at the end only when absent.
    pub every_steps: Option<u64>,
    /// Batches of `step.batch` sequences at a look, or all there are if that is less.
    pub batches: u64,
    /// Training stops early when so many looks in a row brought nothing better.
    pub patience: Option<u64>,
}

impl Default for ValidationConfig {
    fn default() -> ValidationConfig {
        ValidationConfig { every_steps: None, batches: 8, patience: None }
    }
}

/// `[checkpoint]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Where checkpoints go; none are written when absent.
    pub directory: Option<PathBuf>,
    /// Steps between two; at the end only when absent.
    pub every_steps: Option<u64>,
    /// How many of the newest are kept, beside the best.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> CheckpointConfig {
        CheckpointConfig { directory: None, every_steps: None, keep: 2 }
    }
}

/// `[metrics]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// Address to serve metrics and a live page at, say `127.0.0.1:9464`.
    pub listen: Option<String>,
    /// Whether others than this machine may be listened to.
    pub public: bool,
    /// A file that the last metrics go to, for a run that ends between two scrapes.
    pub file: Option<PathBuf>,
    /// The run's name; made up when absent.
    pub run: Option<String>,
}

/// `[log]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Lines to read, or one JSON object a line.
    pub format: Format,
    /// A file that the JSON lines go to, whatever is printed; a run that goes on adds to it.
    pub file: Option<PathBuf>,
    /// A folder that an event file for TensorBoard goes to.
    pub tensorboard: Option<PathBuf>,
}

/// See [`LogConfig::format`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema, clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Lines to read.
    #[default]
    Pretty,
    /// One JSON object a line.
    Json,
}
