//! Inference: a model that is evaluated, or that generates text. There are no gradients and no
//! optimizer states; layers come to the device and leave it, as in training.

mod evaluate;
mod generate;
mod quality;
mod sampling;

use std::path::Path;
use std::sync::Arc;

pub(crate) use evaluate::evaluate;
pub use evaluate::{Evaluation, Evaluator};
pub(crate) use generate::generate;
pub use generate::{Ended, Generator, Then};
pub use quality::{Agreement, Confusion, Quality};
pub(crate) use sampling::Dice;
pub use sampling::Sampling;

use crate::blocking::unblock;
use crate::config::{Config, EpsTier, LoraConfig, ModelConfig, NewLayers, TrainConfig};
use crate::engine::Engine;
use crate::eps::{Eps, FileTier};
use crate::error::Error;
use crate::hf::{self, Load};
use crate::models::Model;
use crate::optimizers::StateLayout;
use crate::plan::Plan;
pub use crate::plan::Room;
use crate::telemetry::Ledger;
use crate::worker::{Emulated, Worker, WorkerParts};

/// A model loaded for inference, with its engine.
struct Loaded {
    engine: Engine,
}

/// Makes a config load its model from a directory, such as a checkpoint's, in place of the model
/// that it named before. A directory of adapters comes to the model that the config names, or else
/// to the one that the adapters name.
pub fn load_from(config: &mut Config, directory: &Path) {
    if hf::has_adapters(directory) {
        let ModelConfig { path, preset, .. } = &mut config.model;
        if path.is_none() && preset.is_none() {
            *path = hf::base_of(directory);
        }
        config.train.lora = Some(LoraConfig { path: Some(directory.into()), ..Default::default() });
        return;
    }
    if config.model.path.as_deref() != Some(directory) {
        config.train = TrainConfig::default();
    }
    let ModelConfig { task, labels, unsealed, .. } = std::mem::take(&mut config.model);
    let path = Some(directory.into());
    config.model = ModelConfig { path, task, labels, unsealed, ..ModelConfig::default() };
    // Nothing is added to a model that is not trained.
    (config.depth.stack_at, config.depth.new_layers) = (Vec::new(), NewLayers::Copy);
}

/// A model of one's own, or the one that a config names.
fn model_of(config: &Config, own: Option<Model>) -> Result<Model, Error> {
    let Some(mut model) = own else { return hf::model_of(config, hf::shape_of(config)?) };
    if config.train.lora.is_some() {
        let problem = "is for a model that the config names: give a model of your own its \
                       adapters as tensors of its layers";
        return Err(Error::config("train.lora", problem));
    }
    model.freeze(&hf::training_of(config)?)?;
    model.check_names()?;
    Ok(model)
}

impl Loaded {
    /// Makes everything: memory, weights, threads, tasks on the caller's tokio. It blocks.
    fn start(config: Config, model: Model, plan: Plan) -> Result<Loaded, Error> {
        let (rule, rate) = (Box::new(config.update_rule()), config.learning_rate(1));
        if let Some(misfit) = plan.misfits(&model, &*rule).into_iter().next() {
            return Err(Error::DoesNotFit(misfit));
        }
        let (model, plan) = (Arc::new(model), Arc::new(plan));
        let none = StateLayout::default();
        let eps = match config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File) {
            Some(path) => {
                let refused =
                    |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
                let file = FileTier::unnamed(path, &model.blocks, false, &none, |_| false);
                Eps::on_file(model.blocks.clone(), none, file.map_err(refused)?)
            }
            None => Eps::in_memory(model.blocks.clone(), none, |_| false),
        };
        let ledger = Arc::new(Ledger::new(model.layers.len(), plan.devices, Vec::new()));
        let parts = WorkerParts {
            model: model.clone(),
            plan,
            rule,
            learning_rate: rate,
            eps,
            records: ledger,
        };
        let worker = Worker::new(&config, parts)?;
        worker.eps().randomise(worker.model(), config.step.seed)?;
        hf::check_seals(&config)?;
        let how = Load::to_use(!config.model.unsealed);
        if let Some(path) = config.model.path.as_ref().filter(|_| !config.model.random_weights) {
            hf::load(path, &model, worker.eps(), how)?;
        }
        if let Some(path) = config.train.lora.as_ref().and_then(|lora| lora.path.as_ref()) {
            hf::load_adapters(path, &model, worker.eps(), how)?;
        }
        let work = Emulated::new(&config, worker, false)?;
        Ok(Loaded { engine: Engine::start(config, work, 0)? })
    }

    async fn stop(self) -> Result<(), Error> {
        let lanes = self.engine.stop().await?;
        unblock(move || drop(lanes)).await;
        Ok(())
    }
}
