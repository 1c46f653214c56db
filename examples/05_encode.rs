//! Prints the hidden states of an encoder, which the ring computes as it does in training.
//!
//! `cargo run --release --example 05_encode -- MODEL_DIRECTORY TOKENS.jsonl` prints one line of
//! (tokens × channels) for each line of token ids `[101, 2023, ...]`. Without arguments it encodes
//! three tokens with a small random BERT.

use std::fs;

use l2l::config::Task;
use l2l::data::Batch;
use l2l::{Config, Trainer};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut config = Config::default();
    config.model.task = Some(Task::SequenceClassification); // `encode` does not use the head
    config.data.sequence_length = Some(64);
    config.step.batch = 1;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let lines = match &arguments[..] {
        [model, lines] => {
            config.model.path = Some(model.into());
            fs::read_to_string(lines)?
        }
        _ => {
            config.model.preset = Some("bert-base".into());
            config.model.layers = Some(1);
            config.model.hidden = Some(24);
            config.model.heads = Some(3);
            "[101, 2023, 102]\n".into()
        }
    };
    let mut trainer = Trainer::start(config).await?;
    for line in lines.lines() {
        let tokens: Vec<u32> = serde_json::from_str(line)?;
        let hidden = trainer.encode(Batch::of_classes(&[(tokens, 0)])).await?;
        println!("{}", serde_json::to_string(&hidden)?);
    }
    trainer.stop().await?;
    Ok(())
}
