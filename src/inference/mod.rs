//! A model at rest: evaluated, or asked to go on. No gradients, no optimizer state; layers come
//! to the device and go, as in training.

mod evaluate;
mod generate;
mod quality;
mod sampling;

use std::path::Path;
use std::sync::Arc;

use l2l_actors::Relay;
use l2l_actors::threads::ThreadLanes;

pub use evaluate::{Evaluation, Evaluator};
pub use generate::{Ended, Generator, Room};
pub use quality::{Agreement, Confusion, Quality};
pub(crate) use sampling::Dice;
pub use sampling::Sampling;

use crate::config::{Config, EpsTier, ModelConfig};
use crate::data::Batch;
use crate::eps::{Eps, FileTier};
use crate::error::Error;
use crate::hf;
use crate::models::Model;
use crate::plan::{Plan, Purpose, Walk};
use crate::trainer::{Ring, Walked, start_ring};
use crate::worker::{Goal, Remembered, Turn, Worker};

/// A model on its device's ring.
struct Rest {
    config: Config,
    model: Arc<Model>,
    plan: Arc<Plan>,
    relay: Relay<ThreadLanes<Worker>>,
    lanes: Arc<ThreadLanes<Worker>>,
    walked: Option<Walked>,
}

/// Lets a config load a model from a directory, a checkpoint's say, whatever it named before.
pub fn load_from(config: &mut Config, directory: &Path) {
    let ModelConfig { task, labels, .. } = std::mem::take(&mut config.model);
    config.model =
        ModelConfig { path: Some(directory.into()), task, labels, ..config.model.clone() };
}

impl Rest {
    /// Makes everything: memory, weights, threads, tasks on the caller's tokio.
    fn start(config: Config, model: Model, plan: Plan) -> Result<Rest, Error> {
        let (rule, rate) = (Box::new(config.update_rule()), config.learning_rate(1));
        if let Some(misfit) = plan.misfits(&model, &*rule).into_iter().next() {
            return Err(Error::refused(misfit));
        }
        let (model, plan) = (Arc::new(model), Arc::new(plan));
        let eps = match config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File) {
            Some(path) => {
                let refused =
                    |error| Error::refused(format_args!("eps.path {}: {error}", path.display()));
                Eps::on_file(
                    &model,
                    0,
                    FileTier::unnamed(path, &model, false, 0, |_| false).map_err(refused)?,
                )
            }
            None => Eps::in_memory(&model, 0, |_| false),
        };
        let eps = eps.published_as(config.device.dtype);
        let worker =
            Worker::new(&config, model.clone(), plan.clone(), rule, rate, eps, Vec::new())?;
        worker.eps().randomise(config.step.seed)?;
        if let Some(path) = config.model.path.as_ref().filter(|_| !config.model.random_weights) {
            hf::load(path, &model, worker.eps(), false)?;
        }
        let Ring { relay, lanes } = start_ring(&config, &model, &plan, worker)?;
        Ok(Rest { config, model, plan, relay, lanes, walked: None })
    }

    /// One walk of the ring: the loss, and what the head told.
    async fn turn(
        &mut self,
        batch: Batch,
        goal: Goal,
        purpose: Purpose,
        memory: Vec<Remembered>,
    ) -> Result<(f64, Vec<f32>), Error> {
        let walk = Walk { sequences: batch.lengths.len(), positions: batch.positions, purpose };
        let walked = Walked::of(&mut self.walked, walk, &self.config, &self.model)?;
        let turn = Turn { batch, goal, trained: 0, carries: walked.carries.clone(), memory };
        let resolved = self.relay.step(&walked.schedule, turn).await?;
        self.lanes.hands().ledger.resolves(self.relay.resolved_at());
        let told = self.lanes.hands().take_told();
        Ok((resolved.loss, told))
    }

    async fn stop(self) -> Result<(), Error> {
        Ok(self.relay.stop().await?)
    }
}
