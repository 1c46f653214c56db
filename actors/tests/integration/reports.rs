//! What the ring says of itself: times that sum up, and texts that name what is there.

use std::time::Duration;

use crate::common::times::Times;
use crate::common::*;
use l2l_actors::meter::Spent;
use l2l_actors::pool::{Content, Pool};
use l2l_actors::schedule::{BlockId, Capacities, relay};
use l2l_actors::virtual_time;
use l2l_actors::{ActorName, Fault, FaultInjection, Relay, RingConfig, RingError, Snapshot};

/// The ring after two steps and a stop.
fn after_two_steps(times: Times, inject: Option<FaultInjection>) -> (Option<RingError>, Snapshot) {
    let model = model(5, 2, true);
    let schedule = relay(&model, &everything(&model, 3)).expect("a model of ours");
    let config = RingConfig { inject, ..config(&schedule, &Capacities::default(), false) };
    let durations = move |operation: &l2l_actors::Operation| times.of(operation.work());
    let main = async move |mut relay: Relay<_>| {
        let observer = relay.observer();
        for _ in 0..2 {
            if let Err(error) = step_of(&mut relay, &schedule, ()).await {
                return (Some(error), observer.snapshot());
            }
        }
        (relay.stop().await.err(), observer.snapshot())
    };
    virtual_time::run(config, durations, main).expect("it ends").0
}

#[test]
fn busy_starved_and_blocked_sum_to_the_time_that_passed() {
    let slow = Times {
        upload: 9,
        compute: 5,
        download: 7,
        update: 30,
        stash: 2,
        host: 1,
        ..Times::default()
    };
    let (error, snapshot) = after_two_steps(slow, None);
    assert!(error.is_none());
    for (name, doing, spent) in snapshot.actors {
        let Spent { busy, starved, blocked } = spent;
        assert!(doing.since > Duration::ZERO);
        assert_eq!(busy + starved + blocked, doing.since, "{name}");
        assert_eq!(busy, Duration::ZERO, "actors decide in no time");
    }
}

#[test]
fn whoever_is_slow_starves_those_after_and_blocks_those_before() {
    let of = |times| {
        let (_, snapshot) = after_two_steps(times, None);
        let spent = snapshot.actors.into_iter().map(|(_, _, spent)| (spent.starved, spent.blocked));
        <[_; 6]>::try_from(spent.collect::<Vec<_>>()).expect("six actors")
    };
    let [_, _, executor, ..] = of(Times { upload: 1000, compute: 1, ..Times::default() });
    assert!(executor.0 > executor.1, "slow uploads starve the executor: {executor:?}");
    let [_, prefetcher, ..] = of(Times { upload: 1, compute: 1000, ..Times::default() });
    assert!(prefetcher.1 > ticks(10_000), "slow kernels block the prefetcher: {prefetcher:?}");
    let [.., reducer, _] = of(Times { compute: 1, update: 1000, ..Times::default() });
    assert!(reducer.1 > ticks(3_000), "slow updates block the reducer: {reducer:?}");
}

#[test]
fn a_snapshot_says_who_holds_which_slot_and_waits_for_what() {
    let inject = FaultInjection { actor: ActorName::Executor(0), wait: 12, fault: Fault::Error };
    let slow = Times { upload: 9, compute: 50, ..Times::default() };
    let (error, snapshot) = after_two_steps(slow, Some(inject));
    let Some(RingError::Failed { cause, .. }) = error else { panic!("{error:?}") };
    assert_eq!(cause.actor, ActorName::Executor(0));
    let text = snapshot.to_string();
    for actor in ["fetcher", "prefetcher", "executor", "stasher", "reducer", "optimizer"] {
        assert!(text.contains(actor), "{text}");
    }
    for pool in ["weights", "visits", "inputs", "outputs", "gradients", "reduced"] {
        assert!(text.contains(&format!("pool {pool}: 0 of")), "all are free after the end: {text}");
    }
}

#[tokio::test(flavor = "current_thread")]
#[should_panic(expected = "block 7 v3 asked, slot 0 of weights holds block 5 v3")]
async fn a_slot_is_asked_for_by_what_it_was_filled_with() {
    let mut pool = Pool::new("weights", 1);
    let held = pool.acquire_slot(0, Content::Block(BlockId(5), 3)).await;
    held.slot(Content::Block(BlockId(7), 3));
}

#[tokio::test(flavor = "current_thread")]
async fn a_slot_is_free_when_its_last_holder_lets_go() {
    let mut pool = Pool::new("weights", 2);
    let gauge = pool.gauge();
    let held = [pool.acquire(Content::Visit(0)).await, pool.acquire(Content::Visit(0)).await];
    let shared = held[1].clone();
    drop(held);
    let holders = gauge.read().holders;
    assert_eq!(holders, [None, Some(Content::Visit(0))]);
    drop(shared);
    assert_eq!(gauge.read().holders, [None, None]);
    assert_eq!(gauge.read().peak, 2);
}
