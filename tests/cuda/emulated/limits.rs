//! What an emulated driver refuses, as a real one may.

use std::cell::Cell;

use crate::devices::cuda::driver::{Algorithm, Alignment, ProductKey};

/// What drivers that a thread makes do not do.
#[derive(Clone, Copy, Default)]
pub(in crate::devices::cuda) struct Limits {
    /// The products that the library has no algorithm for.
    pub(in crate::devices::cuda) refuse: Option<fn(&ProductKey, Alignment) -> bool>,
    /// Seconds that the library's algorithms take for a product, by their number; none: it does not
    /// have that one. Without this it has the first alone, which takes none.
    pub(in crate::devices::cuda) takes: Option<fn(&ProductKey, u64) -> Option<f64>>,
    /// A kernel whose launches fail, and nothing else.
    pub(in crate::devices::cuda) fails: Option<&'static str>,
    /// Bytes of the device that are free.
    pub(in crate::devices::cuda) free: Option<usize>,
    /// Bytes of the host that can be pinned.
    pub(in crate::devices::cuda) pinned: Option<usize>,
    /// An older architecture.
    pub(in crate::devices::cuda) architecture: Option<u32>,
}

impl Limits {
    /// Seconds of an algorithm, if the library has it.
    pub(super) fn seconds(&self, key: &ProductKey, index: u64) -> Option<f64> {
        match self.takes {
            Some(takes) => takes(key, index),
            None => (index == 0).then_some(0.0),
        }
    }

    /// Whether the library refuses a product, or this algorithm for it.
    pub(super) fn refuses(
        &self,
        key: &ProductKey,
        relies_on: Alignment,
        algorithm: Option<Algorithm>,
    ) -> bool {
        self.refuse.is_some_and(|refuses| refuses(key, relies_on))
            || algorithm.is_some_and(|[index, ..]| self.seconds(key, index).is_none())
    }

    /// The algorithms of a product: their first word is their number.
    pub(super) fn algorithms(&self, key: &ProductKey, relies_on: Alignment) -> Vec<Algorithm> {
        let all = (0..8).map(|index| [index, 0, 0, 0, 0, 0, 0, 0]);
        all.filter(|one| !self.refuses(key, relies_on, Some(*one))).collect()
    }
}

/// The most bytes of shared memory that a block of an architecture gets (CUDA C++ Programming
/// Guide, "Technical Specifications per Compute Capability").
pub(super) fn shared(architecture: u32) -> u32 {
    match architecture {
        ..75 => 96 << 10,
        75..80 => 64 << 10,
        90 => 227 << 10,
        80.. => 99 << 10, // of some it may be more
    }
}

const NONE: Limits =
    Limits { refuse: None, takes: None, fails: None, free: None, pinned: None, architecture: None };

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
