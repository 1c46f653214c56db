//! Several rings under one clock, which meet to exchange data: the processes of a run.
//!
//! An operation on a lane of exchanges waits until every ring has begun its own. Then each takes
//! its time on its own host. Rings run the same exchanges in the same order, as processes do, so
//! the n-th operations of a lane belong together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::lanes::VirtualLanes;
use super::sharing::Cost;
use super::world::World;
use super::{Main, Record, Started};
use crate::config::RingConfig;
use crate::operation::Operation;
use crate::work::{Lane, Queue, WorkKind};

/// What rings exchange under one number: which lane, and how many came before on it.
type Number = (Queue, u64);

/// The exchanges that not all rings have begun.
pub(super) struct Meetings {
    rings: usize,
    open: HashMap<Number, Vec<Guest>>,
    /// Those that all have begun.
    complete: Vec<(Number, Vec<Guest>)>,
}

/// An operation of a ring that waits for those of the others.
struct Guest {
    ring: usize,
    kind: WorkKind,
    begin: Duration,
    cost: Cost,
}

/// A ring's place in the meetings.
pub(super) struct Member {
    meetings: Arc<Mutex<Meetings>>,
    ring: usize,
    /// Operations that a lane of exchanges has begun.
    begun: HashMap<Queue, u64>,
}

fn lock(meetings: &Mutex<Meetings>) -> MutexGuard<'_, Meetings> {
    meetings.lock().expect("nothing panics inside")
}

impl Member {
    /// Begins an operation that costs this, if it meets those of other rings. Returns the cost of
    /// one that meets none.
    pub(super) fn begin(
        &mut self,
        operation: &Operation,
        begin: Duration,
        cost: Cost,
    ) -> Option<Cost> {
        let queue = operation.queue();
        if !matches!(queue.lane, Lane::Fetch | Lane::Exchange) {
            return Some(cost);
        }
        let begun = self.begun.entry(queue).or_default();
        let number = (queue, *begun);
        *begun += 1;
        let kind = operation.work().row().kind;
        let mut meetings = lock(&self.meetings);
        let guests = meetings.open.entry(number).or_default();
        assert!(
            guests.iter().all(|guest| guest.kind == kind),
            "ring {} begins {}, and another one other work",
            self.ring,
            operation.work()
        );
        guests.push(Guest { ring: self.ring, kind, begin, cost });
        if guests.len() == meetings.rings {
            let guests = meetings.open.remove(&number).expect("it was just filled");
            meetings.complete.push((number, guests));
        }
        None
    }
}

/// A ring of several: its lanes, and what drives it.
pub struct JoinedRing<T> {
    config: RingConfig,
    lanes: VirtualLanes,
    main: Main<T>,
}

impl<T: 'static> JoinedRing<T> {
    /// A ring without a check of memory. `main` drives it, and each operation costs what `costs`
    /// says.
    pub fn new<C: Into<Cost>, F: Future<Output = T> + 'static>(
        config: RingConfig,
        costs: impl FnMut(&Operation) -> C + Send + 'static,
        main: impl FnOnce(crate::relay::Relay<VirtualLanes>) -> F + 'static,
    ) -> JoinedRing<T> {
        let main: Main<T> = Box::new(|relay| Box::pin(main(relay)));
        JoinedRing { config, lanes: VirtualLanes::unchecked(costs), main }
    }

    /// Runs rings in virtual time until all have ended. Returns for each the result of its `main`
    /// and its timeline.
    ///
    /// # Errors
    /// Nothing could move, and no operation was left to move the clock. The error names the tasks
    /// that had not ended.
    pub fn run(rings: Vec<JoinedRing<T>>) -> Result<Vec<(T, Vec<Record>)>, Vec<String>> {
        let open = Meetings { rings: rings.len(), open: HashMap::new(), complete: Vec::new() };
        let meetings = Arc::new(Mutex::new(open));
        let start = |(ring, of): (usize, JoinedRing<T>)| {
            let JoinedRing { config, lanes, main } = of;
            lanes.join(Member { meetings: meetings.clone(), ring, begun: HashMap::new() });
            Started::new(lanes, config, main)
        };
        let mut started: Vec<Started<T>> = rings.into_iter().enumerate().map(start).collect();
        loop {
            started.iter_mut().for_each(|ring| ring.world.settle());
            let complete = std::mem::take(&mut lock(&meetings).complete);
            if !complete.is_empty() {
                for ((queue, _), guests) in complete {
                    let all_there = guests.iter().map(|guest| guest.begin).max();
                    let all_there = all_there.expect("a meeting has guests");
                    for Guest { ring, cost, .. } in guests {
                        started[ring].lanes.meet(queue, all_there, cost);
                    }
                }
                continue;
            }
            let next = |ring: &mut Started<T>| ring.world.next_end();
            let ends = started.iter_mut().enumerate();
            let ends =
                ends.filter_map(|(at, ring)| next(ring).map(|(end, queue)| (end, at, queue)));
            match ends.min() {
                Some((_, at, queue)) => started[at].world.end(queue),
                None => break,
            }
        }
        let unfinished = started.iter().map(|ring| &ring.world).flat_map(World::unfinished);
        let unfinished: Vec<String> = unfinished.collect();
        match unfinished.is_empty() {
            true => Ok(started.into_iter().map(Started::result).collect()),
            false => Err(unfinished),
        }
    }
}
