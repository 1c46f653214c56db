//! Memory on the host that operations share, by slot: landing blocks, gradients of earlier groups,
//! blocks of a file, the stash and the KV cache. Stash and KV cache may be on the device. Where the
//! device shares the host's memory, both have one arena.

use std::ops::Range;
use std::sync::Arc;

use crate::devices::{self, Device};
use crate::error::Error;
use crate::plan::{Holder, Plan, Side};
use crate::tensor::{Arena, Lease, Slots, View};

/// Memory of the host, in pools of slots.
pub(super) struct Memory {
    /// The arena of the devices, where they share the host's memory; else an arena of the host.
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
    /// Takes all memory, zeroed, and pins it if the device copies faster from pinned memory.
    ///
    /// # Errors
    /// The system has less memory.
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

    /// Panics if an operation has written between slots. Only builds with guard zones look:
    /// [`Arena::check_zones`].
    pub(super) fn check_zones(&self) {
        self.arena.check_zones();
    }

    /// Floats of the stash, as a view of the memory that has it.
    pub(super) fn in_stash(&self, range: Range<usize>) -> View {
        self.stash.all().part(range)
    }

    /// A lease for the operation that runs on the calling lane.
    pub(super) fn lease(&self) -> HostLease<'_> {
        // SAFETY: a lane asks for the slots, boundaries and cached positions that its operation
        // names, or that its visit reads and writes. The ring grants these: before the operation
        // has ended, no other operation writes them, or reads those that this operation writes.
        HostLease { memory: self, arena: unsafe { Lease::new(&self.arena) } }
    }
}

impl<'a> HostLease<'a> {
    /// The first `len` floats of a landing block.
    pub(super) fn landing(&self, slot: u32, len: usize) -> &'a mut [f32] {
        self.arena.write(self.memory.landing.slot(slot, len))
    }

    /// A whole landing block: with the EPS on file, whole pages are read and written.
    pub(super) fn whole_landing(&self, slot: u32) -> &'a mut [f32] {
        self.arena.write(self.memory.landing.whole(slot))
    }

    /// The first `len` floats of an earlier group's gradient.
    pub(super) fn part(&self, slot: u32, len: usize) -> &'a [f32] {
        self.arena.read(self.memory.parts.slot(slot, len))
    }

    /// The first `len` floats of a slot for a gradient that later groups add to theirs.
    pub(super) fn part_mut(&self, slot: u32, len: usize) -> &'a mut [f32] {
        self.arena.write(self.memory.parts.slot(slot, len))
    }

    /// A published block that was read from the EPS's file.
    pub(super) fn read_slot(&self, slot: u32) -> &'a [f32] {
        self.arena.read(self.memory.reads.whole(slot))
    }

    /// The slot that a published block is read to from the EPS's file, or completed in.
    pub(super) fn read_slot_mut(&self, slot: u32) -> &'a mut [f32] {
        self.arena.write(self.memory.reads.whole(slot))
    }

    /// A staged block with its optimizer states, and behind them a gradient that waited on file.
    pub(super) fn state_slot(&self, slot: u32) -> &'a mut [f32] {
        self.arena.write(self.memory.states.whole(slot))
    }

    /// Floats of the stash, to read.
    pub(super) fn stashed(&self, range: Range<usize>) -> &'a [f32] {
        self.arena.read(self.memory.in_stash(range))
    }

    /// Floats of the stash, to write.
    pub(super) fn stashed_mut(&self, range: Range<usize>) -> &'a mut [f32] {
        self.arena.write(self.memory.in_stash(range))
    }

    /// Floats of the KV cache, to read.
    pub(super) fn cached(&self, at: usize, len: usize) -> &'a [f32] {
        self.arena.read(self.memory.cache.all().part(at..at + len))
    }

    /// Floats of the KV cache, to write.
    pub(super) fn cached_mut(&self, at: usize, len: usize) -> &'a mut [f32] {
        self.arena.write(self.memory.cache.all().part(at..at + len))
    }
}
