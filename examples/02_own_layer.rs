//! A layer of your own: a bottleneck adapter (Houlsby et al. 2019) after each block of a GPT-2. Its
//! backward is written by hand and checked against finite differences.
//!
//! `cargo run --release --example 02_own_layer`

use l2l::kernels::{
    Activate, ActivateBackward, Activation, Kernels, Linear, LinearBackward, Residual, Rows,
};
use l2l::models::{
    Backward, Final, Forward, Init, Kind, Layer, Model, Save, Stem, Tensor, TransformerBlock,
};
use l2l::tensor::Dtype;
use l2l::testing::check_gradients;
use l2l::{Config, Trainer, shape_of};

/// y = x + gelu(x a + b) c + d, with a bottleneck narrower than x.
struct Adapter {
    number: usize,
    channels: usize,
    bottleneck: usize,
}

impl Layer for Adapter {
    fn tensors(&self) -> Vec<Tensor> {
        let named = |name: &str, shape: &[usize], kind, init| Tensor {
            name: format!("adapter.{}.{name}", self.number),
            shape: shape.to_vec(),
            kind,
            init,
            joined: false,
            stacked: false,
            kept_with: None,
        };
        let c = self.channels;
        let n = self.bottleneck;
        vec![
            named("down.weight", &[c, n], Kind::Weight, Init::Normal(0.02)),
            named("down.bias", &[n], Kind::Bias, Init::Zeros),
            named("up.weight", &[n, c], Kind::Weight, Init::Normal(0.02)),
            named("up.bias", &[c], Kind::Bias, Init::Zeros),
        ]
    }

    /// Saves nothing: recomputing the narrow activations in the backward costs little.
    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { weights, x, y, scratch, .. } = *pass;
        let [a, b, c, d] = weights.try_into().expect("four tensors");
        let narrow = scratch.take(x.rows, self.bottleneck);
        let activated = scratch.take_like(narrow);
        let added = scratch.take_like(y);
        let activation = Activation::GeluTanh;
        let transposed = false;
        k.linear(&Linear { y: narrow, x, w: a, bias: Some(b), transposed });
        k.activate(&Activate { y: activated, x: narrow, activation });
        k.linear(&Linear { y: added, x: activated, w: c, bias: Some(d), transposed });
        k.residual(&Residual { y, a: x, x: added, dropout: None });
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { weights, gradients, accumulate, x, dy, dx, scratch, .. } = *pass;
        let [a, b, c, _] = weights.try_into().expect("four tensors");
        // Each is an `Option`: a frozen tensor has no gradient.
        let [da, db, dc, dd] = gradients.try_into().expect("four tensors");
        let dx = dx.unwrap_or_else(|| scratch.take_like(dy));
        let narrow = scratch.take(x.rows, self.bottleneck);
        let activated = scratch.take_like(narrow);
        let dnarrow = scratch.take_like(narrow);
        let dadded = scratch.take_like(dy);
        let activation = Activation::GeluTanh;
        let transposed = false;
        k.linear(&Linear { y: narrow, x, w: a, bias: Some(b), transposed });
        k.activate(&Activate { y: activated, x: narrow, activation });
        let up = LinearBackward {
            dx: dnarrow,
            dw: dc,
            dbias: dd,
            dy,
            x: activated,
            w: c,
            transposed,
            accumulate,
        };
        k.linear_backward(&up, scratch);
        k.activate_backward(&ActivateBackward { dx: dnarrow, x: narrow, activation });
        let down = LinearBackward {
            dx: dadded,
            dw: da,
            dbias: db,
            dy: dnarrow,
            x,
            w: a,
            transposed,
            accumulate,
        };
        k.linear_backward(&down, scratch);
        k.residual(&Residual { y: dx, a: dy, x: dadded, dropout: None });
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let adapter = |number| Adapter { number, channels: 64, bottleneck: 16 };
    check_gradients(&adapter(0), 64, Rows { sequences: 2, positions: 9 })?;
    println!("the adapter's backward agrees with finite differences");

    let mut config = Config::default();
    config.model.layers = Some(2);
    config.model.hidden = Some(64);
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    let shape = shape_of(&config)?;
    let mut stack: Vec<Box<dyn Layer>> = vec![Box::new(Stem { index: 1, shape })];
    for number in 0..shape.layers {
        stack.push(Box::new(TransformerBlock::new(2 + number as u32, number, shape)));
        stack.push(Box::new(adapter(number)));
    }
    stack.push(Box::new(Final::new(shape)));

    let builder = Trainer::builder(config).model(Model::of(shape, stack));
    let (mut trainer, mut batches) = builder.open().await?;
    for _ in 0..10 {
        let report = trainer.step(batches.next().await?).await?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    trainer.stop().await?;
    Ok(())
}
