//! Memory on the host that operations share, by slot: landing blocks, kept gradients, blocks of a
//! file, the stash and the KV cache. The last two may be on the device; where it shares its memory,
//! all are in it.

use std::sync::Arc;

use crate::devices::{self, Device};
use crate::error::Error;
use crate::plan::{Holder, Plan, Side};
use crate::tensor::{Arena, Lease, Slots, View};

/// See the [module](self).
pub(super) struct Memory {
    /// The devices', where they share theirs.
    arena: Arc<Arena>,
    landing: Slots,
    parts: Slots,
    reads: Slots,
    states: Slots,
    stash: Slots,
    cache: Slots,
}

/// Memory of the host, leased to one operation.
pub(super) struct HostLease<'a> {
    memory: &'a Memory,
    arena: Lease<'a>,
}

impl Memory {
    /// All of it, zeroed, and pinned where the device wants that.
    ///
    /// # Errors
    /// The system has not that much.
    pub(super) fn new(plan: &Plan, devices: &[Box<dyn Device>]) -> Result<Memory, Error> {
        let regions = &plan.regions;
        let no_memory = |error| Error::system(format_args!("no memory: {error}"));
        let (arena, from) = match devices[0].shared() {
            Some(arena) => {
                (arena.clone(), devices::host_from(plan.devices(), regions.device_floats()))
            }
            None => {
                let arena = Arena::planned(&regions.arena(Side::Host));
                let mut arena = arena.map_err(no_memory)?;
                devices[0].pin(arena.all_mut());
                (Arc::new(arena), 0)
            }
        };
        let on_host = |holder| {
            let slots = regions.slots(holder, Side::Host);
            Slots { at: from + slots.at, ..slots }
        };
        let stashed = |holder| match plan.stash_on_device() {
            true => regions.slots(holder, Side::Device),
            false => on_host(holder),
        };
        Ok(Memory {
            arena,
            landing: on_host(Holder::Landing),
            parts: on_host(Holder::Parts),
            reads: on_host(Holder::FileReads),
            states: on_host(Holder::FileStates),
            stash: stashed(Holder::Stash),
            cache: stashed(Holder::KvCache),
        })
    }

    /// Panics when an operation has written between slots. See [`Arena::check_zones`].
    pub(super) fn check_zones(&self) {
        self.arena.check_zones();
    }

    /// A part of the stash, as a view of the memory that has it.
    pub(super) fn in_stash(&self, (at, len): (usize, usize)) -> View {
        self.stash.all().part(at..at + len)
    }

    /// A lease for the operation that runs on the calling lane.
    pub(super) fn lease(&self) -> HostLease<'_> {
        // SAFETY: the worker asks for slots, boundaries and cached positions that its operation
        // names or that its visit reads and writes; these the ring grants: it lets nobody else
        // write them before the operation has ended, nor read what the operation writes.
        HostLease { memory: self, arena: unsafe { Lease::new(&self.arena) } }
    }
}

impl<'a> HostLease<'a> {
    /// The first `len` floats of a landing block.
    pub(super) fn landing(&self, slot: u32, len: usize) -> &'a mut [f32] {
        self.arena.write(self.memory.landing.slot(slot, len))
    }

    /// A landing block to its end: with the EPS on file, whole pages are read and written.
    pub(super) fn whole_landing(&self, slot: u32) -> &'a mut [f32] {
        self.arena.write(self.memory.landing.whole(slot))
    }

    /// The first `len` floats of a gradient that is kept for later groups.
    pub(super) fn part(&self, slot: u32, len: usize) -> &'a [f32] {
        self.arena.read(self.memory.parts.slot(slot, len))
    }

    /// The same, to write.
    pub(super) fn part_mut(&self, slot: u32, len: usize) -> &'a mut [f32] {
        self.arena.write(self.memory.parts.slot(slot, len))
    }

    /// A published block as it was read from the EPS's file.
    pub(super) fn read_slot(&self, slot: u32) -> &'a [f32] {
        self.arena.read(self.memory.reads.whole(slot))
    }

    /// The same, to be read to.
    pub(super) fn read_slot_mut(&self, slot: u32) -> &'a mut [f32] {
        self.arena.write(self.memory.reads.whole(slot))
    }

    /// A block with its optimizer states, and its gradient behind them where that waits.
    pub(super) fn state_slot(&self, slot: u32) -> &'a mut [f32] {
        self.arena.write(self.memory.states.whole(slot))
    }

    /// A boundary in the stash, by its first float and floats.
    pub(super) fn stashed(&self, place: (usize, usize)) -> &'a [f32] {
        self.arena.read(self.memory.in_stash(place))
    }

    /// The same, to write.
    pub(super) fn stashed_mut(&self, place: (usize, usize)) -> &'a mut [f32] {
        self.arena.write(self.memory.in_stash(place))
    }

    /// So many floats of the KV cache.
    pub(super) fn cached(&self, at: usize, len: usize) -> &'a [f32] {
        self.arena.read(self.memory.cache.all().part(at..at + len))
    }

    /// The same, to write.
    pub(super) fn cached_mut(&self, at: usize, len: usize) -> &'a mut [f32] {
        self.arena.write(self.memory.cache.all().part(at..at + len))
    }
}
