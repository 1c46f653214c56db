//! The worker as a whole, in the suite that every implementation of the ports passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use l2l_actors::conformance::{ConformanceReport, Subject, check};
use l2l_actors::schedule::{Phase, Pools, Schedule, Version, Visit};
use l2l_actors::threads::ThreadLanes;
use l2l_actors::{BoxedError, Integrity, Relay, RingConfig, RingError};

use super::{StepInput, Worker, WorkerParts};
use crate::config::{
    ChannelsConfig, Config, Deal, DeviceKind, EpsTier, Recompute, StashPlace, Transfer,
};
use crate::data::{Batch, Dataset};
use crate::devices::{Device, PeerView};
use crate::eps::{Eps, FileTier, Folder};
use crate::kernels::{BatchMetadata, Kernels};
use crate::models::Model;
use crate::plan::{Plan, Purpose, StepShape, Units, schedule_of};
use crate::resolve::{model_of, shape_of};
use crate::stash;
use crate::telemetry::Ledger;
use crate::tensor::{Arena, ByteRows, Packing, View};

/// A model that is small enough to run a thousand times.
struct Small {
    config: Config,
    /// The place of the EPS's files, if it is on file, and the number of files so far.
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

    /// The same, where layers keep their activations on the device.
    fn keeping(mut self) -> Small {
        self.config.schedule.recompute = Recompute::AUTO;
        self.config.device.memory = "1GiB".parse().expect("a size");
        assert!(!self.schedule().device_visits().all(|visit| visit.keeps.is_empty()));
        self
    }

    /// The same, with experts that have visits of their own. A step has so few rows that uploads
    /// wait for what they choose.
    fn choosing(mut self) -> Small {
        self.config.model.preset = Some("moe-small".into());
        self.config.model.experts = Some(12);
        self.config.model.experts_per_token = Some(1);
        self.config.model.expert_intermediate = Some(4);
        self.config.schedule.bundles = Some(1);
        let waits = |visit: &Visit| visit.phase == Phase::Forward && visit.chosen_by.is_some();
        assert!(self.schedule().device_visits().any(waits));
        self
    }

    fn model(&self) -> Model {
        let shape = shape_of(&self.config).expect("a shape of ours");
        model_of(&self.config, shape).expect("a model of ours")
    }
}

impl Subject for Small {
    type Ports = ThreadLanes<Worker>;

    fn schedule(&self) -> Schedule {
        let shape = StepShape { sequences: 3, positions: 4, purpose: Purpose::Train };
        let model = self.model();
        let rule = self.config.update_rule();
        let plan = Plan::new(&self.config, &model, &rule).expect("a plan of ours");
        schedule_of(&self.config, &model, plan.step(shape)).expect("a model of ours")
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        Arc::new(ThreadLanes::start(self.worker(pools), pools, None).expect("threads"))
    }

    fn batch(&self, step: Version) -> StepInput {
        let shape = shape_of(&self.config).expect("a shape of ours");
        let (data, _) = Dataset::open(&self.config, &shape).expect("random data");
        let sequence = |index| data.sequence(index).expect("random data");
        let sequences: Vec<_> = (3 * step..3 * step + 3).map(sequence).collect();
        let batch = Batch::new(&sequences);
        let lengths: Vec<usize> = batch.lengths().collect();
        StepInput {
            batch,
            units: Arc::new(Units::new(&lengths, self.config.step.micro_batch, None)),
            purpose: Purpose::Train,
            stash: Arc::new(stash::layout(&self.schedule())),
            trained: step,
            updated: step,
            loss_scale: 1.0,
            cache: Vec::new(),
            dealt: None,
        }
    }

    /// Every ring trains a model, on kernels that are emulated here where the device is a GPU. The
    /// tests of the ring itself end it everywhere.
    fn stride(&self) -> usize {
        let is_whole = std::env::var("L2L_TESTS").is_ok_and(|tests| tests == "whole");
        match self.config.device.kind {
            _ if is_whole => 1,
            DeviceKind::Cpu => 3,
            DeviceKind::Cuda => 5,
        }
    }
}

impl Small {
    /// Checks that rings were ended in all ways and often.
    fn conforms(&self) {
        let ConformanceReport { operations, rings, failures, drops } = check(self);
        assert!(operations > 0 && rings == 6 && failures * self.stride() > 100 && drops > 0);
    }

    fn worker(&self, pools: &Pools) -> Worker {
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
        let states = plan.states.clone();
        let eps = match &self.folder {
            None => Eps::in_memory(model.blocks.clone(), states, |_| true, None),
            Some(folder) => {
                // A relay that was dropped may have its file a little longer.
                let nth = self.made.fetch_add(1, Relaxed).to_string();
                let folder = Folder::lock(&folder.path().join(nth)).expect("a place for files");
                let file = FileTier::open(folder, &model.blocks, &states, |_| true, false, None);
                Eps::on_file(model.blocks.clone(), states, file.expect("a place for files"))
            }
        };
        let records = Arc::new(Ledger::new(model.layers.len(), plan.devices(), Vec::new()));
        let plan = Arc::new(plan);
        let learning_rate = config.learning_rate(100);
        let parts = WorkerParts { model, plan, rule, learning_rate, eps, records };
        let worker = Worker::new(&config, parts);
        let worker = worker.expect("memory and threads");
        let filled = worker.fill(|eps| eps.randomise(worker.model(), 1, |_| true));
        filled.expect("room on a disk");
        worker
    }
}

/// Streams, events and kernels of an emulated GPU.
#[test]
fn the_cuda_device_conforms() {
    if !crate::devices::cuda::emulated::instead() {
        return;
    }
    let mut small = Small::new(Recompute::ATTENTION, StashPlace::Host, false);
    small.config.device.kind = DeviceKind::Cuda;
    small.conforms();
    small.keeping().conforms();
}

/// Layers dealt over two devices, and groups, with whole blocks and in shards.
#[test]
fn two_cpu_devices_conform() {
    let whole = Transfer::Whole;
    let sharded = Transfer::Sharded;
    for (deal, transfer) in
        [(Deal::Layers, whole), (Deal::Sequences, whole), (Deal::Sequences, sharded)]
    {
        let mut small = Small::new(true.into(), StashPlace::Host, false);
        small.config.device.count = Some(2);
        (small.config.parallel.deal, small.config.parallel.groups) = (deal, 2);
        small.config.parallel.transfer = transfer;
        small.conforms();
    }
}

#[test]
fn the_cpu_device_conforms() {
    for (recompute, place, on_file) in [
        (true.into(), StashPlace::Host, false),
        (false.into(), StashPlace::Device, false),
        (Recompute::ATTENTION, StashPlace::Host, true),
    ] {
        Small::new(recompute, place, on_file).conforms();
    }
    Small::new(true.into(), StashPlace::Host, false).keeping().conforms();
    Small::new(true.into(), StashPlace::Host, false).choosing().conforms();
}

/// A failure of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Fails,
    Panics,
    Hangs,
    /// Results are NaN.
    Lies,
    /// It writes a float before its slot.
    Strays,
}

/// A device that fails at its second gradient.
struct Faulty {
    device: Box<dyn Device>,
    fault: Fault,
    downloads: AtomicUsize,
    gradient_floats: usize,
}

impl Device for Faulty {
    fn upload(&self, to: View, from: &[f32]) -> Result<(), BoxedError> {
        self.device.upload(to, from)
    }

    fn upload_rows(&self, to: View, from: &[f32], rows: ByteRows) -> Result<(), BoxedError> {
        self.device.upload_rows(to, from, rows)
    }

    fn download(&self, to: &mut [f32], from: View) -> Result<(), BoxedError> {
        self.device.download(to, from)?;
        if to.len() < self.gradient_floats || self.downloads.fetch_add(1, Relaxed) != 1 {
            return Ok(());
        }
        match self.fault {
            Fault::Fails => Err("the device fell off the bus".into()),
            Fault::Panics => panic!("a device panicked"),
            Fault::Hangs => {
                std::thread::sleep(Duration::from_secs(3));
                Ok(())
            }
            Fault::Lies => {
                to.fill(f32::NAN);
                Ok(())
            }
            Fault::Strays => {
                self.device.shared().expect("it is a CPU").stray(from, -1);
                Ok(())
            }
        }
    }

    fn for_peers(&self, view: View) -> PeerView {
        self.device.for_peers(view)
    }

    fn copy_from_peer(&self, to: View, from: PeerView) -> Result<(), BoxedError> {
        self.device.copy_from_peer(to, from)
    }

    fn upload_packed(&self, to: View, from: &[f32], packing: Packing) -> Result<(), BoxedError> {
        self.device.upload_packed(to, from, packing)
    }

    fn download_packed(
        &self,
        to: &mut [f32],
        from: View,
        packing: Packing,
    ) -> Result<(), BoxedError> {
        self.device.download_packed(to, from, packing)
    }

    fn read_back(&self, view: View) -> Result<Vec<f32>, BoxedError> {
        self.device.read_back(view)
    }

    fn is_finite(&self, view: View, mark: i64) -> Result<bool, BoxedError> {
        self.device.is_finite(view, mark)
    }

    fn compute(
        &self,
        batch: &BatchMetadata<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<usize, BoxedError> {
        self.device.compute(batch, run)
    }

    fn shared(&self) -> Option<&Arc<Arena>> {
        self.device.shared()
    }

    fn first(&self) -> usize {
        self.device.first()
    }
}

/// The error of a step in which one of two devices goes wrong. No block has changed.
async fn error_of(fault: Fault, faulty: usize) -> String {
    let mut small = Small::new(true.into(), StashPlace::Host, false);
    small.config.device.count = Some(2);
    small.config.model.layers = Some(4);
    let model = small.model();
    let schedule = small.schedule();
    let gradient_floats = model.blocks[model.blocks_of_layer(0)[0].0 as usize].len();
    let plan = Plan::new(&small.config, &model, &small.config.update_rule());
    let mut worker = small.worker(&plan.expect("a plan of ours").pools);
    worker.devices.replace(faulty, |device| {
        Box::new(Faulty { device, fault, downloads: AtomicUsize::new(0), gradient_floats })
    });
    let plan = worker.plan().clone();
    let lanes = Arc::new(ThreadLanes::start(worker, &plan.pools, None).expect("threads"));
    let patience = (fault == Fault::Hangs).then_some(Duration::from_secs(1));
    let config = RingConfig {
        pools: plan.pools,
        blocks: model.blocks.len() as u32,
        max_layers: model.layers.len() as u32,
        max_micro_batches: plan.batch.micro_batches.len() as u32,
        deferred: plan.deferred(),
        trained: 0,
        delay_from: None,
        watchdog: patience.map(Into::into),
        inject: None,
    };
    let mut relay = Relay::start(config, lanes).expect("threads");
    let plan = relay.plan(schedule).expect("a schedule of ours");
    let stepped = relay.step(plan, small.batch(0)).await;
    let Err(RingError::Failed { cause, integrity }) = stepped else {
        panic!("{fault:?}: {stepped:?}");
    };
    assert_eq!(integrity, Integrity::Whole(0), "{fault:?}: {cause}");
    cause.to_string()
}

/// A device that fails, panics, hangs or returns NaN ends the run. The error names the device, and
/// no block of a deferred step has changed.
#[tokio::test]
async fn a_faulty_device_is_named() {
    let faults = [Fault::Fails, Fault::Panics, Fault::Hangs, Fault::Lies];
    for (fault, faulty) in faults.into_iter().flat_map(|fault| [(fault, 0), (fault, 1)]) {
        let says = error_of(fault, faulty).await;
        assert!(says.contains(&format!("device {faulty}")), "{fault:?}: {says}");
    }
}

/// A float outside a slot ends the run: guard zones are compared when the operation has ended.
#[tokio::test]
async fn a_device_that_writes_between_slots_is_found() {
    // AddressSanitizer would end the process, and a release build has no guard zones.
    let is_found = cfg!(debug_assertions) && !cfg!(l2l_asan);
    for faulty in [0, 1].into_iter().filter(|_| is_found) {
        let says = error_of(Fault::Strays, faulty).await;
        assert!(says.contains("guard zone") && says.contains("gradients"), "{says}");
    }
}
