//! Activation functions and their derivatives, alone and as gates.

use rayon::prelude::*;

use super::math::{erf, exp, tanh};
use super::views::{Call, Compute};
use crate::kernels::{
    Activate, ActivateBackward, Activation, ClampedGate, Gate, GateBackward, GateForm,
};
use crate::simd::Level;

/// Elements of one parallel task.
const PIECE: usize = 8192;

const ROOT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
/// 2 √(2 ÷ π).
const TWICE_ROOT: f32 = 1.595_769;
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
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Uses 0.5 x (1 + tanh u) = x sigmoid(2 u).
#[inline(always)]
fn by_tanh(x: f32) -> f32 {
    let twice = x * (TWICE_ROOT + TWICE_ROOT * CUBIC * (x * x));
    x / (1.0 + exp(-twice))
}

#[inline(always)]
fn slope_by_tanh(x: f32) -> f32 {
    let square = x * x;
    let s = sigmoid(x * (TWICE_ROOT + TWICE_ROOT * CUBIC * square));
    let twice_inner = TWICE_ROOT + 3.0 * TWICE_ROOT * CUBIC * square;
    s + s * (1.0 - s) * x * twice_inner
}

#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
pub(super) fn slope_of_silu(x: f32) -> f32 {
    let s = sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    x.max(0.0)
}

#[inline(always)]
fn slope_of_relu(x: f32) -> f32 {
    if x > 0.0 { 1.0 } else { 0.0 }
}

#[inline(always)]
fn slope_of_tanh(x: f32) -> f32 {
    let t = tanh(x);
    1.0 - t * t
}

/// Runs a loop with an activation function or its derivative. Each gets a loop of its own, because
/// the compiler makes no vector instructions of calls through a pointer.
macro_rules! with {
    (value of $form:expr, |$f:ident| $body:expr) => {
        with!(
            $form, |$f| $body,
            GeluErf by_erf, GeluTanh by_tanh, Silu silu, Relu relu, Tanh tanh
        )
    };
    (slope of $form:expr, |$f:ident| $body:expr) => {
        with!(
            $form, |$f| $body,
            GeluErf slope_by_erf, GeluTanh slope_by_tanh, Silu slope_of_silu, Relu slope_of_relu,
            Tanh slope_of_tanh
        )
    };
    ($form:expr, |$f:ident| $body:expr, $($known:ident $of:ident),*) => {
        match $form {
            $(
                Activation::$known => {
                    let $f = $of;
                    $body
                }
            )*
        }
    };
}

impl Compute for Activate {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Activate { y, x, activation } = *self;
        let pieces = call.write(y).par_chunks_mut(PIECE).zip(call.read(x).par_chunks(PIECE));
        pieces.for_each(|(y, x)| {
            level.run(
                #[inline(always)]
                || {
                    let each = y.iter_mut().zip(x);
                    with!(value of activation, |f| each.for_each(|(y, x)| *y = f(*x)))
                },
            );
        });
    }
}

impl Compute for ActivateBackward {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let ActivateBackward { dx, x, activation } = *self;
        let pieces = call.write(dx).par_chunks_mut(PIECE).zip(call.read(x).par_chunks(PIECE));
        pieces.for_each(|(dx, x)| {
            level.run(
                #[inline(always)]
                || {
                    let all = dx.iter_mut().zip(x);
                    with!(slope of activation, |f| all.for_each(|(dx, x)| *dx *= f(*x)));
                },
            );
        });
    }
}

/// `x`, at most `limit`. NaN stays NaN, unlike with `f32::min`.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// `x`, at least `limit`. NaN stays NaN.
#[inline(always)]
fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

/// The clamped gate of pairs of gate and up.
fn clamped(ClampedGate { alpha, limit }: ClampedGate, level: Level, y: &mut [f32], x: &[f32]) {
    y.par_chunks_mut(PIECE).zip(x.par_chunks(2 * PIECE)).for_each(|(y, x)| {
        level.run(
            #[inline(always)]
            || {
                for (y, pair) in y.iter_mut().zip(x.chunks_exact(2)) {
                    let gate = at_most(pair[0], limit);
                    let up = at_least(at_most(pair[1], limit), -limit);
                    *y = (up + 1.0) * (gate * sigmoid(alpha * gate));
                }
            },
        );
    });
}

/// Its gradients. Behind its limit, a gate or an up projection has the gradient 0.
fn clamped_backward(
    ClampedGate { alpha, limit }: ClampedGate,
    level: Level,
    dx: &mut [f32],
    [dy, x]: [&[f32]; 2],
) {
    let pieces = dx.par_chunks_mut(2 * PIECE).zip(x.par_chunks(2 * PIECE));
    pieces.zip(dy.par_chunks(PIECE)).for_each(|((dx, x), dy)| {
        level.run(
            #[inline(always)]
            || {
                let pairs = dx.chunks_exact_mut(2).zip(x.chunks_exact(2));
                for ((d, pair), dy) in pairs.zip(dy) {
                    let gate = at_most(pair[0], limit);
                    let up = at_least(at_most(pair[1], limit), -limit);
                    let s = sigmoid(alpha * gate);
                    let slope = s * (1.0 + alpha * gate * (1.0 - s));
                    d[0] = if pair[0] > limit { 0.0 } else { dy * (up + 1.0) * slope };
                    d[1] = if pair[1].abs() > limit { 0.0 } else { dy * (gate * s) };
                }
            },
        );
    });
}

impl Compute for Gate {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Gate { y, x, form } = *self;
        let activation = match form {
            GateForm::Plain(activation) => activation,
            GateForm::Clamped(gate) => return clamped(gate, level, call.write(y), call.read(x)),
        };
        let i = y.columns;
        let rows = call.write(y).par_chunks_mut(i).zip(call.read(x).par_chunks(2 * i));
        rows.with_min_len(PIECE.div_ceil(i)).for_each(|(y, x)| {
            let (gate, up) = x.split_at(i);
            level.run(
                #[inline(always)]
                || {
                    let all = y.iter_mut().zip(gate).zip(up);
                    with!(value of activation, |f| all.for_each(|((y, g), u)| *y = f(*g) * u));
                },
            );
        });
    }
}

impl Compute for GateBackward {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let GateBackward { dx, dy, x, form } = *self;
        let activation = match form {
            GateForm::Plain(activation) => activation,
            GateForm::Clamped(gate) => {
                return clamped_backward(
                    gate,
                    level,
                    call.write(dx),
                    [call.read(dy), call.read(x)],
                );
            }
        };
        let i = dy.columns;
        let dx = call.write(dx).par_chunks_mut(2 * i);
        let rows = dx.zip(call.read(dy).par_chunks(i)).zip(call.read(x).par_chunks(2 * i));
        rows.with_min_len(PIECE.div_ceil(i)).for_each(|((dx, dy), x)| {
            let (dgate, dup) = dx.split_at_mut(i);
            let (gate, up) = x.split_at(i);
            level.run(
                #[inline(always)]
                || {
                    let all = dup.iter_mut().zip(gate).zip(dy);
                    with!(value of activation, |f| all.for_each(|((du, g), dy)| *du = f(*g) * dy));
                    let all = dgate.iter_mut().zip(gate).zip(up).zip(dy);
                    with!(slope of activation, |f| {
                        all.for_each(|(((dg, g), u), dy)| *dg = f(*g) * u * dy);
                    });
                },
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
    use super::*;

    fn plain(x: f64, form: Activation) -> f64 {
        match form {
            Activation::GeluErf => 0.5 * x * (1.0 + libm::erf(x / 2.0_f64.sqrt())),
            Activation::GeluTanh => {
                let inner = x + 0.044_715 * x.powi(3);
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * inner).tanh())
            }
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Relu => x.max(0.0),
            Activation::Tanh => x.tanh(),
        }
    }

    const FORMS: [Activation; 5] = [
        Activation::GeluErf,
        Activation::GeluTanh,
        Activation::Silu,
        Activation::Relu,
        Activation::Tanh,
    ];

    #[test]
    fn gates_are_the_plain_ones() {
        let rows = 5;
        let i = 7;
        let x = noise(rows * 2 * i, 1);
        let dy = noise(rows * i, 2);
        let plain_gate = |x: &[f64], form| -> Vec<f64> {
            let row =
                |x: &[f64]| (0..i).map(|at| plain(x[at], form) * x[i + at]).collect::<Vec<_>>();
            x.chunks(2 * i).flat_map(row).collect()
        };
        for (form, level) in
            FORMS.into_iter().flat_map(|f| Level::all().into_iter().map(move |l| (f, l)))
        {
            let mut bench = Bench::new();
            let y = bench.nan(rows, i);
            let dx = bench.nan(rows, 2 * i);
            let dy_view = bench.tensor(i, &dy.narrow);
            let x_view = bench.tensor(2 * i, &x.narrow);
            bench.run(level, |k, _| {
                let form = GateForm::Plain(form);
                k.gate(&Gate { y, x: x_view, form });
                k.gate_backward(&GateBackward { dx, dy: dy_view, x: x_view, form });
            });
            close(&bench.values(y), &plain_gate(&x.wide, form), 1e-5);
            let loss = |x: &[f64]| {
                plain_gate(x, form).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            close(&bench.values(dx), &differences(&x.wide, loss), 1e-5);
        }
    }

    /// Some gates and some up projections are beyond the limit.
    #[test]
    fn clamped_gates_are_the_plain_ones() {
        let rows = 5;
        let i = 7;
        let x = noise(rows * 2 * i, 1);
        let dy = noise(rows * i, 2);
        let gate = ClampedGate { alpha: 1.5, limit: 0.6 };
        assert!(x.narrow.iter().any(|x| *x > 0.6) && x.narrow.iter().any(|x| *x < -0.6));
        let plain = |x: &[f64]| -> Vec<f64> {
            let limit = f64::from(gate.limit);
            let of = |pair: &[f64]| {
                let g = pair[0].min(limit);
                (pair[1].clamp(-limit, limit) + 1.0) * g / (1.0 + (-1.5 * g).exp())
            };
            x.chunks(2).map(of).collect()
        };
        let loss = |x: &[f64]| plain(x).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>();
        let form = GateForm::Clamped(gate);
        for level in Level::all() {
            let mut bench = Bench::new();
            let y = bench.nan(rows, i);
            let dx = bench.nan(rows, 2 * i);
            let dy_view = bench.tensor(i, &dy.narrow);
            let x_view = bench.tensor(2 * i, &x.narrow);
            let lost = bench.tensor(2, &[f32::NAN, 0.5, 0.5, f32::NAN]);
            let of_lost = bench.tensor(1, &[0.0; 2]);
            bench.run(level, |k, _| {
                k.gate(&Gate { y, x: x_view, form });
                k.gate_backward(&GateBackward { dx, dy: dy_view, x: x_view, form });
                k.gate(&Gate { y: of_lost, x: lost, form });
            });
            close(&bench.values(y), &plain(&x.wide), 1e-6);
            close(&bench.values(dx), &differences(&x.wide, loss), 1e-5);
            assert!(bench.values(of_lost).iter().all(|y| y.is_nan()), "NaN is not hidden");
        }
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        let narrow: Vec<f32> = (-60..=60).map(|i| (i as f32 + 0.25) / 7.0).collect();
        let wide: Vec<f64> = narrow.iter().map(|&x| f64::from(x)).collect();
        for form in FORMS {
            for level in Level::all() {
                let mut bench = Bench::new();
                let x = bench.tensor(11, &narrow);
                let y = bench.nan(11, 11);
                let dx = bench.tensor(11, &[1.0; 121]);
                bench.run(level, |k, _| {
                    k.activate(&Activate { y, x, activation: form });
                    k.activate_backward(&ActivateBackward { dx, x, activation: form });
                });
                let expected: Vec<f64> = wide.iter().map(|&x| plain(x, form)).collect();
                close(&bench.values(y), &expected, 1e-6);
                let total = |x: &[f64]| x.iter().map(|&x| plain(x, form)).sum::<f64>();
                close(&bench.values(dx), &differences(&wide, total), 1e-5);
            }
        }
    }
}
