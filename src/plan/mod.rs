//! The plan: every byte that will be held, one named term per holder, summed before anything is
//! allocated; and where in the device's memory each slot lies.

mod checks;
mod fit;
mod pipelines;
mod regions;
mod room;
mod share;
mod sizing;
mod step;

use std::fmt;
use std::sync::Arc;

use l2l_actors::schedule::{BlockId, Pipeline, Pools};

pub(crate) use regions::{DEVICE_TERMS, HOST_TERMS, Holder, Regions, Side};
pub use room::Room;
pub(crate) use share::DealtStep;
pub use share::{FabricBytes, RankShare};
use sizing::Sizing;
pub(crate) use step::{Purpose, StepShape, StepSpec, schedule_of};

use crate::config::{ByteSize, Config, Deal, GradientDtype};
use crate::error::Error;
use crate::models::{Model, ModelLayer};
use crate::optimizers::{StateLayout, UpdateRule};
use crate::tensor::Dtype;

/// What holds memory, and how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// Its name.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: u64,
}

/// Bytes that one device moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkBytes {
    /// From the host to it.
    pub upload: u64,
    /// From it to the host.
    pub download: u64,
    /// To it from other devices.
    pub peers: u64,
}

impl LinkBytes {
    /// Its bytes and another's.
    pub(crate) fn plus(self, other: LinkBytes) -> LinkBytes {
        LinkBytes {
            upload: self.upload + other.upload,
            download: self.download + other.download,
            peers: self.peers + other.peers,
        }
    }
}

/// What a run will hold and move.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The device's memory, term by term.
    pub device: Vec<Term>,
    /// The host's.
    pub host: Vec<Term>,
    /// That of files, with the EPS there.
    pub file: Vec<Term>,
    /// Of the host's bytes those that a GPU copies from and to, to be pinned where the system lets
    /// them.
    pub pinned_bytes: u64,
    /// Bytes to the devices in a step of the longest sequences.
    pub upload_bytes: u64,
    /// Bytes from them.
    pub download_bytes: u64,
    /// The same for each device.
    pub link_bytes: Vec<LinkBytes>,
    /// What this process sends to the others in such a step.
    pub fabric_bytes: FabricBytes,
    /// Bytes that such a step reads from the EPS's file.
    pub read_bytes: u64,
    /// Bytes that it writes there.
    pub written_bytes: u64,
    /// The longest sequence.
    pub positions: usize,
    /// Sequences of each micro-batch of a step.
    pub micro_batches: Vec<u32>,
    /// Sequences of a step, at most.
    pub(crate) sequences: usize,
    /// Micro-batches of the step that has most of them.
    pub(crate) most_micro_batches: usize,
    /// Which process this is, where several share steps.
    pub(crate) share: RankShare,
    pub(crate) received: ReceivedFloats,
    /// Devices, of which each has as much memory.
    pub(crate) devices: u32,
    pub(crate) pools: Pools,
    /// Who holds memory, and where.
    pub(crate) regions: Regions,
    /// Keys and values, where text is generated.
    cache: Option<KvCache>,
    /// False for evaluation and generation: no gradients and no optimizer states are held.
    trains: bool,
    /// What weights and activations are.
    pub(crate) dtype: Dtype,
    /// What gradients are on their way to the host.
    pub(crate) gradient_dtype: GradientDtype,
    pub(crate) stash_on_device: bool,
    pub(crate) deferred: bool,
    /// The optimizer's states of what this process has of each block.
    pub(crate) states: StateLayout,
    /// Floats of the largest gradient.
    pub(crate) largest_gradient: usize,
    /// Elements of the largest tensor that is trained.
    pub(crate) largest_tensor: usize,
    /// Tiles whose gradients are joined, from the head and the embedding.
    tied_tiles: usize,
    /// The pipeline of a file, where the config names one.
    pub(crate) pipeline: Option<Arc<Pipeline>>,
    config: Config,
}

/// Floats of memory for numbers from other ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReceivedFloats {
    /// Their shares of this rank's part of a gradient.
    pub(crate) gradient: usize,
    /// Their rows of the embedding's gradient.
    pub(crate) embedding_rows: usize,
}

/// The KV cache on the host, in floats: by layer, sequence and position.
#[derive(Clone, Copy, Debug)]
struct KvCache {
    layers: usize,
    sequences: usize,
    capacity: usize,
    width: usize,
}

/// The largest steps of generation in a room: that of the prompts, and the last one.
fn generation(room: Room) -> [StepShape; 2] {
    let Room { prompts: sequences, prompt, tokens } = room;
    let purpose = Purpose::Generate { cached: 0 };
    let first = StepShape { sequences, positions: prompt, purpose };
    let purpose = Purpose::Generate { cached: tokens.saturating_sub(1) };
    [first, StepShape { sequences, positions: 1, purpose }]
}

impl KvCache {
    fn new(config: &Config, model: &Model, room: Room) -> Result<KvCache, Error> {
        let widths = model.layers.iter().filter_map(|part| match part {
            ModelLayer::Stack(layer) => Some(config.device.dtype.floats(layer.kv_width())),
            _ => None,
        });
        let widths: Vec<usize> = widths.filter(|&floats| floats > 0).collect();
        let width = widths.iter().copied().max().unwrap_or(0);
        if widths.iter().any(|&floats| floats != width) {
            let problem = "the model cannot generate text: the keys and values of its layers have \
                           different widths";
            return Err(Error::argument(problem));
        }
        let Room { prompts: sequences, tokens: capacity, .. } = room;
        Ok(KvCache { layers: widths.len(), sequences, capacity, width })
    }

    fn floats(&self) -> usize {
        (self.layers * self.sequences * self.capacity * self.width).next_multiple_of(16)
    }
}

impl Plan {
    /// Sums everything that training holds.
    ///
    /// # Errors
    /// The shapes cannot be: a sequence longer than the model's positions, absurd sizes.
    pub fn new(config: &Config, model: &Model, rule: &dyn UpdateRule) -> Result<Plan, Error> {
        Plan::of_rank(config, model, rule, RankShare::WHOLE)
    }

    /// Sums everything that one of several processes holds while it trains.
    ///
    /// # Errors
    /// As [`new`](Plan::new); or so many processes cannot share a step.
    pub fn of_rank(
        config: &Config,
        model: &Model,
        rule: &dyn UpdateRule,
        share: RankShare,
    ) -> Result<Plan, Error> {
        Plan::of_run(config, model, rule, share, None)
    }

    /// The same for a run that also generates between its steps, in a room.
    pub(crate) fn of_run(
        config: &Config,
        model: &Model,
        rule: &dyn UpdateRule,
        share: RankShare,
        room: Option<Room>,
    ) -> Result<Plan, Error> {
        let positions = config.sequence_length(&model.shape)?;
        let train = StepShape { sequences: config.step.batch, positions, purpose: Purpose::Train };
        // Between steps, scoring a prompt fits, too.
        let sequences = if model.shape.scores_vocabulary() { 1 } else { config.step.batch };
        let score = StepShape { sequences, purpose: Purpose::Score, ..train };
        // Each process evaluates whole batches, of which it trains on a part.
        let evaluate = StepShape { purpose: Purpose::Evaluate, ..train };
        let mut steps = vec![train, score];
        steps.extend((share.ranks > 1).then_some(evaluate));
        let cache = room.map(|room| KvCache::new(config, model, room)).transpose()?;
        steps.extend(room.into_iter().flat_map(generation));
        let mut sizing = Sizing::new(config, model, Some(rule), &steps, share);
        sizing.cache = cache;
        sizing.plan()
    }

    /// Sums everything that evaluation holds.
    ///
    /// # Errors
    /// As [`new`](Plan::new).
    pub fn of_evaluation(config: &Config, model: &Model) -> Result<Plan, Error> {
        let positions = config.sequence_length(&model.shape)?;
        let has_scores = !model.shape.scores_vocabulary();
        let purpose = if has_scores { Purpose::Score } else { Purpose::Evaluate };
        let step = StepShape { sequences: config.step.batch, positions, purpose };
        Sizing::new(config, model, None, &[step], RankShare::WHOLE).plan()
    }

    /// Sums everything that generating in a room holds.
    ///
    /// # Errors
    /// As [`new`](Plan::new).
    pub fn of_generation(config: &Config, model: &Model, room: Room) -> Result<Plan, Error> {
        let steps = &generation(room);
        let mut sizing = Sizing::new(config, model, None, steps, RankShare::WHOLE);
        sizing.cache = Some(KvCache::new(config, model, room)?);
        sizing.plan()
    }

    /// The order in which each device does a step's work, each layer a stage.
    ///
    /// # Errors
    /// The schedule cannot be, or its layers are on several devices each.
    pub fn order(&self, model: &Model) -> Result<Pipeline, Error> {
        if self.config.parallel.deal == Deal::Sequences {
            let problem = "is \"sequences\": each layer is on every device, which a table of \
                           stages cannot say";
            return Err(Error::config("parallel.deal", problem));
        }
        let sequences = self.sequences;
        let positions = self.positions;
        let step = StepShape { sequences, positions, purpose: Purpose::Train };
        let mut order = Pipeline::of(&schedule_of(&self.config, model, self.step(step))?);
        order.devices.resize(self.devices as usize, Vec::new());
        Ok(order)
    }

    /// What the schedule of a step of all layers is made of.
    pub(crate) fn step(&self, shape: StepShape) -> StepSpec<'_> {
        let states = &self.states;
        let share = self.share;
        let file = self.pipeline.as_deref();
        StepSpec { shape, layers: None, states, share, file }
    }

    /// Floats of the stash.
    pub(crate) fn stash_floats(&self) -> usize {
        let place = if self.stash_on_device { Side::Device } else { Side::Host };
        self.regions.slots(Holder::Stash, place).floats()
    }

    /// Whether it is training's: with gradients and the optimizer's state.
    pub fn trains(&self) -> bool {
        self.trains
    }

    /// Whether a block's gradient waits in a region.
    pub(crate) fn has_region(&self, id: BlockId) -> bool {
        self.trains && (self.deferred || (id.0 as usize) < self.tied_tiles)
    }

    /// Where the KV cache of a position begins, in floats behind the cache's first.
    pub(crate) fn cached_at(&self, layer: usize, sequence: usize, position: usize) -> usize {
        let cache = self.cache.expect("who generates has planned for it");
        let KvCache { layers, sequences, capacity, width } = cache;
        assert!(layer < layers && sequence < sequences && position < capacity, "{cache:?}");
        ((layer * sequences + sequence) * capacity + position) * width
    }

    /// The ceiling that was set for the device, if one was.
    pub fn budget(&self) -> Option<u64> {
        self.config.device.memory.bytes()
    }

    /// Which process this is, where several share steps.
    pub fn share(&self) -> RankShare {
        self.share
    }

    /// How many devices there are.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// Bytes of a device.
    pub fn device_bytes(&self) -> u64 {
        self.device.iter().map(|term| term.bytes).sum()
    }

    /// Bytes of the host.
    pub fn host_bytes(&self) -> u64 {
        self.host.iter().map(|term| term.bytes).sum()
    }

    /// What the EPS holds, on the host or on file: bytes of master weights, of the optimizer's
    /// states, and of gradients that wait.
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

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, ByteSize::from(self.bytes))
    }
}
