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
    /// The steps that write to it, in order.
    steps: Vec<CachedStep>,
    /// Floats of all steps.
    floats: usize,
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
    /// The first float.
    at: usize,
    /// Floats of a sequence.
    of_sequence: usize,
    /// Floats of a position; 0: a sequence has as many for any number of positions.
    of_position: usize,
}

impl KvCache {
    /// The cache of a room.
    pub(super) fn new(model: &Model, room: Room, dtype: Dtype) -> KvCache {
        let Room { prompts: sequences, tokens: capacity, .. } = room;
        let mut at = 0;
        let mut steps = Vec::new();
        for (layer, written) in (0..).map(LayerId).zip(model.new_kv(dtype)) {
            for (step, boundary) in (0..).zip(written) {
                let Some(boundary) = boundary else { continue };
                let step = StepOfLayer { layer, step };
                let floats = |sequences, tokens| {
                    boundary.bytes(sequences, tokens) as usize / Dtype::F32.size()
                };
                let of_position = floats(0, 1);
                let of_sequence = floats(1, 0) + capacity * of_position;
                steps.push(CachedStep { step, at, of_sequence, of_position });
                at += sequences * of_sequence;
            }
        }
        KvCache { steps, floats: at, sequences, capacity }
    }

    pub(super) fn floats(&self) -> usize {
        self.floats.next_multiple_of(ALIGNED)
    }

    /// The first float of a position, counted from the begin of the cache.
    pub(super) fn at(&self, step: StepOfLayer, sequence: usize, position: usize) -> usize {
        let KvCache { ref steps, sequences, capacity, .. } = *self;
        assert!(sequence < sequences && position < capacity, "{self:?}");
        let nth = steps.binary_search_by_key(&step, |one| one.step);
        let CachedStep { at, of_sequence, of_position, .. } =
            steps[nth.expect("the step writes to the cache")];
        at + sequence * of_sequence + position * of_position
    }
}
