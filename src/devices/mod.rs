//! Devices: what the ring's lanes are made of.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod worker;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use l2l_actors::ports::{Operation, Trouble};
use l2l_actors::threads::Pending;
use rayon::ThreadPool;

pub(crate) use cpu::HEAD_LIMIT;
pub(crate) use worker::{Goal, Remembered, Turn, Used, Worker, take_as_long, workspace};

use crate::arena::Arena;
use crate::config::{Config, DeviceKind, Plan};
use crate::error::Error;
use crate::machine;
use crate::models::{Kernels, Micro, Model, Rows, View};
use crate::simd::Level;

/// Memory in slots, copies to and from it, and kernels on it. Three lanes use it at once, each slot at a
/// time of one operation's.
pub(crate) trait Device: Send + Sync + 'static {
    /// Copies to a slot.
    fn upload(&self, to: View, from: &[f32]) -> Result<(), Trouble>;

    /// Copies from a slot.
    fn download(&self, to: &mut [f32], from: View) -> Result<(), Trouble>;

    /// Copies to a slot from a stash of bf16.
    fn upload_packed(&self, to: View, from: &[f32], sequences: usize) -> Result<(), Trouble>;

    /// Copies from a slot to a stash of bf16.
    fn download_packed(&self, to: &mut [f32], from: View, sequences: usize) -> Result<(), Trouble>;

    /// What a slot holds, now.
    fn read_back(&self, view: View) -> Result<Vec<f32>, Trouble>;

    /// Runs kernels on what a micro-batch is; what `run` says.
    fn compute(
        &self,
        micro: &Micro<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<usize, Trouble>;

    /// Its memory, where the host may write it: there a stash can be.
    fn stash(&self) -> Option<&Arena>;

    /// Hears of memory of the host that copies will use.
    fn pin(&self, memory: &mut [f32]) {
        _ = memory;
    }

    /// Whether the calls above return before the work is done, and the device keeps its order.
    fn issues(&self) -> bool {
        false
    }

    /// Has what the operation's lane does from now on wait for all that the operation waits on.
    fn begins(&self, operation: &Operation) -> Result<(), Trouble> {
        unreachable!("{} is not issued", operation.work())
    }

    /// Marks the end of what the operation is, of this value. It is `now`.
    fn ends(&self, operation: &Operation, value: f64, now: Duration) -> Result<Pending, Trouble> {
        unreachable!("{} of {value} at {now:?} is not issued", operation.work())
    }
}

/// The device that a config says, with memory as it was planned.
fn open(
    config: &Config,
    model: &Model,
    plan: &Plan,
    threads: &Arc<ThreadPool>,
) -> Result<Box<dyn Device>, Error> {
    match config.device.kind {
        DeviceKind::Cpu => {
            let memory = cpu::Cpu::new(plan.layout.end, threads);
            let no_memory = |error| Error::failed(format_args!("no memory: {error}"));
            Ok(Box::new(memory.map_err(no_memory)?))
        }
        DeviceKind::Cuda if !model.loss.is_cross_entropy() => {
            let problem = "is cuda: a loss of one's own runs on the cpu";
            Err(Error::config("device.kind", problem))
        }
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => cuda::open(config, model, plan),
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Cuda => Err(without_cuda()),
    }
}

/// Kernels of the device that a config says, on no memory: they tell how much workspace they take.
pub(crate) fn kernels_to_plan(config: &Config) -> Box<dyn Kernels> {
    match config.device.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => Box::new(cuda::CudaKernels::to_plan()),
        _ => Box::new(cpu::CpuKernels { memory: None, level: Level::Portable }),
    }
}

/// Floats that such a device takes beside what is computed: to tell its kernels what a micro-batch is, and
/// for products.
pub(crate) fn beside(config: &Config, rows: Rows) -> usize {
    match config.device.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => cuda::beside(rows),
        _ => {
            _ = rows;
            0
        }
    }
}

/// Floats of the host that it takes for that.
pub(crate) fn beside_on_host(config: &Config, rows: Rows) -> usize {
    match config.device.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => cuda::beside_on_host(rows),
        _ => {
            _ = rows;
            0
        }
    }
}

/// See [`machine::cuda_libraries`].
pub(crate) fn cuda_libraries(folder: Option<&Path>) -> Vec<machine::Library> {
    #[cfg(feature = "cuda")]
    return cuda::libraries(folder).into();
    #[cfg(not(feature = "cuda"))]
    {
        _ = folder;
        Vec::new()
    }
}

/// See [`machine::gpus`].
pub(crate) fn gpus() -> Result<Vec<machine::Gpu>, Trouble> {
    #[cfg(feature = "cuda")]
    if cuda::libraries(None)[0].version.is_some() {
        return cuda::gpus();
    }
    Ok(Vec::new())
}

/// See [`machine::check_kernels`].
pub(crate) fn check_kernels(config: &Config, seed: u64) -> Result<Vec<machine::Check>, Error> {
    #[cfg(feature = "cuda")]
    return cuda::check(config, seed);
    #[cfg(not(feature = "cuda"))]
    {
        _ = (config, seed);
        Err(without_cuda())
    }
}

/// See [`machine::gpu_rates`].
pub(crate) fn gpu_rates(config: &Config) -> Result<machine::GpuRates, Error> {
    #[cfg(feature = "cuda")]
    return cuda::rates(config);
    #[cfg(not(feature = "cuda"))]
    {
        _ = config;
        Err(without_cuda())
    }
}

/// What is said where it was left out.
#[cfg(not(feature = "cuda"))]
fn without_cuda() -> Error {
    let problem = "is cuda: this program was built without it; build it with its default features, or \
                   with `--features cuda`";
    Error::config("device.kind", problem)
}
