//! Low-rank adapters as a run asks for them: the modules that get one, with ranks and factors.

use std::collections::BTreeMap;

use l2l_actors::schedule::{BlockId, LayerId};

use super::adapters::{AdaptedModule, Adapters, is_of_adapter};
use super::block::TransformerBlock;
use super::block_inputs::InputProjection;
use super::block_tensors::BlockTensors;
use super::model::Model;
use super::projection::EmbeddingProjection;
use super::shape::{Dropouts, Head, Shape};
use super::training::{matches, no_match};
use crate::error::Error;

/// Low-rank adapters (Hu et al. 2021) of a model's products.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lora {
    /// r.
    pub rank: usize,
    /// The output of an adapter is multiplied by alpha ÷ r.
    pub alpha: f64,
    /// r of the modules that a pattern names, in place of `rank`. The longest pattern counts.
    pub rank_pattern: BTreeMap<String, usize>,
    /// alpha of the modules that a pattern names, in place of `alpha`. The longest pattern counts.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// True: the factor is alpha ÷ √r (Kalajdzievski 2023).
    pub rank_stabilised: bool,
    /// Probability of dropout of an adapter's input.
    pub dropout: f32,
    /// Patterns of modules: parts of names, or names with `*`. `all-linear`: all.
    pub targets: Vec<String>,
}

/// The target for all products of transformer blocks, and the transform of a masked head. The
/// transform of a head of classes gets an adapter only if a target names it. Otherwise it is
/// trained with the head.
const ALL_LINEAR: &str = "all-linear";

/// The value of the longest pattern that names a module.
fn of_longest<V: Copy>(patterns: &BTreeMap<String, V>, module: &str) -> Option<V> {
    let found = patterns.iter().filter(|(pattern, _)| matches(pattern, module));
    found.max_by_key(|(pattern, _)| pattern.len()).map(|(_, value)| *value)
}

/// Two patterns of one length that name a module, if they are the longest and their values differ.
fn undecided<'p, V: PartialEq>(
    patterns: &'p BTreeMap<String, V>,
    module: &str,
) -> Option<[&'p str; 2]> {
    let mut found: Vec<_> = patterns.iter().filter(|(one, _)| matches(one, module)).collect();
    let most = found.iter().map(|(pattern, _)| pattern.len()).max()?;
    found.retain(|(pattern, _)| pattern.len() == most);
    let pair = found.windows(2).find(|pair| pair[0].1 != pair[1].1)?;
    Some([pair[0].0, pair[1].0])
}

impl Lora {
    /// r of a module.
    pub fn rank_of(&self, module: &str) -> usize {
        of_longest(&self.rank_pattern, module).unwrap_or(self.rank)
    }

    /// alpha of a module.
    pub fn alpha_of(&self, module: &str) -> f64 {
        of_longest(&self.alpha_pattern, module).unwrap_or(self.alpha)
    }

    /// The factor of the output of a module's adapter.
    pub fn scale_of(&self, module: &str) -> f64 {
        let rank = self.rank_of(module) as f64;
        self.alpha_of(module) / if self.rank_stabilised { rank.sqrt() } else { rank }
    }

    /// Whether a module gets an adapter.
    pub(crate) fn targets(&self, module: &str) -> bool {
        self.targets.iter().any(|target| target == ALL_LINEAR) || self.names(module)
    }

    /// Whether a target names a module by itself.
    pub(super) fn names(&self, module: &str) -> bool {
        self.targets.iter().any(|target| matches(target, module))
    }

    /// The adapters of a layer with these modules, if any of them is a target.
    pub(super) fn adapters(&self, mut modules: Vec<String>) -> Option<Adapters> {
        modules.retain(|name| self.targets(name));
        let adapted = |name: String| AdaptedModule {
            rank: self.rank_of(&name),
            scale: self.scale_of(&name) as f32,
            name,
        };
        let dropout = self.dropout;
        let modules: Vec<AdaptedModule> = modules.into_iter().map(adapted).collect();
        (!modules.is_empty()).then_some(Adapters { dropout, modules })
    }

    /// Refuses adapters of a layer's experts that PEFT could not load: there the experts of a layer
    /// are one parameter, whose adapters have one rank and one factor. These are the modules with
    /// the same input, first of the first expert, then of the next.
    fn check_experts(&self, modules: &[String]) -> Result<(), Error> {
        let Some(adapted) = modules.iter().find(|module| self.targets(module)) else {
            return Ok(());
        };
        if let Some(other) = modules.iter().find(|module| !self.targets(module)) {
            let what = format_args!(
                "names {adapted} and not {other}: all experts of a layer must have adapters, or \
                 none of them; a gate and its up projection go together"
            );
            return Err(Error::config("train.lora.targets", what));
        }
        if self.dropout > 0.0 {
            let what = format_args!(
                "is {}, and adapters of experts have no dropout, as in PEFT: set 0, or leave the \
                 experts out of train.lora.targets",
                self.dropout
            );
            return Err(Error::config("train.lora.dropout", what));
        }
        let own_rank = modules.iter().find(|module| self.rank_of(module) != self.rank);
        let own_alpha = modules.iter().find(|module| self.alpha_of(module) != self.alpha);
        let own = own_rank.map(|module| ("train.lora.rank_pattern", module));
        let own = own.or(own_alpha.map(|module| ("train.lora.alpha_pattern", module)));
        let Some((key, module)) = own else { return Ok(()) };
        let what = format_args!(
            "names {module}: adapters of experts have one rank and one alpha, as in PEFT. Leave \
             experts out of it"
        );
        Err(Error::config(key, what))
    }

    /// Refuses patterns that disagree on a module, and a rank above the module's sizes.
    fn check_module(&self, module: &str, inputs: usize, outputs: usize) -> Result<(), Error> {
        let pairs = [
            ("train.lora.rank_pattern", undecided(&self.rank_pattern, module)),
            ("train.lora.alpha_pattern", undecided(&self.alpha_pattern, module)),
        ];
        if let Some((key, [one, other])) = pairs.into_iter().find_map(|(key, p)| Some((key, p?))) {
            let what = format_args!(
                "has {one:?} and {other:?}, which both name {module} with other values: of several \
                 entries the longest counts, so make one of them longer"
            );
            return Err(Error::config(key, what));
        }
        let most = inputs.min(outputs);
        let rank = self.rank_of(module);
        if rank <= most {
            return Ok(());
        }
        let has_own = of_longest(&self.rank_pattern, module).is_some();
        let key = if has_own { "train.lora.rank_pattern" } else { "train.lora.rank" };
        let what = format_args!(
            "is {rank}, and {module} is a matrix of {outputs} × {inputs}: at most {most}"
        );
        Err(Error::config(key, what))
    }
}

impl Model {
    /// Refuses targets and patterns that name no module, and ranks above the size of a module.
    pub(super) fn check_adapters(&self, lora: &Lora) -> Result<(), Error> {
        let linear = self.linear_modules();
        let mut names: Vec<String> = Vec::new();
        for (name, ..) in &linear {
            let last = name.rsplit('.').next().unwrap_or(name);
            if !names.iter().any(|known| known == last) {
                names.push(last.into());
            }
        }
        if lora.targets.is_empty() {
            let what =
                format_args!("is empty: name some of {}, or {ALL_LINEAR:?}", names.join(", "));
            return Err(Error::config("train.lora.targets", what));
        }
        let ranks = lora.rank_pattern.keys().map(|pattern| ("train.lora.rank_pattern", pattern));
        let alphas = lora.alpha_pattern.keys().map(|pattern| ("train.lora.alpha_pattern", pattern));
        let targets = lora.targets.iter().filter(|target| *target != ALL_LINEAR);
        let targets = targets.map(|target| ("train.lora.targets", target));
        for (key, pattern) in targets.chain(ranks).chain(alphas) {
            if linear.iter().any(|(name, ..)| matches(pattern, name)) {
                continue;
            }
            let other = [self.shape.names.head, self.shape.names.embedding];
            let mut others = self.tensors().map(|tensor| &tensor.name[..]).chain(other);
            let what = match others.any(|name| matches(pattern, name)) {
                true if self.tensors().any(|one| one.stacked && matches(pattern, &one.name)) => {
                    format!(
                        "has {pattern:?}: the experts of a block are one parameter in models of \
                         this family, and such experts have no adapters here (PEFT's \
                         target_parameters), only {}",
                        names.join(", ")
                    )
                }
                true => format!(
                    "has {pattern:?}: embeddings, norms, routers and heads have no adapters here, \
                     only {}",
                    names.join(", ")
                ),
                false => no_match(pattern, &names),
            };
            return Err(Error::config(key, what));
        }
        let mut adapted = linear.iter().filter(|(name, ..)| lora.targets(name));
        adapted
            .try_for_each(|(name, inputs, outputs)| lora.check_module(name, *inputs, *outputs))?;
        let blocks =
            (0..self.shape.layers).map(|number| TransformerBlock::new(0, number, self.shape));
        blocks
            .flat_map(|block| block.modules_of_experts())
            .try_for_each(|one| lora.check_experts(&one))
    }

    /// The first layer that computes something else without adapters than with them in a step that
    /// trains; `None`: the model has none. Dropout, and what routers do in training alone, may act
    /// in any layer.
    pub(crate) fn first_adapted(&self) -> Option<LayerId> {
        let adapts = |id: &BlockId| {
            let block = &self.blocks[id.0 as usize];
            let mut tensors = block.trained().iter().chain(block.frozen());
            tensors.any(|tensor| is_of_adapter(&tensor.name))
        };
        let first = self.layer_blocks.iter().position(|ids| ids.iter().any(adapts))?;
        let is_alike = self.shape.dropout == Dropouts::default() && self.shape.experts.is_none();
        Some(LayerId(if is_alike { first as u32 } else { 1 }))
    }

    /// The name of a tensor that is trained beside adapters, if there is one.
    pub(crate) fn trained_beside_adapters(&self) -> Option<&str> {
        let mut trained = self.blocks.iter().flat_map(BlockTensors::trained);
        trained.find(|tensor| !is_of_adapter(&tensor.name)).map(|tensor| &tensor.name[..])
    }

    /// The modules that can have adapters: name, inputs and outputs.
    pub(crate) fn linear_modules(&self) -> Vec<(String, usize, usize)> {
        let Shape { names, hidden, layers, .. } = self.shape;
        let blocks = (0..layers).map(|number| TransformerBlock::new(0, number, self.shape));
        let of_head = match self.shape.head {
            Head::Masked => names.transform,
            _ => self.shape.class_transform(),
        };
        let of_head = Some(of_head).filter(|name| !name.is_empty());
        let of_head = of_head.map(|name| (name.to_string(), hidden, hidden));
        let of_embedding = EmbeddingProjection::of(self.shape).map(|one| one.module());
        let of_inputs = InputProjection::of(self.shape).map(|one| one.module());
        let of_blocks = blocks.flat_map(|block| block.linear_modules());
        of_embedding.into_iter().chain(of_inputs).chain(of_blocks).chain(of_head).collect()
    }
}
