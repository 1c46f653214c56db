//! What a caller may do to a relay that is not in the book: nothing hangs, nothing is lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::rehearsal::Rehearsal;
use crate::common::*;
use l2l_actors::schedule::{Capacities, Pools, Schedule, StepPlan, Visit, VisitKind, relay};
use l2l_actors::threads::ThreadLanes;
use l2l_actors::virtual_time::VirtualLanes;
use l2l_actors::{Relay, RingConfig, RingError};

fn small() -> Schedule {
    let model = model(2, 1, true);
    relay(&model, &everything(&model, 2)).expect("a model of ours")
}

fn lanes(schedule: &Schedule) -> Arc<ThreadLanes<Rehearsal>> {
    let pools = Pools::of(schedule, &Capacities::default());
    let work = Rehearsal::new(schedule.blocks.len(), None);
    Arc::new(ThreadLanes::start(work, &pools, None).expect("threads"))
}

/// A step whose future was dropped goes on; the ring is then idle, and no watchdog minds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(miri, ignore = "a ring that Miri runs does nothing for longer than the patience")]
async fn a_cancelled_step_goes_on_and_leaves_an_idle_ring() {
    let schedule = small();
    let patience = Duration::from_millis(500);
    let config = config(&schedule, &Capacities::default(), true);
    let config = RingConfig { watchdog: Some(patience.into()), ..config };
    let mut relay = Relay::start(config, lanes(&schedule)).expect("threads");
    let observer = relay.observer();
    {
        let mut step = Box::pin(step_of(&mut relay, &schedule, ()));
        let started = std::future::poll_fn(|cx| {
            _ = step.as_mut().poll(cx);
            std::task::Poll::Ready(())
        });
        started.await;
    }
    while !observer.snapshot().versions.iter().all(|&version| version == 1) {
        tokio::task::yield_now().await;
    }
    let begin = Instant::now();
    while begin.elapsed() < 3 * patience {
        tokio::task::yield_now().await;
    }
    let resolved = step_of(&mut relay, &schedule, ()).await.expect("an idle ring is not hung");
    assert_eq!(resolved.step, 1, "the cancelled step was step 0");
    relay.stop().await.expect("nothing fails here");
}

/// Tasks that vanish with their runtime fail the relay that another runtime drives.
#[test]
fn tasks_that_are_dropped_fail_the_ring() {
    let schedule = small();
    let config = config(&schedule, &Capacities::default(), false);
    let (mut relay, tasks) = Relay::wire(config, lanes(&schedule));
    let theirs = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    for task in tasks {
        theirs.spawn(task.future);
    }
    drop(theirs);
    let ours = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let error = ours.block_on(step_of(&mut relay, &schedule, ())).expect_err("nobody is there");
    assert!(error.to_string().contains("its task was dropped"), "{error}");
}

#[tokio::test]
async fn a_plan_of_another_ring_is_refused() {
    let schedule = small();
    let of = |weights| config(&schedule, &depths(weights, 1, 1, 1), false);
    let one = of(1);
    let two = of(2);
    let plan =
        Arc::new(StepPlan::new(schedule.clone(), two.pools).expect("pools were made for it"));
    let mut relay = Relay::start(one, lanes(&schedule)).expect("threads");
    let refused = relay.step(plan, ()).await;
    assert!(matches!(refused, Err(RingError::Refused(_))), "{refused:?}");
    step_of(&mut relay, &schedule, ()).await.expect("a refusal leaves the relay as it was");
    relay.stop().await.expect("nothing fails here");
}

/// One message a loss: there is room for one a micro-batch.
#[test]
fn more_losses_than_the_ring_has_room_for_are_refused() {
    let schedule = small();
    let mut twice = schedule.clone();
    let at = twice.visits.iter().position(|v| v.kind == VisitKind::Loss).expect("it has a loss");
    let layer = l2l_actors::schedule::LayerId(77);
    twice.visits.insert(at, Visit { layer, ..twice.visits[at].clone() });
    let pools = Pools::of(&twice, &Capacities::default());
    let config =
        RingConfig { pools, max_micro_batches: 2, ..config(&twice, &Capacities::default(), false) };
    let lanes = Arc::new(VirtualLanes::new(|_| ticks(1)));
    let (relay, _tasks) = Relay::wire(config, lanes);
    let refusal = relay.plan(twice).expect_err("four losses");
    assert!(refusal.reason.contains("2 losses at most, one a micro-batch, not 4"), "{refusal}");
}
