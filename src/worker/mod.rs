//! What lanes do of a step, on any device: copies between its slots and the host's memory, visits
//! of layers, and the host's own share.

mod counts;
mod host;
mod host_math;
mod slots;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use half::bf16;
use l2l_actors::Record;
use l2l_actors::ports::{Lane, Operation, Placed, Step, Trouble, Work};
use l2l_actors::schedule::{MicroBatch, Version};
use l2l_actors::threads::{Hands, Pending};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::config::Config;
use crate::data::Batch;
use crate::devices::{self, Device};
use crate::eps::Eps;
use crate::error::Error;
use crate::kernels::{BatchView, DropoutKey, Kernels, Rows, STATISTICS};
use crate::models::{self, Model, Part, Save, VisitArgs};
use crate::optimizers::{LearningRate, UpdateRule};
use crate::plan::{Carries, Plan};
use crate::simd::Level;
use crate::stash::{self, StashLayout};
use crate::telemetry::{Ledger, NotFinite, Observe, Slice};
use crate::tensor::Arena;
use crate::tensor::{Dtype, View};
pub(crate) use counts::Used;

/// What a step of the ring is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// To learn.
    Train,
    /// The loss alone; nothing is dropped.
    Evaluate,
    /// Logits of each labelled position, or scores of each sequence, beside the loss of the latter.
    Tell,
    /// What the head reads.
    Encode,
}

/// What a step of the ring is given.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) batch: Batch,
    pub(crate) goal: Goal,
    /// Training steps before it: the ring's own number counts other turns, and begins anew.
    pub(crate) trained: u64,
    /// What its schedule carries beside activations.
    pub(crate) carries: Arc<Carries>,
    /// Where the memory of each sequence is, and how many positions it has.
    pub(crate) memory: Vec<Remembered>,
}

/// A sequence's place in the memory of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remembered {
    pub(crate) slot: usize,
    pub(crate) past: usize,
}

/// A turn in the ring.
struct StepData {
    number: Version,
    batch: Batch,
    /// Its tokens; padding is none.
    known: Vec<Option<u32>>,
    goal: Goal,
    trained: u64,
    stash: StashLayout,
    carries: Arc<Carries>,
    memory: Vec<Remembered>,
    past: Vec<usize>,
    /// 1 ÷ labelled positions.
    scale: f32,
    learning_rate: f64,
}

/// See the [module](self).
pub(crate) struct Worker {
    /// It goes before the host's memory, which its copies use.
    device: Box<dyn Device>,
    model: Arc<Model>,
    plan: Arc<Plan>,
    eps: Eps,
    rule: Box<dyn UpdateRule>,
    learning_rate: LearningRate,
    clip_norm: Option<f64>,
    save: Save,
    seed: u64,
    /// Landing blocks, blocks of a file, and the stash unless it is on the device.
    host: Arena,
    threads: Arc<ThreadPool>,
    level: Level,
    /// Bytes a second of an emulated link, of emulated updates, and of an emulated disk.
    link: Option<f64>,
    update_rate: Option<f64>,
    disk_rate: Option<f64>,
    /// The step that computes, and the one before, whose updates may still run.
    steps: Mutex<[Option<Arc<StepData>>; 2]>,
    /// Logits that were told: of each labelled position, or sequence, in order.
    told: Mutex<Vec<f32>>,
    /// What the head read.
    pub(crate) encoded: Mutex<Vec<f32>>,
    /// Whether steps behind the first copy anything between host and device.
    pub(crate) copies: bool,
    /// For an update rule that wants masters put together.
    desk: Mutex<Vec<f32>>,
    pub(crate) used: Arc<Used>,
    pub(crate) ledger: Arc<Ledger>,
}

impl Worker {
    /// Makes all memory and all threads but the lanes'.
    pub(crate) fn new(
        config: &Config,
        model: Arc<Model>,
        plan: Arc<Plan>,
        rule: Box<dyn UpdateRule>,
        learning_rate: LearningRate,
        eps: Eps,
        observers: Vec<Arc<dyn Observe>>,
    ) -> Result<Worker, Error> {
        let threads = Arc::new(threads(config)?);
        let (floats, overhead) = (plan.layout.end, plan.layout.beside);
        let device = devices::open(config, &model, floats, overhead, &threads)?;
        let host = Arena::new(plan.layout.host_end);
        let no_memory = |error| Error::failed(format_args!("no memory: {error}"));
        let mut host = host.map_err(no_memory)?;
        device.pin(host.values_mut(View::floats(0, plan.layout.host_end)));
        if eps.file().is_none() {
            eps.memory().places(|masters| device.pin(masters));
        }
        let desk = if eps.in_planes && plan.trains() { rule.desk(plan.layout.block) } else { 0 };
        Ok(Worker {
            eps,
            rule,
            learning_rate,
            clip_norm: config.optimizer.clip_norm,
            save: config.schedule.recompute.keep().unwrap_or(Save::All),
            seed: config.step.seed,
            device,
            host,
            threads,
            level: Level::best(),
            link: config.link_bytes_per_second()?,
            update_rate: config.update_bytes_per_second()?,
            disk_rate: config.disk_bytes_per_second()?,
            steps: Mutex::default(),
            told: Mutex::default(),
            encoded: Mutex::default(),
            copies: true,
            desk: Mutex::new(vec![0.0; desk]),
            used: Arc::default(),
            ledger: Arc::new(Ledger::new(model.parts.len(), observers)),
            model,
            plan,
        })
    }

    /// The parameters.
    pub(crate) fn eps(&self) -> &Eps {
        &self.eps
    }

    /// What the last turn told: logits of each labelled position, or sequence, in order.
    pub(crate) fn take_told(&self) -> Vec<f32> {
        std::mem::take(&mut *self.told.lock().expect("nothing panics inside"))
    }

    fn step(&self, number: Version) -> Arc<StepData> {
        let steps = self.steps.lock().expect("nothing panics inside");
        let found = steps.iter().flatten().find(|step| step.number == number);
        found.expect("an operation's step has begun").clone()
    }

    /// Moves bytes, counts them, and takes as long as the link would.
    fn moves(
        &self,
        work: impl FnOnce() -> Result<(), Trouble>,
        bytes: u64,
        count: &AtomicU64,
        over_link: bool,
    ) -> Result<(), Trouble> {
        let begin = Instant::now();
        work()?;
        count.fetch_add(bytes, Relaxed);
        take_as_long(begin, bytes, self.link.filter(|_| over_link));
        Ok(())
    }

    /// Copies floats to the device.
    fn upload(&self, to: View, from: &[f32], over_link: bool) -> Result<(), Trouble> {
        let bytes = size_of_val(from) as u64;
        self.moves(|| self.device.upload(to, from), bytes, &self.used.uploaded, over_link)
    }

    /// Copies floats from the device.
    fn download(&self, to: &mut [f32], from: View, over_link: bool) -> Result<(), Trouble> {
        let bytes = size_of_val(to) as u64;
        self.moves(|| self.device.download(to, from), bytes, &self.used.downloaded, over_link)
    }

    fn compute(&self, operation: &Operation) -> Result<(), Trouble> {
        let Work::Compute { device_visit, micro_batch, weights, inputs, outputs, gradients } =
            operation.work()
        else {
            unreachable!("a compute operation computes")
        };
        let (step, data) = (operation.step(), self.step(operation.step().number));
        let visit = step.plan.visit(*device_visit);
        let sized = |from: usize, placed: &Placed| {
            let bytes = step.plan.schedule.boundary_bytes(placed.boundary, *micro_batch);
            self.boundary(from, placed, bytes as usize / size_of::<f32>())
        };
        let block = visit.blocks()[0];
        let (lengths, first_sequence, rows) = data.micro(*micro_batch, &step.plan.schedule);
        let first_row = first_sequence as usize * rows.positions;
        let kinds = &data.batch.kinds[first_row..first_row + rows.count()];
        let targets = &data.batch.targets[first_row..first_row + rows.count()];
        let documents = data.batch.documents.get(first_row..first_row + rows.count());
        let documents = documents.unwrap_or_default();
        let sequences = first_sequence as usize..first_sequence as usize + rows.sequences;
        let past = data.past.get(sequences).unwrap_or_default();
        let key =
            DropoutKey { seed: self.seed, step: data.trained, first_sequence, first_position: 0 };
        let accumulate = gradients.first().map(|one| !one.first);
        let args = VisitArgs {
            batch: BatchView {
                rows,
                lengths,
                kinds,
                documents,
                past,
                key: (data.goal == Goal::Train).then_some(key),
            },
            labelled: targets.iter().filter(|target| **target >= 0).count(),
            dtype: self.plan.dtype,
            weights: self.weights(block, weights[0]),
            gradient: gradients.first().map(|one| self.gradient(block, one.slot)),
            accumulate: accumulate.unwrap_or(false),
            reads: inputs.iter().map(|p| sized(self.plan.layout.inputs, p)).collect(),
            writes: outputs.iter().map(|p| sized(self.plan.layout.outputs, p)).collect(),
            scale: data.scale,
            tells: data.goal == Goal::Tell,
            save: self.save,
            remembers: !data.memory.is_empty(),
            workspace: self.plan.layout.workspace,
            chunk_state: self.plan.layout.chunk_state,
        };
        let first_head = self.model.parts.iter().position(Part::is_head);
        if data.goal == Goal::Encode && first_head == Some(visit.layer.0 as usize) {
            let read = self.device.read_back(args.reads[0])?;
            let mut encoded = self.encoded.lock().expect("nothing panics inside");
            match self.plan.dtype {
                Dtype::F32 => encoded.extend(read),
                Dtype::Bf16 => {
                    encoded.extend(bytemuck::cast_slice(&read).iter().map(|x: &bf16| x.to_f32()));
                }
            }
        }
        let run = |kernels: &dyn Kernels| models::run(&self.model, visit, kernels, &args);
        let used = self.device.compute(&args.batch, &run)?;
        self.used.workspace.fetch_max(used as u64, Relaxed);
        Ok(())
    }
}

impl StepData {
    /// Lengths of a micro-batch's sequences, the index of the first, and its rows.
    fn micro(
        &self,
        m: MicroBatch,
        schedule: &l2l_actors::schedule::Schedule,
    ) -> (&[usize], u32, Rows) {
        let before: u32 = schedule.micro_batches[..m as usize].iter().sum();
        let sequences = schedule.micro_batches[m as usize] as usize;
        let lengths = &self.batch.lengths[before as usize..][..sequences];
        (lengths, before, Rows { sequences, positions: self.batch.positions })
    }
}

impl Hands for Worker {
    type Batch = Turn;

    fn begin(&self, step: &Arc<Step>, turn: Turn, now: Duration) {
        let Turn { batch, goal, trained, carries, memory } = turn;
        let data = StepData {
            number: step.number,
            stash: stash::layout(&step.plan.schedule, |id| carries.recalls.contains_key(&id)),
            past: memory.iter().map(|one| one.past).collect(),
            carries,
            memory,
            scale: (1.0 / batch.labelled as f64) as f32,
            learning_rate: self.learning_rate.at(trained),
            known: batch.known().collect(),
            batch,
            goal,
            trained,
        };
        // What a turn told that nobody waited for is nobody's.
        self.told.lock().expect("nothing panics inside").clear();
        self.encoded.lock().expect("nothing panics inside").clear();
        let mut steps = self.steps.lock().expect("nothing panics inside");
        steps.swap(0, 1);
        steps[0] = Some(Arc::new(data));
        self.ledger.begins(now, step.number, goal == Goal::Train);
    }

    fn perform(&self, operation: &Operation) -> Result<f64, Trouble> {
        self.work(operation)
    }

    fn issues(&self, lane: Lane) -> bool {
        self.device.issues() && [Lane::Upload, Lane::Compute, Lane::Download].contains(&lane)
    }

    fn issue(&self, operation: &Operation, now: Duration) -> Result<Pending, Trouble> {
        self.device.begins(operation)?;
        let value = self.work(operation)?;
        self.device.ends(operation, value, now)
    }

    fn done(&self, operation: &Operation, record: Record) {
        self.ledger.heard(&Slice::of(&record, &operation.step().plan));
    }
}

impl Worker {
    /// True for copies between host and device, and for what looks at those. Statistics are copied all
    /// the same: they have labels, which kernels go by, and are small.
    fn is_left_out(&self, operation: &Operation) -> bool {
        match operation.work() {
            Work::UploadBoundary { inputs: placed, .. }
            | Work::DownloadBoundary { outputs: placed, .. } => {
                let step = operation.step();
                let positions = self.step(step.number).batch.positions;
                let bytes = step.plan.schedule.boundary(placed.boundary).bytes_per_sequence;
                bytes as usize != positions * STATISTICS * size_of::<f32>()
            }
            Work::UploadBlock { .. } | Work::DownloadGradient { .. } => true,
            Work::Loss { .. } | Work::Scatter { .. } => true,
            _ => false,
        }
    }

    fn work(&self, operation: &Operation) -> Result<f64, Trouble> {
        let step = operation.step();
        let over_link = !self.plan.stash_on_device;
        let visit_of = |index: usize| &step.plan.schedule.visits[index];
        if !self.copies && step.number > 0 && self.is_left_out(operation) {
            return Ok(0.0);
        }
        match *operation.work() {
            // What is copied from or to on the host is the operation's until it has ended: the ring
            // has nobody write or read it meanwhile.
            Work::UploadBlock { block, version, reads, weights } => {
                let slot = self.weights(block, weights);
                match reads {
                    // SAFETY: the ring has it read before this upload, and not after.
                    Some(read) => {
                        let read = unsafe { self.host.read(self.read_slot(read)) };
                        self.upload(slot, &read[..slot.dtype.floats(slot.len())], true)?;
                    }
                    None => {
                        let lease = self.eps.memory().read(block, version);
                        let published = &lease.parameters[..slot.dtype.floats(slot.len())];
                        self.upload(slot, published, true)?;
                    }
                }
            }
            Work::UploadBoundary { micro_batch, ref inputs } => {
                let data = self.step(step.number);
                if let Some(&recall) = data.carries.recalls.get(&inputs.boundary) {
                    let (slot, sequences) = self.recalled(operation, self.plan.layout.inputs);
                    self.recall(&data, recall, slot, sequences)?;
                    return Ok(0.0);
                }
                let (arena, place) = self.stash(data.stash.place(inputs.boundary, micro_batch));
                let slot = self.boundary_slot(operation, self.plan.layout.inputs, inputs);
                // SAFETY: the stash's place has been written and is not written before this ends.
                let place = unsafe { arena.read(place) };
                if slot.len() == place.len() {
                    self.upload(slot, place, over_link)?;
                } else {
                    let sequences = step.plan.schedule.micro_batches[micro_batch as usize];
                    let unpack = || self.device.upload_packed(slot, place, sequences as usize);
                    let bytes = size_of_val(place) as u64;
                    self.moves(unpack, bytes, &self.used.uploaded, over_link)?;
                }
            }
            Work::DownloadBoundary { micro_batch, ref outputs } => {
                let data = self.step(step.number);
                if let Some(&recall) = data.carries.recalls.get(&outputs.boundary) {
                    let (slot, sequences) = self.recalled(operation, self.plan.layout.outputs);
                    self.recall(&data, recall, slot, sequences)?;
                    return Ok(0.0);
                }
                let (arena, place) = self.stash(data.stash.place(outputs.boundary, micro_batch));
                let slot = self.boundary_slot(operation, self.plan.layout.outputs, outputs);
                // SAFETY: as for uploads, the other way.
                let place = unsafe { arena.write(place) };
                if slot.len() == place.len() {
                    self.download(place, slot, over_link)?;
                } else {
                    let bytes = size_of_val(place) as u64;
                    let sequences = step.plan.schedule.micro_batches[micro_batch as usize];
                    let pack = || self.device.download_packed(place, slot, sequences as usize);
                    self.moves(pack, bytes, &self.used.downloaded, over_link)?;
                }
            }
            Work::DownloadGradient { block, gradients, reduced } => {
                // SAFETY: the ring holds the landing block for this download.
                let landing = unsafe { self.host.write(self.landing(block, reduced)) };
                self.download(landing, self.gradient(block, gradients), true)?;
            }
            Work::Compute { .. } => self.compute(operation)?,
            Work::Gather { visit, micro_batch } => self.gather(step, visit_of(visit), micro_batch),
            Work::Loss { visit, micro_batch } => {
                let loss = self.loss(step, visit_of(visit), micro_batch);
                if !loss.is_finite() {
                    return Err(NotFinite(format!("the loss is {loss}")).into());
                }
                return Ok(loss);
            }
            Work::Reduce { block, reduced } => return Ok(self.reduce(block, reduced)),
            Work::Scatter { visit, block, first, reduced } => {
                return Ok(self.scatter(step, visit_of(visit), block, first, reduced));
            }
            Work::Update { block, version, gradient, states, norm } => {
                return self.update(block, version, gradient, states, norm);
            }
            Work::Carry { version } => {
                step.plan.carried.iter().for_each(|&block| self.eps.carry(block, version));
            }
            Work::GatherBlock { visit, block, reads } => {
                self.gather_block(step, visit_of(visit), block, reads);
            }
            Work::Measure { block, reduced } => {
                // SAFETY: the ring holds the landing block for this operation.
                let landed = unsafe { self.host.read(self.landing(block, reduced)) };
                let tensors = self.eps.tensors(block);
                return Ok(self.threads.install(|| self.rule.measure(tensors, landed)));
            }
            Work::ReadBlock { .. }
            | Work::ReadRegion { .. }
            | Work::WriteRegion { .. }
            | Work::ReadState { .. }
            | Work::WriteState { .. }
            | Work::Seal => self.on_file(operation)?,
        }
        Ok(0.0)
    }
}

/// Sleeps until so many bytes at this rate would have taken their time, if there is a rate.
pub(crate) fn take_as_long(begin: Instant, bytes: u64, rate: Option<f64>) {
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
        .map_err(Error::failed)
}
