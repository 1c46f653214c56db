//! Copies that pack and unpack, and the positive numbers of a tensor: all bits are the CPU's.

use l2l_actors::BoxedError;
use l2l_actors::schedule::Encoding;

use crate::devices::cpu::CpuKernels;
use crate::devices::cuda::Cuda;
use crate::devices::cuda::packed::PackBuffers;
use crate::devices::{Check, Device};
use crate::kernels::{BatchMetadata, Kernels, PackPositive, UnpackPositive, packed_row};
use crate::random;
use crate::simd::Level;
use crate::tensor::{Arena, Dtype, Packing, View, narrow};

/// Small buffers, so that numbers are packed in several pieces.
pub(super) const BUFFERS: PackBuffers = PackBuffers { down: 4096, up: 2048 };

/// Rows of a slot.
const ROWS: usize = 37;

/// Numbers of a row.
const COLUMNS: usize = 260;

/// What is in a place before it is written.
const UNTOUCHED: f32 = -777.0;

/// The checks, with the values of a seed.
pub(super) fn checks(device: &Cuda, dtype: Dtype, seed: u64) -> Vec<Check> {
    let int8 = |block| Packing { dtype, encoding: Encoding::Int8 { block }, columns: COLUMNS };
    let of_bf16 = [1, 8191, ROWS * COLUMNS].map(Packing::bf16);
    let of_int8 = [1, 64, COLUMNS as u32].map(int8);
    let all = |cases: [Packing; 3], is_same: &dyn Fn(Packing) -> Found| {
        cases.into_iter().try_fold(true, |all, one| Ok(all & is_same(one)?))
    };
    let there = |one| packs(device, one, seed);
    let both = |one| Ok(packs(device, one, seed)? && unpacks(device, one, seed)?);
    let of_bf16 = all(of_bf16, if dtype == Dtype::F32 { &both } else { &there });
    vec![
        of("pack_bfloats", 3, of_bf16),
        of("pack_int8", 3, all(of_int8, &both)),
        of("pack_positive", 4, positive(device, dtype, seed)),
    ]
}

/// Whether all bits are the CPU's.
type Found = Result<bool, BoxedError>;

fn of(kernel: &'static str, cases: usize, found: Found) -> Check {
    let off = if found.as_ref().is_ok_and(|same| !same) { f64::INFINITY } else { 0.0 };
    let error = found.err().map(|error| error.to_string());
    Check { kernel, cases, off, most: 0.0, error }
}

/// Floats of a slot with random numbers of a dtype: of all magnitudes, some not finite.
fn slot(dtype: Dtype, numbers: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let number = |at: usize| match at % 251 {
        7 if at.is_multiple_of(3) => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][at / 3 % 3],
        11 => f32::from_bits((random::next(&mut state) >> 41) as u32), // below the normal ones
        13 => 0.0,
        _ => {
            let unit = (random::next(&mut state) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            unit * 2.0_f32.powi((at / COLUMNS) as i32 % 20 - 10)
        }
    };
    let numbers: Vec<f32> = (0..numbers).map(number).collect();
    if dtype == Dtype::F32 {
        return numbers;
    }
    let mut floats = vec![0.0; dtype.floats(numbers.len())];
    narrow(dtype, &mut bytemuck::cast_slice_mut(&mut floats)[..numbers.len()], &numbers);
    floats
}

/// The slot of a packing's numbers, and how many they are.
fn slot_of(packing: Packing) -> (View, usize) {
    let rows = if packing.encoding == Encoding::Bf16 { 1 } else { ROWS };
    let numbers = rows * packing.columns;
    (View::floats(16, packing.dtype.floats(numbers)), rows)
}

fn packs(device: &Cuda, packing: Packing, seed: u64) -> Found {
    let (view, rows) = slot_of(packing);
    let slot = slot(packing.dtype, rows * packing.columns, seed);
    let floats = packing.floats(rows);
    let mut expected = vec![UNTOUCHED; floats];
    packing.pack(&mut expected, &slot);
    device.upload(view, &slot)?;
    device.driver.finish();
    let mut found = vec![UNTOUCHED; floats];
    device.download_packed(&mut found, view, packing)?;
    device.driver.finish();
    // The last bytes of a row may be unused.
    let used = match packing.encoding {
        Encoding::Int8 { block } => packing.columns.div_ceil(block as usize) * 4 + packing.columns,
        _ => packing.row_bytes(),
    };
    let row = packing.floats(1) * 4;
    let bytes = |all| bytemuck::cast_slice::<f32, u8>(all).chunks(row);
    Ok(bytes(&found).zip(bytes(&expected)).all(|(one, other)| one[..used] == other[..used]))
}

fn unpacks(device: &Cuda, packing: Packing, seed: u64) -> Found {
    let (view, rows) = slot_of(packing);
    let slot = slot(packing.dtype, rows * packing.columns, seed);
    let mut place = vec![0.0; packing.floats(rows)];
    packing.pack(&mut place, &slot);
    let mut expected = vec![UNTOUCHED; view.len()];
    packing.unpack(&mut expected, &place);
    device.upload_packed(view, &place, packing)?;
    device.driver.finish();
    let found = device.read_back(view)?;
    let is_same = |(one, other): (&f32, &f32)| {
        let [one, other] = [one, other].map(|number| number.to_bits());
        // Which NaN a product gives is not defined.
        one == other || [one, other].map(|bits| is_nan(bits, packing.dtype)) == [true; 2]
    };
    Ok(found.iter().zip(&expected).all(is_same))
}

/// Whether a float, or one of the two numbers of 16 bits in it, is NaN.
fn is_nan(bits: u32, dtype: Dtype) -> bool {
    match dtype {
        Dtype::F32 => f32::from_bits(bits).is_nan(),
        dtype => [bits as u16, (bits >> 16) as u16].into_iter().any(|half| match dtype {
            Dtype::Bf16 => half::bf16::from_bits(half).is_nan(),
            _ => half::f16::from_bits(half).is_nan(),
        }),
    }
}

/// Packs and unpacks with room for all, for too few, for exactly the most, and with bits alone.
fn positive(device: &Cuda, dtype: Dtype, seed: u64) -> Found {
    let metadata = BatchMetadata { kinds: &[0], ..BatchMetadata::plain(&[0, 1]) };
    let floats = slot(dtype, ROWS * COLUMNS, seed);
    let mut is_same = true;
    for room in [COLUMNS, COLUMNS / 2, 3, 0] {
        let words = packed_row(COLUMNS, room, dtype);
        let packed = View { rows: ROWS, columns: words, ..View::floats(0, ROWS * words) };
        let at = (ROWS * words).next_multiple_of(16);
        let place = View::floats(at, floats.len());
        let x = place.hold(ROWS, COLUMNS, dtype);
        let back = View::floats(at + floats.len().next_multiple_of(16), floats.len());
        let y = back.hold(ROWS, COLUMNS, dtype);
        let widened = View::floats(back.at + 2 * floats.len(), 2 * ROWS * COLUMNS);
        let all = View::floats(0, widened.at + widened.len());
        let mut oracle = Arena::new(all.len())?;
        oracle.values_mut(all).fill(UNTOUCHED);
        oracle.fill(place, &floats);
        device.upload(View::floats(0, widened.at), oracle.values(View::floats(0, widened.at)))?;
        device.driver.finish();
        let run = |kernels: &dyn Kernels| {
            kernels.pack_positive(&PackPositive { packed, x, room });
            usize::from(kernels.unpack_positive(&UnpackPositive { y, packed, room }))
        };
        let fits = device.compute(&metadata, &run)?;
        let cpu = CpuKernels::with_room(Some(&oracle), Level::best(), widened);
        is_same &= fits == run(&cpu);
        for view in [packed, back].into_iter().take(1 + fits) {
            let found = device.read_back(View::floats(view.at, view.len()))?;
            let expected = oracle.values(View::floats(view.at, view.len()));
            // Of the positive numbers that a row has no room for, nothing is written.
            let pairs = found.iter().zip(expected);
            is_same &= pairs.into_iter().all(|(one, other)| one.to_bits() == other.to_bits());
        }
    }
    Ok(is_same)
}
