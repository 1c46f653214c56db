//! What lanes do of a step, on any device: a device's side (slots, copies, kernels) and the host's
//! (the EPS, updates, landing blocks, gathers and scatters, the stash).
//!
//! An operation of the ring names slots by number. [`Worker`] finds what each is, and hands the
//! work to one of the two sides.

mod boundaries;
mod clipping;
mod compressed;
mod counts;
mod device_side;
mod embedding;
mod file_side;
mod finite;
mod host_math;
mod host_side;
mod lanes;
mod memory;
mod ranks;
mod records;
mod step;
#[cfg(test)]
mod tests;
mod update;

use std::sync::Arc;
use std::time::{Duration, Instant};

use l2l_actors::schedule::{Role, Visit};
use l2l_actors::threads::{LaneWork, Pending};
use l2l_actors::work::{Lane, Queue, Work};
use l2l_actors::{BoxedError, Operation, Step};
use rayon::{ThreadPool, ThreadPoolBuilder};

pub(crate) use counts::Used;
pub(crate) use records::Records;
pub(crate) use step::{CacheSlot, Dealt, StepInput};

use self::device_side::DeviceSide;
use self::host_side::HostSide;
use self::memory::Memory;
use self::step::{Results, StepState, Steps};
use crate::config::{Config, DeviceKind};
use crate::devices::{self, KernelTime, ProductTable};
use crate::eps::Eps;
use crate::error::Error;
use crate::models::{Model, Save};
use crate::optimizers::{LearningRate, UpdateRule};
use crate::plan::{Holder, Plan, Side};

/// See the [module](self).
pub(crate) struct Worker {
    /// They are dropped before the host's memory, which their copies use.
    devices: Vec<DeviceSide>,
    host: HostSide,
    memory: Memory,
    model: Arc<Model>,
    plan: Arc<Plan>,
    learning_rate: LearningRate,
    /// What waits in the stash of a layer's intermediates, if anything does.
    save: Save,
    /// The kernels' rate, where a slower device is emulated.
    emulated: Option<KernelRate>,
    seed: u64,
    neftune_alpha: f64,
    steps: Steps,
    results: Results,
    /// Whether steps after the first copy anything between host and device.
    copies: bool,
    used: Arc<Used>,
    records: Arc<dyn Records>,
}

/// The rate of emulated kernels.
#[derive(Clone, Copy)]
struct KernelRate {
    /// FLOP/s.
    flops: f64,
    /// What layers save of their activations.
    save: Option<Save>,
}

impl KernelRate {
    /// Sleeps until the kernels of a visit have taken as long as they would.
    fn slow(
        self,
        begin: Instant,
        model: &Model,
        visit: &Visit,
        lengths: impl Iterator<Item = usize>,
    ) {
        let layer = visit.layer.0 as usize;
        let flops = model.visit_flops(layer, visit.phase, lengths, self.save);
        throttle(begin, flops as u64, Some(self.flops));
    }
}

/// What a worker is made of.
pub(crate) struct WorkerParts {
    pub(crate) model: Arc<Model>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) rule: Box<dyn UpdateRule>,
    pub(crate) learning_rate: LearningRate,
    pub(crate) eps: Eps,
    pub(crate) records: Arc<dyn Records>,
    /// False: only the first step copies between host and device.
    pub(crate) copies: bool,
}

impl Worker {
    /// Makes all memory and all threads but the lanes'.
    ///
    /// # Errors
    /// The system has less memory or fewer threads than that takes, or there is no such device.
    pub(crate) fn new(config: &Config, parts: WorkerParts) -> Result<Worker, Error> {
        let WorkerParts { model, plan, rule, learning_rate, eps, records, copies } = parts;
        let threads = Arc::new(threads(config)?);
        let arenas = [Side::Device, Side::Host].map(|place| plan.regions.arena(place));
        let own = match config.device.kind {
            DeviceKind::Cpu => plan.regions.on_device(Holder::Widened),
            DeviceKind::Cuda => plan.regions.on_device(Holder::Overhead),
        };
        let devices = devices::open(config, &model, arenas.each_ref(), own, &threads)?;
        let memory = Memory::new(&plan, &devices)?;
        if eps.file().is_none() {
            eps.memory().pin_masters(|masters| devices[0].pin(masters));
        }
        let save = config.schedule.recompute.keep();
        let used = Arc::new(Used::of(devices.len()));
        let host = HostSide::new(config, &plan, rule, eps, &threads)?;
        let sides = devices.into_iter().enumerate();
        let sides =
            sides.map(|(index, device)| DeviceSide::new(config, device, &plan, &used, index));
        Ok(Worker {
            devices: sides.collect::<Result<_, Error>>()?,
            host,
            memory,
            model,
            plan,
            learning_rate,
            save: save.unwrap_or(Save::All),
            emulated: config.flops_per_second()?.map(|flops| KernelRate { flops, save }),
            seed: config.step.seed,
            neftune_alpha: config.train.neftune_alpha,
            steps: Steps::default(),
            results: Results::default(),
            copies,
            used,
            records,
        })
    }

    /// The parameters.
    pub(crate) fn eps(&self) -> &Eps {
        &self.host.eps
    }

    /// The model.
    pub(crate) fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The plan it was made by.
    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// What was used until now.
    pub(crate) fn used(&self) -> &Arc<Used> {
        &self.used
    }

    /// See [`Device::time_kernels`](devices::Device::time_kernels).
    pub(crate) fn time_kernels(&self) {
        self.devices.iter().for_each(DeviceSide::time_kernels);
    }

    /// See [`Device::take_kernel_times`](devices::Device::take_kernel_times). Of all devices.
    pub(crate) fn take_kernel_times(&self) -> Result<Vec<KernelTime>, BoxedError> {
        let times = self.devices.iter().map(DeviceSide::take_kernel_times);
        let times: Vec<Vec<KernelTime>> = times.collect::<Result<_, _>>()?;
        Ok(KernelTime::sums(times.into_iter().flatten()))
    }

    /// See [`Device::time_products`](devices::Device::time_products).
    pub(crate) fn time_products(&self) {
        self.devices.iter().for_each(DeviceSide::time_products);
    }

    /// See [`Device::store_products`](devices::Device::store_products). Of each device.
    pub(crate) fn store_products(&self) -> Result<Vec<ProductTable>, BoxedError> {
        self.devices.iter().filter_map(|device| device.store_products().transpose()).collect()
    }

    /// Bytes of the host that are pinned for copies.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.devices.iter().map(DeviceSide::pinned_bytes).sum()
    }

    /// See [`Device::take_warnings`](devices::Device::take_warnings).
    pub(crate) fn take_warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> =
            self.devices.iter().flat_map(DeviceSide::take_warnings).collect();
        warnings.sort();
        warnings.dedup();
        warnings
    }

    /// Logits and hidden states of the last step, if it was to leave any.
    pub(crate) fn take_results(&self) -> (Vec<f32>, Vec<f32>) {
        self.results.take()
    }

    /// What receives the records of the lanes.
    pub(crate) fn records(&self) -> &Arc<dyn Records> {
        &self.records
    }

    /// Says that the last step's loss and norm are known.
    pub(crate) fn resolved(&self, now: Duration) {
        self.records.resolved(now);
    }

    /// The device that an operation is for; for one of the host, the first.
    fn device(&self, operation: &Operation) -> &DeviceSide {
        &self.devices[usize::from(operation.device().unwrap_or_default())]
    }

    /// True for copies between host and device, and for what looks at those. Statistics are copied
    /// all the same: they hold the labels, which kernels go by, and are small.
    fn is_left_out(&self, operation: &Operation) -> bool {
        let step = operation.step();
        if self.copies || step.number == 0 {
            return false;
        }
        match operation.work() {
            Work::UploadBoundary { inputs: placed, .. }
            | Work::DownloadBoundary { outputs: placed, .. } => {
                step.plan.schedule.boundary(placed.boundary).role != Role::Statistics
            }
            Work::UploadBlock { .. } | Work::CopyShards { .. } | Work::DownloadGradient { .. } => {
                true
            }
            Work::Loss { .. } | Work::Scatter { .. } | Work::Join { .. } => true,
            _ => false,
        }
    }

    /// Does an operation's work, and returns its value.
    fn work(&self, operation: &Operation) -> Result<f64, BoxedError> {
        if self.is_left_out(operation) {
            return Ok(0.0);
        }
        let value = match operation.work().lane() {
            Lane::Upload => self.upload(operation).map(|()| 0.0),
            Lane::Peer => self.copy_shards(operation).map(|()| 0.0),
            Lane::Compute => self.compute(operation).map(|()| 0.0),
            Lane::Download => self.download(operation).map(|()| 0.0),
            Lane::Host | Lane::Update => self.on_host(operation),
            Lane::File => self.on_file(operation).map(|()| 0.0),
            Lane::Fetch | Lane::Exchange => self.on_ranks(operation),
        };
        self.memory.check_zones();
        value
    }
}

impl Drop for Worker {
    /// A device may be copying from another's memory, which is freed next.
    fn drop(&mut self) {
        self.devices.iter().for_each(DeviceSide::finish);
    }
}

impl LaneWork for Worker {
    type Batch = StepInput;

    fn begin(&self, step: &Arc<Step>, input: StepInput, now: Duration) {
        // Results of a step that nobody waited for are dropped.
        self.results.take();
        let trains = input.purpose.trains();
        self.steps.begin(StepState::new(step, input, self.learning_rate));
        self.records.begun(now, step.number, trains);
    }

    fn perform(&self, operation: &Operation) -> Result<f64, BoxedError> {
        self.work(operation)
    }

    fn issues(&self, queue: Queue) -> bool {
        queue.device.is_some_and(|device| self.devices[usize::from(device)].issues())
    }

    fn issue(&self, operation: &Operation, now: Duration) -> Result<Pending, BoxedError> {
        self.device(operation).begins(operation)?;
        let value = self.work(operation)?;
        self.device(operation).ends(operation, value, now)
    }
}

/// Sleeps until so many bytes at this rate would have taken their time, if there is a rate.
pub(crate) fn throttle(begin: Instant, bytes: u64, rate: Option<f64>) {
    if let Some(rate) = rate {
        let takes = Duration::from_secs_f64(bytes as f64 / rate);
        std::thread::sleep(takes.saturating_sub(begin.elapsed()));
    }
}

/// The host's threads: of kernels where they run there, and of updates.
fn threads(config: &Config) -> Result<ThreadPool, Error> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    ThreadPoolBuilder::new()
        .num_threads(config.device.threads.unwrap_or(cores))
        .thread_name(|index| format!("l2l-cpu-{index}"))
        .build()
        .map_err(Error::system)
}
