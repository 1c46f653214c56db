//! The files of `--trace` and `--report`. A file that cannot be written is refused before the run
//! trains. If writing fails at the end, the run stands, and the command ends with status 1.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use l2l::telemetry::{Report, Trace, Watch};
use l2l::{Config, Error, Prepared, Trainer};

use super::output::{lose, refused};
use super::{ObserveArguments, say};

/// The timeline and the report of a run, each with its path.
pub(super) struct OutputFiles {
    trace: Option<(Arc<Trace>, PathBuf)>,
    report: Option<(Report, PathBuf)>,
    /// The run, once it has started.
    watch: Option<Watch>,
}

impl OutputFiles {
    /// Opens the files that the arguments name.
    ///
    /// # Errors
    /// One of them cannot be written, or is a file that the config names, too.
    pub(super) fn open(config: &Config, arguments: &ObserveArguments) -> Result<Self, Error> {
        let ObserveArguments { trace, report, .. } = arguments;
        let report = report.as_deref().map(|folder| match Report::create(folder) {
            Ok(report) => Ok((report, folder.to_path_buf())),
            Err(error) => Err(refused("--report", folder, error)),
        });
        let run = config.metrics.run.as_deref().unwrap_or_default();
        let trace = trace.as_deref().map(|path| match Trace::create(path, run) {
            Ok(trace) => Ok((trace, path.to_path_buf())),
            Err(error) => Err(refused("--trace", path, error)),
        });
        let trace = trace.transpose()?;
        let report = report.transpose()?;
        if let Some((_, path)) = &trace {
            let is_same = |other: &Path| path.canonicalize().ok() == other.canonicalize().ok();
            let others = [("metrics.file", &config.metrics.file), ("log.file", &config.log.file)];
            for (key, file) in others {
                if file.as_deref().is_some_and(is_same) {
                    let at = path.display();
                    return Err(Error::Argument(format!("--trace {at}: {key} is the same file")));
                }
            }
        }
        Ok(OutputFiles { trace, report, watch: None })
    }

    /// Makes the timeline an observer of the run.
    pub(super) fn attach(&self, prepared: Prepared) -> Prepared {
        match &self.trace {
            Some((trace, _)) => prepared.trace(trace.clone()),
            None => prepared,
        }
    }

    /// Takes the run to report from its trainer.
    pub(super) fn started(&mut self, trainer: &Trainer) {
        self.watch = Some(trainer.watch());
    }

    /// The run, once it has started.
    pub(super) fn watch(&self) -> Option<&Watch> {
        self.watch.as_ref()
    }

    /// Writes the report, and ends the timeline.
    pub(super) fn write(&self, config: &Config) {
        if let (Some((report, folder)), Some(watch)) = (&self.report, &self.watch)
            && let Err(error) = report.write(watch, config)
        {
            lose(format_args!(
                "--report {}: {error}; there is no report of this run",
                folder.display()
            ));
        }
        let Some((trace, path)) = &self.trace else { return };
        match trace.finish() {
            Ok(0) => {}
            Ok(left_out) => say(format_args!(
                "--trace {}: {left_out} operations are not in it: they came faster than it could \
                 be written",
                path.display()
            )),
            Err(error) => lose(format_args!(
                "--trace {}: {error}; the timeline is not complete",
                path.display()
            )),
        }
    }
}
