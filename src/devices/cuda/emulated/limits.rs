//! What an emulated driver refuses, as a real one may.

use std::cell::Cell;

use crate::devices::cuda::driver::{Alignment, ProductKey};

/// What drivers that a thread makes do not do.
#[derive(Clone, Copy, Default)]
pub(in crate::devices::cuda) struct Limits {
    /// The products that the library has no algorithm for.
    pub(in crate::devices::cuda) refuse: Option<fn(&ProductKey, Alignment) -> bool>,
    /// A kernel whose launches fail, and nothing else.
    pub(in crate::devices::cuda) fails: Option<&'static str>,
    /// Bytes of the device that are free.
    pub(in crate::devices::cuda) free: Option<usize>,
    /// Bytes of the host that can be pinned.
    pub(in crate::devices::cuda) pinned: Option<usize>,
    /// An older architecture.
    pub(in crate::devices::cuda) architecture: Option<u32>,
}

const NONE: Limits =
    Limits { refuse: None, fails: None, free: None, pinned: None, architecture: None };

thread_local! {
    static LIMITS: Cell<Limits> = const { Cell::new(NONE) };
}

/// Sets the limits of drivers that this thread makes from now on.
pub(in crate::devices::cuda) fn limit(limits: Limits) {
    LIMITS.set(limits);
}

/// Those that it has set.
pub(super) fn current() -> Limits {
    LIMITS.get()
}
