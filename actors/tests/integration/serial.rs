//! The ring does the work of the serial walk, and no other.

use std::sync::{Arc, Mutex};

use crate::common::*;
use l2l_actors::schedule::{ALL_CHUNKS, Schedule, deal, deal_groups, relay, resident};
use l2l_actors::work::{Lane, Work};
use l2l_actors::{serial, virtual_time};

/// Operations by name: those of the compute lanes in their order, and all others sorted.
#[derive(Debug, Default, PartialEq)]
struct Done {
    computed: Vec<String>,
    others: Vec<String>,
}

impl Done {
    fn note(&mut self, device: Option<u8>, work: &Work) {
        match work {
            Work::Compute { device_visit, micro_batch, blocks, .. } => {
                let uses: Vec<_> = blocks.iter().map(|of| (of.portion, of.weights)).collect();
                let first = blocks.iter().filter_map(|of| of.gradient).any(|of| of.first);
                let name = format!("{device:?} {device_visit} {micro_batch} {uses:?} {first}");
                self.computed.push(name);
            }
            other => {
                let device = device.filter(|_| other.lane() != Lane::Host);
                self.others.push(format!("{device:?} {other}"));
            }
        }
    }

    fn sorted(mut self, devices: u32) -> Done {
        self.others.sort();
        if devices > 1 {
            self.computed.sort(); // each device has a lane of its own
        }
        self
    }
}

pub(crate) fn check(schedule: Schedule, deferred: bool) {
    let devices = schedule.devices();
    let delay_from = (schedule.lag > 0).then_some(0);
    let config = config(&schedule, &depths(2, 1, 1, 3), deferred);
    let config = l2l_actors::RingConfig { delay_from, ..config };
    let done = Arc::new(Mutex::new(Done::default()));
    let noted = done.clone();
    let durations = move |operation: &l2l_actors::Operation| {
        noted.lock().expect("one thread").note(operation.device(), operation.work());
        ticks(1)
    };
    let run = schedule.clone();
    virtual_time::run(config.clone(), durations, async move |mut relay: l2l_actors::Relay<_>| {
        step_of(&mut relay, &run, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    })
    .expect("it ends");
    let of_ring = std::mem::take(&mut *done.lock().expect("one thread"));
    let plan = l2l_actors::StepPlan::new(schedule, config.pools).expect("pools made for it");
    let mut of_walk = Done::default();
    serial::step(&plan, 0, deferred, |device, work| {
        of_walk.note(device, &work);
        1.0
    });
    assert_eq!(of_ring.sorted(devices), of_walk.sorted(devices));
}

#[test]
fn the_ring_does_the_work_of_the_serial_walk() {
    for deferred in [false, true] {
        for tied in [false, true] {
            for (saves, keeps) in [(false, false), (true, false), (true, true)] {
                let model = saving(model(4, 3, tied), |_| saves);
                let model = keeping(model, |number| keeps && number > 2);
                let reach = [1, ALL_CHUNKS, 0];
                let model = reaching(model, |number| reach[number % 3]);
                // Some losses are objectives.
                let model = if tied { aiming(model, false) } else { model };
                let mut in_runs = in_chunks(&model, &[4, 1, 2]);
                in_runs.set_groups(2);
                let chunks = relay(&model, &in_runs).expect("a model of ours");
                check(chunks.clone(), deferred);
                check(deal_groups(chunks.clone(), &[1, 1]), deferred);
                check(deal(chunks, 3), deferred);
                for groups in [1, 2, 3] {
                    let mut selection = everything(&model, 4);
                    selection.set_groups(groups);
                    let relay = relay(&model, &selection).expect("a model of ours");
                    check(relay.clone(), deferred);
                    check(deal_groups(relay, &vec![1; groups as usize]), deferred);
                    check(resident(&model, &selection).expect("a model of ours"), deferred);
                }
            }
        }
    }
}
