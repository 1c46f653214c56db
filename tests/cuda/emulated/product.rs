//! Products of an emulated driver, whose algorithms take pretended time and give bits of their own.

use std::cell::Cell;
use std::time::{Duration, Instant};

use half::{bf16, f16};

use super::limits::Limits;
use crate::devices::cuda::driver::{Algorithm, Matrix, Place, Product};
use crate::tensor::Dtype;

thread_local! {
    /// Time that a stream's thread pretends to have spent.
    static PRETENDED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The time of a stream's thread.
pub(super) fn now() -> Instant {
    Instant::now() + PRETENDED.get()
}

/// The number at a place.
///
/// # Safety
/// A number of this dtype is there, and no thread writes it.
unsafe fn number(place: Place) -> f32 {
    // SAFETY: by the caller.
    unsafe {
        match place.dtype {
            Dtype::F32 => *(place.at as *const f32),
            Dtype::Bf16 => (*(place.at as *const bf16)).to_f32(),
            Dtype::F16 => (*(place.at as *const f16)).to_f32(),
        }
    }
}

/// The numbers of a matrix, row by row.
///
/// # Safety
/// As for [`number`], for each of them.
unsafe fn numbers(matrix: Matrix, rows: usize, columns: usize) -> Vec<f64> {
    let [by_row, by_column] =
        if matrix.transposed { [1, matrix.stride] } else { [matrix.stride, 1] };
    let mut all = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let place = matrix.at.behind(row * by_row + column * by_column);
            // SAFETY: by the caller.
            all.push(f64::from(unsafe { number(place) }));
        }
    }
    all
}

/// Writes a number to a place.
///
/// # Safety
/// No other thread has the place.
unsafe fn put(place: Place, value: f32) {
    // SAFETY: by the caller.
    unsafe {
        match place.dtype {
            Dtype::F32 => *(place.at as *mut f32) = value,
            Dtype::Bf16 => *(place.at as *mut bf16) = bf16::from_f32(value),
            Dtype::F16 => *(place.at as *mut f16) = f16::from_f32(value),
        }
    }
}

/// Refuses places that are not aligned: an algorithm for aligned rows fails on them.
pub(super) fn check(product: &Product) {
    let places = [product.a.at, product.b.at, product.c];
    for (place, alignment) in places.into_iter().zip(product.key().alignments()) {
        assert!(place.at.is_multiple_of(alignment.into()), "{product:?} is not aligned");
    }
}

/// Multiplies, by an algorithm of [`Limits::algorithms`] or by the first.
///
/// # Safety
/// The matrices are where the product says, and no other thread has the place of c.
pub(super) unsafe fn multiply(product: &Product, algorithm: Option<Algorithm>, limits: &Limits) {
    let Product { rows, inner, columns, a, b, c, stride, bias, accumulate } = *product;
    let [index, ..] = algorithm.unwrap_or_default();
    let factor = 1.0 + index as f64 / 1024.0;
    if algorithm.is_some() {
        let seconds = limits.seconds(&product.key(), index).expect("others are refused");
        PRETENDED.set(PRETENDED.get() + Duration::from_secs_f64(seconds));
    }
    let b_turned = Matrix { transposed: !b.transposed, ..b };
    // SAFETY: by the caller.
    let [a, b] = unsafe { [numbers(a, rows, inner), numbers(b_turned, columns, inner)] };
    for row in 0..rows {
        for column in 0..columns {
            let [a, b] = [&a[row * inner..][..inner], &b[column * inner..][..inner]];
            let sum: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            // SAFETY: as above.
            unsafe {
                let c = c.behind(row * stride + column);
                let bias = bias.map_or(0.0, |bias| number(bias.behind(column)));
                let before = if accumulate { number(c) } else { 0.0 };
                put(c, (f64::from(before) + factor * sum + f64::from(bias)) as f32);
            }
        }
    }
}
