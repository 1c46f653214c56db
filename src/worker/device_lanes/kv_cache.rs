//! Copies between a device and the KV cache.

use l2l_actors::BoxedError;

use super::DeviceLanes;
use super::side::DeviceSide;
use crate::tensor::View;
use crate::worker::CacheSlot;
use crate::worker::boundaries::Filled;

impl DeviceLanes {
    /// Copies what a layer's micro-batch has in the cache to the device.
    pub(super) fn read_kv(
        &self,
        side: &DeviceSide,
        filled: Filled<'_>,
        slot: View,
    ) -> Result<(), BoxedError> {
        let shared = &*self.shared;
        let host = shared.memory.lease();
        let step = filled.step();
        let slots = filled.state.cache_slots(filled.micro_batch);
        let width = slot.len() / slots.len();
        for (nth, cached) in slots.iter().enumerate() {
            let on_device = slot.part(nth * width..(nth + 1) * width);
            let from = host.cached(shared.plan.cached_at(step, cached.slot, 0), width);
            side.upload(on_device, from, None)?;
        }
        Ok(())
    }

    /// Copies the new keys and values of a layer's micro-batch from the device, behind the cached
    /// positions; or its states, in place of those that were cached.
    pub(super) fn write_kv(
        &self,
        side: &DeviceSide,
        filled: Filled<'_>,
        slot: View,
    ) -> Result<(), BoxedError> {
        let shared = &*self.shared;
        let host = shared.memory.lease();
        let step = filled.step();
        let slots = filled.state.cache_slots(filled.micro_batch);
        let positions = filled.state.positions(filled.micro_batch);
        let mut from = 0;
        for (&CacheSlot { slot: cache, cached }, new) in slots.iter().zip(positions) {
            let floats = filled.declared().bytes(1, new.len() as u64) as usize / size_of::<f32>();
            let at = shared.plan.cached_at(step, cache, cached + new.start);
            let to = host.cached_mut(at, floats);
            side.download(to, slot.part(from..from + floats), None)?;
            from += floats;
        }
        Ok(())
    }
}
