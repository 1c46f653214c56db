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
pub use generate::{Ended, Generator, Room};
pub use quality::{Agreement, Confusion, Quality};
pub(crate) use sampling::Dice;
pub use sampling::Sampling;

use crate::config::{Config, EpsTier, ModelConfig, NewLayers};
use crate::engine::Engine;
use crate::eps::{Eps, FileTier};
use crate::error::Error;
use crate::hf;
use crate::models::Model;
use crate::plan::Plan;
use crate::telemetry::Ledger;
use crate::worker::{Parts, Worker};

/// A model loaded for inference, with its engine.
struct Loaded {
    engine: Engine,
}

/// Makes a config load its model from a directory, such as a checkpoint's, in place of the model
/// that it named before.
pub fn load_from(config: &mut Config, directory: &Path) {
    let ModelConfig { task, labels, .. } = std::mem::take(&mut config.model);
    config.model =
        ModelConfig { path: Some(directory.into()), task, labels, ..config.model.clone() };
    // Nothing is added to a model that is not trained.
    (config.depth.stack_at, config.depth.new_layers) = (Vec::new(), NewLayers::Copy);
}

impl Loaded {
    /// Makes everything: memory, weights, threads, tasks on the caller's tokio.
    fn start(config: Config, model: Model, plan: Plan) -> Result<Loaded, Error> {
        let (rule, rate) = (Box::new(config.update_rule()), config.learning_rate(1));
        if let Some(misfit) = plan.misfits(&model, &*rule).into_iter().next() {
            return Err(Error::DoesNotFit(misfit));
        }
        let (model, plan) = (Arc::new(model), Arc::new(plan));
        let eps = match config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File) {
            Some(path) => {
                let refused =
                    |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
                let file = FileTier::unnamed(path, &model.blocks, false, 0, |_| false);
                Eps::on_file(model.blocks.clone(), 0, file.map_err(refused)?)
            }
            None => Eps::in_memory(model.blocks.clone(), 0, |_| false),
        };
        let eps = eps.published_as(config.device.dtype);
        let ledger = Arc::new(Ledger::new(model.parts.len(), plan.devices, Vec::new()));
        let parts = Parts {
            model: model.clone(),
            plan,
            rule,
            learning_rate: rate,
            eps,
            records: ledger,
            copies: true,
        };
        let worker = Worker::new(&config, parts)?;
        worker.eps().randomise(worker.model(), config.step.seed)?;
        if let Some(path) = config.model.path.as_ref().filter(|_| !config.model.random_weights) {
            hf::load(path, &model, worker.eps(), false)?;
        }
        Ok(Loaded { engine: Engine::start(config, worker, 0)? })
    }

    fn model(&self) -> &Model {
        &self.engine.model
    }

    async fn stop(self) -> Result<(), Error> {
        self.engine.stop().await.map(drop)
    }
}
