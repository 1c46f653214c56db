//! Trains in a program of your own: a model, batches, steps, one weight, a checkpoint.
//!
//! `cargo run --release --example 01_embed`

use l2l::{Config, Error, Trainer};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let mut config = Config::default(); // every key has a default; `Config::read` reads a file
    config.model.layers = Some(2);
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    config.step.micro_batch = 4;
    config.channels.weights = 2; // weight slots on the device

    // On this tokio runtime. Batches may also come from any stream, or Batch::new(&sequences).
    let (mut trainer, mut batches) = Trainer::open(config).await?;
    for _ in 0..10 {
        let report = trainer.step(batches.next().await?).await?;
        println!("step {}: loss {:.4}, norm {:.3}", report.step, report.loss, report.grad_norm);
    }

    let (shape, values) = trainer.weights("transformer.ln_f.weight").await?;
    println!("a norm's scale {shape:?} begins with {:.4}", values[0]);

    let place = std::env::temp_dir().join("l2l-example-checkpoint");
    trainer.checkpoint(&place).await?; // Trainer::builder(config).resume(&place).open() resumes
    println!("a checkpoint, which transformers reads too: {}", place.display());

    println!("weights {}", trainer.digest().await?);
    let summary = trainer.stop().await?;
    println!("{} steps in {:.1} s", summary.steps, summary.seconds);
    Ok(())
}
