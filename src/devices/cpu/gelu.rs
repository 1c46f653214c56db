//! GELU (Hendrycks and Gimpel 2016), by erf or by tanh, and its derivative.

use rayon::prelude::*;

use super::math::{erf, exp, tanh};
use crate::models::Gelu;
use crate::simd::Level;

/// Elements one task takes.
const PIECE: usize = 8192;

const ROOT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
const ROOT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

#[inline(always)]
fn by_erf(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * ROOT_HALF))
}

#[inline(always)]
fn slope_by_erf(x: f32) -> f32 {
    let density = 0.398_942_3 * exp(-0.5 * x * x);
    0.5 * (1.0 + erf(x * ROOT_HALF)) + x * density
}

#[inline(always)]
fn by_tanh(x: f32) -> f32 {
    0.5 * x * (1.0 + tanh(ROOT_2_OVER_PI * (x + CUBIC * x * x * x)))
}

#[inline(always)]
fn slope_by_tanh(x: f32) -> f32 {
    let t = tanh(ROOT_2_OVER_PI * (x + CUBIC * x * x * x));
    let inner = ROOT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
}

/// y = gelu(x).
pub(super) fn forward(level: Level, y: &mut [f32], x: &[f32], form: Gelu) {
    y.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE)).for_each(|(y, x)| {
        level.run(
            #[inline(always)]
            || match form {
                Gelu::Erf => y.iter_mut().zip(x).for_each(|(y, x)| *y = by_erf(*x)),
                Gelu::Tanh => y.iter_mut().zip(x).for_each(|(y, x)| *y = by_tanh(*x)),
            },
        );
    });
}

/// dx = dx gelu′(x): `dx` holds dy before.
pub(super) fn backward(level: Level, dx: &mut [f32], x: &[f32], form: Gelu) {
    dx.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE)).for_each(|(dx, x)| {
        level.run(
            #[inline(always)]
            || match form {
                Gelu::Erf => dx.iter_mut().zip(x).for_each(|(dx, x)| *dx *= slope_by_erf(*x)),
                Gelu::Tanh => dx.iter_mut().zip(x).for_each(|(dx, x)| *dx *= slope_by_tanh(*x)),
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences};
    use super::*;

    fn plain(x: f64, form: Gelu) -> f64 {
        0.5 * x
            * match form {
                Gelu::Erf => 1.0 + libm::erf(x / 2.0_f64.sqrt()),
                Gelu::Tanh => {
                    let inner = x + 0.044_715 * x.powi(3);
                    1.0 + ((2.0 / std::f64::consts::PI).sqrt() * inner).tanh()
                }
            }
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        let narrow: Vec<f32> = (-60..=60).map(|i| i as f32 / 7.0).collect();
        let wide: Vec<f64> = narrow.iter().map(|&x| f64::from(x)).collect();
        for form in [Gelu::Erf, Gelu::Tanh] {
            for level in Level::all() {
                let mut y = vec![f32::NAN; narrow.len()];
                forward(level, &mut y, &narrow, form);
                let expected: Vec<f64> = wide.iter().map(|&x| plain(x, form)).collect();
                close(&y, &expected, 1e-6);
                let mut dx = vec![1.0; narrow.len()];
                backward(level, &mut dx, &narrow, form);
                let total = |x: &[f64]| x.iter().map(|&x| plain(x, form)).sum::<f64>();
                close(&dx, &differences(&wide, total), 1e-5);
            }
        }
    }
}
