//! How fast a device's link and its products are.

use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use l2l_actors::ports::Trouble;

use super::driver::{Driver, Event, Matrix, Place, Product, Stream, WORKSPACE};
use super::launches::FLOAT;
use crate::devices::GpuRates;
use crate::random;
use crate::tensor::Arena;
use crate::tensor::{Dtype, View};

/// The median seconds of some runs, the first not counted.
fn median(mut run: impl FnMut() -> Result<f64, Trouble>) -> Result<f64, Trouble> {
    run()?;
    let mut all = [run()?, run()?, run()?, run()?, run()?];
    all.sort_by(f64::total_cmp);
    Ok(all[2])
}

/// Copies so many floats, and multiplies square matrices of this size and kind.
///
/// # Errors
/// The driver's.
pub(super) fn measure(
    driver: &Arc<dyn Driver>,
    of: Dtype,
    floats: usize,
    size: usize,
) -> Result<GpuRates, Trouble> {
    let matrix = size * size;
    let memory = driver.allocate(floats.max(3 * matrix) * FLOAT)?;
    let workspace = driver.allocate(WORKSPACE)?;
    let mut host = Arena::new(floats)?;
    // Pages that were never written are not there; and numbers that are all alike are multiplied faster.
    let values = host.values_mut(View::floats(0, floats));
    let mut state = 1;
    let mut next = || (random::next(&mut state) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    match of {
        Dtype::F32 => values.fill_with(next),
        Dtype::Bf16 => {
            let values: &mut [bf16] = bytemuck::cast_slice_mut(values);
            values.fill_with(|| bf16::from_f32(next()));
        }
    }
    let (at, bytes) = (values.as_mut_ptr().cast::<u8>(), size_of_val(values));
    let copies = || -> Result<[f64; 2], Trouble> {
        let timed = |copy: &dyn Fn() -> Result<(), Trouble>| {
            median(|| {
                let begin = Instant::now();
                copy()?;
                driver.finish();
                Ok(begin.elapsed().as_secs_f64())
            })
        };
        let up = timed(&|| driver.copy_in(Stream::Upload, memory, at, bytes))?;
        let down = timed(&|| driver.copy_out(Stream::Download, at, memory, bytes))?;
        Ok([up, down].map(|seconds| bytes as f64 / seconds))
    };
    let pageable = copies()?;
    let pinned = match driver.pin(at, bytes) {
        Ok(()) => {
            let rates = copies();
            driver.unpin(at);
            Some(rates?)
        }
        Err(_) => None, // the system has not that much to give
    };
    for from in (0..2 * of.floats(matrix)).step_by(floats) {
        let to = memory + (from * FLOAT) as u64;
        let bytes = floats.min(2 * of.floats(matrix) - from) * FLOAT;
        driver.copy_in(Stream::Compute, to, at, bytes)?;
    }
    driver.finish();
    let matrix_of = |index: usize| Matrix {
        at: Place { at: memory, dtype: of }.behind(index * matrix),
        stride: size,
        transposed: false,
    };
    let (a, b, c) = (matrix_of(0), matrix_of(1), matrix_of(2).at);
    let product = Product {
        rows: size,
        inner: size,
        columns: size,
        a,
        b,
        c,
        stride: size,
        bias: None,
        accumulate: false,
    };
    let seconds = median(|| {
        let begin = Event::record(driver, Stream::Compute)?;
        driver.product(Stream::Compute, &product, workspace)?;
        let end = Event::record(driver, Stream::Compute)?;
        driver.synchronize(end.id)?;
        driver.seconds(begin.id, end.id)
    })?;
    Ok(GpuRates { pageable, pinned, product: 2.0 * (size as f64).powi(3) / seconds })
}
