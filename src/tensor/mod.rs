//! Tensors in a device's memory: views with shape and dtype, workspace, and the one allocation
//! whose ranges are slots.

mod arena;
mod byte_rows;
mod guards;
pub(crate) mod int8;
mod lease;
mod packed;
mod quantised;
mod scratch;
mod slots;
mod view;

#[cfg(all(test, target_os = "linux"))]
pub(crate) use arena::given_pages;
pub(crate) use arena::{Arena, Pages, touch};
pub(crate) use byte_rows::ByteRows;
pub(crate) use lease::Lease;
pub(crate) use packed::{Element, Packing, narrow, packed_bf16, widen, widen_in_place};
pub(crate) use quantised::MatrixPart;
pub use quantised::{NotQuantisable, Origin, Quantisation};
pub use scratch::Scratch;
pub(crate) use slots::{ArenaPlan, Slots};
pub use view::{Dtype, View};

/// Tensors, slots and regions begin at multiples of this many floats: a cache line.
pub(crate) const ALIGNED: usize = 16;
