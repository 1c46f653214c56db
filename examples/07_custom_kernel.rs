//! A custom kernel, the squared ReLU (So et al. 2021), and a layer that runs it. The kernel is a
//! Rust function for the CPU and CUDA text for a GPU.
//!
//! `cargo run --release --example 07_custom_kernel`, or `… 07_custom_kernel cuda` on a GPU.

use l2l::config::DeviceKind;
use l2l::kernels::{Custom, CustomKernel, Kernels, Rows};
use l2l::models::{Backward, Final, Forward, Layer, Model, Save, Stem, Tensor, TransformerBlock};
use l2l::tensor::Dtype;
use l2l::testing::check_gradients;
use l2l::{Config, Trainer, shape_of};

/// y = x + s max(x, 0)².
const FORWARD: CustomKernel = CustomKernel {
    name: "squared_relu",
    text: r#"
extern "C" __global__ void squared_relu(T* y, const T* x, long long count, float scale) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) {
        const float value = get(x[at]), positive = fmaxf(value, 0.0f);
        y[at] = put(value + scale * positive * positive);
    }
}"#,
    cpu: |writes, reads, numbers| {
        for (y, x) in writes[0].iter_mut().zip(reads[0]) {
            *y = x + numbers[0] * x.max(0.0) * x.max(0.0);
        }
    },
};

/// dx = dy (1 + 2 s max(x, 0)).
const BACKWARD: CustomKernel = CustomKernel {
    name: "squared_relu_backward",
    text: r#"
extern "C" __global__ void squared_relu_backward(
        T* dx, const T* dy, const T* x, long long count, float scale) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) {
        dx[at] = put(get(dy[at]) * (1.0f + 2.0f * scale * fmaxf(get(x[at]), 0.0f)));
    }
}"#,
    cpu: |writes, reads, numbers| {
        for ((dx, dy), x) in writes[0].iter_mut().zip(reads[0]).zip(reads[1]) {
            *dx = dy * (1.0 + 2.0 * numbers[0] * x.max(0.0));
        }
    },
};

/// A layer without tensors that runs the two kernels.
struct Squares;

const SCALE: [f32; 1] = [0.1];

impl Layer for Squares {
    fn tensors(&self) -> Vec<Tensor> {
        Vec::new()
    }

    fn custom_kernels(&self) -> Vec<CustomKernel> {
        vec![FORWARD, BACKWARD]
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let writes = &[pass.y];
        let reads = &[pass.x];
        k.custom(&Custom { kernel: &FORWARD, writes, reads, numbers: &SCALE });
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let dx = pass.dx.unwrap_or_else(|| pass.scratch.take_like(pass.dy));
        let reads = &[pass.dy, pass.x];
        k.custom(&Custom { kernel: &BACKWARD, writes: &[dx], reads, numbers: &SCALE });
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    check_gradients(&Squares, 64, Rows { sequences: 2, positions: 9 })?;
    println!("the kernel's backward agrees with finite differences");

    let mut config = Config::default();
    if std::env::args().any(|argument| argument == "cuda") {
        config.device.kind = DeviceKind::Cuda;
    }
    config.model.layers = Some(1);
    config.model.hidden = Some(64);
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    let shape = shape_of(&config)?;
    let stack: Vec<Box<dyn Layer>> = vec![
        Box::new(Stem { index: 1, shape }),
        Box::new(TransformerBlock::new(2, 0, shape)),
        Box::new(Squares),
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
