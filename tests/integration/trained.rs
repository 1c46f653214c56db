//! The tensors that random runs train.

use l2l::config::{LoraConfig, TrainConfig};

/// Which of its tensors are trained.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trained {
    All,
    /// Biases alone, of all layers.
    Biases,
    /// All but the embedding, which is the head as well, and the first block.
    Upper,
    /// The head's norm alone.
    Last,
    /// Some of each block: a joined group, one tensor behind a frozen one.
    Some,
    Adapters,
    /// Adapters of some modules, with dropout, beside norms.
    AdaptersAndNorms,
}

/// The family of a random run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Family {
    Gpt2,
    Qwen3Moe,
    GptOss,
}

impl Family {
    pub(crate) fn of(has_experts: bool, is_gpt_oss: bool) -> Family {
        match (has_experts, is_gpt_oss) {
            (false, _) => Family::Gpt2,
            (true, false) => Family::Qwen3Moe,
            (true, true) => Family::GptOss,
        }
    }
}

impl Trained {
    pub(crate) const ALL: [Trained; 7] = [
        Trained::All,
        Trained::Biases,
        Trained::Upper,
        Trained::Last,
        Trained::Some,
        Trained::Adapters,
        Trained::AdaptersAndNorms,
    ];

    pub(crate) fn config(self, family: Family) -> TrainConfig {
        let has_experts = !matches!(family, Family::Gpt2);
        let texts = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect();
        let named = |gpt2: &[&str], qwen3_moe: &[&str], gpt_oss: &[&str]| match family {
            Family::Gpt2 => texts(gpt2),
            Family::Qwen3Moe => texts(qwen3_moe),
            Family::GptOss => texts(gpt_oss),
        };
        let some = TrainConfig::default();
        let lora = |lora| TrainConfig { lora: Some(lora), ..TrainConfig::default() };
        match self {
            Trained::All => some,
            Trained::Biases => {
                let only = named(&["bias"], &["mlp.gate", "k_norm"], &["bias"]);
                TrainConfig { only, ..some }
            }
            Trained::Upper => {
                let below = ["embed_tokens", "layers.0"];
                let below = named(&["wte", "wpe", "h.0"], &below, &below);
                TrainConfig { frozen: below, ..some }
            }
            Trained::Last => {
                TrainConfig { only: named(&["ln_f"], &["model.norm"], &["model.norm"]), ..some }
            }
            Trained::Some => {
                let only = named(
                    &["*.attn.c_attn.weight", "mlp.c_proj.bias", "ln_2", "wpe"],
                    &["*.experts.0.up_proj.*", "o_proj", "k_norm", "mlp.gate"],
                    &["gate_up_proj_bias", "experts.down_proj", "o_proj", "sinks", "mlp.router"],
                );
                TrainConfig { only, ..some }
            }
            Trained::Adapters => lora(LoraConfig::default()),
            Trained::AdaptersAndNorms => {
                let [attention, other] =
                    if has_experts { ["q_proj", "o_proj"] } else { ["c_attn", "mlp.c_proj"] };
                let first = if has_experts { "layers.0.self_attn" } else { "h.0.mlp" };
                TrainConfig {
                    only: texts(&["norm"]),
                    ..lora(LoraConfig {
                        rank: Some(3),
                        alpha: Some(4.0),
                        rank_stabilised: true,
                        dropout: 0.2,
                        targets: Some(texts(&[attention, other])),
                        rank_pattern: Some([(other.into(), 5), (first.into(), 2)].into()),
                        alpha_pattern: Some([(attention.into(), 7.0)].into()),
                        path: None,
                    })
                }
            }
        }
    }
}
