//! OLMoE (Muennighoff et al. 2024): Llama with experts in each block, one norm over all heads of
//! the queries, and one over all heads of the keys.

use serde_json::Value;

use super::Names;
use super::experts::{read_experts, write_experts};
use super::llama::{read_shared, write_shared};
use super::qwen3_moe::SPARSE;
use super::read::{Keys, flag, given, number};
use crate::kernels::QkNorm;
use crate::models::{Experts, Shape};

pub(super) static NAMES: Names = Names {
    family: "olmoe",
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    // transformers has no classifiers of this family.
    class_out: "",
    token_classes: "",
    read,
    write,
    ..SPARSE
};

/// The key with the channels of an expert.
const INTERMEDIATE: &str = "intermediate_size";

fn read(keys: &Keys) -> Result<Shape, String> {
    if let Some(limit) = given(keys, "clip_qkv") {
        return Err(format!("clip_qkv is {limit}: only null is built"));
    }
    let bias = flag(keys, "attention_bias", false)?;
    let biases = [bias, bias, false];
    let normalised = flag(keys, "norm_topk_prob", false)?;
    let experts = Some(Experts { normalised, ..read_experts(keys, INTERMEDIATE)? });
    let norm_epsilon = number(keys, "rms_norm_eps", 1e-5)?;
    let shared = read_shared(keys, &NAMES, 10_000.0)?;
    Ok(Shape { biases, experts, norm_epsilon, qk_norm: Some(QkNorm::Joint), ..shared })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Olmoe");
    config["attention_bias"] = shape.biases[0].into();
    if let Some(experts) = &shape.experts {
        write_experts(experts, INTERMEDIATE, &mut config);
        config["norm_topk_prob"] = experts.normalised.into();
    }
    config
}
