//! Elementary functions without branches or calls, so that loops over them become vectors.
//!
//! No fused multiply-add is written, so the portable, AVX2 and AVX-512 builds of a loop give the
//! same bits. Errors are against libm, measured by the tests below.

/// e^x; 0 below −87, saturates above 88. Relative error below 3e-7.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4; // ln 2 in few bits, so that n · it is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the integer in the low bits
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    // In pairs of terms (Estrin): a chain of few operations, so that loops overlap.
    let square = r * r;
    let high = (1.987_569_1e-4 * r + 1.398_199_9e-3) * square + (8.333_452e-3 * r + 4.166_579_6e-2);
    let p = high * square + (1.666_666_5e-1 * r + 0.5);
    let p = p * square + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { p * scale }
}

/// Hyperbolic tangent. Absolute error below 3e-7.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// Hyperbolic tangent. Relative error below 3e-7: near 0 it is a polynomial.
#[inline(always)]
fn tanh_near_zero(x: f32) -> f32 {
    let s = x * x;
    let p = -6.001_8e-3 * s + 2.093_142e-2;
    let p = p * s - 5.383_702e-2;
    let p = p * s + 1.333_267_9e-1;
    let p = p * s - 3.333_333_3e-1;
    let near = x + x * s * p;
    if x.abs() < 0.625 { near } else { tanh(x) }
}

/// Limits scores: each s becomes cap tanh(s ÷ cap), off by 3e-7 of itself.
#[inline(always)]
pub(super) fn limit(scores: &mut [f32], cap: Option<f32>) {
    if let Some(cap) = cap {
        scores.iter_mut().for_each(|score| *score = cap * tanh_near_zero(*score / cap));
    }
}

/// The derivative of [`limit`] where it gave this score. Of −∞ it is 0.
#[inline(always)]
pub(super) fn limit_slope(score: f32, cap: f32) -> f32 {
    let part = (score / cap).max(-1.0);
    (1.0 - part) * (1.0 + part)
}

/// Error function, by a rational approximation in x² on [−4, 4]. Absolute error below 5e-7.
#[inline(always)]
pub(super) fn erf(x: f32) -> f32 {
    let x = x.clamp(-4.0, 4.0);
    let s = x * x;
    let p = -2.726_142_3e-10 * s + 2.770_681_4e-8;
    let p = p * s - 2.101_024e-6;
    let p = p * s - 5.692_506_4e-5;
    let p = p * s - 7.349_906_3e-4;
    let p = p * s - 2.954_6e-3;
    let p = p * s - 1.609_603_3e-2;
    let q = -1.456_607_2e-5 * s - 2.133_740_6e-4;
    let q = q * s - 1.682_827e-3;
    let q = q * s - 7.373_329e-3;
    let q = q * s - 1.426_473_9e-2;
    x * p / q
}

const LANES: usize = 16;

type Lanes = [f32; LANES];

/// Sum in sixteen lanes and a fixed tree, so that every instruction set gives the same bits.
#[inline(always)]
pub(super) fn sum(values: &[f32]) -> f32 {
    sum_of(values, |value| value)
}

/// Sum of `of(value)`, in the order of [`sum`].
#[inline(always)]
pub(super) fn sum_of(values: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes: Lanes = [0.0; LANES];
    for chunk in chunks {
        lanes = each_lane(|lane| lanes[lane] + of(chunk[lane]));
    }
    if !rest.is_empty() {
        let last = padded(rest);
        let term = |lane: usize| if lane < rest.len() { of(last[lane]) } else { 0.0 };
        lanes = each_lane(|lane| lanes[lane] + term(lane));
    }
    tree(lanes, |a, b| a + b)
}

/// Sum of products, in the order of [`sum`].
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_with(a, b, |b| b)
}

/// Sum of `a · of(b)`, in the order of [`sum`]. `of(0)` is finite.
#[inline(always)]
pub(super) fn dot_with(a: &[f32], b: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes: Lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        lanes = each_lane(|lane| lanes[lane] + a[lane] * of(b[lane]));
    }
    if !a_rest.is_empty() {
        let [a, b] = [a_rest, b_rest].map(padded);
        lanes = each_lane(|lane| lanes[lane] + a[lane] * of(b[lane]));
    }
    tree(lanes, |a, b| a + b)
}

/// The largest value, found in sixteen lanes; −∞ for an empty slice.
#[inline(always)]
pub(super) fn largest(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes: Lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        lanes = each_lane(|lane| larger(chunk[lane], lanes[lane]));
    }
    rest.iter().fold(tree(lanes, larger), |most, &value| larger(value, most))
}

/// The last values, with zeros behind them. A loop over all lanes keeps these in registers, which
/// one to the end of the values does not.
#[inline(always)]
fn padded(rest: &[f32]) -> Lanes {
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    last
}

/// An array of what each lane has: a vector. (`array::from_fn` is a call where `of` is long.)
#[inline(always)]
fn each_lane<const N: usize>(of: impl Fn(usize) -> f32) -> [f32; N] {
    let mut lanes = [0.0; N];
    for (lane, value) in lanes.iter_mut().enumerate() {
        *value = of(lane);
    }
    lanes
}

/// Joins the lanes: neighbours at distance 8, 4, 2, 1. Each half is an array, which stays a vector.
#[inline(always)]
fn tree(lanes: Lanes, join: impl Fn(f32, f32) -> f32) -> f32 {
    let lanes: [f32; 8] = each_lane(|lane| join(lanes[lane], lanes[lane + 8]));
    let lanes: [f32; 4] = each_lane(|lane| join(lanes[lane], lanes[lane + 4]));
    let lanes: [f32; 2] = each_lane(|lane| join(lanes[lane], lanes[lane + 2]));
    join(lanes[0], lanes[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(from: f32, to: f32, of: impl Fn(f32) -> f64) -> f64 {
        let at = |i: i32| from + (to - from) * i as f32 / 200_000.0;
        (0..=200_000).map(|i| of(at(i))).fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_exact_to_a_few_ulp() {
        let relative = |x: f32| (f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs();
        assert!(worst(-86.9, 87.9, relative) < 3e-7);
        assert_eq!((exp(f32::NEG_INFINITY), exp(0.0)), (0.0, 1.0));
    }

    #[test]
    fn tanh_and_erf_are_exact_to_a_few_ulp_of_one() {
        let tanh_error = |x: f32| (f64::from(tanh(x)) - f64::from(x).tanh()).abs();
        assert!(worst(-12.0, 12.0, tanh_error) < 3e-7);
        let erf_error = |x: f32| (f64::from(erf(x)) - libm::erf(f64::from(x))).abs();
        assert!(worst(-6.0, 6.0, erf_error) < 5e-7);
    }

    #[test]
    fn a_limit_is_exact_to_a_few_ulp() {
        for cap in [0.5_f32, 30.0] {
            let limited = |x: f32| {
                let mut one = [x];
                limit(&mut one, Some(cap));
                one[0]
            };
            let exact = |x: f32| f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh();
            let off = |x: f32| {
                if x == 0.0 { 0.0 } else { (f64::from(limited(x)) / exact(x) - 1.0).abs() }
            };
            assert!(worst(-4.0 * cap, 4.0 * cap, off) < 4e-7);
            let slope = |x: f32| 1.0 - (exact(x) / f64::from(cap)).powi(2);
            let off = |x: f32| (f64::from(limit_slope(limited(x), cap)) - slope(x)).abs();
            assert!(worst(-4.0 * cap, 4.0 * cap, off) < 6e-7);
            assert_eq!((limited(0.0), limit_slope(f32::NEG_INFINITY, cap)), (0.0, 0.0));
        }
    }

    #[test]
    fn sums_are_complete() {
        for length in 0..70_u32 {
            let ones: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let expected = (0..length).sum::<u32>() as f32;
            assert_eq!(sum(&ones), expected);
            assert_eq!(dot(&ones, &vec![1.0; ones.len()]), expected);
        }
    }
}
