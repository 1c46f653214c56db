//! Layers that are added while a model is trained.

use std::sync::Arc;

use l2l_actors::schedule::BlockId;

use super::Trainer;
use crate::checkpoint::{self, LayerCount};
use crate::config::{Config, NewLayers};
use crate::eps::{BlockRun, Eps};
use crate::error::Error;
use crate::models::{Base, Model, Shape};
use crate::resolve::{shape_of, training_of};
use crate::worker::Worker;

/// A layer to add on top of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewLayer {
    /// The layer whose parameters it begins with. The optimizer's states begin at zero.
    pub copy_of: usize,
    /// True if the parameters that end its residual branches begin as zeros. Then it passes hidden
    /// states on unchanged until it has been trained.
    pub zero_residual: bool,
}

/// The layers that a new run begins with, if it can add some.
pub(super) fn first_layers(config: &Config) -> Result<Option<LayerCount>, Error> {
    let Some(_) = config.model.max_layers else { return Ok(None) };
    let first = shape_of(config)?.layers;
    Ok(Some(LayerCount { first, now: first }))
}

/// The model of these layers. `largest` is the model with all layers that there is room for.
pub(super) fn model_of(
    config: &Config,
    largest: &Arc<Model>,
    layers: Option<LayerCount>,
) -> Result<Arc<Model>, Error> {
    let Some((most, LayerCount { now, .. })) = config.model.max_layers.zip(layers) else {
        return Ok(largest.clone());
    };
    if !(1..=most).contains(&now) {
        let problem = format_args!("is {most}, and the run to go on with has {now} layers");
        return Err(Error::config("model.max_layers", problem));
    }
    let shape = Shape { layers: now, ..shape_of(config)? };
    Ok(Arc::new(Model::with_room(shape, most, &training_of(config)?)?))
}

impl Trainer {
    /// Adds layers on top of the others. The model must have room for them (`model.max_layers`).
    /// Waits for the updates of the last step.
    ///
    /// # Errors
    /// The model has no room, a layer to copy does not exist, or residual branches of this family
    /// cannot be zeros; nothing was done. Or the ring or the file under the EPS failed.
    pub async fn add_layers(&mut self, new: &[NewLayer]) -> Result<(), Error> {
        if new.is_empty() {
            return Ok(());
        }
        if self.run.config.train.base != Base::AsIs {
            let problem = "stores layers so that a copy of one is not the same: leave it out of a \
                           run that adds layers";
            return Err(Error::config("train.base", problem));
        }
        let layers = self.run.model.shape.layers;
        let most = self.run.config.model.max_layers.unwrap_or(layers);
        if layers + new.len() > most {
            let what = format_args!(
                "{} layers more: the model has {layers}, and room for {most}: set model.max_layers",
                new.len()
            );
            return Err(Error::argument(what));
        }
        if let Some(unknown) = new.iter().find(|new| new.copy_of >= layers) {
            let what = format_args!(
                "a copy of layer {}: the model has layers 0 to {}",
                unknown.copy_of,
                layers - 1
            );
            return Err(Error::argument(what));
        }
        if self.run.model.shape.norms.are_behind_sums() && new.iter().any(|new| new.zero_residual) {
            let what = "a new layer with zeroed residual branches must pass hidden states on \
                        unchanged, and this model's norms behind the branches change them: copy \
                        layers";
            return Err(Error::argument(what));
        }
        // A checkpoint that is being written has the layers before.
        self.end_checkpoint().await?;
        self.last_checkpoint = None;
        self.settle().await?;
        let first = self.progress.layers.map_or(layers, |layers| layers.first);
        let count = LayerCount { first, now: layers + new.len() };
        let grown = model_of(&self.run.config, &self.engine.model, Some(count))?;
        let model = grown.clone();
        let new = new.to_vec();
        let copy_all = move |worker: &Worker| {
            (layers..).zip(new).try_for_each(|(layer, new)| copy(worker.eps(), &model, layer, new))
        };
        self.engine.between_steps(copy_all).await??;
        self.run.model = grown;
        self.engine.use_layers(count.now);
        self.progress.layers = Some(count);
        self.remember();
        let step = self.progress.step;
        let seal =
            move |worker: &Worker| worker.eps().file().map_or(Ok(()), |file| file.seal(step));
        let sealed = self.engine.between_steps(seal).await?;
        sealed.map_err(|error| Error::storage("eps.path", error))
    }

    /// Adds the layers that `depth.stack_at` asks for before the next step.
    pub(super) async fn grow(&mut self) -> Result<(), Error> {
        let Config { depth, model, .. } = &self.run.config;
        let Some((most, LayerCount { first, now: layers })) =
            model.max_layers.zip(self.progress.layers)
        else {
            return Ok(());
        };
        let rule = depth.new_layers;
        let wanted = depth.stacked_layers(self.progress.step, first, most);
        let new = |layer: usize| NewLayer {
            copy_of: (layer - layers) % layers,
            zero_residual: rule == NewLayers::ZeroResidual,
        };
        let new: Vec<NewLayer> = (layers..wanted).map(new).collect();
        self.add_layers(&new).await
    }

    /// Sets the run's record in an EPS on file. The next seal writes it.
    pub(super) fn remember(&self) {
        if let Some(file) = self.worker().eps().file() {
            file.set_run(checkpoint::remembered(&self.run, &self.progress));
        }
    }
}

/// Copies the blocks of a layer to a new layer.
fn copy(eps: &Eps, model: &Model, layer: usize, new: NewLayer) -> Result<(), Error> {
    let blocks = model.blocks_of_layer(layer).iter().zip(model.blocks_of_layer(new.copy_of));
    blocks.into_iter().try_for_each(|(&to, &from)| copy_block(eps, model, layer, new, to, from))
}

fn copy_block(
    eps: &Eps,
    model: &Model,
    layer: usize,
    new: NewLayer,
    to: BlockId,
    from: BlockId,
) -> Result<(), Error> {
    let tensors = &model.blocks[to.0 as usize];
    let len = tensors.len();
    let mut masters = eps.read_with(from, BlockRun::Parameters, |all| all[..len].to_vec())?;
    let ends_branch = model.shape.residual_outputs(layer);
    for (tensor, range) in tensors.ranges() {
        let name = tensor.name.rsplit_once('.').map_or("", |(module, _)| module);
        if new.zero_residual && ends_branch.iter().any(|module| module == name) {
            masters[range].fill(0.0);
        }
    }
    eps.write_with(to, BlockRun::Parameters, |all| all[..len].copy_from_slice(&masters))
}
