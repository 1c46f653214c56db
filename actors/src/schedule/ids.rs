//! The numbers in a schedule: versions, micro-batches, blocks, layers, boundaries.
//!
//! Each is a type of its own, so that an index of one kind is never used for another.

use std::fmt;

/// A step's number, counted from 0; also the version of every block that the step reads.
pub type Version = u64;

/// Index of a micro-batch within its step.
pub type MicroBatch = u32;

/// Index of a group in [`Schedule::groups`](super::Schedule::groups).
pub type GroupId = u32;

/// Index of a block in [`Schedule::blocks`](super::Schedule::blocks): the same in every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// Index of a layer of the model: the same in every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(pub u32);

/// Index of a boundary in [`Schedule::boundaries`](super::Schedule::boundaries): valid within one
/// step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BoundaryId(pub u32);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

impl fmt::Display for BoundaryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boundary {}", self.0)
    }
}
