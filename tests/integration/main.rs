//! All integration tests in one program, because every test program links the whole library.
//!
//! One file: `cargo test --test integration exact::`. Some tests are programs of their own:
//! `tests/memory.rs` replaces the allocator, `tests/tidy.rs` and `tests/faults/` need nothing of
//! the library.

mod adapter_heads;
#[cfg(feature = "cli")]
mod bad_families;
mod bad_input;
mod bad_objectives;
#[cfg(all(feature = "cli", feature = "tokenizers"))]
mod bad_records;
mod balanced;
mod base;
mod block_inputs;
#[cfg(feature = "tokenizers")]
mod chats;
mod chunked;
#[cfg(feature = "cli")]
mod cli;
#[cfg(feature = "cli")]
mod commands;
mod composed;
mod compression;
#[cfg(feature = "cli")]
mod cuda;
#[cfg(feature = "cli")]
mod damaged;
#[cfg(feature = "tokenizers")]
mod data_files;
mod declared;
mod delayed;
mod delayed_files;
mod delayed_ranks;
mod depth;
#[cfg(feature = "prometheus")]
mod door;
mod embedding;
mod embeddinggemma;
mod embeddings;
mod errors;
mod evaluate;
mod exact;
mod executor;
mod expert_adapters;
mod expert_files;
#[cfg(all(feature = "cli", feature = "prometheus"))]
mod families;
mod few_rows;
mod fine_tuning;
#[cfg(all(feature = "cli", feature = "prometheus"))]
mod fit;
#[cfg(all(feature = "cli", feature = "prometheus"))]
mod fitted;
#[cfg(all(feature = "cli", feature = "prometheus", feature = "tokenizers"))]
mod fuzz;
mod generate;
mod gpt_oss;
mod growth;
mod hand_over;
mod heads;
#[cfg(feature = "tokenizers")]
mod hostile_text;
#[cfg(feature = "cli")]
mod hostile_weights;
mod idle;
mod in_step;
mod kept;
#[cfg(all(feature = "cli", unix))]
mod kills;
#[cfg(feature = "cli")]
mod limits;
mod linear;
mod longest;
mod lora;
#[cfg(feature = "tokenizers")]
mod machines;
mod multi_label;
mod multimodal;
mod objective;
#[cfg(feature = "cli")]
mod observed;
mod optimizers;
#[cfg(all(feature = "cli", target_os = "linux"))]
mod output;
mod packing;
#[cfg(feature = "tokenizers")]
mod pairs;
mod pipedream;
mod pipedream_2bw;
mod plan;
mod precision;
mod preference;
#[cfg(feature = "cli")]
mod program;
#[cfg(feature = "tokenizers")]
mod prompts;
mod pytorch;
mod rank_files;
mod ranks;
#[cfg(feature = "tokenizers")]
mod readme;
#[cfg(feature = "cli")]
mod recipes;
#[cfg(feature = "prometheus")]
mod recorder;
mod records;
mod reference;
mod resume;
mod reward;
mod rotary;
mod saving;
mod seen;
mod slices;
mod slim;
#[cfg(feature = "prometheus")]
mod telemetry;
mod tensor;
#[cfg(all(feature = "cli", target_os = "linux"))]
mod terminal;
#[cfg(feature = "tokenizers")]
mod text;
mod text_records;
#[cfg(feature = "cli")]
mod tiers;
mod trained;
mod ways;

/// What a run came to.
#[derive(Clone, Debug)]
struct Ending {
    weights_digest: String,
    summary: l2l::Summary,
}

impl std::ops::Deref for Ending {
    type Target = l2l::Summary;

    fn deref(&self) -> &l2l::Summary {
        &self.summary
    }
}

/// Ends a trainer, with the digest of its weights.
async fn stop(mut trainer: l2l::Trainer) -> Result<Ending, l2l::Error> {
    let weights_digest = trainer.digest().await?;
    Ok(Ending { weights_digest, summary: trainer.stop().await? })
}

/// Whether the long searches run whole (`L2L_TESTS=whole`, as at night) or bounded, for a quick
/// answer.
#[cfg(feature = "cli")]
fn whole() -> bool {
    match std::env::var("L2L_TESTS").as_deref() {
        Err(_) => false,
        Ok("whole") => true,
        Ok(other) => panic!("L2L_TESTS is {other:?}, and can be \"whole\""),
    }
}
