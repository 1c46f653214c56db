//! Packed sequences train as if each text had a sequence of its own.

use l2l::data::{Batch, Predicts, Sequence};
use l2l::{Config, StepReport, Trainer};

pub(crate) fn config(toml: &str, batch: usize) -> Config {
    let text = format!(
        "{toml}\ndata.train = \"random\"\nmodel.dropout = 0.0\noptimizer.learning_rate = 1e-3\n\
         step.micro_batch = 2\nstep.batch = {batch}"
    );
    Config::parse(&text).expect("good")
}

/// Texts of these lengths. In masked ones every third token is predicted.
pub(crate) fn texts(lengths: &[usize], step: usize, predicts: Predicts) -> Vec<Sequence> {
    let mut number = 7 * step as u32;
    let text = |&length: &usize| {
        let mut token = || {
            number = number.wrapping_mul(1_103_515_245).wrapping_add(12345);
            number >> 16 & 0x3f
        };
        let tokens: Vec<u32> = (0..length).map(|_| token()).collect();
        let mut one = Sequence::plain(tokens);
        if predicts == Predicts::Own {
            let hidden = one.labels.iter_mut().enumerate().filter(|(at, _)| at % 3 != 1);
            hidden.for_each(|(_, label)| *label = -100);
        }
        one
    };
    lengths.iter().map(text).collect()
}

pub(crate) fn packed(texts: &[Sequence]) -> Sequence {
    let mut all = Sequence::default();
    for one in texts {
        all.tokens.extend(&one.tokens);
        all.labels.extend(&one.labels);
        all.documents.push(one.tokens.len());
    }
    all
}

pub(crate) async fn steps(
    config: Config,
    batches: impl Fn(usize) -> Vec<Sequence>,
    predicts: Predicts,
) -> Vec<StepReport> {
    let mut trainer = Trainer::start(config).await.expect("good");
    let mut reports = Vec::new();
    for step in 0..4 {
        let batch = Batch::of(&batches(step), predicts);
        reports.push(trainer.step(batch).await.expect("a good batch"));
    }
    trainer.stop().await.expect("a clean end");
    reports
}

#[tokio::test]
async fn packed_training_is_unpacked_training() {
    let sizes = "model.layers = 2\nmodel.hidden = 32\nmodel.heads = 4\nmodel.vocabulary = 64\n";
    let cases = [
        ("model.preset = \"gpt-small\"", Predicts::Next),
        ("model.preset = \"llama-1b\"\nmodel.kv_heads = 2", Predicts::Next),
        ("model.preset = \"bert-base\"", Predicts::Own),
    ];
    const LENGTHS: [usize; 7] = [9, 70, 3, 20, 66, 31, 2];
    for (preset, predicts) in cases {
        let toml = format!("{preset}\n{sizes}model.positions = 200\n");
        let apart = |step| texts(&LENGTHS, step, predicts);
        let together = |step| {
            let texts = texts(&LENGTHS, step, predicts);
            vec![packed(&texts[..3]), packed(&texts[3..])]
        };
        let one = steps(config(&toml, LENGTHS.len()), apart, predicts).await;
        let other = steps(config(&toml, 2), together, predicts).await;
        for (one, other) in one.iter().zip(&other) {
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * a.abs().max(1.0);
            assert_eq!(one.tokens, other.tokens);
            assert_eq!(one.model_flops, other.model_flops);
            assert!(close(one.loss, other.loss), "{preset}: {} {}", one.loss, other.loss);
            let a = one.grad_norm;
            let b = other.grad_norm;
            assert!(close(a, b), "{preset}: norms {a} {b}");
        }
        assert!(one[3].loss < one[0].loss);
    }
}
