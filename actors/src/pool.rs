//! Slots: fixed pieces of memory, made at start, taken by one actor.
//!
//! A pool hands out numbers; the device knows the memory behind each. Occupancy is memory in use,
//! and waiting for a slot is the ring's backpressure. [`Pool`] is not `Clone` and acquires through
//! `&mut self`: a second taker, which can deadlock, does not compile. A [`Held`] slot carries a
//! label of its content. It is asked for by that label, and is free when its last holder drops it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::schedule::{BlockId, BoundaryId, DeviceId, MicroBatch, Portion, Version};

/// The content that a slot was acquired for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// One device visit between announcement and end: a credit, no memory.
    Visit(usize),
    /// A published block, or a portion of it, on a device.
    Portion(Portion, Version),
    /// A master, on the host.
    Block(BlockId, Version),
    /// A gradient of the step that reads this version.
    Gradient(Portion, Version),
    /// One micro-batch of a boundary, or part of it.
    Boundary(BoundaryId, MicroBatch),
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Content::Visit(visit) => write!(f, "device visit {visit}"),
            Content::Portion(portion, version) => write!(f, "{portion} v{version}"),
            Content::Block(block, version) => write!(f, "{block} v{version}"),
            Content::Gradient(portion, version) => write!(f, "gradient of {portion} v{version}"),
            Content::Boundary(boundary, m) => write!(f, "{boundary} of micro-batch {m}"),
        }
    }
}

#[derive(Debug)]
struct Shared {
    name: &'static str,
    device: Option<DeviceId>,
    slots: Mutex<Slots>,
    freed: Notify, // woken: the taker; by: any release
}

#[derive(Debug)]
struct Slots {
    holders: Vec<Option<Content>>,
    in_use: u32,
    peak: u32,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        // A panic inside is reported where it happens; slots must come back all the same.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to take slots: one per pool.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// A pool of free slots on the host.
    pub fn new(name: &'static str, slots: u32) -> Pool {
        Pool::at(name, None, slots)
    }

    /// A pool of free slots on a device.
    pub fn on_device(name: &'static str, device: DeviceId, slots: u32) -> Pool {
        Pool::at(name, Some(device), slots)
    }

    fn at(name: &'static str, device: Option<DeviceId>, slots: u32) -> Pool {
        let slots = Slots { holders: vec![None; slots as usize], in_use: 0, peak: 0 };
        let slots = Mutex::new(slots);
        let freed = Notify::new();
        Pool { shared: Arc::new(Shared { name, device, slots, freed }) }
    }

    /// The pool's name, as in configuration and metrics.
    pub fn name(&self) -> &'static str {
        self.shared.name
    }

    /// A gauge of the pool, for reports.
    pub fn gauge(&self) -> Gauge {
        Gauge { shared: self.shared.clone() }
    }

    /// Takes the lowest free slot.
    pub async fn acquire(&mut self, content: Content) -> Held {
        self.take(content, |slots| slots.holders.iter().position(Option::is_none)).await
    }

    /// Takes the slot of this number.
    pub async fn acquire_slot(&mut self, slot: u32, content: Content) -> Held {
        let slot = slot as usize;
        self.take(content, |slots| slots.holders[slot].is_none().then_some(slot)).await
    }

    async fn take(&mut self, content: Content, pick: impl Fn(&Slots) -> Option<usize>) -> Held {
        loop {
            if let Some(taken) = self.try_take(content, &pick) {
                return taken;
            }
            self.shared.freed.notified().await;
        }
    }

    fn try_take(&self, content: Content, pick: impl Fn(&Slots) -> Option<usize>) -> Option<Held> {
        let mut slots = self.shared.lock();
        let slot = pick(&slots)?;
        slots.in_use += 1;
        slots.peak = slots.peak.max(slots.in_use);
        slots.holders[slot] = Some(content);
        Some(Held(Arc::new(Lease { shared: self.shared.clone(), slot: slot as u32, content })))
    }
}

/// A taken slot. Clones hold the same slot; it is free when the last is dropped.
#[derive(Clone, Debug)]
pub struct Held(Arc<Lease>);

#[derive(Debug)]
struct Lease {
    shared: Arc<Shared>,
    slot: u32,
    content: Content,
}

impl Held {
    /// The slot's number, if it holds what the caller asks for.
    ///
    /// # Panics
    /// The slot holds something else: "block 7 v3 asked, slot 0 of weights holds block 5 v3".
    pub fn slot(&self, asked: Content) -> u32 {
        let Lease { shared, slot, content } = &*self.0;
        assert!(*content == asked, "{asked} asked, slot {slot} of {} holds {content}", shared.name);
        *slot
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut slots = self.shared.lock();
        slots.holders[self.slot as usize] = None;
        slots.in_use -= 1;
        drop(slots);
        self.shared.freed.notify_one();
    }
}

/// Reads a pool without taking from it.
#[derive(Clone, Debug)]
pub struct Gauge {
    shared: Arc<Shared>,
}

/// A pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// The pool's name.
    pub name: &'static str,
    /// The device that has it; `None`: the host.
    pub device: Option<DeviceId>,
    /// The content of each slot, if it is taken.
    pub holders: Vec<Option<Content>>,
    /// The most slots that were taken at once.
    pub peak: u32,
}

impl Gauge {
    /// The state of the pool now.
    pub fn read(&self) -> Occupancy {
        let slots = self.shared.lock();
        let Shared { name, device, .. } = *self.shared;
        Occupancy { name, device, holders: slots.holders.clone(), peak: slots.peak }
    }
}
