//! Every key of the config, its default and its meaning. The JSON schema and CONFIG.md are
//! generated from this file, so the doc comments here are what users read.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    ByteSize, CheckpointConfig, CompressionConfig, DataConfig, DepthConfig, LossScaleConfig,
    NonFinite, OptimizerConfig, ParallelConfig, ScheduleConfig, StashConfig, TrainConfig,
};
use crate::models::Shape;
use crate::tensor::Dtype;

/// A whole config file.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model to train: its weights or its shape, and its task.
    pub model: ModelConfig,
    /// The text or tokens to train on, and how they become sequences.
    pub data: DataConfig,
    /// The size of a training step, and the number of steps.
    pub step: StepConfig,
    /// What is trained of the model: some of its tensors, or adapters.
    pub train: TrainConfig,
    /// The optimizer and its learning rate.
    pub optimizer: OptimizerConfig,
    /// The factor of the loss on a device of f16.
    pub loss_scale: LossScaleConfig,
    /// The device that computes the layers.
    pub device: DeviceConfig,
    /// The order in which the device visits layers, and what backward recomputes.
    pub schedule: ScheduleConfig,
    /// Layers that training steps leave out at random.
    pub depth: DepthConfig,
    /// How several devices share a step.
    pub parallel: ParallelConfig,
    /// How gradients are compressed.
    pub compression: CompressionConfig,
    /// The activations that wait between forward and backward.
    pub stash: StashConfig,
    /// The number of slots of each kind. More slots allow more overlap and take more memory.
    pub channels: ChannelsConfig,
    /// The eager param-server (EPS): weights and optimizer state on the host.
    pub eps: EpsConfig,
    /// The loss on data that is not trained on, measured during training.
    pub validation: ValidationConfig,
    /// Checkpoints: complete states that a later run can resume from.
    pub checkpoint: CheckpointConfig,
    /// What `l2l export` writes.
    pub export: ExportConfig,
    /// Metrics for Prometheus, and the live page.
    pub metrics: MetricsConfig,
    /// The watchdog: it ends a run in which nothing moves.
    pub watchdog: WatchdogConfig,
    /// What is printed, and which log files are written.
    pub log: LogConfig,
}

/// `[model]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A directory with `config.json` and `model.safetensors`, as transformers writes it. The
    /// model's sizes, weights and tokenizer come from there.
    pub path: Option<PathBuf>,
    /// With `path`: start from random weights, and take only the shape and the tokenizer from the
    /// directory. Without `path` the weights are always random.
    pub random_weights: bool,
    /// Reads `path`, and adapters, also where the directory is a checkpoint that was changed after
    /// it was written, or has weights that are infinite or NaN. A run never resumes from a changed
    /// checkpoint.
    pub unsealed: bool,
    /// A known shape with random weights; `gpt-small` when neither this nor `path` is set. Presets:
    /// `gpt2` to `gpt2-xl`, `bert-base`, `bert-large`, `llama-1b`, `llama-7b`, `llama-70b`, `qwen`,
    /// `turing-nlg-17b`, `gpt3-175b`.
    pub preset: Option<String>,
    /// Number of transformer blocks. This key and the sizes below override those of the preset.
    pub layers: Option<usize>,
    /// The most transformer blocks that the model can have: `depth.stack_at` and
    /// `Trainer::add_layers` add some during a run. When absent, as many as it begins with.
    pub max_layers: Option<usize>,
    /// Width of the residual stream: a multiple of `heads`.
    pub hidden: Option<usize>,
    /// Number of attention heads.
    pub heads: Option<usize>,
    /// Number of key and value heads, in families with grouped-query attention; equal to `heads`
    /// when absent.
    pub kv_heads: Option<usize>,
    /// Width of the feed-forward layer; 4 × `hidden` if `hidden` is set and this key is not.
    pub intermediate: Option<usize>,
    /// Number of tokens in the vocabulary.
    pub vocabulary: Option<usize>,
    /// Length of the longest sequence that the model can read, in tokens.
    pub positions: Option<usize>,
    /// Probability of every dropout, in [0, 1); the model's own when absent.
    pub dropout: Option<f32>,
    /// What the model is trained to predict; when absent, what its family usually predicts.
    pub task: Option<Task>,
    /// Classes of `sequence-classification` and `token-classification`: their number, or a list of
    /// their names. 1 class of sequences means one real value (regression). When absent, the
    /// model's own, else 2.
    pub labels: Option<Labels>,
}

/// The classes of sequences or tokens, or one value.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected the number of classes, or a list of their names")]
pub enum Labels {
    /// Their number; 1: one real value.
    Count(usize),
    /// Their names.
    Names(Vec<String>),
}

impl Labels {
    /// The number of classes.
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
    /// To predict masked tokens.
    MaskedLm,
    /// To predict a class, or a real value, for each sequence: of its first position in an encoder,
    /// of its last in a decoder.
    SequenceClassification,
    /// To predict a class for each token.
    TokenClassification,
}

impl Task {
    /// Its name in config files.
    pub fn name(self) -> &'static str {
        match self {
            Task::CausalLm => "causal-lm",
            Task::MaskedLm => "masked-lm",
            Task::SequenceClassification => "sequence-classification",
            Task::TokenClassification => "token-classification",
        }
    }
}

/// `[step]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StepConfig {
    /// Sequences in one step. Device memory does not grow with it while the stash is on the host.
    pub batch: usize,
    /// Sequences that the device computes at once; the last micro-batch of a step may have fewer.
    /// It decides how much memory activations take on the device.
    pub micro_batch: usize,
    /// Positions of one sequence that a layer computes at once, at most: a decoder computes a
    /// longer sequence in chunks of as many. A multiple of 128. Workspace on the device is for
    /// `micro_batch` sequences of so many positions, or of the longest sequence if that is
    /// shorter. The gradient of each weight is added to once for each chunk.
    pub chunk_positions: usize,
    /// Number of steps of the run; 100 when neither this nor `epochs` is set.
    pub steps: Option<u64>,
    /// Length of the run in passes over the training data, instead of `steps`; 0.5 is half a pass.
    pub epochs: Option<f64>,
    /// Seed of all random numbers: initial weights, order of the data, masked tokens, dropout. The
    /// same seed gives the same run, bit for bit.
    pub seed: u64,
    /// What a step does whose loss or gradient is infinite or not a number: `stop` ends the run;
    /// `skip` changes nothing and counts the step (gradients wait on the host until the norm is
    /// known, as with `optimizer.clip_norm`); `continue` updates the weights all the same.
    pub non_finite: NonFinite,
}

impl Default for StepConfig {
    fn default() -> StepConfig {
        StepConfig {
            batch: 32,
            micro_batch: 4,
            chunk_positions: Shape::CHUNK_POSITIONS,
            steps: None,
            epochs: None,
            seed: 0,
            non_finite: NonFinite::Stop,
        }
    }
}

/// `[device]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// The device that computes layers.
    pub kind: DeviceKind,
    /// How many devices of kind `cpu` share the work; 1 when absent. Each has memory and a share of
    /// the threads of its own. `parallel` says how they share it. Results do not depend on it.
    pub count: Option<u32>,
    /// Number of the GPU, as the driver counts them from 0.
    pub ordinal: usize,
    /// Numbers of several GPUs that share the work, in place of `ordinal`. `parallel` says how they
    /// share it. Results do not depend on it.
    pub ordinals: Option<Vec<usize>>,
    /// Folder with CUDA's libraries if they are not on the loader's path, for instance the one of
    /// the Python wheels `nvidia-cuda-nvrtc` and `nvidia-cublas`. Its subfolders are searched, too.
    pub cuda_libraries: Option<PathBuf>,
    /// Folder that keeps compiled GPU kernels between runs, and what `l2l bench --products` has
    /// chosen. The command line sets it to a folder in the user's cache; the library keeps none
    /// when it is absent.
    pub kernel_cache: Option<PathBuf>,
    /// Ceiling of device memory, in bytes or with a unit (`12GiB`). A run that needs more is
    /// refused before it starts. `auto`: no ceiling but the memory of the machine.
    pub memory: ByteSize,
    /// Data type of weights and activations on the device, in the stash and over the link: `bf16`
    /// and `f16` halve them. A GPU computes with them on tensor cores. The CPU rounds to them where
    /// a GPU does and computes in f32, so it gains memory and transfers, and no speed. `f16` has a
    /// loss scale (`loss_scale`). Gradients of weights are f32, and so
    /// are master weights (see `optimizer.masters`).
    pub dtype: Dtype,
    /// Data type of gradients of weights on their way from the device to the host: `bf16` halves
    /// that transfer and rounds the gradient of each group of micro-batches. Sums are f32. For the
    /// CPU device.
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

/// See [`DeviceConfig::gradient_dtype`].
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

/// `[channels]`
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ChannelsConfig {
    /// Weight slots on the device. 1 works; 2 let the next block arrive while a layer computes.
    pub weights: u32,
    /// Gradient slots on the device. 2 let one gradient leave while the next layer computes.
    pub gradients: u32,
    /// Slots on the host for gradients that wait to be added or applied. 2 let one arrive while
    /// another is used.
    pub reduced: u32,
    /// Slots for activations that are fetched ahead, beyond those in use.
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
    /// Where weights, optimizer state and waiting gradients live: `memory`, or a `file` of which a
    /// few blocks at a time are in memory.
    pub tier: EpsTier,
    /// Folder of the file of `tier = "file"`. One run uses it at a time, and `--resume` continues
    /// from it without a checkpoint. Of several processes each has a folder of its own there.
    pub path: Option<PathBuf>,
    /// For experiments: emulates a slow optimizer, so that each update takes at least as long as at
    /// this many bytes of gradient a second, for instance `1GB/s`.
    pub update_rate: Option<String>,
    /// For experiments: emulates a slow disk for checkpoints and for `tier = "file"`, for instance
    /// `200MB/s`.
    pub disk_rate: Option<String>,
}

/// See [`EpsConfig::tier`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum EpsTier {
    /// In host memory.
    #[default]
    Memory,
    /// In a file.
    File,
}

/// `[watchdog]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct WatchdogConfig {
    /// Seconds without any progress after which the run fails and reports which actor waits for
    /// what. Raise it if single operations take longer than the default of a minute.
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
    /// Steps between validations; when absent there is one, at the end of the run.
    pub every_steps: Option<u64>,
    /// Batches of `step.batch` sequences in a validation; fewer if the validation set is smaller.
    pub batches: u64,
    /// Number of validations in a row without a better one after which training stops early; never
    /// when absent.
    pub patience: Option<u64>,
    /// What the best checkpoint and `patience` are decided by: `loss`, or for a model that
    /// classifies sequences `accuracy`, `f1` or `matthews`, or for one that predicts a value
    /// `pearson` or `spearman`. Of several validation sets the first one decides.
    pub best: BestMetric,
}

/// See [`ValidationConfig::best`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum BestMetric {
    /// The loss: the least is the best.
    #[default]
    Loss,
    /// The share of sequences that get the right class.
    Accuracy,
    /// F1.
    F1,
    /// Matthews' correlation.
    Matthews,
    /// Pearson's correlation.
    Pearson,
    /// Spearman's correlation.
    Spearman,
}

impl BestMetric {
    /// Its name in config files and events.
    pub fn name(self) -> &'static str {
        ["loss", "accuracy", "f1", "matthews", "pearson", "spearman"][self as usize]
    }

    /// Whether less is better.
    pub fn is_loss(self) -> bool {
        self == BestMetric::Loss
    }
}

impl Default for ValidationConfig {
    fn default() -> ValidationConfig {
        ValidationConfig { every_steps: None, batches: 8, patience: None, best: BestMetric::Loss }
    }
}

/// `[export]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ExportConfig {
    /// The dtype of the weights that are written; `source`: that of `model.path`, or f32 without
    /// one.
    pub dtype: WeightDtype,
    /// The most bytes of a file of weights, for instance `2GB`; more weights are written to several
    /// files and an index. `auto`: 5 GB, as transformers has it.
    pub shard_size: ByteSize,
}

/// See [`ExportConfig::dtype`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WeightDtype {
    /// That of the model that training began with.
    #[default]
    Source,
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
}

/// `[metrics]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// Address that serves metrics and a live page, for instance `127.0.0.1:9464`; nothing is
    /// served when absent.
    pub listen: Option<String>,
    /// Allows `listen` to be an address that other machines can reach. Off by default, because
    /// there is no password.
    pub public: bool,
    /// Names of this machine that `listen` answers to, such as `["gpu1.lab"]`, for a browser or a
    /// Prometheus that does not use the IP address or `localhost`, which need no entry. Other names
    /// are refused: a site whose name points at this machine could read the run.
    pub hosts: Vec<String>,
    /// File that receives the final metrics, for a run that ends between two scrapes.
    pub file: Option<PathBuf>,
    /// Name of the run, a label of every metric; a random name when absent.
    pub run: Option<String>,
}

/// `[log]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Format of what is printed: lines for people, or one JSON object a line.
    pub format: Format,
    /// File that receives the JSON lines, whatever is printed. A resumed run appends to it.
    pub file: Option<PathBuf>,
    /// Folder that receives an event file for TensorBoard.
    pub tensorboard: Option<PathBuf>,
}

/// See [`LogConfig::format`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema, clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Lines for people.
    #[default]
    Pretty,
    /// One JSON object a line.
    Json,
}
