//! Ministral 3, models of text (Mistral AI 2025): Mistral with YaRN, and queries that grow with
//! their positions.

use serde_json::{Value, json};

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, given, number, size, size_or_none};
use crate::kernels::{QueryGrowth, Rotary};
use crate::models::{Shape, Window};

pub(super) static NAMES: Names = Names { family: "ministral3", read, write, ..SHARED };

const ROPE: &str = "rope_parameters";
const OLDER: &str = "rope_scaling";
const BETA: &str = "llama_4_scaling_beta";
const ORIGINAL: &str = "original_max_position_embeddings";

fn read(keys: &Keys) -> Result<Shape, String> {
    let mut all = keys.clone();
    // The older key wins where both are given, as in transformers.
    let key = if given(keys, OLDER).is_some() { OLDER } else { ROPE };
    if given(keys, key).is_none() {
        all.insert(key.into(), default_rotary());
    }
    let shape = read_shared(&all, &NAMES, 10_000.0)?;
    let growth = growth(all[key].as_object().ok_or_else(|| format!("{key} must be an object"))?)?;
    let rotary = shape.rotary.map(|rotary| Rotary { growth: Some(growth), ..rotary });
    Ok(Shape {
        kv_heads: size_or_none(keys, "num_key_value_heads")?.unwrap_or(8),
        head_size: size_or_none(keys, "head_dim")?.unwrap_or(128),
        rotary,
        window: size_or_none(keys, "sliding_window")?.map(Window::of_all),
        norm_epsilon: number(keys, "rms_norm_eps", 1e-5)?,
        ..shape
    })
}

/// transformers' rotary positions of a config without such keys.
fn default_rotary() -> Value {
    json!({
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        ORIGINAL: 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        BETA: 0.1,
    })
}

fn growth(keys: &Keys) -> Result<QueryGrowth, String> {
    let beta = number(keys, BETA, f32::NAN)?;
    let positions = size(keys, ORIGINAL)?;
    if beta.is_nan() {
        return Err(format!("{BETA} is missing in {ROPE}"));
    }
    if positions == 0 {
        return Err(format!("{ORIGINAL} is 0: it must be at least 1"));
    }
    Ok(QueryGrowth { beta, positions })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Ministral3");
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    if let Some(QueryGrowth { beta, positions }) = shape.rotary.and_then(|rotary| rotary.growth) {
        config[OLDER] = Value::Null;
        config[ROPE][BETA] = beta.into();
        config[ROPE][ORIGINAL] = positions.into();
    }
    config
}
