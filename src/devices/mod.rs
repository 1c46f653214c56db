//! Devices: their memory, copies and kernels, which the ring's lanes run on.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
pub(crate) mod cuda;
mod probe;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use l2l_actors::threads::Pending;
use l2l_actors::{BoxedError, Operation};
use rayon::ThreadPool;

pub use cpu::{KernelRate, Rate, kernel_rates, product_flops_per_second};
pub use probe::{
    Check, Gpu, GpuRates, KernelGroup, KernelTime, Library, ProductTable, ProductTime,
};

use crate::config::{Config, DeviceConfig, DeviceKind};
use crate::error::Error;
use crate::kernels::{BatchMetadata, Kernels, Rows};
use crate::machine;
use crate::models::Model;
use crate::simd::Level;
use crate::tensor::{Arena, ArenaPlan, ByteRows, Packing, View};

/// A device: memory in slots, copies to and from slots, and kernels on them. The upload, compute
/// and download lanes use a device at the same time; a slot belongs to one operation at a time.
pub(crate) trait Device: Send + Sync + 'static {
    /// Copies to a slot.
    fn upload(&self, to: View, from: &[f32]) -> Result<(), BoxedError>;

    /// Copies rows of bytes to a slot: their places are counted from the begins of both.
    fn upload_rows(&self, to: View, from: &[f32], rows: ByteRows) -> Result<(), BoxedError>;

    /// Copies from a slot.
    fn download(&self, to: &mut [f32], from: View) -> Result<(), BoxedError>;

    /// The address of a slot for other devices of this kind.
    fn for_peers(&self, view: View) -> PeerView;

    /// Copies a slot of another device to a slot of the same size.
    fn copy_from_peer(&self, to: View, from: PeerView) -> Result<(), BoxedError>;

    /// Copies numbers to a slot that are packed in the stash.
    fn upload_packed(&self, to: View, from: &[f32], packing: Packing) -> Result<(), BoxedError>;

    /// Copies numbers from a slot, and packs them: to the stash or to a landing block.
    fn download_packed(
        &self,
        to: &mut [f32],
        from: View,
        packing: Packing,
    ) -> Result<(), BoxedError>;

    /// The floats that a slot holds; waits for the device.
    fn read_back(&self, view: View) -> Result<Vec<f32>, BoxedError>;

    /// True if all numbers of a view that the running operation has written are finite. A device
    /// that issues its work always returns true, and stores the mark of a step's first view that
    /// is not finite. The upper half of a mark is the step.
    fn is_finite(&self, view: View, mark: i64) -> Result<bool, BoxedError>;

    /// The mark that [`is_finite`](Device::is_finite) stored; waits for the device.
    fn first_non_finite(&self) -> Result<Option<i64>, BoxedError> {
        Ok(None)
    }

    /// Times each kernel from now on, which makes the device slower. A CPU device has no times.
    fn time_kernels(&self) {}

    /// The time that each kernel took since the last call; waits for the device.
    fn take_kernel_times(&self) -> Result<Vec<KernelTime>, BoxedError> {
        Ok(Vec::new())
    }

    /// Times the algorithms of each product from now on. A CPU device has one algorithm.
    fn time_products(&self) {}

    /// Stores the fastest algorithm of each timed product for later runs; waits for the device.
    /// `None`: products were not timed.
    fn store_products(&self) -> Result<Option<ProductTable>, BoxedError> {
        Ok(None)
    }

    /// Calls `run` with kernels for a micro-batch, and returns what `run` returns.
    fn compute(
        &self,
        batch: &BatchMetadata<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<usize, BoxedError>;

    /// The memory that devices share with the host, if they do: the floats of all devices, then the
    /// host's from [`host_from`] on.
    fn shared(&self) -> Option<&Arc<Arena>>;

    /// The place of this device's first float in the shared memory.
    fn first(&self) -> usize {
        0
    }

    /// Waits for all issued work, even after an error.
    fn finish(&self) {}

    /// Pins memory of the host, for copies of all devices of this kind.
    fn pin(&self, memory: &mut [f32]) {
        _ = memory;
    }

    /// Bytes of the host that are pinned.
    fn pinned_bytes(&self) -> u64 {
        0
    }

    /// Reasons why the device is slower than it could be. Each is returned once.
    fn take_warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// True if the calls above return before the work is done. The device then does the work in the
    /// order of the calls.
    fn issues(&self) -> bool {
        false
    }

    /// Makes the device's queue of the operation's lane wait for all fences of the operation.
    fn begins(&self, operation: &Operation) -> Result<(), BoxedError> {
        unreachable!("{} is not issued", operation.work())
    }

    /// Marks the end of the operation's work, whose result is `value`, at the time `now`.
    fn ends(
        &self,
        operation: &Operation,
        value: f64,
        now: Duration,
    ) -> Result<Pending, BoxedError> {
        unreachable!("{} of {value} at {now:?} is not issued", operation.work())
    }
}

/// The address of a slot for other devices of the same kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerView {
    /// The GPU's context in the driver; 0 for a CPU device.
    #[allow(dead_code, reason = "only GPUs have one")]
    pub(crate) context: usize,
    /// The GPU's address; for a CPU device the slot's first element in the shared memory.
    pub(crate) at: u64,
}

/// Floats from the begin of one device's memory to the next device's, in whole pages of the memory
/// that they share.
fn stride(device_floats: usize) -> usize {
    device_floats.next_multiple_of(1024)
}

/// The place of the host's first float in memory that it shares with devices of `device_floats`
/// each. It begins a page, as direct file access needs.
pub(crate) fn host_from(devices: u32, device_floats: usize) -> usize {
    devices as usize * stride(device_floats)
}

/// Opens the devices that a config names, each with the memory of `on_device`. `own` is the part
/// that a device keeps for itself: a GPU's overhead, or a CPU's floats of 16-bit elements. Devices
/// that share the host's memory hold the memory of `on_host`, too.
pub(crate) fn open(
    config: &Config,
    model: &Model,
    on_device: &ArenaPlan,
    on_host: &ArenaPlan,
    own: View,
    threads: &Arc<ThreadPool>,
) -> Result<Vec<Box<dyn Device>>, Error> {
    let devices = config.devices();
    let floats = on_device.floats;
    match config.device.kind {
        DeviceKind::Cpu => {
            let first = |device: u32| device as usize * stride(floats);
            let mut shared = ArenaPlan::default();
            (0..devices).for_each(|device| shared.place(first(device), on_device));
            shared.place(host_from(devices, floats), on_host);
            let no_memory = |error| Error::system(format_args!("no memory: {error}"));
            let memory = Arc::new(Arena::planned(&shared).map_err(no_memory)?);
            let mut all: Vec<Box<dyn Device>> = Vec::new();
            for device in 0..devices {
                let first = first(device);
                let threads = cpu::threads_of(device, devices, threads)?;
                let own = View { at: first + own.at, ..own };
                all.push(Box::new(cpu::Cpu::new(&memory, first, own, threads)));
            }
            Ok(all)
        }
        DeviceKind::Cuda if !model.loss.is_cross_entropy() => {
            let problem = "is cuda: a loss of one's own runs on the cpu";
            Err(Error::config("device.kind", problem))
        }
        DeviceKind::Cuda if model.shape.score_cap.is_some() => {
            let problem = "is cuda: a limit of attention's scores (attn_logit_softcapping) is \
                           built for the cpu alone";
            Err(Error::config("device.kind", problem))
        }
        DeviceKind::Cuda => {
            let gpus = config.device.gpus().into_iter();
            gpus.map(|ordinal| cuda::open(config, ordinal, model, floats, own)).collect()
        }
    }
}

/// Device memory that kernels need beside the plan's slots, in floats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelMemory {
    /// Workspace that layers pass to kernels.
    pub(crate) workspace: usize,
    /// On a GPU: batch metadata and the matrix library's workspace.
    pub(crate) overhead: usize,
    /// On a CPU: the 16-bit elements of one operation, as floats.
    pub(crate) widened: usize,
}

/// Measures the memory that the kernels of a config's device need. `walk` runs a layer on kernels
/// without memory, and returns the workspace that they asked for.
pub(crate) fn kernel_memory(
    config: &Config,
    rows: Rows,
    walk: impl FnOnce(&dyn Kernels) -> usize,
) -> KernelMemory {
    match config.device.kind {
        DeviceKind::Cuda => {
            let workspace = walk(&*cuda::kernels_to_plan());
            KernelMemory { workspace, overhead: cuda::overhead(config, rows), widened: 0 }
        }
        DeviceKind::Cpu => {
            let kernels = cpu::CpuKernels::new(None, Level::Portable);
            let workspace = walk(&kernels);
            KernelMemory { workspace, overhead: 0, widened: kernels.most_widened() }
        }
    }
}

/// Host memory for batch metadata on its way to the device, in floats.
pub(crate) fn overhead_on_host(config: &Config, rows: Rows) -> usize {
    match config.device.kind {
        DeviceKind::Cuda => cuda::overhead_on_host(rows),
        DeviceKind::Cpu => 0,
    }
}

/// The libraries that a CUDA device needs, the driver first. They are searched on the loader's
/// path, then in a folder. The list is empty if this program was built without CUDA.
pub fn cuda_libraries(folder: Option<&Path>) -> Vec<Library> {
    cuda::libraries(folder).into()
}

/// The GPUs that the driver reports; none without a driver.
///
/// # Errors
/// The driver reports an error.
pub fn gpus() -> Result<Vec<Gpu>, Error> {
    if has_driver() {
        cuda::gpus().map_err(|error| Error::Device(error.to_string()))
    } else {
        Ok(Vec::new())
    }
}

fn has_driver() -> bool {
    cuda_libraries(None).first().is_some_and(|driver| driver.version.is_some())
}

/// The bytes that are free now on that GPU of a config which has the fewest. `None` if one of them
/// is not there, does not answer, or has no memory but the host's.
pub(crate) fn free_memory(device: &DeviceConfig) -> Option<u64> {
    let free = device.gpus().into_iter().map(cuda::free_memory);
    free.min().flatten()
}

/// Compares a group's kernels on the GPU that a config names with the CPU's kernels, at odd sizes,
/// on random values of this seed. `each` is called for a kernel as soon as its cases have run. The
/// check goes on after a kernel that fails, as long as the GPU answers.
///
/// # Errors
/// There is no such GPU, or it no longer answers.
pub fn check_kernels(
    config: &Config,
    group: KernelGroup,
    seed: u64,
    each: &mut dyn FnMut(&Check),
) -> Result<(), Error> {
    cuda::check(config, group, seed, each)
}

/// Measures the link and the products of the GPU that a config names, and compiles its kernels.
///
/// # Errors
/// There is no such GPU, or it failed.
pub fn gpu_rates(config: &Config) -> Result<GpuRates, Error> {
    cuda::rates(config)
}

/// FLOP/s of a large product on the device that a config names.
///
/// # Errors
/// There is no such device, or it failed.
pub fn device_flops_per_second(config: &Config) -> Result<f64, Error> {
    match config.device.kind {
        DeviceKind::Cpu => {
            product_flops_per_second(config.device.threads.unwrap_or_else(machine::cores))
        }
        DeviceKind::Cuda => cuda::product_rate(config),
    }
}
