//! One device: the pools of its slots, and copies whose bytes are counted.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use l2l_actors::BoxedError;
use l2l_actors::schedule::{Boundary, Encoding};

use crate::devices::Device;
use crate::kernels::{BatchMetadata, Kernels};
use crate::plan::{Holder, Plan, Side};
use crate::tensor::{ByteRows, Packing, Slots, View};
use crate::worker::Used;
use crate::worker::counts::LinkUsed;

/// What a slot holds where nothing was uploaded, in builds with debug assertions: NaN, also as two
/// numbers of 16 bits. So a kernel that reads it changes the results of tests.
const UNREAD: f32 = f32::from_bits(0x7fff_7fff);

/// A device, and where its slots lie.
pub(super) struct DeviceSide {
    pub(super) device: Box<dyn Device>,
    pub(super) weights: Slots,
    pub(super) gradients: Slots,
    pub(super) inputs: Slots,
    pub(super) outputs: Slots,
    /// Memory for what visits keep on the device.
    pub(super) kept: View,
    pub(super) chunk_state: View,
    pub(super) workspace: View,
    /// The step and the device visit that the workspace was used for last.
    visited: Mutex<Option<(u64, usize)>>,
    /// True where kernels reach the stash: the device shares the host's memory, and no link to the
    /// device is emulated.
    reaches_stash: bool,
    used: Arc<Used>,
    /// The device's place among all devices.
    index: usize,
}

impl DeviceSide {
    pub(super) fn new(
        device: Box<dyn Device>,
        plan: &Plan,
        has_link: bool,
        used: &Arc<Used>,
        index: usize,
    ) -> DeviceSide {
        let first = device.first();
        let slots = |holder| {
            let slots = plan.regions.slots(holder, Side::Device);
            Slots { at: first + slots.at, ..slots }
        };
        DeviceSide {
            reaches_stash: device.shared().is_some() && !has_link,
            device,
            weights: slots(Holder::Weights),
            gradients: slots(Holder::Gradients),
            inputs: slots(Holder::Inputs),
            outputs: slots(Holder::Outputs),
            kept: slots(Holder::Kept).all(),
            chunk_state: slots(Holder::ChunkState).all(),
            workspace: slots(Holder::Workspace).all(),
            visited: Mutex::new(None),
            used: used.clone(),
            index,
        }
    }

    /// The same pools on another device.
    #[cfg(test)]
    pub(super) fn with(self, by: impl FnOnce(Box<dyn Device>) -> Box<dyn Device>) -> DeviceSide {
        DeviceSide { device: by(self.device), ..self }
    }

    /// True if a boundary stays in the stash while kernels read or write it.
    pub(super) fn stays_in_stash(&self, boundary: &Boundary) -> bool {
        self.reaches_stash && boundary.encoding == Encoding::Plain && !boundary.role.is_kv()
    }

    /// Copies floats to the device, and unpacks them if they are packed.
    pub(super) fn upload(
        &self,
        to: View,
        from: &[f32],
        packing: Option<Packing>,
    ) -> Result<(), BoxedError> {
        match packing.filter(is_packed) {
            None => self.device.upload(to, from)?,
            Some(packing) => self.device.upload_packed(to, from, packing)?,
        }
        self.count_upload(from.len());
        Ok(())
    }

    /// Copies floats from the device, and packs them where the host has them packed.
    pub(super) fn download(
        &self,
        to: &mut [f32],
        from: View,
        packing: Option<Packing>,
    ) -> Result<(), BoxedError> {
        match packing.filter(is_packed) {
            None => self.device.download(to, from)?,
            Some(packing) => self.device.download_packed(to, from, packing)?,
        }
        self.count_download(to.len());
        Ok(())
    }

    /// Fills a slot, of which only parts will be uploaded: see [`UNREAD`].
    pub(super) fn fill_unread(&self, slot: View) -> Result<(), BoxedError> {
        if cfg!(debug_assertions) && self.device.shared().is_some() {
            self.device.upload(slot, &vec![UNREAD; slot.len()])?;
        }
        Ok(())
    }

    /// Copies these ranges of a block to its slot. The block is in pieces that follow each other.
    pub(super) fn upload_parts(
        &self,
        slot: View,
        block: &[&[f32]],
        ranges: &[Range<usize>],
    ) -> Result<(), BoxedError> {
        let mut first = 0;
        for piece in block {
            let end = first + piece.len();
            for range in ranges {
                let part = range.start.max(first)..range.end.min(end);
                if !part.is_empty() {
                    let from = &piece[part.start - first..part.end - first];
                    self.upload(slot.part(part), from, None)?;
                }
            }
            first = end;
        }
        Ok(())
    }

    /// Copies rows of a block to the slot of a portion, as far as they lie in a range of it. The
    /// block is in pieces that follow each other; a row lies in one of them. It counts no bytes.
    pub(super) fn upload_rows(
        &self,
        slot: View,
        block: &[&[f32]],
        rows: ByteRows,
        range: &Range<usize>,
    ) -> Result<(), BoxedError> {
        let [start, end] = [range.start, range.end].map(|float| float * size_of::<f32>());
        let mut first = 0;
        for piece in block {
            let end_of_piece = first + size_of_val(*piece);
            if (first..end_of_piece).contains(&rows.at[1]) {
                for some in rows.within(&(start..end)) {
                    self.device.upload_rows(slot, piece, some.without_first(first))?;
                }
            }
            first = end_of_piece;
        }
        Ok(())
    }

    /// Copies these ranges of a gradient from the device, and sets the others to 0. `packing`: that
    /// of so many numbers, if the host has them packed.
    pub(super) fn download_parts(
        &self,
        to: &mut [f32],
        gradient: View,
        ranges: &[Range<usize>],
        packing: Option<fn(usize) -> Packing>,
    ) -> Result<(), BoxedError> {
        let place = |number: usize| packing.map_or(number, |packing| packing(number).floats(1));
        let mut end = 0;
        for range in ranges {
            to[place(end)..place(range.start)].fill(0.0);
            let part = &mut to[place(range.start)..place(range.end)];
            self.download(part, gradient.part(range.clone()), packing.map(|of| of(range.len())))?;
            end = range.end;
        }
        to[place(end)..].fill(0.0);
        Ok(())
    }

    /// Copies a slot of another device to a slot of the same size.
    pub(super) fn copy_from(
        &self,
        to: View,
        peer: &DeviceSide,
        from: View,
    ) -> Result<(), BoxedError> {
        self.device.copy_from_peer(to, peer.device.for_peers(from))?;
        self.link().peers.fetch_add((to.len() * to.dtype.size()) as u64, Relaxed);
        Ok(())
    }

    /// Counts uploaded floats. A boundary that stays in the stash counts as if it was copied.
    pub(super) fn count_upload(&self, floats: usize) {
        self.link().uploaded.fetch_add((floats * size_of::<f32>()) as u64, Relaxed);
    }

    /// Counts downloaded floats. A boundary that stays in the stash counts as if it was copied.
    pub(super) fn count_download(&self, floats: usize) {
        self.link().downloaded.fetch_add((floats * size_of::<f32>()) as u64, Relaxed);
    }

    fn link(&self) -> &LinkUsed {
        &self.used.links[self.index]
    }

    /// True at the first micro-batch of a device visit of a step.
    pub(super) fn begins_visit(&self, step: u64, device_visit: usize) -> bool {
        let mut visited = self.visited.lock().expect("nothing panics inside");
        visited.replace((step, device_visit)) != Some((step, device_visit))
    }

    /// Runs kernels on a micro-batch; `run` returns the peak of the workspace, in floats.
    pub(super) fn compute(
        &self,
        batch: &BatchMetadata<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<(), BoxedError> {
        let used = self.device.compute(batch, run)?;
        self.used.workspace.fetch_max(used as u64, Relaxed);
        Ok(())
    }
}

fn is_packed(packing: &Packing) -> bool {
    packing.encoding != Encoding::Plain
}
