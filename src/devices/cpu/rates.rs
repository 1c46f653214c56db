//! How fast the CPU's matrix product is.

use std::time::Instant;

use super::product::{Matrix, Product, Start};
use crate::error::Error;
use crate::simd::Level;

/// FLOP/s of a large f32 product on so many threads: the best of a few.
///
/// # Errors
/// The system gives no threads.
pub fn product_flops_per_second(threads: usize) -> Result<f64, Error> {
    const SIZE: usize = 1024;
    const ROUNDS: usize = 8;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(Error::system)?;
    let (a, b) = (vec![0.5_f32; SIZE * SIZE], vec![0.25_f32; SIZE * SIZE]);
    let mut c = vec![0.0_f32; SIZE * SIZE];
    let (a, b, start) = (Matrix::rows(&a, SIZE), Matrix::rows(&b, SIZE), Start::Zero);
    let product = Product { a, b, rows: SIZE, depth: SIZE, columns: SIZE, start };
    let (level, mut best) = (Level::best(), f64::INFINITY);
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        pool.install(|| product.run(level, &mut c));
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(2.0 * (SIZE as f64).powi(3) / best)
}
