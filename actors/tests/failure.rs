//! Every failure of a small ring on real threads and on tokio: one first cause that names who and
//! where, everything ended in time, nothing left over, and the truth about what is torn.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use common::rehearsal::{Event, Name, Rehearsal};
use common::*;
use l2l_actors::schedule::{Capacities, LayerId, Ranks, Schedule, deal, relay};
use l2l_actors::threads::ThreadLanes;
use l2l_actors::virtual_time::{self, Record, VirtualLanes, World};
use l2l_actors::work::{Queue, Work};
use l2l_actors::{
    ActorName, Fault, FaultInjection, Integrity, Patience, Problem, Relay, RingConfig, RingError,
};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

const STEPS: u64 = 2;
const PATIENCE: Duration = Duration::from_secs(2);
/// Nothing takes so long, not even on a machine that is busy with other work.
const LIMIT: Duration = Duration::from_secs(20);

/// Threads are counted by the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// When updates come, where blocks are, on how many devices, and how they come there.
#[derive(Clone, Copy, Debug)]
struct Mode {
    deferred: bool,
    on_file: bool,
    devices: u32,
    sharded: bool,
    ranks: u32,
}

/// One process with one device, whose blocks are in memory.
const PLAIN: Mode = Mode { deferred: false, on_file: false, devices: 1, sharded: false, ranks: 1 };

const MODES: [Mode; 11] = [
    PLAIN,
    Mode { deferred: true, ..PLAIN },
    Mode { on_file: true, ..PLAIN },
    Mode { deferred: true, on_file: true, ..PLAIN },
    Mode { deferred: true, devices: 2, ..PLAIN },
    Mode { deferred: true, devices: 2, sharded: true, ..PLAIN },
    Mode { on_file: true, devices: 2, sharded: true, ..PLAIN },
    Mode { ranks: 2, ..PLAIN },
    Mode { deferred: true, ranks: 2, ..PLAIN },
    Mode { on_file: true, ranks: 2, ..PLAIN },
    Mode { deferred: true, on_file: true, ranks: 2, ..PLAIN },
];

impl Mode {
    /// True when a failed step leaves all blocks or none of the next version: on file, what was
    /// sealed does that.
    fn is_whole(self) -> bool {
        self.deferred && !self.on_file
    }
}

fn ring(mode: Mode) -> (Schedule, RingConfig) {
    let model = model(2, 1, true);
    let model = if mode.on_file { on_file(model) } else { model };
    let mut selection = everything(&model, 2);
    selection.frozen = vec![l2l_actors::schedule::BlockId(1)];
    let schedule = relay(&model, &selection).expect("a model of ours");
    let mut schedule =
        if mode.sharded { sharded(&model, 2, mode.devices) } else { deal(schedule, mode.devices) };
    schedule.ranks = Ranks { count: mode.ranks, dealt: mode.ranks > 1 };
    let config = config(&schedule, &Capacities::default(), mode.deferred);
    (schedule, config)
}

/// What happens in one case.
#[derive(Clone, Debug)]
enum Injection {
    Operation(Box<Record>, Fault),
    Actor(FaultInjection),
}

/// Who is to be named.
#[derive(Clone, Debug, PartialEq)]
struct Blame {
    actor: ActorName,
    layer: Option<LayerId>,
    what: String,
}

/// All operations and all waits of the ring, and what is blamed for each failing.
fn injections(fault: Fault, mode: Mode) -> Vec<(Injection, Blame)> {
    let (schedule, config) = ring(mode);
    let drive = |inject| {
        let config = RingConfig { inject, ..config.clone() };
        let schedule = schedule.clone();
        virtual_time::run(
            config,
            |_| ticks(1),
            async move |mut relay| {
                let observer = relay.observer();
                let mut failure = None;
                for _ in 0..STEPS {
                    failure = failure.or(step_of(&mut relay, &schedule, ()).await.err());
                }
                let failure = match failure {
                    None => relay.stop().await.err(),
                    failure => failure,
                };
                (failure, observer.snapshot())
            },
        )
    };
    let ((failure, snapshot), records) = drive(None).expect("it ends");
    assert!(failure.is_none());
    let mut all: Vec<(Injection, Blame)> = Vec::new();
    let mut names = Vec::new();
    for record in records {
        let name = Name::of(record.step, record.device, &record.work);
        if names.contains(&name) {
            continue; // a boundary uploaded for a second visit
        }
        names.push(name);
        let what = record.work.to_string();
        let blame = Blame { actor: record.actor, layer: record.layer, what };
        all.push((Injection::Operation(Box::new(record), fault), blame));
    }
    for (actor, doing, _) in snapshot.actors {
        for wait in 0..doing.waits {
            // Where the actor is at this wait, virtual time knows: an error there ends the ring.
            let inject = FaultInjection { actor, wait, fault: Fault::Error };
            let ((failure, _), _) = drive(Some(inject)).expect("it ends");
            let Some(RingError::Failed { cause, .. }) = failure else {
                panic!("no failure for {inject:?}, but {failure:?}");
            };
            assert_eq!(cause.actor, actor);
            let blame = Blame { actor, layer: cause.layer, what: cause.operation.clone() };
            all.push((Injection::Actor(FaultInjection { fault, ..inject }), blame));
        }
    }
    all
}

fn runtime(threads: usize) -> Runtime {
    let mut builder = match threads {
        0 => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    builder.worker_threads(threads.max(1)).thread_name("tokio").build().expect("a runtime")
}

/// Threads of relays, in this process.
fn threads_of_ours() -> usize {
    let tasks = fs::read_dir("/proc/self/task").expect("this is Linux");
    let names =
        tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("l2l-")).count()
}

/// Looks again until it holds; fails after the limit.
fn soon(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        thread::yield_now();
    }
}

/// Waits on a runtime until its tasks are gone.
async fn tasks_gone() {
    let begin = Instant::now();
    while tokio::runtime::Handle::current().metrics().num_alive_tasks() > 0 {
        assert!(begin.elapsed() < LIMIT, "tasks left");
        tokio::task::yield_now().await;
    }
}

/// Drives the ring to its end: what went wrong.
async fn drive(mut relay: Relay<ThreadLanes<Rehearsal>>, schedule: &Schedule) -> Option<RingError> {
    for _ in 0..STEPS {
        if let Err(error) = step_of(&mut relay, schedule, ()).await {
            let again = step_of(&mut relay, schedule, ()).await;
            assert!(matches!(again, Err(RingError::Ended)), "reported once: {again:?}");
            return Some(error);
        }
    }
    relay.stop().await.err()
}

/// Makes it happen, and looks at everything that must hold after.
fn check(case: &Injection, blame: &Blame, mode: Mode, threads: usize) {
    let (schedule, config) = ring(mode);
    let (inject, event, fault) = match case {
        Injection::Actor(inject) => (Some(*inject), None, inject.fault),
        Injection::Operation(record, fault) => {
            let name = Name::of(record.step, record.device, &record.work);
            (None, Some((name, Event::Fails(*fault))), *fault)
        }
    };
    let watchdog = (fault == Fault::Hang).then_some(PATIENCE);
    let config = RingConfig { inject, watchdog: watchdog.map(Patience::from), ..config };
    let work = Rehearsal::new(schedule.blocks.len(), event);
    let lanes = Arc::new(ThreadLanes::start(work, &config.pools, None).expect("threads"));
    let begin = Instant::now();
    let error = runtime(threads).block_on(async {
        let error = drive(Relay::start(config, lanes.clone()).expect("threads"), &schedule).await;
        tasks_gone().await;
        error
    });
    let patience = watchdog.map_or(Duration::ZERO, |patience| patience * 5 / 4);
    assert!(begin.elapsed() < LIMIT + patience, "{case:?} ended after {:?}", begin.elapsed());

    let Some(RingError::Failed { cause, integrity }) = error else { panic!("{case:?}: {error:?}") };
    assert_eq!((cause.actor, cause.layer), (blame.actor, blame.layer), "{case:?}: {cause}");
    assert!(cause.operation.contains(&blame.what), "{case:?}: {cause}");
    let is_reported = match (&cause.problem, fault) {
        (Problem::Error(error), Fault::Error) => error.to_string() == "an injected error",
        (Problem::Panic(text), Fault::Panic) => text == "an injected panic",
        (Problem::Hang(..), Fault::Hang) => true,
        _ => false,
    };
    assert!(is_reported, "{case:?}: {cause}");

    let versions = lanes.work().versions();
    let whole = versions.iter().all(|&version| version == versions[0]);
    // Who knows what an update that did not end well has left behind.
    let in_update = matches!(case, Injection::Operation(record, _)
        if matches!(record.work, Work::Update { .. } | Work::Carry { .. }));
    let truth =
        if whole && !in_update { Integrity::Whole(versions[0]) } else { Integrity::Torn(versions) };
    assert_eq!(integrity, truth, "{case:?}");
    assert!(
        !mode.is_whole() || whole || in_update,
        "{mode:?}, {case:?}: a deferred step was torn: {integrity:?}"
    );
    lanes.work().release();
}

fn quietly<T>(run: impl FnOnce() -> T) -> T {
    std::panic::set_hook(Box::new(|info| {
        let text = info.payload().downcast_ref::<&str>().copied().unwrap_or_default();
        if text != "an injected panic" {
            eprintln!("{info}");
        }
    }));
    let result = run();
    _ = std::panic::take_hook();
    result
}

#[test]
fn every_error_and_panic_names_its_place_and_leaves_nothing() {
    let _alone = alone();
    let mut count = 0;
    let all = MODES.map(|mode| [(Fault::Error, mode), (Fault::Panic, mode)]);
    for (nth, (fault, mode)) in all.into_iter().flatten().enumerate() {
        for (index, (case, blame)) in injections(fault, mode).into_iter().enumerate() {
            // In a bounded search, each place fails in one of the four ways.
            for threads in [0, 2].into_iter().filter(|&ways| whole() || (index + nth) % 4 == ways) {
                quietly(|| check(&case, &blame, mode, threads));
                soon("threads gone", || threads_of_ours() == 0);
                count += 1;
            }
        }
    }
    println!("{count} errors and panics");
}

#[test]
fn every_hang_is_found_by_the_watchdog() {
    let _alone = alone();
    let mut cases = Vec::new();
    for mode in MODES {
        let all = injections(Fault::Hang, mode);
        cases.extend(all.into_iter().map(|(case, blame)| (case, blame, mode)));
    }
    // Each batch waits for the watchdog: every fifth hang is a quick answer.
    let every = if whole() { 1 } else { 5 };
    let cases: Vec<_> = cases.into_iter().step_by(every).collect();
    // They do nothing but wait, so they may all wait at once.
    for (batch, cases) in cases.chunks(128).enumerate() {
        thread::scope(|scope| {
            for (case, blame, mode) in cases {
                scope.spawn(move || check(case, blame, *mode, batch % 2));
            }
        });
        soon("threads gone", || threads_of_ours() == 0);
    }
    println!("{} hangs", cases.len());
}

/// The ring fails at a wait of an actor, while an update that was committed takes longer than the
/// watchdog's patience. Returns whether the blocks were updated.
fn fails_beside_a_slow_update(inject: FaultInjection, slow: &Name, mode: Mode) -> bool {
    let (schedule, config) = ring(mode);
    let config = RingConfig { inject: Some(inject), watchdog: Some(PATIENCE.into()), ..config };
    let event = (slow.clone(), Event::IsSlow(PATIENCE * 5 / 2));
    let work = Rehearsal::new(schedule.blocks.len(), Some(event));
    let lanes = Arc::new(ThreadLanes::start(work, &config.pools, None).expect("threads"));
    let error = runtime(2).block_on(async {
        let error = drive(Relay::start(config, lanes.clone()).expect("threads"), &schedule).await;
        tasks_gone().await;
        error
    });
    let Some(RingError::Failed { cause, integrity }) = error else { panic!("{inject:?}") };
    assert!(matches!(cause.problem, Problem::Error(_)), "{inject:?}: {cause}");
    let versions = lanes.work().versions();
    let whole = versions.iter().all(|&version| version == versions[0]);
    assert!(whole, "{inject:?}: updates are committed together: {versions:?}");
    assert_eq!(integrity, Integrity::Whole(versions[0]), "{inject:?}");
    versions[0] > slow.step
}

#[test]
fn a_slow_update_is_waited_for_after_a_failure() {
    let _alone = alone();
    let mode = Mode { deferred: true, ..PLAIN };
    let all = injections(Fault::Error, mode);
    let slow = all.iter().find_map(|(case, _)| match case {
        Injection::Operation(record, _) if matches!(record.work, Work::Update { .. }) => {
            Some(Name::of(record.step, record.device, &record.work))
        }
        _ => None,
    });
    let slow = slow.expect("a step that trains");
    let waits = all.iter().filter_map(|(case, _)| match case {
        Injection::Actor(inject) => Some(*inject),
        Injection::Operation(..) => None,
    });
    let waits: Vec<_> = waits.collect();
    let updated: usize = thread::scope(|scope| {
        let slow = &slow;
        let run = |&inject| scope.spawn(move || fails_beside_a_slow_update(inject, slow, mode));
        let running: Vec<_> = waits.iter().map(run).collect();
        running.into_iter().map(|case| usize::from(case.join().expect("its own asserts"))).sum()
    });
    soon("threads gone", || threads_of_ours() == 0);
    assert!(0 < updated && updated < waits.len(), "{updated} of {} were updated", waits.len());
}

#[test]
fn a_dropped_relay_ends_by_itself_wherever_it_is() {
    let _alone = alone();
    let mut count = 0;
    for mode in MODES {
        for (case, _) in injections(Fault::Error, mode) {
            let Injection::Operation(record, _) = case else { continue };
            for threads in [0, 2] {
                drop_at(Name::of(record.step, record.device, &record.work), mode, threads);
                count += 1;
            }
        }
    }
    println!("{count} drops");
}

/// The same without threads, between any two moves: nothing left, no slot taken, nothing torn.
#[test]
fn a_relay_dropped_between_any_two_moves_leaves_nothing() {
    let mut count = 0;
    for mode in MODES {
        let mut moves = 0;
        while drop_after(moves, mode) {
            moves += 1;
        }
        count += moves;
    }
    println!("{count} drops in virtual time");
}

/// False: the ring had ended before.
fn drop_after(moves: usize, mode: Mode) -> bool {
    let (schedule, config) = ring(mode);
    let main = ActorName::all(&config.pools).len();
    let lanes = Arc::new(VirtualLanes::new(|_| ticks(1)));
    let (mut relay, tasks) = Relay::wire(config, lanes.clone());
    let observer = relay.observer();
    let mut world = World::new(lanes);
    for task in tasks {
        world.spawn(task.name.to_string(), task.future);
    }
    world.spawn("main".into(), async move {
        for _ in 0..STEPS {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        }
        relay.stop().await.expect("nothing fails here");
    });
    for made in 0.. {
        let Some(&next) = world.moves().get(made % 2).or(world.moves().first()) else {
            assert!(world.unfinished().is_empty());
            let held = observer.snapshot().pools.into_iter().flat_map(|pool| pool.holders);
            assert_eq!(held.flatten().count(), 0);
            let versions: BTreeSet<u64> = observer.snapshot().versions.into_iter().collect();
            assert!(!mode.is_whole() || versions.len() == 1, "dropped after {moves} moves: torn");
            return made > moves;
        };
        if made == moves {
            world.cancel(main);
        }
        if world.moves().contains(&next) {
            world.make(next);
        }
    }
    unreachable!("the moves end")
}

/// Drops the relay, and the step's future with it, while an operation runs.
fn drop_at(name: Name, mode: Mode, threads: usize) {
    let (schedule, config) = ring(mode);
    let begun = Arc::new(Notify::new());
    let work =
        Rehearsal::new(schedule.blocks.len(), Some((name.clone(), Event::Notifies(begun.clone()))));
    let lanes = Arc::new(ThreadLanes::start(work, &config.pools, None).expect("threads"));
    runtime(threads).block_on(async {
        let relay = Relay::start(config, lanes.clone()).expect("threads");
        first(begun.notified(), drive(relay, &schedule)).await;
        tasks_gone().await;
    });
    soon("threads gone", || threads_of_ours() == 0);
    let versions: BTreeSet<u64> = lanes.work().versions().into_iter().collect();
    assert!(!mode.is_whole() || versions.len() == 1, "{name:?}: a deferred step was torn");
}

/// Runs both until one ends, and drops the other.
async fn first<A, B>(one: impl Future<Output = A>, other: impl Future<Output = B>) {
    let mut one = Box::pin(one);
    let mut other = Box::pin(other);
    std::future::poll_fn(|cx| {
        let ends = one.as_mut().poll(cx).is_ready() || other.as_mut().poll(cx).is_ready();
        if ends { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

#[test]
fn two_relays_in_one_process_do_not_know_each_other() {
    let _alone = alone();
    for threads in [0, 2] {
        let (schedule, config) = ring(MODES[1]);
        let start = |inject| {
            let work = Rehearsal::new(schedule.blocks.len(), None);
            let lanes = Arc::new(ThreadLanes::start(work, &config.pools, None).expect("threads"));
            Relay::start(RingConfig { inject, ..config.clone() }, lanes).expect("threads")
        };
        runtime(threads).block_on(async {
            let inject = FaultInjection { actor: ActorName::Reducer, wait: 7, fault: Fault::Error };
            let failing = start(Some(inject));
            let mut sound = start(None);
            let other = schedule.clone();
            let failing = tokio::spawn(async move { drive(failing, &other).await });
            for step in 0..20 {
                let resolved =
                    step_of(&mut sound, &schedule, ()).await.expect("it knows of no failure");
                assert_eq!(resolved.step, step);
            }
            let error = failing.await.expect("no panic");
            assert!(matches!(error, Some(RingError::Failed { .. })), "{error:?}");
            soon("the other's threads are gone", || {
                threads_of_ours() == Queue::all(&config.pools).len()
            });
            sound.stop().await.expect("it knows of no failure");
            tasks_gone().await;
        });
        soon("threads gone", || threads_of_ours() == 0);
    }
}

#[test]
fn steps_start_no_thread_and_no_task() {
    let _alone = alone();
    for threads in [0, 2] {
        let (schedule, config) = ring(MODES[0]);
        let work = Rehearsal::new(schedule.blocks.len(), None);
        let lanes = Arc::new(ThreadLanes::start(work, &config.pools, None).expect("threads"));
        let queues = Queue::all(&config.pools).len();
        runtime(threads).block_on(async {
            let mut relay = Relay::start(config, lanes).expect("threads");
            let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
            soon("threads have their names", || threads_of_ours() == queues);
            let before = (tasks(), queues);
            for _ in 0..50 {
                step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
                assert_eq!((tasks(), threads_of_ours()), before);
            }
            relay.stop().await.expect("nothing fails here");
            tasks_gone().await;
        });
        soon("threads gone", || threads_of_ours() == 0);
    }
}
