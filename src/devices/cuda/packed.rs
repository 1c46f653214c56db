//! Numbers that cross the link packed: a gradient in bf16, rows of the stash in bf16 or int8. The
//! stream of a copy packs on the device before it copies, and unpacks behind a copy.
//!
//! A kernel waits for room between the kernels that compute, so a piece is as large as its buffer:
//! then few kernels wait. Packing in the slot itself would need a kernel for each doubling.

use std::ops::Range;

use l2l_actors::BoxedError;
use l2l_actors::schedule::Encoding;

use super::Cuda;
use super::driver::{Argument, Launch, Place, Stream};
use super::launches::{FLOAT, int, long};
use crate::config::{Config, GradientDtype, StashDtype};
use crate::tensor::{Dtype, Packing, View};

/// Floats of a buffer, where numbers are packed. On a link of 55 GB/s its copy takes 1.2 ms, many
/// times as long as a kernel takes for it.
const BUFFER: usize = 16 << 20;

/// Threads of a block.
const THREADS: usize = 256;

/// Floats of the buffers of the device's memory, for copies to the host and from it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PackBuffers {
    pub(super) down: usize,
    pub(super) up: usize,
}

impl PackBuffers {
    /// The buffers that a config needs.
    pub(super) fn of(config: &Config) -> PackBuffers {
        let has_stash = config.stash.dtype != StashDtype::F32;
        let has_gradients = config.device.gradient_dtype == GradientDtype::Bf16;
        let of = |is_used: bool| if is_used { BUFFER } else { 0 };
        PackBuffers { down: of(has_stash || has_gradients), up: of(has_stash) }
    }

    pub(super) fn floats(self) -> usize {
        self.down + self.up
    }
}

/// Numbers that are packed together: their place among those of the slot, and the bytes of their
/// packed place.
struct Piece {
    numbers: Range<usize>,
    bytes: Range<usize>,
}

/// The pieces of `numbers` numbers, each at most as large as a buffer of `room` floats.
fn pieces(packing: Packing, numbers: usize, room: usize) -> impl Iterator<Item = Piece> {
    // Numbers that are rounded one by one may be cut anywhere; two of them fill a float.
    let [each, bytes] = match packing.encoding {
        Encoding::Int8 { .. } => [packing.columns, packing.row_bytes()],
        _ => [2, 2 * Dtype::Bf16.size()],
    };
    let of_piece = room * FLOAT / bytes * each;
    assert!(of_piece > 0, "a buffer has room for a row");
    (0..numbers).step_by(of_piece).map(move |from| {
        let to = numbers.min(from + of_piece);
        Piece { numbers: from..to, bytes: from / each * bytes..to.div_ceil(each) * bytes }
    })
}

impl Cuda {
    /// Packs on the device and copies to the host, on the download stream.
    pub(super) fn copy_packed_out(
        &self,
        to: &mut [f32],
        from: View,
        packing: Packing,
    ) -> Result<(), BoxedError> {
        let to = bytemuck::cast_slice_mut::<f32, u8>(to);
        let room = self.address(self.packed[0]);
        for Piece { numbers, bytes } in
            pieces(packing, numbers_of(from, packing), self.packed[0].len())
        {
            let from = Place { at: self.address(from), dtype: packing.dtype }.behind(numbers.start);
            let count = numbers.len();
            match packing.encoding {
                Encoding::Int8 { block } => {
                    let packed = Place { at: room, dtype: Dtype::F32 };
                    let sizes = sizes_of_rows(packing, block);
                    let [columns, words, size] = &sizes;
                    let rows = count / packing.columns;
                    let arguments: [&dyn Argument; 6] =
                        [&packed, &from, &int(rows), columns, words, size];
                    self.launch_on(Stream::Download, "pack_int8", rows, &arguments)?;
                }
                _ => {
                    let arguments: [&dyn Argument; 3] = [&room, &from, &long(count)];
                    let blocks = count.div_ceil(4 * THREADS);
                    self.launch_on(Stream::Download, "pack_bfloats", blocks, &arguments)?;
                }
            }
            // The last float of an odd number of halves is copied whole.
            let bytes = bytes.start..bytes.end.min(to.len());
            self.copy_out(to[bytes.clone()].as_mut_ptr(), room, bytes.len())?;
        }
        Ok(())
    }

    /// Copies from the host and unpacks on the device, on the upload stream.
    pub(super) fn copy_packed_in(
        &self,
        to: View,
        from: &[f32],
        packing: Packing,
    ) -> Result<(), BoxedError> {
        let from = bytemuck::cast_slice::<f32, u8>(from);
        let room = self.address(self.packed[1]);
        for Piece { numbers, bytes } in
            pieces(packing, numbers_of(to, packing), self.packed[1].len())
        {
            let bytes = bytes.start..bytes.end.min(from.len());
            self.copy_in(Stream::Upload, room, from[bytes.clone()].as_ptr(), bytes.len())?;
            let to = Place { at: self.address(to), dtype: packing.dtype }.behind(numbers.start);
            let count = numbers.len();
            match packing.encoding {
                Encoding::Int8 { block } => {
                    let packed = Place { at: room, dtype: Dtype::F32 };
                    let sizes = sizes_of_rows(packing, block);
                    let [columns, words, size] = &sizes;
                    let rows = count / packing.columns;
                    let arguments: [&dyn Argument; 6] =
                        [&to, &packed, &int(rows), columns, words, size];
                    self.launch_on(Stream::Upload, "unpack_int8", rows, &arguments)?;
                }
                _ => {
                    let arguments: [&dyn Argument; 3] = [&to, &room, &long(count)];
                    let blocks = count.div_ceil(THREADS);
                    self.launch_on(Stream::Upload, "unpack_bfloats", blocks, &arguments)?;
                }
            }
        }
        Ok(())
    }

    fn launch_on(
        &self,
        on: Stream,
        kernel: &'static str,
        blocks: usize,
        arguments: &[&dyn Argument],
    ) -> Result<(), BoxedError> {
        let grid = [u32::try_from(blocks).expect("sizes are checked"), 1, 1];
        let block = [THREADS as u32, 1, 1];
        self.driver.launch(on, &Launch { kernel, grid, block, shared: 0, arguments })
    }
}

/// The numbers of a slot, which is a view of floats.
fn numbers_of(slot: View, packing: Packing) -> usize {
    slot.len() * FLOAT / packing.dtype.size()
}

/// Numbers and floats of a packed row, and the numbers of a scale.
fn sizes_of_rows(packing: Packing, block: u32) -> [i32; 3] {
    [packing.columns, packing.floats(1), block as usize].map(int)
}
