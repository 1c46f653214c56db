//! Steps in virtual time in which each kind of operation takes its own time.

use std::time::Duration;

use l2l_actors::ports::{Operation, Work};
use l2l_actors::schedule::{Capacities, Schedule};
use l2l_actors::virtual_time::{self, Record};

use super::{config, ticks};

/// What each kind of operation takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub upload: u64,
    pub compute: u64,
    pub download: u64,
    pub update: u64,
    pub stash: u64,
    pub host: u64,
    pub file: u64,
}

impl Times {
    pub fn of(self, work: &Work) -> Duration {
        ticks(match work {
            Work::UploadBlock { .. } => self.upload,
            Work::Compute { .. } => self.compute,
            Work::DownloadGradient { .. } => self.download,
            Work::Update { .. } => self.update,
            Work::UploadBoundary { .. } | Work::DownloadBoundary { .. } => self.stash,
            Work::ReadBlock { .. }
            | Work::ReadRegion { .. }
            | Work::WriteRegion { .. }
            | Work::ReadState { .. }
            | Work::WriteState { .. }
            | Work::Seal => self.file,
            Work::Gather { .. }
            | Work::GatherBlock { .. }
            | Work::Measure { .. }
            | Work::Loss { .. }
            | Work::Reduce { .. }
            | Work::Scatter { .. } => self.host,
            Work::Carry { .. } => 0,
        })
    }
}

/// The timeline of so many steps.
pub fn timeline(
    schedule: &Schedule,
    capacities: &Capacities,
    times: Times,
    deferred: bool,
    steps: usize,
) -> Vec<Record> {
    let (config, schedule) = (config(schedule, capacities, deferred), schedule.clone());
    let durations = move |operation: &Operation| times.of(operation.work());
    let run = virtual_time::run(config, durations, async move |mut relay| {
        for _ in 0..steps {
            relay.step(&schedule, ()).await.expect("nothing fails here");
        }
        relay.stop().await.expect("nothing fails here");
    });
    run.expect("it ends").1
}

pub fn end_of(records: &[Record]) -> u64 {
    records.iter().map(|record| record.end.as_nanos() as u64).max().expect("a record")
}
