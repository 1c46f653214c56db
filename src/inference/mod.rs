//! Inference: evaluation and generation. There are no gradients and no optimizer states. Layers
//! come to the device and leave it, as in training.

mod evaluate;
mod generate;
mod quality;
mod retrieval;
mod sampling;

use std::path::Path;
use std::sync::Arc;

pub(crate) use evaluate::evaluate;
pub use evaluate::{Evaluation, Evaluator};
pub(crate) use generate::generate;
pub use generate::{Ended, Generator, Then};
pub use quality::{Agreement, Confusion, LabelCount, LabelCounts, Quality};
pub use retrieval::Retrieval;
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
use crate::resolve::{self, shape_of};
use crate::telemetry::Ledger;
use crate::worker::{Emulated, Worker, WorkerParts};

/// A model loaded for inference, with its engine.
struct Loaded {
    engine: Engine,
}

/// Lets a config name the model of a directory, such as a checkpoint. Adapters in the directory are
/// added to the model that the config names, or else to the model that the adapters name.
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
    let model = std::mem::take(&mut config.model);
    let ModelConfig { task, labels, problem_type, unsealed, default_prompt, prompts, .. } = model;
    let path = Some(directory.into());
    config.model = ModelConfig {
        path,
        task,
        labels,
        problem_type,
        unsealed,
        default_prompt,
        prompts,
        ..ModelConfig::default()
    };
    // A model that is not trained gets no layers.
    (config.depth.stack_at, config.depth.new_layers) = (Vec::new(), NewLayers::Copy);
}

/// The model that a config names, or a model that the program built by itself.
fn model_of(config: &Config, own: Option<Model>) -> Result<Model, Error> {
    let Some(mut model) = own else { return resolve::model_of(config, shape_of(config)?) };
    resolve::freeze_own(config, &mut model)?;
    model.check_names()?;
    Ok(model)
}

impl Loaded {
    /// Allocates memory, loads weights, and starts threads, and tasks on the caller's tokio. It
    /// blocks.
    fn start(config: Config, model: Model, plan: Plan) -> Result<Loaded, Error> {
        let rule = Box::new(config.update_rule());
        let rate = config.learning_rate(1);
        if let Some(misfit) = plan.misfits(&model, &*rule, None).into_iter().next() {
            return Err(Error::DoesNotFit(misfit));
        }
        let model = Arc::new(model);
        let plan = Arc::new(plan);
        let none = StateLayout::default();
        let eps = match config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File) {
            Some(path) => {
                let refused =
                    |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
                let file = FileTier::unnamed(path, &model.blocks, false, &none, |_| false, false);
                Eps::on_file(model.blocks.clone(), none, file.map_err(refused)?)
            }
            None => Eps::in_memory(model.blocks.clone(), none, |_| false, None),
        };
        let ledger = Arc::new(Ledger::new(model.layers.len(), plan.devices(), Vec::new()));
        let parts = WorkerParts {
            model: model.clone(),
            plan,
            rule,
            learning_rate: rate,
            eps,
            records: ledger,
        };
        let worker = Worker::new(&config, parts)?;
        let how = Load::to_use(!config.model.unsealed);
        worker.fill(|eps| resolve::load_first(&config, &model, eps, how))?;
        let work = Emulated::new(&config, worker, false)?;
        Ok(Loaded { engine: Engine::start(config, work, 0)? })
    }

    async fn stop(self) -> Result<(), Error> {
        let lanes = self.engine.stop().await?;
        unblock(move || drop(lanes)).await
    }
}
