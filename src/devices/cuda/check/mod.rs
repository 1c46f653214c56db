//! Compares every kernel with the CPU's: the same values in the same places of two memories, one
//! call on each, and then all of both memories, so that wrong writes are seen, too. The CPU's
//! kernels are compared with f64 by their tests.
//!
//! A kernel that the driver refuses ends nothing: the next is checked. Some errors leave the
//! process without its GPU, which then does not answer; so each group has a process of its own.

mod cases;
mod packed;

use std::sync::Arc;

use half::bf16;
use l2l_actors::BoxedError;

use self::cases::{Case, Cases, Side};
use super::Cuda;
use super::driver::Driver;
use super::ways::Way;
use crate::devices::cpu::CpuKernels;
use crate::devices::{Check, Device, KernelGroup};
use crate::kernels::{BatchMetadata, Document, DropoutKey, Rows, STATISTICS, SequenceChunk};
use crate::random;
use crate::simd::Level;
use crate::tensor::Arena;
use crate::tensor::{Dtype, Scratch, View, narrow, widen};

/// Floats of a case's memory.
const FLOATS: usize = 1 << 22;

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

/// The value of all memory before a case writes its numbers.
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

/// Runs a case on both devices. Returns the largest difference, relative to values above 1.
fn compare(device: &Cuda, dtype: Dtype, case: &Case<'_>, seed: u64) -> Result<f64, BoxedError> {
    let [on_device, on_cpu] = &case.sides;
    let workspace = View::floats(FLOATS / 2, FLOATS / 2);
    let mut memory = begin(case, on_device, dtype, seed)?;
    let all = View::floats(0, on_device.end);
    device.upload(all, memory.values(all))?;
    device.driver.finish();
    device.compute(case.batch.metadata(), &|kernels| {
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
        let found = numbers(&mut memory, *view);
        let expected = numbers(&mut oracle, *other);
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

/// A group's kernels on a driver's device, at odd sizes, with fresh values.
///
/// # Errors
/// The device does not answer.
pub(super) fn run(
    driver: Arc<dyn Driver>,
    dtype: Dtype,
    group: KernelGroup,
    seed: u64,
    each: &mut dyn FnMut(&Check),
) -> Result<(), BoxedError> {
    let most = match dtype {
        Dtype::F32 => 2e-5,
        Dtype::Bf16 => 2e-2,
        Dtype::F16 => 5e-3,
    };
    let most_rows = Rows { sequences: 1, positions: LONG };
    let buffers = packed::BUFFERS;
    let overhead = View::floats(FLOATS, super::overhead_with(buffers, most_rows));
    let device = Cuda::new(driver, FLOATS + overhead.len(), overhead, buffers)?;
    let batches = Batches::new(seed);
    let mut cases = batches.cases(dtype, group);
    cases.sort_by_key(|case| case.name);
    for cases in cases.chunk_by(|one, next| one.name == next.name) {
        for (way, kernel) in ways_of(cases[0].name) {
            device.ways.set_only(way);
            let mut check = Check { kernel, cases: 0, off: 0.0, most, error: None };
            for case in taken(cases, dtype) {
                match compare(&device, dtype, case, seed + check.cases as u64) {
                    Ok(off) => (check.cases, check.off) = (check.cases + 1, check.off.max(off)),
                    Err(error) => {
                        check.error = Some(error.to_string());
                        break;
                    }
                }
            }
            report(&device, check, each)?;
        }
    }
    if group == KernelGroup::Rows {
        report(&device, of_marks(&device, dtype, most), each)?;
        for check in packed::checks(&device, dtype, seed) {
            report(&device, check, each)?;
        }
    }
    Ok(())
}

/// The cases of a kernel that are checked: all, but on an emulated device, where a case takes
/// seconds, every third. Together the three dtypes have all of them.
fn taken<'c>(cases: &'c [Case<'c>], dtype: Dtype) -> impl Iterator<Item = &'c Case<'c>> {
    let is_part = cfg!(test) && cases.len() > 3 && std::env::var_os("L2L_TESTS").is_none();
    let step = if is_part { 3 } else { 1 };
    cases.iter().skip(dtype as usize % step).step_by(step)
}

/// The ways in which a kernel's products are checked, with the kernel's name in each.
fn ways_of(kernel: &'static str) -> Vec<(Option<Way>, &'static str)> {
    match kernel {
        "linear" => vec![
            (None, kernel),
            (Some(Way::ThenBias), "linear, bias apart"),
            (Some(Way::Own), "linear, own product"),
        ],
        "linear_backward" => {
            vec![(None, kernel), (Some(Way::Own), "linear_backward, own product")]
        }
        _ => vec![(None, kernel)],
    }
}

/// Checks that the device finds a number that is not finite, and keeps the first mark.
fn of_marks(device: &Cuda, dtype: Dtype, most: f64) -> Check {
    let floats = View::floats(0, 1030);
    let view = floats.hold(1, floats.len(), dtype);
    // Of several marks of one step, the first stays.
    let [first, second, next] = [1 << 32 | 4, 1 << 32 | 5, 2 << 32 | 3];
    let finds = || -> Result<bool, BoxedError> {
        let mut memory = Arena::new(floats.len())?;
        let mut is_right = true;
        for (at, value) in [(1029, f32::NAN), (4, f32::INFINITY)] {
            let mut values = vec![1.0; view.len()];
            for value in [1.0, value] {
                values[at] = value;
                put(&mut memory, view, &values);
                device.upload(floats, memory.values(floats))?;
                device.driver.finish();
                let before = device.first_non_finite()?;
                for (mark, kept) in [(first, first), (second, first), (next, next)] {
                    device.is_finite(view, mark)?;
                    let kept = if value.is_finite() { before } else { Some(kept) };
                    is_right &= device.first_non_finite()? == kept;
                }
            }
        }
        Ok(is_right)
    };
    let (off, error) = match finds() {
        Ok(is_right) => (if is_right { 0.0 } else { f64::INFINITY }, None),
        Err(error) => (0.0, Some(error.to_string())),
    };
    Check { kernel: "mark_non_finite", cases: 2, off, most, error }
}

/// Reports a check. Fails if the device does not answer after an error.
fn report(device: &Cuda, check: Check, each: &mut dyn FnMut(&Check)) -> Result<(), BoxedError> {
    each(&check);
    let Some(error) = check.error else { return Ok(()) };
    let answers = device.read_back(View::floats(0, 1));
    answers.map_err(|_| format!("the GPU does not answer since {}: {error}", check.kernel))?;
    Ok(())
}

/// The micro-batches that kernels are checked on. Each differs from all others.
struct Batches {
    documents: Vec<Document>,
    kinds: Vec<u8>,
    dropout_key: Option<DropoutKey>,
}

impl Batches {
    fn new(seed: u64) -> Batches {
        let document = |from, to| Document { from, to };
        Batches {
            documents: [vec![document(0, 5); 5], vec![document(5, 7); 2]].concat().repeat(3),
            kinds: (0..LONG).map(|row| (row % 3 == 0).into()).collect(),
            dropout_key: Some(DropoutKey { seed, step: 3, first_sequence: 2 }),
        }
    }

    fn of<'b>(
        &'b self,
        starts: &'b [usize],
        documents: &'b [Document],
        cached: &'b [usize],
    ) -> BatchMetadata<'b> {
        let kinds = &self.kinds[..starts[starts.len() - 1] - starts[0]];
        BatchMetadata { starts, kinds, documents, cached, dropout_key: self.dropout_key }
    }

    /// The cases of a group.
    fn cases(&self, dtype: Dtype, group: KernelGroup) -> Vec<Case<'_>> {
        let small = [
            self.of(&[0, 7, 11, 12], &[], &[]),
            // As of a larger batch, which has two rows before.
            self.of(&[2, 9, 16, 23], &self.documents, &[]),
            self.of(&[0, 3, 133, 200, 201], &[], &[]),
            self.of(&[0, 2, 5], &[], &[70, 3]),
        ];
        // An emulated device takes seconds for what a GPU does at once: there, two tiles of queries
        // and five of keys are enough.
        let starts = if cfg!(test) { &[0, 150, 161] } else { &[0, 390, 401] };
        let wide = self.of(starts, &[], &[]).view();
        let long = self.of(&[0, LONG], &[], &[]).view();
        let chunk = SequenceChunk { sequence: 1, from: 64, to: 134 };
        let chunk = self.of(&[0, 5, 139], &[], &[]).view().chunk_of(chunk);
        let behind = SequenceChunk { sequence: 0, from: 192, to: 230 };
        let behind = self.of(&[0, 230], &[], &[]).view().chunk_of(behind);
        let inner = SequenceChunk { sequence: 1, from: 64, to: 100 };
        let inner = self.of(&[0, 5, 139], &[], &[]).view().chunk_of(inner);
        let mut cases = Cases { dtype, batch: long, all: Vec::new() };
        for batch in small {
            cases.batch = batch.view();
            match group {
                KernelGroup::Products => cases.of_products(),
                KernelGroup::Rows => cases.of_rows(),
                KernelGroup::Attention => {
                    cases.of_heads();
                    cases.of_linear_attention();
                }
                KernelGroup::Losses if batch.cached.is_empty() => cases.of_losses(),
                KernelGroup::Losses => {}
            }
        }
        match group {
            KernelGroup::Products => cases.on(wide).of_large_products(),
            KernelGroup::Rows => {}
            KernelGroup::Attention => {
                cases.on(wide).of_wide_heads();
                cases.on(chunk).of_chunks();
                cases.on(behind).of_windowed_chunk();
                cases.on(inner).of_linear_attention();
            }
            KernelGroup::Losses => cases.on(long).of_tiles(),
        }
        cases.all
    }
}
