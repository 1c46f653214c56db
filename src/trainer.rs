//! A training run: a model, a device, a ring and batches, from a config.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use l2l_actors::schedule::Schedule;
use l2l_actors::threads::ThreadLanes;
use l2l_actors::{Config as RingConfig, Relay};

use crate::config::{Config, Plan, Term, schedule_of};
use crate::data::{Batch, Source};
use crate::devices::cpu::{Cpu, HEAD_LIMIT};
use crate::error::Error;
use crate::hf;
use crate::models::{Dropouts, Gelu, Model, Shape};

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Mean cross entropy over the labelled positions of the batch.
    pub loss: f64,
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// The step's learning rate.
    pub learning_rate: f64,
    /// Input tokens, without padding.
    pub tokens: usize,
    /// From the end of the step before, or the start, to its end.
    pub seconds: f64,
    /// Time in which the compute lane stood still.
    pub exposed_wait_seconds: f64,
    /// The most bytes of the device that were in use.
    pub device_peak_bytes: u64,
}

/// What a run did.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Steps.
    pub steps: u64,
    /// Seconds, with the last updates.
    pub seconds: f64,
    /// SHA-256 of the masters in block order.
    pub weights_digest: String,
    /// Visits of the device and the host.
    pub visits: u64,
    /// Bytes to the device.
    pub bytes_uploaded: u64,
    /// Bytes from the device.
    pub bytes_downloaded: u64,
}

/// The shape of the model a config names.
///
/// # Errors
/// The preset or path is unknown, or sizes contradict each other.
pub fn shape_of(config: &Config) -> Result<Shape, Error> {
    let model = &config.model;
    let mut shape = match (&model.path, model.preset.as_deref().unwrap_or("gpt-small")) {
        (Some(path), _) => hf::read_shape(path)?,
        (None, "gpt-small") => Shape {
            layers: 6,
            hidden: 256,
            heads: 8,
            intermediate: 1024,
            vocabulary: 256,
            positions: 256,
            gelu: Gelu::Tanh,
            layer_norm_epsilon: 1e-5,
            dropout: Dropouts::default(),
            tied: true,
            initializer_range: 0.02,
        },
        (None, other) => {
            return Err(Error::refused(format_args!(
                "model.preset is {other:?}: \"gpt-small\" is what there is"
            )));
        }
    };
    let overrides = [
        (&mut shape.layers, model.layers),
        (&mut shape.hidden, model.hidden),
        (&mut shape.heads, model.heads),
        (
            &mut shape.intermediate,
            model.intermediate.or(model.hidden.map(|hidden| hidden.saturating_mul(4))),
        ),
        (&mut shape.vocabulary, model.vocabulary),
        (&mut shape.positions, model.positions),
    ];
    for (size, given) in overrides {
        match given {
            Some(_) if model.path.is_some() => {
                return Err(Error::refused(
                    "model.path has its own sizes: leave out layers, hidden, heads, intermediate, vocabulary and positions",
                ));
            }
            Some(given) => *size = given,
            None => {}
        }
    }
    if let Some(p) = model.dropout {
        shape.dropout = Dropouts { embedding: p, attention: p, residual: p };
    }
    check_shape(&shape)?;
    Ok(shape)
}

fn check_shape(shape: &Shape) -> Result<(), Error> {
    let Shape { layers, hidden, heads, intermediate, vocabulary, positions, .. } = *shape;
    let limit = |size: usize, most: usize| (1..=most).contains(&size);
    let sizes = [
        ("layers", layers, 100_000),
        ("hidden", hidden, 1 << 20),
        ("heads", heads, 1 << 11),
        ("intermediate", intermediate, 1 << 22),
        ("vocabulary", vocabulary, 1 << 24),
        ("positions", positions, 1 << 20),
    ];
    for (name, size, most) in sizes {
        if !limit(size, most) {
            return Err(Error::refused(format_args!(
                "model.{name} is {size}: it must be 1 to {most}"
            )));
        }
    }
    if hidden % heads != 0 || hidden / heads > HEAD_LIMIT {
        return Err(Error::refused(format_args!(
            "model.hidden is {hidden}, model.heads {heads}: hidden must be a multiple of heads, \
             and at most {HEAD_LIMIT} times as much"
        )));
    }
    if !(shape.layer_norm_epsilon.is_finite() && shape.layer_norm_epsilon > 0.0) {
        return Err(Error::refused("the model's layer_norm_epsilon must be above 0"));
    }
    let Dropouts { embedding, attention, residual } = shape.dropout;
    if [embedding, attention, residual].iter().any(|p| !(0.0..1.0).contains(p)) {
        return Err(Error::refused("the model's dropout must be in [0, 1)"));
    }
    Ok(())
}

/// A run.
pub struct Trainer {
    config: Config,
    model: Arc<Model>,
    plan: Arc<Plan>,
    relay: Relay<ThreadLanes<Cpu>>,
    lanes: Arc<ThreadLanes<Cpu>>,
    source: Source,
    /// The schedule for sequences of so many positions.
    schedule: Option<(usize, Schedule)>,
    begin: Instant,
    last_end: Instant,
    steps: u64,
    visits: u64,
}

impl Trainer {
    /// Makes everything: memory, weights, threads, tasks on the caller's tokio.
    ///
    /// # Errors
    /// What is wrong with the config or what it names; nothing was started then.
    pub fn start(config: Config) -> Result<Trainer, Error> {
        let model = Arc::new(Model::gpt2(shape_of(&config)?));
        let plan = Arc::new(Plan::new(&config, &model)?);
        if let Some(misfit) = plan.misfits().into_iter().next() {
            return Err(Error::refused(misfit));
        }
        let mut source = Source::open(&config, model.shape.vocabulary, plan.positions)?;
        source.check(config.step.steps)?;
        let cpu = Cpu::new(&config, model.clone(), plan.clone())?;
        match &config.model.path {
            Some(path) => hf::load(path, &model, cpu.eps())?,
            None => cpu.eps().randomise(config.step.seed),
        }
        let lanes = Arc::new(ThreadLanes::start(cpu).map_err(Error::failed)?);
        let ring = RingConfig {
            pools: plan.pools,
            blocks: model.blocks.len() as u32,
            max_layers: model.parts.len() as u32,
            max_micro_batches: plan.micro_batches.len() as u32,
            deferred: plan.deferred,
            watchdog: Some(Duration::from_secs_f64(config.watchdog.seconds)),
            drill: None,
        };
        let relay = Relay::start(ring, lanes.clone());
        let now = Instant::now();
        Ok(Trainer {
            config,
            model,
            plan,
            relay,
            lanes,
            source,
            schedule: None,
            begin: now,
            last_end: now,
            steps: 0,
            visits: 0,
        })
    }

    /// The plan it runs by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The next step, on the next batch. Resolves when loss and norm are known.
    ///
    /// # Errors
    /// The batch has no label, or the ring failed.
    pub async fn step(&mut self) -> Result<StepReport, Error> {
        let batch = self.source.batch(self.steps)?;
        self.step_on(batch).await
    }

    /// The next step, on this batch of `step.batch` sequences.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn step_on(&mut self, batch: Batch) -> Result<StepReport, Error> {
        self.check_batch(&batch)?;
        let (tokens, positions) = (batch.token_count(), batch.positions);
        if self.schedule.as_ref().is_none_or(|(known, _)| *known != positions) {
            self.schedule = Some((positions, schedule_of(&self.config, &self.model, positions)?));
        }
        let (_, schedule) = self.schedule.as_ref().expect("it was just made");
        self.visits += schedule.visits.len() as u64;
        let waited = self.cpu().counts.waited();
        let resolved = self.relay.step(schedule, batch).await?;
        self.steps += 1;
        let now = Instant::now();
        let seconds = (now - std::mem::replace(&mut self.last_end, now)).as_secs_f64();
        Ok(StepReport {
            step: self.steps,
            loss: resolved.loss,
            grad_norm: resolved.norm,
            learning_rate: self.config.learning_rate().at(resolved.step),
            tokens,
            seconds,
            exposed_wait_seconds: (self.cpu().counts.waited() - waited).as_secs_f64(),
            device_peak_bytes: self.device_peak().iter().map(|term| term.bytes).sum(),
        })
    }

    /// What the plan was made for, whoever made the batch.
    fn check_batch(&self, batch: &Batch) -> Result<(), Error> {
        let (sequences, vocabulary) = (self.config.step.batch, self.model.shape.vocabulary);
        let longest = self.plan.positions;
        if batch.lengths.len() != sequences || batch.lengths.contains(&0) {
            return Err(Error::refused(format_args!(
                "a batch of {} sequences, some of them perhaps empty: step.batch is {sequences}",
                batch.lengths.len()
            )));
        }
        if batch.positions > longest {
            return Err(Error::refused(format_args!(
                "a sequence of {} tokens: the plan was made for {longest} at most",
                batch.positions
            )));
        }
        let known = |token: u32| (token as usize) < vocabulary;
        let is_bad = |target: &&i32| **target >= 0 && !known(**target as u32);
        if let Some(token) = batch.tokens.iter().find(|token| !known(**token)) {
            return Err(Error::refused(format_args!(
                "token {token} is outside the vocabulary of {vocabulary}"
            )));
        }
        if let Some(label) = batch.targets.iter().find(is_bad) {
            return Err(Error::refused(format_args!(
                "label {label} is outside the vocabulary of {vocabulary}"
            )));
        }
        if batch.labelled == 0 {
            return Err(Error::refused("no position of the batch has a label"));
        }
        Ok(())
    }

    fn cpu(&self) -> &Cpu {
        self.lanes.hands()
    }

    /// The high-water mark of each term of the plan's device: slots handed out at once at most,
    /// and the workspace's greatest height.
    pub fn device_peak(&self) -> Vec<Term> {
        let pools = self.relay.snapshot().pools;
        let peak = |name: &str| pools.iter().find(|pool| pool.name == name).map(|pool| pool.peak);
        let floats = |name: &str| match name {
            "workspace" => self.cpu().counts.workspace.load(Relaxed) as usize,
            "weights" | "gradients" => peak(name).unwrap_or(0) as usize * self.plan.layout.block,
            "inputs" | "outputs" => peak(name).unwrap_or(0) as usize * self.plan.layout.boundary,
            _ if self.plan.stash_on_device => self.plan.stash_floats,
            _ => 0,
        };
        let term = |name| Term { name, bytes: (floats(name) * size_of::<f32>()) as u64 };
        self.plan.device.iter().map(|planned| term(planned.name)).collect()
    }

    /// Waits for all updates and writes the weights to a directory's `model.safetensors`, under
    /// transformers' names.
    ///
    /// # Errors
    /// The ring failed, or the file cannot be written.
    pub async fn save(&mut self, directory: &Path) -> Result<(), Error> {
        self.relay.settle().await?;
        hf::save(directory, &self.model, self.cpu().eps(), self.steps)
    }

    /// Waits for the last updates, ends all threads and tasks, and sums up.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn finish(self) -> Result<Summary, Error> {
        self.relay.stop().await?;
        let cpu = self.lanes.hands();
        Ok(Summary {
            steps: self.steps,
            seconds: self.begin.elapsed().as_secs_f64(),
            weights_digest: cpu.eps().digest(),
            visits: self.visits,
            bytes_uploaded: cpu.counts.uploaded.load(Relaxed),
            bytes_downloaded: cpu.counts.downloaded.load(Relaxed),
        })
    }
}
