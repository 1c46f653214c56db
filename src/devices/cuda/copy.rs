//! Copies between dtypes, and zeros.

use super::kernels::{On, arguments};
use super::launches::{NEIGHBOURS, long};
use crate::kernels::Cast;
use crate::tensor::{Dtype, View};

impl On<'_> {
    pub(super) fn cast(&self, &Cast { y, x }: &Cast) {
        let kernel = match (y.dtype, x.dtype) {
            (to, from) if to == from => return self.copy(y, x),
            (Dtype::F32, _) => "to_floats",
            _ => "from_floats",
        };
        self.queue.each(kernel, x.len(), NEIGHBOURS, arguments!(self; y, x, long(x.len())));
    }

    /// y = 0.
    pub(super) fn clear(&self, y: View) {
        let kernel = if y.dtype == Dtype::F32 { "clear_floats" } else { "clear" };
        self.queue.each(kernel, y.len(), NEIGHBOURS, arguments!(self; y, long(y.len())));
    }
}
