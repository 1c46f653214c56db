//! Copies between the host and the device. The driver copies from one pinned part of the host's
//! memory at a time.

use l2l_actors::BoxedError;

use super::Cuda;
use super::driver::{Address, CopyRows, Stream};
use super::pinned::parts;
use crate::tensor::ByteRows;

impl Cuda {
    /// Copies to the device, memory of the host that may be pinned in parts.
    pub(super) fn copy_in(
        &self,
        on: Stream,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        parts(from.addr(), bytes).try_for_each(|part| {
            let to = to + part.start as u64;
            let from = from.wrapping_add(part.start);
            self.driver.copy_in(on, to, from, part.len())
        })
    }

    /// Copies from the device, on the download stream, to memory that may be pinned in parts.
    pub(super) fn copy_out(
        &self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), BoxedError> {
        parts(to.addr(), bytes).try_for_each(|part| {
            let to = to.wrapping_add(part.start);
            let from = from + part.start as u64;
            self.driver.copy_out(Stream::Download, to, from, part.len())
        })
    }

    /// Copies rows to the device, on the upload stream: all that lie in one pinned part at once.
    pub(super) fn copy_rows_in(
        &self,
        to: Address,
        from: &[f32],
        rows: ByteRows,
    ) -> Result<(), BoxedError> {
        assert!(rows.span(1).end <= size_of_val(from), "{rows:?} of {} floats", from.len());
        let mut first = 0;
        while first < rows.rows {
            let left = rows.some(first..rows.rows);
            let to = to + left.at[0] as Address;
            let from = from.as_ptr().cast::<u8>().wrapping_add(left.at[1]);
            let room = parts(from.addr(), left.span(1).len()).next().map_or(0, |part| part.len());
            let count = match room.checked_sub(left.len) {
                Some(behind) => (behind / left.pitch[1].max(1) + 1).min(left.rows),
                None => 1,
            };
            if count == 1 {
                self.copy_in(Stream::Upload, to, from, left.len)?;
            } else {
                let ByteRows { pitch, len, .. } = left;
                let copy = CopyRows { to, from, pitch, rows: count, len };
                self.driver.copy_rows_in(Stream::Upload, &copy)?;
            }
            first += count;
        }
        Ok(())
    }
}
