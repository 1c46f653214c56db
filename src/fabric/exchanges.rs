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
        beat: Beat<'_>,
        exchange: impl FnOnce(Tag, &dyn Fn() -> bool) -> Result<R, Lost>,
    ) -> Result<R, Lost> {
        let mut next = self.next[channel as usize].lock().expect("nothing panics inside");
        let tag = Tag { channel, number: *next };
        *next += count;
        let begin = Instant::now();
        // Between steps ranks do unequal work: one writes a checkpoint, the others wait.
        let patience = if channel == Channel::Control { 10 * self.patience } else { self.patience };
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
        self.make(channel, 1, beat, |tag, goes_on| {
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
        self.make(Channel::Gradients, 1, beat, |tag, goes_on| {
            parts::deal(&*self.fabric, tag, parts, gradient, received, goes_on)
        })
    }

    /// Waits until all ranks are here.
    pub(crate) fn meet(&self) -> Result<(), Lost> {
        self.gather(Channel::Control, &[], &|| ()).map(|_| ())
    }

    /// The same bytes to all ranks, and those of each: see [`gather`].
    pub(crate) fn gather(
        &self,
        channel: Channel,
        own: &[u8],
        beat: Beat<'_>,
    ) -> Result<Vec<Vec<u8>>, Lost> {
        self.make(channel, 2, beat, |tag, goes_on| gather(&*self.fabric, tag, own, goes_on))
    }
}
