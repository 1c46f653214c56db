//! A layer that is composed of operations: gated attention, added to the residual stream. Its
//! backward is derived from the operations, and checked against finite differences. Then the layer
//! is trained between the model's own blocks.
//!
//! `cargo run --release --example 08_composed_layer`

use l2l::kernels::{Activation, Rotary, Rows};
use l2l::models::{
    Composed, Derived, Final, Heads, Init, Kind, Layer, Model, Operations, Stem, Tensor,
    TransformerBlock, Value,
};
use l2l::testing::check_gradients;
use l2l::{Config, Trainer, shape_of};

/// y = x + dropout(silu(gate) · up), where gate and up are a projection of one attention head.
struct Gated {
    index: u32,
    channels: usize,
    head_size: usize,
}

impl Composed for Gated {
    fn tensors(&self) -> Vec<Tensor> {
        let named = |name: &str, shape: &[usize], kind, init| Tensor {
            name: format!("gated.{}.{name}", self.index),
            shape: shape.to_vec(),
            kind,
            init,
            joined: false,
            stacked: false,
            kept_with: None,
        };
        let c = self.channels;
        let d = self.head_size;
        let weight = Init::Normal(0.05);
        vec![
            named("norm.weight", &[c], Kind::Norm, Init::Ones),
            named("qkv.weight", &[c, 3 * d], Kind::Weight, weight),
            named("up.weight", &[d, 2 * c], Kind::Weight, weight),
            named("up.bias", &[2 * c], Kind::Bias, Init::Zeros),
        ]
    }

    fn index(&self) -> u32 {
        self.index
    }

    fn channels(&self) -> usize {
        self.channels
    }

    fn compose(&self, ops: &mut Operations<'_>, x: Value) -> Value {
        let heads = Heads {
            heads: 1,
            kv_heads: 1,
            head_size: self.head_size,
            causal: true,
            window: None,
            rotary: Some(Rotary::new(10_000.0)),
            dropout: 0.0,
        };
        let normed = ops.norm(x, 0, None, 1e-5, true);
        let qkv = ops.linear(normed, 1, None, false);
        let mixed = ops.attention(qkv, heads);
        let wide = ops.linear(mixed, 2, Some(3), false);
        let gated = ops.gate(wide, Activation::Silu);
        let saved = ops.dropout(gated, 0.1);
        ops.add(x, saved)
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gated = |index| Derived(Gated { index, channels: 64, head_size: 16 });
    check_gradients(&gated(0), 64, Rows { sequences: 2, positions: 9 })?;
    println!("the derived backward agrees with finite differences");

    let mut config = Config::default();
    config.model.layers = Some(2);
    config.model.hidden = Some(64);
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    let shape = shape_of(&config)?;
    let block = |index| TransformerBlock::new(index, index as usize / 2 - 1, shape);
    let stack: Vec<Box<dyn Layer>> = vec![
        Box::new(Stem { index: 1, shape }),
        Box::new(block(2)),
        Box::new(gated(3)),
        Box::new(block(4)),
        Box::new(gated(5)),
        Box::new(Final::new(shape)),
    ];
    let builder = Trainer::builder(config).model(Model::of(shape, stack));
    let (mut trainer, mut batches) = builder.open().await?;
    for _ in 0..10 {
        let report = trainer.step(batches.next().await?).await?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    trainer.stop().await?;
    Ok(())
}
