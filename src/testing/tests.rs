//! The checks pass the layers that there are, and find what is wrong.

use super::*;
use crate::kernels::{CrossEntropy, Kernels};
use crate::models::families::{self, gpt2};
use crate::models::{Dropouts, Model, ModelLayer, Shape, TransformerBlock};

const ROWS: Rows = Rows { sequences: 3, positions: 7 };

fn small() -> Shape {
    let p = 0.1;
    let dropout =
        Dropouts { embedding: p, attention: p, projection: p, feed_forward: p, classifier: p };
    Shape { dropout, ..gpt2([1, 24, 3, 40, 10, 9]) }
}

/// Every layer of small models of every family.
#[test]
fn the_layers_there_are_pass() {
    let decoder = |kind: &str, head: usize| {
        serde_json::json!({
            "model_type": kind, "num_hidden_layers": 2, "hidden_size": 20,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head,
            "intermediate_size": 28, "vocab_size": 10, "max_position_embeddings": 9,
            "sliding_window": 3, "use_sliding_window": true, "max_window_layers": 1,
            "attention_bias": true, "mlp_bias": true, "attention_dropout": 0.1,
        })
    };
    // All experts are chosen: at the edge of a choice there is no gradient.
    let experts = |kind: &str| {
        let own = serde_json::json!({
            "num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 5,
            "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9,
            "sliding_window": null, "use_sliding_window": false, "attention_bias": false,
            "num_key_value_heads": 4,
        });
        let mut config = decoder(kind, 6);
        let keys = config.as_object_mut().expect("it is one");
        keys.extend(own.as_object().expect("it is one").clone());
        config
    };
    let learned = |kind: &str| {
        serde_json::json!({
            "model_type": kind, "num_hidden_layers": 1, "hidden_size": 24,
            "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 10,
            "max_position_embeddings": 9, "type_vocab_size": 2,
            "n_layers": 1, "dim": 24, "n_heads": 3, "hidden_dim": 40,
            "ffn_dim": 40, "activation_function": "gelu",
        })
    };
    let decoders = ["llama", "mistral", "qwen2", "qwen3"].map(|kind| decoder(kind, 6));
    let learned = ["bert", "distilbert", "opt", "roberta"].map(learned);
    let read = |config| families::read(&config).expect("a config of ours");
    let experts = ["gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"].map(experts);
    let shapes = decoders.into_iter().chain(experts).chain(learned);
    let shapes = shapes.map(read).chain([small()]);
    for shape in shapes {
        for layer in Model::new(shape).layers.iter().filter_map(ModelLayer::stack) {
            let checked = check_gradients(layer, shape.hidden, ROWS);
            checked.unwrap_or_else(|error| panic!("{}: {error}", shape.names.family));
        }
    }
    check_loss(&CrossEntropy).expect("a loss of ours");
}

/// Sequences that are walked in chunks, the last of them ragged.
#[test]
fn chunks_pass() {
    let decoder = |kind: &str| {
        let config = serde_json::json!({
            "model_type": kind, "num_hidden_layers": 1, "hidden_size": 6,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "intermediate_size": 5, "vocab_size": 10, "max_position_embeddings": 400,
            "sliding_window": 150, "attention_dropout": 0.1,
            "num_local_experts": 3, "num_experts_per_tok": 3,
        });
        families::read(&config).expect("a config of ours")
    };
    let plain = Shape { dropout: small().dropout, ..gpt2([1, 6, 2, 10, 9, 400]) };
    for (shape, sequences, chunks) in [
        (plain, 1, 1),
        (decoder("mistral"), 1, 2),
        (decoder("llama"), 2, 1),
        (decoder("mixtral"), 2, 1),
        (decoder("gpt_oss"), 1, 2),
    ] {
        let shape = Shape { chunk_positions: 128, ..shape };
        let rows = Rows { sequences, positions: chunks * 128 + 70 };
        for layer in Model::new(shape).layers.iter().filter_map(ModelLayer::stack) {
            let checked = check_gradients(layer, shape.hidden, rows);
            checked.unwrap_or_else(|error| panic!("{}: {error}", shape.names.family));
        }
    }
}

/// Blocks in slices, with sequences that are whole and in chunks.
#[test]
fn slices_pass() {
    let decoder = |kind: &str| {
        let config = serde_json::json!({
            "model_type": kind, "num_hidden_layers": 2, "hidden_size": 16,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4,
            "intermediate_size": 12, "vocab_size": 10, "max_position_embeddings": 400,
            "sliding_window": 150,
            "attention_bias": kind == "llama", "mlp_bias": kind == "llama",
            "attention_dropout": 0.1, "rotary_pct": 0.5, "rotary_emb_base": 100.0, "ffn_dim": 12,
            "word_embed_proj_dim": 16, "activation_function": "gelu",
        });
        families::read(&config).expect("a config of ours")
    };
    let plain = Shape { dropout: small().dropout, ..gpt2([1, 16, 4, 12, 9, 400]) };
    let families = ["llama", "mistral", "qwen3", "phi3", "cohere", "gpt_neox", "opt"].map(decoder);
    let long = Rows { sequences: 1, positions: 128 + 70 };
    for (at, shape) in [plain].into_iter().chain(families).enumerate() {
        for (slices, rows) in [(2, ROWS), (4, ROWS), (2, long)] {
            if rows.positions > 128 && at > 2 {
                continue; // chunks are the same for all families
            }
            let shape = Shape { chunk_positions: 128, slices, ..shape };
            for layer in Model::new(shape).layers.iter().filter_map(ModelLayer::stack) {
                let checked = check_gradients(layer, shape.hidden, rows);
                checked.unwrap_or_else(|error| panic!("{}: {error}", shape.names.family));
            }
        }
    }
}

/// A block whose backward forgets something.
struct Wrong(TransformerBlock, bool);

impl Layer for Wrong {
    fn tensors(&self) -> Vec<Tensor> {
        self.0.tensors()
    }

    fn saved_len(&self, positions: usize, save: Save, dtype: Dtype) -> usize {
        self.0.saved_len(positions, save, dtype)
    }

    fn forward(&self, kernels: &dyn Kernels, pass: &Forward<'_>) {
        self.0.forward(kernels, pass);
    }

    fn backward(&self, kernels: &dyn Kernels, pass: &Backward<'_>) {
        let mut pass = Backward { ..*pass };
        if self.1 {
            pass.accumulate = false;
        } else {
            let metadata = *pass.batch.metadata();
            pass.batch = BatchMetadata { dropout_key: None, ..metadata }.view();
        }
        self.0.backward(kernels, &pass);
    }
}

#[test]
fn what_is_wrong_is_found() {
    let block = || TransformerBlock::new(2, 0, small());
    let forgets = |what| check_gradients(&Wrong(block(), what), small().hidden, ROWS);
    assert!(forgets(false).is_err(), "masks");
    let error = forgets(true).expect_err("accumulation").to_string();
    assert!(error.contains("added to itself"), "{error}");

    struct Half;
    impl Loss for Half {
        fn value(&self, lse: f32, target: f32) -> f32 {
            lse - target
        }

        fn slopes(&self, _: f32, _: f32) -> [f32; 2] {
            [1.0, -0.5]
        }
    }
    assert!(check_loss(&Half).expect_err("a wrong slope").what.contains("the target"));
}
