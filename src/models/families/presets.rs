//! Well-known models by name: their shapes, without weights.

use serde_json::{Value, json};

use super::{gpt2, read};
use crate::models::{Balance, BalanceOf, BalanceOver, Experts, Shape};

fn shape(config: Value) -> Shape {
    read(&config).expect("the preset's own config is valid")
}

/// The names that [`preset`] knows.
pub const PRESETS: [&str; 21] = [
    "gpt-small",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-175b",
    "turing-nlg-17b",
    "bert-base",
    "bert-large",
    "llama-1b",
    "llama-7b",
    "llama-70b",
    "qwen",
    "moe-small",
    "switch-small",
    "gshard-small",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
];

/// The shape of a well-known model, by its name. `None` for an unknown name.
pub fn preset(name: &str) -> Option<Shape> {
    let gpt = |layers, hidden, heads, vocabulary, positions| {
        gpt2([layers, hidden, heads, 4 * hidden, vocabulary, positions])
    };
    let bert = |layers: usize, hidden: usize, heads: usize| {
        shape(json!({
            "model_type": "bert", "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "intermediate_size": 4 * hidden, "vocab_size": 30522,
            "max_position_embeddings": 512, "type_vocab_size": 2,
        }))
    };
    Some(match name {
        "gpt-small" => gpt(6, 256, 8, 256, 256),
        "gpt2" => gpt(12, 768, 12, 50257, 1024),
        "gpt2-medium" => gpt(24, 1024, 16, 50257, 1024),
        "gpt2-large" => gpt(36, 1280, 20, 50257, 1024),
        "gpt2-xl" => gpt(48, 1600, 25, 50257, 1024),
        "gpt3-175b" => gpt(96, 12288, 96, 50257, 2048),
        "turing-nlg-17b" => gpt(78, 4256, 28, 50257, 1024),
        "bert-base" => bert(12, 768, 12),
        "bert-large" => bert(24, 1024, 16),
        "llama-1b" => shape(json!({
            "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        })),
        "llama-7b" => shape(json!({
            "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        })),
        "llama-70b" => shape(json!({
            "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
            "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
            "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        })),
        "qwen" => shape(json!({
            "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
        })),
        "moe-small" => moe_small([2, 512, 1], true),
        "switch-small" => balanced(moe_small([1, 1024, 2], false), SWITCH),
        "gshard-small" => balanced(moe_small([2, 1024, 2], true), GSHARD),
        "mixtral-8x7b" => shape(json!({
            "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
            "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        })),
        "qwen3-30b-a3b" => qwen3_moe([48, 2048, 32, 6144, 768]),
        "qwen3-235b-a22b" => qwen3_moe([94, 4096, 64, 12288, 1536]),
        "gpt-oss-20b" => gpt_oss([24, 32]),
        "gpt-oss-120b" => gpt_oss([36, 128]),
        _ => return None,
    })
}

/// The losses and limits of Switch (Fedus et al. 2021).
const SWITCH: Balance = Balance {
    loss: 0.01,
    of: BalanceOf::EachLayer,
    over: BalanceOver::Step,
    z_loss: 0.0,
    capacity_millionths: Some(1_250_000),
    second_at_random: false,
};

/// Those of GShard (Lepikhin et al. 2020). The paper does not say the weight of the loss; this one
/// is that of its implementation (Mesh TensorFlow, `moe_loss_coef`).
const GSHARD: Balance = Balance {
    of: BalanceOf::FirstChoice,
    capacity_millionths: Some(2_000_000),
    second_at_random: true,
    ..SWITCH
};

/// The shape with losses and limits of its routers.
fn balanced(shape: Shape, balance: Balance) -> Shape {
    let experts = shape.experts.map(|experts| Experts { balance, ..experts });
    Shape { experts, ..shape }
}

/// The shape of a small model of bytes with 8 experts: those that a token chooses, channels of one,
/// every how many blocks have them, and whether the weights of a token add up to 1.
fn moe_small([per_token, of_expert, every]: [usize; 3], normalised: bool) -> Shape {
    shape(json!({
        "model_type": "qwen3_moe", "num_hidden_layers": 6, "hidden_size": 256,
        "num_attention_heads": 8, "intermediate_size": 1024, "moe_intermediate_size": of_expert,
        "num_experts": 8, "num_experts_per_tok": per_token, "norm_topk_prob": normalised,
        "decoder_sparse_step": every, "vocab_size": 256, "max_position_embeddings": 256,
        "tie_word_embeddings": true,
    }))
}

/// The shape of a gpt-oss of these sizes: blocks, experts of a block.
fn gpt_oss([layers, experts]: [usize; 2]) -> Shape {
    shape(json!({
        "model_type": "gpt_oss", "num_hidden_layers": layers, "hidden_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": experts, "num_experts_per_tok": 4,
        "vocab_size": 201088, "max_position_embeddings": 131072,
    }))
}

/// The shape of a Qwen3 with 128 experts, of these sizes: blocks, hidden channels, heads,
/// feed-forward channels of a dense block, channels of an expert.
fn qwen3_moe([layers, hidden, heads, intermediate, of_expert]: [usize; 5]) -> Shape {
    shape(json!({
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": intermediate, "moe_intermediate_size": of_expert,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    }))
}
