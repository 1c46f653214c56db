//! The arguments of each command. `--help` shows their doc comments.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use l2l::config::Format;
use l2l::devices::KernelGroup;

/// Trains transformers too large for the device, one layer at a time.
#[derive(Parser)]
#[command(name = "l2l", version)]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Subcommand)]
pub(super) enum Command {
    /// Train a model; without a config, a small GPT on this project's own text.
    Train(TrainArguments),
    /// Show the sequences that the model will see, and how long they are.
    Data(DataArguments),
    /// Evaluate a run's model, or the one that the config loads, on the validation set.
    Eval(EvalArguments),
    /// Write the embeddings of texts, one JSON object a line: `{"text", "embedding"}`.
    Embed(EmbedArguments),
    /// Write the scores of a reward model or of a reranker, one JSON object a line: `{"record",
    /// "score"}`.
    Score(ScoreArguments),
    /// Continue text with a run's model, or with the one that the config loads.
    Generate(GenerateArguments),
    /// Talk with a run's model, or with the one that the config loads: a message a line.
    Chat(ChatArguments),
    /// Report the memory and the traffic of a run without starting it.
    Plan(PlanArguments),
    /// Train a few steps and report the speed, beside that of this machine's matrix product.
    Bench(BenchArguments),
    /// Try channel depths, micro-batches and places of the stash, and write the best config.
    Tune(TuneArguments),
    /// Write the Grafana dashboards, Prometheus rules and alerts that belong to this program.
    Dashboards {
        /// The folder to write to.
        #[arg(long, value_name = "DIRECTORY")]
        to: PathBuf,
        /// The address of the folder `runbooks`, where people can open it: alerts link its pages
        /// [default: the path in the repository].
        #[arg(long, value_name = "URL")]
        runbooks: Option<String>,
    },
    /// Write a run's model, or the one that the config loads, to a directory for other tools.
    Export(Export),
    /// Report this machine's cores, memory and rates, and the libraries that CUDA needs.
    Doctor(DoctorArguments),
    /// Print the resolved config, its JSON schema, or the reference of all keys.
    Config(ConfigArguments),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual pages of all commands, for `man`.
    Man {
        /// The folder to write to, such as ~/.local/share/man/man1.
        #[arg(long, value_name = "DIRECTORY")]
        to: PathBuf,
    },
}

#[derive(Args)]
pub(super) struct Common {
    /// The config file; every key has a default. Without one, commands about a run use the built-in
    /// config (examples/built_in.toml), and `generate`, `chat` and `export` the defaults.
    pub(super) config: Option<PathBuf>,
    /// Set a key; overrides the file and the environment. May be repeated. `KEY=` gives the key
    /// its default back, `SECTION=` all keys of a section.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
    /// Format of the output: the key `log.format`.
    #[arg(long, value_enum)]
    pub(super) format: Option<Format>,
}

#[derive(Args)]
pub(super) struct TrainArguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// Continue the last run: from the newest checkpoint in `checkpoint.directory`, or from
    /// `eps.path` if its state is at least as new.
    #[arg(long)]
    pub(super) resume: bool,
    /// Continue the last run although keys have other values: the learning rate, the number of
    /// steps or epochs, batch and micro-batch, the data and others. Weights and optimizer states
    /// are kept, and each change is reported. Without it, a run with changed keys is refused.
    #[arg(long)]
    pub(super) resume_with_changes: bool,
    /// Fail where the newest checkpoint, or the state in `eps.path`, is damaged. Without it, the
    /// run resumes from the newest checkpoint that is not, with a warning.
    #[arg(long)]
    pub(super) strict: bool,
    #[command(flatten)]
    pub(super) observe: ObserveArguments,
}

#[derive(Args)]
pub(super) struct BenchArguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// Leave out all copies between host and device after the first step, to show their cost. The
    /// losses are then meaningless.
    #[arg(long)]
    pub(super) without_copies: bool,
    /// Also measure the device's kernels: the CPU's beside its matrix product and its memory; of
    /// a GPU, how long each takes in the steps, which are slower then.
    #[arg(long)]
    pub(super) kernels: bool,
    /// Also time the algorithms that a GPU's library has for each matrix product of the steps, and
    /// store the fastest in `device.kernel_cache`. Later runs on this GPU take them, and have other
    /// bits. Without this table, a run takes the library's first algorithm.
    #[arg(long)]
    pub(super) products: bool,
    /// Also report the SHA-256 of all weights after the last step, as `train` does. It takes a pass
    /// over the whole model, by one thread.
    #[arg(long)]
    pub(super) digest: bool,
    /// Fit rates to short runs of this config, and write them to this file for `l2l plan --rates`.
    /// Nothing else is measured.
    #[arg(
        long, value_name = "FILE",
        conflicts_with_all = ["without_copies", "kernels", "products", "digest"]
    )]
    pub(super) rates: Option<PathBuf>,
}

#[derive(Args, Default)]
pub(super) struct ObserveArguments {
    /// Serve metrics and a live page at this address: the key `metrics.listen`.
    #[arg(long, value_name = "ADDRESS")]
    pub(super) metrics: Option<String>,
    /// Write the timeline of all operations to this file, for Perfetto or Chrome.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Write a report, `report.html`, to this folder at the end.
    #[arg(long, value_name = "DIRECTORY")]
    pub(super) report: Option<PathBuf>,
}

#[derive(Args)]
pub(super) struct PlanArguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// Draw a step, simulated in virtual time, to this SVG file.
    #[arg(long, value_name = "FILE")]
    pub(super) draw: Option<PathBuf>,
    /// Write the same step to this file, for Perfetto or Chrome. With `--machine`, that of the
    /// first row.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Exit with status 2 if the run does not fit. Without it, a plan that was made is a success.
    #[arg(long)]
    pub(super) check: bool,
    /// Plan for the first of COUNT processes, which `mpirun` or `srun` starts.
    #[arg(long, value_name = "COUNT", default_value_t = NonZeroU32::MIN)]
    pub(super) ranks: NonZeroU32,
    /// Plan for COUNT devices in each process, in place of those of the config.
    #[arg(long, value_name = "COUNT")]
    pub(super) devices: Option<NonZeroU32>,
    /// Forecast a step with this machine's rates. They are measured (the disk's with an unnamed
    /// file of 256 MiB in `eps.path`), except those given below.
    #[arg(long)]
    pub(super) forecast: bool,
    /// Write the order of each device's work to this file, in the CSV of
    /// `torch.distributed.pipelining`: a row for each device, a layer being a stage. With
    /// `--machine`, write the comparison: a row for each machine and layout.
    #[arg(long, value_name = "FILE")]
    pub(super) csv: Option<PathBuf>,
    /// Plan for another machine: a file, or the name of one that comes with l2l (see
    /// docs/machines.md). Several are compared, the fastest first.
    #[arg(
        long, value_name = "FILE|NAME", num_args = 1..,
        conflicts_with_all = ["draw", "ranks", "devices", "forecast", "RateArguments"]
    )]
    pub(super) machine: Vec<String>,
    /// With `--machine`: try each way in which its devices can share a step.
    #[arg(long, requires = "machine")]
    pub(super) layouts: bool,
    /// Forecast a step with the rates of this file, which `l2l bench --rates` wrote. With
    /// `--ranks`, that of the fabric is `--fabric-gbps`.
    #[arg(
        long = "rates", value_name = "FILE",
        conflicts_with_all = [
            "machine", "forecast", "tflops", "link_gbps", "host_gbps", "disk_gbps",
        ]
    )]
    pub(super) fitted: Option<PathBuf>,
    #[command(flatten)]
    pub(super) rates: RateArguments,
}

#[derive(Args, Default)]
pub(super) struct RateArguments {
    /// TFLOP/s of the device [default: measured on this machine].
    #[arg(long, value_name = "RATE")]
    pub(super) tflops: Option<f64>,
    /// GB/s of the link, each way [default: `device.link`, else measured].
    #[arg(long, value_name = "RATE")]
    pub(super) link_gbps: Option<f64>,
    /// GB/s of host memory [default: measured].
    #[arg(long, value_name = "RATE")]
    pub(super) host_gbps: Option<f64>,
    /// GB/s of the disk of `eps.path` [default: measured].
    #[arg(long, value_name = "RATE")]
    pub(super) disk_gbps: Option<f64>,
    /// GB/s that a process receives from the others, with `--ranks`; `l2l doctor --mpi` measures
    /// it [default: `parallel.fabric_rate`, else 1.25].
    #[arg(long, value_name = "RATE")]
    pub(super) fabric_gbps: Option<f64>,
}

#[derive(Args)]
pub(super) struct TuneArguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// Write the tuned config to this file instead of printing it.
    #[arg(long, value_name = "FILE")]
    pub(super) to: Option<PathBuf>,
    /// Steps of a trial, after one that does not count.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(super) steps: u64,
    /// Number of trials of each candidate.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(super) rounds: usize,
}

#[derive(Args)]
pub(super) struct DataArguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// Number of sequences to show.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(super) rows: u64,
    /// Print the first N training batches token by token, as JSON, instead.
    #[arg(long, value_name = "N")]
    pub(super) batches: Option<u64>,
}

/// The model that a command takes.
#[derive(Args)]
pub(super) struct ModelArguments {
    /// Use the run's best checkpoint instead of the newest.
    #[arg(long)]
    pub(super) best: bool,
    /// Use the model of this directory, whatever run the config names: a base model to compare
    /// with, a checkpoint, adapters.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "best")]
    pub(super) model: Option<PathBuf>,
    /// Read the model also where its checkpoint was changed after it was written, or has weights
    /// that are infinite or NaN: the key `model.unsealed`.
    #[arg(long)]
    pub(super) unsealed: bool,
}

#[derive(Args)]
pub(super) struct EvalArguments {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Number of batches of `step.batch` sequences [default: all].
    #[arg(long, value_name = "N")]
    pub(super) batches: Option<u64>,
}

#[derive(Args)]
pub(super) struct EmbedArguments {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// A text; may be repeated. The lines of standard input are read when there is none.
    #[arg(long, value_name = "TEXT")]
    pub(super) text: Vec<String>,
    /// A file of texts: a .jsonl file of `{"text"}`, or a text a line.
    #[arg(long, value_name = "FILE")]
    pub(super) texts: Option<PathBuf>,
    /// The name of the prompt of the model that comes before each text, or "" for none [default:
    /// model.default_prompt].
    #[arg(long, value_name = "NAME")]
    pub(super) prompt_name: Option<String>,
}

#[derive(Args)]
pub(super) struct ScoreArguments {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// A .jsonl file of records: of a reward model `{"text"}`, `{"prompt", "completion"}` or
    /// `{"messages"}`, of a reranker `{"query", "document"}`. The lines of standard input are read
    /// when it is absent.
    #[arg(long, value_name = "FILE")]
    pub(super) records: Option<PathBuf>,
}

/// How text is generated.
#[derive(Args)]
pub(super) struct SamplingArguments {
    /// Most tokens to generate [default: 128, or as many as the model has positions for].
    #[arg(long, value_name = "N")]
    pub(super) tokens: Option<usize>,
    /// Sampling temperature; 0 always takes the most probable token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(super) temperature: f32,
    /// Sample from the K most probable tokens; 0 means from all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(super) top_k: usize,
    /// Sample from the most probable tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub(super) top_p: f32,
    /// Sample from tokens at least P times as probable as the most probable one; 0 means from all.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub(super) min_p: f32,
    /// Make tokens that occurred before less probable, with a value above 1 such as 1.1.
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    pub(super) repetition_penalty: f32,
    /// Seed of the sampling [default: `step.seed`].
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// End where the model writes this text, which is left out. May be repeated.
    #[arg(long, value_name = "TEXT")]
    pub(super) stop: Vec<String>,
    /// Continue past the model's end-of-text token.
    #[arg(long)]
    pub(super) ignore_end: bool,
    /// The system's message of a chat.
    #[arg(long, value_name = "TEXT")]
    pub(super) system: Option<String>,
}

#[derive(Args)]
pub(super) struct ChatArguments {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    pub(super) sampling: SamplingArguments,
    #[command(flatten)]
    pub(super) model: ModelArguments,
}

#[derive(Args)]
pub(super) struct GenerateArguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// A text to continue; may be repeated. Read from standard input when there is none.
    #[arg(long, value_name = "TEXT")]
    pub(super) prompt: Vec<String>,
    /// A .jsonl file of prompts: `{"prompt"}`, `{"messages"}` (with `"tools"`) or `{"input_ids"}`.
    #[arg(long, value_name = "FILE")]
    pub(super) prompts: Option<PathBuf>,
    /// Treat each prompt as a user's message, through the model's chat template.
    #[arg(long)]
    pub(super) chat: bool,
    #[command(flatten)]
    pub(super) sampling: SamplingArguments,
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Report memory and traffic, and generate nothing.
    #[arg(long)]
    pub(super) plan: bool,
}

#[derive(Args)]
pub(super) struct Export {
    #[command(flatten)]
    pub(super) common: Common,
    /// The directory to create.
    #[arg(long, value_name = "DIRECTORY")]
    pub(super) to: PathBuf,
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Write the moving average of the weights, of a run with optimizer.ema.
    #[arg(long)]
    pub(super) ema: bool,
    /// Dtype of the weights, `f32`, `bf16` or `f16`: the key `export.dtype`.
    #[arg(long, value_name = "DTYPE")]
    pub(super) dtype: Option<String>,
    /// The most bytes of a file of weights, such as `2GB`: the key `export.shard_size`.
    #[arg(long, value_name = "SIZE")]
    pub(super) shard_size: Option<String>,
}

#[derive(Args)]
pub(super) struct DoctorArguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// Run every kernel of the GPU (`device.ordinal`) against the CPU's, at odd sizes, on random
    /// values.
    #[arg(long)]
    pub(super) check: bool,
    /// Check the kernels of one group.
    #[arg(long, requires = "check")]
    pub(super) group: Option<KernelGroup>,
    /// The seed of the values. Without it, each check draws new ones.
    #[arg(long, requires = "check")]
    pub(super) seed: Option<u64>,
    /// Check and measure the fabric between processes: `mpirun -n 4 l2l doctor --mpi`, in a program
    /// that was built with the feature `mpi`.
    #[arg(long, conflicts_with = "check")]
    pub(super) mpi: bool,
}

#[derive(Args)]
pub(super) struct ConfigArguments {
    #[command(subcommand)]
    pub(super) what: What,
}

#[derive(Subcommand)]
pub(super) enum What {
    /// Print the resolved config as JSON.
    Show(Common),
    /// Print a JSON schema of config files.
    Schema,
    /// Print a page with every key: CONFIG.md.
    Reference,
}
