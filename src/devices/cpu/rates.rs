//! Measures the speed of the CPU's kernels.

mod experts;

use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::views::CpuKernels;
use crate::error::Error;
use crate::kernels::{
    Activate, ActivateBackward, Activation, ApplyDropout, Attention, AttentionBackward,
    AttentionShape, BatchMetadata, DropoutKey, Kernels, Norm, NormBackward, Residual,
};
use crate::product::{Matrix, Product, Start};
use crate::simd::Level;
use crate::tensor::{Arena, Dtype, Scratch, View};

/// Runs of a kernel; the fastest one counts.
const ROUNDS: usize = 8;

/// The speed of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelRate {
    /// The kernel's name.
    pub kernel: &'static str,
    /// The speed of the kernel.
    pub rate: Rate,
}

/// A speed per second, in the unit that limits the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// Bytes that are read and written.
    Bytes(f64),
    /// FLOPs.
    Flops(f64),
    /// FLOPs of work that is made of products, beside those of the same products alone.
    OfProducts {
        /// FLOPs of the work.
        flops: f64,
        /// FLOPs of the products alone.
        products: f64,
    },
}

fn pool(threads: usize) -> Result<ThreadPool, Error> {
    ThreadPoolBuilder::new().num_threads(threads).build().map_err(Error::no_thread)
}

fn seconds(run: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    run();
    begin.elapsed().as_secs_f64()
}

/// The seconds of the fastest of [`ROUNDS`] runs.
fn best(mut run: impl FnMut()) -> f64 {
    (0..ROUNDS).map(|_| seconds(&mut run)).fold(f64::INFINITY, f64::min)
}

/// FLOP/s of a large f32 product on this number of threads: the fastest of a few runs.
///
/// # Errors
/// The system gives no threads.
pub fn product_flops_per_second(threads: usize) -> Result<f64, Error> {
    const SIZE: usize = 1024;
    let pool = pool(threads)?;
    let a = vec![0.5_f32; SIZE * SIZE];
    let b = vec![0.25_f32; SIZE * SIZE];
    let mut c = vec![0.0_f32; SIZE * SIZE];
    let a = Matrix::rows(&a, SIZE);
    let b = Matrix::rows(&b, SIZE);
    let start = Start::Zero;
    let product = Product { a, b, rows: SIZE, depth: SIZE, columns: SIZE, start };
    let seconds = best(|| pool.install(|| product.run(Level::best(), &mut c)));
    Ok(2.0 * (SIZE as f64).powi(3) / seconds)
}

/// Speeds of the other kernels in f32 on this number of threads: norms, activation functions
/// and sums on tensors much larger than caches, causal attention to 2,048 positions, and the
/// experts of a layer.
///
/// # Errors
/// The system gives no threads, or no memory.
pub fn kernel_rates(threads: usize) -> Result<Vec<KernelRate>, Error> {
    let pool = pool(threads)?;
    let mut rates = row_rates(&pool).map_err(Error::system)?;
    rates.extend(attention_rates(&pool).map_err(Error::system)?);
    rates.extend(experts::expert_rates(&pool).map_err(Error::system)?);
    Ok(rates)
}

/// Places views in an arena, one behind the other.
#[derive(Default)]
struct Layout {
    end: usize,
}

impl Layout {
    fn place(&mut self, rows: usize, columns: usize) -> View {
        let view = View::floats(self.end, rows * columns).with_columns(columns);
        self.end += view.len().next_multiple_of(16);
        view
    }

    /// Workspace for the partial sums of any kernel here.
    fn workspace(&mut self) -> View {
        self.place(1, 1 << 20)
    }

    /// Memory for all views; their values lie between −1 and 1.
    fn arena(&self) -> std::io::Result<Arena> {
        let mut arena = Arena::new(self.end)?;
        let all = arena.values_mut(View::floats(0, self.end));
        all.iter_mut().enumerate().for_each(|(at, x)| *x = (at % 255) as f32 / 127.0 - 1.0);
        Ok(arena)
    }
}

fn row_rates(pool: &ThreadPool) -> std::io::Result<Vec<KernelRate>> {
    const ROWS: usize = 16384;
    const CHANNELS: usize = 1024;
    let mut layout = Layout::default();
    let [x, y, z] = [(); 3].map(|()| layout.place(ROWS, CHANNELS));
    let [gamma, beta, dgamma, dbeta] = [(); 4].map(|()| layout.place(1, CHANNELS));
    let statistics = layout.place(ROWS, 2);
    let workspace = layout.workspace();
    let arena = layout.arena()?;
    let k = CpuKernels::new(Some(&arena), Level::best());
    let gamma_offset = 0.0;
    let epsilon = 1e-5;
    let rms = false;
    let accumulate = false;
    let key = DropoutKey { seed: 1, step: 0, first_sequence: 0 };
    let metadata = BatchMetadata { dropout_key: Some(key), ..BatchMetadata::plain(&[0, ROWS]) };
    let dropout = metadata.view().dropout(0.1, 0, 0);
    let beta = Some(beta);
    let norm = Norm { y, statistics, x, gamma, gamma_offset, beta, epsilon, rms };
    let norm_backward = NormBackward {
        dx: z,
        dgamma,
        dbeta: Some(dbeta),
        residual: None,
        dy: y,
        x,
        statistics,
        gamma,
        gamma_offset,
        rms,
        accumulate,
    };
    let activation = Activation::GeluTanh;
    let moved = |kernel, tensors: usize, run: &(dyn Fn() + Sync)| {
        let bytes = (tensors * ROWS * CHANNELS * size_of::<f32>()) as f64;
        KernelRate { kernel, rate: Rate::Bytes(bytes / best(|| pool.install(run))) }
    };
    Ok(vec![
        moved("norm", 2, &|| k.norm(&norm)),
        moved("norm_backward", 3, &|| {
            k.norm_backward(&norm_backward, &Scratch::new(workspace, Dtype::F32));
        }),
        moved("gelu", 2, &|| k.activate(&Activate { y, x, activation })),
        moved("gelu_backward", 3, &|| {
            k.activate_backward(&ActivateBackward { dx: y, x, activation });
        }),
        moved("residual", 3, &|| k.residual(&Residual { y, a: x, x: y, dropout: None })),
        moved("copy", 2, &|| k.dropout(&ApplyDropout { y, x, dropout: None })),
        moved("dropout", 2, &|| k.dropout(&ApplyDropout { y, x, dropout })),
    ])
}

fn attention_rates(pool: &ThreadPool) -> std::io::Result<Vec<KernelRate>> {
    const POSITIONS: usize = 2048;
    let batch = BatchMetadata::plain(&[0, POSITIONS]).view();
    let shape = AttentionShape::causal(batch, [16, 16, 64]);
    let mut layout = Layout::default();
    let [y, dy] = [(); 2].map(|()| layout.place(POSITIONS, shape.width()));
    let [qkv, dqkv] = [(); 2].map(|()| layout.place(POSITIONS, shape.qkv_width()));
    let lse = layout.place(POSITIONS, shape.heads);
    let workspace = layout.workspace();
    let arena = layout.arena()?;
    let k = CpuKernels::new(Some(&arena), Level::best());
    let forward = Attention { y, lse, qkv, kv: None, shape };
    let backward = AttentionBackward { dqkv, chunk_kv: None, dy, y, lse, qkv, shape };
    // Two products forward and five backward, of which causal attention needs half.
    let flops = (7 * POSITIONS * POSITIONS * shape.width()) as f64;
    let seconds = best(|| {
        pool.install(|| {
            k.attention(&forward);
            k.attention_backward(&backward, &Scratch::new(workspace, Dtype::F32));
        });
    });
    Ok(vec![KernelRate { kernel: "attention", rate: Rate::Flops(flops / seconds) }])
}
