//! The measured speed of a device's link and of its products.

use std::sync::Arc;
use std::time::Instant;

use half::{bf16, f16};
use l2l_actors::BoxedError;

use super::driver::{Address, Alignment, Driver, Event, Matrix, Place, Product, Stream, WORKSPACE};
use super::launches::FLOAT;
use crate::devices::GpuRates;
use crate::random;
use crate::tensor::Arena;
use crate::tensor::{Dtype, View};

/// The median seconds of some runs, the first not counted.
fn median(mut run: impl FnMut() -> Result<f64, BoxedError>) -> Result<f64, BoxedError> {
    run()?;
    let mut all = [run()?, run()?, run()?, run()?, run()?];
    all.sort_by(f64::total_cmp);
    Ok(all[2])
}

/// Copies `floats` floats, and measures a product of this size and dtype.
///
/// # Errors
/// The driver's.
pub(super) fn measure(
    driver: &Arc<dyn Driver>,
    dtype: Dtype,
    floats: usize,
    size: usize,
) -> Result<GpuRates, BoxedError> {
    let memory = driver.allocate(floats * FLOAT)?;
    let mut host = Arena::new(floats)?;
    let values = host.values_mut(View::floats(0, floats));
    fill(values, dtype);
    let at = values.as_mut_ptr().cast::<u8>();
    let bytes = size_of_val(values);
    let pageable = copy_rates(driver, memory, at, bytes)?;
    let pinned = match driver.pin(at, bytes) {
        Ok(()) => {
            let rates = copy_rates(driver, memory, at, bytes);
            driver.unpin(at);
            Some(rates?)
        }
        Err(_) => None, // the system has not that much to give
    };
    let product = measure_product(driver, dtype, size)?;
    Ok(GpuRates { pageable, pinned, product })
}

/// FLOP/s of a product of two random square matrices of this size and dtype.
///
/// # Errors
/// The driver's.
pub(super) fn measure_product(
    driver: &Arc<dyn Driver>,
    dtype: Dtype,
    size: usize,
) -> Result<f64, BoxedError> {
    let matrix = size * size;
    let memory = driver.allocate(3 * matrix * FLOAT)?;
    let workspace = driver.allocate(WORKSPACE)?;
    let floats = dtype.floats(matrix);
    let mut host = Arena::new(floats)?;
    let values = host.values_mut(View::floats(0, floats));
    fill(values, dtype);
    let at = values.as_ptr().cast::<u8>();
    for index in 0..2 {
        let to = memory + (index * floats * FLOAT) as Address;
        driver.copy_in(Stream::Compute, to, at, floats * FLOAT)?;
    }
    driver.finish();
    product_rate(driver, Place { at: memory, dtype }, workspace, size)
}

/// Fills memory with random numbers. Pages that were never written do not exist, and equal numbers
/// are multiplied faster than others.
fn fill(values: &mut [f32], dtype: Dtype) {
    let mut state = 1;
    let mut next = || (random::next(&mut state) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    match dtype {
        Dtype::F32 => values.fill_with(next),
        Dtype::Bf16 => {
            let values: &mut [bf16] = bytemuck::cast_slice_mut(values);
            values.fill_with(|| bf16::from_f32(next()));
        }
        Dtype::F16 => {
            let values: &mut [f16] = bytemuck::cast_slice_mut(values);
            values.fill_with(|| f16::from_f32(next()));
        }
    }
}

/// Bytes a second of copies to the device and from it.
fn copy_rates(
    driver: &Arc<dyn Driver>,
    memory: Address,
    at: *mut u8,
    bytes: usize,
) -> Result<[f64; 2], BoxedError> {
    let timed = |copy: &dyn Fn() -> Result<(), BoxedError>| {
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
}

/// FLOP/s of a product of two matrices that lie in a memory, to a third behind them.
fn product_rate(
    driver: &Arc<dyn Driver>,
    memory: Place,
    workspace: Address,
    size: usize,
) -> Result<f64, BoxedError> {
    let matrix_of = |index: usize| Matrix {
        at: memory.behind(index * size * size),
        stride: size,
        transposed: false,
    };
    let product = Product {
        rows: size,
        inner: size,
        columns: size,
        a: matrix_of(0),
        b: matrix_of(1),
        c: matrix_of(2).at,
        stride: size,
        bias: None,
        accumulate: false,
    };
    let seconds = median(|| {
        let begin = Event::record(driver, Stream::Compute)?;
        if !driver.product(Stream::Compute, &product, Alignment::OfRows, None, workspace)? {
            return Err("cuBLASLt has no algorithm for a square product".into());
        }
        let end = Event::record(driver, Stream::Compute)?;
        driver.synchronize(end.id)?;
        driver.seconds(begin.id, end.id)
    })?;
    Ok(2.0 * (size as f64).powi(3) / seconds)
}
