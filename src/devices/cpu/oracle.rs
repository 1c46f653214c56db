//! Helpers of kernel tests: memory with tensors, noise, comparison, and gradients by central
//! differences in f64.

use super::views::CpuKernels;
use crate::kernels::Kernels;
use crate::simd::Level;
use crate::tensor::{Arena, Dtype, Scratch, View};

/// Memory with the tensors of a test, all of floats.
pub(super) struct Bench {
    memory: Arena,
    end: usize,
}

impl Bench {
    const TENSORS: usize = 1 << 20;
    const WORKSPACE: usize = 1 << 17;

    pub(super) fn new() -> Bench {
        let memory = Arena::new(Bench::TENSORS + Bench::WORKSPACE).expect("little memory");
        Bench { memory, end: 0 }
    }

    pub(super) fn tensor(&mut self, columns: usize, values: &[f32]) -> View {
        let view = View::floats(self.end, values.len()).with_columns(columns);
        self.end += values.len().next_multiple_of(16);
        assert!(self.end <= Bench::TENSORS);
        self.memory.fill(view, values);
        view
    }

    pub(super) fn nan(&mut self, rows: usize, columns: usize) -> View {
        self.tensor(columns, &vec![f32::NAN; rows * columns])
    }

    /// Runs kernels, whose workspace is NaN at first.
    pub(super) fn run(&mut self, level: Level, of: impl FnOnce(&dyn Kernels, &Scratch<'_>)) {
        let workspace = View::floats(Bench::TENSORS, Bench::WORKSPACE);
        self.memory.values_mut(workspace).fill(f32::NAN);
        let kernels = CpuKernels::new(Some(&self.memory), level);
        of(&kernels, &Scratch::new(workspace, Dtype::F32));
    }

    pub(super) fn values(&mut self, view: View) -> Vec<f32> {
        self.memory.values(view).to_vec()
    }
}

/// Random numbers in f32, and in f64 without rounding.
pub(crate) struct Noise {
    pub(crate) narrow: Vec<f32>,
    pub(crate) wide: Vec<f64>,
}

/// Random numbers, uniform in [−1, 1).
pub(crate) fn noise(len: usize, seed: u64) -> Noise {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    let narrow: Vec<f32> = std::iter::repeat_with(next).take(len).collect();
    let wide = narrow.iter().map(|&value| f64::from(value)).collect();
    Noise { narrow, wide }
}

/// Panics if two numbers differ by more than `tolerance` times the largest magnitude (at least 1).
#[track_caller]
pub(super) fn close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1.0_f64, |most, value| most.max(value.abs()));
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * largest, "at {index}: {got}, expected {expected}");
    }
}

/// The gradient of a scalar function at `x`.
pub(super) fn differences(x: &[f64], of: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut at = x.to_vec();
    let slope = |index: usize| {
        at[index] = x[index] + STEP;
        let above = of(&at);
        at[index] = x[index] - STEP;
        let below = of(&at);
        at[index] = x[index];
        (above - below) / (2.0 * STEP)
    };
    (0..x.len()).map(slope).collect()
}
