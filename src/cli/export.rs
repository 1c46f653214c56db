//! `l2l export`: writes a run's model, or the one that the config loads, to a new directory.

use l2l::{Error, hf};

use super::{Export, model_of, print};

pub(super) fn export(arguments: &Export) -> Result<(), Error> {
    let Export { common, to, model, ema } = arguments;
    let (config, layers) = common.read(None, None)?;
    let run = || {
        let from = model_of(&config, model)?;
        let export = if *ema { hf::export_average } else { hf::export };
        export(&from, config.model.path.as_deref(), to)?;
        print(format_args!("{} -> {}", from.display(), to.display()));
        Ok(())
    };
    run().map_err(|error| layers.locate(error))
}
