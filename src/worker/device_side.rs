//! A device's side: which view of its memory a slot is, copies over the link, and kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use l2l_actors::schedule::{Boundary, Encoding};
use l2l_actors::threads::Pending;
use l2l_actors::work::Placed;
use l2l_actors::{BoxedError, Operation};

use super::counts::LinkUsed;
use super::{Used, throttle};
use crate::config::Config;
use crate::devices::{Device, KernelTime, ProductTable};
use crate::error::Error;
use crate::kernels::{BatchMetadata, Kernels};
use crate::plan::{Holder, Plan, Side};
use crate::tensor::{Packing, Slots, View};

/// See the [module](self).
pub(super) struct DeviceSide {
    device: Box<dyn Device>,
    weights: Slots,
    gradients: Slots,
    inputs: Slots,
    outputs: Slots,
    pub(super) chunk_state: View,
    pub(super) workspace: View,
    /// Bytes a second of an emulated link.
    link: Option<f64>,
    /// Whether boundaries cross the link: the stash is on the host.
    boundaries_cross: bool,
    used: Arc<Used>,
    /// Which device it is, among all.
    index: usize,
}

/// Whether a copy crosses the link between host and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crosses {
    /// A block or a gradient: always.
    Always,
    /// A boundary: unless the stash is on the device.
    UnlessStashedThere,
}

impl DeviceSide {
    pub(super) fn new(
        config: &Config,
        device: Box<dyn Device>,
        plan: &Plan,
        used: &Arc<Used>,
        index: usize,
    ) -> Result<DeviceSide, Error> {
        let first = device.first();
        let slots = |holder| {
            let slots = plan.regions.slots(holder, Side::Device);
            Slots { at: first + slots.at, ..slots }
        };
        Ok(DeviceSide {
            device,
            weights: slots(Holder::Weights),
            gradients: slots(Holder::Gradients),
            inputs: slots(Holder::Inputs),
            outputs: slots(Holder::Outputs),
            chunk_state: slots(Holder::ChunkState).all(),
            workspace: slots(Holder::Workspace).all(),
            link: config.link_bytes_per_second()?,
            boundaries_cross: !plan.stash_on_device(),
            used: used.clone(),
            index,
        })
    }

    /// This side, with another device in place of its own.
    #[cfg(test)]
    pub(super) fn with(self, by: impl FnOnce(Box<dyn Device>) -> Box<dyn Device>) -> DeviceSide {
        DeviceSide { device: by(self.device), ..self }
    }

    /// See [`Device::finish`].
    pub(super) fn finish(&self) {
        self.device.finish();
    }

    /// See [`Device::time_kernels`].
    pub(super) fn time_kernels(&self) {
        self.device.time_kernels();
    }

    /// See [`Device::take_kernel_times`].
    pub(super) fn take_kernel_times(&self) -> Result<Vec<KernelTime>, BoxedError> {
        self.device.take_kernel_times()
    }

    /// See [`Device::time_products`].
    pub(super) fn time_products(&self) {
        self.device.time_products();
    }

    /// See [`Device::store_products`].
    pub(super) fn store_products(&self) -> Result<Option<ProductTable>, BoxedError> {
        self.device.store_products()
    }

    /// See [`Device::pinned_bytes`].
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.device.pinned_bytes()
    }

    /// See [`Device::take_warnings`].
    pub(super) fn take_warnings(&self) -> Vec<String> {
        self.device.take_warnings()
    }

    /// See [`Device::read_back`].
    pub(super) fn read_back(&self, view: View) -> Result<Vec<f32>, BoxedError> {
        self.device.read_back(view)
    }

    /// See [`Device::is_finite`].
    pub(super) fn is_finite(&self, view: View, mark: i64) -> Result<bool, BoxedError> {
        self.device.is_finite(view, mark)
    }

    /// See [`Device::first_non_finite`].
    pub(super) fn first_non_finite(&self) -> Result<Option<i64>, BoxedError> {
        self.device.first_non_finite()
    }

    /// A weight slot that holds a published block of so many floats.
    pub(super) fn weights(&self, slot: u32, len: usize) -> View {
        self.weights.slot(slot, len)
    }

    /// The gradient accumulator of a block of so many numbers.
    pub(super) fn gradient(&self, slot: u32, len: usize) -> View {
        self.gradients.slot(slot, len)
    }

    /// Whether a boundary stays in the stash while kernels read or write it: where the device
    /// shares the host's memory, and no link is emulated.
    pub(super) fn stays_in_stash(&self, boundary: &Boundary) -> bool {
        let is_shared = self.device.shared().is_some() && self.link.is_none();
        is_shared && boundary.encoding == Encoding::Plain && !boundary.role.is_kv()
    }

    /// Counts the bytes of a boundary that stays in the stash, as if it was uploaded.
    pub(super) fn count_upload(&self, floats: usize) {
        self.link_used().uploaded.fetch_add((floats * size_of::<f32>()) as u64, Relaxed);
    }

    /// Counts the bytes of a boundary that stays in the stash, as if it was downloaded.
    pub(super) fn count_download(&self, floats: usize) {
        self.link_used().downloaded.fetch_add((floats * size_of::<f32>()) as u64, Relaxed);
    }

    /// The input slot of a boundary, in floats whatever it holds.
    pub(super) fn input(&self, placed: &Placed, floats: usize) -> View {
        self.inputs.slot(placed.slot, floats)
    }

    /// The output slot of a boundary, in floats whatever it holds.
    pub(super) fn output(&self, placed: &Placed, floats: usize) -> View {
        self.outputs.slot(placed.slot, floats)
    }

    /// Copies floats to the device.
    pub(super) fn upload(
        &self,
        to: View,
        from: &[f32],
        crosses: Crosses,
    ) -> Result<(), BoxedError> {
        let copy = || self.device.upload(to, from);
        self.moves(copy, size_of_val(from), &self.link_used().uploaded, crosses)
    }

    /// Copies floats from the device.
    pub(super) fn download(
        &self,
        to: &mut [f32],
        from: View,
        crosses: Crosses,
    ) -> Result<(), BoxedError> {
        let bytes = size_of_val(to);
        let copy = || self.device.download(to, from);
        self.moves(copy, bytes, &self.link_used().downloaded, crosses)
    }

    /// Copies a slot's elements from the same elements of another device's slot.
    pub(super) fn copy_from(
        &self,
        to: View,
        peer: &DeviceSide,
        from: View,
    ) -> Result<(), BoxedError> {
        let copy = || self.device.copy_from_peer(to, peer.device.for_peers(from));
        let bytes = to.len() * to.dtype.size();
        self.moves(copy, bytes, &self.link_used().peers, Crosses::Always)
    }

    fn link_used(&self) -> &LinkUsed {
        &self.used.links[self.index]
    }

    /// Copies a boundary from the stash to its slot.
    pub(super) fn upload_stashed(
        &self,
        to: View,
        from: &[f32],
        packing: Packing,
    ) -> Result<(), BoxedError> {
        let crosses = Crosses::UnlessStashedThere;
        if packing.encoding == Encoding::Plain {
            return self.upload(to, from, crosses);
        }
        let unpack = || self.device.upload_packed(to, from, packing);
        self.moves(unpack, size_of_val(from), &self.link_used().uploaded, crosses)
    }

    /// Copies a boundary from its slot to the stash.
    pub(super) fn download_stashed(
        &self,
        to: &mut [f32],
        from: View,
        packing: Packing,
    ) -> Result<(), BoxedError> {
        match packing.encoding {
            Encoding::Plain => self.download(to, from, Crosses::UnlessStashedThere),
            _ => self.download_packed(to, from, packing, Crosses::UnlessStashedThere),
        }
    }

    /// Packs numbers of the device on their way to the host.
    pub(super) fn download_packed(
        &self,
        to: &mut [f32],
        from: View,
        packing: Packing,
        crosses: Crosses,
    ) -> Result<(), BoxedError> {
        let bytes = size_of_val(to);
        let pack = || self.device.download_packed(to, from, packing);
        self.moves(pack, bytes, &self.link_used().downloaded, crosses)
    }

    /// Moves bytes, counts them, and takes as long as an emulated link would.
    fn moves(
        &self,
        copy: impl FnOnce() -> Result<(), BoxedError>,
        bytes: usize,
        count: &AtomicU64,
        crosses: Crosses,
    ) -> Result<(), BoxedError> {
        let begin = Instant::now();
        copy()?;
        count.fetch_add(bytes as u64, Relaxed);
        let over_link = crosses == Crosses::Always || self.boundaries_cross;
        throttle(begin, bytes as u64, self.link.filter(|_| over_link));
        Ok(())
    }

    /// Runs kernels on a micro-batch; `run` returns the floats of workspace it used at once.
    pub(super) fn compute(
        &self,
        batch: &BatchMetadata<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<(), BoxedError> {
        let used = self.device.compute(batch, run)?;
        self.used.workspace.fetch_max(used as u64, Relaxed);
        Ok(())
    }

    /// Whether the device keeps the order of its own queues. See [`Device::issues`].
    pub(super) fn issues(&self) -> bool {
        self.device.issues()
    }

    /// See [`Device::begins`].
    pub(super) fn begins(&self, operation: &Operation) -> Result<(), BoxedError> {
        self.device.begins(operation)
    }

    /// See [`Device::ends`].
    pub(super) fn ends(
        &self,
        operation: &Operation,
        value: f64,
        now: Duration,
    ) -> Result<Pending, BoxedError> {
        self.device.ends(operation, value, now)
    }
}
