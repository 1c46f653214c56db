//! Numbers of fewer bits: f32 rounded to 16 bits, to the nearest, ties to even, and widened again;
//! rows packed for the stash and the link.
//!
//! A packed place holds whole floats: the last bytes of the last one may be unused.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use l2l_actors::schedule::Encoding;
use rayon::prelude::*;

use super::int8;
use super::view::Dtype;

/// The Rust type of a [`Dtype`]'s elements.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {
    /// The nearest element, ties to even.
    fn from_f32(value: f32) -> Self;
    /// The value as a float, without rounding.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

macro_rules! half_element {
    ($half:ident) => {
        impl Element for $half {
            #[inline(always)]
            fn from_f32(value: f32) -> $half {
                $half::from_f32(value)
            }

            #[inline(always)]
            fn to_f32(self) -> f32 {
                $half::to_f32(self)
            }
        }
    };
}
half_element!(bf16);
half_element!(f16);

/// The format of rows of numbers on their way between a device and the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    /// The numbers' dtype on the device.
    pub(crate) dtype: Dtype,
    /// The packed format.
    pub(crate) encoding: Encoding,
    /// Numbers of a row.
    pub(crate) columns: usize,
}

impl Packing {
    /// Packs one row of floats, each rounded to bf16.
    pub(crate) fn bf16(columns: usize) -> Packing {
        Packing { dtype: Dtype::F32, encoding: Encoding::Bf16, columns }
    }

    /// Floats of memory that `rows` packed rows take.
    pub(crate) fn floats(self, rows: usize) -> usize {
        match self.encoding {
            Encoding::Plain => self.dtype.floats(rows * self.columns),
            Encoding::Bf16 => Dtype::Bf16.floats(rows * self.columns),
            Encoding::Int8 { block } => rows * int8::row_floats(self.columns, block),
        }
    }

    /// Bytes from one packed row to the next.
    pub(crate) fn row_bytes(self) -> usize {
        match self.encoding {
            Encoding::Plain => self.columns * self.dtype.size(),
            Encoding::Bf16 => self.columns * Dtype::Bf16.size(),
            Encoding::Int8 { .. } => self.floats(1) * size_of::<f32>(),
        }
    }

    /// Packs all numbers of a slot into a place.
    pub(crate) fn pack(self, place: &mut [f32], slot: &[f32]) {
        match self.encoding {
            Encoding::Plain => place.copy_from_slice(slot),
            Encoding::Bf16 => {
                let place: &mut [u16] = bytemuck::cast_slice_mut(place);
                narrow(Dtype::Bf16, &mut place[..slot.len()], slot);
            }
            Encoding::Int8 { block } => {
                let rows = place.chunks_exact_mut(self.floats(1));
                let rows = rows.zip(slot.chunks_exact(self.slot_row()));
                let mut widened = vec![0.0; self.columns];
                for (packed, row) in rows {
                    let row = match self.dtype {
                        Dtype::F32 => row,
                        dtype => {
                            widen(dtype, &mut widened, bytemuck::cast_slice(row));
                            &widened
                        }
                    };
                    int8::pack(packed, row, block);
                }
            }
        }
    }

    /// Unpacks the first numbers of a place to a slot.
    pub(crate) fn unpack(self, slot: &mut [f32], place: &[f32]) {
        match self.encoding {
            Encoding::Plain => slot.copy_from_slice(place),
            Encoding::Bf16 => {
                let place: &[u16] = bytemuck::cast_slice(place);
                widen(Dtype::Bf16, slot, &place[..slot.len()]);
            }
            Encoding::Int8 { block } => {
                let packed = place.chunks_exact(self.floats(1));
                let mut widened = vec![0.0; self.columns];
                for (row, packed) in slot.chunks_exact_mut(self.slot_row()).zip(packed) {
                    match self.dtype {
                        Dtype::F32 => int8::unpack(row, packed, block),
                        dtype => {
                            int8::unpack(&mut widened, packed, block);
                            narrow(dtype, bytemuck::cast_slice_mut(row), &widened);
                        }
                    }
                }
            }
        }
    }

    /// The floats of packed rows.
    pub(crate) fn widened(self, place: &[f32], rows: usize) -> Vec<f32> {
        let numbers = rows * self.columns;
        let mut slot = vec![0.0; self.dtype.floats(numbers)];
        self.unpack(&mut slot, &place[..self.floats(rows)]);
        if self.dtype == Dtype::F32 {
            return slot;
        }
        let mut all = vec![0.0; numbers];
        widen(self.dtype, &mut all, &bytemuck::cast_slice(&slot)[..numbers]);
        all
    }

    /// Floats of a row in a slot. Rows of 16-bit numbers have an even number of columns.
    fn slot_row(self) -> usize {
        self.dtype.floats(self.columns)
    }
}

/// Widens numbers of bf16 in place: they take the last half of this memory, their floats all of it.
pub(crate) fn widen_in_place(all: &mut [f32]) {
    const CHUNK: usize = 1 << 16;
    let len = all.len();
    let behind = 2 * (len - packed_bf16(len)); // halves before the first number
    let halves: &mut [u16] = bytemuck::cast_slice_mut(all);
    let mut done = 0;
    // Each round widens the numbers whose floats end before the next number to be read.
    while (behind + done) / 2 > done {
        let end = (behind + done) / 2;
        let (to, from) = halves.split_at_mut(2 * end);
        let from = &from[behind + done - 2 * end..][..end - done];
        let to: &mut [f32] = bytemuck::cast_slice_mut(&mut to[2 * done..]);
        let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
        chunks.for_each(|(to, from)| widen(Dtype::Bf16, to, from));
        done = end;
    }
    for at in done..len {
        let number = bf16::from_bits(halves[behind + at]).to_f32();
        bytemuck::cast_slice_mut::<u16, f32>(halves)[at] = number;
    }
}

/// Floats of memory that numbers in bf16 take.
pub(crate) fn packed_bf16(numbers: usize) -> usize {
    Dtype::Bf16.floats(numbers)
}

/// Rounds floats to a dtype of 16 bits.
///
/// # Panics
/// It is not one of 16 bits, or the lengths differ.
pub(crate) fn narrow(dtype: Dtype, to: &mut [u16], from: &[f32]) {
    match dtype {
        Dtype::Bf16 => bytemuck::cast_slice_mut::<_, bf16>(to).convert_from_f32_slice(from),
        Dtype::F16 => bytemuck::cast_slice_mut::<_, f16>(to).convert_from_f32_slice(from),
        Dtype::F32 => unreachable!("floats are not rounded"),
    }
}

/// Widens numbers of a dtype of 16 bits to floats.
///
/// # Panics
/// As [`narrow`].
pub(crate) fn widen(dtype: Dtype, to: &mut [f32], from: &[u16]) {
    match dtype {
        Dtype::Bf16 => bytemuck::cast_slice::<_, bf16>(from).convert_to_f32_slice(to),
        Dtype::F16 => bytemuck::cast_slice::<_, f16>(from).convert_to_f32_slice(to),
        Dtype::F32 => unreachable!("floats are as wide as they can be"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_widened_where_they_lie() {
        let long = if cfg!(miri) { &[77][..] } else { &[1000, 1001, 300_001] };
        for len in (0..70).chain(long.iter().copied()) {
            let numbers: Vec<f32> = (0..len).map(|at| (at * 7 % 251) as f32 - 100.0).collect();
            let mut memory = vec![f32::NAN; len];
            let packed = packed_bf16(len);
            Packing::bf16(len).pack(&mut memory[len - packed..], &numbers);
            widen_in_place(&mut memory);
            assert_eq!(memory, numbers, "{len}");
        }
    }

    #[test]
    fn rows_are_near_what_they_were() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let packing = Packing { dtype, encoding: Encoding::Int8 { block: 4 }, columns: 12 };
            let numbers: Vec<f32> = (0..36).map(|at| (at * 5 % 17) as f32 - 8.0).collect();
            let mut slot = numbers.clone();
            if dtype == Dtype::Bf16 {
                slot = vec![0.0; 18];
                narrow(dtype, bytemuck::cast_slice_mut(&mut slot), &numbers);
            }
            let mut place = vec![f32::NAN; packing.floats(3)];
            assert_eq!(place.len(), 3 * (3 + 3));
            packing.pack(&mut place, &slot);
            let mut back = vec![f32::NAN; slot.len()];
            packing.unpack(&mut back, &place);
            if dtype == Dtype::Bf16 {
                let halves = std::mem::replace(&mut back, vec![0.0; 36]);
                widen(dtype, &mut back, bytemuck::cast_slice(&halves));
            }
            for (block, back) in numbers.chunks(4).zip(back.chunks(4)) {
                let most = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                let off = block.iter().zip(back).map(|(x, back)| (x - back).abs());
                let off = off.fold(0.0, f32::max);
                assert!(off <= most / 254.0 + most / 256.0, "{dtype}: {block:?} {back:?}");
            }
        }
    }
}
