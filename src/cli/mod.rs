//! The command line: `train`, `data`, `eval`, `generate`, `plan`, `bench`, `tune`, and what helps with
//! them.

mod bench;
mod dashboards;
mod data;
mod doctor;
mod eval;
mod export;
mod generate;
mod journal;
mod layers;
mod observe;
mod plan;
mod progress;
mod reference;
mod train;
mod tune;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use l2l::checkpoint::Keeper;
use l2l::config::Format;
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
    /// Trains; without a config, a small model on this project's own text.
    Train(TrainArguments),
    /// Shows what the model will see: sequences as text, how long they are, how much is padding.
    Data(DataArguments),
    /// Says how good a run's model, or the one a config loads, is on what was kept aside.
    Eval(EvalArguments),
    /// Continues text by a run's model, or the one a config loads.
    Generate(GenerateArguments),
    /// Says what a run would hold and move, and starts nothing.
    Plan(PlanArguments),
    /// Trains for a few steps and says how fast, beside what the machine can do.
    Bench(BenchArguments),
    /// Tries depths, micro-batches and the stash's place, and writes the config that was best.
    Tune(TuneArguments),
    /// Writes the dashboards, rules and table of metrics that go with this program.
    Dashboards {
        /// The folder they go to.
        #[arg(long, value_name = "DIRECTORY")]
        to: PathBuf,
    },
    /// Writes a run's model, or the one a config loads, to a directory for other tools.
    Export(Export),
    /// Says what this machine has.
    Doctor(DoctorArguments),
    /// Shows the config as it is resolved, its schema, or the reference of its keys.
    Config(ConfigArguments),
    /// Prints a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

#[derive(Args)]
struct Common {
    /// The config file; every key has a default.
    config: Option<PathBuf>,
    /// Sets a key, over file and environment.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// What is printed.
    #[arg(long, value_enum)]
    format: Option<Format>,
}

#[derive(Args)]
struct TrainArguments {
    #[command(flatten)]
    common: Common,
    /// Goes on from the newest checkpoint in `checkpoint.directory`, or from `eps.path` where that is as
    /// far.
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    observe: ObserveArguments,
}

#[derive(Args)]
struct BenchArguments {
    #[command(flatten)]
    common: Common,
    /// Leaves out all copies between host and device but the first step's, to tell what time they cost:
    /// what is computed then means nothing.
    #[arg(long)]
    without_copies: bool,
}

#[derive(Args)]
struct ObserveArguments {
    /// Serves metrics and a live page there: the key `metrics.listen`.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,
    /// Writes the timeline of all operations to this file, for Perfetto and Chrome.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Writes a report, `report.html`, to this folder at the end.
    #[arg(long, value_name = "DIRECTORY")]
    report: Option<PathBuf>,
}

#[derive(Args)]
struct PlanArguments {
    #[command(flatten)]
    common: Common,
    /// Draws a step in virtual time, as SVG.
    #[arg(long, value_name = "FILE")]
    draw: Option<PathBuf>,
    /// Forecasts a step with rates that are measured here (that of the disk with an unnamed file of 256
    /// MiB in `eps.path`); those given below are taken as given.
    #[arg(long)]
    forecast: bool,
    #[command(flatten)]
    rates: RateArguments,
}

#[derive(Args, Default)]
struct RateArguments {
    /// TFLOP/s of the device; as this machine's product has when absent.
    #[arg(long, value_name = "RATE")]
    tflops: Option<f64>,
    /// GB/s of the link, each way; of `device.link`, or of this machine's memory when absent.
    #[arg(long, value_name = "RATE")]
    link_gbps: Option<f64>,
    /// GB/s of the host's memory; of this machine's when absent.
    #[arg(long, value_name = "RATE")]
    host_gbps: Option<f64>,
    /// GB/s of the disk under `eps.path`; as measured there when absent.
    #[arg(long, value_name = "RATE")]
    disk_gbps: Option<f64>,
}

#[derive(Args)]
struct TuneArguments {
    #[command(flatten)]
    common: Common,
    /// The tuned config; stdout when absent.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Steps of a trial that count.
    #[arg(long, value_name = "N", default_value_t = 3)]
    steps: u64,
    /// Times that each candidate is tried.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
}

#[derive(Args)]
struct DataArguments {
    #[command(flatten)]
    common: Common,
    /// So many sequences are shown.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rows: u64,
    /// Instead, the first batches of training, token by token, as JSON.
    #[arg(long, value_name = "N")]
    batches: Option<u64>,
}

#[derive(Args)]
struct EvalArguments {
    #[command(flatten)]
    common: Common,
    /// Of the run's checkpoints the best, and not the newest.
    #[arg(long)]
    best: bool,
    /// Only so many batches of `step.batch` sequences; all there are when absent.
    #[arg(long, value_name = "N")]
    batches: Option<u64>,
}

#[derive(Args)]
struct GenerateArguments {
    #[command(flatten)]
    common: Common,
    /// The text to go on from; several are continued together. From stdin when there is none.
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// A .jsonl of more: `{"prompt"}`, `{"messages"}` or `{"input_ids"}`.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Each prompt is what a user says to the assistant, by the model's chat template.
    #[arg(long)]
    chat: bool,
    /// Tokens that are generated at most; 128, or what the model has positions for, when absent.
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// How bold the draws are; 0: always the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Draws from so many of the likeliest tokens; 0: from all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Draws from the likeliest tokens that are so likely together.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// What chance is drawn from; `step.seed` when absent.
    #[arg(long)]
    seed: Option<u64>,
    /// Goes on where the model says that a text ends.
    #[arg(long)]
    ignore_end: bool,
    /// Of the run's checkpoints the best, and not the newest.
    #[arg(long)]
    best: bool,
    /// Says what it would hold and move, and generates nothing.
    #[arg(long)]
    plan: bool,
}

#[derive(Args)]
struct Export {
    #[command(flatten)]
    common: Common,
    /// The new directory.
    #[arg(long, value_name = "DIRECTORY")]
    to: PathBuf,
    /// Of the run's checkpoints the best, and not the newest.
    #[arg(long)]
    best: bool,
}

#[derive(Args)]
struct DoctorArguments {
    #[command(flatten)]
    common: Common,
    /// Runs every kernel of the GPU (`device.ordinal`) against the CPU's, at odd sizes, on fresh values.
    #[arg(long)]
    check: bool,
}

#[derive(Args)]
struct ConfigArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The config as it is resolved, as JSON.
    Show(Common),
    /// A JSON schema of config files.
    Schema,
    /// A page with every key.
    Reference,
}

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Well,
    /// By a signal, cleanly.
    Interrupted,
}

/// Runs the command that the arguments name.
pub(crate) fn run() -> Result<Ended, Error> {
    match Arguments::parse().command {
        Command::Train(arguments) => return train::train(arguments),
        Command::Data(arguments) => data::data(&arguments)?,
        Command::Eval(arguments) => return eval::eval(&arguments),
        Command::Generate(arguments) => return generate::generate(&arguments),
        Command::Plan(arguments) => plan::plan(&arguments)?,
        Command::Tune(arguments) => tune::tune(&arguments)?,
        Command::Dashboards { to } => dashboards::write(&to)?,
        Command::Bench(BenchArguments { common, without_copies }) => {
            return bench::bench(&common, !without_copies);
        }
        Command::Export(Export { common, to, best }) => export::export(&common, best, &to)?,
        Command::Doctor(DoctorArguments { common, check: true }) => doctor::check(&common)?,
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

/// What `train` does without a config.
pub(crate) const BUILT_IN: &str = include_str!("../../examples/built_in.toml");

impl Common {
    /// The config of file, environment and flags, and where each value is from. Without a file,
    /// `built_in` stands for one.
    fn read(
        &self,
        built_in: Option<&str>,
        metrics: Option<String>,
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
        layers.own_flag("--metrics", "metrics.listen", metrics);
        let mut config = layers.config()?;
        config.device.kernel_cache = config.device.kernel_cache.or_else(kernel_cache);
        Ok((config, layers))
    }
}

/// Where the model of a config's run is: a checkpoint, the newest or the best, or what it loads.
fn model_of(config: &Config, best: bool) -> Result<PathBuf, Error> {
    match (&config.checkpoint.directory, &config.model.path) {
        (Some(directory), _) if directory.is_dir() => {
            let keeper = Keeper::peek(directory);
            let found = if best { keeper.best() } else { keeper.newest() };
            found.ok_or_else(|| {
                let kind = if best { "best checkpoint" } else { "checkpoint" };
                Error::Refused(format!("{}: no {kind} in it", directory.display()))
            })
        }
        (Some(directory), _) => {
            let at = directory.display();
            Err(Error::Refused(format!("{at}: no such directory of checkpoints")))
        }
        (None, Some(path)) => Ok(path.clone()),
        (None, None) => {
            let what = "which model? Set checkpoint.directory, or model.path";
            Err(Error::Refused(what.into()))
        }
    }
}

/// Lets a config load the model of its run; where that is.
fn load(config: &mut Config, best: bool) -> Result<PathBuf, Error> {
    let from = model_of(config, best)?;
    inference::load_from(config, &from);
    Ok(from)
}

/// Says a line to whoever watches; that nobody can hear it is no failure.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Prints a line at once; a reader that has gone away is no failure of the run.
fn print(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Where compiled kernels are kept when nobody says where: in the user's cache.
fn kernel_cache() -> Option<PathBuf> {
    let of =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")))?;
    Some(cache.join("l2l"))
}
