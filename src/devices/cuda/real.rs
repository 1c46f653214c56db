//! NVIDIA's driver, through cudarc.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::Path;
use std::sync::Mutex;

use cudarc::driver::{result, sys};
use l2l_actors::BoxedError;

use super::compile::{self, Unit};
use super::driver::{
    Address, Algorithm, Alignment, CopyRows, Driver, Kind, Launch, Product, ProductLibrary,
    STREAMS, Stream,
};
use super::libraries;
use super::product::Products;
use super::texts::{self, Target};
use crate::config::DeviceConfig;
use crate::devices::{Gpu, Library, PeerView};
use crate::kernels::CustomKernel;

/// Bytes of shared memory that a block may have without asking.
const SHARED: u32 = 48 << 10;

/// The milliseconds from one event to another.
type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// A device of the driver, in the process's own context.
pub(super) struct Real {
    device: sys::CUdevice,
    name: String,
    target: Target,
    context: sys::CUcontext,
    streams: [sys::CUstream; STREAMS],
    modules: Vec<sys::CUmodule>,
    kernels: HashMap<String, (sys::CUfunction, Vec<Kind>)>,
    products: Option<Products>,
    memory: Mutex<Vec<Address>>,
    /// Events that were freed, to be used again.
    events: Mutex<Vec<u64>>,
    /// Contexts of other devices that it was given access to, if it can have it.
    peers: Mutex<Vec<usize>>,
}

// SAFETY: the driver's handles may be used by any thread whose context is this one, which every
// call sees to.
unsafe impl Send for Real {}
// SAFETY: as above.
unsafe impl Sync for Real {}

/// All devices of the driver, which is there.
pub(in crate::devices) fn gpus() -> Result<Vec<Gpu>, BoxedError> {
    result::init()?;
    let all = 0..result::device::get_count()?;
    all.map(|ordinal| {
        let device = result::device::get(ordinal)?;
        Ok(Gpu {
            name: result::device::get_name(device)?,
            architecture: architecture(device)?,
            // SAFETY: the device is there.
            memory: unsafe { result::device::total_mem(device)? } as u64,
        })
    })
    .collect()
}

fn architecture(device: sys::CUdevice) -> Result<u32, BoxedError> {
    use sys::CUdevice_attribute_enum as Attribute;
    // SAFETY: the device is there.
    let [major, minor] = unsafe {
        [
            result::device::get_attribute(
                device,
                Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            )?,
            result::device::get_attribute(
                device,
                Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )?,
        ]
    };
    Ok((10 * major + minor) as u32)
}

/// The bytes that are free on a device, beside the context of this process. `None`: the device
/// has no memory but the host's.
pub(super) fn free_memory(ordinal: usize) -> Result<Option<u64>, BoxedError> {
    result::init()?;
    let device = result::device::get(ordinal as i32)?;
    let integrated = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_INTEGRATED;
    // SAFETY: the device is there.
    if unsafe { result::device::get_attribute(device, integrated)? } != 0 {
        return Ok(None);
    }
    // SAFETY: the device is there; its context is released below, and whoever uses one enters it.
    let free = unsafe {
        let context = result::primary_ctx::retain(device)?;
        let free = result::ctx::set_current(context).and_then(|()| result::mem_get_info());
        result::primary_ctx::release(device)?;
        free
    };
    Ok(Some(free?.0 as u64))
}

/// The error of memory that is not there when a run asks for it.
pub(super) fn no_memory(needed: usize, free: usize) -> BoxedError {
    format!(
        "needs {needed} bytes of the device's memory, of which {free} are free: end the programs \
         that hold the rest, or set device.memory to less"
    )
    .into()
}

impl Real {
    /// Loads the libraries, and makes streams. `kernels` are compiled beside the built-in ones;
    /// `None`: the device gets no kernels.
    ///
    /// # Errors
    /// A library or a device is missing. The error names it, and says what to do.
    pub(super) fn open(
        config: &DeviceConfig,
        ordinal: usize,
        kernels: Option<&[CustomKernel]>,
    ) -> Result<Real, BoxedError> {
        let DeviceConfig { cuda_libraries, kernel_cache, .. } = config;
        let folder = cuda_libraries.as_deref();
        let cache = kernel_cache.as_deref();
        let [_, nvrtc, _] = libraries::load_all(folder)?;
        let gpus = gpus()?;
        let Some(gpu) = gpus.get(ordinal) else {
            return Err(format!(
                "{} is {ordinal}, and the driver has {} devices",
                if config.ordinals.is_some() { "one of device.ordinals" } else { "device.ordinal" },
                gpus.len()
            )
            .into());
        };
        let target = Target::new(config.dtype, gpu.architecture, &gpu.name)?;
        let device = result::device::get(ordinal as i32)?;
        // SAFETY: the device is there; its context is let go of in `drop`.
        let context = unsafe { result::primary_ctx::retain(device)? };
        let mut real = Real {
            device,
            name: gpu.name.clone(),
            target,
            context,
            streams: [std::ptr::null_mut(); STREAMS],
            modules: Vec::new(),
            kernels: HashMap::new(),
            products: None,
            memory: Mutex::default(),
            events: Mutex::default(),
            peers: Mutex::default(),
        };
        real.enter()?;
        for stream in &mut real.streams {
            *stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        }
        if let Some(custom) = kernels {
            real.load_kernels(&nvrtc, cache, custom)?;
        }
        real.products = Some(Products::new()?);
        Ok(real)
    }

    /// Makes this thread's calls those of the device's context.
    fn enter(&self) -> Result<(), BoxedError> {
        // SAFETY: the context is there.
        checked(unsafe { result::ctx::set_current(self.context) })
    }

    fn load_kernels(
        &mut self,
        nvrtc: &Library,
        cache: Option<&Path>,
        custom: &[CustomKernel],
    ) -> Result<(), BoxedError> {
        let target = self.target;
        let texts = texts::all(custom, target)?;
        let mut units = Vec::new();
        for &(name, text, _) in &texts {
            let parts = texts::parts(text, target).into_iter();
            units.extend(parts.map(|part| Unit { name, text, part }));
        }
        let codes = compile::cubins(&units, target, nvrtc, cache)?;
        for (_, text, declared) in texts {
            let first = self.modules.len();
            let of_text = units.iter().zip(&codes).filter(|(unit, _)| unit.text == text);
            for (_, code) in of_text {
                // SAFETY: the code comes from the compiler, or from the cache with its digest.
                self.modules.push(unsafe { result::module::load_data(code.as_ptr().cast())? });
            }
            for kernel in declared {
                let function = function(&self.modules[first..], &kernel.name)?;
                self.kernels.insert(kernel.name, (function, kernel.parameters));
            }
        }
        Ok(())
    }

    fn products(&self) -> &Products {
        self.products.as_ref().expect("it is made with the device")
    }

    fn stream(&self, on: Stream) -> sys::CUstream {
        self.streams[on as usize]
    }
}

/// The function of a kernel, which one of these modules has.
fn function(modules: &[sys::CUmodule], kernel: &str) -> Result<sys::CUfunction, BoxedError> {
    let mut refused = format!("no text has the kernel {kernel}").into();
    for &module in modules {
        // SAFETY: the module is there.
        match unsafe { result::module::get_function(module, CString::new(kernel)?) } {
            Ok(function) => return Ok(function),
            Err(error) => refused = error.into(),
        }
    }
    Err(refused)
}

fn checked(result: Result<(), result::DriverError>) -> Result<(), BoxedError> {
    Ok(result?)
}

fn event_of(id: u64) -> sys::CUevent {
    id as usize as sys::CUevent
}

// SAFETY of all calls to the driver: its handles are there for as long as `self` is, and addresses
// come from `allocate`, or are the host's, which the caller of a copy keeps until it is done.
impl Driver for Real {
    fn target(&self) -> Target {
        self.target
    }

    fn allocate(&self, bytes: usize) -> Result<Address, BoxedError> {
        self.enter()?;
        let (free, _) = result::mem_get_info()?;
        if bytes > free {
            return Err(no_memory(bytes, free));
        }
        // SAFETY: see above.
        unsafe {
            let memory = result::malloc_sync(bytes.max(1))?;
            self.memory.lock().expect("nothing panics inside").push(memory);
            result::memset_d8_async(memory, 0, bytes, self.stream(Stream::Compute))?;
            result::stream::synchronize(self.stream(Stream::Compute))?;
            Ok(memory)
        }
    }

    fn pin(&self, at: *mut u8, bytes: usize) -> Result<(), BoxedError> {
        self.enter()?;
        let portable_and_mapped = 1 | 2;
        // SAFETY: see above.
        checked(unsafe {
            sys::cuMemHostRegister_v2(at.cast(), bytes, portable_and_mapped).result()
        })
    }

    fn mapped(&self, at: *const u8) -> Option<Address> {
        self.enter().ok()?;
        let mut address = 0;
        // SAFETY: see above; memory that is not pinned is refused.
        let found = unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut address, at.cast_mut().cast(), 0).result()
        };
        found.ok().map(|()| address)
    }

    fn unpin(&self, at: *mut u8) {
        // SAFETY: see above. What was not pinned is not unpinned.
        _ = self
            .enter()
            .and_then(|()| unsafe { Ok(sys::cuMemHostUnregister(at.cast()).result()?) });
    }

    fn copy_in(
        &self,
        on: Stream,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        self.enter()?;
        // SAFETY: see above.
        checked(unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream(on)).result()
        })
    }

    fn copy_rows_in(&self, on: Stream, copy: &CopyRows) -> Result<(), BoxedError> {
        self.enter()?;
        let &CopyRows { to, from, pitch: [own, of_host], rows, len } = copy;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: from.cast(),
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: of_host,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: own,
            WidthInBytes: len,
            Height: rows,
        };
        // SAFETY: see above.
        checked(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream(on)).result() })
    }

    fn copy_out(
        &self,
        on: Stream,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        self.enter()?;
        // SAFETY: see above.
        checked(unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream(on)).result()
        })
    }

    fn context(&self) -> usize {
        self.context.expose_provenance()
    }

    fn copy_from_peer(
        &self,
        on: Stream,
        to: Address,
        from: PeerView,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        self.enter()?;
        let peer = std::ptr::with_exposed_provenance_mut(from.context);
        let mut peers = self.peers.lock().expect("nothing panics inside");
        if !peers.contains(&from.context) {
            // Where the devices cannot reach each other, the driver copies by way of the host.
            // SAFETY: the other device's context is there as long as the ring.
            _ = unsafe { sys::cuCtxEnablePeerAccess(peer, 0).result() };
            peers.push(from.context);
        }
        let stream = self.stream(on);
        // SAFETY: see above; both devices are kept until the copy is done.
        checked(unsafe {
            sys::cuMemcpyPeerAsync(to, self.context, from.at, peer, bytes, stream).result()
        })
    }

    fn copy(&self, on: Stream, to: Address, from: Address, bytes: usize) -> Result<(), BoxedError> {
        self.enter()?;
        // SAFETY: see above.
        checked(unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream(on)) })
    }

    fn launch(&self, on: Stream, launch: &Launch<'_>) -> Result<(), BoxedError> {
        self.enter()?;
        let &Launch { kernel, grid: [x, y, z], block: [i, j, k], shared, .. } = launch;
        let (function, parameters) = self.kernels.get(kernel).ok_or("no kernel is called that")?;
        launch.check(parameters)?;
        let mut arguments: Vec<*mut c_void> = launch.pointers();
        // SAFETY: see above; the arguments are what the kernel's text declares, by the check.
        unsafe {
            if shared > SHARED {
                let what =
                    sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                result::function::set_function_attribute(*function, what, shared as i32)?;
            }
            let grid = (x, y, z);
            let block = (i, j, k);
            let stream = self.stream(on);
            Ok(result::launch_kernel(*function, grid, block, shared, stream, &mut arguments)?)
        }
    }

    fn product(
        &self,
        on: Stream,
        product: &Product,
        alignment: Alignment,
        algorithm: Option<Algorithm>,
        workspace: Address,
    ) -> Result<bool, BoxedError> {
        self.enter()?;
        self.products().run(product, alignment, algorithm, workspace, self.stream(on))
    }

    fn algorithms(
        &self,
        product: &Product,
        alignment: Alignment,
    ) -> Result<Vec<Algorithm>, BoxedError> {
        self.enter()?;
        self.products().algorithms(product, alignment)
    }

    fn product_library(&self) -> ProductLibrary {
        let gpu = self.name.clone();
        let cublaslt = Products::version();
        ProductLibrary { gpu, architecture: self.target.architecture, cublaslt }
    }

    fn record(&self, on: Stream) -> Result<u64, BoxedError> {
        self.enter()?;
        let used = self.events.lock().expect("nothing panics inside").pop();
        let event = match used {
            Some(event) => event_of(event),
            None => result::event::create(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC)?,
        };
        // SAFETY: see above.
        unsafe { result::event::record(event, self.stream(on))? };
        Ok(event as usize as u64)
    }

    fn wait(&self, on: Stream, event: u64) -> Result<(), BoxedError> {
        self.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: see above.
        checked(unsafe { result::stream::wait_event(self.stream(on), event_of(event), flags) })
    }

    fn synchronize(&self, event: u64) -> Result<(), BoxedError> {
        self.enter()?;
        // SAFETY: see above.
        checked(unsafe { result::event::synchronize(event_of(event)) })
    }

    fn finish(&self) {
        for stream in self.streams {
            // SAFETY: see above.
            _ = self.enter().and_then(|()| unsafe { Ok(result::stream::synchronize(stream)?) });
        }
    }

    fn seconds(&self, from: u64, to: u64) -> Result<f64, BoxedError> {
        self.enter()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: see above; every driver has this function, and its newer name only CUDA 13's.
        unsafe {
            let elapsed = sys::culib().get::<Elapsed>(b"cuEventElapsedTime")?;
            elapsed(&mut milliseconds, event_of(from), event_of(to)).result()?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }

    fn forget(&self, event: u64) {
        self.events.lock().expect("nothing panics inside").push(event);
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        self.products = None;
        // SAFETY: each was made, is destroyed once, and is not in use: all streams were waited for.
        unsafe {
            for event in self.events.get_mut().expect("nothing panics inside").drain(..) {
                _ = result::event::destroy(event_of(event));
            }
            for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
                _ = result::stream::destroy(stream);
            }
            for module in self.modules.drain(..) {
                _ = result::module::unload(module);
            }
            for memory in self.memory.get_mut().expect("nothing panics inside").drain(..) {
                _ = result::free_sync(memory);
            }
            _ = result::primary_ctx::release(self.device);
        }
    }
}
