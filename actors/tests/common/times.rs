//! Steps in virtual time in which each kind of operation takes its own time.

use super::step_of;
use std::time::Duration;

use l2l_actors::Operation;
use l2l_actors::schedule::{Capacities, Schedule};
use l2l_actors::virtual_time::{self, Record};
use l2l_actors::work::{Lane, Work, WorkKind};

use super::{config, ticks};

/// What each kind of operation takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub upload: u64,
    pub peer: u64,
    pub compute: u64,
    pub download: u64,
    pub update: u64,
    pub stash: u64,
    pub host: u64,
    pub file: u64,
}

impl Times {
    pub fn of(self, work: &Work) -> Duration {
        let row = work.row();
        ticks(match row.kind {
            WorkKind::Input | WorkKind::Output => self.stash,
            WorkKind::Carry => 0,
            _ => match row.lane {
                Lane::Upload => self.upload,
                Lane::Peer => self.peer,
                Lane::Compute => self.compute,
                Lane::Download => self.download,
                Lane::Host => self.host,
                Lane::Update => self.update,
                Lane::File | Lane::Fetch | Lane::Exchange => self.file,
            },
        })
    }
}

/// The timeline of several steps.
pub fn timeline(
    schedule: &Schedule,
    capacities: &Capacities,
    times: Times,
    deferred: bool,
    steps: usize,
) -> Vec<Record> {
    let config = config(schedule, capacities, deferred);
    let schedule = schedule.clone();
    let durations = move |operation: &Operation| times.of(operation.work());
    let run = virtual_time::run(config, durations, async move |mut relay| {
        for _ in 0..steps {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        }
        relay.stop().await.expect("nothing fails here");
    });
    run.expect("it ends").1
}

pub fn end_of(records: &[Record]) -> u64 {
    records.iter().map(|record| record.end.as_nanos() as u64).max().expect("a record")
}
