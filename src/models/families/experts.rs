//! The keys of a `config.json` that families with experts share.

use serde_json::{Value, json};

use super::read::{Keys, flag, given, number, only, size, size_or_none};
use crate::models::{Balance, BalanceOf, Experts, IdleExperts};

/// Keys of routers and experts that are not built, with the value that stands for "none". DeepSeek,
/// dots1, GLM and their likes have them.
const NOT_BUILT: [(&str, f64); 5] = [
    ("n_shared_experts", 0.0),
    ("n_group", 1.0),
    ("topk_group", 1.0),
    ("routed_scaling_factor", 1.0),
    ("router_jitter_noise", 0.0),
];

/// Reads what all families with experts have. `intermediate` is the key with the channels of an
/// expert. Each block has experts, whose weights are normalised.
pub(super) fn read_experts(keys: &Keys, intermediate: &str) -> Result<Experts, String> {
    check_router(keys)?;
    Ok(Experts {
        count: count(keys)?,
        per_token: size(keys, "num_experts_per_tok")?,
        intermediate: size(keys, intermediate)?,
        normalised: true,
        router_bias: false,
        shared: 0,
        every: 1,
        from: 0,
        balance: Balance { loss: balance_loss(keys)?, ..Balance::default() },
        bundles: None,
        idle: IdleExperts::default(),
    })
}

/// The number of experts, which has two names: transformers 5 writes the second one for Qwen3-MoE,
/// and older versions wrote the first one.
fn count(keys: &Keys) -> Result<usize, String> {
    let first = size_or_none(keys, "num_experts")?;
    let second = size_or_none(keys, "num_local_experts")?;
    match first.or(second) {
        None => Err("num_experts (or num_local_experts) is missing".into()),
        Some(count) if second.is_some_and(|second| second != count) => Err(format!(
            "num_experts is {count} and num_local_experts is {}: they are two names of one number, \
             so remove the wrong one",
            second.unwrap_or_default()
        )),
        Some(count) => Ok(count),
    }
}

/// Refuses what would change the weights that a router gives, or the loss.
fn check_router(keys: &Keys) -> Result<(), String> {
    for (key, none) in NOT_BUILT {
        let value = number(keys, key, none as f32)?;
        if value != none as f32 {
            return Err(format!("{key} is {value}: only {none} is built"));
        }
    }
    only(keys, "scoring_func", "softmax")?;
    if given(keys, "e_score_correction_bias").is_some_and(|value| *value != Value::Bool(false)) {
        return Err("e_score_correction_bias is given: routers with such a bias, as those of \
                    DeepSeek and dots1, are not built"
            .into());
    }
    Ok(())
}

/// The weight of the loss that balances the experts. transformers adds that loss only where
/// `output_router_logits` is true.
fn balance_loss(keys: &Keys) -> Result<f64, String> {
    const WEIGHT: &str = "router_aux_loss_coef";
    // transformers' defaults.
    let is_olmoe = given(keys, "model_type").is_some_and(|family| family == "olmoe");
    let default = if is_olmoe { 0.01 } else { 0.001 };
    let weight = number(keys, WEIGHT, default as f32)?;
    if !flag(keys, "output_router_logits", false)? {
        return Ok(0.0);
    }
    if !(0.0..f32::INFINITY).contains(&weight) {
        return Err(format!("{WEIGHT} is {weight}: it must be a finite number, 0 or more"));
    }
    Ok(given(keys, WEIGHT).and_then(Value::as_f64).unwrap_or(default))
}

/// Writes the keys that [`read_experts`] reads, the number of experts under both names. Of the
/// losses that balance experts, transformers computes the one over all layers.
pub(super) fn write_experts(experts: &Experts, intermediate: &str, config: &mut Value) {
    let Experts { count, per_token, intermediate: channels, balance, .. } = *experts;
    let is_known = balance.loss > 0.0 && balance.of == BalanceOf::AllLayers;
    let mut own = json!({
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": per_token,
        intermediate: channels,
        "output_router_logits": is_known,
    });
    if balance.loss > 0.0 {
        own["router_aux_loss_coef"] = balance.loss.into();
    }
    let own = own.as_object().cloned().unwrap_or_default();
    config.as_object_mut().expect("a config is an object").extend(own);
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{PRESETS, preset, read, write};
    use super::*;
    use crate::kernels::{ClampedGate, RotaryScaling};

    /// The `config.json` of a golden, with some keys changed.
    fn config(family: &str, changes: Value) -> Value {
        let goldens = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens");
        let text = fs::read_to_string(format!("{goldens}/{family}/config.json"));
        let mut config: Value = serde_json::from_str(&text.expect("committed")).expect("JSON");
        for (key, value) in changes.as_object().expect("keys") {
            config[key] = value.clone();
        }
        config
    }

    fn experts_of(config: &Value) -> Result<Experts, String> {
        read(config).map(|shape| shape.experts.expect("the family has them"))
    }

    #[test]
    fn configs_are_read_as_they_were_written() {
        let goldens = [
            "gpt_oss",
            "gpt_oss-classes",
            "mixtral",
            "olmoe",
            "qwen2_moe",
            "qwen2_moe-window",
            "qwen3_5_moe_text",
            "qwen3_moe",
            "qwen3_moe-sparse",
            "qwen3_moe-idle",
            "qwen3_moe-window",
            "qwen3_next",
        ];
        let configs = goldens.map(|family| read(&config(family, json!({}))).expect("committed"));
        let presets = PRESETS.iter().filter_map(|name| preset(name));
        let presets = presets.filter(|shape| shape.experts.is_some());
        for mut shape in presets.chain(configs) {
            let written = write(&shape, &Value::Null);
            // Losses and limits that transformers does not have are not written.
            shape.experts.as_mut().expect("it has them").balance = Balance::default();
            assert_eq!(read(&written).expect("just written"), shape, "{written}");
            let count = shape.experts.map_or(0, |experts| experts.count);
            assert_eq!([&written["num_experts"], &written["num_local_experts"]], [count; 2]);
        }
    }

    #[test]
    fn experts_are_those_of_the_config() {
        let sparse = config("qwen3_moe-sparse", json!({}));
        let of_sparse = experts_of(&sparse).expect("committed");
        assert!(!of_sparse.is_of(0) && of_sparse.is_of(1) && !of_sparse.normalised);
        assert_eq!([of_sparse.count, of_sparse.per_token, of_sparse.intermediate], [7, 3, 14]);
        assert_eq!(read(&sparse).expect("committed").head_size, 10, "hidden / heads");
        let of_mixtral = experts_of(&config("mixtral", json!({}))).expect("committed");
        assert!(of_mixtral.is_of(0) && of_mixtral.normalised);
        assert_eq!([of_mixtral.intermediate, of_mixtral.shared], [14, 0]);
        let later = config("qwen2_moe", json!({ "mlp_only_layers": [0] }));
        let of_later = experts_of(&later).expect("the second block has experts");
        assert!(!of_later.is_of(0) && of_later.is_of(1));
        assert_eq!(of_later.shared, 22);
        // Both names of one number, and old configs, which have the first one alone.
        for keys in
            [json!({ "num_experts": 7 }), json!({ "num_local_experts": null, "num_experts": 7 })]
        {
            assert_eq!(experts_of(&config("qwen3_moe", keys)).expect("7 experts").count, 7);
        }
    }

    /// Released configs give few keys; transformers' defaults stand for the others.
    #[test]
    fn defaults_of_gpt_oss_are_transformers() {
        let removed = [
            "head_dim",
            "sliding_window",
            "layer_types",
            "swiglu_alpha",
            "swiglu_limit",
            "attention_bias",
            "rope_parameters",
        ];
        let mut given = config("gpt_oss", json!({ "num_hidden_layers": 4 }));
        removed.iter().for_each(|key| drop(given.as_object_mut().expect("keys").remove(*key)));
        let shape = read(&given).expect("defaults");
        assert_eq!(shape.head_size, 64);
        let window = shape.window.expect("every other block has one");
        assert_eq!(window.positions, 128);
        assert_eq!([0, 1, 2, 3].map(|block| window.is_of(block)), [true, false, true, false]);
        assert_eq!(shape.clamped, Some(ClampedGate { alpha: 1.702, limit: 7.0 }));
        assert_eq!(shape.biases, [true; 3]);
        let rotary = shape.rotary.expect("it has them");
        assert_eq!(rotary.theta, 150_000.0);
        let RotaryScaling::Yarn(yarn) = rotary.scaling else { panic!("{rotary:?}") };
        assert_eq!((yarn.factor, yarn.positions, yarn.truncate), (32.0, 4096, false));
        assert_eq!(shape.most_positions(), 131_072);
        let all = json!({ "sliding_window": null });
        assert_eq!(read(&config("gpt_oss", all)).expect("no window").window, None);
        let plain = json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e4 } });
        let plain = read(&config("gpt_oss", plain)).expect("plain rotary positions");
        assert_eq!(read(&write(&plain, &Value::Null)).expect("just written"), plain);
    }

    #[test]
    fn what_is_not_built_is_named() {
        let cases = [
            ("mixtral", json!({ "num_local_experts": null }), "num_experts (or num_local_experts)"),
            ("mixtral", json!({ "num_experts": 6 }), "num_experts is 6 and num_local_experts is 5"),
            ("mixtral", json!({ "num_experts_per_tok": null }), "num_experts_per_tok is missing"),
            (
                "mixtral",
                json!({ "router_jitter_noise": 0.01 }),
                "router_jitter_noise is 0.01: only 0",
            ),
            ("mixtral", json!({ "attention_bias": true }), "attention_bias is true: only false"),
            ("mixtral", json!({ "hidden_act": "mish" }), "hidden_act is \"mish\": known are"),
            (
                "mixtral",
                json!({ "output_router_logits": true, "router_aux_loss_coef": -1.0 }),
                "router_aux_loss_coef is -1",
            ),
            (
                "qwen3_moe",
                json!({ "mlp_only_layers": [1] }),
                "mlp_only_layers is [1]: only the first",
            ),
            ("qwen3_moe", json!({ "mlp_only_layers": 3 }), "must be a list of blocks' numbers"),
            ("qwen3_moe", json!({ "decoder_sparse_step": 0 }), "decoder_sparse_step is 0"),
            ("qwen3_moe", json!({ "n_shared_experts": 1 }), "n_shared_experts is 1: only 0"),
            ("qwen3_moe", json!({ "n_group": 8 }), "n_group is 8: only 1"),
            ("qwen3_moe", json!({ "routed_scaling_factor": 2.5 }), "routed_scaling_factor is 2.5"),
            ("qwen3_moe", json!({ "scoring_func": "sigmoid" }), "only \"softmax\" is built"),
            ("qwen3_moe", json!({ "e_score_correction_bias": true }), "DeepSeek and dots1"),
            ("qwen2_moe", json!({ "attention_bias": true }), "attention_bias is true: only false"),
            (
                "qwen2_moe",
                json!({ "layer_types": ["sliding_attention", "full_attention"] }),
                "use_sliding_window is false",
            ),
            ("qwen2_moe", json!({ "shared_expert_intermediate_size": 0 }), "must be at least 1"),
            ("gpt_oss", json!({ "hidden_act": "gelu" }), "hidden_act is \"gelu\": only \"silu\""),
            ("gpt_oss", json!({ "swiglu_limit": 0.0 }), "swiglu_limit is 0.0: it must be above 0"),
            ("gpt_oss", json!({ "swiglu_alpha": "x" }), "swiglu_alpha is \"x\": it must be"),
            ("gpt_oss", json!({ "n_group": 4 }), "n_group is 4: only 1"),
            ("olmoe", json!({ "clip_qkv": 8.0 }), "clip_qkv is 8.0: only null is built"),
        ];
        for (family, changes, says) in cases {
            let error = read(&config(family, changes)).expect_err(says);
            assert!(error.contains(says), "{says:?} expected in: {error}");
        }
    }

    #[test]
    fn a_loss_that_balances_experts_is_that_of_the_config() {
        let loss =
            |family, changes| experts_of(&config(family, changes)).expect("read").balance.loss;
        let on =
            |weight: Value| json!({ "output_router_logits": true, "router_aux_loss_coef": weight });
        assert_eq!(loss("mixtral", on(json!(0.02))), 0.02);
        assert_eq!(loss("mixtral", on(json!(0))), 0.0);
        assert_eq!(loss("mixtral", on(Value::Null)), 0.001, "the default of transformers");
        assert_eq!(loss("olmoe", on(Value::Null)), 0.01, "the default of transformers");
        assert_eq!(loss("mixtral", json!({ "router_aux_loss_coef": 0.5 })), 0.0, "it is not added");
        let mut shape = read(&config("qwen3_moe", on(json!(0.1)))).expect("read");
        let written = write(&shape, &Value::Null);
        assert_eq!(written["router_aux_loss_coef"], 0.1);
        assert_eq!(written["output_router_logits"], true);
        let experts = shape.experts.as_mut().expect("it has them");
        experts.balance.of = BalanceOf::EachLayer;
        let written = write(&shape, &Value::Null);
        assert_eq!(written["output_router_logits"], false, "transformers has another loss");
    }
}
