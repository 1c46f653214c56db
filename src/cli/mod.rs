//! The command line: it parses arguments and config layers, calls the library, and shows what it
//! returns. One file a command.

mod bench;
mod chat;
mod dashboards;
mod data;
mod doctor;
mod eval;
mod export;
mod fabric;
mod generate;
mod layers;
mod observe;
mod other_names;
mod plan;
mod progress;
mod reference;
mod train;
mod tune;

use std::io::Write;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use l2l::checkpoint::Keeper;
use l2l::config::{Format, TrainConfig};
use l2l::{Config, Error, inference};

use layers::Layers;

/// Trains transformers too large for the device, one layer at a time.
#[derive(Parser)]
#[command(name = "l2l", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model; without a config, a small GPT on this project's own text.
    Train(TrainArguments),
    /// Show the sequences that the model will see, and how long they are.
    Data(DataArguments),
    /// Evaluate a run's model, or the one that the config loads, on the validation set.
    Eval(EvalArguments),
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
    },
    /// Write a run's model, or the one that the config loads, to a directory for other tools.
    Export(Export),
    /// Report this machine's cores, memory and rates, and what is missing for CUDA.
    Doctor(DoctorArguments),
    /// Print the resolved config, its JSON schema, or the reference of all keys.
    Config(ConfigArguments),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

#[derive(Args)]
struct Common {
    /// The config file; every key has a default.
    config: Option<PathBuf>,
    /// Set a key; overrides the file and the environment. May be repeated. `KEY=` gives the key
    /// its default back.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Format of the output: the key `log.format`.
    #[arg(long, value_enum)]
    format: Option<Format>,
}

#[derive(Args)]
struct TrainArguments {
    #[command(flatten)]
    common: Common,
    /// Continue the last run: from the newest checkpoint in `checkpoint.directory`, or from
    /// `eps.path` if its state is at least as new.
    #[arg(long)]
    resume: bool,
    /// Continue the last run although keys have other values: the learning rate, the number of
    /// steps or epochs, batch and micro-batch, the data and others. Weights and optimizer states
    /// are kept, and each change is reported. Without it such a run is refused.
    #[arg(long)]
    resume_with_changes: bool,
    #[command(flatten)]
    observe: ObserveArguments,
}

#[derive(Args)]
struct BenchArguments {
    #[command(flatten)]
    common: Common,
    /// Leave out all copies between host and device after the first step, to show what they cost.
    /// The losses then mean nothing.
    #[arg(long)]
    without_copies: bool,
    /// Also measure the CPU's kernels beside its matrix product and its memory.
    #[arg(long)]
    kernels: bool,
}

#[derive(Args, Default)]
struct ObserveArguments {
    /// Serve metrics and a live page at this address: the key `metrics.listen`.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,
    /// Write the timeline of all operations to this file, for Perfetto or Chrome.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write a report, `report.html`, to this folder at the end.
    #[arg(long, value_name = "DIRECTORY")]
    report: Option<PathBuf>,
}

#[derive(Args)]
struct PlanArguments {
    #[command(flatten)]
    common: Common,
    /// Draw a step, simulated in virtual time, to this SVG file.
    #[arg(long, value_name = "FILE")]
    draw: Option<PathBuf>,
    /// Plan for the first of so many processes, which `mpirun` or `srun` starts.
    #[arg(long, value_name = "COUNT", default_value_t = NonZeroU32::MIN)]
    ranks: NonZeroU32,
    /// Plan for so many devices of each process, in place of those of the config.
    #[arg(long, value_name = "COUNT")]
    devices: Option<NonZeroU32>,
    /// Forecast a step with this machine's rates. They are measured (the disk's with an unnamed
    /// file of 256 MiB in `eps.path`), except those given below.
    #[arg(long)]
    forecast: bool,
    /// Write the order of each device's work to this file, in the CSV of
    /// `torch.distributed.pipelining`: a row for each device, a layer being a stage.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    #[command(flatten)]
    rates: RateArguments,
}

#[derive(Args, Default)]
struct RateArguments {
    /// TFLOP/s of the device [default: measured on this machine].
    #[arg(long, value_name = "RATE")]
    tflops: Option<f64>,
    /// GB/s of the link, each way [default: `device.link`, else measured].
    #[arg(long, value_name = "RATE")]
    link_gbps: Option<f64>,
    /// GB/s of host memory [default: measured].
    #[arg(long, value_name = "RATE")]
    host_gbps: Option<f64>,
    /// GB/s of the disk of `eps.path` [default: measured].
    #[arg(long, value_name = "RATE")]
    disk_gbps: Option<f64>,
    /// GB/s that a process receives from the others, with `--ranks`; `l2l doctor --mpi` measures
    /// it [default: `parallel.fabric_rate`, else 1.25].
    #[arg(long, value_name = "RATE")]
    fabric_gbps: Option<f64>,
}

#[derive(Args)]
struct TuneArguments {
    #[command(flatten)]
    common: Common,
    /// Write the tuned config to this file instead of printing it.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Steps of a trial, after one that does not count.
    #[arg(long, value_name = "N", default_value_t = 3)]
    steps: u64,
    /// Number of trials of each candidate.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
}

#[derive(Args)]
struct DataArguments {
    #[command(flatten)]
    common: Common,
    /// Number of sequences to show.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rows: u64,
    /// Print the first N training batches token by token, as JSON, instead.
    #[arg(long, value_name = "N")]
    batches: Option<u64>,
}

/// The model that a command takes.
#[derive(Args)]
struct ModelArguments {
    /// Use the run's best checkpoint instead of the newest.
    #[arg(long)]
    best: bool,
    /// Use the model of this directory, whatever run the config names: a base model to compare
    /// with, a checkpoint, adapters.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "best")]
    model: Option<PathBuf>,
}

#[derive(Args)]
struct EvalArguments {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArguments,
    /// Number of batches of `step.batch` sequences [default: all].
    #[arg(long, value_name = "N")]
    batches: Option<u64>,
}

/// How text is generated.
#[derive(Args)]
struct SamplingArguments {
    /// Most tokens to generate [default: 128, or as many as the model has positions for].
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Sampling temperature; 0 always takes the most probable token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Sample from the K most probable tokens; 0 means from all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Sample from the most probable tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Sample from tokens at least P times as probable as the most probable one; 0 means from all.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Make tokens that were there before less probable: above 1, such as 1.1.
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Seed of the sampling [default: `step.seed`].
    #[arg(long)]
    seed: Option<u64>,
    /// End where the model writes this text, which is left out. May be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue past the model's end-of-text token.
    #[arg(long)]
    ignore_end: bool,
    /// The system's message of a chat.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
}

#[derive(Args)]
struct ChatArguments {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    model: ModelArguments,
}

#[derive(Args)]
struct GenerateArguments {
    #[command(flatten)]
    common: Common,
    /// A text to continue; may be repeated. Read from standard input when there is none.
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// A .jsonl file of prompts: `{"prompt"}`, `{"messages"}` or `{"input_ids"}`.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Treat each prompt as a user's message, through the model's chat template.
    #[arg(long)]
    chat: bool,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    model: ModelArguments,
    /// Report memory and traffic, and generate nothing.
    #[arg(long)]
    plan: bool,
}

#[derive(Args)]
struct Export {
    #[command(flatten)]
    common: Common,
    /// The directory to create.
    #[arg(long, value_name = "DIRECTORY")]
    to: PathBuf,
    #[command(flatten)]
    model: ModelArguments,
    /// Write the moving average of the weights, of a run with optimizer.ema.
    #[arg(long)]
    ema: bool,
    /// Dtype of the weights, `f32`, `bf16` or `f16`: the key `export.dtype`.
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// The most bytes of a file of weights, such as `2GB`: the key `export.shard_size`.
    #[arg(long, value_name = "SIZE")]
    shard_size: Option<String>,
}

#[derive(Args)]
struct DoctorArguments {
    #[command(flatten)]
    common: Common,
    /// Run every kernel of the GPU (`device.ordinal`) against the CPU's, at odd sizes, on random
    /// values.
    #[arg(long)]
    check: bool,
    /// Check and measure the fabric between processes: `mpirun -n 4 l2l doctor --mpi`, in a program
    /// that was built with the feature `mpi`.
    #[arg(long, conflicts_with = "check")]
    mpi: bool,
}

#[derive(Args)]
struct ConfigArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Print the resolved config as JSON.
    Show(Common),
    /// Print a JSON schema of config files.
    Schema,
    /// Print a page with every key: CONFIG.md.
    Reference,
}

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Well,
    /// By a signal, after a clean end.
    Interrupted,
}

/// Runs the command that the arguments name.
pub(crate) fn run() -> Result<Ended, Error> {
    match Arguments::parse().command {
        Command::Train(arguments) => {
            return train::train(arguments);
        }
        Command::Data(arguments) => data::data(&arguments)?,
        Command::Eval(arguments) => return eval::eval(&arguments),
        Command::Generate(arguments) => return generate::generate(&arguments),
        Command::Chat(arguments) => return chat::chat(&arguments),
        Command::Plan(arguments) => plan::plan(&arguments)?,
        Command::Tune(arguments) => {
            fabric::refuse_ranks("tune")?;
            tune::tune(&arguments)?;
        }
        Command::Dashboards { to } => dashboards::write(&to)?,
        Command::Bench(BenchArguments { common, without_copies, kernels }) => {
            return bench::bench(&common, !without_copies, kernels);
        }
        Command::Export(arguments) => export::export(&arguments)?,
        Command::Doctor(DoctorArguments { common, check: true, .. }) => doctor::check(&common)?,
        Command::Doctor(DoctorArguments { common, mpi: true, .. }) => fabric::check(&common)?,
        Command::Doctor(DoctorArguments { common, .. }) => doctor::doctor(&common)?,
        Command::Config(ConfigArguments { what }) => match what {
            What::Show(common) => {
                let (config, _) = common.read(None, None)?;
                let text = serde_json::to_string_pretty(&config);
                print(text.expect("a config is plain data"));
            }
            What::Schema => print(reference::schema()),
            What::Reference => print(reference::page().trim_end()),
        },
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "l2l", &mut script);
            print(String::from_utf8_lossy(&script).trim_end());
        }
    }
    Ok(Ended::Well)
}

/// The config of `train` without a config file.
pub(crate) const BUILT_IN: &str = include_str!("../../examples/built_in.toml");

impl Common {
    /// Resolves the config from file, environment and flags, and where each value comes from.
    /// Without a file, `built_in` takes its place.
    fn read(
        &self,
        built_in: Option<&str>,
        metrics: Option<String>,
    ) -> Result<(Config, Layers), Error> {
        self.read_with(built_in, [("--metrics", "metrics.listen", metrics)])
    }

    /// The same with flags that have keys of their own: flag, key, value.
    fn read_with<const N: usize>(
        &self,
        built_in: Option<&str>,
        own_flags: [(&str, &str, Option<String>); N],
    ) -> Result<(Config, Layers), Error> {
        let mut layers = Layers::new();
        match (&self.config, built_in) {
            (Some(path), _) => layers.file(path)?,
            (None, Some(text)) => layers.text(Path::new("built-in config"), text)?,
            (None, None) => {}
        }
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        });
        layers.environment(variables)?;
        for flag in &self.set {
            layers.flag(flag)?;
        }
        let format =
            self.format.and_then(|format| Some(format.to_possible_value()?.get_name().into()));
        layers.own_flag("--format", "log.format", format);
        for (flag, key, value) in own_flags {
            layers.own_flag(flag, key, value);
        }
        let mut config = layers.config()?;
        config.device.kernel_cache = config.device.kernel_cache.or_else(kernel_cache);
        Ok((config, layers))
    }
}

/// The directory that a command takes its model from: the one that it names, or a run's newest or
/// best checkpoint, or else the adapters that the run begins with, or `model.path`.
fn model_of(config: &Config, arguments: &ModelArguments) -> Result<PathBuf, Error> {
    let best = arguments.best;
    if let Some(directory) = &arguments.model {
        let is_model = |file: &&str| directory.join(file).is_file();
        return match ["config.json", "adapter_config.json"].iter().any(|file| is_model(&file)) {
            true => Ok(directory.clone()),
            false => Err(Error::Argument(format!(
                "--model {}: there is no model in it: config.json is missing",
                directory.display()
            ))),
        };
    }
    let adapters = config.train.lora.as_ref().and_then(|lora| lora.path.as_ref());
    match (&config.checkpoint.directory, adapters.or(config.model.path.as_ref())) {
        (Some(directory), _) if directory.is_dir() => {
            let keeper = Keeper::peek(directory);
            let found = if best { keeper.best() } else { keeper.newest() };
            found.ok_or_else(|| {
                let kind = match best {
                    true => "best checkpoint in it: no validation of the run has ended yet",
                    false => "checkpoint in it",
                };
                Error::Argument(format!(
                    "checkpoint.directory {}: there is no {kind}",
                    directory.display()
                ))
            })
        }
        (Some(directory), _) => {
            let at = directory.display();
            Err(Error::Argument(format!(
                "checkpoint.directory {at} does not exist: train first, or leave the key out"
            )))
        }
        (None, Some(path)) => Ok(path.clone()),
        (None, None) => {
            let what = "no model is named: set checkpoint.directory or model.path";
            Err(Error::Argument(what.into()))
        }
    }
}

/// Makes a config load the model of its run, and returns where that is.
fn load(config: &mut Config, arguments: &ModelArguments) -> Result<PathBuf, Error> {
    let from = model_of(config, arguments)?;
    if arguments.model.is_some() {
        config.train = TrainConfig::default();
    }
    inference::load_from(config, &from);
    Ok(from)
}

/// Prints a line to standard error. A closed standard error is not a failure.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Prints a line and flushes it. A reader that has gone away is not a failure of the run.
fn print(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// The default of `device.kernel_cache`: a folder in the user's cache.
fn kernel_cache() -> Option<PathBuf> {
    let of =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")))?;
    Some(cache.join("l2l"))
}
