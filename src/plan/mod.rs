//! The plan: every byte that will be held, one named term per holder, summed before anything is
//! allocated; and where in the device's memory each slot lies.

mod checks;
mod config;
mod disk;
mod fit;
mod keep;
mod longest;
mod memory;
mod parts;
mod pieces;
mod pipelines;
mod pools;
mod regions;
mod room;
mod share;
mod spec;
mod step;
mod traffic;
mod units;

use std::collections::BTreeSet;
use std::fmt;

use l2l_actors::schedule::{BlockId, LayerId, Pipeline, Pools};

pub use disk::DiskNeed;
pub use keep::Keeping;
pub use longest::{LengthEnd, LongestSequence};
pub use parts::DevicePart;
pub(crate) use pieces::share_of_piece;
pub(crate) use regions::{DEVICE_TERMS, HOST_TERMS, Holder, Regions, Side};
pub use room::Room;
pub(crate) use room::StepOfLayer;
pub(crate) use share::DealtStep;
pub use share::RankShare;
pub(crate) use step::{Purpose, StepShape, StepSpec, schedule_of};
pub use traffic::{FabricBytes, LinkBytes, PlannedTraffic};
pub(crate) use units::{RingUnit, Units, most_positions};

use self::config::Settings;
use self::room::KvCache;
use self::spec::PlanSpec;
use crate::config::{ByteSize, Config, Deal, GradientDtype};
use crate::error::Error;
use crate::models::{Model, Save};
use crate::optimizers::{StateLayout, UpdateRule};
use crate::tensor::Dtype;

/// A line of the plan: a name and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// What the memory is for.
    pub name: &'static str,
    /// The number of bytes.
    pub bytes: u64,
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, ByteSize::from(self.bytes))
    }
}

/// Sizes of the batches that a plan has room for.
#[derive(Clone, Debug)]
pub struct BatchSizes {
    /// Tokens of the longest sequence.
    pub positions: usize,
    /// Sequences of each micro-batch of a step.
    pub micro_batches: Vec<u32>,
    /// The most sequences of a step.
    pub(crate) sequences: usize,
    pub(crate) most_micro_batches: usize,
}

impl BatchSizes {
    /// The most sequences of a step.
    pub fn sequences(&self) -> usize {
        self.sequences
    }
}

/// What a run will hold and move.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The memory of a device, term by term.
    pub device: Vec<Term>,
    /// The memory of the host.
    pub host: Vec<Term>,
    /// The files of the EPS, if it is on file.
    pub file: Vec<Term>,
    /// Bytes of the host that a GPU copies from and to. They are pinned where the system allows it.
    pub pinned_bytes: u64,
    /// Bytes that a step moves.
    pub traffic: PlannedTraffic,
    /// What each device computes.
    pub parts: Vec<DevicePart>,
    /// Sizes of the batches.
    pub batch: BatchSizes,
    pub(crate) pools: Pools,
    /// Where each holder's memory is.
    pub(crate) regions: Regions,
    share: RankShare,
    /// The optimizer's states of this rank's part of each block.
    pub(crate) states: StateLayout,
    /// Keys and values, if the run generates text.
    cache: Option<KvCache>,
    /// The layers that keep their activations on the device.
    pub(crate) kept: BTreeSet<LayerId>,
    /// How many layers these are, if `schedule.recompute = "auto"` and a ceiling decide it.
    pub keeping: Option<Keeping>,
    settings: Settings,
}

impl Plan {
    /// Sums everything that training holds.
    ///
    /// # Errors
    /// A sequence is longer than the model's positions, or another size cannot be planned for.
    pub fn new(config: &Config, model: &Model, rule: &dyn UpdateRule) -> Result<Plan, Error> {
        Plan::of_rank(config, model, rule, RankShare::WHOLE)
    }

    /// Sums everything that one of several processes holds while it trains.
    ///
    /// # Errors
    /// As [`new`](Plan::new); or this number of processes cannot share a step.
    pub fn of_rank(
        config: &Config,
        model: &Model,
        rule: &dyn UpdateRule,
        share: RankShare,
    ) -> Result<Plan, Error> {
        Plan::of_run(config, model, rule, share, None)
    }

    /// Sums everything that a run holds which may also generate between its steps, in a room.
    pub(crate) fn of_run(
        config: &Config,
        model: &Model,
        rule: &dyn UpdateRule,
        share: RankShare,
        room: Option<Room>,
    ) -> Result<Plan, Error> {
        let positions = config.sequence_length(&model.shape)?;
        let mut steps = Plan::training_steps(config, model, share, positions);
        let dtype = config.device.dtype;
        let cache = room.map(|room| KvCache::new(model, room, dtype));
        steps.extend(room.into_iter().flat_map(|room| room.steps(model)));
        let spec = PlanSpec::new(config, model, Some(rule), &steps, share);
        PlanSpec { cache, ..spec }.plan()
    }

    /// The steps of a run that trains on sequences of at most this length.
    fn training_steps(
        config: &Config,
        model: &Model,
        share: RankShare,
        positions: usize,
    ) -> Vec<StepShape> {
        let all = model.sequences_of(config.step.batch);
        let of_window = model.sequences_of(config.records_of_window());
        let train = StepShape { sequences: of_window, positions, purpose: Purpose::Train };
        // A prompt is scored between steps.
        let sequences = if model.shape.scores_vocabulary() { 1 } else { all };
        let score = StepShape { sequences, purpose: Purpose::Score, ..train };
        // Each rank trains on a part of a batch, and evaluates whole batches.
        let purpose = Purpose::Evaluate;
        let evaluate = StepShape { sequences: all, purpose, ..train };
        let mut steps = vec![train, score];
        steps.extend((share.ranks > 1).then_some(evaluate));
        steps
    }

    /// Sums everything that evaluation holds.
    ///
    /// # Errors
    /// As [`new`](Plan::new).
    pub fn of_evaluation(config: &Config, model: &Model) -> Result<Plan, Error> {
        let positions = config.sequence_length(&model.shape)?;
        let purpose = Purpose::of_evaluation(model);
        let sequences = model.sequences_of(config.step.batch);
        let step = StepShape { sequences, positions, purpose };
        PlanSpec::new(config, model, None, &[step], RankShare::WHOLE).plan()
    }

    /// Sums everything that generating in a room holds.
    ///
    /// # Errors
    /// As [`new`](Plan::new).
    pub fn of_generation(config: &Config, model: &Model, room: Room) -> Result<Plan, Error> {
        let steps = &room.steps(model);
        let spec = PlanSpec::new(config, model, None, steps, RankShare::WHOLE);
        let cache = Some(KvCache::new(model, room, config.device.dtype));
        PlanSpec { cache, ..spec }.plan()
    }

    /// The order in which each device does a step's work, each layer a stage.
    ///
    /// # Errors
    /// The schedule cannot be, or its layers are on several devices each.
    pub fn order(&self, model: &Model) -> Result<Pipeline, Error> {
        if self.settings.config.parallel.deal == Deal::Sequences {
            let problem = "is \"sequences\": each layer is on every device, which a table of \
                           stages cannot say";
            return Err(Error::config("parallel.deal", problem));
        }
        let BatchSizes { sequences, positions, .. } = self.batch;
        let step = StepShape { sequences, positions, purpose: Purpose::Train };
        let mut order = Pipeline::of(&schedule_of(&self.settings.config, model, self.step(step))?);
        order.devices.resize(self.devices() as usize, Vec::new());
        Ok(order)
    }

    /// What the schedule of a step of all layers is made of.
    pub(crate) fn step(&self, shape: StepShape) -> StepSpec<'_> {
        let file = self.settings.pipeline.as_deref();
        let Plan { states, share, kept, .. } = self;
        let units = None;
        let layers = None;
        let share = *share;
        let may_wait = true;
        let may_stay = true;
        StepSpec { shape, units, layers, states, share, file, kept, may_wait, may_stay }
    }

    /// The chunks that a longest sequence is cut into in a step that trains.
    pub(crate) fn chunks(&self, model: &Model) -> usize {
        let most = most_positions(&self.settings.config, model, Purpose::Train);
        most.map_or(1, |most| self.batch.positions.div_ceil(most).max(1))
    }

    pub(crate) fn stash_floats(&self) -> usize {
        let place = if self.stash_on_device() { Side::Device } else { Side::Host };
        self.regions.slots(Holder::Stash, place).floats()
    }

    /// Floats of what a device keeps beside the stash.
    pub(crate) fn kept_floats(&self) -> usize {
        self.regions.slots(Holder::Kept, Side::Device).floats()
    }

    /// The activations that a layer saves in a step that trains.
    pub(crate) fn saves(&self, layer: LayerId) -> Option<Save> {
        match self.kept.contains(&layer) {
            true => Some(Save::All),
            false => self.settings.config.schedule.recompute.keep(),
        }
    }

    /// Whether the plan is for training, with gradients and the optimizer's states.
    pub fn trains(&self) -> bool {
        self.settings.trains
    }

    /// Whether updates wait for the global norm.
    pub(crate) fn deferred(&self) -> bool {
        self.settings.deferred()
    }

    /// The dtype of weights and activations.
    pub(crate) fn dtype(&self) -> Dtype {
        self.settings.config.device.dtype
    }

    /// The dtype of gradients on their way to the host.
    pub(crate) fn gradient_dtype(&self) -> GradientDtype {
        self.settings.config.device.gradient_dtype
    }

    pub(crate) fn stash_on_device(&self) -> bool {
        self.settings.stash_on_device()
    }

    /// Whether a block's gradient waits in a region.
    pub(crate) fn has_region(&self, id: BlockId) -> bool {
        self.settings.has_region(id.0 as usize)
    }

    /// The first float of a position in the KV cache, counted from the begin of the cache.
    pub(crate) fn cached_at(&self, step: StepOfLayer, sequence: usize, position: usize) -> usize {
        let cache = self.cache.as_ref().expect("a run that generates has planned a KV cache");
        cache.at(step, sequence, position)
    }

    /// The ceiling of a device's memory, if the config sets one.
    pub fn budget(&self) -> Option<u64> {
        self.settings.config.device.memory.bytes()
    }

    /// Which rank this is.
    pub fn share(&self) -> RankShare {
        self.share
    }

    /// The number of devices.
    pub fn devices(&self) -> u32 {
        self.settings.config.devices()
    }

    /// Bytes of one device.
    pub fn device_bytes(&self) -> u64 {
        self.device.iter().map(|term| term.bytes).sum()
    }

    /// Bytes of the host.
    pub fn host_bytes(&self) -> u64 {
        self.host.iter().map(|term| term.bytes).sum()
    }

    /// Bytes that the EPS holds, on the host or on file: of masters, of the optimizer's states, and
    /// of gradient regions.
    pub fn eps_bytes(&self) -> [u64; 3] {
        ["masters", "optimizer_states", "gradient_regions"].map(|name| {
            let terms = self.host.iter().chain(&self.file);
            terms.filter(|term| term.name == name).map(|term| term.bytes).sum()
        })
    }

    /// Bytes of files.
    pub fn file_bytes(&self) -> u64 {
        self.file.iter().map(|term| term.bytes).sum()
    }
}
