//! Rows of numbers in 8 bits, block by block: a block's scale is its largest magnitude over 127.
//! Each number is the nearest multiple of it, ties to even. So a number is off by at most 1/254 of
//! the largest of its block. (Dettmers et al. 2022, section 2.1, with a linear map.)
//!
//! A packed row is the scales of its blocks, f32, then its multiples, i8, and begins a float.

use std::ops::Range;

/// The largest multiple.
const MOST: f32 = 127.0;

/// Floats of memory that a packed row takes. The last block may be short.
pub(crate) fn row_floats(columns: usize, block: u32) -> usize {
    columns.div_ceil(block as usize) + columns.div_ceil(size_of::<f32>())
}

/// The scale of a block; NaN if a number is not finite, so that the block is unpacked as NaN.
fn scale(block: &[f32]) -> f32 {
    let most = block.iter().fold(0.0_f32, |most, number| most.max(number.abs()));
    if block.iter().all(|number| number.is_finite()) { most / MOST } else { f32::NAN }
}

/// Packs numbers to one scale a block and one multiple a number.
pub(crate) fn encode(scales: &mut [f32], multiples: &mut [i8], numbers: &[f32], block: usize) {
    let blocks = multiples.chunks_mut(block).zip(numbers.chunks(block));
    for (to, (multiples, numbers)) in scales.iter_mut().zip(blocks) {
        *to = scale(numbers);
        let per_scale = if *to > 0.0 { to.recip() } else { 0.0 };
        // The reciprocal of a scale below about 3e-39 is infinite, so the numbers are divided.
        for (multiple, &number) in multiples.iter_mut().zip(numbers) {
            let ratio = if per_scale.is_finite() { number * per_scale } else { number / *to };
            *multiple = ratio.round_ties_even() as i8;
        }
    }
}

pub(crate) fn decode(numbers: &mut [f32], scales: &[f32], multiples: &[i8], block: usize) {
    let blocks = numbers.chunks_mut(block).zip(multiples.chunks(block));
    for (&scale, (numbers, multiples)) in scales.iter().zip(blocks) {
        let each = numbers.iter_mut().zip(multiples);
        each.for_each(|(number, &multiple)| *number = f32::from(multiple) * scale);
    }
}

pub(crate) fn pack(packed: &mut [f32], row: &[f32], block: u32) {
    let block = block as usize;
    let (scales, multiples) = packed.split_at_mut(row.len().div_ceil(block));
    encode(scales, &mut bytemuck::cast_slice_mut(multiples)[..row.len()], row, block);
}

pub(crate) fn unpack(row: &mut [f32], packed: &[f32], block: u32) {
    Int8Row::new(packed, row.len(), block).unpack(row);
}

/// A packed row.
#[derive(Clone, Copy)]
pub(crate) struct Int8Row<'p> {
    scales: &'p [f32],
    multiples: &'p [i8],
    block: usize,
}

impl<'p> Int8Row<'p> {
    /// A packed row of `columns` numbers.
    pub(crate) fn new(packed: &'p [f32], columns: usize, block: u32) -> Int8Row<'p> {
        let (scales, multiples) = packed.split_at(columns.div_ceil(block as usize));
        let multiples = &bytemuck::cast_slice(multiples)[..columns];
        Int8Row { scales, multiples, block: block as usize }
    }

    fn unpack(self, row: &mut [f32]) {
        decode(row, self.scales, self.multiples, self.block);
    }

    pub(crate) fn numbers(self, range: Range<usize>) -> impl Iterator<Item = f32> {
        let blocks = range.start / self.block..range.end.div_ceil(self.block);
        blocks.flat_map(move |block| {
            let start = block * self.block;
            let scale = self.scales[block];
            let some = start.max(range.start)..(start + self.block).min(range.end);
            self.multiples[some].iter().map(move |&multiple| f32::from(multiple) * scale)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(numbers: &[f32], block: u32) -> Vec<f32> {
        let mut packed = vec![f32::NAN; row_floats(numbers.len(), block)];
        pack(&mut packed, numbers, block);
        let mut back = vec![f32::NAN; numbers.len()];
        unpack(&mut back, &packed, block);
        let row = Int8Row::new(&packed, numbers.len(), block).numbers(0..numbers.len());
        // Rust does not define the bits of a computed NaN: under Miri they vary.
        let is_same = |one: f32, other: f32| one.to_bits() == other.to_bits() || one.is_nan();
        assert!(
            row.zip(&back)
                .all(|(one, &other)| { one.is_nan() == other.is_nan() && is_same(one, other) })
        );
        back
    }

    #[test]
    fn numbers_are_off_by_half_a_scale_at_most() {
        let count = if cfg!(miri) { 67 } else { 1003 };
        let numbers: Vec<f32> =
            (0..count).map(|at| (at as f32 * 0.37).sin() * 10_f32.powi(at % 9 - 4)).collect();
        for block in [1, 3, 64, count as u32] {
            let back = there_and_back(&numbers, block);
            for (numbers, back) in numbers.chunks(block as usize).zip(back.chunks(block as usize)) {
                let most = numbers.iter().fold(0.0_f32, |most, number| most.max(number.abs()));
                for (number, back) in numbers.iter().zip(back) {
                    assert!((number - back).abs() <= most / 254.0 * 1.0001, "{number} {back}");
                }
            }
        }
    }

    #[test]
    fn extremes_stay_what_they_are() {
        assert_eq!(there_and_back(&[0.0, -0.0], 2), [0.0, 0.0]);
        assert_eq!(there_and_back(&[3e38, -3e38], 2), [3e38, -3e38]);
        let tiny = f32::from_bits(3);
        assert!(there_and_back(&[tiny, -tiny], 2).iter().all(|x| x.abs() <= 2.0 * tiny));
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let back = there_and_back(&[1.0, odd, 2.0], 2);
            assert!(back[0].is_nan() && back[1].is_nan() && (back[2] - 2.0).abs() < 1e-6);
        }
    }
}
