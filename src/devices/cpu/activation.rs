//! Activation functions and their derivatives, alone and as gates.

use rayon::prelude::*;

use super::math::{erf, exp, tanh};
use super::views::CpuKernels;
use crate::kernels::{Activate, ActivateBackward, Activation, Gate, GateBackward, Runs};
use crate::simd::Level;

impl Runs<Activate> for CpuKernels<'_> {
    fn run(&self, op: &Activate) {
        let Activate { y, x, activation } = *op;
        let Some(call) = self.call(op) else { return };
        forward(self.level, call.write(y), call.read(x), activation);
    }
}

impl Runs<ActivateBackward> for CpuKernels<'_> {
    fn run(&self, op: &ActivateBackward) {
        let ActivateBackward { dx, x, activation } = *op;
        let Some(call) = self.call(op) else { return };
        backward(self.level, call.write(dx), call.read(x), activation);
    }
}

impl Runs<Gate> for CpuKernels<'_> {
    fn run(&self, op: &Gate) {
        let Gate { y, x, activation } = *op;
        let Some(call) = self.call(op) else { return };
        gated(self.level, call.write(y), call.read(x), y.columns, activation);
    }
}

impl Runs<GateBackward> for CpuKernels<'_> {
    fn run(&self, op: &GateBackward) {
        let GateBackward { dx, dy, x, activation } = *op;
        let Some(call) = self.call(op) else { return };
        let channels = dy.columns;
        let dx = call.write(dx);
        gated_backward(self.level, dx, call.read(dy), call.read(x), channels, activation);
    }
}

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
fn sigmoid(x: f32) -> f32 {
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
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
fn slope_of_silu(x: f32) -> f32 {
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
    ($form:expr, $slope:expr, |$f:ident| $body:expr) => {
        match ($form, $slope) {
            (Activation::GeluErf, false) => {
                let $f = by_erf;
                $body
            }
            (Activation::GeluErf, true) => {
                let $f = slope_by_erf;
                $body
            }
            (Activation::GeluTanh, false) => {
                let $f = by_tanh;
                $body
            }
            (Activation::GeluTanh, true) => {
                let $f = slope_by_tanh;
                $body
            }
            (Activation::Silu, false) => {
                let $f = silu;
                $body
            }
            (Activation::Silu, true) => {
                let $f = slope_of_silu;
                $body
            }
            (Activation::Relu, false) => {
                let $f = relu;
                $body
            }
            (Activation::Relu, true) => {
                let $f = slope_of_relu;
                $body
            }
            (Activation::Tanh, false) => {
                let $f = tanh;
                $body
            }
            (Activation::Tanh, true) => {
                let $f = slope_of_tanh;
                $body
            }
        }
    };
}

/// y = f(x).
fn forward(level: Level, y: &mut [f32], x: &[f32], form: Activation) {
    y.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE)).for_each(|(y, x)| {
        level.run(
            #[inline(always)]
            || with!(form, false, |f| y.iter_mut().zip(x).for_each(|(y, x)| *y = f(*x))),
        );
    });
}

/// dx = dx f′(x): `dx` holds dy before the call.
fn backward(level: Level, dx: &mut [f32], x: &[f32], form: Activation) {
    dx.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE)).for_each(|(dx, x)| {
        level.run(
            #[inline(always)]
            || with!(form, true, |f| dx.iter_mut().zip(x).for_each(|(dx, x)| *dx *= f(*x))),
        );
    });
}

/// y = f(gate) up. y: (R, I); x: (R, 2 I), gate and up side by side.
fn gated(level: Level, y: &mut [f32], x: &[f32], i: usize, form: Activation) {
    y.par_chunks_mut(i).zip(x.par_chunks(2 * i)).for_each(|(y, x)| {
        let (gate, up) = x.split_at(i);
        level.run(
            #[inline(always)]
            || {
                with!(form, false, |f| {
                    y.iter_mut().zip(gate).zip(up).for_each(|((y, g), u)| *y = f(*g) * u);
                });
            },
        );
    });
}

/// dx from dy. dx, x: (R, 2 I); dy: (R, I).
fn gated_backward(level: Level, dx: &mut [f32], dy: &[f32], x: &[f32], i: usize, form: Activation) {
    let rows = dx.par_chunks_mut(2 * i).zip(dy.par_chunks(i)).zip(x.par_chunks(2 * i));
    rows.for_each(|((dx, dy), x)| {
        let (dgate, dup) = dx.split_at_mut(i);
        let (gate, up) = x.split_at(i);
        level.run(
            #[inline(always)]
            || {
                with!(form, false, |f| {
                    dup.iter_mut().zip(gate).zip(dy).for_each(|((du, g), dy)| *du = f(*g) * dy);
                });
                with!(form, true, |f| {
                    let all = dgate.iter_mut().zip(gate).zip(up).zip(dy);
                    all.for_each(|(((dg, g), u), dy)| *dg = f(*g) * u * dy);
                });
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
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
            let mut y = vec![f32::NAN; rows * i];
            gated(level, &mut y, &x.narrow, i, form);
            close(&y, &plain_gate(&x.wide, form), 1e-5);
            let mut dx = vec![f32::NAN; rows * 2 * i];
            gated_backward(level, &mut dx, &dy.narrow, &x.narrow, i, form);
            let loss = |x: &[f64]| {
                plain_gate(x, form).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            close(&dx, &differences(&x.wide, loss), 1e-5);
        }
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        let narrow: Vec<f32> = (-60..=60).map(|i| (i as f32 + 0.25) / 7.0).collect();
        let wide: Vec<f64> = narrow.iter().map(|&x| f64::from(x)).collect();
        for form in FORMS {
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
