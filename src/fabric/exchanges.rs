//! The exchanges of a run with its other ranks: numbered, and ended when a rank stays silent.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::parts::{self, Parts};
use super::{Channel, Fabric, Lost, Rank, Tag, gather};

/// See the [module](self).
pub(crate) struct Exchanges {
    fabric: Arc<dyn Fabric>,
    /// For each channel the number of its next exchange. Exchanges of a channel follow each other.
    next: [Mutex<u64>; Channel::ALL.len()],
    /// How long other ranks may be silent.
    patience: Duration,
}

/// How much longer a rank waits where others do work that it does not.
const UNEQUAL: u32 = 10;

/// Tells the watchdog that an exchange still waits: it ends by itself.
type Beat<'b> = &'b dyn Fn();

impl Exchanges {
    pub(crate) fn new(fabric: Arc<dyn Fabric>, patience: Duration) -> Exchanges {
        Exchanges { fabric, next: Default::default(), patience }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    /// Makes `count` exchanges of a channel.
    fn make<R>(
        &self,
        channel: Channel,
        count: u64,
        patience: Duration,
        beat: Beat<'_>,
        exchange: impl FnOnce(Tag, &dyn Fn() -> bool) -> Result<R, Lost>,
    ) -> Result<R, Lost> {
        let mut next = self.next[channel as usize].lock().expect("nothing panics inside");
        let tag = Tag { channel, number: *next };
        *next += count;
        let begin = Instant::now();
        exchange(tag, &|| {
            beat();
            begin.elapsed() < patience
        })
    }

    /// Completes a block of which each rank has its part: see [`parts::complete`].
    pub(crate) fn complete(
        &self,
        channel: Channel,
        parts: &Parts,
        block: &mut [u8],
        beat: Beat<'_>,
    ) -> Result<(), Lost> {
        self.make(channel, 1, self.patience, beat, |tag, goes_on| {
            parts::complete(&*self.fabric, tag, parts, block, goes_on)
        })
    }

    /// Sends each rank its part of a gradient, and receives theirs: see [`parts::deal`].
    pub(crate) fn deal(
        &self,
        parts: &Parts,
        gradient: &[u8],
        received: &mut [u8],
        beat: Beat<'_>,
    ) -> Result<(), Lost> {
        self.make(Channel::Gradients, 1, self.patience, beat, |tag, goes_on| {
            parts::deal(&*self.fabric, tag, parts, gradient, received, goes_on)
        })
    }

    /// The same bytes to all ranks, and those of each: see [`gather`].
    pub(crate) fn gather(
        &self,
        channel: Channel,
        own: &[u8],
        beat: Beat<'_>,
    ) -> Result<Vec<Vec<u8>>, Lost> {
        self.make(channel, 2, self.patience, beat, |tag, goes_on| {
            gather(&*self.fabric, tag, own, goes_on)
        })
    }

    /// The same on the channel of control, where ranks do unequal work before: one of them reads
    /// data longer than others, or writes a checkpoint alone.
    pub(crate) fn meet(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Lost> {
        self.make(Channel::Control, 2, UNEQUAL * self.patience, &|| (), |tag, goes_on| {
            gather(&*self.fabric, tag, own, goes_on)
        })
    }
}
