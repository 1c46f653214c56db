//! A suite of tests for implementations of [`Ports`].
//!
//! An implementation says how to make itself ([`Subject`]), and calls [`check`] in a test. The
//! suite stands between the actors and the lanes: it sees every operation when it is queued, and
//! what its fence reports. It checks:
//!
//! 1. Each lane runs its operations once, in the order they were queued, one at a time, and each
//!    after all that it waits for, on any lane.
//! 2. Loss, norm and versions are the same, bit for bit, at every depth, eager and deferred.
//! 3. An actor that fails ends the ring at any of its waits: operations that need not run are
//!    dropped, committed updates run, lanes end. So does a relay that is dropped.
//! 4. After a stop nothing is queued, held or running.
//!
//! An implementation tests its own errors and panics itself, because only it can cause them.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::config::RingConfig;
use crate::context::{Fault, FaultInjection};
use crate::fence::Fence;
use crate::messages::Resolved;
use crate::names::ActorName;
use crate::operation::{Operation, Step};
use crate::ports::{Lanes, Ports};
use crate::relay::{Integrity, Relay, RingError};
use crate::schedule::{Capacities, Pools, Schedule, Version};
use crate::task::ActorTask;
use crate::work::Queue;

/// An implementation under test.
pub trait Subject {
    /// The implementation.
    type Ports: Ports;

    /// The schedule of its steps: small, with everything that the implementation supports.
    fn schedule(&self) -> Schedule;

    /// A new one, in the same state each time, with memory for these pools.
    fn ports(&self, pools: &Pools) -> Arc<Self::Ports>;

    /// The data of a step, the same each time.
    fn batch(&self, step: Version) -> <Self::Ports as Ports>::Batch;

    /// The suite ends a ring at every nth of its waits and operations. All of them by default; a
    /// slow implementation may take fewer.
    fn stride(&self) -> usize {
        1
    }

    /// Runs `main` and the tasks until all of them have ended. By default, a tokio runtime of this
    /// thread runs them.
    fn run(&self, ports: &Arc<Self::Ports>, tasks: Vec<ActorTask>, main: Main) {
        let _ = ports;
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a thread can have a runtime").block_on(async {
            let tasks: Vec<_> = tasks.into_iter().map(|task| tokio::spawn(task.future)).collect();
            main.await;
            for task in tasks {
                task.await.expect("a task catches its panics");
            }
        });
    }
}

/// The future that drives a relay.
pub type Main = Pin<Box<dyn Future<Output = ()>>>;

/// The counts of a run of the suite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConformanceReport {
    /// Operations whose order was checked.
    pub operations: usize,
    /// Rings run to their end.
    pub rings: usize,
    /// Rings ended by a failing actor.
    pub failures: usize,
    /// Rings ended by dropping the relay.
    pub drops: usize,
}

const STEPS: Version = 2;

/// Runs the suite.
///
/// # Panics
/// The subject breaks a rule. The message names the rule and the place.
pub fn check<S: Subject>(subject: &S) -> ConformanceReport {
    let mut report = ConformanceReport::default();
    for deferred in [false, true] {
        let mut first: Option<Vec<Resolved>> = None;
        for depth in [1, 2, 5] {
            let run = Run::of(subject, depth, deferred, None, End::Stops);
            assert!(run.error.is_none(), "depth {depth}: {:?}", run.error);
            let expected = first.get_or_insert_with(|| run.resolved.clone());
            assert_eq!(&run.resolved, expected, "results depend on depth {depth}");
            assert!(run.versions.iter().all(|&version| version == STEPS), "{:?}", run.versions);
            assert_eq!(run.held, 0, "slots are held after the stop");
            report.operations += in_order(&run.queued);
            report.rings += 1;
        }
        for actor in ActorName::all(&Pools::of(&subject.schedule(), &Capacities::default())) {
            for wait in (0..).step_by(subject.stride()) {
                let inject = FaultInjection { actor, wait, fault: Fault::Error };
                let run = Run::of(subject, 2, deferred, Some(inject), End::Stops);
                in_order(&run.queued);
                match run.error {
                    None => break, // it has no more waits
                    Some(RingError::Failed { cause, integrity }) => {
                        assert_eq!(cause.actor, actor, "{cause}");
                        let torn = matches!(integrity, Integrity::Torn(_));
                        let whole = deferred && !run.is_staged;
                        assert!(!(whole && torn), "{inject:?}: a deferred step was torn");
                        assert_eq!(run.held, 0, "{inject:?}: slots are held after the end");
                        report.failures += 1;
                    }
                    Some(error) => panic!("{inject:?}: {error}"),
                }
            }
        }
        for end in (0..).step_by(subject.stride()).map(End::Drops) {
            let run = Run::of(subject, 2, deferred, None, end);
            in_order(&run.queued);
            assert_eq!(run.held, 0, "{end:?}: slots are held after the drop");
            if run.resolved.len() as Version == STEPS {
                break;
            }
            report.drops += 1;
        }
    }
    report
}

/// The end of a run in which nothing fails.
#[derive(Clone, Copy, Debug)]
enum End {
    /// After its steps.
    Stops,
    /// The relay is dropped when this number of operations has been queued.
    Drops(usize),
}

/// One relay from start to end.
struct Run {
    resolved: Vec<Resolved>,
    error: Option<RingError>,
    versions: Vec<Version>,
    held: usize,
    queued: Vec<Queued>,
    is_staged: bool,
}

impl Run {
    fn of<S: Subject>(
        subject: &S,
        depth: u32,
        deferred: bool,
        inject: Option<FaultInjection>,
        end: End,
    ) -> Run {
        let schedule = subject.schedule();
        let depths = Capacities { weights: depth, gradients: depth, reduced: depth, stash: depth };
        let pools = Pools::of(&schedule, &depths);
        let is_staged = schedule.blocks.iter().any(|block| block.staged);
        let config = RingConfig {
            pools,
            blocks: schedule.blocks.len() as u32,
            max_layers: schedule.visits.len() as u32,
            max_micro_batches: schedule.micro_batches.len() as u32,
            deferred,
            trained: 0,
            delay_from: None,
            watchdog: None,
            inject,
        };
        let inner = subject.ports(&pools);
        let ports = Arc::new(Watched { inner: inner.clone(), queued: watch::Sender::default() });
        let (mut relay, tasks) = Relay::wire(config, ports.clone());
        let observer = relay.observer();
        let outcome = Arc::new(Mutex::new((Vec::new(), None)));
        let out = outcome.clone();
        let watched = ports.clone();
        let batches: Vec<_> = (0..STEPS).map(|step| subject.batch(step)).collect();
        subject.run(
            &inner,
            tasks,
            Box::pin(async move {
                let drive = async {
                    for batch in batches {
                        let plan = relay
                            .plan(schedule.clone())
                            .expect("the subject's schedule fits its ring");
                        let resolved = relay.step(plan, batch).await;
                        let mut out = out.lock().expect("one task writes");
                        match resolved {
                            Ok(resolved) => out.0.push(resolved),
                            Err(error) => return out.1 = Some(error),
                        }
                    }
                    out.lock().expect("one task writes").1 = relay.stop().await.err();
                };
                match end {
                    End::Stops => drive.await,
                    End::Drops(count) => either(drive, watched.queues_more_than(count)).await,
                }
                watched.closed().await;
            }),
        );
        let (resolved, error) = std::mem::take(&mut *outcome.lock().expect("one task writes"));
        let snapshot = observer.snapshot();
        let held = snapshot.pools.iter().flat_map(|pool| &pool.holders).flatten().count();
        let queued = ports.queued.send_replace(Vec::new());
        Run { resolved, error, versions: snapshot.versions, held, queued, is_staged }
    }
}

/// Runs both futures until one ends, and drops the other.
async fn either(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let mut one = Box::pin(one);
    let mut other = Box::pin(other);
    poll_fn(|cx| match one.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(()),
        Poll::Pending => other.as_mut().poll(cx),
    })
    .await;
}

/// Checks rule 1 for the operations that were done, and returns their number.
fn in_order(queued: &[Queued]) -> usize {
    let mut count = 0;
    let queues: BTreeSet<Queue> = queued.iter().map(|operation| operation.queue).collect();
    for queue in queues {
        let mut before = Duration::ZERO;
        let mut dropped = None;
        for operation in queued.iter().filter(|operation| operation.queue == queue) {
            let Queued { what, fence, waits, commits, .. } = operation;
            let Some(done) = fence.reached() else {
                dropped = dropped.or(Some(what));
                continue;
            };
            let passed = dropped.filter(|_| !commits);
            assert!(passed.is_none(), "{what} ran, {passed:?} queued before it did not");
            assert!(before <= done.begin, "{what} began before its lane was free");
            assert!(done.begin <= done.end, "{what} ended before it began");
            for wait in waits {
                let end = wait.reached().map(|done| done.end);
                assert!(end.is_some_and(|end| end <= done.begin), "{what} did not wait: {wait:?}");
            }
            before = done.end;
            count += 1;
        }
    }
    count
}

/// An operation that the subject received.
struct Queued {
    queue: Queue,
    what: String,
    fence: Fence,
    waits: Vec<Fence>,
    commits: bool,
}

/// Ports that note each operation before they hand it to the subject.
struct Watched<P> {
    inner: Arc<P>,
    queued: watch::Sender<Vec<Queued>>,
}

impl<P> Watched<P> {
    async fn queues_more_than(&self, count: usize) {
        let mut queued = self.queued.subscribe();
        _ = queued.wait_for(|queued| queued.len() > count).await.map(|_| ());
    }
}

#[async_trait]
impl<P: Ports> Lanes for Watched<P> {
    fn queue(&self, operation: Operation) {
        let queued = Queued {
            queue: operation.queue(),
            what: operation.work().to_string(),
            fence: operation.fence().clone(),
            waits: operation.waits().to_vec(),
            commits: operation.commits(),
        };
        self.queued.send_modify(|all| all.push(queued));
        self.inner.queue(operation);
    }

    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn close(&self) {
        self.inner.close();
    }

    async fn closed(&self) {
        self.inner.closed().await;
    }
}

impl<P: Ports> Ports for Watched<P> {
    type Batch = P::Batch;

    fn begin(&self, step: &Arc<Step>, batch: P::Batch) {
        self.inner.begin(step, batch);
    }
}
