//! The device as a whole: the suite every implementation of the ports is run through.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use l2l_actors::conformance::{ConformanceReport, Subject, check};
use l2l_actors::schedule::{Pools, Schedule, Version};
use l2l_actors::threads::ThreadLanes;

use super::{Parts, StepInput, Worker};
use crate::config::{ChannelsConfig, Config, Deal, EpsTier, Recompute, StashPlace};
use crate::data::{Batch, Dataset};
use crate::eps::{Eps, FileTier, Folder};
use crate::hf::shape_of;
use crate::models::Model;
use crate::plan::{Plan, Purpose, StepShape, StepSpec, schedule_of};
use crate::telemetry::Ledger;

/// A model small enough to be run a thousand times.
struct Small {
    config: Config,
    /// With the EPS on file: its place, and how many there were.
    folder: Option<tempfile::TempDir>,
    made: AtomicUsize,
}

impl Small {
    fn new(recompute: Recompute, place: StashPlace, on_file: bool) -> Small {
        let mut config = Config::default();
        config.data.train = "random".into();
        config.model.layers = Some(1);
        config.model.hidden = Some(8);
        config.model.heads = Some(2);
        config.model.vocabulary = Some(11);
        config.model.positions = Some(4);
        config.step.batch = 3;
        config.step.micro_batch = 2;
        config.device.threads = Some(1);
        config.schedule.recompute = recompute;
        config.stash.place = place;
        config.optimizer.clip_norm = Some(1e9); // never cuts; gives every block a region
        let folder = on_file.then(|| tempfile::tempdir().expect("a place for files"));
        if let Some(folder) = &folder {
            (config.eps.tier, config.eps.path) = (EpsTier::File, Some(folder.path().into()));
        }
        Small { config, folder, made: AtomicUsize::new(0) }
    }

    fn model(&self) -> Model {
        Model::new(shape_of(&self.config).expect("a shape of ours"))
    }
}

impl Subject for Small {
    type Ports = ThreadLanes<Worker>;

    fn schedule(&self) -> Schedule {
        let shape = StepShape { sequences: 3, positions: 4, purpose: Purpose::Train };
        let step = StepSpec { shape, layers: None, states: 2, file: None };
        schedule_of(&self.config, &self.model(), step).expect("a model of ours")
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        let channels = ChannelsConfig {
            weights: pools.weights,
            gradients: pools.gradients,
            reduced: pools.reduced,
            stash: pools.ahead,
        };
        let config = Config { channels, ..self.config.clone() };
        let model = Arc::new(self.model());
        let rule = Box::new(config.update_rule());
        let plan = Plan::new(&config, &model, &*rule).expect("a plan of ours");
        assert_eq!(plan.pools, *pools);
        let eps = match &self.folder {
            None => Eps::in_memory(&model, 2, |_| true),
            Some(folder) => {
                // A relay that was dropped may have its file a little longer.
                let nth = self.made.fetch_add(1, Relaxed).to_string();
                let folder = Folder::lock(&folder.path().join(nth)).expect("a place for files");
                let file = FileTier::open(folder, &model, 2, |_| true, false);
                Eps::on_file(&model, 2, file.expect("a place for files"))
            }
        };
        let eps = eps.published_as(config.device.dtype);
        let records = Arc::new(Ledger::new(model.parts.len(), plan.devices, Vec::new()));
        let (plan, learning_rate) = (Arc::new(plan), config.learning_rate(100));
        let parts = Parts { model, plan, rule, learning_rate, eps, records, copies: true };
        let worker = Worker::new(&config, parts);
        let worker = worker.expect("memory and threads");
        worker.eps().randomise(1).expect("room on a disk");
        let devices = self.config.devices();
        Arc::new(ThreadLanes::start(worker, devices, None).expect("threads"))
    }

    fn batch(&self, step: Version) -> StepInput {
        let shape = shape_of(&self.config).expect("a shape of ours");
        let (data, _) = Dataset::open(&self.config, &shape).expect("random data");
        let sequence = |index| data.sequence(index).expect("random data");
        let sequences: Vec<_> = (3 * step..3 * step + 3).map(sequence).collect();
        StepInput {
            batch: Batch::new(&sequences),
            purpose: Purpose::Train,
            trained: step,
            cache: Vec::new(),
        }
    }
}

/// Streams, events and kernels of a GPU that is emulated.
#[test]
fn the_cuda_device_conforms() {
    if !crate::devices::cuda::emulated::instead() {
        return;
    }
    let mut small = Small::new(Recompute::ATTENTION, StashPlace::Host, false);
    small.config.device.kind = crate::config::DeviceKind::Cuda;
    let ConformanceReport { operations, rings, failures, drops } = check(&small);
    assert!(operations > 0 && rings == 6 && failures > 100 && drops > 0);
}

/// Layers dealt over two devices, and groups.
#[test]
fn two_cpu_devices_conform() {
    for deal in [Deal::Layers, Deal::Sequences] {
        let mut small = Small::new(true.into(), StashPlace::Host, false);
        small.config.device.count = Some(2);
        (small.config.parallel.deal, small.config.parallel.groups) = (deal, 2);
        let ConformanceReport { operations, rings, failures, drops } = check(&small);
        assert!(operations > 0 && rings == 6 && failures > 100 && drops > 0);
    }
}

#[test]
fn the_cpu_device_conforms() {
    for (recompute, place, on_file) in [
        (true.into(), StashPlace::Host, false),
        (false.into(), StashPlace::Device, false),
        (Recompute::ATTENTION, StashPlace::Host, true),
    ] {
        let ConformanceReport { operations, rings, failures, drops } =
            check(&Small::new(recompute, place, on_file));
        assert!(operations > 0 && rings == 6 && failures > 100 && drops > 0);
    }
}
