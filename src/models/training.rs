//! The choice of the tensors that are trained: by patterns of their names, or adapters.

use l2l_actors::schedule::BlockId;

use super::adapters;
use super::block_tensors::BlockTensors;
use super::dense::is_of_dense;
use super::frozen::{Base, WeightFormat};
use super::layer::{Kind, Tensor};
use super::lora::Lora;
use super::masters::MasterFormat;
use super::model::{Model, ModelLayer};
use super::shape::Shape;
use crate::error::Error;
use crate::kernels::packed_row;
use crate::tensor::Dtype;

/// The tensors of a model that are trained, and how tensors are stored. The default trains all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Training {
    /// Patterns of trained tensors: kinds (`bias`, `norm`, `weight`), parts of names, or names with
    /// `*` for any text. Adapters are trained in any case. Empty: all tensors; with adapters, only
    /// the head of classes, or the dense modules of embeddings.
    pub only: Vec<String>,
    /// Patterns of tensors that are not trained. They prevail over `only`.
    pub frozen: Vec<String>,
    /// Adapters.
    pub lora: Option<Lora>,
    /// True: the embedding that is trained beside adapters is still the head's table, as with
    /// PEFT's `ensure_weight_tying`. False: the tables part, as in PEFT.
    pub keeps_tied: bool,
    /// Names of tensors that were trained beside adapters that were read. They are trained, too, in
    /// place of these.
    pub saved: Vec<String>,
    /// How frozen weights are stored.
    pub base: Base,
    /// The device's dtype.
    pub dtype: Dtype,
    /// How masters are stored.
    pub masters: MasterFormat,
    /// Saves only the positive numbers of the input of each ReLU, up to this share.
    pub relu_density: Option<f64>,
}

impl Training {
    /// Whether the head of a tied model gets a table of its own. In PEFT, a module that is trained
    /// beside adapters is a copy. So a trained embedding does not move the head, nor a trained head
    /// the embedding.
    pub(crate) fn unties(&self, shape: &Shape) -> bool {
        let names = |patterns: &[String], table: &str| {
            patterns.iter().any(|pattern| pattern == "weight" || matches(pattern, table))
        };
        let trains = |table: &str| {
            let is_saved = self.saved.iter().any(|name| name == table);
            (is_saved || names(&self.only, table)) && !names(&self.frozen, table)
        };
        self.lora.is_some()
            && !self.keeps_tied
            && shape.tied
            && shape.scores_vocabulary()
            && (trains(shape.names.embedding) || trains(shape.names.head))
    }

    /// The transform of a head of classes, if a target names it and it is not trained as a whole.
    fn adapted_transform(&self, shape: &Shape) -> Option<String> {
        let lora = self.lora.as_ref()?;
        let module = Some(shape.class_transform()).filter(|module| !module.is_empty())?;
        let weight = format!("{module}.weight");
        let is_trained = self.beside().any(|pattern| matches(pattern, &weight));
        (lora.names(module) && !is_trained).then(|| module.into())
    }

    /// Patterns of the tensors that are trained, beside adapters or instead of all.
    fn beside(&self) -> impl Iterator<Item = &String> {
        self.only.iter().chain(&self.saved)
    }
}

/// Whether a pattern names a tensor or a module. A pattern with `*` must match the whole name, and
/// `*` matches any text. A pattern without `*` must be among the name's parts, which dots separate.
/// So `q_proj` and `layers.3` are patterns of `model.layers.3.self_attn.q_proj.weight`.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    if pattern.contains('*') {
        return matches_text(pattern, name);
    }
    let parts: Vec<&str> = pattern.split('.').collect();
    let names: Vec<&str> = name.split('.').collect();
    names.windows(parts.len()).any(|some| some == parts)
}

/// Whether a text matches a pattern, in which `*` stands for any text.
fn matches_text(pattern: &str, text: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == text };
    text.strip_prefix(before).is_some_and(|rest| {
        (0..=rest.len())
            .filter(|&at| rest.is_char_boundary(at))
            .any(|at| matches_text(after, &rest[at..]))
    })
}

/// Whether a pattern names a tensor, by its kind (`weight`, `bias`, `norm`) or its name. A tensor
/// that is never trained has a name alone.
pub(crate) fn matches_tensor(pattern: &str, tensor: &Tensor) -> bool {
    let kind = match tensor.kind {
        Kind::Weight | Kind::Table => Some("weight"),
        Kind::Bias => Some("bias"),
        Kind::Norm => Some("norm"),
        Kind::Buffer => None,
    };
    kind == Some(pattern) || matches(pattern, &tensor.name)
}

impl Model {
    /// A model of this shape, of which some tensors are trained. Its head is tied to its embedding
    /// if the shape's is, and neither is trained beside adapters.
    ///
    /// # Errors
    /// A pattern names nothing, nothing is trained, or adapters do not fit the model.
    pub fn for_training(shape: Shape, training: &Training) -> Result<Model, Error> {
        let shape = Shape { tied: shape.tied && !training.unties(&shape), ..shape };
        let saved = training.saved.iter().map(|name| shape.name_of(name)).collect();
        let training = &Training { saved, ..training.clone() };
        let adapters = |modules| training.lora.as_ref().and_then(|lora| lora.adapters(modules));
        let of_classes = || adapters(training.adapted_transform(&shape).into_iter().collect());
        let of_tiles = |tile_elements| {
            let stack = Model::stack_of(shape, &adapters);
            let mut model = Model::with_tiles(shape, stack, of_classes(), tile_elements);
            model.freeze(training).map(|()| model)
        };
        let plain = Model::new(shape);
        if let Some(lora) = &training.lora {
            plain.check_adapters(lora)?;
        }
        let model = of_tiles(Model::tile_elements(shape, &adapters))?;
        if training.base == Base::AsIs {
            return Ok(model);
        }
        // Tiles of the vocabulary get the size of the largest block as it is stored now.
        let layers = model.layers.iter().zip(&model.layer_blocks);
        let layers = layers.filter(|(layer, _)| layer.stack().is_some());
        let blocks = layers.flat_map(|(_, blocks)| blocks);
        let floats = blocks.map(|id| model.blocks[id.0 as usize].published_len(training.dtype));
        let floats = floats.max().unwrap_or(0) / shape.slices;
        of_tiles(floats * Dtype::F32.size() / training.dtype.size())
    }

    /// Sets which tensors are trained. Adapters are always trained.
    ///
    /// # Errors
    /// A pattern names nothing, nothing is trained, nothing is frozen that could be stored in
    /// another way, or there is no ReLU whose input could be.
    pub fn freeze(&mut self, training: &Training) -> Result<(), Error> {
        self.freeze_tensors(training)?;
        self.list_portions();
        self.pack_relu(training)
    }

    fn freeze_tensors(&mut self, training: &Training) -> Result<(), Error> {
        let &Training { ref only, ref frozen, ref lora, ref saved, base, .. } = training;
        let &Training { dtype, masters, .. } = training;
        for block in &mut self.blocks {
            *block = std::mem::take(block).with_masters(masters);
        }
        if only.is_empty() && frozen.is_empty() && lora.is_none() {
            return match base {
                Base::AsIs => Ok(()),
                _ => Err(no_base("all tensors are trained")),
            };
        }
        self.check_patterns("train.only", only)?;
        self.check_patterns("train.frozen", frozen)?;
        self.check_patterns(adapters::SAVED, saved)?;
        let classes = self.layers.iter().zip(&self.layer_blocks);
        let classes = classes.filter(|(layer, _)| matches!(layer, ModelLayer::Classes(_)));
        let classes: Vec<usize> =
            classes.flat_map(|(_, blocks)| blocks).map(|id| id.0 as usize).collect();
        let adapted: Vec<String> = self.adapted_modules().map(String::from).collect();
        let adapts = |tensor: &Tensor| {
            let module = tensor.name.rsplit_once('.').map_or("", |(module, _)| module);
            adapted.iter().any(|one| one == module)
        };
        let is_of_head =
            |index: usize, tensor: &Tensor| classes.contains(&index) || is_of_dense(&tensor.name);
        for (index, block) in self.blocks.iter_mut().enumerate() {
            let is_named = |patterns: &[String], tensor: &Tensor| {
                patterns.iter().any(|pattern| matches_tensor(pattern, tensor))
            };
            let has_own = !only.is_empty() || !saved.is_empty();
            *block = block.with_trained(|tensor| {
                let by_default = match lora {
                    Some(_) => !has_own && is_of_head(index, tensor) && !adapts(tensor),
                    None => only.is_empty(),
                };
                let is_adapter = lora.is_some() && adapters::is_of_adapter(&tensor.name);
                let is_beside = is_named(only, tensor) || saved.contains(&tensor.name);
                (is_adapter || by_default || is_beside) && !is_named(frozen, tensor)
            });
            *block = std::mem::take(block).with_base(base, dtype);
        }
        if self.blocks.iter().all(|block| block.trained().is_empty()) {
            let key = if frozen.is_empty() { "train.only" } else { "train.frozen" };
            return Err(Error::config(
                key,
                "leaves nothing to train: leave some tensors out of it",
            ));
        }
        let mut pieces = self.blocks.iter().flat_map(|block| block.stored().pieces());
        let is_stored = match base.is_of_matrices() {
            true => pieces.any(|piece| matches!(piece.format, WeightFormat::Quantised(_))),
            false => base == Base::AsIs || pieces.next().is_some(),
        };
        if is_stored { Ok(()) } else { Err(no_base("no matrix is frozen")) }
    }

    /// Saves only the positive numbers of each ReLU's input.
    fn pack_relu(&mut self, training: &Training) -> Result<(), Error> {
        let &Training { relu_density: density, dtype, .. } = training;
        let mut is_packed = false;
        for (layer, blocks) in self.layers.iter_mut().zip(&self.layer_blocks) {
            if let ModelLayer::Stack(layer) = layer {
                let of_block = |id: &BlockId| self.blocks[id.0 as usize].trained();
                let trained: Vec<Tensor> = blocks.iter().flat_map(of_block).cloned().collect();
                is_packed |= layer.pack_relu(density, &trained);
            }
        }
        let Some(density) = density else { return Ok(()) };
        let Shape { activation, gated, intermediate, .. } = self.shape;
        if !is_packed {
            let problem = format_args!(
                "is for feed-forwards of ReLU, and this model has {:?}{}: leave it out",
                activation.name(),
                if gated { ", gated" } else { "" }
            );
            return Err(Error::config("stash.relu_density", problem));
        }
        let room = (density * intermediate as f64).ceil() as usize;
        if packed_row(intermediate, room, dtype) >= dtype.floats(intermediate) {
            let problem = format_args!(
                "is {density}, with which {intermediate} numbers of {dtype} are not smaller: set \
                 0.9 or less, or leave it out"
            );
            return Err(Error::config("stash.relu_density", problem));
        }
        Ok(())
    }

    /// Refuses patterns that name no tensor.
    pub(crate) fn check_patterns(&self, key: &str, patterns: &[String]) -> Result<(), Error> {
        let is_lost =
            |pattern: &&String| !self.tensors().any(|tensor| matches_tensor(pattern, tensor));
        match patterns.iter().find(is_lost) {
            Some(pattern) => Err(Error::config(key, no_match(pattern, &self.modules()))),
            None => Ok(()),
        }
    }

    /// All tensors. The name of a table occurs once in each tile of the vocabulary.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.blocks.iter().flat_map(BlockTensors::iter)
    }

    /// The last parts of the names of modules, each once.
    fn modules(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for Tensor { name, .. } in self.tensors() {
            let module = name.rsplit_once('.').map_or(&name[..], |(module, _)| module);
            let last = module.rsplit('.').next().unwrap_or(module);
            if !all.iter().any(|known| known == last) {
                all.push(last.into());
            }
        }
        all
    }

    pub(crate) fn adapted_modules(&self) -> impl Iterator<Item = &str> {
        self.tensors().filter_map(|tensor| tensor.name.strip_suffix(adapters::ENDS[0]))
    }
}

/// The error of a base without frozen weights.
fn no_base(why: &str) -> Error {
    let problem = format_args!(
        "is for weights that are not trained, and {why}: set train.lora, train.only or \
         train.frozen, or leave it out"
    );
    Error::config("train.base", problem)
}

pub(super) fn no_match(pattern: &str, modules: &[String]) -> String {
    const SHOWN: usize = 24;
    let shown = modules[..modules.len().min(SHOWN)].join(", ");
    let more = if modules.len() > SHOWN { ", …" } else { "" };
    format!(
        "has {pattern:?}, which names nothing of the model: the parts of names are {shown}{more}; \
         with `*`, a pattern is for whole names"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_tensors() {
        let name = "model.layers.3.self_attn.q_proj.weight";
        for pattern in ["q_proj", "layers.3", "self_attn.q_proj", name, "*.q_proj.*", "model.*"] {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in ["proj", "layers.4", "q_proj.self_attn", "*.q_proj", "q*", ""] {
            assert!(!matches(pattern, name), "{pattern}");
        }
        assert!(matches("a*c*", "abcd") && !matches("*.bias", "a.bias.b"));
    }
}
