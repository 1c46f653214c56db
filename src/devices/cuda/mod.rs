//! An NVIDIA GPU as a device: lanes are streams, fences are events, memory is one allocation.
//!
//! The thread of a lane queues work on its stream, ahead of the device. It waits for the device
//! only where a router's choice, or a row of saved inputs that was too long, decides the kernels
//! that come next. Else only the threads that report how operations ended wait. CUDA is loaded when
//! a config asks for it.

mod activation;
mod attention;
mod batch_metadata;
mod check;
mod chosen;
mod classes;
mod clock;
mod columns;
mod compile;
mod copy;
mod cross_entropy;
mod custom;
mod driver;
mod dropout;
mod embedding;
#[cfg(test)]
#[path = "../../../tests/cuda/emulated/mod.rs"]
pub(crate) mod emulated;
mod experts;
mod gates;
mod head_norm;
mod kernels;
mod kv_cache;
mod launches;
mod libraries;
mod linear;
mod linear_attention;
mod norm;
mod packed;
mod pinned;
mod positive;
mod product;
mod quantised;
mod rates;
mod real;
mod rotary;
mod routing;
mod sinks;
#[cfg(test)]
#[path = "../../../tests/cuda/tests/mod.rs"]
mod tests;
mod texts;
mod times;
mod transfers;
mod ways;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use l2l_actors::fence::Done;
use l2l_actors::threads::Pending;
use l2l_actors::{BoxedError, Operation};

use kernels::CudaKernels;
pub(super) use libraries::libraries;
pub(super) use real::gpus;

use self::batch_metadata::DeviceMetadata;
use self::chosen::Chosen;
use self::clock::Clock;
use self::driver::{Address, Driver, Event, Place, STREAMS, Stream, WORKSPACE};
use self::launches::{FLOAT, NEIGHBOURS, Queue, int, long};
use self::packed::PackBuffers;
use self::pinned::Pinned;
use self::times::Times;
use self::ways::Ways;
use super::{Check, Device, GpuRates, KernelGroup, KernelTime, PeerView, ProductTable};
use crate::config::Config;
use crate::error::Error;
use crate::kernels::{BatchMetadata, CustomKernel, Kernels, Rows};
use crate::models::{Model, ModelLayer};
use crate::tensor::{Arena, ByteRows, Packing, View};

/// Micro-batches whose metadata is on its way to the device at once, at most.
const IN_FLIGHT: usize = 8;

/// Bytes that the workspace of matrix products is aligned to.
const ALIGNED: usize = 256;

/// Floats of that workspace.
const PRODUCT_WORKSPACE: usize = (ALIGNED + WORKSPACE) / FLOAT;

/// Floats that are copied to measure the link: enough that a copy's start takes no share of it.
const LINK_FLOATS: usize = 64 << 20;

/// Rows and columns of the matrices that are multiplied to measure products.
const PRODUCT_SIZE: usize = 8192;

/// Floats of a mark, padded so that the views behind it stay aligned.
const MARK: usize = 16;

/// A GPU with its memory, kernels and copies.
pub(super) struct Cuda {
    driver: Arc<dyn Driver>,
    memory: Address,
    /// The place of the mark that [`Device::is_finite`] writes.
    marked: View,
    /// The buffers in which numbers are packed, of copies to the host and from it.
    packed: [View; 2],
    /// The place of a micro-batch's metadata in the device's memory.
    metadata: View,
    /// The workspace of matrix products.
    workspace: Address,
    ways: Ways,
    /// The algorithms that products take.
    chosen: Chosen,
    times: Times,
    /// Metadata on its way to the device, from [`IN_FLIGHT`] places of the host in turn.
    staging: Arena,
    /// The metadata that the device has, or will have when it is next needed.
    current: Mutex<Current>,
    /// The event at the end of each operation that was issued to the device and is not done.
    issued: Arc<Mutex<HashMap<u64, Arc<Event>>>>,
    /// The event at the begin of the operation that is being issued to each stream.
    begun: Mutex<[Option<Arc<Event>>; STREAMS]>,
    clock: Arc<Mutex<Clock>>,
    /// Host memory that copies use.
    pinned: Pinned,
}

/// The metadata that [`Cuda::send_metadata`] sent last.
#[derive(Default)]
struct Current {
    words: Vec<u32>,
    /// The number of times that other metadata was sent.
    changes: usize,
}

impl Cuda {
    /// A device with memory for `floats` floats, of which `overhead` is the device's own.
    fn new(
        driver: Arc<dyn Driver>,
        floats: usize,
        overhead: View,
        buffers: PackBuffers,
    ) -> Result<Cuda, BoxedError> {
        let memory = driver.allocate(floats * FLOAT)?;
        let marked = overhead.part(0..MARK);
        let PackBuffers { down, up } = buffers;
        let packed = [MARK..MARK + down, MARK + down..MARK + down + up];
        let packed = packed.map(|part| overhead.part(part));
        let metadata = overhead.part(MARK + down + up..overhead.len() - PRODUCT_WORKSPACE);
        let behind = memory + ((metadata.at + metadata.len()) * FLOAT) as Address;
        let all = View::floats(0, IN_FLIGHT * metadata.len());
        let mut staging = Arena::new(all.len())?;
        // Before the event, not behind it: what waits for the device must not begin before it
        // ended.
        let at = Instant::now();
        let event = Event::record(&driver, Stream::Compute)?;
        driver.synchronize(event.id)?;
        let clock = Arc::new(Mutex::new(Clock { event, at }));
        let pinned = Pinned::default();
        pinned.pin(&*driver, staging.values_mut(all));
        Ok(Cuda {
            driver,
            memory,
            marked,
            packed,
            metadata,
            workspace: behind.next_multiple_of(ALIGNED as Address),
            ways: Ways::default(),
            chosen: Chosen::default(),
            times: Times::default(),
            staging,
            current: Mutex::default(),
            issued: Arc::default(),
            begun: Mutex::default(),
            clock,
            pinned,
        })
    }

    /// Launches on the compute stream.
    fn queue(&self) -> Queue<'_> {
        Queue::new(&self.driver, self.workspace, &self.ways, &self.chosen, &self.times)
    }

    fn address(&self, view: View) -> Address {
        Place { at: self.memory, dtype: view.dtype }.behind(view.at).at
    }
}

/// The bytes that are free on a GPU; see [`real::free_memory`].
pub(super) fn free_memory(ordinal: usize) -> Option<u64> {
    #[cfg(test)]
    if let Some(free) = emulated::free_memory(ordinal) {
        return free;
    }
    super::has_driver().then(|| real::free_memory(ordinal).ok().flatten()).flatten()
}

/// Compares a group's kernels on the GPU of a config with the CPU's.
pub(super) fn check(
    config: &Config,
    group: KernelGroup,
    seed: u64,
    each: &mut dyn FnMut(&Check),
) -> Result<(), Error> {
    let driver = driver(config, config.device.gpus()[0], Some(&[]))?;
    check::run(driver, config.device.dtype, group, seed, each)
        .map_err(|error| Error::Device(error.to_string()))
}

/// Measures the link and the matrix products of the GPU of a config. Its kernels are compiled, too,
/// so that a GPU that has rates can be used.
pub(super) fn rates(config: &Config) -> Result<GpuRates, Error> {
    let driver = driver(config, config.device.gpus()[0], Some(&[]))?;
    rates::measure(&driver, config.device.dtype, LINK_FLOATS, PRODUCT_SIZE)
        .map_err(|error| Error::Device(error.to_string()))
}

/// Measures the matrix products of the GPU of a config. No kernel is compiled.
pub(super) fn product_rate(config: &Config) -> Result<f64, Error> {
    let driver = driver(config, config.device.gpus()[0], None)?;
    rates::measure_product(&driver, config.device.dtype, PRODUCT_SIZE)
        .map_err(|error| Error::Device(error.to_string()))
}

/// Kernels without memory, to measure the workspace.
pub(super) fn kernels_to_plan() -> Box<dyn Kernels> {
    Box::new(CudaKernels::to_plan())
}

/// Device memory outside the plan's slots, in floats: a mark, buffers in which numbers are packed,
/// the metadata of a micro-batch, and the workspace of matrix products.
pub(super) fn overhead(config: &Config, rows: Rows) -> usize {
    overhead_with(PackBuffers::of(config), rows)
}

fn overhead_with(buffers: PackBuffers, rows: Rows) -> usize {
    let metadata = DeviceMetadata::len(rows).next_multiple_of(16);
    MARK + buffers.floats() + metadata + PRODUCT_WORKSPACE
}

/// Host memory in floats, for metadata that is being copied to the device.
pub(super) fn overhead_on_host(rows: Rows) -> usize {
    IN_FLIGHT * DeviceMetadata::len(rows).next_multiple_of(16)
}

/// A GPU of a config, with the memory that was planned.
pub(super) fn open(
    config: &Config,
    ordinal: usize,
    model: &Model,
    floats: usize,
    overhead: View,
) -> Result<Box<dyn Device>, Error> {
    let layers = model.layers.iter().filter_map(ModelLayer::stack);
    let custom = layers.flat_map(|layer| layer.custom_kernels());
    let driver = driver(config, ordinal, Some(&custom.collect::<Vec<_>>()))?;
    let chosen = Chosen::read(config.device.kernel_cache.as_deref(), driver.product_library());
    let made = Cuda::new(driver, floats, overhead, PackBuffers::of(config));
    let refused = |error: BoxedError| Error::NoDevice(error.to_string());
    let mut made = made.map_err(refused)?;
    made.chosen = chosen;
    Ok(Box::new(made))
}

/// The driver's device. `kernels` are compiled beside the built-in ones; `None`: no kernel is, as
/// for measurements of products.
fn driver(
    config: &Config,
    ordinal: usize,
    kernels: Option<&[CustomKernel]>,
) -> Result<Arc<dyn Driver>, Error> {
    let refused = |error: BoxedError| Error::NoDevice(error.to_string());
    #[cfg(test)]
    if let Some(emulated) = emulated::asked_for(kernels.unwrap_or_default(), &config.device) {
        return emulated.map_err(refused);
    }
    let real = real::Real::open(&config.device, ordinal, kernels);
    Ok(Arc::new(real.map_err(refused)?))
}

impl Device for Cuda {
    fn upload(&self, to: View, from: &[f32]) -> Result<(), BoxedError> {
        let bytes = size_of_val(from);
        let from = from.as_ptr().cast();
        self.copy_in(Stream::Upload, self.address(to), from, bytes)
    }

    fn upload_rows(&self, to: View, from: &[f32], rows: ByteRows) -> Result<(), BoxedError> {
        self.copy_rows_in(self.address(to), from, rows)
    }

    fn download(&self, to: &mut [f32], from: View) -> Result<(), BoxedError> {
        let bytes = size_of_val(to);
        self.copy_out(to.as_mut_ptr().cast(), self.address(from), bytes)
    }

    fn for_peers(&self, view: View) -> PeerView {
        PeerView { context: self.driver.context(), at: self.address(view) }
    }

    fn copy_from_peer(&self, to: View, from: PeerView) -> Result<(), BoxedError> {
        let bytes = to.len() * to.dtype.size();
        self.driver.copy_from_peer(Stream::Peer, self.address(to), from, bytes)
    }

    fn upload_packed(&self, to: View, from: &[f32], packing: Packing) -> Result<(), BoxedError> {
        self.copy_packed_in(to, from, packing)
    }

    fn download_packed(
        &self,
        to: &mut [f32],
        from: View,
        packing: Packing,
    ) -> Result<(), BoxedError> {
        self.copy_packed_out(to, from, packing)
    }

    fn read_back(&self, view: View) -> Result<Vec<f32>, BoxedError> {
        driver::read(&self.driver, self.address(view), view.len())
    }

    fn is_finite(&self, view: View, mark: i64) -> Result<bool, BoxedError> {
        let queue = self.queue();
        let marked = self.address(self.marked);
        let count = long(view.len());
        let x = Place { at: self.address(view), dtype: view.dtype };
        queue.each("mark_non_finite", view.len(), NEIGHBOURS, &[&marked, &x, &count, &mark]);
        queue.end()?;
        Ok(true)
    }

    fn first_non_finite(&self) -> Result<Option<i64>, BoxedError> {
        let mark = self.read_back(self.marked)?;
        let mark: i64 = bytemuck::cast_slice(&mark)[0];
        Ok((mark != 0).then_some(mark))
    }

    fn time_kernels(&self) {
        self.times.begin();
    }

    fn take_kernel_times(&self) -> Result<Vec<KernelTime>, BoxedError> {
        self.times.take(&*self.driver)
    }

    fn time_products(&self) {
        self.chosen.begin();
    }

    fn store_products(&self) -> Result<Option<ProductTable>, BoxedError> {
        self.chosen.store(&*self.driver)
    }

    fn compute(
        &self,
        batch: &BatchMetadata<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<usize, BoxedError> {
        let metadata = self.send_metadata(batch)?;
        let kernels = CudaKernels::on(self.memory, metadata, self.queue());
        let used = run(&kernels);
        kernels.end()?;
        Ok(used)
    }

    fn shared(&self) -> Option<&Arc<Arena>> {
        None
    }

    fn pin(&self, memory: &mut [f32]) {
        self.pinned.pin(&*self.driver, memory);
    }

    fn pinned_bytes(&self) -> u64 {
        self.pinned.bytes()
    }

    fn take_warnings(&self) -> Vec<String> {
        let of_products = self.ways.take_warnings().into_iter().chain(self.chosen.take_warnings());
        self.pinned.take_warning().into_iter().chain(of_products).collect()
    }

    fn finish(&self) {
        self.driver.finish();
    }

    fn issues(&self) -> bool {
        true
    }

    fn begins(&self, operation: &Operation) -> Result<(), BoxedError> {
        let on = Stream::of(operation.work().lane());
        for fence in operation.waits().iter().filter(|fence| fence.reached().is_none()) {
            // An operation without an event has just ended.
            let event = self.issued().get(&fence.operation()).cloned();
            if let Some(event) = event {
                self.driver.wait(on, event.id)?;
            }
        }
        let begin = Event::record(&self.driver, on)?;
        self.begun.lock().expect("nothing panics inside")[on as usize] = Some(begin);
        Ok(())
    }

    fn ends(
        &self,
        operation: &Operation,
        value: f64,
        now: Duration,
    ) -> Result<Pending, BoxedError> {
        let on = Stream::of(operation.work().lane());
        let begun = self.begun.lock().expect("nothing panics inside")[on as usize].take();
        let begun = begun.expect("what ends has begun");
        let ended = Event::record(&self.driver, on)?;
        let number = operation.number();
        self.issued().insert(number, ended.clone());
        let driver = self.driver.clone();
        let issued = self.issued.clone();
        let clock = self.clock.clone();
        let origin = Instant::now().checked_sub(now).expect("lanes began after time did");
        Ok(Box::new(move || {
            let times = driver.synchronize(ended.id).and_then(|()| {
                let mut clock = clock.lock().expect("nothing panics inside");
                Ok([clock.time(&*driver, &begun)?, clock.reached(&*driver, &ended)?])
            });
            issued.lock().expect("nothing panics inside").remove(&number);
            let [begin, end] = times?.map(|time| time.saturating_duration_since(origin));
            Ok(Done { begin, end: end.max(begin), value })
        }))
    }
}

impl Cuda {
    /// Sends a micro-batch's metadata to the device, unless it has the same already. A kernel reads
    /// it from pinned memory: a copy would wait for the blocks on their way.
    fn send_metadata(&self, batch: &BatchMetadata<'_>) -> Result<DeviceMetadata, BoxedError> {
        let to = self.address(self.metadata);
        let mut current = self.current.lock().expect("nothing panics inside");
        let mut words = Vec::new();
        DeviceMetadata::write(batch, &mut words);
        if words != current.words {
            let place = current.changes % IN_FLIGHT * self.metadata.len();
            // SAFETY: fewer operations are in flight than there are places, so none still reads
            // this one.
            let host = unsafe { self.staging.write(View::floats(place, words.len())) };
            bytemuck::cast_slice_mut(host).copy_from_slice(&words);
            let from = host.as_ptr().cast::<u8>();
            // A place may lie in two pinned parts.
            let last = size_of_val(host) - 1;
            let mapped = self.driver.mapped(from);
            let mapped = mapped.filter(|at| {
                self.driver.mapped(from.wrapping_add(last)) == Some(at + last as Address)
            });
            match mapped {
                Some(from) => {
                    let count = int(words.len());
                    let queue = self.queue();
                    queue.each("copy_words", words.len(), 1, &[&to, &from, &count]);
                    queue.end()?;
                }
                None => self.copy_in(Stream::Compute, to, from, size_of_val(host))?,
            }
            (current.words, current.changes) = (words, current.changes + 1);
        }
        Ok(DeviceMetadata::of(batch, to))
    }

    fn issued(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Event>>> {
        self.issued.lock().expect("nothing panics inside")
    }
}

impl Drop for Cuda {
    /// The host's memory is freed next, so no copy may still use it.
    fn drop(&mut self) {
        self.driver.finish();
        self.pinned.unpin(&*self.driver);
    }
}
