//! What is asked of a CUDA driver: one memory, copies, launches and products in order on three
//! streams, and events between them. No call waits for the device but where it says so.

use std::ffi::c_void;
use std::sync::Arc;

use l2l_actors::ports::{Lane, Trouble};

use crate::tensor::Dtype;

/// A place in the device's memory.
pub(super) type Address = u64;

/// An in-order queue of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Upload,
    Compute,
    Download,
}

impl Stream {
    /// That of a lane.
    pub(super) fn of(lane: Lane) -> Stream {
        match lane {
            Lane::Upload => Stream::Upload,
            Lane::Compute => Stream::Compute,
            Lane::Download => Stream::Download,
            Lane::Host | Lane::Update | Lane::File => unreachable!("{lane:?} is the host's"),
        }
    }
}

/// What a kernel is given, as its text has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// To what weights and activations are: the text's `T`.
    Elements,
    /// To floats.
    Floats,
    /// To anything else.
    Pointer,
    /// None: where any may be.
    Null,
    Int,
    Long,
    Float,
    /// A structure of this name.
    Of(&'static str),
}

/// One argument of a kernel.
pub(super) trait Argument {
    /// What it is.
    fn kind(&self) -> Kind;

    /// Its bytes.
    fn bytes(&self) -> &[u8];
}

/// A kernel on so many blocks of so many threads.
#[derive(Clone, Copy)]
pub(super) struct Launch<'a> {
    pub(super) kernel: &'static str,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    /// Bytes of shared memory beside what the text declares.
    pub(super) shared: u32,
    pub(super) arguments: &'a [&'a dyn Argument],
}

impl Launch<'_> {
    /// Refuses what is not what the kernel's text declares.
    pub(super) fn check(&self, parameters: &[Kind]) -> Result<(), Trouble> {
        let given: Vec<_> = self.arguments.iter().map(|one| one.kind()).collect();
        let fits = |(given, declared): (&Kind, &Kind)| {
            let is_pointer = matches!(declared, Kind::Elements | Kind::Floats | Kind::Pointer);
            given == declared || *given == Kind::Null && is_pointer
        };
        if given.len() == parameters.len() && given.iter().zip(parameters).all(fits) {
            return Ok(());
        }
        Err(format!("it takes {parameters:?} and was given {given:?}").into())
    }

    /// The arguments as drivers take them.
    pub(super) fn pointers(&self) -> Vec<*mut c_void> {
        self.arguments.iter().map(|one| one.bytes().as_ptr().cast_mut().cast()).collect()
    }
}

/// Bytes that products may take beside their matrices.
pub(super) const WORKSPACE: usize = 32 << 20;

/// A tensor in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: Address,
    pub(super) dtype: Dtype,
}

impl Place {
    /// None.
    pub(super) const NULL: Place = Place { at: 0, dtype: Dtype::F32 };

    /// So many elements on.
    pub(super) fn behind(self, elements: usize) -> Place {
        Place { at: self.at + (elements * self.dtype.size()) as Address, ..self }
    }
}

/// A matrix of a product, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) at: Place,
    /// Elements from a row to the next.
    pub(super) stride: usize,
    /// True when the product reads it turned.
    pub(super) transposed: bool,
}

/// c (+)= a b + bias, summed in f32. a: (rows, inner); b: (inner, columns); c: (rows, columns); bias:
/// (columns). a and b are of one kind, c and the bias of another or the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) inner: usize,
    pub(super) columns: usize,
    pub(super) a: Matrix,
    pub(super) b: Matrix,
    pub(super) c: Place,
    /// Elements from a row of c to the next.
    pub(super) stride: usize,
    pub(super) bias: Option<Place>,
    pub(super) accumulate: bool,
}

/// A driver and one device of its. Whoever gives it memory of the host keeps that until the work is
/// done, and lets nobody write what is read, or touch what is written.
pub(super) trait Driver: Send + Sync + 'static {
    /// Memory, all of it zero.
    fn allocate(&self, bytes: usize) -> Result<Address, Trouble>;

    /// Lets the device reach the host's memory by itself; without, copies take a way round.
    fn pin(&self, at: *mut u8, bytes: usize) -> Result<(), Trouble>;

    /// Undoes [`pin`](Driver::pin).
    fn unpin(&self, at: *mut u8);

    /// Copies to the device.
    fn copy_in(
        &self,
        on: Stream,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), Trouble>;

    /// Copies from the device.
    fn copy_out(&self, on: Stream, to: *mut u8, from: Address, bytes: usize)
    -> Result<(), Trouble>;

    /// Copies on the device.
    fn copy(&self, on: Stream, to: Address, from: Address, bytes: usize) -> Result<(), Trouble>;

    /// Runs a kernel.
    fn launch(&self, on: Stream, launch: &Launch<'_>) -> Result<(), Trouble>;

    /// Multiplies, with [`WORKSPACE`] bytes of the device's memory for it.
    fn product(&self, on: Stream, product: &Product, workspace: Address) -> Result<(), Trouble>;

    /// An event that is reached when all that the stream was given until now is done.
    fn record(&self, on: Stream) -> Result<u64, Trouble>;

    /// Has what the stream is given from now on wait for an event.
    fn wait(&self, on: Stream, event: u64) -> Result<(), Trouble>;

    /// Waits for an event.
    fn synchronize(&self, event: u64) -> Result<(), Trouble>;

    /// Waits for all streams, whatever went wrong.
    fn finish(&self);

    /// Seconds from one event, which is reached, to another.
    fn seconds(&self, from: u64, to: u64) -> Result<f64, Trouble>;

    /// Lets go of an event.
    fn forget(&self, event: u64);
}

/// An event that is let go of when nobody has it.
pub(super) struct Event {
    pub(super) id: u64,
    driver: Arc<dyn Driver>,
}

impl Event {
    /// See [`Driver::record`].
    pub(super) fn record(driver: &Arc<dyn Driver>, on: Stream) -> Result<Arc<Event>, Trouble> {
        let id = driver.record(on)?;
        Ok(Arc::new(Event { id, driver: driver.clone() }))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.driver.forget(self.id);
    }
}
