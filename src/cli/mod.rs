//! The command line: it parses arguments and config layers, calls the library, and shows what it
//! returns. One file a command.

mod arguments;
mod bench;
mod chat;
mod common;
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
use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser, ValueEnum};
use l2l::checkpoint::Keeper;
use l2l::config::TrainConfig;
use l2l::{Config, Error, inference};

use arguments::*;
use layers::Layers;

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Well,
    /// By a signal, after a clean end.
    Interrupted,
    /// The plan does not fit, and `plan --check` was to tell.
    DoesNotFit,
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
        Command::Plan(arguments) => return plan::plan(&arguments),
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
                let (config, _) = common.read()?;
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
        return match ["config.json", "adapter_config.json"].iter().any(is_model) {
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
