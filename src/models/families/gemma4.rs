//! Gemma 4, dense models of text (Gemma Team 2026): Gemma 3 with scales of norms as they are, norms
//! of values, scores without a factor, a number that multiplies the output of each block, and, in
//! blocks without a window, heads of another size, of which a part rotates with the frequencies of
//! a whole one. There, values may be the keys before their norm. The small sizes (E2B, E4B) have
//! inputs of each block, and their last blocks read keys and values of others.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::gemma3::{AROUND, with_norms_around};
use super::llama::{read_shared, write_shared};
use super::read::{
    Keys, above_zero, activation, flag, given, layer_types, size, size_or_none, sliding_window,
    window_by_kinds, window_of_most, with_sizes, write_layer_types, wrong,
};
use super::rotary::{ROPE, rotary_by_kind, write_rotary_by_kind};
use super::{InputNames, Names};
use crate::kernels::{HeadValues, LogitForm, QkNorm, Rotary, RotaryScaling};
use crate::models::{BlockInputs, GlobalHeads, Head, Shape, SharedKv, Window};

pub(super) static NAMES: Names = Names {
    family: "gemma4_text",
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    output_scalar: "model.layers.{}.layer_scalar",
    inputs: InputNames {
        table: "model.embed_tokens_per_layer.weight",
        projection: "model.per_layer_model_projection",
        norm: "model.per_layer_projection_norm",
        gate: "model.layers.{}.per_layer_input_gate",
        output: "model.layers.{}.per_layer_projection",
        output_norm: "model.layers.{}.post_per_layer_input_norm",
    },
    class_out: "", // transformers has no such model
    token_classes: "",
    read,
    write,
    ..AROUND
};

/// transformers' defaults of sizes, which files may leave out.
const ABSENT: [(&str, usize); 11] = [
    ("vocab_size", 262_144),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 30),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
    ("sliding_window", 512),
    (INPUTS, 256),
    (INPUT_VOCABULARY, 262_144),
];

const INPUTS: &str = "hidden_size_per_layer_input";
const INPUT_VOCABULARY: &str = "vocab_size_per_layer_input";
const SHARED_KV: &str = "num_kv_shared_layers";
const WIDE: &str = "use_double_wide_mlp";
const BY_LAYER: &str = "per_layer_config";
const CAP: &str = "final_logit_softcapping";
const ONE_PROJECTION: &str = "attention_k_eq_v";

/// transformers' defaults of the base of rotary positions: in all of a sequence, and in a window.
const THETAS: [f32; 2] = [1_000_000.0, 10_000.0];

fn read(keys: &Keys) -> Result<Shape, String> {
    let keys = &with_sizes(keys, &ABSENT);
    refuse_parts(keys)?;
    let mut shared = keys.clone();
    shared.retain(|key, _| !ROPE.contains(&key.as_str()));
    let shape = read_shared(&shared, &NAMES, THETAS[0])?;
    let bias = flag(keys, "attention_bias", false)?;
    let window = window(keys)?;
    let [rotary, window_rotary] = rotary(keys)?.map(Some);
    let shape = Shape { window, ..shape };
    Ok(Shape {
        rotary,
        window_rotary,
        shared_kv: shared_kv(keys, &shape)?,
        block_inputs: block_inputs(keys, &shape)?,
        values: HeadValues::Normed,
        global_heads: Some(global_heads(keys, window)?),
        norm_offset: 0.0,
        qk_norm: Some(QkNorm::ByHead),
        output_scalars: true,
        score_scale: Some(1.0),
        logits: LogitForm { cap: above_zero(keys, CAP)?, ..LogitForm::PLAIN },
        biases: [bias, bias, false],
        activation: activation(keys, "hidden_activation", "gelu_pytorch_tanh")?,
        tied: flag(keys, "tie_word_embeddings", true)?,
        ..with_norms_around(shape)
    })
}

/// Refuses what some sizes of Gemma 4 have.
fn refuse_parts(keys: &Keys) -> Result<(), String> {
    if flag(keys, "enable_moe_block", false)? {
        return Err(
            "enable_moe_block is true: blocks with experts beside their feed-forward (26B-A4B) \
             are not built, only false is"
                .into(),
        );
    }
    match given(keys, "use_bidirectional_attention") {
        // Tokens of images alone see later ones.
        None => Ok(()),
        Some(Value::String(kind)) if kind == "vision" => Ok(()),
        Some(kind) => Err(format!(
            "use_bidirectional_attention is {kind}: only null and \"vision\" are built, with \
             which tokens of text see no later ones"
        )),
    }
}

/// The most blocks that may have inputs: more than any model has.
const MOST_BLOCKS: usize = 1 << 12;

/// The inputs of blocks.
fn block_inputs(keys: &Keys, shape: &Shape) -> Result<Option<BlockInputs>, String> {
    let channels = size(keys, INPUTS)?;
    if channels == 0 {
        return Ok(None);
    }
    let Shape { layers, vocabulary: tokens, .. } = *shape;
    if channels > 1 << 16 || layers > MOST_BLOCKS {
        return Err(format!(
            "{INPUTS} is {channels}, and num_hidden_layers {layers}: at most {} channels and \
             {MOST_BLOCKS} blocks are built",
            1 << 16
        ));
    }
    let vocabulary = size(keys, INPUT_VOCABULARY)?;
    if !(tokens..=1 << 24).contains(&vocabulary) {
        return Err(format!(
            "{INPUT_VOCABULARY} is {vocabulary}, and vocab_size {tokens}: only as many or more are \
             built, so that each token has a row, at most {}",
            1 << 24
        ));
    }
    Ok(Some(BlockInputs { vocabulary, channels }))
}

/// The blocks that read keys and values of others. As in transformers, there are blocks of each
/// kind in front of them.
fn shared_kv(keys: &Keys, shape: &Shape) -> Result<Option<SharedKv>, String> {
    let wide = flag(keys, WIDE, false)?;
    let count = size_or_none(keys, SHARED_KV)?.unwrap_or(0);
    if count == 0 {
        return Ok(None);
    }
    let layers = shape.layers;
    let from = layers.saturating_sub(count);
    let slides = |block| shape.has_window(block);
    let has_source = |block| (0..from).any(|other| slides(other) == slides(block));
    if count > layers || !(from..layers).all(has_source) {
        return Err(format!(
            "{SHARED_KV} is {count} of {layers} blocks: in front of these there must be a block of \
             each of their layer_types, whose keys and values they read"
        ));
    }
    Ok(Some(SharedKv { from, wide }))
}

/// The window. As in transformers, the last block never has it.
fn window(keys: &Keys) -> Result<Option<Window>, String> {
    let Some(positions) = sliding_window(keys)? else {
        return Err("sliding_window is null: only a number is built".into());
    };
    match layer_types(keys)? {
        None => {
            let window = window_of_most(keys, positions, 6)?;
            let last = size(keys, "num_hidden_layers")?.saturating_sub(1);
            match window.is_of(last) {
                true => Err(format!(
                    "num_hidden_layers is {}: without layer_types only a multiple of 6 is built",
                    last + 1
                )),
                false => Ok(Some(window)),
            }
        }
        Some(mut slides) => {
            if let Some(last) = slides.last_mut() {
                *last = false;
            }
            window_by_kinds("layer_types", &slides, positions).map(Some)
        }
    }
}

/// The rotary positions of blocks without a window and of those with one.
fn rotary(keys: &Keys) -> Result<[Rotary; 2], String> {
    let mut own = Keys::new();
    for key in ["max_position_embeddings", "rope_parameters"] {
        own.extend(given(keys, key).map(|value| (key.to_string(), value.clone())));
    }
    let default = json!({
        "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25 },
        "sliding_attention": { "rope_type": "default" },
    });
    own.entry("rope_parameters").or_insert(default);
    let [full, slides] = rotary_by_kind(&own, THETAS)?;
    if !matches!(full.scaling, RotaryScaling::Proportional(_)) {
        return Err("rope_parameters: in full_attention, only the rope_type \"proportional\" is \
                    built"
            .into());
    }
    if slides.part != 1.0 || matches!(slides.scaling, RotaryScaling::Proportional(_)) {
        return Err("rope_parameters: in sliding_attention, heads rotate as a whole: leave out \
                    partial_rotary_factor, and set the rope_type \"default\""
            .into());
    }
    Ok([full, slides])
}

/// The heads of blocks without a window: from `per_layer_config`, or from the keys of files before.
fn global_heads(keys: &Keys, window: Option<Window>) -> Result<GlobalHeads, String> {
    let shares = flag(keys, ONE_PROJECTION, false)?;
    let values = if shares { HeadValues::Keys } else { HeadValues::Normed };
    let kv_heads = size(keys, "num_key_value_heads")?;
    if !keys.contains_key(BY_LAYER) {
        let own = size_or_none(keys, "num_global_key_value_heads")?.filter(|_| shares);
        let head_size = size_or_none(keys, "global_head_dim")?.unwrap_or(512);
        return Ok(GlobalHeads { kv_heads: own.unwrap_or(kv_heads), head_size, values });
    }
    let own = own_of_globals(keys, window)?;
    Ok(GlobalHeads {
        kv_heads: size_or_none(&own, "num_key_value_heads")?.unwrap_or(kv_heads),
        head_size: size_or_none(&own, "head_dim")?.unwrap_or(size(keys, "head_dim")?),
        values,
    })
}

/// The keys that all blocks without a window have of their own. transformers writes the numbers of
/// blocks with as many digits as the largest has, and nothing where no block has keys of its own.
fn own_of_globals(keys: &Keys, window: Option<Window>) -> Result<Keys, String> {
    let Some(all) = given(keys, BY_LAYER) else { return Ok(Keys::new()) };
    let must = "an object that has, for each full_attention block, the same head_dim and \
                num_key_value_heads, and nothing else";
    let refused = || wrong(BY_LAYER, all, must);
    let own_of = |(block, own): (&String, &Value)| {
        Some((block.parse::<usize>().ok()?, own.as_object()?.clone()))
    };
    let by_block: Option<BTreeMap<usize, Keys>> =
        all.as_object().ok_or_else(refused)?.iter().map(own_of).collect();
    let by_block = by_block.ok_or_else(refused)?;
    let Some(first) = by_block.values().next() else { return Ok(Keys::new()) };
    let is_global = |block: &usize| window.is_none_or(|window| !window.is_of(*block));
    let globals = (0..size(keys, "num_hidden_layers")?).filter(is_global);
    let is_known = |key: &String| ["head_dim", "num_key_value_heads"].contains(&key.as_str());
    let is_same = by_block.values().all(|own| own == first);
    if !is_same || !by_block.keys().copied().eq(globals) || !first.keys().all(is_known) {
        return Err(refused());
    }
    Ok(first.clone())
}

fn write(shape: &Shape) -> Value {
    let of_tokens = matches!(shape.head, Head::Tokens);
    let mut config = write_shared(shape, if of_tokens { "Gemma4" } else { "Gemma4Text" });
    write_rotary_by_kind(shape, &mut config);
    let keys = config.as_object_mut().expect("it is an object");
    for key in ["rope_theta", "rope_scaling", "partial_rotary_factor", "hidden_act"] {
        keys.remove(key);
    }
    config["attention_bias"] = shape.biases[0].into();
    config["hidden_activation"] = shape.activation.name().into();
    config[CAP] = shape.logits.cap.into();
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    config[INPUTS] = shape.block_inputs.map_or(0, |inputs| inputs.channels).into();
    if let Some(inputs) = shape.block_inputs {
        config[INPUT_VOCABULARY] = inputs.vocabulary.into();
    }
    config[SHARED_KV] = shape.shared_kv.map_or(0, |shared| shape.layers - shared.from).into();
    config[WIDE] = shape.shared_kv.is_some_and(|shared| shared.wide).into();
    write_layer_types(shape, &mut config);
    if let Some(GlobalHeads { kv_heads, head_size, values }) = shape.global_heads {
        config[ONE_PROJECTION] = (values == HeadValues::Keys).into();
        config["global_head_dim"] = head_size.into();
        config["num_global_key_value_heads"] = kv_heads.into();
        let own = json!({ "head_dim": head_size, "num_key_value_heads": kv_heads });
        let globals =
            (0..shape.layers).filter(|block| shape.window.is_none_or(|one| !one.is_of(*block)));
        let by_layer: Map<String, Value> =
            globals.map(|block| (block.to_string(), own.clone())).collect();
        config[BY_LAYER] = by_layer.into();
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys of files before `per_layer_config` mean the same.
    #[test]
    fn keys_of_older_files_are_read() {
        let text = include_str!("../../../tests/goldens/gemma4_text/config.json");
        let newer: Keys = serde_json::from_str(text).expect("it is JSON");
        let mut older = newer.clone();
        older.remove(BY_LAYER);
        older.insert("global_head_dim".into(), 20.into());
        older.insert("num_global_key_value_heads".into(), 1.into());
        let shape = read(&newer).expect("it is built");
        assert_eq!(read(&older).expect("it is built"), shape);
        let [slides, global] = [0, 1].map(|block| shape.of_block(block));
        assert_eq!([slides.head_size, slides.qkv()], [12, 96]);
        assert_eq!([global.head_size, global.qkv(), global.projected_qkv()], [20, 120, 100]);
        let written = write(&shape);
        let written = written.as_object().expect("it is an object");
        assert_eq!(read(written).expect("it is what was written"), shape);
    }

    /// As transformers saves a model of twelve blocks; and where all blocks have the same heads.
    #[test]
    fn what_transformers_saves_is_read() {
        let own = json!({ "head_dim": 20, "num_key_value_heads": 1 });
        for (by_layer, expected) in [
            (json!({ "05": own, "11": own }), Some([1, 20])),
            (json!({}), Some([2, 12])),
            (Value::Null, Some([2, 12])),
            (json!({ "05": own }), None),
            (json!({ "04": own, "05": own, "11": own }), None),
            (json!({ "05": own, "11": { "head_dim": 20 } }), None),
        ] {
            let config = json!({
                "num_hidden_layers": 12,
                "hidden_size": 24,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 12,
                INPUTS: 0,
                BY_LAYER: by_layer,
            });
            let shape = read(config.as_object().expect("it is an object"));
            let heads = shape.ok().and_then(|shape| shape.global_heads);
            assert_eq!(heads.map(|heads| [heads.kv_heads, heads.head_size]), expected, "{config}");
        }
    }

    /// The sizes of the 31B model, without the keys that transformers has as defaults.
    #[test]
    fn the_largest_dense_size_is_read() {
        let layers = (1..=60).map(|block| match block % 6 {
            0 => "full_attention",
            _ => "sliding_attention",
        });
        let config = json!({
            "attention_k_eq_v": true,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 5376,
            INPUTS: 0,
            "intermediate_size": 21_504,
            "layer_types": layers.collect::<Vec<_>>(),
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        });
        let shape = read(config.as_object().expect("it is an object")).expect("it is built");
        let [slides, global] = [4, 5].map(|block| shape.of_block(block));
        assert_eq!([slides.kv_heads, slides.head_size], [16, 256]);
        assert_eq!([global.kv_heads, global.head_size], [4, 512]);
        assert_eq!(global.values, HeadValues::Keys);
        let pairs = shape.rotary.map(|rotary| rotary.pairs(global.head_size));
        assert_eq!(pairs, Some(64));
        assert_eq!(shape.window.map(|window| window.positions), Some(1024));
    }
}
