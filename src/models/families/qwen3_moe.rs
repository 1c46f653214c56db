//! Qwen3 with experts (Yang et al. 2025): Qwen3 with experts in all blocks or in some.

use serde_json::Value;

use super::Names;
use super::experts::{read_experts, write_experts};
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, given, size_or_none, sliding_window};
use crate::kernels::QkNorm;
use crate::models::{Experts, Shape, Window};

pub(super) static NAMES: Names = Names {
    family: "qwen3_moe",
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    read,
    write,
    ..SPARSE
};

/// The names that Qwen3 and Qwen2 with experts share.
pub(super) const SPARSE: Names = Names {
    router: "model.layers.{}.mlp.gate",
    expert: [
        "model.layers.{}.mlp.experts.{}.gate_proj",
        "model.layers.{}.mlp.experts.{}.up_proj",
        "model.layers.{}.mlp.experts.{}.down_proj",
    ],
    ..SHARED
};

/// The key with the channels of an expert.
pub(super) const INTERMEDIATE: &str = "moe_intermediate_size";

/// Reads the keys of experts that Qwen3 and Qwen2 share. `normalised`: transformers' default.
pub(super) fn read_sparse(keys: &Keys, normalised: bool) -> Result<Experts, String> {
    let every = size_or_none(keys, "decoder_sparse_step")?.unwrap_or(1);
    if every == 0 {
        return Err("decoder_sparse_step is 0: it must be at least 1".into());
    }
    let normalised = flag(keys, "norm_topk_prob", normalised)?;
    let from = dense_blocks(keys)?;
    Ok(Experts { normalised, every, from, ..read_experts(keys, INTERMEDIATE)? })
}

/// The number of blocks that are dense by `mlp_only_layers`.
fn dense_blocks(keys: &Keys) -> Result<usize, String> {
    let Some(list) = given(keys, "mlp_only_layers") else { return Ok(0) };
    let blocks = list.as_array().map(|blocks| blocks.iter().map(Value::as_u64));
    let blocks = blocks.and_then(|blocks| blocks.collect::<Option<Vec<u64>>>());
    let Some(mut blocks) = blocks else {
        return Err(format!("mlp_only_layers is {list}: it must be a list of blocks' numbers"));
    };
    blocks.sort_unstable();
    blocks.dedup();
    if (0..).zip(&blocks).any(|(number, block)| number != *block) {
        return Err(format!(
            "mlp_only_layers is {list}: only the first blocks (0, 1, …) may be dense by this key"
        ));
    }
    Ok(blocks.len())
}

/// Writes the keys that [`read_sparse`] reads.
pub(super) fn write_sparse(shape: &Shape, config: &mut Value) {
    let Some(experts) = &shape.experts else { return };
    write_experts(experts, INTERMEDIATE, config);
    config["norm_topk_prob"] = experts.normalised.into();
    config["decoder_sparse_step"] = experts.every.into();
    config["mlp_only_layers"] = (0..experts.from).collect();
}

/// Writes the keys that [`used_window`] reads.
pub(super) fn write_used_window(shape: &Shape, config: &mut Value) {
    config["use_sliding_window"] = shape.window.is_some().into();
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
}

/// The number of positions of a sliding window, if there is one.
pub(super) fn used_window(keys: &Keys) -> Result<Option<usize>, String> {
    match flag(keys, "use_sliding_window", false)? {
        true => sliding_window(keys),
        false => Ok(None),
    }
}

fn read(keys: &Keys) -> Result<Shape, String> {
    let bias = flag(keys, "attention_bias", false)?;
    let biases = [bias, bias, false];
    let experts = Some(read_sparse(keys, false)?);
    // transformers reads neither layer_types nor max_window_layers of this family.
    let window = used_window(keys)?.map(Window::of_all);
    // Without head_dim the heads share the channels evenly, unlike those of the dense Qwen3.
    let qk_norm = Some(QkNorm::ByHead);
    Ok(Shape { biases, experts, window, qk_norm, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Qwen3Moe");
    config["attention_bias"] = shape.biases[0].into();
    write_sparse(shape, &mut config);
    write_used_window(shape, &mut config);
    config
}
