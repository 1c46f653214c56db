//! `l2l export`: writes a run's model, or the one that the config loads, to a new directory.

use l2l::config::Labels;
use l2l::{Error, hf, inference, shape_of};

use super::common::model_of;
use super::{Export, print};

pub(super) fn export(arguments: &Export) -> Result<(), Error> {
    let Export { common, to, model, ema, dtype, shard_size } = arguments;
    let [unsealed] = model.own_flags();
    let flags = [
        unsealed,
        ("--dtype", "export.dtype", dtype.clone()),
        ("--shard-size", "export.shard_size", shard_size.clone()),
    ];
    let (config, layers) = common.read_of_model(flags)?;
    let run = || {
        let from = model_of(&config, model)?;
        let mut options = hf::ExportOptions {
            dtype: config.export.dtype,
            average: *ema,
            unsealed: config.model.unsealed,
            ..Default::default()
        };
        if let Some(bytes) = config.export.shard_size.bytes() {
            options.shard_bytes = bytes;
        }
        // A model of --model does not belong to the run, except adapters, which need its base
        // model.
        let is_of_run = model.model.is_none() || from.join("adapter_config.json").is_file();
        let base = config.model.path.as_deref().filter(|_| is_of_run);
        if is_of_run && from.join("adapter_config.json").is_file() {
            // The config may name the task of adapters, and their classes.
            let mut loaded = config.clone();
            inference::load_from(&mut loaded, &from);
            let shape = loaded.model.path.is_some().then(|| shape_of(&loaded)).transpose()?;
            options.head = shape.map(|shape| shape.head);
            if let Some(Labels::Names(names)) = &config.model.labels {
                options.labels.clone_from(names);
            }
        }
        hf::export(&from, base, to, options)?;
        print(format_args!("{} -> {}", from.display(), to.display()));
        Ok(())
    };
    run().map_err(|error| layers.locate(error))
}
