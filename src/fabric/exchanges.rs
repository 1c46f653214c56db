//! The exchanges of a run with its other ranks: numbered, and ended when a rank stays silent.
//!
//! A rank may wait long for another that has more to do. So each rank has a thread that exchanges
//! short messages, *beats*, with all others many times a minute. When the beats of a rank end, it
//! was stopped or cut off, and the exchanges of the others fail. (A rank whose ring hangs is ended
//! by its own watchdog.)

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use l2l_actors::schedule::BlockId;

use super::beats::{Beats, Numbers, Reports};
use super::clock::{self, ClockOffset};
use super::parts::{self, Parts};
use super::{Channel, Fabric, Lost, Rank, Tag, gather};
use crate::limits::no_thread;

/// The exchanges of this rank, numbered by channel, and its beats.
pub(crate) struct Exchanges {
    fabric: Counted,
    /// For each channel the number of its next exchange. The lock is held during an exchange.
    next: [Mutex<u64>; Channel::ALL.len()],
    patience: Duration,
    beats: Arc<Beats>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The factor of patience for a rank that beats but does not make the exchange. Without this limit,
/// ranks whose plans differ could wait for each other for ever.
pub(super) const UNEQUAL: u32 = 10;

/// Called while an exchange waits, so that the watchdog leaves it alone: it ends by itself.
type Beat<'b> = &'b dyn Fn();

impl Exchanges {
    /// Starts the beats. A rank is lost after `patience` without a beat.
    pub(crate) fn new(fabric: Arc<dyn Fabric>, patience: Duration) -> Exchanges {
        let beats = Arc::new(Beats::new(&*fabric));
        let other = fabric.clone();
        let shared = beats.clone();
        let run = move || shared.run(&*other, patience);
        let thread = thread::Builder::new().name("l2l-beats".into()).spawn(run);
        // Without beats no exchange can be made: each returns this error.
        let thread = thread.map_err(|error| beats.lose(no_thread(error))).ok();
        let fabric = Counted { fabric, reports: beats.reports.clone() };
        Exchanges { fabric, next: Default::default(), patience, beats, thread: Mutex::new(thread) }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    /// Sends these numbers to all ranks with every beat from now on. Only the first call has an
    /// effect. The thread of beats calls `report` about once a second, and once more at the end.
    pub(crate) fn report_with(&self, report: impl Fn() -> Numbers + Send + Sync + 'static) {
        _ = self.beats.report.set(Box::new(report));
    }

    pub(crate) fn reports(&self) -> Arc<Reports> {
        self.beats.reports.clone()
    }

    /// Makes `count` exchanges of a channel.
    fn make<R>(
        &self,
        channel: Channel,
        subject: u64,
        count: u64,
        beat: Beat<'_>,
        exchange: impl FnOnce(Tag, &dyn Fn() -> bool) -> Result<R, Lost>,
    ) -> Result<R, Lost> {
        let mut next = self.next[channel as usize].lock().expect("nothing panics inside");
        let tag = Tag { channel, number: *next, subject };
        *next += count;
        let begin = Instant::now();
        let patience = UNEQUAL * self.patience;
        let made = exchange(tag, &|| {
            beat();
            !self.beats.is_lost.load(Relaxed) && begin.elapsed() < patience
        });
        made.map_err(|lost| match &*self.beats.lost.lock().expect("nothing panics inside") {
            Some(Lost::Ranks { ranks, .. }) => Lost::Ranks { ranks: ranks.clone(), tag },
            Some(Lost::Failed { what, .. }) => Lost::Failed { what: what.clone(), tag },
            _ => lost,
        })
    }

    /// Completes a block, or other data of which each rank has a part, with [`parts::all_gather`].
    pub(crate) fn all_gather(
        &self,
        channel: Channel,
        subject: u64,
        parts: &Parts,
        block: &mut [u8],
        beat: Beat<'_>,
    ) -> Result<(), Lost> {
        self.make(channel, subject, 1, beat, |tag, goes_on| {
            parts::all_gather(&self.fabric, tag, parts, block, goes_on)
        })
    }

    /// Sends each rank its part of a block's gradient, with [`parts::all_to_all`].
    pub(crate) fn all_to_all(
        &self,
        block: BlockId,
        parts: &Parts,
        gradient: &[u8],
        received: &mut [u8],
        beat: Beat<'_>,
    ) -> Result<(), Lost> {
        self.make(Channel::Gradients, u64::from(block.0), 1, beat, |tag, goes_on| {
            parts::all_to_all(&self.fabric, tag, parts, gradient, received, goes_on)
        })
    }

    /// Sends bytes to all ranks, and returns the bytes of each, with [`gather`].
    pub(crate) fn gather(
        &self,
        channel: Channel,
        own: &[u8],
        beat: Beat<'_>,
    ) -> Result<Vec<Vec<u8>>, Lost> {
        self.make(channel, 0, 2, beat, |tag, goes_on| gather(&self.fabric, tag, own, goes_on))
    }

    /// Sends bytes to all ranks between steps, and returns the bytes of each.
    pub(crate) fn meet(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Lost> {
        self.gather(Channel::Control, own, &|| ())
    }

    /// Measures how a clock of this rank differs from the first rank's, between steps.
    pub(crate) fn clock_offset(&self, now: &dyn Fn() -> Duration) -> Result<ClockOffset, Lost> {
        self.make(Channel::Control, 0, clock::EXCHANGES, &|| (), |tag, goes_on| {
            clock::offset(&self.fabric, tag, now, goes_on)
        })
    }

    /// Sends bytes of one rank to the first, between steps. Collective: every rank must call it. On
    /// the first rank, `bytes` receives the message.
    pub(crate) fn to_first(&self, from: Rank, bytes: &mut [u8]) -> Result<(), Lost> {
        self.make(Channel::Control, 0, 1, &|| (), |tag, goes_on| match self.rank() {
            0 => self.fabric.exchange(tag, &[], &mut [(from, bytes)], goes_on),
            own if own == from => self.fabric.exchange(tag, &[(0, bytes)], &mut [], goes_on),
            _ => Ok(()),
        })
    }

    /// Waits until all ranks end. Then each has the last report of every other.
    pub(crate) fn end(&self) {
        self.beats.ends.store(true, Relaxed);
        self.join();
    }

    fn join(&self) {
        let thread = self.thread.lock().expect("nothing panics inside").take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            _ = thread.join();
        }
    }
}

impl Drop for Exchanges {
    fn drop(&mut self) {
        self.beats.is_dropped.store(true, Relaxed);
        self.join();
    }
}

/// A fabric that counts the bytes of its messages.
pub(super) struct Counted {
    pub(super) fabric: Arc<dyn Fabric>,
    pub(super) reports: Arc<Reports>,
}

impl Fabric for Counted {
    fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    fn exchange(
        &self,
        tag: Tag,
        sends: &[(Rank, &[u8])],
        receives: &mut [(Rank, &mut [u8])],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost> {
        self.fabric.exchange(tag, sends, receives, goes_on)?;
        let sent: usize = sends.iter().map(|(_, message)| message.len()).sum();
        let received: usize = receives.iter().map(|(_, message)| message.len()).sum();
        for (moved, bytes) in self.reports.moved.iter().zip([sent, received]) {
            moved.fetch_add(bytes as u64, Relaxed);
        }
        Ok(())
    }
}
