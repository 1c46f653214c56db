//! An NVIDIA GPU as a device: lanes are streams, fences are events, memory is one allocation.
//!
//! Each stream is fed by its lane's thread, ahead of the device; nothing waits for the device but
//! the threads that tell how operations ended. CUDA is loaded when it is asked for.

mod attention;
mod check;
mod compile;
mod cross_entropy;
mod driver;
#[cfg(test)]
pub(crate) mod emulated;
mod kernels;
mod launches;
mod libraries;
mod linear;
mod notes;
mod product;
mod rates;
mod real;
#[cfg(test)]
pub(super) mod tests;
mod texts;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use l2l_actors::fence::Done;
use l2l_actors::ports::{Operation, Trouble};
use l2l_actors::threads::Pending;

use kernels::CudaKernels;
pub(super) use libraries::libraries;
pub(super) use real::gpus;

use self::driver::{Address, Driver, Event, Place, Stream, WORKSPACE};
use self::launches::FLOAT;
use self::notes::Notes;
use super::{Check, Device, GpuRates};
use crate::config::Config;
use crate::error::Error;
use crate::kernels::{BatchView, CustomKernel, Kernels, Rows};
use crate::models::{Model, Part};
use crate::tensor::Arena;
use crate::tensor::View;

/// BatchView-batches whose notes are on their way at once, at most.
const ON_THEIR_WAY: usize = 8;

/// Bytes that the workspace of products is aligned to.
const ALIGNED: usize = 256;

/// Floats for it.
const OF_PRODUCTS: usize = (ALIGNED + WORKSPACE) / FLOAT;

/// See the [module](self).
pub(super) struct Cuda {
    driver: Arc<dyn Driver>,
    memory: Address,
    /// Where notes go: in the device's memory, and on the host, [`ON_THEIR_WAY`] of them.
    notes: View,
    /// That of products.
    workspace: Address,
    desk: Arena,
    computed: Mutex<usize>,
    /// What is in the device's hands: the event at its end.
    taken: Arc<Mutex<HashMap<u64, Arc<Event>>>>,
    /// Where the operation that a stream is given now began.
    begun: Mutex<[Option<Arc<Event>>; 3]>,
    clock: Arc<Mutex<Clock>>,
    /// Memory of the host that is pinned.
    pinned: Mutex<Vec<usize>>,
}

/// The most that two clocks drift apart, as a share.
const DRIFT: f64 = 2e-4;

/// An event, and when it was.
struct Clock {
    event: Arc<Event>,
    at: Instant,
}

impl Clock {
    /// When an event was that is reached. The longer ago the known one, the less sure: a float counts
    /// milliseconds.
    fn time(&mut self, driver: &dyn Driver, event: &Arc<Event>) -> Result<Instant, Trouble> {
        let seconds = driver.seconds(self.event.id, event.id)?;
        let by = Duration::from_secs_f64(seconds.abs());
        let at = if seconds < 0.0 { self.at.checked_sub(by) } else { self.at.checked_add(by) };
        let at = at.unwrap_or(self.at);
        Ok(at)
    }

    /// The same of an event that was waited for until now, which is known from then on. The device's
    /// clock and the host's drift apart: it follows the host's, slowly, and is never ahead.
    fn reached(&mut self, driver: &dyn Driver, event: &Arc<Event>) -> Result<Instant, Trouble> {
        let (now, told) = (Instant::now(), self.time(driver, event)?);
        let passed = told.saturating_duration_since(self.at);
        if passed < Duration::from_secs(1) {
            return Ok(told.min(now));
        }
        let lag = now.saturating_duration_since(told);
        let at = (told + lag.min(passed.mul_f64(DRIFT))).min(now);
        *self = Clock { event: event.clone(), at };
        Ok(at)
    }
}

impl Cuda {
    /// With memory for so many floats, of which some are [`overhead`] what is computed.
    fn new(driver: Arc<dyn Driver>, floats: usize, overhead: View) -> Result<Cuda, Trouble> {
        let memory = driver.allocate(floats * FLOAT)?;
        let notes = overhead.part(0..overhead.len() - OF_PRODUCTS);
        let behind = memory + ((notes.at + notes.len()) * FLOAT) as Address;
        let all = View::floats(0, ON_THEIR_WAY * notes.len());
        let mut desk = Arena::new(all.len())?;
        // Rather early than late: nothing that waited for the device began before it ended.
        let at = Instant::now();
        let event = Event::record(&driver, Stream::Compute)?;
        driver.synchronize(event.id)?;
        let clock = Arc::new(Mutex::new(Clock { event, at }));
        let pinned = pin(&*driver, desk.values_mut(all)).into_iter().collect();
        Ok(Cuda {
            driver,
            memory,
            notes,
            workspace: behind.next_multiple_of(ALIGNED as Address),
            desk,
            computed: Mutex::default(),
            taken: Arc::default(),
            begun: Mutex::default(),
            clock,
            pinned: Mutex::new(pinned),
        })
    }

    fn address(&self, view: View) -> Address {
        Place { at: self.memory, dtype: view.dtype }.behind(view.at).at
    }
}

/// Pins memory of the host, where the system has that much to give; without, copies are slower.
fn pin(driver: &dyn Driver, memory: &mut [f32]) -> Option<usize> {
    let (at, bytes) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
    (bytes > 0 && driver.pin(at, bytes).is_ok()).then_some(at as usize)
}

/// Every kernel of the GPU that a config says, against the CPU's.
pub(super) fn check(config: &Config, seed: u64) -> Result<Vec<Check>, Error> {
    check::all(driver(config, &[])?, config.device.dtype, seed).map_err(Error::failed)
}

/// How fast the link and the products of the GPU are that a config says.
pub(super) fn rates(config: &Config) -> Result<GpuRates, Error> {
    rates::measure(&driver(config, &[])?, config.device.dtype, 64 << 20, 8192)
        .map_err(Error::failed)
}

/// Kernels without memory, to size the workspace.
pub(super) fn kernels_to_plan() -> Box<dyn Kernels> {
    Box::new(CudaKernels::to_plan())
}

/// Floats that it takes beside what is computed: for notes of a micro-batch, and for products.
pub(super) fn overhead(rows: Rows) -> usize {
    Notes::len(rows).next_multiple_of(16) + OF_PRODUCTS
}

/// Floats of the host where notes wait for their copies.
pub(super) fn overhead_on_host(rows: Rows) -> usize {
    ON_THEIR_WAY * Notes::len(rows).next_multiple_of(16)
}

/// The GPU that a config says, with memory as it was planned.
pub(super) fn open(
    config: &Config,
    model: &Model,
    floats: usize,
    overhead: View,
) -> Result<Box<dyn Device>, Error> {
    let own = model.parts.iter().flat_map(|part| match part {
        Part::Stack(layer) => layer.custom_kernels(),
        _ => Vec::new(),
    });
    let driver = driver(config, &own.collect::<Vec<_>>())?;
    let made = Cuda::new(driver, floats, overhead);
    let refused = |error| Error::refused(format_args!("device.kind = \"cuda\": {error}"));
    Ok(Box::new(made.map_err(refused)?))
}

fn driver(config: &Config, own: &[CustomKernel]) -> Result<Arc<dyn Driver>, Error> {
    #[cfg(test)]
    if let Some(emulated) = emulated::asked_for(own, config.device.dtype) {
        return Ok(emulated);
    }
    let real = real::Real::open(&config.device, own);
    let refused = |error| Error::refused(format_args!("device.kind = \"cuda\": {error}"));
    Ok(Arc::new(real.map_err(refused)?))
}

impl Device for Cuda {
    fn upload(&self, to: View, from: &[f32]) -> Result<(), Trouble> {
        let (bytes, from) = (size_of_val(from), from.as_ptr().cast());
        self.driver.copy_in(Stream::Upload, self.address(to), from, bytes)
    }

    fn download(&self, to: &mut [f32], from: View) -> Result<(), Trouble> {
        let (bytes, to) = (size_of_val(to), to.as_mut_ptr().cast());
        self.driver.copy_out(Stream::Download, to, self.address(from), bytes)
    }

    fn upload_packed(&self, _: View, _: &[f32], _: usize) -> Result<(), Trouble> {
        unreachable!("a packed stash is refused on this device")
    }

    fn download_packed(&self, _: &mut [f32], _: View, _: usize) -> Result<(), Trouble> {
        unreachable!("a packed stash is refused on this device")
    }

    fn read_back(&self, view: View) -> Result<Vec<f32>, Trouble> {
        let mut values = vec![0.0_f32; view.len()];
        let to = values.as_mut_ptr().cast();
        self.driver.copy_out(Stream::Compute, to, self.address(view), view.len() * FLOAT)?;
        let told = Event::record(&self.driver, Stream::Compute)
            .and_then(|event| self.driver.synchronize(event.id));
        if told.is_err() {
            self.driver.finish(); // the copy may still be on its way
        }
        told.map(|()| values)
    }

    fn compute(
        &self,
        batch: &BatchView<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<usize, Trouble> {
        let turn = {
            let mut computed = self.computed.lock().expect("nothing panics inside");
            *computed += 1;
            *computed % ON_THEIR_WAY
        };
        let place = View::floats(turn * self.notes.len(), self.notes.len());
        // SAFETY: of operations that are not done, each has a place of its own.
        let desk = unsafe { self.desk.write(place) };
        let notes = Notes::write(batch, desk, self.address(self.notes));
        let from = desk.as_ptr().cast();
        let bytes = notes.floats * FLOAT;
        self.driver.copy_in(Stream::Compute, self.address(self.notes), from, bytes)?;
        let kernels = CudaKernels::on(&*self.driver, self.memory, notes, self.workspace);
        let used = run(&kernels);
        kernels.end()?;
        Ok(used)
    }

    fn stash(&self) -> Option<&Arena> {
        None
    }

    fn pin(&self, memory: &mut [f32]) {
        let pinned = pin(&*self.driver, memory);
        self.pinned.lock().expect("nothing panics inside").extend(pinned);
    }

    fn issues(&self) -> bool {
        true
    }

    fn begins(&self, operation: &Operation) -> Result<(), Trouble> {
        let on = Stream::of(operation.work().lane());
        for fence in operation.waits().iter().filter(|fence| fence.reached().is_none()) {
            // One that is not there was reached just now.
            let event = self.taken().get(&fence.operation()).cloned();
            if let Some(event) = event {
                self.driver.wait(on, event.id)?;
            }
        }
        let begin = Event::record(&self.driver, on)?;
        self.begun.lock().expect("nothing panics inside")[on as usize] = Some(begin);
        Ok(())
    }

    fn ends(&self, operation: &Operation, value: f64, now: Duration) -> Result<Pending, Trouble> {
        let on = Stream::of(operation.work().lane());
        let begun = self.begun.lock().expect("nothing panics inside")[on as usize].take();
        let begun = begun.expect("what ends has begun");
        let ended = Event::record(&self.driver, on)?;
        let number = operation.number();
        self.taken().insert(number, ended.clone());
        let (driver, taken, clock) = (self.driver.clone(), self.taken.clone(), self.clock.clone());
        let origin = Instant::now().checked_sub(now).expect("lanes began after time did");
        Ok(Box::new(move || {
            let times = driver.synchronize(ended.id).and_then(|()| {
                let mut clock = clock.lock().expect("nothing panics inside");
                Ok([clock.time(&*driver, &begun)?, clock.reached(&*driver, &ended)?])
            });
            taken.lock().expect("nothing panics inside").remove(&number);
            let [begin, end] = times?.map(|time| time.saturating_duration_since(origin));
            Ok(Done { begin, end: end.max(begin), value })
        }))
    }
}

impl Cuda {
    fn taken(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Event>>> {
        self.taken.lock().expect("nothing panics inside")
    }
}

impl Drop for Cuda {
    /// The host's memory goes next: nothing may be on its way to it or from it.
    fn drop(&mut self) {
        self.driver.finish();
        for &at in self.pinned.get_mut().expect("nothing panics inside").iter() {
            self.driver.unpin(at as *mut u8);
        }
    }
}
