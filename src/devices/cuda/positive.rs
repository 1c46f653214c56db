//! The positive numbers of a tensor and their places.

use super::kernels::{On, arguments};
use crate::kernels::{PackPositive, UnpackPositive};

/// Threads of a block, as the text expects.
const THREADS: u32 = 256;

impl On<'_> {
    pub(super) fn pack_positive(&self, &PackPositive { packed, x, room }: &PackPositive) {
        let arguments = arguments!(self; packed, x, x.rows, x.columns, packed.columns, room);
        self.queue.launch("pack_positive", [x.rows, 1, 1], [THREADS, 1, 1], 0, arguments);
    }

    /// Returns true if there was room for all positive numbers. The device says so, and is waited
    /// for, if it may not be.
    pub(super) fn unpack_positive(&self, op: &UnpackPositive) -> bool {
        let UnpackPositive { y, packed, room } = *op;
        // The stream's products, whose workspace it is, come before or behind.
        let overflowed = self.queue.workspace();
        self.queue.clear_words(overflowed, 1);
        let arguments =
            arguments!(self; y, overflowed, packed, y.rows, y.columns, packed.columns, room);
        self.queue.launch("unpack_positive", [y.rows, 1, 1], [THREADS, 1, 1], 0, arguments);
        // With no room, bits alone were packed, which are all there.
        room == 0 || self.queue.read(overflowed, 1)[0].to_bits() == 0
    }
}
