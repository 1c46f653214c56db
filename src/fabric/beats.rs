//! The beats of a rank: signs of life, with a report of its work so far.
//!
//! A beat is one message to each other rank: a byte of flags, and the [`Numbers`] in little-endian
//! order. The fabric does not know their meaning. A rank beats from a thread of its own, so nothing
//! else waits for the reports of others.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::exchanges::UNEQUAL;
use super::{Channel, Fabric, Lost, Rank, Tag};

/// The length of a report: room for all counters that ranks share, equal on all ranks.
pub(crate) const NUMBERS: usize = 32;

/// The report of a rank.
pub(crate) type Numbers = [f64; NUMBERS];

const BEAT: usize = 1 + NUMBERS * size_of::<f64>();

/// A flag of a beat: its rank has no more exchanges to make.
const ENDS: u8 = 1;

/// A flag of a beat: its numbers are a report.
const REPORTS: u8 = 2;

/// The last reports of all ranks. They outlive the exchanges, so that they can be read after the
/// end of a run.
pub(crate) struct Reports {
    pub(crate) rank: Rank,
    /// For each other rank its last report.
    last: Mutex<Vec<Option<Numbers>>>,
    /// Bytes that this rank sent and received, without beats.
    pub(super) moved: [AtomicU64; 2],
}

impl Reports {
    pub(super) fn new(fabric: &dyn Fabric) -> Reports {
        let last = Mutex::new(vec![None; fabric.ranks() as usize]);
        Reports { rank: fabric.rank(), last, moved: Default::default() }
    }

    /// The last report of each rank. This rank and those that have not reported yet have none.
    pub(crate) fn last(&self) -> Vec<Option<Numbers>> {
        self.last.lock().expect("nothing panics inside").clone()
    }

    /// Bytes that this rank sent and received.
    pub(crate) fn moved(&self) -> [u64; 2] {
        self.moved.each_ref().map(|bytes| bytes.load(Relaxed))
    }
}

/// Shared by the thread of beats and the exchanges.
pub(super) struct Beats {
    /// The cause of the end of beats, if a rank is lost.
    pub(super) lost: Mutex<Option<Lost>>,
    pub(super) is_lost: AtomicBool,
    /// This rank has no more exchanges to make.
    pub(super) ends: AtomicBool,
    /// This rank ends without the others.
    pub(super) is_dropped: AtomicBool,
    /// The reports of the other ranks.
    pub(super) reports: Arc<Reports>,
    /// Makes this rank's report, once there is something to report.
    pub(super) report: OnceLock<Box<dyn Fn() -> Numbers + Send + Sync>>,
}

impl Beats {
    pub(super) fn new(fabric: &dyn Fabric) -> Beats {
        Beats {
            lost: Mutex::default(),
            is_lost: AtomicBool::default(),
            ends: AtomicBool::default(),
            is_dropped: AtomicBool::default(),
            reports: Arc::new(Reports::new(fabric)),
            report: OnceLock::new(),
        }
    }

    /// Ends the exchanges, because this rank cannot beat.
    pub(super) fn lose(&self, what: String) {
        let tag = Tag::new(Channel::Beats, 0);
        *self.lost.lock().expect("nothing panics inside") = Some(Lost::Failed { what, tag });
        self.is_lost.store(true, Relaxed);
    }

    /// Beats until all ranks end, or one is lost. The last beat has the final report of each rank.
    pub(super) fn run(&self, fabric: &dyn Fabric, patience: Duration) {
        let others: Vec<Rank> = (0..fabric.ranks()).filter(|&rank| rank != fabric.rank()).collect();
        for number in (0..).take_while(|_| !self.is_dropped.load(Relaxed)) {
            let own = self.beat();
            let sends: Vec<_> = others.iter().map(|&rank| (rank, &own[..])).collect();
            let mut beats = vec![[0; BEAT]; others.len()];
            let receives = others.iter().zip(&mut beats);
            let mut receives: Vec<_> =
                receives.map(|(&rank, beat)| (rank, &mut beat[..])).collect();
            // Ranks need not start at the same time.
            let patience = if number == 0 { UNEQUAL * patience } else { patience };
            let begin = Instant::now();
            let goes_on = || !self.is_dropped.load(Relaxed) && begin.elapsed() < patience;
            let tag = Tag::new(Channel::Beats, number);
            if let Err(lost) = fabric.exchange(tag, &sends, &mut receives, &goes_on) {
                *self.lost.lock().expect("nothing panics inside") = Some(lost);
                self.is_lost.store(true, Relaxed);
                return;
            }
            let mut last = self.reports.last.lock().expect("nothing panics inside");
            for (&rank, beat) in others.iter().zip(&beats) {
                if let Some(numbers) = numbers_of(beat) {
                    last[rank as usize] = Some(numbers);
                }
            }
            drop(last);
            if own[0] & ENDS > 0 && beats.iter().all(|beat| beat[0] & ENDS > 0) {
                return;
            }
            if !self.ends.load(Relaxed) {
                thread::park_timeout((patience / 8).min(Duration::from_secs(1)));
            }
        }
    }

    fn beat(&self) -> [u8; BEAT] {
        let mut beat = [0; BEAT];
        // The flag is read before the report, so that a rank's last report has all its counts.
        let ends = self.ends.load(Relaxed);
        let report = self.report.get().map(|report| report());
        beat[0] = u8::from(ends) * ENDS + u8::from(report.is_some()) * REPORTS;
        for (to, number) in beat[1..].chunks_exact_mut(8).zip(report.iter().flatten()) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        beat
    }
}

fn numbers_of(beat: &[u8; BEAT]) -> Option<Numbers> {
    let number = |at: usize| {
        let bytes = beat[1 + 8 * at..][..8].try_into().expect("eight bytes");
        f64::from_le_bytes(bytes)
    };
    (beat[0] & REPORTS > 0).then(|| std::array::from_fn(number))
}
