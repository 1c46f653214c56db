//! Memory by number: what a view is of, workspace, and the one allocation that slots are ranges of.

mod arena;
mod scratch;
mod view;

pub(crate) use arena::{Arena, Pages};
pub use scratch::Scratch;
pub use view::{Dtype, View};
