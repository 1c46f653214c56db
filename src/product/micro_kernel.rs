//! The innermost loop of a product, once for each set of vector instructions.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::array;
#[cfg(target_arch = "x86_64")]
use std::mem::transmute;

/// The largest tile of all: rows and columns.
pub(super) const LARGEST: [usize; 2] = [14, 32];

/// The place that a tile of sums is written to.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) at: *mut f32,
    /// Floats from one row to the next.
    pub(super) by: usize,
    /// True when the sums are added to c; false when they replace it.
    pub(super) add: bool,
}

/// A tile of sums, as large as the registers hold.
pub(super) trait MicroKernel {
    const ROWS: usize;
    const COLUMNS: usize;
    /// Elements along the depth in a slot of 32 bits: a float, or two of bf16 ([`pair`]).
    const TERMS: usize;

    /// c (+)= a b, for the first `rows` rows of a tile. b: (steps, COLUMNS) slots, dense.
    ///
    /// # Safety
    /// The processor has the instructions; a has `rows` rows, from 1 to ROWS, and `steps` columns,
    /// and b has `steps` rows; no other thread uses the tile c.
    unsafe fn multiply(c: Target, a: Left, b: *const f32, rows: usize, steps: usize);

    /// Transposes 8 by 8 elements. Rows are `from_by` and `to_by` apart.
    ///
    /// # Safety
    /// The processor has the instructions; the elements lie in memory that may be read and written.
    unsafe fn transpose_8(to: *mut f32, to_by: usize, from: *const f32, from_by: usize) {
        for (row, column) in (0..8).flat_map(|row| (0..8).map(move |column| (row, column))) {
            // SAFETY: the caller's promise.
            unsafe { *to.add(row * to_by + column) = *from.add(column * from_by + row) };
        }
    }
}

/// Two elements of bf16 in a slot. The first is added to a sum first: AVX512-BF16 begins with the
/// high half.
#[inline(always)]
pub(super) fn pair(first: u16, second: u16) -> f32 {
    f32::from_bits(u32::from(first) << 16 | u32::from(second))
}

/// Rows of a, in slots.
#[derive(Clone, Copy)]
pub(super) enum Left {
    /// Row-major, with rows `by` apart.
    Rows { at: *const f32, by: usize },
    /// Column-major and dense, with as many rows as a whole tile has.
    Panel { at: *const f32 },
}

/// A tile as arrays, from which the compiler makes vector instructions.
pub(super) struct Arrays<const ROWS: usize, const COLUMNS: usize, const TERMS: usize>;

/// A tile for 16 registers of four floats each.
pub(super) type Portable = Arrays<4, 8, 1>;

impl<const ROWS: usize, const COLUMNS: usize, const TERMS: usize> MicroKernel
    for Arrays<ROWS, COLUMNS, TERMS>
{
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;
    const TERMS: usize = TERMS;

    /// Of a short tile it computes the last row several times, and writes it once.
    unsafe fn multiply(c: Target, a: Left, b: *const f32, rows: usize, steps: usize) {
        let (at, rows_by, columns_by) = match a {
            Left::Rows { at, by } => (at, by, 1),
            Left::Panel { at } => (at, 1, ROWS),
        };
        let offsets: [usize; ROWS] = array::from_fn(|i| i.min(rows - 1) * rows_by);
        let mut tile = [[0.0_f32; COLUMNS]; ROWS];
        for p in 0..steps {
            // SAFETY: a row of b, which is dense.
            let b = unsafe { *b.add(p * COLUMNS).cast::<[f32; COLUMNS]>() };
            for (row, offset) in tile.iter_mut().zip(offsets) {
                // SAFETY: an element of a.
                let one = unsafe { *at.add(offset + p * columns_by) };
                for term in 0..TERMS {
                    let one = of_slot::<TERMS>(one, term);
                    let b = b.iter().map(|slot| of_slot::<TERMS>(*slot, term));
                    row.iter_mut().zip(b).for_each(|(sum, b)| *sum += one * b);
                }
            }
        }
        for (i, row) in tile.iter().take(rows).enumerate() {
            // SAFETY: a row of c.
            let to = unsafe { &mut *c.at.add(i * c.by).cast::<[f32; COLUMNS]>() };
            if c.add { to.iter_mut().zip(row).for_each(|(c, sum)| *c += sum) } else { *to = *row }
        }
    }
}

/// One element of a slot.
#[inline(always)]
fn of_slot<const TERMS: usize>(slot: f32, term: usize) -> f32 {
    match (TERMS, term) {
        (1, _) => slot,
        (_, 0) => f32::from_bits(slot.to_bits() & 0xffff_0000),
        _ => f32::from_bits(slot.to_bits() << 16),
    }
}

/// A micro-kernel of two vectors a row. All loops over the tile run to constants, so that the
/// compiler unrolls them and keeps the sums in registers. It is compiled for each number of rows,
/// so a short tile at the end of a few rows costs what its rows cost.
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
macro_rules! two_vectors {
    (
        $kernel:ident, $rows:literal [$($height:literal)*], $lanes:literal, $terms:literal,
        $features:literal,
        $zero:ident, $load:ident, $splat:ident, $add:ident, $multiply_add:ident, $store:ident
        $(, $transpose_8:ident)?
    ) => {
        impl $kernel {
            /// [`MicroKernel::multiply`] for one kind of [`Left`]. It is not inlined, so that it
            /// can use all registers.
            #[target_feature(enable = $features)]
            #[inline(never)]
            unsafe fn sum<const PANEL: bool, const HEIGHT: usize>(
                c: Target,
                mut column: *const f32,
                by: usize,
                mut row: *const f32,
                steps: usize,
            ) {
                let (rows_by, columns_by) = if PANEL { (1, $rows) } else { (by, 1) };
                let mut tile = [[$zero(); 2]; HEIGHT];
                for _ in 0..steps {
                    // SAFETY: slots of a column of a, and of a row of b.
                    unsafe {
                        let b = [$load(row), $load(row.add($lanes))];
                        for i in 0..HEIGHT {
                            let one = $splat(*column.add(i * rows_by));
                            tile[i][0] = $multiply_add(one, b[0], tile[i][0]);
                            tile[i][1] = $multiply_add(one, b[1], tile[i][1]);
                        }
                        column = column.add(columns_by);
                        row = row.add(2 * $lanes);
                    }
                }
                for (i, row) in tile.into_iter().enumerate() {
                    // SAFETY: a row of c is two vectors long.
                    unsafe {
                        let to = [c.at.add(i * c.by), c.at.add(i * c.by + $lanes)];
                        for (to, sum) in to.into_iter().zip(row) {
                            $store(to, if c.add { $add($load(to), sum) } else { sum });
                        }
                    }
                }
            }
        }

        impl MicroKernel for $kernel {
            const ROWS: usize = $rows;
            const COLUMNS: usize = 2 * $lanes;
            const TERMS: usize = $terms;

            #[inline(always)]
            unsafe fn multiply(c: Target, a: Left, b: *const f32, rows: usize, steps: usize) {
                // SAFETY: the caller's promise.
                unsafe {
                    match (rows, a) {
                        $(
                            ($height, Left::Rows { at, by }) => {
                                Self::sum::<false, $height>(c, at, by, b, steps);
                            }
                            ($height, Left::Panel { at }) => {
                                Self::sum::<true, $height>(c, at, 1, b, steps);
                            }
                        )*
                        _ => unreachable!("{rows} rows of a tile of {}", $rows),
                    }
                }
            }

            $(
                #[inline(always)]
                unsafe fn transpose_8(
                    to: *mut f32,
                    to_by: usize,
                    from: *const f32,
                    from_by: usize,
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { $transpose_8(to, to_by, from, from_by) }
                }
            )?
        }
    };
}

/// AVX2: 12 of 16 registers are sums.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;

#[cfg(target_arch = "x86_64")]
two_vectors!(
    Avx2,
    6 [1 2 3 4 5 6],
    8,
    1,
    "avx2,fma",
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_set1_ps,
    _mm256_add_ps,
    _mm256_fmadd_ps,
    _mm256_storeu_ps,
    transpose_8_avx2
);

/// AVX-512: 28 of 32 registers are sums.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx512;

#[cfg(target_arch = "x86_64")]
two_vectors!(
    Avx512,
    14 [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    16,
    1,
    "avx512f",
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_set1_ps,
    _mm512_add_ps,
    _mm512_fmadd_ps,
    _mm512_storeu_ps,
    transpose_8_avx2
);

/// AVX-512, for pairs of bf16.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx512Bf16;

#[cfg(target_arch = "x86_64")]
two_vectors!(
    Avx512Bf16,
    14 [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    16,
    2,
    "avx512f,avx512bf16",
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_set1_ps,
    _mm512_add_ps,
    multiply_add_pairs,
    _mm512_storeu_ps,
    transpose_8_avx2
);

/// c + a b for the high half of each slot, then for the low half. A product of two elements is
/// exact, so each sum is that of `_mm512_fmadd_ps`; but elements and sums below f32's normal range
/// count as zero.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn multiply_add_pairs(a: __m512, b: __m512, c: __m512) -> __m512 {
    // SAFETY: all bits of a vector are elements of bf16.
    let [a, b] = [a, b].map(|slots| unsafe { transmute::<__m512, __m512bh>(slots) });
    _mm512_dpbf16_ps(c, a, b)
}

/// NEON: 24 of 32 registers are sums.
#[cfg(target_arch = "aarch64")]
pub(super) struct Neon;

#[cfg(target_arch = "aarch64")]
two_vectors!(
    Neon,
    12 [1 2 3 4 5 6 7 8 9 10 11 12],
    4,
    1,
    "neon",
    zero_neon,
    vld1q_f32,
    vdupq_n_f32,
    vaddq_f32,
    multiply_add_neon,
    vst1q_f32
);

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
#[inline]
fn zero_neon() -> float32x4_t {
    vdupq_n_f32(0.0)
}

/// a b + c.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
#[inline]
fn multiply_add_neon(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    vfmaq_f32(c, a, b)
}

/// [`MicroKernel::transpose_8`] by AVX2: pairs, then pairs of pairs, then halves change places.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn transpose_8_avx2(to: *mut f32, to_by: usize, from: *const f32, from_by: usize) {
    let mut rows = [_mm256_setzero_ps(); 8];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: eight elements of a row; the caller's promise.
        *row = unsafe { _mm256_loadu_ps(from.add(i * from_by)) };
    }
    let mut pairs = rows;
    for i in [0, 2, 4, 6] {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    let mut fours = pairs;
    for i in [0, 4] {
        fours[i] = _mm256_shuffle_ps::<0x44>(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm256_shuffle_ps::<0xee>(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm256_shuffle_ps::<0x44>(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm256_shuffle_ps::<0xee>(pairs[i + 1], pairs[i + 3]);
    }
    for i in 0..4 {
        let low = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
        let high = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
        // SAFETY: eight elements of two rows; the caller's promise.
        unsafe {
            _mm256_storeu_ps(to.add(i * to_by), low);
            _mm256_storeu_ps(to.add((i + 4) * to_by), high);
        }
    }
}
