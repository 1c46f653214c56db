//! The suite for implementations of the ports, run on the two kinds of lanes this crate has.

use std::sync::Arc;

use crate::common::rehearsal::Rehearsal;
use crate::common::*;
use l2l_actors::conformance::{ConformanceReport, Main, Subject, check};
use l2l_actors::schedule::{Pools, Ranks, RingModel, Schedule, Version, deal, relay};
use l2l_actors::threads::ThreadLanes;
use l2l_actors::virtual_time::{VirtualLanes, World};
use l2l_actors::{ActorTask, schedule::BlockId};

fn small(model: RingModel) -> Schedule {
    let mut selection = everything(&model, 2);
    selection.frozen = vec![BlockId(2)];
    relay(&model, &selection).expect("a model of ours")
}

struct Threads;

/// The same with the EPS on file.
struct OnFile;

impl Subject for Threads {
    type Ports = ThreadLanes<Rehearsal>;

    fn schedule(&self) -> Schedule {
        small(model(2, 2, true))
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        let work = Rehearsal::new(self.schedule().blocks.len(), None);
        Arc::new(ThreadLanes::start(work, pools, None).expect("threads"))
    }

    fn batch(&self, _step: Version) {}
}

/// The same with the layers dealt over two devices.
struct TwoDevices;

impl Subject for TwoDevices {
    type Ports = ThreadLanes<Rehearsal>;

    fn schedule(&self) -> Schedule {
        deal(Threads.schedule(), 2)
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        Threads.ports(pools)
    }

    fn batch(&self, _step: Version) {}
}

/// A sequence of two chunks and a short one, whose layers leave keys for later chunks.
struct InChunks;

impl Subject for InChunks {
    type Ports = ThreadLanes<Rehearsal>;

    fn schedule(&self) -> Schedule {
        in_two_chunks()
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        let work = Rehearsal::new(self.schedule().blocks.len(), None);
        Arc::new(ThreadLanes::start(work, pools, None).expect("threads"))
    }

    fn batch(&self, _step: Version) {}
}

fn in_two_chunks() -> Schedule {
    let model = attending(model(2, 1, true), |_| true);
    let schedule = relay(&model, &in_chunks(&model, &[2, 1])).expect("a model of ours");
    deal(schedule, 2)
}

/// One of two ranks, whose exchanges are operations like others.
struct OfTwoRanks;

impl Subject for OfTwoRanks {
    type Ports = ThreadLanes<Rehearsal>;

    fn schedule(&self) -> Schedule {
        Schedule { ranks: Ranks { count: 2, dealt: true }, ..Threads.schedule() }
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        Threads.ports(pools)
    }

    fn batch(&self, _step: Version) {}
}

/// The same with groups dealt, and blocks in shards.
struct Sharded;

impl Subject for Sharded {
    type Ports = ThreadLanes<Rehearsal>;

    fn schedule(&self) -> Schedule {
        sharded(&model(2, 2, true), 2, 2)
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        Threads.ports(pools)
    }

    fn batch(&self, _step: Version) {}
}

impl Subject for OnFile {
    type Ports = ThreadLanes<Rehearsal>;

    fn schedule(&self) -> Schedule {
        small(on_file(model(2, 2, true)))
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        Threads.ports(pools)
    }

    fn batch(&self, _step: Version) {}
}

/// Lanes of virtual time, and a schedule.
struct Virtual(fn() -> Schedule);

impl Subject for Virtual {
    type Ports = VirtualLanes;

    fn schedule(&self) -> Schedule {
        self.0()
    }

    fn ports(&self, _pools: &Pools) -> Arc<VirtualLanes> {
        Arc::new(VirtualLanes::new(|operation| ticks(1 + operation.number() % 3)))
    }

    fn batch(&self, _step: Version) {}

    fn run(&self, ports: &Arc<VirtualLanes>, tasks: Vec<ActorTask>, main: Main) {
        let mut world = World::new(ports.clone());
        for task in tasks {
            world.spawn(task.name.to_string(), task.future);
        }
        world.spawn("main".into(), main);
        world.run().expect("every ring ends");
    }
}

fn full(report: ConformanceReport) {
    println!("{report:?}");
    let ConformanceReport { operations, rings, failures, drops } = report;
    assert!(operations > 0 && rings == 6 && failures > 100 && drops > 0);
}

#[test]
fn lanes_of_threads_conform() {
    full(check(&Threads));
    full(check(&OnFile));
    full(check(&TwoDevices));
    full(check(&Sharded));
    full(check(&OfTwoRanks));
    full(check(&InChunks));
}

#[test]
fn lanes_of_virtual_time_conform() {
    full(check(&Virtual(|| small(model(2, 2, true)))));
    full(check(&Virtual(in_two_chunks)));
}
