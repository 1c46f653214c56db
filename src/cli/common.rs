//! The parts that commands share: the config that they resolve, and the model that they load.

use std::path::PathBuf;

use clap::ValueEnum;
use l2l::checkpoint::{Hold, Keeper};
use l2l::config::{Format, TrainConfig};
use l2l::{Config, Error, inference};

use super::layers::Layers;
use super::{Common, ModelArguments, say};

impl ModelArguments {
    /// The flags that set a key: flag, key, value.
    pub(super) fn own_flags(&self) -> [(&'static str, &'static str, Option<String>); 1] {
        [("--unsealed", "model.unsealed", self.unsealed.then(|| "true".into()))]
    }
}

/// The config of a run without a config file.
pub(super) const BUILT_IN: &str = include_str!("../../examples/built_in.toml");

/// The message of a command without a config file.
pub(super) const NO_FILE: &str = "no config file is named: the built-in config is used \
                                  (examples/built_in.toml), with what --set and L2L__ say";

impl Common {
    /// Resolves the config of a run from file, environment and flags, with the origin of each
    /// value. Without a file it is the built-in config, and a message says so.
    pub(super) fn read(&self) -> Result<(Config, Layers), Error> {
        self.read_and_say([])
    }

    /// Resolves the config as [`read`](Common::read) does, with further flags that set keys.
    pub(super) fn read_and_say<const N: usize>(
        &self,
        own_flags: [(&str, &str, Option<String>); N],
    ) -> Result<(Config, Layers), Error> {
        let (config, layers) = self.read_with(own_flags)?;
        if self.config.is_none() && config.log.format == Format::Pretty {
            say(NO_FILE);
        }
        Ok((config, layers))
    }

    /// Resolves the config as [`read_and_say`](Common::read_and_say) does, without the message.
    pub(super) fn read_with<const N: usize>(
        &self,
        own_flags: [(&str, &str, Option<String>); N],
    ) -> Result<(Config, Layers), Error> {
        let mut layers = Layers::new();
        if self.config.is_none() {
            layers.built_in(BUILT_IN)?;
        }
        self.over(layers, own_flags)
    }

    /// Resolves the config of a command that loads a model and does not train. Without a file, each
    /// key that no variable or flag sets has its default.
    pub(super) fn read_of_model<const N: usize>(
        &self,
        own_flags: [(&str, &str, Option<String>); N],
    ) -> Result<(Config, Layers), Error> {
        self.over(Layers::new(), own_flags)
    }

    fn over<const N: usize>(
        &self,
        mut layers: Layers,
        own_flags: [(&str, &str, Option<String>); N],
    ) -> Result<(Config, Layers), Error> {
        if let Some(path) = &self.config {
            layers.file(path)?;
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

/// The directory that a command loads its model from: the one of `--model`, else a run's newest or
/// best checkpoint, else the adapters that the run begins with, else `model.path`.
pub(super) fn model_of(config: &Config, arguments: &ModelArguments) -> Result<PathBuf, Error> {
    let best = arguments.best;
    if let Some(directory) = &arguments.model {
        let is_model = |file: &&str| directory.join(file).is_file();
        return match ["config.json", "adapter_config.json"].iter().any(is_model) {
            true => Ok(directory.clone()),
            false => {
                let at = directory.display();
                let what = match Keeper::peek(directory).newest()? {
                    Some(newest) => format!(
                        "--model {at}: it holds checkpoints: name one of them, for example {}",
                        newest.display()
                    ),
                    None => {
                        format!("--model {at}: there is no model in it: config.json is missing")
                    }
                };
                Err(Error::Argument(what))
            }
        };
    }
    let adapters = config.train.lora.as_ref().and_then(|lora| lora.path.as_ref());
    match (&config.checkpoint.directory, adapters.or(config.model.path.as_ref())) {
        (Some(directory), _) if directory.is_dir() => {
            let keeper = Keeper::peek(directory);
            let found = if best { keeper.best()? } else { keeper.newest()? };
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
            let what =
                "no model is named: give --model DIR, or set checkpoint.directory or model.path";
            Err(Error::Argument(what.into()))
        }
    }
}

/// Makes a config load the model of its run, and returns the model's directory.
pub(super) fn load(config: &mut Config, arguments: &ModelArguments) -> Result<PathBuf, Error> {
    let from = loop {
        let from = model_of(config, arguments)?;
        match Hold::of(&from) {
            // The command holds it to its end.
            Some(hold) => {
                std::mem::forget(hold);
                break from;
            }
            // The run has just removed it, and has a newer one.
            None if from.parent() == config.checkpoint.directory.as_deref() => {}
            None => break from,
        }
    };
    if arguments.model.is_some() {
        config.train = TrainConfig::default();
    }
    inference::load_from(config, &from);
    Ok(from)
}

/// The default of `device.kernel_cache`: a folder in the user's cache.
fn kernel_cache() -> Option<PathBuf> {
    let of =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")))?;
    Some(cache.join("l2l"))
}
