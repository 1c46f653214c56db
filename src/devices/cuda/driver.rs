//! The calls of a CUDA driver that the device needs: memory; copies, launches and products, in
//! order on streams of its own; and events between the streams. Only calls whose comment says so
//! wait for the device.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use l2l_actors::BoxedError;
use l2l_actors::work::Lane;
use serde::{Deserialize, Serialize};

use super::texts::Target;
use crate::devices::PeerView;
use crate::tensor::Dtype;

/// An address in the device's memory.
pub(super) type Address = u64;

/// An in-order queue of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Upload,
    Peer,
    Compute,
    Download,
}

pub(super) const STREAMS: usize = 4;

impl Stream {
    /// The stream of a lane.
    pub(super) fn of(lane: Lane) -> Stream {
        match lane {
            Lane::Upload => Stream::Upload,
            Lane::Peer => Stream::Peer,
            Lane::Compute => Stream::Compute,
            Lane::Download => Stream::Download,
            Lane::Host | Lane::Update | Lane::File | Lane::Fetch | Lane::Exchange => {
                unreachable!("{lane:?} is the host's")
            }
        }
    }
}

/// The type of a kernel's parameter, as its text declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A pointer to the device's elements: the text's `T`.
    Elements,
    /// A pointer to floats.
    Floats,
    /// Any other pointer.
    Pointer,
    /// Null, where any pointer may be.
    Null,
    Int,
    Long,
    Float,
    /// A structure of this name.
    Of(&'static str),
}

/// One argument of a kernel.
pub(super) trait Argument {
    fn kind(&self) -> Kind;

    fn bytes(&self) -> &[u8];
}

/// A launch of a kernel: `grid` blocks of `block` threads.
#[derive(Clone, Copy)]
pub(super) struct Launch<'a> {
    pub(super) kernel: &'static str,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    /// Bytes of shared memory in addition to those that the text declares.
    pub(super) shared: u32,
    pub(super) arguments: &'a [&'a dyn Argument],
}

impl Launch<'_> {
    /// Refuses arguments that are not of the types that the kernel's text declares.
    pub(super) fn check(&self, parameters: &[Kind]) -> Result<(), BoxedError> {
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

/// Bytes of workspace of a matrix product.
pub(super) const WORKSPACE: usize = 32 << 20;

/// A copy of rows of bytes from the host's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyRows {
    pub(super) to: Address,
    pub(super) from: *const u8,
    /// Bytes from a row to the next one, on the device and on the host.
    pub(super) pitch: [usize; 2],
    pub(super) rows: usize,
    /// Bytes of a row.
    pub(super) len: usize,
}

/// A tensor in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: Address,
    pub(super) dtype: Dtype,
}

impl Place {
    pub(super) const NULL: Place = Place { at: 0, dtype: Dtype::F32 };

    /// The tensor that begins `elements` elements later.
    pub(super) fn behind(self, elements: usize) -> Place {
        Place { at: self.at + (elements * self.dtype.size()) as Address, ..self }
    }

    /// The place of what would lie so many elements before the tensor. It is never read.
    pub(super) fn before(self, elements: usize) -> Place {
        Place { at: self.at.wrapping_sub((elements * self.dtype.size()) as Address), ..self }
    }
}

/// A matrix of a product, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) at: Place,
    /// Elements from a row to the next.
    pub(super) stride: usize,
    /// True when the product reads it transposed.
    pub(super) transposed: bool,
}

/// c (+)= a b + bias, summed in f32. a: (rows, inner); b: (inner, columns); c: (rows, columns);
/// bias: (columns). a and b have one dtype; c and the bias have that one or another.
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

impl Product {
    /// The product without its addresses. The choice of a way depends on this alone, so that bits
    /// do not depend on slots.
    pub(super) fn key(&self) -> ProductKey {
        let Product { rows, inner, columns, a, b, c, stride, bias, .. } = *self;
        ProductKey {
            dtypes: [a.at.dtype, c.dtype],
            sizes: [rows, inner, columns],
            strides: [a.stride, b.stride, stride],
            transposed: [a.transposed, b.transposed],
            has_bias: bias.is_some(),
        }
    }
}

/// A product without its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProductKey {
    /// The dtype of both factors, and that of the product.
    pub(super) dtypes: [Dtype; 2],
    /// Rows of a and c, the inner size, columns of b and c.
    pub(super) sizes: [usize; 3],
    /// The strides of a, b and c.
    pub(super) strides: [usize; 3],
    /// Whether a and b are read transposed.
    pub(super) transposed: [bool; 2],
    pub(super) has_bias: bool,
}

impl ProductKey {
    /// Bytes that every row of a, b and c is aligned to: tensors begin at multiples of 16 elements.
    pub(super) fn alignments(&self) -> [u32; 3] {
        let [factors, product] = self.dtypes;
        let [a, b, c] = self.strides;
        [(a, factors), (b, factors), (c, product)].map(|(stride, dtype)| {
            let bytes = stride * dtype.size();
            1 << bytes.trailing_zeros().min((16 * dtype.size()).trailing_zeros())
        })
    }
}

impl fmt::Display for ProductKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, inner, columns] = self.sizes;
        let [factors, product] = self.dtypes;
        write!(f, "({rows}, {inner}) of {factors} by ({inner}, {columns}) to {product}")
    }
}

/// The alignment that an algorithm of a library of products relies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Alignment {
    /// Rows are aligned as [`ProductKey::alignments`] says.
    OfRows,
    /// Elements are aligned to their own size, and rows to nothing more.
    OfElements,
}

/// A product and what its algorithm relies on: a choice of an algorithm is for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AlgorithmKey {
    pub(super) product: ProductKey,
    pub(super) relies_on: Alignment,
}

impl AlgorithmKey {
    /// Bytes that every row of a, b and c is aligned to, as far as the algorithm relies on it.
    pub(super) fn alignments(&self) -> [u32; 3] {
        match self.relies_on {
            Alignment::OfRows => self.product.alignments(),
            Alignment::OfElements => {
                let [factors, product] = self.product.dtypes.map(|dtype| dtype.size() as u32);
                [factors, factors, product]
            }
        }
    }
}

/// The words of an algorithm of a library of products. Only the same version of the library, on the
/// same GPU, knows what they mean.
pub(super) type Algorithm = [u64; 8];

/// A GPU, and the version of its library of products: a stored algorithm is valid for these alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProductLibrary {
    /// The GPU's name.
    pub(super) gpu: String,
    pub(super) architecture: u32,
    pub(super) cublaslt: u64,
}

/// A driver and one of its devices. A caller that passes host memory keeps it until the work is
/// done. Until then, no thread writes memory that is read, or touches memory that is written.
pub(super) trait Driver: Send + Sync + 'static {
    /// The target that its kernels are compiled for.
    fn target(&self) -> Target;

    /// Allocates memory, all zero.
    fn allocate(&self, bytes: usize) -> Result<Address, BoxedError>;

    /// Pins memory of the host, so that the device can copy it directly.
    fn pin(&self, at: *mut u8, bytes: usize) -> Result<(), BoxedError>;

    /// The device's address of pinned memory of the host, if the device can read it.
    fn mapped(&self, at: *const u8) -> Option<Address>;

    /// Undoes [`pin`](Driver::pin).
    fn unpin(&self, at: *mut u8);

    /// Copies to the device.
    fn copy_in(
        &self,
        on: Stream,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), BoxedError>;

    /// Copies rows to the device.
    fn copy_rows_in(&self, on: Stream, copy: &CopyRows) -> Result<(), BoxedError>;

    /// Copies from the device.
    fn copy_out(
        &self,
        on: Stream,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), BoxedError>;

    /// The device's context, as the drivers of other devices name it.
    fn context(&self) -> usize;

    /// Copies from another device.
    fn copy_from_peer(
        &self,
        on: Stream,
        to: Address,
        from: PeerView,
        bytes: usize,
    ) -> Result<(), BoxedError>;

    /// Copies on the device.
    fn copy(&self, on: Stream, to: Address, from: Address, bytes: usize) -> Result<(), BoxedError>;

    fn launch(&self, on: Stream, launch: &Launch<'_>) -> Result<(), BoxedError>;

    /// Multiplies by this algorithm, or without one by the library's first, with [`WORKSPACE`]
    /// bytes of the device's memory. Returns false if the library has no algorithm, or refuses this
    /// one; then nothing was done.
    fn product(
        &self,
        on: Stream,
        product: &Product,
        alignment: Alignment,
        algorithm: Option<Algorithm>,
        workspace: Address,
    ) -> Result<bool, BoxedError>;

    /// Some algorithms for a product, the library's first at the front. Empty if the library has
    /// none.
    fn algorithms(
        &self,
        product: &Product,
        alignment: Alignment,
    ) -> Result<Vec<Algorithm>, BoxedError>;

    /// The GPU and the library that algorithms are valid for.
    fn product_library(&self) -> ProductLibrary;

    /// Records an event, which is reached when all work queued on the stream until now is done.
    fn record(&self, on: Stream) -> Result<u64, BoxedError>;

    /// Makes work that is queued on the stream from now on wait for an event.
    fn wait(&self, on: Stream, event: u64) -> Result<(), BoxedError>;

    /// Waits for an event.
    fn synchronize(&self, event: u64) -> Result<(), BoxedError>;

    /// Waits for all streams, even after an error.
    fn finish(&self);

    /// Seconds from one event to another; both are reached.
    fn seconds(&self, from: u64, to: u64) -> Result<f64, BoxedError>;

    /// Frees an event.
    fn forget(&self, event: u64);
}

/// An event that is freed when its last owner drops it.
pub(super) struct Event {
    pub(super) id: u64,
    driver: Arc<dyn Driver>,
}

impl Event {
    /// Records an event on a stream ([`Driver::record`]).
    pub(super) fn record(driver: &Arc<dyn Driver>, on: Stream) -> Result<Arc<Event>, BoxedError> {
        let id = driver.record(on)?;
        Ok(Arc::new(Event { id, driver: driver.clone() }))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.driver.forget(self.id);
    }
}

/// The floats at an address. Waits for all work that was queued on the compute stream.
pub(super) fn read(
    driver: &Arc<dyn Driver>,
    at: Address,
    floats: usize,
) -> Result<Vec<f32>, BoxedError> {
    let mut values = vec![0.0_f32; floats];
    let bytes = size_of_val(&values[..]);
    driver.copy_out(Stream::Compute, values.as_mut_ptr().cast(), at, bytes)?;
    let copied =
        Event::record(driver, Stream::Compute).and_then(|event| driver.synchronize(event.id));
    if copied.is_err() {
        driver.finish(); // the copy may still be on its way
    }
    copied.map(|()| values)
}
