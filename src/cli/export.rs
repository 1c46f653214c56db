//! `l2l export`: writes a run's model, or the one that the config loads, to a new directory.

use std::path::Path;

use l2l::{Error, hf};

use super::{Common, model_of, print};

pub(super) fn export(common: &Common, best: bool, ema: bool, to: &Path) -> Result<(), Error> {
    let (config, layers) = common.read(None, None)?;
    let run = || {
        let from = model_of(&config, best)?;
        let export = if ema { hf::export_average } else { hf::export };
        export(&from, config.model.path.as_deref(), to)?;
        print(format_args!("{} -> {}", from.display(), to.display()));
        Ok(())
    };
    run().map_err(|error| layers.locate(error))
}
