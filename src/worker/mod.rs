//! The work of lanes, on any device.
//!
//! [`Worker`] hands an operation to the lanes of its kind: [`DeviceLanes`] (slots, copies,
//! kernels), [`HostLanes`] (gathers, losses, sums of gradients, updates), [`FileLane`] or
//! [`RankLanes`]. Each has fields of its own, which no other lane reaches; the model, the
//! parameters and the host's memory are [`Shared`]. [`Emulated`] makes a worker slower.

mod balance;
mod boundaries;
mod choice;
mod clipping;
mod compressed;
mod counts;
mod device_lanes;
mod emulation;
mod file_lane;
mod finite;
mod host_lanes;
mod host_threads;
mod memory;
mod objective;
mod rank_lanes;
mod records;
mod shared;
mod step;
#[cfg(test)]
mod tests;

use std::sync::{Arc, RwLock};
use std::thread;
use std::time::Duration;

use l2l_actors::threads::{LaneWork, Pending};
use l2l_actors::work::{Lane, Queue};
use l2l_actors::{BoxedError, Operation, Step};

pub(crate) use balance::RouterReport;
pub(crate) use counts::Used;
pub(crate) use emulation::{Emulated, throttle};
pub(crate) use records::Records;
pub(crate) use step::{CacheSlot, Dealt, StepInput};

use self::clipping::Clipping;
use self::device_lanes::DeviceLanes;
use self::file_lane::FileLane;
use self::host_lanes::HostLanes;
use self::host_threads::HostThreads;
use self::memory::Memory;
use self::rank_lanes::RankLanes;
use self::shared::Shared;
use self::step::{StepState, Steps};
use crate::config::{Config, DeviceKind};
use crate::devices::{self, Device, KernelTime, ProductTable};
use crate::eps::Eps;
use crate::error::Error;
use crate::models::Model;
use crate::objectives::ObjectiveMetrics;
use crate::optimizers::{LearningRate, UpdateRule};
use crate::plan::{Holder, Plan, Side};

/// Does the operations of all lanes.
pub(crate) struct Worker {
    /// Dropped before the memory in `shared`, which the devices' copies use.
    devices: DeviceLanes,
    host: HostLanes,
    file: FileLane,
    ranks: RankLanes,
    shared: Arc<Shared>,
    learning_rate: LearningRate,
    used: Arc<Used>,
    records: Arc<dyn Records>,
}

/// The parts that a worker is made from.
pub(crate) struct WorkerParts {
    pub(crate) model: Arc<Model>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) rule: Box<dyn UpdateRule>,
    pub(crate) learning_rate: LearningRate,
    pub(crate) eps: Eps,
    pub(crate) records: Arc<dyn Records>,
}

impl Worker {
    /// Takes all memory, and starts all threads except the lanes' threads.
    ///
    /// # Errors
    /// The system has too little memory or too few threads, or the device is not there.
    pub(crate) fn new(config: &Config, parts: WorkerParts) -> Result<Worker, Error> {
        let WorkerParts { model, plan, rule, learning_rate, eps, records } = parts;
        let threads = HostThreads::new(config)?;
        eps.use_threads(&threads.pool);
        let on_device = plan.regions.arena(Side::Device);
        let on_host = plan.regions.arena(Side::Host);
        let own = match config.device.kind {
            DeviceKind::Cpu => plan.regions.on_device(Holder::Widened),
            DeviceKind::Cuda => plan.regions.on_device(Holder::Overhead),
        };
        let devices = devices::open(config, &model, &on_device, &on_host, own, &threads.pool)?;
        let memory = Memory::new(&plan, &devices)?;
        let used = Arc::new(Used::of(devices.len()));
        let received_rows = plan.regions.slots(Holder::ReceivedRows, Side::HostOwn).floats();
        let shared = Arc::new(Shared {
            embedding_rows: RwLock::new(vec![0.0; received_rows]),
            model,
            plan,
            eps,
            memory,
            steps: Steps::default(),
            threads,
            clipping: Clipping::new(&config.optimizer),
            non_finite: config.non_finite(),
            seed: config.step.seed,
        });
        Ok(Worker {
            devices: DeviceLanes::new(config, devices, shared.clone(), &used)?,
            host: HostLanes::new(config, rule, shared.clone())?,
            file: FileLane::new(shared.clone()),
            ranks: RankLanes::new(shared.clone()),
            shared,
            learning_rate,
            used,
            records,
        })
    }

    /// Fills the EPS by `fill`, whose parallel loops use the host's threads. Meanwhile, another
    /// thread prepares the memory of blocks that the first step uses.
    pub(crate) fn fill<R: Send>(&self, fill: impl FnOnce(&Eps) -> R + Send) -> R {
        let Shared { eps, threads, .. } = &*self.shared;
        let device = self.devices.first();
        let prepare = || eps.prepare(|masters| device.pin(masters));
        thread::scope(|scope| {
            if thread::Builder::new().spawn_scoped(scope, prepare).is_err() {
                prepare(); // the system has no thread for it
            }
            threads.install(|| fill(eps))
        })
    }

    /// The parameters.
    pub(crate) fn eps(&self) -> &Eps {
        &self.shared.eps
    }

    /// The model.
    pub(crate) fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }

    /// The plan of the run.
    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.shared.plan
    }

    /// Counts of copied bytes and used workspace.
    pub(crate) fn used(&self) -> &Arc<Used> {
        &self.used
    }

    /// The sink for records of the lanes' operations.
    pub(crate) fn records(&self) -> &Arc<dyn Records> {
        &self.records
    }

    /// Times the kernels of all devices from now on.
    pub(crate) fn time_kernels(&self) {
        self.devices.devices().for_each(|device| device.time_kernels());
    }

    /// Takes the kernel times since the last call, summed over all devices.
    pub(crate) fn take_kernel_times(&self) -> Result<Vec<KernelTime>, BoxedError> {
        let times = self.devices.devices().map(|device| device.take_kernel_times());
        let times: Vec<Vec<KernelTime>> = times.collect::<Result<_, _>>()?;
        Ok(KernelTime::sums(times.into_iter().flatten()))
    }

    /// Times the algorithms of products on all devices from now on.
    pub(crate) fn time_products(&self) {
        self.devices.devices().for_each(|device| device.time_products());
    }

    /// Stores the fastest algorithms of each device's products.
    pub(crate) fn store_products(&self) -> Result<Vec<ProductTable>, BoxedError> {
        let tables = self.devices.devices().map(|device| device.store_products());
        tables.filter_map(Result::transpose).collect()
    }

    /// Bytes of the host that are pinned for copies.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.devices.devices().map(|device| device.pinned_bytes()).sum()
    }

    /// Takes the warnings of all devices, each once.
    pub(crate) fn take_warnings(&self) -> Vec<String> {
        let warnings = self.devices.devices().flat_map(|device| device.take_warnings());
        let mut warnings: Vec<String> = warnings.collect();
        warnings.sort();
        warnings.dedup();
        warnings
    }

    /// What the routers of layers with experts did in the last step, if it trained.
    pub(crate) fn router_report(&self) -> Option<RouterReport> {
        self.shared.steps.router_report()
    }

    /// The log-probability of each sequence of the last step, if it measured them.
    pub(crate) fn log_probabilities(&self) -> Vec<f64> {
        self.shared.steps.log_probabilities()
    }

    /// The metrics of the model's objective in the last step; without an objective there are none.
    pub(crate) fn metrics(&self) -> ObjectiveMetrics {
        let objective = self.shared.model.objective.as_deref();
        objective.map_or_else(ObjectiveMetrics::default, |one| self.shared.steps.metrics(one))
    }

    /// The embedding of each sequence of the last step, if it measured them and does not train.
    pub(crate) fn embeddings(&self) -> Vec<f32> {
        self.shared.steps.embeddings()
    }

    /// Takes the logits and the hidden states of the last step, if it left any.
    pub(crate) fn take_results(&self) -> (Vec<f32>, Vec<f32>) {
        (self.host.take_logits(), self.devices.take_hidden())
    }

    /// Does an operation's work on the lanes of its kind, and returns its value.
    fn run(&self, operation: &Operation) -> Result<f64, BoxedError> {
        let no_value = |()| 0.0;
        let value = match operation.work().lane() {
            Lane::Upload => self.devices.upload(operation).map(no_value),
            Lane::Peer => self.devices.copy_shards(operation).map(no_value),
            Lane::Compute => self.devices.compute(operation).map(no_value),
            Lane::Download => self.devices.download(operation).map(no_value),
            Lane::Host | Lane::Update => self.host.run(operation),
            Lane::File => self.file.run(operation).map(no_value),
            Lane::Fetch | Lane::Exchange => self.ranks.run(operation),
        };
        self.shared.memory.check_zones();
        self.finite(operation, value?)
    }

    /// Does `work` behind all that its operation waits on in the device's queues.
    fn issue_work(
        &self,
        operation: &Operation,
        now: Duration,
        work: impl FnOnce() -> Result<f64, BoxedError>,
    ) -> Result<Pending, BoxedError> {
        let device = self.devices.device_of(operation);
        device.begins(operation)?;
        device.ends(operation, work()?, now)
    }
}

impl Drop for Worker {
    /// A device may be copying from another device's memory, which is freed next.
    fn drop(&mut self) {
        self.devices.devices().for_each(Device::finish);
    }
}

impl LaneWork for Worker {
    type Batch = StepInput;

    fn begin(&self, step: &Arc<Step>, input: StepInput, now: Duration) {
        // Results of a step whose caller gave up waiting are dropped.
        self.take_results();
        let trains = input.purpose.trains();
        let mut state = StepState::new(step.clone(), input, self.learning_rate);
        if self.shared.model.objective.is_some() {
            // Each row has a weight of its own.
            let scale = state.input.loss_scale as f32;
            state.batches.iter_mut().for_each(|batch| batch.scale = scale);
        }
        self.shared.steps.begin(state);
        self.records.begun(now, step.number, trains);
    }

    fn perform(&self, operation: &Operation) -> Result<f64, BoxedError> {
        self.run(operation)
    }

    fn issues(&self, queue: Queue) -> bool {
        let device = queue.device.map(usize::from);
        device.and_then(|index| self.devices.devices().nth(index)).is_some_and(Device::issues)
    }

    fn issue(&self, operation: &Operation, now: Duration) -> Result<Pending, BoxedError> {
        self.issue_work(operation, now, || self.run(operation))
    }
}
