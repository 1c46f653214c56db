//! The ledger adds up every slice as it ends, and charges each wait of a device's compute lane to
//! its cause.
//!
//! The charge follows the chain of causes back. An operation begins when the last thing it needs
//! has ended: the operation before it on its lane, an operation it waits on, or the one whose end
//! moved an actor to queue it. The operations of that chain cover a wait of the compute lane from
//! its end to its beginning. Each covers the time in which it ran, and the cause is its lane. The
//! time between the end of one and the begin of the next is the ring's own latency. So causes add
//! up to the wait, and a slow update is charged even if the upload that waited for it ended last.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use l2l_actors::work::{Lane, WorkKind};
use l2l_actors::{Record, RecordSink};

use super::tally::{DeviceTally, LayerTally, Tally, WaitCause};
use super::{Observe, Slice, SliceKind};
use crate::engine::StepReport;
use crate::worker::Records;

/// A link of the chain of causes.
#[derive(Clone, Copy, Default)]
struct Link {
    number: u64,
    lane: Option<Lane>,
    begin: Duration,
    end: Duration,
    released_by: Option<u64>,
}

/// Links that are kept. They only have to reach back to the begin of a wait.
const LINKS: usize = 1 << 12;

/// Slices that are kept for the live page and the report.
const SLICES: usize = 1 << 15;

/// Steps of the ring whose operations may still run.
const STEPS: usize = 4;

struct Inner {
    tally: Tally,
    /// True from a training step's begin until it is resolved.
    runs: bool,
    /// The last steps of the ring that do not train. Their operations count as outside.
    others: VecDeque<u64>,
    /// For each device, the time until which its compute lane is accounted for, and the layer that
    /// it computed last.
    standing: Vec<(Duration, usize)>,
    /// The operation that ended last.
    last: Option<u64>,
    links: Vec<Link>,
    recent: VecDeque<Slice>,
    kept_all: bool,
}

/// Adds up slices as they end: times by lane, by layer, and waits of the compute lane by cause.
pub struct Ledger {
    inner: Mutex<Inner>,
    /// Each with a flag that is true until the observer panics. Then it hears nothing more.
    observers: Vec<(Arc<dyn Observe>, AtomicBool)>,
}

impl Ledger {
    /// Makes a ledger for a model of `layers` layers, which hands each slice on to the observers.
    pub fn new(layers: usize, devices: u32, observers: Vec<Arc<dyn Observe>>) -> Ledger {
        let layers = vec![LayerTally::default(); layers];
        let count = devices.max(1) as usize;
        let devices = vec![DeviceTally::default(); count];
        let inner = Inner {
            tally: Tally { layers, devices, ..Tally::default() },
            runs: false,
            others: VecDeque::new(),
            standing: vec![(Duration::ZERO, 0); count],
            last: None,
            links: vec![Link::default(); LINKS],
            recent: VecDeque::with_capacity(SLICES), // a run allocates at its start alone
            kept_all: true,
        };
        let observers = observers.into_iter().map(|observer| (observer, AtomicBool::new(true)));
        let observers = observers.collect();
        Ledger { inner: Mutex::new(inner), observers }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nothing panics inside")
    }

    /// Notes that a step of the ring begins: until now, the compute lane had nothing to do.
    /// Observers hear of steps that do not train (validation, generation), and these count as
    /// outside.
    pub fn begins(&self, now: Duration, step: u64, trains: bool) {
        let mut inner = self.lock();
        inner.rest(now);
        inner.runs = trains;
        if !trains {
            inner.others.push_back(step);
            if inner.others.len() > STEPS {
                inner.others.pop_front();
            }
        }
    }

    /// Notes that a step is resolved, and charges the wait behind its last kernel, too.
    pub fn resolves(&self, now: Duration) {
        let mut inner = self.lock();
        if std::mem::take(&mut inner.runs) {
            for device in 0..inner.standing.len() {
                let last = inner.last;
                let (_, layer) = inner.standing[device];
                inner.charge(device, now, last, layer);
                inner.account(device, now);
            }
        } else {
            inner.rest(now);
        }
    }

    /// Adds up an operation that ended.
    pub fn heard(&self, slice: &Slice) {
        self.lock().take(slice);
        self.tell(|observer| observer.heard(slice));
    }

    /// Adds a time in which the run waited for a checkpoint.
    pub fn waited_for_checkpoint(&self, waited: Duration) {
        self.lock().tally.checkpoints += waited;
    }

    /// Tells observers that a training step ended.
    pub fn stepped(&self, report: &StepReport) {
        self.tell(|observer| observer.stepped(report));
    }

    fn tell(&self, what: impl Fn(&dyn Observe)) {
        for (observer, is_told) in self.observers.iter().filter(|(_, told)| told.load(Relaxed)) {
            // An observer that panics must not end the run.
            if catch_unwind(AssertUnwindSafe(|| what(&**observer))).is_err() {
                is_told.store(false, Relaxed);
            }
        }
    }

    /// All sums so far, with the time outside steps until now.
    pub fn tally(&self, now: Duration) -> Tally {
        let inner = self.lock();
        let mut tally = inner.tally.clone();
        if !inner.runs {
            tally.outside += inner.rested(now);
        }
        tally
    }

    /// True while no slice had to be dropped for a newer one.
    pub fn kept_all(&self) -> bool {
        self.lock().kept_all
    }

    /// The slices of the last training steps, at most `steps` of them.
    pub fn recent(&self, steps: u64) -> Vec<Slice> {
        let inner = self.lock();
        let newest = inner.recent.back().map_or(0, |slice| slice.step);
        // Updates of a step may end among the operations of the next, so the search goes one step
        // further back. It ends there, because lanes wait for the lock meanwhile.
        let within = |slice: &&Slice, steps: u64| slice.step.saturating_add(steps) > newest;
        let late =
            inner.recent.iter().rev().take_while(|slice| within(slice, steps.saturating_add(1)));
        let mut found: Vec<Slice> = late.filter(|slice| within(slice, steps)).copied().collect();
        drop(inner);
        found.reverse();
        found
    }
}

impl Inner {
    /// Counts the time until now as outside steps: the compute lanes had nothing to do.
    fn rest(&mut self, now: Duration) {
        self.tally.outside += self.rested(now);
        (0..self.standing.len()).for_each(|device| self.account(device, now));
    }

    /// Time until now that is not accounted for, the mean over the devices.
    fn rested(&self, now: Duration) -> Duration {
        let rested = |&(accounted, _): &(Duration, usize)| now.saturating_sub(accounted);
        self.standing.iter().map(rested).sum::<Duration>() / self.standing.len() as u32
    }

    fn account(&mut self, device: usize, until: Duration) {
        let (accounted, _) = &mut self.standing[device];
        *accounted = until.max(*accounted);
    }

    fn take(&mut self, slice: &Slice) {
        if slice.number.is_some() && self.others.contains(&slice.step) {
            return;
        }
        let took = slice.took();
        let device = usize::from(slice.device.unwrap_or(0)).min(self.standing.len() - 1);
        let of_device = &mut self.tally.devices[device].lanes[slice.lane as usize];
        let of_device = slice.lane.is_of_device().then_some(of_device);
        let tracks = of_device.into_iter().chain([&mut self.tally.lanes[slice.lane as usize]]);
        for track in tracks {
            track.busy += took;
            track.operations += 1;
        }
        if self.recent.len() == SLICES {
            self.recent.pop_front();
            self.kept_all = false;
        }
        self.recent.push_back(*slice);
        let lane = slice.lane;
        let Some(number) = slice.number else { return };
        let link = Link {
            number,
            lane: Some(lane),
            begin: slice.begin,
            end: slice.end,
            released_by: slice.released_by,
        };
        self.links[number as usize % LINKS] = link;
        self.last = Some(number);
        let layer = slice.layer.map(|layer| layer as usize);
        if lane == Lane::Compute {
            let layer = layer.unwrap_or(0);
            self.charge(device, slice.begin, slice.released_by, layer);
            self.standing[device].1 = layer;
            self.account(device, slice.end);
        }
        let Some(of_layer) = layer.and_then(|layer| self.tally.layers.get_mut(layer)) else {
            return;
        };
        let column = match (lane, slice.kind) {
            (Lane::Upload, _) => 0,
            (Lane::Compute, _) => 1,
            (Lane::Download, _) => 2,
            (_, SliceKind::Work(WorkKind::Gather | WorkKind::Scatter)) => 3,
            (_, SliceKind::Work(WorkKind::Update)) => {
                of_layer.updates += 1;
                return;
            }
            _ => return,
        };
        of_layer.visits[usize::from(slice.phase == Some("backward"))][column] += took;
    }

    /// Charges the wait of a device's compute lane until `end`. Operation `released_by` ended it.
    fn charge(&mut self, device: usize, end: Duration, mut released_by: Option<u64>, layer: usize) {
        let (begin, _) = self.standing[device];
        let devices = self.standing.len() as u32;
        let mut until = end;
        while until > begin {
            let found = released_by.map(|number| (number, self.links[number as usize % LINKS]));
            let link = found.filter(|(number, link)| link.lane.is_some() && link.number == *number);
            let mut add = |cause: WaitCause, since: Duration| {
                let since = since.max(begin);
                let time = until.saturating_sub(since);
                self.tally.devices[device].waited[cause as usize] += time;
                let time = time / devices;
                self.tally.waited[cause as usize] += time;
                if let Some(of_layer) = self.tally.layers.get_mut(layer) {
                    of_layer.waited[cause as usize] += time;
                }
                until = until.min(since);
            };
            let Some((_, link)) = link else {
                add(WaitCause::Ring, begin);
                return;
            };
            add(WaitCause::Ring, link.end);
            add(WaitCause::of(link.lane.expect("it was looked at")), link.begin);
            released_by = link.released_by;
        }
    }
}

impl RecordSink for Ledger {
    fn record(&self, record: &Record) {
        self.heard(&Slice::of(record));
    }
}

impl Records for Ledger {
    fn begun(&self, now: Duration, step: u64, trains: bool) {
        self.begins(now, step + 1, trains);
    }

    fn resolved(&self, now: Duration) {
        self.resolves(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(number: u64, lane: Lane, from: u64, to: u64, released_by: Option<u64>) -> Slice {
        Slice {
            number: Some(number),
            lane,
            device: None,
            kind: SliceKind::Work(match lane {
                Lane::Update => WorkKind::Update,
                _ => WorkKind::Forward,
            }),
            step: 0,
            layer: Some(0),
            phase: Some("forward"),
            micro_batch: None,
            block: None,
            version: None,
            bytes: 10,
            begin: Duration::from_secs(from),
            end: Duration::from_secs(to),
            released_by,
        }
    }

    /// An upload of one second had to wait for an update of six: the update is charged.
    #[test]
    fn a_wait_is_charged_along_the_chain_of_causes() {
        let ledger = Ledger::new(1, 1, Vec::new());
        let at = Duration::from_secs;
        ledger.begins(at(1), 0, true); // one second outside
        ledger.heard(&slice(0, Lane::Compute, 2, 4, None)); // one of the ring's latency
        ledger.heard(&slice(1, Lane::Update, 3, 9, Some(0)));
        ledger.heard(&slice(2, Lane::Upload, 10, 11, Some(1))); // one of latency before it
        ledger.heard(&slice(3, Lane::Compute, 11, 12, Some(2)));
        ledger.heard(&slice(4, Lane::Download, 12, 14, Some(3)));
        ledger.resolves(at(15));
        ledger.begins(at(18), 1, false); // a validation
        let validation = Slice { step: 1, ..slice(5, Lane::Compute, 18, 19, Some(4)) };
        ledger.heard(&validation);
        ledger.resolves(at(19));
        let tally = ledger.tally(at(20));
        let of = |cause: WaitCause| tally.waited[cause as usize].as_secs();
        assert_eq!(WaitCause::ALL.map(of), [1, 2, 0, 5, 0, 0, 0, 1 + 1 + 1]);
        assert_eq!(tally.outside, at(1 + 5));
        let busy = tally.lanes[Lane::Compute as usize].busy;
        assert_eq!(busy + tally.exposed() + tally.outside, at(20), "they add up to the time");
        assert_eq!(tally.layers[0].waited(true), at(3));
        assert_eq!(tally.layers[0].waited(false), at(8));
        assert_eq!(tally.layers[0].updates, 1);
    }

    /// A wait whose causes are no longer kept is charged to the ring.
    #[test]
    fn a_chain_may_break() {
        let ledger = Ledger::new(1, 1, Vec::new());
        ledger.begins(Duration::ZERO, 0, true);
        ledger.heard(&slice(7, Lane::Compute, 3, 4, Some(6)));
        assert_eq!(
            ledger.tally(Duration::from_secs(4)).waited[WaitCause::Ring as usize],
            Duration::from_secs(3)
        );
    }

    /// Two devices: each has its own waits, and the mean of them is the step's.
    #[test]
    fn each_device_waits_for_itself() {
        let ledger = Ledger::new(1, 2, Vec::new());
        let at = Duration::from_secs;
        let of = |device, slice| Slice { device: Some(device), ..slice };
        ledger.begins(Duration::ZERO, 0, true);
        ledger.heard(&of(0, slice(0, Lane::Compute, 0, 4, None)));
        ledger.heard(&of(1, slice(1, Lane::Upload, 0, 2, None)));
        ledger.heard(&of(1, slice(2, Lane::Compute, 2, 6, Some(1))));
        ledger.resolves(at(6));
        let tally = ledger.tally(at(6));
        let waited = |of: [Duration; WaitCause::ALL.len()]| of.iter().sum::<Duration>();
        assert_eq!(tally.devices[1].waited[WaitCause::Upload as usize], at(2));
        assert_eq!(
            tally.devices.iter().map(|of| waited(of.waited)).collect::<Vec<_>>(),
            [at(2), at(2)]
        );
        assert_eq!(tally.exposed(), at(2));
        let busy = |device: usize| tally.devices[device].lanes[Lane::Compute as usize].busy;
        assert_eq!((busy(0), busy(1)), (at(4), at(4)));
        assert_eq!(tally.lanes[Lane::Compute as usize].busy, at(8));
    }

    struct Fragile;

    impl Observe for Fragile {
        fn heard(&self, _: &Slice) {
            panic!("an application's observer");
        }
    }

    #[test]
    fn an_observer_that_panics_is_told_no_more() {
        let ledger = Ledger::new(1, 1, vec![Arc::new(Fragile)]);
        (0..3).for_each(|nth| ledger.heard(&slice(nth, Lane::Upload, nth, nth + 1, None)));
        assert_eq!(ledger.tally(Duration::ZERO).lanes[0].operations, 3);
    }
}
