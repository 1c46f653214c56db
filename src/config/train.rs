//! `[train]`: which tensors are trained, and adapters beside them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::OnResume;
use super::check::{is_not_negative, is_positive, must};
use crate::error::Error;
use crate::models::Base;

/// `[train]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Tensors that are trained; all when empty. Each entry is a kind (`bias`, `norm`, `weight`),
    /// one or more successive parts of a tensor's name between its dots (`q_proj`, `layers.3`), or
    /// a pattern with `*` for the whole name. With `lora` they are trained beside the adapters, in
    /// place of a classifier's head. Weights of queries, keys and values that one product computes
    /// are trained together.
    pub only: Vec<String>,
    /// Tensors that are not trained, named as in `only`, over which they have precedence. A frozen
    /// tensor has no gradient and no optimizer state. The backward pass ends at the lowest layer
    /// with a trained tensor.
    pub frozen: Vec<String>,
    /// Low-rank adapters (LoRA). They are trained in place of the model's own tensors, except the
    /// head of a classifier, which is trained too. Checkpoints have adapters in the layout of
    /// `peft`; `l2l export` adds them to the weights.
    pub lora: Option<LoraConfig>,
    /// How weights that are not trained are stored, on the host and while they travel: `as-is`
    /// (f32), `bf16`, `int8` (matrices in 8 bits with a scale a row) or `nf4` (matrices in 4 bits
    /// with double quantisation, as QLoRA has them). The device turns a layer's matrices into its
    /// own dtype when it computes the layer. With `int8` and `nf4`, embeddings, heads, biases and
    /// norms that are not trained are in the device's dtype.
    pub base: Base,
    /// α of NEFTune (Jain et al. 2023): in training, noise is added to the embeddings of tokens,
    /// uniform in ±α ÷ √(tokens of the sequence × channels). 0: none.
    pub neftune_alpha: f64,
    /// ε of label smoothing (Szegedy et al. 2016): the target is 1 − ε for the label, and ε is
    /// spread over all classes or tokens. It is part of the training loss and not of validation.
    pub label_smoothing: f32,
}

/// `[train.lora]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank of the adapters; 8 when absent.
    pub rank: Option<usize>,
    /// The output of an adapter is multiplied by `alpha` ÷ `rank`; 16 when absent.
    pub alpha: Option<f64>,
    /// Ranks of some modules, in place of `rank`: a table from parts of names, as in `targets`, to
    /// ranks. Of several entries that name a module, the longest counts.
    #[serde(skip_serializing_if = "Option::is_none")] // Runs from before the key resume.
    pub rank_pattern: Option<BTreeMap<String, usize>>,
    /// Alphas of some modules, in place of `alpha`, as in `rank_pattern`.
    #[serde(skip_serializing_if = "Option::is_none")] // Runs from before the key resume.
    pub alpha_pattern: Option<BTreeMap<String, f64>>,
    /// Multiplies the output by `alpha` ÷ √`rank` instead (rsLoRA).
    pub rank_stabilised: bool,
    /// Probability of dropout of an adapter's input.
    pub dropout: f32,
    /// Modules that get an adapter, by parts of their names as in `train.only`, or `all-linear`
    /// (the default): all products of the transformer blocks and the transform of a masked head.
    /// The transform of a classifier's head gets an adapter only by its name.
    pub targets: Option<Vec<String>>,
    /// A directory with adapters to start from, as `peft` and the checkpoints of l2l have them. It
    /// gives all other keys but `dropout`.
    pub path: Option<PathBuf>,
}

impl TrainConfig {
    pub(super) const ON_RESUME: OnResume =
        OnResume::free("").with_changes("label_smoothing neftune_alpha");

    /// The directory with the adapters that the model begins with.
    pub fn adapters(&self) -> Option<&Path> {
        self.lora.as_ref()?.path.as_deref()
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        must(
            is_not_negative(self.neftune_alpha),
            "train.neftune_alpha",
            "a finite number, 0 or more",
        )?;
        let is_share = (0.0..1.0).contains(&self.label_smoothing);
        must(is_share, "train.label_smoothing", "in [0, 1)")?;
        let Some(lora) = &self.lora else { return Ok(()) };
        let LoraConfig { rank, alpha, rank_stabilised, dropout, ref targets, ref path, .. } = *lora;
        let LoraConfig { ref rank_pattern, ref alpha_pattern, .. } = *lora;
        must(rank != Some(0), "train.lora.rank", "at least 1")?;
        let be = "a finite number above 0";
        must(alpha.is_none_or(is_positive), "train.lora.alpha", be)?;
        let mut ranks = rank_pattern.iter().flat_map(BTreeMap::values);
        must(
            !ranks.any(|rank| *rank == 0),
            "train.lora.rank_pattern",
            "a table of ranks of at least 1",
        )?;
        let mut alphas = alpha_pattern.iter().flat_map(BTreeMap::values);
        let be = "a table of finite numbers above 0";
        must(alphas.all(|alpha| is_positive(*alpha)), "train.lora.alpha_pattern", be)?;
        must((0.0..1.0).contains(&dropout), "train.lora.dropout", "in [0, 1)")?;
        let own = [
            ("train.lora.rank", rank.is_some()),
            ("train.lora.alpha", alpha.is_some()),
            ("train.lora.rank_pattern", rank_pattern.is_some()),
            ("train.lora.alpha_pattern", alpha_pattern.is_some()),
            ("train.lora.rank_stabilised", rank_stabilised),
            ("train.lora.targets", targets.is_some()),
        ];
        match own.into_iter().find(|(_, is_set)| *is_set && path.is_some()) {
            Some((key, _)) => {
                let problem =
                    "is set together with train.lora.path, which has its own: leave it out";
                Err(Error::config(key, problem))
            }
            None => Ok(()),
        }
    }
}
