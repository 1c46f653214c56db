//! A whole run of a config in your program: validation, early stopping, checkpoints and a log.
//!
//! `cargo run --release --example 09_fit`. It runs as `l2l train` does, with its own callbacks.

use std::path::Path;

use l2l::inference::Evaluation;
use l2l::{Callbacks, Config, Error, Trainer};

struct Progress;

impl Callbacks for Progress {
    fn validation(&mut self, step: u64, found: &Evaluation) {
        println!("step {step}: loss {:.4} on the validation set", found.loss);
    }

    fn checkpoint(&mut self, directory: &Path) {
        println!("checkpoint {}", directory.display());
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let folder = tempfile::tempdir().expect("a folder for checkpoints and the log");
    let mut config = Config::default(); // trains on the built-in text; `Config::read` takes a file
    config.model.layers = Some(2);
    config.data.sequence_length = Some(64);
    config.step.steps = Some(30);
    config.validation.every_steps = Some(10);
    config.validation.patience = Some(2);
    config.checkpoint.directory = Some(folder.path().join("checkpoints"));
    config.log.file = Some(folder.path().join("log.jsonl"));

    let fitted = Trainer::fit(config).run(&mut Progress).await?;
    println!("{:?} after {} steps", fitted.end, fitted.summary.steps);
    Ok(())
}
