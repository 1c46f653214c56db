//! A loss of your own: cross entropy with a penalty on the softmax's normaliser (z-loss, as in
//! PaLM, Chowdhery et al. 2022).
//!
//! `cargo run --release --example 04_own_loss`

use l2l::kernels::Loss;
use l2l::models::Model;
use l2l::testing::check_loss;
use l2l::{Config, Trainer, shape_of};

/// lse − target + weight · lse², where lse is the log of the softmax's normaliser.
struct ZLoss {
    weight: f32,
}

impl Loss for ZLoss {
    fn value(&self, lse: f32, target: f32) -> f32 {
        lse - target + self.weight * lse * lse
    }

    fn slopes(&self, lse: f32, _target: f32) -> [f32; 2] {
        [1.0 + 2.0 * self.weight * lse, -1.0]
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let loss = ZLoss { weight: 1e-2 };
    check_loss(&loss)?;

    let mut config = Config::default();
    config.model.layers = Some(2);
    config.model.hidden = Some(64);
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    let mut model = Model::new(shape_of(&config)?);
    model.loss = Box::new(loss);

    let (mut trainer, mut batches) = Trainer::builder(config).model(model).open().await?;
    for _ in 0..10 {
        let report = trainer.step(batches.next().await?).await?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    trainer.stop().await?;
    Ok(())
}
