//! The exchanges of a run with its other ranks: numbered, and ended when a rank stays silent.
//!
//! A rank may wait long for another that has more to do. So each rank has a thread that exchanges a
//! byte with all others many times a minute, and exchanges end when those *beats* do: a rank that
//! was stopped or cut off sends none. (A rank whose ring hangs is ended by its own watchdog.)

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::parts::{self, Parts};
use super::{Channel, Fabric, Lost, Rank, Tag, gather};

/// See the [module](self).
pub(crate) struct Exchanges {
    fabric: Arc<dyn Fabric>,
    /// For each channel the number of its next exchange. Exchanges of a channel follow each other.
    next: [Mutex<u64>; Channel::ALL.len()],
    patience: Duration,
    beats: Arc<Beats>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread of beats shares with the exchanges.
#[derive(Default)]
struct Beats {
    /// Why there are no more beats, if a rank is lost.
    lost: Mutex<Option<Lost>>,
    is_lost: AtomicBool,
    /// This rank has no more exchanges to make.
    ends: AtomicBool,
    /// This rank ends without the others.
    is_dropped: AtomicBool,
}

/// How many times longer a rank waits for one that beats and does not make the exchange. Ranks
/// whose plans differ could wait for each other for ever.
pub(super) const UNEQUAL: u32 = 10;

/// Tells the watchdog that an exchange still waits: it ends by itself.
type Beat<'b> = &'b dyn Fn();

impl Exchanges {
    /// With these ranks, which may be silent for as long as `patience`.
    pub(crate) fn new(fabric: Arc<dyn Fabric>, patience: Duration) -> Exchanges {
        let beats = Arc::new(Beats::default());
        let (other, shared) = (fabric.clone(), beats.clone());
        let run = move || shared.run(&*other, patience);
        let thread = thread::Builder::new().name("l2l-beats".into()).spawn(run).ok();
        Exchanges { fabric, next: Default::default(), patience, beats, thread: Mutex::new(thread) }
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
        let (begin, patience) = (Instant::now(), UNEQUAL * self.patience);
        let made = exchange(tag, &|| {
            beat();
            !self.beats.is_lost.load(Relaxed) && begin.elapsed() < patience
        });
        made.map_err(|lost| match &*self.beats.lost.lock().expect("nothing panics inside") {
            Some(Lost::Ranks { ranks, .. }) => Lost::Ranks { ranks: ranks.clone(), tag },
            _ => lost,
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

    /// The same bytes to all ranks, and those of each: see [`gather`].
    pub(crate) fn gather(
        &self,
        channel: Channel,
        own: &[u8],
        beat: Beat<'_>,
    ) -> Result<Vec<Vec<u8>>, Lost> {
        self.make(channel, 2, beat, |tag, goes_on| gather(&*self.fabric, tag, own, goes_on))
    }

    /// The same between steps.
    pub(crate) fn meet(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Lost> {
        self.gather(Channel::Control, own, &|| ())
    }

    /// Ends, when all ranks do.
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

impl Beats {
    /// Beats until all ranks end, or one is lost.
    fn run(&self, fabric: &dyn Fabric, patience: Duration) {
        let others: Vec<Rank> = (0..fabric.ranks()).filter(|&rank| rank != fabric.rank()).collect();
        for number in (0..).take_while(|_| !self.is_dropped.load(Relaxed)) {
            let own = [u8::from(self.ends.load(Relaxed))];
            let sends: Vec<_> = others.iter().map(|&rank| (rank, &own[..])).collect();
            let mut ends = vec![[0_u8]; others.len()];
            let receives = others.iter().zip(&mut ends);
            let mut receives: Vec<_> = receives.map(|(&rank, end)| (rank, &mut end[..])).collect();
            // Ranks need not start at the same time.
            let patience = if number == 0 { UNEQUAL * patience } else { patience };
            let begin = Instant::now();
            let goes_on = || !self.is_dropped.load(Relaxed) && begin.elapsed() < patience;
            let tag = Tag { channel: Channel::Beats, number };
            if let Err(lost) = fabric.exchange(tag, &sends, &mut receives, &goes_on) {
                *self.lost.lock().expect("nothing panics inside") = Some(lost);
                self.is_lost.store(true, Relaxed);
                return;
            }
            if own == [1] && ends.iter().all(|end| *end == [1]) {
                return;
            }
            if !self.ends.load(Relaxed) {
                thread::park_timeout((patience / 8).min(Duration::from_secs(1)));
            }
        }
    }
}
