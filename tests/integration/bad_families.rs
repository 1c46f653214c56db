//! Keys of real configs that are not built, or cannot be right: refused with the key and its value.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bad_input::{folder, refused};

/// A config of a golden's model, whose `config.json` is changed.
fn of_family(folder: &TempDir, family: &str, change: impl Fn(&mut Value)) -> String {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(family);
    let text = fs::read_to_string(goldens.join("config.json")).expect("it is committed");
    let mut value: Value = serde_json::from_str(&text).expect("it is JSON");
    change(&mut value);
    let at = folder.path().join("model");
    fs::create_dir_all(&at).expect("a directory of ours");
    fs::write(at.join("config.json"), value.to_string()).expect("a directory of ours");
    format!("model.path = \"{}\"\ndata.train = \"random\"\n", at.display())
}

type Change = fn(&mut Value);

#[test]
fn configs_of_smollm3_and_olmo() {
    let folder = folder();
    let cases: [(&str, Change, &str); 6] = [
        ("smollm3", |c| c["no_rope_layers"] = json!([0, 0, 1]), "a list of 4 numbers"),
        ("smollm3", |c| c["no_rope_layers"] = json!([1, 2, 1, 0]), "no_rope_layers has 2"),
        ("smollm3", |c| c["use_sliding_window"] = json!(true), "use_sliding_window is true"),
        ("olmo2", |c| c["num_key_value_heads"] = json!(2), "model.kv_heads is 2"),
        ("olmo2", |c| c["rope_parameters"] = json!({ "x": {} }), "gemma4_text and olmo3 have"),
        ("olmo3", |c| c["rope_parameters"] = json!({ "rope_theta": 5 }), "must have two objects"),
    ];
    for (family, change, says) in cases {
        refused(&folder, &of_family(&folder, family, change), &["config.json", says]);
    }
}

#[test]
fn configs_with_factors_and_limits() {
    let folder = folder();
    let cases: [(&str, Change, &str); 19] = [
        (
            "ministral3",
            |c| c["rope_parameters"]["llama_4_scaling_beta"] = Value::Null,
            "is missing",
        ),
        ("ministral3", |c| c["rope_parameters"] = json!(3), "must be an object"),
        ("gemma2", |c| c["attn_logit_softcapping"] = json!(0), "must be above 0"),
        ("gemma2", |c| c["final_logit_softcapping"] = json!("x"), "must be a number"),
        ("gemma2", |c| c["query_pre_attn_scalar"] = json!(0), "must be at least 1"),
        ("gemma2", |c| c["use_bidirectional_attention"] = json!(true), "only false is built"),
        ("granite", |c| c["logits_scaling"] = json!(-1), "must be above 0"),
        ("granite", |c| c["residual_multiplier"] = json!("x"), "must be a number"),
        ("ministral", |c| c["sliding_window"] = Value::Null, "sliding_window is null"),
        ("ministral", |c| c["layer_types"][0] = json!("chunked"), "known are full_attention"),
        ("glm4", |c| c["rope_parameters"]["partial_rotary_factor"] = json!(0.3), "in pairs"),
        ("glm", |c| c["rope_parameters"]["rope_type"] = json!("x"), "rope_type is \"x\""),
        ("cohere", |c| c["use_qk_norm"] = json!(1), "use_qk_norm is 1"),
        ("cohere", |c| c["logit_scale"] = json!("x"), "must be a number"),
        ("cohere2", |c| c["sliding_window"] = Value::Null, "only blocks with a window rotate"),
        ("cohere2", |c| c["head_dim"] = json!(8), "hidden_size ÷ num_attention_heads"),
        ("gpt_neox", |c| c["is_decoder"] = json!(true), "is_decoder is true"),
        ("gpt_neox", |c| c["rope_parameters"]["rope_type"] = json!("x"), "rope_type is \"x\""),
        ("gpt_neox", |c| c["hidden_act"] = json!("x"), "hidden_act is \"x\""),
    ];
    for (family, change, says) in cases {
        refused(&folder, &of_family(&folder, family, change), &["config.json", says]);
    }
    let classes = of_family(&folder, "cohere", |_| ()) + "model.task = \"token-classification\"\n";
    refused(&folder, &classes, &["model.task", "the family cohere can only do causal-lm"]);
}

#[test]
fn configs_of_other_families() {
    let folder = folder();
    let cases: [(&str, Change, &str); 25] = [
        ("modernbert", |c| c["decoder_bias"] = json!(0), "decoder_bias is 0: it must be true or"),
        ("modernbert", |c| c["mlp_dropout"] = json!(0.1), "mlp_dropout is 0.1: only 0 is built"),
        ("modernbert", |c| c["classifier_pooling"] = json!("max"), "must be cls or mean"),
        ("modernbert", |c| c["rope_scaling"] = json!({}), "in this family only null is built"),
        (
            "modernbert",
            |c| {
                c["layer_types"] = Value::Null;
                c["global_attn_every_n_layers"] = json!(0);
            },
            "must be at least 1",
        ),
        (
            "llama",
            |c| c["rope_parameters"]["rope_type"] = json!("ntk"),
            "known are default, linear, dynamic",
        ),
        ("llama", |c| c["rope_parameters"]["rope_type"] = json!(7), "rope_type is 7"),
        (
            "llama",
            |c| c["rope_parameters"]["factor"] = json!(0),
            "factor must be given, at least 1",
        ),
        ("llama", |c| c["rope_scaling"] = json!("x"), "rope_scaling is \"x\""),
        ("llama", |c| c["hidden_act"] = json!("mish"), "known are gelu"),
        ("llama", |c| c["num_key_value_heads"] = json!(3), "model.kv_heads"),
        ("llama", |c| c["head_dim"] = json!(7), "rotated in pairs"),
        ("qwen2", |c| c["layer_types"] = json!(["full_attention"]), "a list of 2 kinds"),
        ("bert", |c| c["type_vocab_size"] = json!(u64::MAX), "model.token_types is"),
        ("bert", |c| c["tie_word_embeddings"] = json!(1), "must be true or false"),
        ("opt", |c| c["do_layer_norm_before"] = json!(false), "Take another size"),
        ("opt", |c| c["_remove_final_layer_norm"] = json!(true), "Take a checkpoint with one"),
        ("opt", |c| c["word_embed_proj_dim"] = json!(24), "only hidden_size, which is 42, is"),
        ("opt", |c| c["layerdrop"] = json!(0.1), "layerdrop is 0.1: only 0 is built. To leave"),
        ("opt", |c| c["enable_bias"] = json!(false), "enable_bias is false: only true is built"),
        ("opt", |c| c["layer_norm_elementwise_affine"] = json!(false), "only true is built"),
        ("opt", |c| c["activation_function"] = json!("mish"), "known are gelu"),
        ("opt", |c| c["num_attention_heads"] = json!(4), "hidden must be a multiple of heads"),
        ("roberta", |c| c["pad_token_id"] = json!(u64::MAX), "max_position_embeddings must be"),
        ("bert-classes", |c| c["problem_type"] = json!("regression"), "of 3 labels"),
    ];
    for (family, change, says) in cases {
        refused(&folder, &of_family(&folder, family, change), &["config.json", says]);
    }
    let tokens = of_family(&folder, "opt", |_| ()) + "model.task = \"token-classification\"\n";
    let says = "the family opt can only do causal-lm or sequence-classification";
    refused(&folder, &tokens, &["model.task", says]);
    let text = of_family(&folder, "bert", |_| ()).replace("random", "built-in");
    refused(&folder, &text, &["no tokenizer.json in"]);
}

#[test]
fn configs_of_electra_and_of_cheap_families() {
    let folder = folder();
    let cases: [(&str, Change, &str); 6] = [
        ("electra-classes", |c| c["embedding_size"] = json!(0), "embedding_size is 0: it must be"),
        ("electra-classes", |c| c["is_decoder"] = json!(true), "is_decoder is true"),
        ("seed_oss", |c| c["pretraining_tp"] = json!(2), "pretraining_tp is 2"),
        ("seed_oss", |c| c["residual_dropout"] = json!("x"), "must be a number"),
        ("ernie4_5", |c| c["use_bias"] = json!(1), "must be true or false"),
        ("helium", |c| c["head_dim"] = json!(12), "head_dim is 12: in this family"),
    ];
    for (family, change, says) in cases {
        refused(&folder, &of_family(&folder, family, change), &["config.json", says]);
    }
    for (family, says) in
        [("gemma3n_text", "embeddings of their own"), ("mpnet", "biases by relative position")]
    {
        let mut config = json!({});
        config["model_type"] = json!(family);
        let at = folder.path().join("model/config.json");
        fs::write(at, config.to_string()).expect("a directory of ours");
        let path = folder.path().join("model");
        let text = format!("model.path = \"{}\"\ndata.train = \"random\"\n", path.display());
        refused(&folder, &text, &["config.json", family, says]);
    }
    let masked = of_family(&folder, "electra-classes", |_| ()) + "model.task = \"masked-lm\"\n";
    let says = "electra can only do sequence-classification or token-classification or sentence-";
    refused(&folder, &masked, &["model.task", says]);
}

#[test]
fn configs_of_gemma4() {
    let folder = folder();
    let cases: [(Change, &str); 15] = [
        (|c| c["num_kv_shared_layers"] = json!(3), "in front of these there must be a block of"),
        (|c| c["num_kv_shared_layers"] = json!(5), "num_kv_shared_layers is 5 of 4 blocks"),
        (
            |c| c["hidden_size_per_layer_input"] = json!(65_537),
            "hidden_size_per_layer_input is 65537",
        ),
        (|c| c["enable_moe_block"] = json!(true), "experts beside their feed-forward"),
        (|c| c["use_bidirectional_attention"] = json!("all"), "tokens of text see no later ones"),
        (|c| c["sliding_window"] = Value::Null, "sliding_window is null"),
        (|c| c["layer_types"] = Value::Null, "only a multiple of 6 is built"),
        (|c| c["layer_types"][1] = json!("sliding_attention"), "must be an object that has"),
        (|c| c["per_layer_config"]["0"] = json!({ "head_dim": 8 }), "must be an object that has"),
        (|c| c["per_layer_config"]["1"]["head_dim"] = json!(16), "must be an object that has"),
        (
            |c| {
                for block in ["1", "3"] {
                    c["per_layer_config"][block]["head_dim"] = json!(514);
                }
            },
            "at most 512 times heads",
        ),
        (
            |c| {
                for block in ["1", "3"] {
                    c["per_layer_config"][block]["num_key_value_heads"] = json!(3);
                }
            },
            "model.kv_heads is 3",
        ),
        (
            |c| c["rope_parameters"]["full_attention"]["rope_type"] = json!("default"),
            "only the rope_type \"proportional\"",
        ),
        (
            |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(0.05),
            "partial_rotary_factor is 0.05",
        ),
        (
            |c| c["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = json!(0.5),
            "heads rotate as a whole",
        ),
    ];
    for (change, says) in cases {
        refused(&folder, &of_family(&folder, "gemma4_text", change), &["config.json", says]);
    }
    let few: Change = |c| c["vocab_size_per_layer_input"] = json!(60);
    let config = of_family(&folder, "gemma4_text-inputs", few);
    refused(
        &folder,
        &config,
        &["vocab_size_per_layer_input is 60, and vocab_size 61: only as many"],
    );
    for task in ["token-classification", "sequence-classification"] {
        let of_task = format!("model.task = \"{task}\"\n");
        let config = of_family(&folder, "gemma4_text", |_| ()) + &of_task;
        refused(&folder, &config, &["model.task", "gemma4_text can only do causal-lm"]);
    }
}

#[test]
fn configs_of_linear_attention() {
    let folder = folder();
    let cases: [(Change, &str); 10] = [
        (|c| c["layer_types"][0] = json!("sliding_attention"), "known are full_attention, linear"),
        (
            |c| {
                c["layer_types"] = json!(null);
                c["full_attention_interval"] = json!(129);
            },
            "full_attention_interval is 129: it must be at most 128",
        ),
        (|c| c["layer_types"] = json!(["full_attention"]), "a list of 4 kinds"),
        (
            |c| {
                c["layer_types"] = json!(null);
                c["full_attention_interval"] = json!(0);
            },
            "full_attention_interval is 0",
        ),
        (|c| c["linear_num_value_heads"] = json!(5), "a multiple of linear_num_key_heads"),
        (|c| c["linear_conv_kernel_dim"] = json!(0), "linear_conv_kernel_dim is 0"),
        (|c| c["linear_key_head_dim"] = json!(4096), "linear_key_head_dim is 4096"),
        (|c| c["hidden_act"] = json!("gelu"), "only \"silu\" is built"),
        (|c| c["model_type"] = json!("qwen3_5_moe_text"), "num_experts"),
        (|c| c["model_type"] = json!("qwen3_next"), "shared_expert_intermediate_size is missing"),
    ];
    for (change, says) in cases {
        refused(&folder, &of_family(&folder, "qwen3_5_text", change), &["config.json", says]);
    }
    let tokens =
        of_family(&folder, "qwen3_5_text", |_| ()) + "model.task = \"token-classification\"\n";
    refused(&folder, &tokens, &["model.task", "qwen3_5_text can only do causal-lm"]);
}
