//! The room that generation has, and the KV cache in it.

use l2l_actors::schedule::LayerId;

use super::step::{Purpose, StepShape};
use crate::error::Error;
use crate::models::{Head, Model};
use crate::tensor::{ALIGNED, Dtype};

/// The largest generation that a plan has memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The number of prompts that are continued at once.
    pub prompts: usize,
    /// Tokens of the longest prompt.
    pub prompt: usize,
    /// Tokens of a prompt and of its continuation, in all.
    pub tokens: usize,
}

impl Room {
    /// The most tokens of a text that are read at once: those of the longest prompt, or those of a
    /// text that is read anew because it gets long for the model.
    pub(crate) fn longest_read(self, model: &Model) -> usize {
        let beyond = model.shape.rereads_beyond().filter(|&beyond| beyond < self.tokens);
        beyond.map_or(self.prompt, |beyond| self.prompt.max(beyond + 1))
    }

    /// The two largest steps: the first one reads whole texts, and the last one has the most
    /// cached positions.
    pub(super) fn steps(self, model: &Model) -> [StepShape; 2] {
        let Room { prompts: sequences, tokens, .. } = self;
        let step = |positions, cached| {
            let purpose = Purpose::Generate { cached };
            StepShape { sequences, positions, purpose }
        };
        [step(self.longest_read(model), 0), step(1, tokens.saturating_sub(1))]
    }

    /// Refuses a room that does not fit a model.
    pub(crate) fn check(self, model: &Model) -> Result<(), Error> {
        if model.shape.head != Head::Tokens {
            return Err(Error::argument("tokens are drawn from models that predict the next one"));
        }
        let Room { prompts, prompt, tokens } = self;
        let positions = model.shape.most_positions();
        if tokens > positions {
            return Err(Error::argument(format_args!(
                "a prompt of {prompt} tokens and what is to come behind it are {tokens}: the model \
                 has {positions} positions"
            )));
        }
        if prompts == 0 || prompt == 0 || tokens < prompt {
            return Err(Error::argument(format_args!("there is no room in {self:?}")));
        }
        Ok(())
    }
}

/// The KV cache on the host: by layer, step of it, sequence and position, in floats.
#[derive(Clone, Debug)]
pub(super) struct KvCache {
    /// The steps that have keys and values, in order.
    steps: Vec<CachedStep>,
    /// Floats of a position in all steps.
    width: usize,
    sequences: usize,
    /// Positions of a sequence.
    capacity: usize,
}

/// A step of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StepOfLayer {
    pub(crate) layer: LayerId,
    pub(crate) step: u16,
}

/// A step's part of the KV cache.
#[derive(Clone, Copy, Debug)]
struct CachedStep {
    step: StepOfLayer,
    /// Floats of a position.
    width: usize,
    /// Those of a position in all steps before.
    before: usize,
}

impl KvCache {
    /// The cache of a room.
    pub(super) fn new(model: &Model, room: Room, dtype: Dtype) -> KvCache {
        let mut all = 0;
        let mut steps = Vec::new();
        for (layer, widths) in (0..).map(LayerId).zip(model.kv_widths(dtype)) {
            let widths = widths.into_iter().map(|numbers| dtype.floats(numbers));
            for (step, width) in (0..).zip(widths).filter(|(_, width)| *width > 0) {
                steps.push(CachedStep { step: StepOfLayer { layer, step }, width, before: all });
                all += width;
            }
        }
        let Room { prompts: sequences, tokens: capacity, .. } = room;
        KvCache { steps, width: all, sequences, capacity }
    }

    pub(super) fn floats(&self) -> usize {
        (self.sequences * self.capacity * self.width).next_multiple_of(ALIGNED)
    }

    /// The first float of a position, counted from the begin of the cache.
    pub(super) fn at(&self, step: StepOfLayer, sequence: usize, position: usize) -> usize {
        let KvCache { ref steps, sequences, capacity, .. } = *self;
        assert!(sequence < sequences && position < capacity, "{self:?}");
        let at = steps.binary_search_by_key(&step, |one| one.step);
        let CachedStep { width, before, .. } = steps[at.expect("the step has keys and values")];
        sequences * capacity * before + (sequence * capacity + position) * width
    }
}
