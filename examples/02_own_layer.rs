//! A layer of your own: a bottleneck adapter (Houlsby et al. 2019) after each block of a GPT-2. Its
//! backward is written by hand and checked against finite differences.
//!
//! `cargo run --release --example 02_own_layer`

use l2l::data::Batches;
use l2l::kernels::{Activation, Kernels, Linear, Rows};
use l2l::models::{
    Backward, Block, Final, Forward, Init, Kind, Layer, Model, Save, Stem, Tensor, tensor_views,
};
use l2l::tensor::{Dtype, View};
use l2l::testing::check_gradients;
use l2l::{Config, Trainer, shape_of};

/// y = x + gelu(x a + b) c + d, with a bottleneck narrower than x.
struct Adapter {
    number: usize,
    channels: usize,
    bottleneck: usize,
}

impl Adapter {
    fn down(&self, rows: usize) -> Linear {
        Linear { rows, inputs: self.channels, outputs: self.bottleneck, transposed: false }
    }

    fn up(&self, rows: usize) -> Linear {
        Linear { rows, inputs: self.bottleneck, outputs: self.channels, transposed: false }
    }

    fn parts(&self, block: View) -> [View; 4] {
        tensor_views(&self.tensors(), block).try_into().expect("four tensors")
    }
}

impl Layer for Adapter {
    fn tensors(&self) -> Vec<Tensor> {
        let named = |name: &str, shape: &[usize], kind, init| Tensor {
            name: format!("adapter.{}.{name}", self.number),
            shape: shape.to_vec(),
            kind,
            init,
            joined: false,
        };
        let (c, n) = (self.channels, self.bottleneck);
        vec![
            named("down.weight", &[c, n], Kind::Weight, Init::Normal(0.02)),
            named("down.bias", &[n], Kind::Bias, Init::Zeros),
            named("up.weight", &[n, c], Kind::Weight, Init::Normal(0.02)),
            named("up.bias", &[c], Kind::Bias, Init::Zeros),
        ]
    }

    /// Nothing: the backward computes the little it needs again.
    fn saved_len(&self, _positions: usize, _keep: Save, _of: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, weights, x, y, scratch, .. } = *pass;
        let ([a, b, c, d], rows) = (self.parts(weights), batch.rows.count());
        let narrow = scratch.take(rows * self.bottleneck);
        let bent = scratch.take(rows * self.bottleneck);
        let added = scratch.take(y.len());
        k.linear(narrow, x, a, Some(b), self.down(rows));
        k.activate(bent, narrow, Activation::GeluTanh);
        k.linear(added, bent, c, Some(d), self.up(rows));
        k.residual(y, x, added, batch.rows, None);
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradient, accumulate, x, dy, dx, scratch, .. } = *pass;
        let ([a, b, c, _], rows) = (self.parts(weights), batch.rows.count());
        let gradient = gradient.unwrap_or_else(|| scratch.take_floats(weights.len()));
        let [da, db, dc, dd] = self.parts(gradient);
        let dx = dx.unwrap_or_else(|| scratch.take(dy.len()));
        let narrow = scratch.take(rows * self.bottleneck);
        let bent = scratch.take(rows * self.bottleneck);
        let dnarrow = scratch.take(rows * self.bottleneck);
        let through = scratch.take(dy.len());
        k.linear(narrow, x, a, Some(b), self.down(rows));
        k.activate(bent, narrow, Activation::GeluTanh);
        k.linear_backward(dnarrow, dc, Some(dd), dy, bent, c, self.up(rows), accumulate, scratch);
        k.activate_backward(dnarrow, narrow, Activation::GeluTanh);
        k.linear_backward(
            through,
            da,
            Some(db),
            dnarrow,
            x,
            a,
            self.down(rows),
            accumulate,
            scratch,
        );
        k.residual(dx, dy, through, batch.rows, None);
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let adapter = |number| Adapter { number, channels: 64, bottleneck: 16 };
    check_gradients(&adapter(0), 64, Rows { sequences: 2, positions: 9 })?;
    println!("the adapter's backward is its forward's gradient");

    let mut config = Config::default();
    config.model.layers = Some(2);
    config.model.hidden = Some(64);
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    let shape = shape_of(&config)?;
    let mut stack: Vec<Box<dyn Layer>> = vec![Box::new(Stem { index: 1, shape })];
    for number in 0..shape.layers {
        stack.push(Box::new(Block { index: 2 + number as u32, number, shape }));
        stack.push(Box::new(adapter(number)));
    }
    stack.push(Box::new(Final { shape }));

    let mut batches = Batches::open(&config)?;
    let mut trainer = Trainer::builder(config).model(Model::of(shape, stack)).start()?;
    for _ in 0..10 {
        let report = trainer.step(batches.next().await?).await?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    trainer.stop().await?;
    Ok(())
}
