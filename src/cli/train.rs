//! `l2l train`: steps, looks at what was kept aside, checkpoints, and a clean end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use l2l::checkpoint::Keeper;
use l2l::config::{DataConfig, EpsTier};
use l2l::data::{Baseline, Batches, Dataset, baselines};
use l2l::{Config, Error, StepReport, Summary, Trainer, shape_of};
use serde_json::json;

use super::journal::Journal;
use super::observe::Observers;
use super::progress::Screen;
use super::{BUILT_IN, Ended, TrainArguments, say};

/// What a run needs beside its trainer, checked before any of it starts.
pub(super) struct Prepared {
    pub(super) config: Config,
    pub(super) train: Dataset,
    pub(super) steps: u64,
    aside: Aside,
}

/// What is not trained on, and what is kept.
struct Aside {
    /// What was kept aside to look at.
    held: Option<Dataset>,
    baseline: Option<Baseline>,
    keeper: Option<Keeper>,
}

impl Prepared {
    /// Opens data and directories.
    pub(super) fn new(config: Config) -> Result<Prepared, Error> {
        let shape = shape_of(&config)?;
        let (train, held) = Dataset::open(&config, &shape)?;
        let steps = config.steps(train.len())?;
        Batches::check(&config, &train, steps)?;
        let (batch, batches) = (config.step.batch, config.validation.batches);
        let baseline = match &held {
            Some(held) if config.data.train.is(DataConfig::BUILT_IN) && held.is_bytes() => {
                let most = batches.saturating_mul(batch as u64);
                Some(baselines(&train, held, most)?)
            }
            _ => None,
        };
        if held.is_none() && config.validation.every_steps.is_some() {
            return Err(Error::Config {
                key: "validation.every_steps".into(),
                problem: "has nothing to look at: set data.validation or data.validation_split"
                    .into(),
            });
        }
        let keep = config.checkpoint.keep;
        let directory = config.checkpoint.directory.as_deref();
        let keeper = directory.map(|directory| Keeper::open(directory, keep)).transpose()?;
        Ok(Prepared { config, train, steps, aside: Aside { held, baseline, keeper } })
    }
}

/// A tokio runtime: a worker for the ring and for signals, beside the main thread.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.map_err(|error| Error::Failed(format!("no runtime: {error}")))
}

pub(super) fn train(arguments: TrainArguments) -> Result<Ended, Error> {
    let TrainArguments { common, resume, observe } = arguments;
    let (config, layers) = common.read(Some(BUILT_IN), observe.metrics.clone())?;
    let run = || -> Result<Ended, Error> {
        let Prepared { mut config, train, steps, aside } = Prepared::new(config)?;
        let newest = aside.keeper.as_ref().and_then(Keeper::newest);
        // Of a state on file and a checkpoint, what is further.
        let checkpointed = aside.keeper.as_ref().and_then(Keeper::newest_step);
        let on_file = match l2l::state_on_file(&config) {
            Ok(found) => found.filter(|_| resume),
            Err(error) if resume && checkpointed.is_some() => {
                say(format_args!("{error}: goes on from a checkpoint"));
                None
            }
            Err(error) => return Err(error),
        };
        let goes_on = on_file.is_some_and(|step| checkpointed.is_none_or(|other| other <= step));
        let from = match (&aside.keeper, newest, resume) {
            (_, _, true) if goes_on => None,
            (None, _, true) if config.eps.tier == EpsTier::Memory => {
                let what = "--resume: from where? Set checkpoint.directory, or eps.tier to file";
                return Err(Error::Refused(what.into()));
            }
            (Some(_), Some(found), false) => {
                return Err(Error::Config {
                    key: "checkpoint.directory".into(),
                    problem: format!(
                        "has the checkpoints of a run, {} the newest: go on with --resume, or give \
                         this run another directory",
                        found.display()
                    ),
                });
            }
            (_, newest, _) => newest,
        };
        runtime()?.block_on(async {
            let stop = on_signal();
            let mut observers = Observers::open(&mut config, &observe)?;
            if resume && from.is_none() && !goes_on {
                say("--resume: there is no checkpoint yet, so this run begins");
            }
            let mut builder = Trainer::builder(config.clone()).steps(steps);
            if aside.keeper.is_some() || config.eps.tier == EpsTier::File {
                builder = builder.data(train.fingerprint());
            }
            if let Some(from) = from {
                builder = builder.resume(from);
            }
            if goes_on {
                builder = builder.go_on();
            }
            let trainer = observers.attach(builder).start()?;
            if trainer.reads_through_cache() {
                say("eps.path: no direct requests there, so the file goes through the system's cache");
            }
            observers.show(trainer.watch());
            let journal = Journal::open(&config.log)?;
            let batches = Batches::start(&config, train, trainer.progress().step)?;
            let ceiling = config.device.memory.bytes().unwrap_or(trainer.plan().device_bytes());
            let first = trainer.progress().step;
            let screen = Screen::new(journal, config.log.format, first, steps, ceiling);
            if common.config.is_none() {
                screen
                    .say("no config given: trains on this project's text (examples/built_in.toml)");
            }
            let run =
                Run { trainer, config, steps, aside, screen, observers: &observers, saved: None };
            let config = run.config.clone();
            let ended = run.go(batches, &stop).await;
            if let (Err(_), Ok(Some(step))) = (&ended, l2l::state_on_file(&config)) {
                say(format_args!("eps.path holds the state after step {step}: go on with --resume"));
            }
            observers.close(&config, ended.is_ok());
            ended
        })
    };
    run().map_err(|error| layers.locate(error))
}

/// Set by the first signal, an interrupt or a request to end; a second ends the process at once.
pub(super) fn on_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
            let stop = stop.clone();
            tokio::spawn(async move {
                let Ok(mut signals) = signal(kind) else { return };
                while signals.recv().await.is_some() {
                    heard(&stop);
                }
            });
        }
    }
    #[cfg(not(unix))]
    {
        let stop = stop.clone();
        tokio::spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                heard(&stop);
            }
        });
    }
    stop
}

fn heard(stop: &AtomicBool) {
    if stop.swap(true, Relaxed) {
        std::process::exit(130);
    }
    say("finishing this step; once more to stop at once");
}

/// A run on its way.
struct Run<'o> {
    trainer: Trainer,
    config: Config,
    steps: u64,
    aside: Aside,
    screen: Screen,
    observers: &'o Observers,
    /// The step of the last checkpoint.
    saved: Option<u64>,
}

impl Run<'_> {
    async fn go(mut self, mut batches: Batches, stop: &AtomicBool) -> Result<Ended, Error> {
        let first = self.trainer.progress().step;
        if first > 0 {
            self.screen.say(format_args!("goes on from step {first}"));
        }
        let looked = self.steps(&mut batches, stop).await;
        drop(batches);
        let step = self.trainer.progress().step;
        let looked = match looked {
            Ok(looked) => looked,
            Err(error) => {
                // What the data's fault is need not cost the steps before it.
                if !matches!(error, Error::Ring(_)) && step > first {
                    self.save(false).await?;
                }
                return Err(error);
            }
        };
        if self.is_tired() {
            self.screen.say(format_args!("stops early at step {step}: no look was better"));
        }
        if step > first {
            self.save(false).await?;
        }
        if self.aside.held.is_some() && !stop.load(Relaxed) {
            let loss = match looked {
                Some((at, loss)) if at == step => Some(loss),
                _ => self.look(stop).await?,
            };
            if let Some(loss) = loss {
                self.compare(loss, stop).await?;
            }
        }
        let summary = self.trainer.stop().await?;
        self.screen.summary(&summary, self.config.device.link.as_deref(), &[]);
        Ok(if stop.load(Relaxed) { Ended::Interrupted } else { Ended::Well })
    }

    /// True when too many looks in a row brought nothing better.
    fn is_tired(&self) -> bool {
        let patience = self.config.validation.patience;
        patience.is_some_and(|most| self.trainer.progress().looks_since >= most)
    }

    /// All steps, with looks and checkpoints between them; the last look, and at which step.
    async fn steps(
        &mut self,
        batches: &mut Batches,
        stop: &AtomicBool,
    ) -> Result<Option<(u64, f64)>, Error> {
        let (look, save) = (self.config.validation.every_steps, self.config.checkpoint.every_steps);
        let is_due =
            |every: Option<u64>, step: u64| every.is_some_and(|every| step.is_multiple_of(every));
        let mut looked = None;
        // A look that a stop cut short comes first.
        let (first, last) = (self.trainer.progress().step, self.trainer.progress().looked_at);
        if first > 0 && is_due(look, first) && last != Some(first) {
            match self.look_and_note(stop).await? {
                Some(loss) => looked = Some((first, loss)),
                None => return Ok(None),
            }
        }
        while self.trainer.progress().step < self.steps && !self.is_tired() && !stop.load(Relaxed) {
            let report = self.trainer.step(batches.next().await?).await?;
            self.screen.step(&report);
            self.observers.step(&report);
            let step = report.step;
            if is_due(look, step) {
                let Some(loss) = self.look_and_note(stop).await? else { break };
                looked = Some((step, loss));
            }
            if is_due(save, step) {
                self.save(false).await?;
            }
        }
        Ok(looked)
    }

    /// A look that counts: for patience, and for the best.
    async fn look_and_note(&mut self, stop: &AtomicBool) -> Result<Option<f64>, Error> {
        let loss = self.look(stop).await?;
        if let Some(loss) = loss
            && self.trainer.note(loss)
        {
            self.save(true).await?;
        }
        Ok(loss)
    }

    /// Looks at what was kept aside; nothing when it is told to stop meanwhile.
    async fn look(&mut self, stop: &AtomicBool) -> Result<Option<f64>, Error> {
        let (batch, batches) = (self.config.step.batch, self.config.validation.batches);
        let held = self.aside.held.as_ref().expect("a run looks where there is something");
        let goes_on = |_: &_| !stop.load(Relaxed);
        let in_order = held.in_order(batch, batches).take_while(goes_on);
        let found = self.trainer.evaluate(in_order).await?;
        if stop.load(Relaxed) {
            return Ok(None);
        }
        self.screen.validation(self.trainer.progress().step, &found);
        Ok(Some(found.loss))
    }

    /// Writes a checkpoint of this step, unless it is there.
    async fn save(&mut self, as_best: bool) -> Result<(), Error> {
        let Some(keeper) = &self.aside.keeper else { return Ok(()) };
        let step = self.trainer.progress().step;
        if as_best {
            self.trainer.checkpoint(&keeper.best_place(step)).await?;
            return keeper.tidy_best(step);
        }
        if self.saved != Some(step) {
            self.trainer.checkpoint(&keeper.place(step)).await?;
            self.saved = Some(step);
        }
        keeper.tidy()
    }

    /// What the model learnt of the built-in text, beside what counting would have.
    async fn compare(&mut self, loss: f64, stop: &AtomicBool) -> Result<(), Error> {
        let Some(Baseline { unigram, bigram }) = self.aside.baseline else { return Ok(()) };
        self.screen.event(
            json!({ "event": "baseline", "unigram": unigram, "bigram": bigram }),
            format_args!(
                "held-out loss {loss:.4} nats a byte; counting bytes gives {unigram:.4}, counting \
                 pairs {bigram:.4}"
            ),
        );
        const PROMPT: &str = "//! The ";
        const LENGTH: u64 = 240;
        let mut tokens: Vec<u32> = PROMPT.bytes().map(u32::from).collect();
        for drawn in 0..LENGTH {
            if stop.load(Relaxed) {
                return Ok(());
            }
            let seed = self.config.step.seed.wrapping_add(drawn);
            tokens.extend(self.trainer.sample(&tokens, 1, 0.7, seed).await?);
        }
        let drawn = tokens[PROMPT.len()..].iter();
        let text: Vec<u8> = drawn.map(|&token| u8::try_from(token).unwrap_or(b'?')).collect();
        let text = String::from_utf8_lossy(&text);
        self.screen.event(
            json!({ "event": "sample", "prompt": PROMPT, "text": text }),
            format_args!("a sample, from {PROMPT:?} on:\n{PROMPT}{text}"),
        );
        Ok(())
    }
}

/// Steps of `bench`: no looks, no checkpoints, and copies if they are wanted.
pub(super) async fn only_steps(
    config: &Config,
    prepared: Prepared,
    copies: bool,
    mut each: impl FnMut(&StepReport),
) -> Result<Summary, Error> {
    let builder = Trainer::builder(config.clone()).steps(prepared.steps).trial();
    let builder = if copies { builder } else { builder.without_copies() };
    let mut trainer = builder.start()?;
    let mut batches = Batches::start(config, prepared.train, 0)?;
    for _ in 0..prepared.steps {
        each(&trainer.step(batches.next().await?).await?);
    }
    trainer.stop().await
}
