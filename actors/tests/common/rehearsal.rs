//! Work without tensors for real threads: the memory oracle, and one operation that may fail.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use l2l_actors::schedule::{DeviceId, Version};
use l2l_actors::threads::LaneWork;
use l2l_actors::virtual_time::Memory;
use l2l_actors::work::{MasterAt, Stored, Work};
use l2l_actors::{BoxedError, Fault, Operation, Step};
use tokio::sync::Notify;

/// Names an operation the same in every run: slots may differ, these do not.
#[derive(Clone, Debug, PartialEq)]
pub struct Name {
    pub step: Version,
    pub device: Option<DeviceId>,
    pub visit: Option<usize>,
    pub what: String,
}

impl Name {
    pub fn of(step: Version, device: Option<DeviceId>, work: &Work) -> Name {
        let visit = match *work {
            Work::Compute { device_visit, .. } => Some(device_visit),
            _ => None,
        };
        // A boundary is uploaded for each visit that reads it: the first of them fails.
        Name { step, device, visit, what: work.to_string() }
    }
}

/// What happens at one operation.
#[derive(Clone, Debug)]
pub enum Event {
    Fails(Fault),
    /// Somebody waits for this, and then drops the relay.
    Notifies(Arc<Notify>),
    /// It takes this long, and tells the watchdog meanwhile that it runs.
    IsSlow(Duration),
}

#[derive(Default)]
pub struct Rehearsal {
    memory: Mutex<Memory>,
    event: Option<(Name, Event)>,
    /// Ends a hang that nothing else may end.
    released: AtomicBool,
    /// Versions of the blocks as the operations that were done left them.
    versions: Mutex<Vec<Version>>,
}

impl Rehearsal {
    pub fn new(blocks: usize, event: Option<(Name, Event)>) -> Rehearsal {
        let versions = Mutex::new(vec![0; blocks]);
        Rehearsal { event, versions, ..Rehearsal::default() }
    }

    pub fn versions(&self) -> Vec<Version> {
        self.versions.lock().expect("nothing panics inside").clone()
    }

    pub fn release(&self) {
        self.released.store(true, Relaxed);
    }

    fn hang(&self, operation: &Operation) {
        while !operation.is_cancelled() && !self.released.load(Relaxed) {
            thread::park_timeout(Duration::from_millis(1));
        }
    }
}

impl LaneWork for Rehearsal {
    type Batch = ();

    fn begin(&self, _step: &Arc<Step>, _batch: (), _now: Duration) {}

    fn perform(&self, operation: &Operation) -> Result<f64, BoxedError> {
        let work = operation.work();
        let device = operation.queue().device;
        match &self.event {
            Some((name, event)) if *name == Name::of(operation.step().number, device, work) => {
                match event {
                    Event::Fails(Fault::Error) => return Err("an injected error".into()),
                    Event::Fails(Fault::Panic) => panic!("an injected panic"),
                    Event::Fails(Fault::Hang) => {
                        self.hang(operation);
                        return Err("a hang that ended".into());
                    }
                    Event::Notifies(somebody) => somebody.notify_one(),
                    Event::IsSlow(duration) => {
                        let begin = Instant::now();
                        while begin.elapsed() < *duration {
                            operation.still_runs();
                            thread::park_timeout(*duration / 64);
                        }
                    }
                }
            }
            _ => {}
        }
        self.memory.lock().expect("an oracle that found nothing").begin(operation);
        self.memory.lock().expect("an oracle that found nothing").end(operation);
        let mut versions = self.versions.lock().expect("nothing panics inside");
        match work {
            Work::Update { block, master: MasterAt::Memory, .. }
            | Work::Store { block, stored: Stored::State { .. }, .. } => {
                versions[block.0 as usize] += 1
            }
            Work::Carry { .. } => {
                let carried = operation.step().plan.carried.iter();
                carried.for_each(|block| versions[block.0 as usize] += 1);
            }
            _ => {}
        }
        Ok(1.0)
    }
}
