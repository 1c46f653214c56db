//! `l2l train`: calls the library's `fit`, with signals that end the run and a screen that shows
//! it.

use std::ops::ControlFlow;
use std::path::Path;

use async_trait::async_trait;
use l2l::config::EpsTier;
use l2l::{
    Callbacks, Config, End, Error, Fitted, Prepared, RunMessage, StepReport, StopRequest, Trainer,
    inference::Evaluation, telemetry,
};
use serde_json::Value;

use super::common::NO_FILE;
use super::observe::OutputFiles;
use super::progress::Screen;
use super::runtime::Runtime;
use super::signals::Signals;
use super::{Exit, ObserveArguments, TrainArguments, fabric, output, say};

pub(super) fn train(arguments: TrainArguments) -> Result<Exit, Error> {
    let TrainArguments { common, resume, resume_with_changes, strict, mut observe } = arguments;
    let read = common.read_with([("--metrics", "metrics.listen", observe.metrics.clone())]);
    let opened = read.and_then(|(config, layers)| {
        let fabric = fabric::of(&config).map_err(|error| layers.locate(error))?;
        Ok((config, layers, fabric))
    });
    let (mut config, layers, fabric) = opened.inspect_err(fabric::leave_it_to_the_first)?;
    if fabric.is_some() {
        fabric::choose_gpu(&mut config.device);
    }
    let is_first = fabric.as_ref().is_none_or(|fabric| fabric.rank() == 0);
    let traces = observe.trace.is_some();
    if !is_first {
        // The first process shows the run.
        observe = ObserveArguments::default();
        (config.metrics, config.log) = Default::default();
    }
    let mut run = || -> Result<Exit, Error> {
        config.metrics.run.get_or_insert_with(telemetry::made_up_name);
        let stop = StopRequest::new();
        let mut builder = Trainer::builder(config.clone());
        if let Some(fabric) = &fabric {
            builder = builder.fabric(fabric.clone());
        }
        let mut fit = builder.fit().resume(resume).stop(stop.clone());
        if strict && (resume || resume_with_changes) {
            fit = fit.resume_strictly();
        }
        if resume_with_changes {
            fit = fit.resume_with_changes();
        }
        if observe.report.is_some() {
            fit = fit.measure_peak();
        }
        let prepared = fit.prepare()?;
        Runtime::new()?.block_on(async {
            let signals = Signals::stop(&stop, is_first);
            if !is_first {
                let prepared = if traces { traced(prepared) } else { prepared };
                let fitted = prepared.run(&mut ()).await?;
                return Ok(ended(&fitted, &signals));
            }
            let files = OutputFiles::open(&config, &observe)?;
            let mut terminal = Terminal {
                is_built_in: common.config.is_none(),
                config: config.clone(),
                screen: None,
                files,
            };
            let prepared = terminal.files.attach(prepared);
            let fitted = prepared.run(&mut terminal).await?;
            if fitted.end == End::Stopped {
                if output::reader_is_gone() {
                    say("nobody reads standard output any more, which ends the run");
                }
                say(how_to_go_on(&config, common.config.as_deref(), fitted.summary.steps));
            }
            Ok(ended(&fitted, &signals))
        })
    };
    let outcome = run().map_err(|error| layers.locate(error));
    if let (Err(error), Some(fabric)) = (&outcome, &fabric) {
        fabric::end(&**fabric, error);
    }
    outcome
}

/// Adds a timeline that the first process collects. The run goes on without it if there is no file.
fn traced(prepared: Prepared) -> Prepared {
    match telemetry::Trace::unnamed() {
        Ok(trace) => prepared.trace(trace),
        Err(error) => {
            say(format_args!("--trace: a rank has no temporary file for its events: {error}"));
            prepared
        }
    }
}

/// The message about a run that was stopped: how to resume it, or why that is impossible.
fn how_to_go_on(config: &Config, file: Option<&Path>, step: u64) -> String {
    let keeps = config.checkpoint.directory.is_some() || config.eps.tier == EpsTier::File;
    match (keeps, file) {
        (true, Some(file)) => format!(
            "stopped after step {step}; `l2l train {} --resume` goes on, with the same --set flags",
            file.display()
        ),
        (true, None) => {
            format!("stopped after step {step}; the same command with --resume goes on")
        }
        (false, _) => format!(
            "stopped after step {step}; nothing is kept of it, because checkpoint.directory is not \
             set"
        ),
    }
}

/// The end of a run. A run can stop without a signal to this process: because nobody reads its
/// output any more, or because another process of the run got a signal.
fn ended(fitted: &Fitted, signals: &Signals) -> Exit {
    const TERMINATE: u8 = 15;
    match (fitted.end, signals.ended()) {
        (End::Stopped, Exit::Well) if !output::reader_is_gone() => Exit::Signalled(TERMINATE),
        (End::Stopped, by_signal) => by_signal,
        _ => Exit::Well,
    }
}

/// Shows a run on the terminal.
struct Terminal {
    is_built_in: bool,
    config: Config,
    /// The screen, once the run has started.
    screen: Option<Screen>,
    files: OutputFiles,
}

#[async_trait]
impl Callbacks for Terminal {
    fn started(&mut self, trainer: &Trainer, steps: u64) {
        let ceiling = trainer.watch().view(0).device_budget;
        let first = trainer.progress().step;
        let screen = Screen::new(self.config.log.format, first, steps, ceiling);
        if self.is_built_in {
            screen.say(NO_FILE);
        }
        self.screen = Some(screen);
        self.files.started(trainer);
    }

    fn event(&mut self, event: &Value) {
        self.screen.iter().for_each(|screen| screen.event(event));
    }

    async fn step(
        &mut self,
        _: &mut Trainer,
        report: &StepReport,
    ) -> Result<ControlFlow<()>, Error> {
        self.screen.iter_mut().for_each(|screen| screen.step(report));
        Ok(match output::reader_is_gone() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
    }

    fn validation(&mut self, step: u64, evaluation: &Evaluation) {
        self.screen.iter_mut().for_each(|screen| screen.validation(step, evaluation));
    }

    fn checkpoint(&mut self, directory: &Path) {
        let written = format_args!("checkpoint {}", directory.display());
        self.screen.iter().for_each(|screen| screen.say(written));
    }

    fn message(&mut self, message: &RunMessage) {
        match (message, &self.screen) {
            (RunMessage::Info(text), Some(screen)) => screen.say(text),
            (RunMessage::Listening(address), _) => say(format_args!("live at http://{address}/")),
            (RunMessage::Info(text) | RunMessage::Warning(text), _) => say(text),
            (RunMessage::Lost(text), _) => output::lose(text),
            _ => {}
        }
    }

    fn ended(&mut self, outcome: Result<&Fitted, &Error>) {
        if let (Ok(fitted), Some(screen)) = (outcome, &mut self.screen) {
            if let Some(watch) = self.files.watch() {
                screen.chart(&watch.view(0).losses);
            }
            let Fitted { summary, weights_digest, .. } = fitted;
            screen.summary(summary, Some(weights_digest), self.config.device.link.as_deref(), &[]);
        }
        self.files.write(&self.config);
    }
}
