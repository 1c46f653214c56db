//! Qwen3.5 with experts (Qwen Team 2026): the attention of Qwen3.5, and in each block experts and a
//! shared one, as in Qwen2 with experts. The weights of a row's experts are normalised.

use serde_json::Value;

use super::Names;
use super::experts::{read_experts, write_experts};
use super::qwen2_moe::{SHARED_CHANNELS, WITH_SHARED, shared_channels};
use super::qwen3_5::{HYBRID, of_text, read_hybrid, write_hybrid};
use super::qwen3_moe::INTERMEDIATE;
use super::read::{Keys, size};
use crate::models::{Experts, Shape};

pub(super) static NAMES: Names = Names {
    family: "qwen3_5_moe_text",
    router: WITH_SHARED.router,
    expert: WITH_SHARED.expert,
    shared: WITH_SHARED.shared,
    shared_gate: WITH_SHARED.shared_gate,
    class_out: "",
    read,
    write,
    ..HYBRID
};

/// The channels of a dense feed-forward, which no block has.
const DENSE: &str = "intermediate_size";

fn read(keys: &Keys) -> Result<Shape, String> {
    let experts = read_experts(keys, INTERMEDIATE)?;
    let experts = Some(Experts { shared: shared_channels(keys)?, ..experts });
    let mut all = keys.clone();
    all.insert(DENSE.into(), size(keys, INTERMEDIATE)?.into());
    Ok(Shape { experts, ..read_hybrid(&all, &NAMES, 2)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_hybrid(shape, &of_text(shape, "Qwen3_5Moe"));
    config.as_object_mut().expect("a config is an object").remove(DENSE);
    if let Some(experts) = &shape.experts {
        write_experts(experts, INTERMEDIATE, &mut config);
        config[SHARED_CHANNELS] = experts.shared.into();
    }
    config
}
