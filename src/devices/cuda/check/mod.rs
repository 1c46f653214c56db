//! Compares every kernel with the CPU's: the same values in the same places of two memories, one
//! call on each, and then all of both memories, so that wrong writes are seen, too. The CPU's
//! kernels are compared with f64 by their tests.

mod cases;

use std::sync::Arc;

use half::bf16;
use l2l_actors::BoxedError;

use self::cases::{Case, Cases, Side};
use super::Cuda;
use super::driver::Driver;
use crate::devices::Check;
use crate::devices::Device;
use crate::devices::cpu::CpuKernels;
use crate::kernels::{
    BatchMetadata, BatchView, Document, DropoutKey, Rows, STATISTICS, SequenceChunk,
};
use crate::random;
use crate::simd::Level;
use crate::tensor::Arena;
use crate::tensor::{Dtype, Scratch, View, narrow, widen};

/// Floats of a case's memory.
const FLOATS: usize = 1 << 21;

/// The numbers of a view, of any dtype.
fn numbers(memory: &mut Arena, view: View) -> Vec<f32> {
    match view.dtype {
        Dtype::F32 => memory.values(view).to_vec(),
        dtype => {
            let place = View::floats(view.at / 2, dtype.floats(view.len()));
            let all: &[u16] = bytemuck::cast_slice(memory.values(place));
            let mut numbers = vec![0.0; view.len()];
            widen(dtype, &mut numbers, &all[..view.len()]);
            numbers
        }
    }
}

/// Writes the numbers of a view.
fn put(memory: &mut Arena, view: View, values: &[f32]) {
    match view.dtype {
        Dtype::F32 => memory.fill(view, values),
        dtype => {
            let place = View::floats(view.at / 2, dtype.floats(view.len()));
            let all: &mut [u16] = bytemuck::cast_slice_mut(memory.values_mut(place));
            narrow(dtype, &mut all[..view.len()], values);
        }
    }
}

/// What memory holds before values are written.
const UNTOUCHED: f32 = -777.0;

/// A case's memory: the same numbers for both sides, which all dtypes can hold.
fn begin(case: &Case<'_>, side: &Side<'_>, dtype: Dtype, seed: u64) -> Result<Arena, BoxedError> {
    let mut memory = Arena::new(FLOATS)?;
    let mut state = seed;
    memory.values_mut(View::floats(0, side.end)).fill(UNTOUCHED);
    for (index, (view, center)) in side.begins.iter().enumerate() {
        let mut values: Vec<f32> = (0..view.len())
            .map(|_| {
                let value = (random::next(&mut state) >> 40) as f32 / (1 << 23) as f32;
                let value = center + value - 1.0;
                if dtype != Dtype::F32 { bf16::from_f32(value).to_f32() } else { value }
            })
            .collect();
        if let Some((of_statistics, labels)) = &case.statistics
            && *of_statistics == index
        {
            let rows = values.chunks_exact_mut(STATISTICS);
            rows.zip(labels).for_each(|(row, label)| row[3] = f32::from_bits(*label as u32));
        }
        put(&mut memory, *view, &values);
    }
    Ok(memory)
}

/// Positions of a sequence that is so long that not all are scored at once.
const LONG: usize = 3000;

/// Runs a case on both devices; returns the largest difference, relative to values above 1.
fn run(
    device: &Cuda,
    dtype: Dtype,
    batch: &BatchView<'_>,
    case: &Case<'_>,
    seed: u64,
) -> Result<f64, BoxedError> {
    let [on_device, on_cpu] = &case.sides;
    let workspace = View::floats(FLOATS / 2, FLOATS / 2);
    let mut memory = begin(case, on_device, dtype, seed)?;
    let all = View::floats(0, on_device.end);
    device.upload(all, memory.values(all))?;
    device.driver.finish();
    device.compute(batch.metadata(), &|kernels| {
        let scratch = Scratch::new(workspace, dtype);
        (on_device.call)(kernels, &scratch);
        scratch.peak()
    })?;
    memory.fill(all, &device.read_back(all)?);
    let mut oracle = begin(case, on_cpu, dtype, seed)?;
    let kernels = CpuKernels::new(Some(&oracle), Level::best());
    (on_cpu.call)(&kernels, &Scratch::new(workspace, Dtype::F32));
    let mut worst = 0.0_f64;
    for ((view, _), (other, _)) in on_device.begins.iter().zip(&on_cpu.begins) {
        let (found, expected) = (numbers(&mut memory, *view), numbers(&mut oracle, *other));
        for (found, expected) in found.iter().zip(&expected) {
            if found.to_bits() != expected.to_bits() && found != expected {
                let off = f64::from(found - expected).abs() / f64::from(expected.abs()).max(1.0);
                worst = if off.is_nan() { f64::INFINITY } else { worst.max(off) };
            }
        }
    }
    // The floats between the views must be untouched.
    for (view, _) in &on_device.begins {
        put(&mut memory, *view, &vec![0.0; view.len()]);
    }
    let is_place = |at: usize| {
        let mut places = on_device.begins.iter().map(|(view, _)| {
            let from = view.at * view.dtype.size() / Dtype::F32.size();
            from..from + view.dtype.floats(view.len())
        });
        places.any(|place| place.contains(&at))
    };
    let values = memory.values(all);
    let touched = (0..values.len()).any(|at| values[at] != UNTOUCHED && !is_place(at));
    // So must be the rest of a float behind an odd number of 16-bit elements.
    let mut ends = on_device
        .begins
        .iter()
        .filter(|(view, _)| view.dtype != Dtype::F32 && !view.len().is_multiple_of(2));
    let spilt = ends.any(|(view, _)| {
        let last = values[(view.at + view.len()) / 2].to_bits();
        last >> 16 != UNTOUCHED.to_bits() >> 16
    });
    Ok(if touched || spilt { f64::INFINITY } else { worst })
}

/// Every kernel on a driver's device, at odd sizes, with fresh values.
///
/// # Errors
/// The driver's.
pub(super) fn all(
    driver: Arc<dyn Driver>,
    dtype: Dtype,
    seed: u64,
) -> Result<Vec<Check>, BoxedError> {
    let most = match dtype {
        Dtype::F32 => 2e-5,
        Dtype::Bf16 => 2e-2,
        Dtype::F16 => 5e-3,
    };
    let document = |from, to| Document { from, to };
    let documents: Vec<Document> =
        [vec![document(0, 5); 5], vec![document(5, 7); 2]].concat().repeat(3);
    let kinds: Vec<u8> = (0..LONG).map(|row| (row % 3 == 0).into()).collect();
    let dropout_key = Some(DropoutKey { seed, step: 3, first_sequence: 2 });
    let batches = [
        (&[0, 7, 11, 12][..], &[][..], &[][..]),
        // As of a larger batch, which has two rows before.
        (&[2, 9, 16, 23][..], &documents[..], &[][..]),
        (&[0, 3, 133, 200, 201][..], &[][..], &[][..]),
        (&[0, 2, 5][..], &[][..], &[70, 3][..]),
    ];
    let most_rows = Rows { sequences: 1, positions: LONG };
    let overhead = View::floats(FLOATS, super::overhead(most_rows));
    let device = Cuda::new(driver, FLOATS + overhead.len(), overhead)?;
    let mut checks: Vec<Check> = Vec::new();
    let mut go = |cases: Cases<'_>| -> Result<(), BoxedError> {
        for (index, case) in cases.all.iter().enumerate() {
            let off = run(&device, dtype, &cases.batch, case, seed + index as u64)
                .map_err(|error| format!("{}: {error}", case.name))?;
            match checks.iter_mut().find(|check| check.kernel == case.name) {
                Some(check) => (check.cases, check.off) = (check.cases + 1, check.off.max(off)),
                None => checks.push(Check { kernel: case.name, cases: 1, off, most }),
            }
        }
        Ok(())
    };
    for (starts, documents, cached) in batches {
        let kinds = &kinds[..starts[starts.len() - 1] - starts[0]];
        let batch = BatchMetadata { starts, kinds, documents, cached, dropout_key };
        let mut cases = Cases { dtype, batch: batch.view(), all: Vec::new() };
        cases.of_rows();
        cases.of_heads();
        if cached.is_empty() {
            cases.of_tiles();
            cases.of_classes();
        }
        go(cases)?;
    }
    let long = BatchMetadata {
        starts: &[0, LONG],
        kinds: &kinds,
        documents: &[],
        cached: &[],
        dropout_key,
    };
    let some = BatchMetadata { starts: &[0, 5, 139], kinds: &kinds[..139], ..long };
    let batch = some.view().chunk_of(SequenceChunk { sequence: 1, from: 64, to: 134 });
    let mut cases = Cases { dtype, batch, all: Vec::new() };
    cases.of_chunks();
    go(cases)?;
    let mut cases = Cases { dtype, batch: long.view(), all: Vec::new() };
    cases.of_tiles();
    go(cases)?;
    Ok(checks)
}
