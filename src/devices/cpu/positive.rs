//! The positive numbers of a tensor and their places.

use half::{bf16, f16};
use rayon::prelude::*;

use super::views::{Call, Compute, CpuKernels};
use crate::kernels::{PackPositive, UnpackPositive};
use crate::simd::Level;
use crate::tensor::{Dtype, Element};

/// Rows of one parallel task.
const ROWS: usize = 16;

impl Compute for PackPositive {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let PackPositive { packed, x, room } = *self;
        let pack_row = match x.dtype {
            Dtype::F32 => pack_row::<f32>,
            Dtype::Bf16 => pack_row::<bf16>,
            Dtype::F16 => pack_row::<f16>,
        };
        let tasks = call.write(packed).par_chunks_mut(ROWS * packed.columns);
        tasks.zip(call.read(x).par_chunks(ROWS * x.columns)).for_each(|(to, from)| {
            let rows = to.chunks_exact_mut(packed.columns).zip(from.chunks_exact(x.columns));
            rows.for_each(|(row, x)| pack_row(row, x, room));
        });
    }
}

impl CpuKernels<'_> {
    /// Returns true if there was room for all positive numbers. Without memory: false.
    pub(super) fn unpack(&self, op: &UnpackPositive) -> bool {
        let UnpackPositive { y, packed, room } = *op;
        let Some(call) = self.call(op) else { return false };
        let from = call.read(packed);
        let is_whole = |row: &[f32]| room == 0 || row[0].to_bits() as usize <= room;
        if !from.par_chunks_exact(packed.columns).all(is_whole) {
            return false;
        }
        let unpack_row = match y.dtype {
            Dtype::F32 => unpack_row::<f32>,
            Dtype::Bf16 => unpack_row::<bf16>,
            Dtype::F16 => unpack_row::<f16>,
        };
        let tasks = call.write(y).par_chunks_mut(ROWS * y.columns);
        tasks.zip(from.par_chunks(ROWS * packed.columns)).for_each(|(to, from)| {
            let rows = to.chunks_exact_mut(y.columns).zip(from.chunks_exact(packed.columns));
            rows.for_each(|(y, row)| unpack_row(y, row, room));
        });
        true
    }
}

fn pack_row<D: Element>(row: &mut [f32], x: &[f32], room: usize) {
    let (count, row) = row.split_first_mut().expect("a row has a count");
    let (bits, values) = row.split_at_mut(x.len().div_ceil(32));
    let values: &mut [D] = &mut bytemuck::cast_slice_mut(values)[..room];
    let mut positive = 0;
    for (bits, x) in bits.iter_mut().zip(x.chunks(32)) {
        let mut mask = 0_u32;
        for (at, &x) in x.iter().enumerate() {
            if x > 0.0 {
                mask |= 1 << at;
                if let Some(value) = values.get_mut(positive) {
                    *value = D::from_f32(x); // exact: it was of this dtype
                }
                positive += 1;
            }
        }
        *bits = f32::from_bits(mask);
    }
    *count = f32::from_bits(positive as u32);
}

fn unpack_row<D: Element>(y: &mut [f32], row: &[f32], room: usize) {
    let (bits, values) = row[1..].split_at(y.len().div_ceil(32));
    let mut values = bytemuck::cast_slice::<f32, D>(values)[..room].iter();
    for (&bits, y) in bits.iter().zip(y.chunks_mut(32)) {
        let mask = bits.to_bits();
        for (at, y) in y.iter_mut().enumerate() {
            *y = match mask >> at & 1 {
                0 => 0.0,
                _ if room == 0 => 1.0,
                _ => values.next().map_or(0.0, |value| value.to_f32()),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Runs, packed_row};
    use crate::tensor::{Arena, View, narrow};

    #[test]
    fn what_is_packed_comes_back_or_says_that_it_does_not() {
        let rows = 35;
        let numbers = 45;
        let x: Vec<f32> = (0..rows * numbers)
            .map(|at| if at % 3 == 0 { (at % 19) as f32 - 3.0 } else { -(at as f32) })
            .collect();
        let counts = x.chunks(numbers).map(|row| row.iter().filter(|x| **x > 0.0).count());
        let most = counts.max().expect("there are rows");
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (room, fits) in [(most, true), (numbers, true), (most - 1, false), (0, true)] {
                let width = packed_row(numbers, room, dtype);
                let mut memory = Arena::new(rows * (width + 3 * numbers) + 64).expect("memory");
                let packed = View { rows, columns: width, ..View::floats(0, 0) };
                let at = (rows * width).next_multiple_of(16);
                let place = View::floats(at, dtype.floats(rows * numbers));
                let view = place.hold(rows, numbers, dtype);
                match dtype {
                    Dtype::F32 => memory.fill(place, &x),
                    _ => {
                        let mut halves = vec![0.0; place.len()];
                        narrow(dtype, &mut bytemuck::cast_slice_mut(&mut halves)[..x.len()], &x);
                        memory.fill(place, &halves);
                    }
                }
                let widened = View::floats(
                    (at + place.len()).next_multiple_of(16),
                    (rows * numbers).next_multiple_of(16),
                );
                let kernels = CpuKernels::with_room(Some(&memory), Level::best(), widened);
                kernels.run(&PackPositive { packed, x: view, room });
                let op = UnpackPositive { y: view, packed, room };
                assert_eq!(kernels.unpack(&op), fits, "{room} of {most}");
                if !fits {
                    continue;
                }
                let call = kernels.call_on(Vec::new(), vec![view], &[]).expect("there is memory");
                let expected = x.iter().map(|x| match room {
                    0 if *x > 0.0 => 1.0,
                    _ => x.max(0.0),
                });
                assert!(call.read(view).iter().copied().eq(expected), "{dtype} {room}");
            }
        }
    }
}
