//! Makes memory and parameters, and starts devices, lanes and the ring, once all files are open.

use std::collections::BTreeSet;
use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::check::CheckedRun;
use super::open::{OpenRun, Origin};
use crate::checkpoint::{self, Identity, LayerCount, Progress};
use crate::data::References;
use crate::engine::Engine;
use crate::eps::{Eps, lost};
use crate::error::Error;
use crate::hf::Load;
use crate::machine;
use crate::models::{Model, ModelLayer};
use crate::resolve;
use crate::telemetry::{Ledger, RunStatus, StepReports, Watch, Watched, made_up_name, seconds_of};
use crate::trainer::Trainer;
use crate::worker::{Emulated, Worker, WorkerParts};

impl OpenRun {
    /// Makes memory, fills it, and starts lanes and actors on the caller's tokio runtime.
    ///
    /// # Errors
    /// The device, the memory or the threads are not there; the parameters cannot be read.
    pub(super) fn launch(self) -> Result<Trainer, Error> {
        let OpenRun { checked, eps, origin, layers, changes } = self;
        let CheckedRun { run, largest, plan, rule, learning_rate, options } = checked;
        let ledger = Arc::new(Ledger::new(largest.layers.len(), plan.devices(), options.observers));
        let parts = WorkerParts {
            model: largest,
            plan: plan.clone(),
            rule,
            learning_rate,
            eps,
            records: ledger.clone(),
        };
        let worker = Worker::new(&run.config, parts)?;
        let (progress, new_tensors) = worker.fill(|eps| fill(eps, origin, &run, layers))?;
        let work = Emulated::new(&run.config, worker, options.without_copies)?;
        let mut engine = Engine::start(run.config.clone(), work, progress.step)?;
        engine.resume(progress.skipped, progress.loss_scale);
        if run.config.model.max_layers.is_some() {
            engine.use_layers(run.model.shape.layers);
        }
        let mut status = RunStatus::new(run.steps, run.config.window());
        status.resumed = progress.step;
        status.checkpoints_since = run.config.checkpoint.directory.as_ref().map(|_| status.started);
        let written = options.resume.and_then(|from| from.metadata().ok()?.modified().ok());
        status.checkpoint = written.map(seconds_of);
        let watch = watch(&run, &engine, ledger, status);
        if let Some(parts) = engine.worker().eps().parts() {
            let exchanges = &parts.exchanges;
            let watch = watch.clone();
            exchanges.report_with(move || watch.numbers());
            let clock = exchanges.clock_offset(&|| engine.now()).map_err(lost)?;
            options.trace.iter().for_each(|trace| trace.is_of(exchanges.rank(), clock));
        }
        Ok(Trainer {
            run,
            plan,
            learning_rate,
            engine,
            progress,
            begin: Instant::now(),
            reports: StepReports::new(watch.clone()),
            watch,
            trace: options.trace,
            room: options.room,
            writing: None,
            last_checkpoint: None,
            changes,
            new_tensors,
        })
    }
}

/// Fills the EPS from where the run begins. Returns the progress, and the tensors that a pretrained
/// model does not have.
fn fill(
    eps: &Eps,
    origin: Origin,
    run: &Identity,
    layers: Option<LayerCount>,
) -> Result<(Progress, Vec<String>), Error> {
    let mut new_tensors = Vec::new();
    let is_of_folder = matches!(origin, Origin::File(_));
    let progress = match origin {
        Origin::File(progress) => progress,
        Origin::Checkpoint(checkpoint) => checkpoint.read(run, eps)?,
        Origin::New => {
            let how = Load::to_train(!run.config.model.unsealed);
            new_tensors = resolve::load_first(&run.config, &run.model, eps, how)?;
            resolve::check_missing(&run.config, &run.model, &new_tensors)?;
            Progress { layers, ..Progress::default() }
        }
    };
    eps.begin_at(progress.step);
    if let Some(file) = eps.file() {
        if let Some(folder) = file.folder().filter(|_| !is_of_folder) {
            // That of an earlier run. This run has its own, or will have it.
            _ = fs::remove_file(folder.join(References::FILE));
        }
        file.set_run(checkpoint::remembered(run, &progress));
        file.seal(progress.step).map_err(|error| Error::storage("eps.path", error))?;
    }
    Ok((progress, new_tensors))
}

/// The handle that shows the run.
fn watch(run: &Identity, engine: &Engine, ledger: Arc<Ledger>, status: RunStatus) -> Watch {
    let plan = &engine.plan;
    Watch(Arc::new(Watched {
        run: run.config.metrics.run.clone().unwrap_or_else(made_up_name),
        devices: run.config.device_names(),
        ledger,
        used: engine.worker().used().clone(),
        status: Mutex::new(status),
        observer: engine.observer(),
        plan: plan.clone(),
        reports: engine.worker().eps().parts().map(|parts| parts.exchanges.reports()),
        link: run.config.device.link.clone(),
        layers: layers(&engine.model),
        budget: plan
            .budget()
            .or_else(|| plan.gpu_bytes())
            .or_else(machine::available_memory)
            .unwrap_or(plan.device_bytes()),
        peak_flops: Mutex::new(None),
    }))
}

/// For each layer: whether the device computes it, and whether it is the first to use a block.
fn layers(model: &Model) -> Vec<(bool, bool)> {
    let mut met = BTreeSet::new();
    let parts = model.layers.iter().zip(&model.layer_blocks);
    let of = |(part, blocks): (&ModelLayer, &Vec<_>)| {
        let new = blocks.iter().filter(|&&block| met.insert(block)).count();
        (part.is_on_device(), new > 0)
    };
    parts.map(of).collect()
}
