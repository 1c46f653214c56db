//! An update rule of your own: Lion (Chen et al. 2023), with one moment for each parameter.
//!
//! `cargo run --release --example 03_own_update_rule`

use l2l::models::Tensor;
use l2l::optimizers::{Masters, Update, UpdateRule};
use l2l::{Config, Error, Trainer};

struct Lion {
    betas: [f32; 2],
    weight_decay: f32,
}

impl UpdateRule for Lion {
    fn states(&self) -> usize {
        1
    }

    fn apply(
        &self,
        _tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let rate = update.learning_rate as f32;
        let [beta1, beta2] = self.betas;
        let parameters = &mut *masters.join(); // f32, also where the EPS keeps them in two halves
        for ((p, m), g) in parameters.iter_mut().zip(&mut *states[0]).zip(gradient) {
            let g = update.scale * g; // below 1 when the norm was clipped
            let direction = beta1 * *m + (1.0 - beta1) * g;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *p -= rate * (sign + self.weight_decay * *p);
            *m = beta2 * *m + (1.0 - beta2) * g;
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let mut config = Config::default();
    config.model.layers = Some(2);
    config.model.hidden = Some(64);
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    config.optimizer.learning_rate = 1e-3;
    let rule = Lion { betas: [0.9, 0.99], weight_decay: 0.1 };

    let (mut trainer, mut batches) = Trainer::builder(config).update_rule(rule).open().await?;
    let states = trainer.plan().host.iter().find(|term| term.name == "optimizer_states");
    println!("{}", states.expect("the plan has them"));
    for _ in 0..10 {
        let report = trainer.step(batches.next().await?).await?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    trainer.stop().await?;
    Ok(())
}
