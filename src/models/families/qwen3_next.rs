//! Qwen3-Next (Qwen Team 2025): the blocks of Qwen3.5 with experts, where linear attention has its
//! projections head by head, and some blocks may be dense.

use serde_json::Value;

use super::qwen2_moe::{SHARED_CHANNELS, WITH_SHARED, shared_channels};
use super::qwen3_5::{HYBRID, read_hybrid, write_hybrid};
use super::qwen3_moe::{read_sparse, write_sparse};
use super::read::Keys;
use super::{LinearNames, Names};
use crate::models::{Experts, Shape};

pub(super) static NAMES: Names = Names {
    family: "qwen3_next",
    linear: LinearNames {
        projection: &[
            "model.layers.{}.linear_attn.in_proj_qkvz",
            "model.layers.{}.linear_attn.in_proj_ba",
        ],
        ..HYBRID.linear
    },
    router: WITH_SHARED.router,
    expert: WITH_SHARED.expert,
    shared: WITH_SHARED.shared,
    shared_gate: WITH_SHARED.shared_gate,
    token_classes: "score",
    read,
    write,
    ..HYBRID
};

fn read(keys: &Keys) -> Result<Shape, String> {
    let experts = Some(Experts { shared: shared_channels(keys)?, ..read_sparse(keys, true)? });
    Ok(Shape { experts, ..read_hybrid(keys, &NAMES, 2)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_hybrid(shape, "Qwen3Next");
    write_sparse(shape, &mut config);
    config[SHARED_CHANNELS] = shape.experts.map_or(0, |experts| experts.shared).into();
    config
}
