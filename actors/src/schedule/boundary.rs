//! Boundaries: the tensors that a micro-batch carries from one visit to another.
//!
//! A boundary says what it is (its [`Role`]) and how the stash holds it (its [`Encoding`]). So a
//! visit asks for what it needs by name, and nobody counts, compares sizes or relies on an order.

use std::fmt;

/// What a boundary holds. A visit of a device reads at most one boundary of each role, and writes
/// at most one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The residual stream: what one layer hands to the next.
    Hidden,
    /// The gradient of the residual stream, on its way down.
    HiddenGradient,
    /// Intermediates of a layer that its backward pass would otherwise recompute.
    SavedActivations,
    /// Running maximum, sum, target's logit and label of each position, which the head's tiles
    /// pass on.
    Statistics,
    /// The gradient of the head's input, which the head's tiles add up.
    HeadGradient,
    /// Logits, or scores of classes, for the host.
    Logits,
    /// Keys and values of earlier positions, from the KV cache.
    CachedKv,
    /// Keys and values of this step's positions, for the KV cache.
    NewKv,
}

impl Role {
    /// True for keys and values. Their place on the host is the KV cache, which outlives the step;
    /// every other boundary has its place in the stash.
    pub fn is_kv(self) -> bool {
        matches!(self, Role::CachedKv | Role::NewKv)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Hidden => "hidden state",
            Role::HiddenGradient => "hidden gradient",
            Role::SavedActivations => "saved activations",
            Role::Statistics => "statistics",
            Role::HeadGradient => "head gradient",
            Role::Logits => "logits",
            Role::CachedKv => "cached keys and values",
            Role::NewKv => "new keys and values",
        })
    }
}

/// How the stash holds a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// As it lies in its slots on the device.
    Plain,
    /// Each number rounded to bf16: packed when it is downloaded, unpacked when it is uploaded.
    Bf16,
    /// Each number as one of 255 multiples of its block's scale. Packed and unpacked likewise.
    Int8 {
        /// Numbers of a row that share a scale.
        block: u32,
    },
}

/// What a micro-batch carries from one visit to another, through the stash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// What it holds.
    pub role: Role,
    /// How the stash holds it.
    pub encoding: Encoding,
    /// Slots of the input or output pool that one micro-batch of it fills, at least 1.
    pub slots: u32,
    /// Bytes of one sequence of it in a slot.
    pub bytes_per_sequence: u64,
    /// Bytes of one sequence of it in the stash, and on the way there.
    pub stashed_per_sequence: u64,
}

impl Boundary {
    /// A boundary that the stash holds as the device does.
    pub fn plain(role: Role, slots: u32, bytes_per_sequence: u64) -> Boundary {
        let stashed_per_sequence = bytes_per_sequence;
        Boundary {
            role,
            encoding: Encoding::Plain,
            slots,
            bytes_per_sequence,
            stashed_per_sequence,
        }
    }
}
