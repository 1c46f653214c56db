//! Which vector instructions loops are compiled for, chosen at run time.
//!
//! A loop is written once, plainly; [`Level::run`] has it compiled three times (its closure must be
//! `#[inline(always)]`, or it is compiled once, for what every processor has). None of the three
//! contracts or reorders float operations, so they give the same bits.

use pulp::NullaryFnOnce;

/// A set of vector instructions that this processor has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    /// What every processor of the architecture has.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    /// AVX-512 F, BW, DQ, VL and more.
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
}

impl Level {
    /// Every level this processor has, the best last.
    pub(crate) fn all() -> Vec<Level> {
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(pulp::x86::V3::try_new().map(Level::Avx2));
            levels.extend(pulp::x86::V4::try_new().map(Level::Avx512));
        }
        levels
    }

    /// The best this processor has.
    pub(crate) fn best() -> Level {
        Level::all().pop().expect("every processor has the portable level")
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => "AVX-512",
        }
    }

    /// Runs a loop compiled for this level.
    #[inline(always)]
    pub(crate) fn run<R>(self, body: impl FnOnce() -> R) -> R {
        struct Body<F>(F);
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
            Level::Avx512(simd) => simd.vectorize(Body(body)),
        }
    }
}
