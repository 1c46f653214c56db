//! Finds the model's tensors in weight files: by name, with or without the family's prefix, by an
//! old name, by the name of a tensor that it is tied to, in a tensor of all experts, or in MXFP4.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};

use super::adapters::PREFIX;
use super::found::Found;
use super::mxfp4::find_mxfp4;
use super::quantised::check_name;
use super::tied::differ;
use super::weights::FileTensor;
use super::{fused, mxfp4};
use crate::eps::BlockRun;
use crate::models::families::Names;
use crate::models::{Head, Model, Shape};

/// The names by which files may have the tensors of a model.
#[derive(Clone, Copy)]
pub(super) struct Spelling<'m> {
    pub(super) model: &'m Model,
    /// Whether the files are adapters.
    pub(super) of_adapters: bool,
    /// Whether one table of the files is the embedding's and the head's.
    pub(super) is_tied: bool,
}

impl Spelling<'_> {
    /// The prefix that files may leave out.
    pub(super) fn prefix(&self) -> &'static str {
        if self.of_adapters { "" } else { self.model.shape.names.prefix }
    }

    /// The names of a tensor, the one that prevails first.
    pub(super) fn names_of(&self, name: &str) -> Vec<String> {
        let Names { embedding, head, .. } = *self.model.shape.names;
        let before = if self.of_adapters { PREFIX } else { "" };
        let bare = name.strip_prefix(before).unwrap_or(name);
        let all = match self.model.shape.names.head_biases() {
            _ if self.is_tied && bare == embedding => vec![embedding.into(), head.into()],
            _ if self.is_tied && bare == head => vec![head.into(), embedding.into()],
            biases if biases.iter().any(|bias| bias == bare) => biases.to_vec(),
            _ => {
                let router = fused::other_router(&self.model.shape, bare);
                [bare.to_string()].into_iter().chain(router).collect()
            }
        };
        all.into_iter().map(|bare| format!("{before}{bare}")).collect()
    }

    /// Finds a tensor in files.
    pub(super) fn find<'t>(&self, files: &[SafeTensors<'t>], name: &str) -> Option<Found<'t>> {
        let named = self.names_of(name);
        let mut named = named.iter().filter_map(|name| find(files, name, self.prefix()));
        let shape = &self.model.shape;
        let stored = named.next().or_else(|| fused::find_part(shape, files, name));
        stored.map(Found::Stored).or_else(|| find_mxfp4(shape, files, name).map(Found::Mxfp4))
    }

    /// Refuses files whose head is not their embedding, if the model has one table for both.
    fn check_tied(&self, files: &[SafeTensors<'_>]) -> Result<(), String> {
        let Names { embedding, head, .. } = *self.model.shape.names;
        let before = if self.of_adapters { PREFIX } else { "" };
        let table = |name: &str| find(files, &format!("{before}{name}"), self.prefix());
        if !self.model.shape.tied || !self.model.shape.scores_vocabulary() {
            return Ok(());
        }
        match (table(embedding), table(head)) {
            (Some(one), Some(other)) if differ(&one, &other) => Err(format!(
                "{head} is not {embedding}, and this model has one table for both: give it a head \
                 of its own (tie_word_embeddings = false, and no ensure_weight_tying of adapters)"
            )),
            _ => Ok(()),
        }
    }
}

/// The names that files may have for a tensor of this name: without the family's prefix, and as a
/// part of a model that also reads images, in the layouts of transformers 4 and 5.
pub(super) fn in_files(name: &str, prefix: &str) -> [String; 4] {
    let short = name.strip_prefix(prefix).unwrap_or(name);
    [
        name.into(),
        short.into(),
        format!("language_model.{name}"),
        format!("model.language_model.{short}"),
    ]
}

/// The names that a name in a file may mean: the converse of [`in_files`].
pub(super) fn meanings(in_file: &str, prefix: &str) -> Vec<String> {
    let part = in_file.strip_prefix("model.language_model.").map(|name| format!("{prefix}{name}"));
    let whole = in_file.strip_prefix("language_model.").map(String::from);
    let own = [in_file.to_string(), format!("{prefix}{in_file}")];
    own.into_iter().chain(part).chain(whole).collect()
}

/// The name that a file has for the tensor `name`, if it has `in_file` for the tensor `meant`.
pub(super) fn spelled_as(in_file: &str, meant: &str, name: &str, prefix: &str) -> String {
    let mut alike = in_files(meant, prefix).into_iter().zip(in_files(name, prefix));
    let own = alike.find(|(one, _)| one == in_file);
    own.map_or_else(|| name.into(), |(_, own)| own)
}

/// Finds a tensor in files by one of its names, or by its old name.
pub(super) fn find<'t>(
    files: &[SafeTensors<'t>],
    name: &str,
    prefix: &str,
) -> Option<TensorView<'t>> {
    let old = old_name(name);
    let mut names = [name, &old].into_iter().flat_map(|name| in_files(name, prefix));
    names.find_map(|name| files.iter().find_map(|file| file.tensor(&name).ok()))
}

/// The name that the tensor of a norm has in the first BERT's checkpoints.
fn old_name(name: &str) -> String {
    match name.rsplit_once("LayerNorm.") {
        Some((before, "weight")) => format!("{before}LayerNorm.gamma"),
        Some((before, "bias")) => format!("{before}LayerNorm.beta"),
        _ => name.into(),
    }
}

/// Whether a tensor is of one of these layers. Layers that a family does not have are empty.
pub(super) fn is_in(name: &str, layers: &[&str]) -> bool {
    layers.iter().any(|layer| !layer.is_empty() && name.starts_with(layer))
}

/// Whether a tensor is of a head that a pretrained model may lack: a classifier, or the layers that
/// follow the last block of a masked language model.
pub(super) fn is_of_new_head(name: &str, model: &Model) -> bool {
    let Names { class_dense, class_out, token_classes, .. } = *model.shape.names;
    let Names { class_norm, transform, transform_norm, .. } = *model.shape.names;
    is_in(name, &[class_dense, class_norm, class_out, token_classes, transform, transform_norm])
        || model.shape.names.head_biases().iter().any(|bias| bias == name)
}

/// Whether numbers of this dtype can be read as weights.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// Whether a tensor is of the head of another task: the LM head of the pretrained model that a
/// classifier starts from, or the pooler, which tokens' classes do not use.
pub(super) fn is_of_other_head(name: &str, shape: &Shape) -> bool {
    let names = shape.names;
    let lm_head = [names.transform, names.transform_norm, names.head_bias, names.head];
    // ModernBERT's classifier begins as its LM head does, under the same names.
    let transform = shape.class_transform();
    if !transform.is_empty() && is_in(name, &[transform, names.class_norm]) {
        return false;
    }
    let no_pooler = matches!(shape.head, Head::TokenClasses { .. });
    (no_pooler && is_in(name, &[names.class_dense]))
        || (!shape.scores_vocabulary() && is_in(name, &lm_head))
}

/// Whether a checkpoint may hold this tensor, although the model does not have it: a buffer, or a
/// head of another task. Such a tensor is not read.
fn is_ignored(name: &str, model: &Model) -> bool {
    const ENDS: [&str; 7] = [
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
        "embeddings.position_ids",
        "rotary_emb.inv_freq",
        ".decoder.bias",
    ];
    const PARTS: [&str; 10] = [
        "cls.seq_relationship.",
        "pooler.dense.",
        // What tells replaced tokens, of ELECTRA.
        "discriminator_predictions.",
        // What reads images or sounds, beside the text model of such a directory.
        "vision_tower.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "multi_modal_projector.",
        "model.visual.",
        // What guesses tokens further ahead, beside Qwen3.5 and Qwen3-Next.
        "mtp.",
    ];
    is_of_other_head(name, &model.shape)
        || is_of_shared_kv(name, &model.shape)
        || is_of_other_classes(name, model)
        || ENDS.iter().any(|end| name.ends_with(end))
        || PARTS.iter().any(|part| name.contains(part))
}

/// Whether a tensor would make keys or values of a block that reads those of another. Some
/// checkpoints have such tensors.
fn is_of_shared_kv(name: &str, shape: &Shape) -> bool {
    let Names { qkv, qk_norm, prefix, .. } = *shape.names;
    let from = shape.shared_kv.map_or(shape.layers, |shared| shared.from);
    let mut modules = (from..shape.layers).flat_map(|block| {
        let of_block = qkv.iter().skip(1).chain(&qk_norm[1..]);
        of_block.map(move |module| module.replacen("{}", &block.to_string(), 1))
    });
    let named = meanings(name, prefix);
    modules.any(|module| named.iter().any(|name| is_of_module(name, &module)))
}

/// Whether a tensor is of a head of classes that the model does not have.
fn is_of_other_classes(name: &str, model: &Model) -> bool {
    let Names { class_dense, class_out, token_classes, .. } = *model.shape.names;
    let own: &[&str] = match model.shape.head {
        Head::Tokens | Head::Masked | Head::Embedding { .. } => &[],
        Head::Classes { .. } => &[class_dense, class_out],
        Head::TokenClasses { .. } => &[model.shape.class_transform(), token_classes],
    };
    let others = [class_dense, class_out, token_classes].into_iter();
    others
        .filter(|layer| !layer.is_empty() && !own.contains(layer))
        .any(|layer| is_of_module(name, layer))
}

fn is_of_module(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| matches!(rest, ".weight" | ".bias"))
}

/// Compares the tensors of files with the model's. The files may have the tensors that are
/// `brought` from elsewhere, in any shape.
///
/// # Errors
/// The files lack a tensor, or have an unknown one, or one of another shape or dtype.
pub(super) fn check<'t>(
    files: &[SafeTensors<'_>],
    tensors: &BTreeMap<&String, &FileTensor>,
    spelling: Option<Spelling<'_>>,
    brought: &[String],
    find: &impl Fn(&str) -> Option<Found<'t>>,
) -> Result<(), String> {
    if let Some(spelling) = spelling {
        spelling.check_tied(files)?;
        fused::check(&spelling.model.shape, files)?;
        mxfp4::check(&spelling.model.shape, files)?;
    }
    let mut problems = Vec::new();
    let mut missing = Vec::new();
    for (name, tensor) in tensors {
        match find(name) {
            None => missing.push(format!("{name} is missing")),
            Some(view) if view.shape() != tensor.shape => {
                let expected = &tensor.shape;
                let found = view.shape();
                problems.push(format!("{name}: {expected:?} expected, {found:?} found"));
            }
            Some(view) if tensor.part != BlockRun::Parameters => {
                if view.dtype() != tensor.dtype {
                    let expected = tensor.dtype;
                    let found = view.dtype();
                    problems.push(format!("{name}: {expected:?} expected, {found:?} found"));
                }
            }
            Some(view) if !is_float(view.dtype()) => {
                problems
                    .push(format!("{name}: f32, f16 or bf16 expected, {:?} found", view.dtype()));
            }
            Some(_) => {}
        }
    }
    let prefix = spelling.map_or("", |spelling| spelling.prefix());
    let all = |name: &String| match spelling {
        Some(spelling) => spelling.names_of(name),
        None => vec![name.clone()],
    };
    let names = tensors.keys().copied().chain(brought).flat_map(all);
    let names = names.flat_map(|name| [old_name(&name), name]);
    let known: BTreeSet<String> = names.flat_map(|name| in_files(&name, prefix)).collect();
    let base = spelling.filter(|spelling| !spelling.of_adapters).map(|spelling| spelling.model);
    problems.append(&mut missing);
    for name in files.iter().flat_map(|tensors| tensors.names()) {
        let is_other = |model: &Model| {
            let shape = &model.shape;
            is_ignored(name, model) || fused::is_fused(shape, name) || mxfp4::is_part(shape, name)
        };
        if !known.contains(name) && !base.is_some_and(is_other) {
            check_name(name)?;
            problems.push(format!("{name} is in the file and not in the model"));
        }
    }
    const SHOWN: usize = 8;
    match problems.len() {
        0 => Ok(()),
        count if count <= SHOWN => Err(problems.join("; ")),
        count => Err(format!("{}; and {} more", problems[..SHOWN].join("; "), count - SHOWN)),
    }
}
