//! The loop of a run: steps, with validations and checkpoints between them, and a clean end.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Between, Callbacks, End, Fitted, RunMessage, StopRequest};
use crate::blocking::unblock;
use crate::checkpoint::{self, Keeper, Progress};
use crate::config::{ByteSize, OnError};
use crate::data::{Baseline, Batches, Dataset};
use crate::error::Error;
use crate::inference::{Evaluation, Sampling};
use crate::plan::RankShare;
use crate::telemetry::EventLog;
use crate::trainer::Trainer;
use crate::trainer::reference::Measured;

/// Bytes of a sample of the built-in text during the run: a line of a terminal.
const SHORT_SAMPLE: u64 = 60;

/// Bytes of the sample at the end of the run: a few lines.
const LONG_SAMPLE: u64 = 240;

/// The time between two lines about a reference that is computed.
const EVERY: Duration = Duration::from_secs(10);

/// Steps in a row that may change nothing. A dynamic loss scale halves at each, so it comes from
/// its start to any scale that trains in fewer.
const MOST_SKIPPED: u64 = 100;

/// A run whose trainer is made.
pub(super) struct Run<'r> {
    pub(super) trainer: Trainer,
    pub(super) steps: u64,
    pub(super) between: Between,
    /// The records of the training data that were left out.
    pub(super) skipped_records: u64,
    pub(super) log: EventLog,
    pub(super) callbacks: &'r mut dyn Callbacks,
    pub(super) stop: StopRequest,
    /// The step of the last checkpoint that was begun.
    pub(super) saved: Option<u64>,
    /// The checkpoint that is being written.
    pub(super) writing: Option<Written>,
    /// The number of steps in a row, up to now, that changed nothing.
    pub(super) skipped: u64,
    /// The error of the last checkpoint, if it was not written.
    pub(super) lost: Option<Error>,
    /// The step and the loss of the last validation.
    pub(super) validated: Option<(u64, f64)>,
}

/// A checkpoint that is being written.
pub(super) struct Written {
    directory: PathBuf,
    progress: Progress,
    /// Further checkpoints of the same state. They become links to this one.
    links: Vec<PathBuf>,
}

impl Run<'_> {
    /// Trains to the end, and ends the trainer.
    pub(super) async fn finish(mut self, mut train: Dataset) -> Result<Fitted, Error> {
        let first = self.trainer.progress().step;
        if first > 0 {
            self.callbacks.info(format!("resumes from step {first}"));
            for change in self.trainer.changes() {
                self.callbacks.info(format!("changed: {change}"));
            }
        }
        if !self.trainer.new_tensors().is_empty() {
            let new = self.trainer.new_tensors().join(", ");
            self.callbacks.info(format!(
                "model.path does not have these tensors, which begin at random: {new}"
            ));
        }
        self.refer(&mut train).await?;
        let mut batches = Batches::start(self.trainer.config(), train, first)?;
        let trained = self.all_steps(&mut batches).await;
        drop(batches);
        let step = self.trainer.progress().step;
        if let Err(error) = trained {
            // The model is whole unless the ring failed, so a checkpoint keeps the steps before.
            // With several ranks there is none, because the others may be within a step.
            let is_alone = self.trainer.plan().share() == RankShare::WHOLE;
            // The first error is the one that is returned.
            if is_alone
                && !matches!(error, Error::Ring(_))
                && step > first
                && let Err(lost) = self.save().await
            {
                self.callbacks.warn(lost.to_string());
            }
            // The checkpoint that is being written becomes complete, even if the ring failed since.
            if let Err(lost) = self.end_checkpoint().await {
                self.callbacks.warn(lost.to_string());
            }
            return Err(error);
        }
        if self.is_out_of_patience() {
            self.callbacks.info(format!("stops early at step {step}: no validation was better"));
        }
        if step > first {
            self.save().await?;
        }
        self.validate_at_the_end(step).await?;
        self.end_checkpoint().await?;
        let end = match (self.is_stopped()?, self.is_out_of_patience()) {
            (true, _) => End::Stopped,
            (false, true) => End::Early,
            (false, false) => End::Complete,
        };
        let link = self.trainer.config().device.link.clone();
        let Run { mut trainer, mut log, callbacks, lost, validated, skipped_records, .. } = self;
        let weights_digest = trainer.digest().await?;
        let summary = trainer.stop().await?;
        let mut event = summary.event(Some(&weights_digest), link.as_deref());
        event["skipped_records"] = json!(skipped_records);
        report(&mut log, callbacks, &event);
        // With `checkpoint.on_error = "continue"` a run goes on without a checkpoint. It does not
        // succeed without the last one.
        if let Some(lost) = lost {
            return Err(lost);
        }
        let validation_loss = validated.map(|(_, loss)| loss);
        Ok(Fitted { end, summary, weights_digest, validation_loss })
    }

    /// Gives the records of all data the reference that the objective needs.
    async fn refer(&mut self, train: &mut Dataset) -> Result<(), Error> {
        let began = Instant::now();
        let mut said = began;
        let Run { trainer, between, callbacks, stop, .. } = self;
        let mut goes_on = |trainer: &Trainer, Measured { batches, of }: Measured| {
            if batches == 0 || said.elapsed() >= EVERY {
                said = Instant::now();
                callbacks.info(format!("reference: {batches} of {of} batches"));
            }
            Ok(!trainer.any_rank(stop.is_requested())?)
        };
        let mut sequences = 0;
        for data in [train].into_iter().chain(&mut between.validation) {
            sequences += trainer.refer(data, &mut goes_on).await?;
        }
        trainer.keep_references().await?;
        if sequences > 0 {
            let seconds = began.elapsed().as_secs_f64();
            let event = json!({ "event": "reference", "sequences": sequences, "seconds": seconds });
            self.report(&event);
        }
        Ok(())
    }

    /// True if too many validations in a row brought nothing better.
    fn is_out_of_patience(&self) -> bool {
        let patience = self.trainer.config().validation.patience;
        patience.is_some_and(|most| self.trainer.progress().validations_since >= most)
    }

    /// True if a stop was requested on any rank. Collective: every rank must call it.
    fn is_stopped(&self) -> Result<bool, Error> {
        self.trainer.any_rank(self.stop.is_requested())
    }

    /// All steps, with validations and checkpoints between them.
    async fn all_steps(&mut self, batches: &mut Batches) -> Result<(), Error> {
        let config = self.trainer.config();
        let validate_every = config.validation.every_steps;
        let save_every = config.checkpoint.every_steps;
        let is_due =
            |every: Option<u64>, step: u64| every.is_some_and(|every| step.is_multiple_of(every));
        // The run before may have stopped in the validation after its last step.
        let Progress { step: first, validated_at, .. } = *self.trainer.progress();
        if first > 0 && is_due(validate_every, first) && validated_at != Some(first) {
            self.validate_and_note().await?;
        }
        let steps = self.steps;
        while self.trainer.progress().step < steps
            && !self.is_out_of_patience()
            && !self.is_stopped()?
        {
            let step = self.step(batches).await?;
            if is_due(validate_every, step) {
                if !self.validate_and_note().await? {
                    break;
                }
                // On the built-in text, samples show how the model learns.
                if self.between.baseline.is_some() && step < steps {
                    self.show_sample(SHORT_SAMPLE).await?;
                }
            }
            if is_due(save_every, step) {
                self.save().await?;
            }
            if self.trainer.writes_checkpoint().is_none() {
                self.end_checkpoint().await?;
            }
        }
        Ok(())
    }

    /// Trains one step, and returns its number.
    async fn step(&mut self, batches: &mut Batches) -> Result<u64, Error> {
        let report = self.trainer.step(batches.next().await?).await?;
        self.report(&report.event());
        self.skipped = if report.skipped { self.skipped + 1 } else { 0 };
        if self.skipped == MOST_SKIPPED {
            return Err(Error::NotFinite(format!(
                "the last {MOST_SKIPPED} steps changed nothing, because their gradients were not \
                 finite (loss scale {:e}): set a smaller optimizer.learning_rate{}",
                report.loss_scale.unwrap_or(1.0),
                if report.loss_scale.is_some() { " or loss_scale.initial" } else { "" }
            )));
        }
        self.trainer.take_warnings().into_iter().for_each(|warning| self.callbacks.warn(warning));
        let then = self.callbacks.step(&mut self.trainer, &report).await?;
        if self.trainer.progress().step != report.step {
            let what = "a callback trained: fit has the batches of each step, and trains alone";
            return Err(Error::argument(what));
        }
        if then.is_break() {
            self.stop.stop();
        }
        Ok(report.step)
    }

    /// Validates, counts the result for patience, and begins the best checkpoint if it is the best.
    /// Returns false if a stop cut the validation off.
    async fn validate_and_note(&mut self) -> Result<bool, Error> {
        let Some(evaluation) = self.validate().await? else { return Ok(false) };
        if self.trainer.record_validation(&evaluation) {
            self.begin_checkpoint(Keeper::best_place).await?;
        }
        Ok(true)
    }

    /// Evaluates on all validation sets. Returns the evaluation of the first one, or `None` if a
    /// stop cut the validation off.
    async fn validate(&mut self) -> Result<Option<Evaluation>, Error> {
        let config = self.trainer.config();
        let batch = config.step.batch;
        let batches = config.validation.batches;
        let stop = self.stop.clone();
        // Ranks stop together, so with several of them none cuts its validation off.
        let is_alone = self.trainer.plan().share() == RankShare::WHOLE;
        let goes_on = || !is_alone || !stop.is_requested();
        let step = self.trainer.progress().step;
        let mut first = None;
        for data in &self.between.validation {
            let batches = data.in_order(batch, batches).take_while(|_| goes_on());
            let set = data.set_name();
            let evaluation = self.trainer.evaluate_set(set, first.is_none(), batches).await?;
            if !goes_on() {
                return Ok(None);
            }
            report(&mut self.log, self.callbacks, &evaluation.event(step));
            self.callbacks.validation(step, &evaluation);
            first.get_or_insert(evaluation);
        }
        self.validated = first.as_ref().map(|evaluation| (step, evaluation.loss));
        Ok(first)
    }

    /// Validates after the last step, unless the step had a validation already, and compares the
    /// loss with the baseline of the built-in text.
    async fn validate_at_the_end(&mut self, step: u64) -> Result<(), Error> {
        if self.between.validation.is_empty() || self.is_stopped()? {
            return Ok(());
        }
        if self.validated.is_none_or(|(at, _)| at != step) {
            self.validate_and_note().await?;
        }
        match (self.validated, self.between.baseline) {
            (Some((at, loss)), Some(baseline)) if at == step => self.compare(loss, baseline).await,
            _ => Ok(()),
        }
    }

    /// Begins a checkpoint of this step, unless it has one.
    async fn save(&mut self) -> Result<(), Error> {
        let step = self.trainer.progress().step;
        if self.saved != Some(step) {
            self.begin_checkpoint(Keeper::place).await?;
            self.saved = Some(step);
        }
        Ok(())
    }

    /// Begins a checkpoint at this place in `checkpoint.directory`, if it is set. Waits until the
    /// checkpoint before is complete.
    async fn begin_checkpoint(&mut self, place: fn(&Keeper, u64) -> PathBuf) -> Result<(), Error> {
        let Some(keeper) = self.between.keeper.clone() else { return Ok(()) };
        let progress = self.trainer.progress().clone();
        let directory = place(&keeper, progress.step);
        if let Some(same) = self.writing.as_mut().filter(|begun| begun.progress == progress) {
            same.links.push(directory);
            return Ok(());
        }
        self.end_checkpoint().await?;
        keeper.still_held()?;
        self.trainer.begin_kept_checkpoint(&directory, Some(keeper)).await?;
        self.writing = Some(Written { directory, progress, links: Vec::new() });
        Ok(())
    }

    /// Waits for the checkpoint that is being written, and removes the checkpoints that it
    /// replaces.
    async fn end_checkpoint(&mut self) -> Result<(), Error> {
        let Some(written) = self.writing.take() else { return Ok(()) };
        let step = written.progress.step;
        self.lost = None;
        let Err(error) = self.complete(written).await else { return Ok(()) };
        match self.trainer.config().checkpoint.on_error {
            OnError::Stop => Err(error),
            OnError::Continue => {
                let text = format!("the checkpoint of step {step} was not written: {error}");
                self.callbacks.warn(text);
                self.lost = Some(error);
                Ok(())
            }
        }
    }

    async fn complete(&mut self, written: Written) -> Result<(), Error> {
        let ended = self.trainer.end_checkpoint().await;
        if let Some(keeper) = &self.between.keeper {
            keeper.still_held()?; // A lost directory explains the errors of its files.
        }
        ended?;
        let Written { directory, links, .. } = written;
        let keeper = self.between.keeper.clone().filter(|_| self.trainer.is_first());
        let all: Vec<PathBuf> = [directory].into_iter().chain(links).collect();
        let linked = all.clone();
        unblock(move || match (keeper, &linked[..]) {
            (Some(keeper), [directory, links @ ..]) => {
                links.iter().try_for_each(|link| checkpoint::link(directory, link))?;
                linked.iter().try_for_each(|written| keeper.tidy(written))
            }
            _ => Ok(()),
        })
        .await??;
        all.iter().for_each(|directory| self.callbacks.checkpoint(directory));
        let disk = self.trainer.watch().status().checkpoint_disk;
        if let Some((bytes, free)) = disk.filter(|(bytes, free)| free < bytes) {
            let [bytes, free] = [bytes, free].map(ByteSize::from);
            self.callbacks.warn(format!(
                "the disk of checkpoint.directory has {free} free, and the next checkpoint needs \
                 {bytes}"
            ));
        }
        Ok(())
    }

    /// Compares the loss on the built-in text with its baseline, and shows a sample of the model.
    async fn compare(&mut self, loss: f64, baseline: Baseline) -> Result<(), Error> {
        let Baseline { unigram, bigram } = baseline;
        self.report(&json!({ "event": "baseline", "unigram": unigram, "bigram": bigram }));
        self.callbacks.info(format!(
            "held-out loss {loss:.4} nats a byte; counting bytes gives {unigram:.4}, counting \
             pairs {bigram:.4}"
        ));
        self.show_sample(LONG_SAMPLE).await
    }

    /// Shows `length` bytes of text from the model.
    async fn show_sample(&mut self, length: u64) -> Result<(), Error> {
        const PROMPT: &str = "//! The ";
        let mut tokens: Vec<u32> = PROMPT.bytes().map(u32::from).collect();
        for drawn in 0..length {
            if self.is_stopped()? {
                return Ok(());
            }
            let seed = self.trainer.config().step.seed.wrapping_add(drawn);
            let how = Sampling { temperature: 0.7, seed, ..Sampling::default() };
            tokens.extend(self.trainer.sample(&tokens, 1, how).await?);
        }
        let drawn = tokens[PROMPT.len()..].iter();
        let text: Vec<u8> = drawn.map(|&token| u8::try_from(token).unwrap_or(b'?')).collect();
        let text = String::from_utf8_lossy(&text);
        self.report(&json!({ "event": "sample", "prompt": PROMPT, "text": text }));
        self.callbacks.info(format!("a sample, from {PROMPT:?} on:\n{PROMPT}{text}"));
        Ok(())
    }

    fn report(&mut self, event: &Value) {
        report(&mut self.log, self.callbacks, event);
    }
}

/// Writes an event to the log, and passes it to the callbacks.
fn report(log: &mut EventLog, callbacks: &mut dyn Callbacks, event: &Value) {
    for lost in log.write(event) {
        callbacks.message(&RunMessage::Lost(lost));
    }
    callbacks.event(event);
}
