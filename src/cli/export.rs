//! `l2l export`: a run's model, or one that was loaded, as a directory of its own.

use std::path::Path;

use l2l::checkpoint::Keeper;
use l2l::{Error, hf};

use super::{Common, print};

pub(super) fn export(common: &Common, best: bool, to: &Path) -> Result<(), Error> {
    let (config, layers) = common.read(None, None)?;
    let run = || {
        let from = match (&config.checkpoint.directory, &config.model.path) {
            (Some(directory), _) if directory.is_dir() => {
                let keeper = Keeper::peek(directory);
                let found = if best { keeper.best() } else { keeper.newest() };
                found.ok_or_else(|| {
                    let kind = if best { "best checkpoint" } else { "checkpoint" };
                    Error::Refused(format!("{}: no {kind} in it", directory.display()))
                })?
            }
            (Some(directory), _) => {
                let at = directory.display();
                return Err(Error::Refused(format!("{at}: no such directory of checkpoints")));
            }
            (None, Some(path)) => path.clone(),
            (None, None) => {
                let what = "export what? Set checkpoint.directory, or model.path";
                return Err(Error::Refused(what.into()));
            }
        };
        hf::export(&from, config.model.path.as_deref(), to)?;
        print(format_args!("{} -> {}", from.display(), to.display()));
        Ok(())
    };
    run().map_err(|error| layers.locate(error))
}
