//! Vector instructions, chosen at run time.
//!
//! A loop is written once, in plain Rust. [`Level::run`] has the compiler make one version for each
//! level. (The closure must be `#[inline(always)]`; otherwise there is only the portable version.)
//! No version contracts or reorders float operations, so all give the same bits.

#[cfg(target_arch = "x86_64")]
use pulp::NullaryFnOnce;

/// A set of vector instructions that this processor has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    /// The instructions that every processor of the architecture has.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    /// AVX-512 F, BW, DQ, VL and more.
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    /// AVX-512 with products of bf16: other loops are those of `Avx512`.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(pulp::x86::V4),
    /// NEON, which every processor of AArch64 has: other loops than products are those of
    /// `Portable`.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// All levels that this processor has. The best is the last.
    pub(crate) fn all() -> Vec<Level> {
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(pulp::x86::V3::try_new().map(Level::Avx2));
            let avx512 = pulp::x86::V4::try_new();
            levels.extend(avx512.map(Level::Avx512));
            if is_x86_feature_detected!("avx512bf16") {
                levels.extend(avx512.map(Level::Avx512Bf16));
            }
        }
        #[cfg(target_arch = "aarch64")]
        levels.push(Level::Neon);
        levels
    }

    /// The best level that this processor has.
    pub(crate) fn best() -> Level {
        Level::all().pop().expect("every processor has the portable level")
    }

    /// The name of the level in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16(_) => "AVX-512 with BF16",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "NEON",
        }
    }

    /// Runs a loop in the version for this level.
    #[inline(always)]
    pub(crate) fn run<R>(self, body: impl FnOnce() -> R) -> R {
        #[cfg(target_arch = "x86_64")]
        struct Body<F>(F);
        #[cfg(target_arch = "x86_64")]
        impl<R, F: FnOnce() -> R> NullaryFnOnce for Body<F> {
            type Output = R;

            #[inline(always)]
            fn call(self) -> R {
                self.0()
            }
        }
        match self {
            Level::Portable => body(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(simd) => simd.vectorize(Body(body)),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(simd) | Level::Avx512Bf16(simd) => simd.vectorize(Body(body)),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => body(),
        }
    }
}
