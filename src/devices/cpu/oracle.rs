//! Helpers of kernel tests: noise, comparison, and gradients by central differences in f64.

/// Random numbers in f32, and in f64 without rounding.
pub(super) struct Noise {
    pub(super) narrow: Vec<f32>,
    pub(super) wide: Vec<f64>,
}

/// Random numbers, uniform in [−1, 1).
pub(super) fn noise(len: usize, seed: u64) -> Noise {
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
