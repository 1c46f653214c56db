//! A driver without a device: streams are threads that run the kernels' own texts, compiled for
//! this machine. It proves, where there is no GPU, which kernels a run launches, on which memory
//! and in which order.
//!
//! The folder is outside of `src`, which holds the code that runs on a GPU. It is compiled as a
//! module of the library's own tests (`src/devices/cuda/mod.rs`), and not as a crate, because it
//! implements a private trait: `Driver` would have to be public for a crate.

mod limits;
mod product;
mod queues;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};

use l2l_actors::BoxedError;
use libloading::Library;
use tokio::runtime::Runtime;

pub(super) use limits::{Limits, limit};
pub(super) use queues::{Direction, count_copies};
use queues::{Engines, Flag, Task};

use super::driver::{
    Address, Algorithm, Alignment, CopyRows, Driver, Launch, Product, ProductLibrary, STREAMS,
    Stream,
};
use super::real::no_memory;
use super::texts::{self, Declared, PRELUDE, Target};
use crate::blocking::inherited::BEGIN;
use crate::config::DeviceConfig;
use crate::devices::PeerView;
use crate::kernels::CustomKernel;
use crate::tensor::Dtype;

/// The architecture that it has, unless it is [limited](Limits).
const ARCHITECTURE: u32 = 90;

/// From this architecture on, the tensor cores of a warp multiply without quad pairs.
const TURING: u32 = 75;

/// Bytes that the driver's memory is aligned to.
const ALIGNED: usize = 256;

/// Bytes that an emulated GPU has free beside those of the GPU before it.
const MORE_FREE: u64 = 1 << 30;

/// Bytes of a page of the host.
const PAGE: usize = 4096;

type Emulate =
    unsafe extern "C" fn(*const c_char, *const u32, *const u32, u32, *mut *mut c_void) -> i32;

/// The kernels by name, each with its library and its parameters.
type Kernels = HashMap<String, (Arc<Library>, Declared)>;

/// Builds the kernels; `None` if there is no compiler.
fn kernels(custom: &[CustomKernel], target: Target) -> Option<Kernels> {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("without c++ the CUDA device is not tested");
        return None;
    }
    // Tests run side by side: one of them builds.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().expect("a text that does not compile fails all tests");
    let texts = texts::all(custom, target).expect("kernels that are declared");
    let built: Vec<PathBuf> = std::thread::scope(|scope| {
        let builds =
            texts.iter().map(|(name, text, _)| scope.spawn(move || build(name, text, target)));
        let builds: Vec<_> = builds.collect();
        builds.into_iter().map(|build| build.join().expect("it compiles")).collect()
    });
    let mut all = HashMap::new();
    for ((.., declared), path) in texts.into_iter().zip(built) {
        // SAFETY: they are ours, and do nothing when they are loaded.
        let library = Arc::new(unsafe { Library::new(path) }.expect("it was built"));
        all.extend(declared.into_iter().map(|one| (one.name.clone(), (library.clone(), one))));
    }
    Some(all)
}

/// Compiles a text, unless it was before.
fn build(name: &str, text: &str, target: Target) -> PathBuf {
    let dtype = target.dtype;
    let declared = texts::declared(text, target).expect("kernels that are declared");
    let table = declared.into_iter().map(|one| format!("EMULATED({})\n", one.name));
    let emulator = include_str!("../kernels/emulator.h");
    // Attention has other instructions on sm_70.
    let is_sm_70 = target.architecture < TURING && text.contains("defined SM_70");
    let define = if is_sm_70 { "#define SM_70" } else { "" };
    let all = [define, emulator, PRELUDE, text, &table.collect::<String>()].join("\n");
    let digest = xxhash_rust::xxh3::xxh3_64(all.as_bytes());
    let here = std::env::current_exe().expect("a test runs from a file");
    let folder = here.parent().expect("in a folder").to_path_buf();
    let path = folder.join(format!("emulated-{name}-{dtype:?}-{digest:016x}.so"));
    if !path.exists() {
        let own = format!("{name}-{dtype:?}-{}", std::process::id());
        let source = folder.join(format!("{own}.cpp"));
        let made = folder.join(format!("{own}.so"));
        std::fs::write(&source, all).expect("room on a disk");
        let run = |arguments: &[&str], paths: &[&Path]| {
            let mut command = Command::new("c++");
            command.args(arguments).args(paths).output().expect("a compiler")
        };
        let arguments = ["-std=c++20", "-O2", texts::element(dtype), "-shared", "-fPIC", "-o"];
        let output = run(&arguments, &[&made, &source]);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        std::fs::rename(&made, &path).expect("a folder of ours");
        std::fs::remove_file(&source).expect("a file of ours");
    }
    path
}

thread_local! {
    /// Of the drivers that a thread makes: calls until one fails.
    static LEFT: RefCell<Arc<AtomicI64>> = RefCell::new(Arc::new(AtomicI64::new(i64::MAX)));

    /// Whether a thread's GPUs are emulated.
    static ASKED_FOR: Cell<bool> = const { Cell::new(false) };
}

/// Emulates GPUs that this thread asks for from now on. False: there is no compiler.
pub(crate) fn instead() -> bool {
    ASKED_FOR.set(true);
    let target = Target { dtype: Dtype::F32, architecture: ARCHITECTURE };
    kernels(&[], target).is_some()
}

/// A tokio runtime. Threads that work for it ask for GPUs as this one does.
pub(super) fn runtime() -> Runtime {
    let asked_for = ASKED_FOR.get();
    let left = LEFT.with_borrow(Arc::clone);
    let limits = limits::current();
    let copies = queues::copies();
    let as_this_one = move || {
        limit(limits);
        queues::count_copies_to(copies.clone());
        ASKED_FOR.set(asked_for);
        LEFT.set(left.clone());
    };
    BEGIN.set(Some(Arc::new(as_this_one)));
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

/// An emulated driver, if this thread asks for one.
pub(super) fn asked_for(
    custom: &[CustomKernel],
    config: &DeviceConfig,
) -> Option<Result<Arc<dyn Driver>, BoxedError>> {
    let made = ASKED_FOR.get().then(|| Emulated::new(custom, config))?;
    match made {
        Ok(made) => made.map(|made| Ok(Arc::new(made) as Arc<dyn Driver>)),
        Err(error) => Some(Err(error)),
    }
}

/// The bytes that are free on an emulated GPU, if this thread asks for one. GPUs have more of them
/// the higher their ordinal is.
pub(super) fn free_memory(ordinal: usize) -> Option<Option<u64>> {
    let of_first = limits::current().free;
    ASKED_FOR.get().then(|| of_first.map(|free| free as u64 + (ordinal as u64) * MORE_FREE))
}

/// An emulated driver with the built-in kernels alone.
pub(super) fn of(dtype: Dtype) -> Arc<dyn Driver> {
    let config = DeviceConfig { dtype, ..DeviceConfig::default() };
    asked_for(&[], &config).expect("it was asked for").expect("its architecture has the dtype")
}

/// Drivers that this thread makes let `calls` calls pass, and fail all later ones.
pub(super) fn fail_after(calls: i64) {
    LEFT.with_borrow(|left| left.store(calls, Relaxed));
}

/// Calls that were made since [`fail_after`] of that many.
pub(super) fn calls(of: i64) -> i64 {
    of - LEFT.with_borrow(|left| left.load(Relaxed))
}

/// An emulated driver with one device.
struct Emulated {
    target: Target,
    kernels: Kernels,
    memory: Mutex<Vec<Box<[u64]>>>,
    streams: [mpsc::Sender<Task>; STREAMS],
    engines: Arc<Engines>,
    events: Mutex<HashMap<u64, Arc<Flag>>>,
    next: AtomicU64,
    /// What went wrong on a stream, as a device has it: all that comes after fails.
    broken: Arc<Mutex<Option<String>>>,
    /// Calls until one fails.
    left: Arc<AtomicI64>,
    limits: Limits,
    /// Pinned memory of the host: where it begins and ends.
    pinned: Mutex<Vec<[usize; 2]>>,
}

impl Emulated {
    /// `None` where there is no compiler.
    fn new(custom: &[CustomKernel], config: &DeviceConfig) -> Result<Option<Emulated>, BoxedError> {
        let limits = limits::current();
        let architecture = limits.architecture.unwrap_or(ARCHITECTURE);
        let target = Target::new(config.dtype, architecture, "emulated")?;
        Ok(kernels(custom, target).map(|kernels| Emulated {
            target,
            kernels,
            memory: Mutex::default(),
            streams: [(); STREAMS].map(|()| queues::start()),
            engines: Arc::new(Engines::new()),
            events: Mutex::default(),
            next: AtomicU64::new(1),
            broken: Arc::default(),
            left: LEFT.with_borrow(Arc::clone),
            limits,
            pinned: Mutex::default(),
        }))
    }

    fn call(&self) -> Result<(), BoxedError> {
        if self.left.fetch_sub(1, Relaxed) <= 0 {
            return Err("the driver was told to fail".into());
        }
        match &*self.broken.lock().expect("nothing panics inside") {
            Some(what) => Err(what.clone().into()),
            None => Ok(()),
        }
    }

    fn queue(&self, on: Stream, task: impl FnOnce() + Send + 'static) -> Result<(), BoxedError> {
        self.call()?;
        let broken = self.broken.clone();
        let runs = move || {
            if broken.lock().expect("nothing panics inside").is_none() {
                task();
            }
        };
        self.streams[on as usize].send(Box::new(runs)).map_err(|error| error.to_string().into())
    }

    /// Refuses memory of the host of which a part is pinned as one and a part is not.
    fn check_host(&self, at: usize, bytes: usize) -> Result<(), BoxedError> {
        let end = at + bytes;
        let pinned = self.pinned.lock().expect("nothing panics inside");
        let is_cut = |&[from, to]: &[usize; 2]| from < end && at < to && (at < from || to < end);
        match pinned.iter().any(is_cut) {
            true => Err("a copy crosses the end of pinned memory".into()),
            false => Ok(()),
        }
    }

    /// Copies, by an engine if it is between the host and the device.
    fn copy_by(
        &self,
        engine: Option<Direction>,
        on: Stream,
        [to, from]: [Address; 2],
        bytes: usize,
    ) -> Result<(), BoxedError> {
        // SAFETY: the caller keeps both until the copy is done (`Driver`).
        let copy = move || unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        let engines = self.engines.clone();
        self.queue(on, move || match engine {
            Some(direction) => engines.copy(on, direction, copy),
            None => copy(),
        })
    }

    fn flag(&self, event: u64) -> Arc<Flag> {
        self.events.lock().expect("nothing panics inside")[&event].clone()
    }
}

impl Drop for Emulated {
    /// The memory goes next.
    fn drop(&mut self) {
        self.finish();
    }
}

impl Driver for Emulated {
    fn target(&self) -> Target {
        self.target
    }

    fn allocate(&self, bytes: usize) -> Result<Address, BoxedError> {
        self.call()?;
        if let Some(free) = self.limits.free.filter(|free| *free < bytes) {
            return Err(no_memory(bytes, free));
        }
        let mut memory = vec![0_u64; bytes.div_ceil(8).max(1) + ALIGNED / 8].into_boxed_slice();
        let at = (memory.as_mut_ptr().addr() as Address).next_multiple_of(ALIGNED as Address);
        self.memory.lock().expect("nothing panics inside").push(memory);
        Ok(at)
    }

    fn pin(&self, at: *mut u8, bytes: usize) -> Result<(), BoxedError> {
        self.call()?;
        let mut pinned = self.pinned.lock().expect("nothing panics inside");
        let begin = at.addr();
        let end = at.addr() + bytes;
        let all: usize = pinned.iter().map(|[begin, end]| end - begin).sum();
        if self.limits.pinned.is_some_and(|most| all + bytes > most) {
            return Err("out of memory that can be pinned".into());
        }
        let pages = |at: usize| at / PAGE;
        let is_free =
            |&[from, to]: &[usize; 2]| pages(end - 1) < pages(from) || pages(to - 1) < pages(begin);
        if !pinned.iter().all(is_free) {
            return Err("a page of it is pinned already".into());
        }
        pinned.push([begin, end]);
        Ok(())
    }

    fn mapped(&self, at: *const u8) -> Option<Address> {
        let pinned = self.pinned.lock().expect("nothing panics inside");
        let is_there = pinned.iter().any(|[begin, end]| (*begin..*end).contains(&at.addr()));
        is_there.then_some(at as Address)
    }

    fn unpin(&self, at: *mut u8) {
        let mut pinned = self.pinned.lock().expect("nothing panics inside");
        let index = pinned.iter().position(|[begin, _]| *begin == at.addr());
        pinned.swap_remove(index.expect("it was pinned"));
    }

    fn copy_in(
        &self,
        on: Stream,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        self.check_host(from.addr(), bytes)?;
        self.copy_by(Some(Direction::ToDevice), on, [to, from as Address], bytes)
    }

    fn copy_rows_in(&self, on: Stream, copy: &CopyRows) -> Result<(), BoxedError> {
        let &CopyRows { to, from, pitch, rows, len } = copy;
        self.check_host(from.addr(), (rows - 1) * pitch[1] + len)?;
        (0..rows).try_for_each(|row| {
            let [own, of_host] = pitch.map(|pitch| (row * pitch) as Address);
            let places = [to + own, from as Address + of_host];
            self.copy_by(Some(Direction::ToDevice), on, places, len)
        })
    }

    fn copy_out(
        &self,
        on: Stream,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        self.check_host(to.addr(), bytes)?;
        self.copy_by(Some(Direction::ToHost), on, [to as Address, from], bytes)
    }

    fn context(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn copy_from_peer(
        &self,
        on: Stream,
        to: Address,
        from: PeerView,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        if from.context == self.context() {
            return Err("a device copies from itself as from another".into());
        }
        self.copy(on, to, from.at, bytes)
    }

    fn copy(&self, on: Stream, to: Address, from: Address, bytes: usize) -> Result<(), BoxedError> {
        self.copy_by(None, on, [to, from], bytes)
    }

    fn launch(&self, on: Stream, launch: &Launch<'_>) -> Result<(), BoxedError> {
        let &Launch { kernel, grid, block, shared, arguments } = launch;
        let known = self.kernels.get(kernel);
        let (library, declared) = known.unwrap_or_else(|| panic!("no kernel is {kernel}"));
        launch.check(&declared.parameters)?;
        if self.limits.fails == Some(kernel) || shared > limits::shared(self.target.architecture) {
            return Err("too many resources requested for launch".into());
        }
        let mut held: Vec<Vec<u64>> = arguments
            .iter()
            .map(|one| {
                let mut words = vec![0_u64; one.bytes().len().div_ceil(8)];
                bytemuck::cast_slice_mut(&mut words)[..one.bytes().len()]
                    .copy_from_slice(one.bytes());
                words
            })
            .collect();
        let library = library.clone();
        let broken = self.broken.clone();
        self.queue(on, move || {
            // SAFETY: the function is there, and of this type.
            let emulate = unsafe { library.get::<Emulate>(b"emulate") }.expect("it is exported");
            let name = CString::new(kernel).expect("a plain name");
            let mut pointers: Vec<*mut c_void> =
                held.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
            // SAFETY: the arguments have the types that the kernel declares.
            let failed = unsafe {
                let grid = grid.as_ptr();
                let block = block.as_ptr();
                emulate(name.as_ptr(), grid, block, shared, pointers.as_mut_ptr())
            };
            if failed != 0 {
                let mut broken = broken.lock().expect("nothing panics inside");
                *broken = Some(format!("{kernel} failed: {failed}"));
            }
        })
    }

    fn product(
        &self,
        on: Stream,
        product: &Product,
        relies_on: Alignment,
        algorithm: Option<Algorithm>,
        _: Address,
    ) -> Result<bool, BoxedError> {
        let product = *product;
        let limits = self.limits;
        if limits.refuses(&product.key(), relies_on, algorithm) {
            return Ok(false);
        }
        product::check(&product);
        // SAFETY: the caller says where the matrices are.
        self.queue(on, move || unsafe { product::multiply(&product, algorithm, &limits) })?;
        Ok(true)
    }

    fn algorithms(
        &self,
        product: &Product,
        relies_on: Alignment,
    ) -> Result<Vec<Algorithm>, BoxedError> {
        Ok(self.limits.algorithms(&product.key(), relies_on))
    }

    fn product_library(&self) -> ProductLibrary {
        let architecture = self.target.architecture;
        ProductLibrary { gpu: "emulated".into(), architecture, cublaslt: 1 }
    }

    fn record(&self, on: Stream) -> Result<u64, BoxedError> {
        let id = self.next.fetch_add(1, Relaxed);
        let flag = Arc::new(Flag::default());
        self.call()?;
        self.events.lock().expect("nothing panics inside").insert(id, flag.clone());
        // It is reached though the stream is broken.
        let reach: Task = Box::new(move || flag.reach());
        self.streams[on as usize].send(reach).map_err(|error| error.to_string())?;
        Ok(id)
    }

    fn wait(&self, on: Stream, event: u64) -> Result<(), BoxedError> {
        let flag = self.flag(event);
        self.queue(on, move || {
            flag.wait();
        })
    }

    fn synchronize(&self, event: u64) -> Result<(), BoxedError> {
        self.flag(event).wait();
        self.call()
    }

    fn finish(&self) {
        for stream in &self.streams {
            let flag = Arc::new(Flag::default());
            let reached = flag.clone();
            if stream.send(Box::new(move || reached.reach())).is_ok() {
                flag.wait();
            }
        }
    }

    fn seconds(&self, from: u64, to: u64) -> Result<f64, BoxedError> {
        self.call()?;
        let from = self.flag(from).wait();
        let to = self.flag(to).wait();
        let later = to.saturating_duration_since(from).as_secs_f64();
        Ok(if to < from { -from.duration_since(to).as_secs_f64() } else { later })
    }

    fn forget(&self, event: u64) {
        self.events.lock().expect("nothing panics inside").remove(&event);
    }
}
