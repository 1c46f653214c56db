//! Finds the model's tensors in weight files: by name, with or without the family's prefix, or by
//! an old name.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};

use super::weights::FileTensor;
use crate::eps::BlockRun;
use crate::models::families::Names;
use crate::models::{Head, Model};

/// The prefix of tensor names that checkpoints of a model may leave out.
pub(super) fn prefix(model: Option<&Model>) -> &'static str {
    model.map_or("", |model| model.shape.names.prefix)
}

/// Finds a tensor in files by its name, with or without the prefix, or by its old name.
pub(super) fn find<'t>(
    files: &[SafeTensors<'t>],
    name: &str,
    prefix: &str,
) -> Option<TensorView<'t>> {
    let old = old_name(name);
    let short = |name| str::strip_prefix(name, prefix).unwrap_or(name);
    let names = [name, short(name), &old, short(&old)];
    names.iter().find_map(|name| files.iter().find_map(|file| file.tensor(name).ok()))
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
    let Names { transform, transform_norm, head_bias, .. } = *model.shape.names;
    is_in(name, &[class_dense, class_out, token_classes, transform, transform_norm, head_bias])
}

/// Whether numbers of this dtype can be read as weights.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// Whether a checkpoint may hold this tensor, although the model does not have it: a buffer, a head
/// of another task, or a copy of a tied tensor. Such a tensor is not read.
fn is_ignored(name: &str, model: &Model) -> bool {
    const ENDS: [&str; 5] = [
        ".attn.bias",
        ".attn.masked_bias",
        "embeddings.position_ids",
        "rotary_emb.inv_freq",
        ".decoder.bias",
    ];
    const PARTS: [&str; 2] = ["cls.seq_relationship.", "pooler.dense."];
    let names = model.shape.names;
    // The LM head of the pretrained model that a classifier starts from.
    let lm_head = [names.transform, names.transform_norm, names.head_bias, names.head];
    let no_pooler = matches!(model.shape.head, Head::TokenClasses { .. });
    (no_pooler && is_in(name, &[names.class_dense]))
        || is_of_other_classes(name, model)
        || (!model.shape.scores_vocabulary() && is_in(name, &lm_head))
        || ENDS.iter().any(|end| name.ends_with(end))
        || PARTS.iter().any(|part| name.contains(part))
        || (model.shape.tied && name == names.head)
}

/// Whether a tensor is of a head of classes that the model does not have.
fn is_of_other_classes(name: &str, model: &Model) -> bool {
    let Names { class_dense, class_out, token_classes, .. } = *model.shape.names;
    let own: &[&str] = match model.shape.head {
        Head::Tokens | Head::Masked => &[],
        Head::Classes { .. } => &[class_dense, class_out],
        Head::TokenClasses { .. } => &[token_classes],
    };
    let others = [class_dense, class_out, token_classes].into_iter();
    others.filter(|layer| !layer.is_empty() && !own.contains(layer)).any(|layer| {
        name.strip_prefix(layer).is_some_and(|rest| matches!(rest, ".weight" | ".bias"))
    })
}

/// Compares the tensors of files with the model's.
///
/// # Errors
/// The files lack a tensor, or have an unknown one, or one of another shape or dtype.
pub(super) fn check<'t>(
    files: &[SafeTensors<'_>],
    tensors: &BTreeMap<&String, &FileTensor>,
    model: Option<&Model>,
    find: &impl Fn(&str) -> Option<TensorView<'t>>,
) -> Result<(), String> {
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
    problems.append(&mut missing);
    let prefix = prefix(model);
    let names = tensors.keys().flat_map(|name| [name.to_string(), old_name(name)]);
    let known: BTreeSet<String> = names
        .flat_map(|name| [name.strip_prefix(prefix).unwrap_or(&name).to_string(), name.clone()])
        .collect();
    for name in files.iter().flat_map(|tensors| tensors.names()) {
        if !known.contains(name) && !model.is_some_and(|model| is_ignored(name, model)) {
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
