//! Every interleaving of small rings, explored exhaustively, with the real actors.
//!
//! A state is what can be seen of it: how many waits each actor has had and what it waits for,
//! every slot and what it holds, every operation queued or begun, every version, and what can move
//! next. From every state every possible move is made. What is abstracted: a task runs to its next
//! wait in one move (tokio and flume are trusted for what happens inside), an operation has two
//! moments, begin and end, and two states that look the same are taken to be the same.
//! The oracle is [`Memory`](l2l_actors::virtual_time::Memory): a use before fill, a use after
//! free, a race between lanes or a skipped version panics, and a lost slot ends in a state that
//! cannot move.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::common::*;
use l2l_actors::Relay;
use l2l_actors::schedule::{
    ALL_CHUNKS, BlockId, Phase, Ranks, RingModel, Schedule, deal, relay, resident,
};
use l2l_actors::virtual_time::{Move, VirtualLanes, World};

/// Replays a path from the start.
fn replay(
    schedule: &Arc<Schedule>,
    deferred: bool,
    steps: u64,
    path: &[Move],
) -> (Vec<Move>, String, bool) {
    let lanes = Arc::new(VirtualLanes::new(|_| ticks(0)));
    let config = config(schedule, &depths(1, 1, 1, 1), deferred);
    let (mut relay, tasks) = Relay::wire(config, lanes.clone());
    let mut world = World::new(lanes);
    for task in tasks {
        world.spawn(task.name.to_string(), task.future);
    }
    let schedule = schedule.clone();
    let observer = relay.observer();
    let phase = Arc::new(AtomicU64::new(0));
    let reached = phase.clone();
    world.spawn("main".into(), async move {
        for _ in 0..steps {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            reached.fetch_add(1, Relaxed);
        }
        relay.settle().await.expect("nothing fails here");
        reached.fetch_add(1, Relaxed);
        assert!(relay.snapshot().versions.iter().all(|&version| version == steps));
        relay.stop().await.expect("nothing fails here");
    });
    for &chosen in path {
        world.make(chosen);
    }
    let moves = world.moves();
    let snapshot = observer.snapshot();
    let waits: Vec<u64> = snapshot.actors.iter().map(|(_, doing, _)| doing.waits).collect();
    let versions = &snapshot.versions;
    let seen = format!("{snapshot}{waits:?}{versions:?}{moves:?}{}", phase.load(Relaxed));
    (moves, seen, world.unfinished().is_empty())
}

/// Explores all states; their number and the number of moves between them.
fn explore(schedule: Schedule, deferred: bool, steps: u64) -> (usize, usize) {
    let schedule = Arc::new(schedule);
    let mut known = HashSet::new();
    let mut open: Vec<Vec<Move>> = vec![Vec::new()];
    let mut transitions = 0;
    let mut ends = 0;
    while let Some(path) = open.pop() {
        let (moves, seen, finished) = replay(&schedule, deferred, steps, &path);
        transitions += 1;
        if !known.insert(seen) {
            continue;
        }
        if moves.is_empty() {
            assert!(finished, "nothing can move after {path:?}");
            ends += 1;
        }
        for chosen in moves {
            let mut next = path.clone();
            next.push(chosen);
            open.push(next);
        }
    }
    assert!(ends >= 1);
    (known.len(), transitions)
}

const EAGER: (bool, bool) = (false, false);
const DEFERRED: (bool, bool) = (true, false);

/// Layers, tiles, micro-batches, when updates come and where blocks are, relay or resident, steps,
/// and what the host answers.
type Ring = (u32, u32, u32, (bool, bool), bool, u64, Answers);

const NOTHING: Answers = Answers::Nothing;

/// A layer, a micro-batch: up to 8,000 states each.
const SMALLEST: [Ring; 7] = [
    (1, 0, 1, EAGER, true, 1, NOTHING),
    (1, 0, 1, DEFERRED, true, 1, NOTHING),
    (1, 0, 1, EAGER, true, 2, NOTHING),
    (1, 0, 1, DEFERRED, true, 2, NOTHING),
    (1, 0, 1, (false, true), true, 1, NOTHING),
    (1, 0, 1, (true, true), true, 1, NOTHING),
    (1, 0, 1, EAGER, true, 1, Answers::Step),
];

/// Another layer, a tile, another micro-batch: up to 40,000 states each.
const SMALL: [Ring; 6] = [
    (2, 0, 1, EAGER, true, 1, NOTHING),
    (1, 1, 1, EAGER, true, 1, NOTHING),
    (1, 1, 1, DEFERRED, true, 1, NOTHING),
    (1, 0, 2, EAGER, true, 1, NOTHING),
    (1, 0, 2, DEFERRED, false, 1, NOTHING),
    (1, 0, 2, EAGER, true, 1, Answers::Step),
];

#[test]
fn all_interleavings_of_small_rings_are_sound() {
    let larger: &[Ring] = if whole() { &SMALL } else { &[] };
    let mut total = (0, 0);
    for &ring in SMALLEST.iter().chain(larger) {
        let (layers, tiles, micro_batches, mode, by_layer, steps, answers) = ring;
        let (deferred, files) = mode;
        let model = model(layers, tiles, tiles > 0);
        let model = if files { on_file(model) } else { model };
        let model = measuring(model, answers, |_| true);
        let selection = everything(&model, micro_batches);
        let generate = if by_layer { relay } else { resident };
        let schedule = generate(&model, &selection).expect("a model of ours");
        let (states, transitions) = explore(schedule, deferred, steps);
        let order = if by_layer { "relay" } else { "resident" };
        let mode = if deferred { "deferred" } else { "eager" };
        let tier = if files { "on file" } else { "in memory" };
        println!(
            "{order} {mode} {tier}, {layers} layers, {tiles} tiles, {micro_batches} micro-batches, \
             {steps} steps: {states} states, {transitions} moves"
        );
        total = (total.0 + states, total.1 + transitions);
    }
    println!("{} states, {} moves", total.0, total.1);
}

/// An objective stands between forward and backward: weights of rows are there before a visit reads
/// them, in every order.
#[test]
fn all_interleavings_of_an_objective_are_sound() {
    let micro_batches: &[u32] = if whole() { &[1, 2] } else { &[1] };
    for &count in micro_batches {
        for of_step in [false, true] {
            explore_objective(aiming(model(1, 0, false), of_step), count, Ranks::ONE);
        }
    }
}

/// The measures of an objective of the step are exchanged with another process before its losses.
#[test]
fn all_interleavings_of_an_exchange_of_measures_are_sound() {
    let ranks = Ranks { count: 2, dealt: true };
    explore_objective(aiming(model(1, 0, false), true), 1, ranks);
}

/// The reference reads and writes boundaries of its own, and uses the block that is there.
#[test]
fn all_interleavings_of_a_reference_are_sound() {
    explore_objective(referring(aiming(model(1, 0, false), true), 1), 1, Ranks::ONE);
}

fn explore_objective(model: RingModel, count: u32, ranks: Ranks) {
    let mut selection = everything(&model, count);
    selection.frozen = vec![BlockId(0)];
    let schedule = relay(&model, &selection).expect("a model of ours");
    let (states, transitions) = explore(Schedule { ranks, ..schedule }, false, 1);
    println!("{count} micro-batches: {states} states, {transitions} moves");
}

/// A sequence in two chunks, through a layer that leaves keys for the second, and one in three,
/// through a layer that attends to one chunk before its own: each chunk finds what it attends to,
/// in every order.
#[test]
fn all_interleavings_of_a_run_are_sound() {
    if !whole() {
        return;
    }
    for (chunks, reach) in [(2, ALL_CHUNKS), (3, 1)] {
        let model = reaching(model(1, 0, false), |_| reach);
        let mut selection = in_chunks(&model, &[chunks]);
        selection.frozen = vec![BlockId(0)];
        let schedule = relay(&model, &selection).expect("a model of ours");
        let keys = schedule.visits.iter().filter(|visit| visit.phase == Phase::Keys);
        assert_eq!(keys.count() as u32, chunks - 1);
        for deferred in [false, true] {
            let (states, transitions) = explore(schedule.clone(), deferred, 1);
            println!("{chunks} chunks: {states} states, {transitions} moves");
        }
    }
}

/// A layer in two pieces, on one device: each finds the sum of the other, and their gradients merge
/// in one order, in every order.
#[test]
fn all_interleavings_of_two_pieces_are_sound() {
    if !whole() {
        return;
    }
    let model = in_pieces(headless(1, false), [2, 0], |_| true);
    let mut selection = everything(&model, 1);
    selection.frozen = vec![BlockId(0)];
    let schedule = relay(&model, &selection).expect("a model of ours");
    assert_eq!(schedule.device_visits().filter_map(|visit| visit.cut).count(), 4);
    for deferred in [false, true] {
        let (states, transitions) = explore(schedule.clone(), deferred, 1);
        println!("two pieces: {states} states, {transitions} moves");
    }
}

/// Two layers dealt over two devices: 100,046 states.
#[test]
fn all_interleavings_of_two_devices_are_sound() {
    if !whole() {
        return;
    }
    let model = model(2, 0, false);
    let schedule = relay(&model, &everything(&model, 1)).expect("a model of ours");
    let (states, transitions) = explore(deal(schedule, 2), false, 1);
    println!("{states} states, {transitions} moves");
    assert!(states > 50_000);
}
