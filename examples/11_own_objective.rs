//! An objective of your own: a preference loss in which the tokens that make one answer longer than
//! the other count less (LD-DPO, Liu et al. 2024, without a reference).
//!
//! `cargo run --release --example 11_own_objective`

use l2l::data::{Batch, Sequence};
use l2l::objectives::{Measurements, Measures, Objective, Slopes};
use l2l::testing::check_objective;
use l2l::{Config, Trainer};

/// −ln σ(β (S of the chosen − S of the rejected)), where S counts the tokens behind the length of
/// the shorter answer `tail` times.
struct LengthDesensitised {
    beta: f64,
    tail: f64,
}

impl LengthDesensitised {
    fn weight(&self, token: usize, shared: usize) -> f64 {
        if token < shared { 1.0 } else { self.tail }
    }
}

impl Objective for LengthDesensitised {
    fn name(&self) -> String {
        format!("length-desensitised, beta {}, tail {}", self.beta, self.tail)
    }

    fn sequences(&self) -> usize {
        2
    }

    fn measures(&self) -> Measures {
        Measures::Tokens
    }

    fn metric_names(&self) -> &'static [&'static str] {
        &["longer"]
    }

    /// Whether the chosen answer is the longer one.
    fn metrics(&self, of: &Measurements<'_>) -> Vec<f64> {
        let is_longer = |record| of.tokens(2 * record) > of.tokens(2 * record + 1);
        (0..of.records()).map(|record| f64::from(u8::from(is_longer(record)))).collect()
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let records = of.records_of_step() as f64;
        let mut losses = Vec::new();
        for record in 0..of.records() {
            let answers = [2 * record, 2 * record + 1];
            let shared = of.tokens(answers[0]).min(of.tokens(answers[1]));
            let sum = |answer| -> f64 {
                let tokens = of.of_tokens(answer).iter().enumerate();
                tokens.map(|(at, log)| self.weight(at, shared) * f64::from(*log)).sum()
            };
            let x = self.beta * (sum(answers[0]) - sum(answers[1]));
            // ln(1 + e^−x), without an overflow.
            losses.push(((-x).max(0.0) + (-x.abs()).exp().ln_1p()) / records);
            let slope = -self.beta / (1.0 + x.exp()) / records;
            for (answer, slope) in answers.into_iter().zip([slope, -slope]) {
                for (at, to) in slopes.of_tokens(answer).iter_mut().enumerate() {
                    *to += slope * self.weight(at, shared);
                }
            }
        }
        Ok(losses)
    }
}

/// A prompt with a chosen and a rejected answer, in bytes. The prompt is not learnt.
fn record(prompt: &str, answers: [&str; 2]) -> Sequence {
    let mut record = Sequence::default();
    for answer in answers {
        let text = [prompt, answer].concat();
        let tokens = text.bytes().map(u32::from);
        let learnt = |(at, byte)| if at < prompt.len() { -100 } else { i32::from(byte) };
        record.labels.extend(text.bytes().enumerate().map(learnt));
        record.tokens.extend(tokens);
        record.documents.push(text.len());
    }
    record
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let objective = LengthDesensitised { beta: 0.1, tail: 0.2 };
    check_objective(&objective)?;

    let mut config = Config::default();
    config.model.layers = Some(2);
    config.model.hidden = Some(64);
    config.model.dropout = Some(0.0);
    config.data.sequence_length = Some(32);
    config.step.batch = 4; // records
    config.step.micro_batch = 2; // sequences
    config.optimizer.learning_rate = 3e-3;
    let records: Vec<Sequence> = (0..4)
        .map(|n| record(&format!("{n} and {n} is "), [&(2 * n).to_string(), "hard to say"]))
        .collect();

    let mut trainer = Trainer::builder(config).objective(objective).start().await?;
    for _ in 0..10 {
        let report = trainer.step(Batch::of_records(&records)).await?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    trainer.stop().await?;
    Ok(())
}
