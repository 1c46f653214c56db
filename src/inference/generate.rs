//! Text from a model, a token of each sequence a walk of the ring.
//!
//! The first walk reads the prompts; every layer's keys and values go to the host's memory of
//! that layer and sequence. Each walk behind it brings one token a sequence, and with a layer's
//! block comes its memory, through the slots that boundaries use: so a model that is too large
//! for the device generates, too.

use super::{Dice, Loaded, Sampling, model_of};
use crate::blocking::unblock;
use crate::config::Config;
use crate::data::Batch;
use crate::engine::Engine;
use crate::error::Error;
use crate::models::Model;
use crate::plan::{Plan, Purpose, Room};
use crate::worker::CacheSlot;

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A token said so, which is the last.
    EndOfText,
    /// It is as long as was asked for.
    Length,
}

/// What follows a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The next one.
    GoOn,
    /// The end of its sequence.
    EndSequence,
    /// The end of all sequences.
    EndAll,
}

/// Generates from prompts.
pub struct Generator {
    loaded: Loaded,
    room: Room,
}

/// A sequence on its way.
struct Writing {
    /// Its prompt's index, and its slot in the memory.
    index: usize,
    /// Positions that are remembered.
    past: usize,
    last: u32,
    written: usize,
    dice: Dice,
}

/// The memory that is brought along grows by so many positions at once, so that not every token
/// has a schedule of its own.
const STRIDE: usize = 64;

impl Generator {
    /// The plan of a generator of a config's model.
    ///
    /// # Errors
    /// The model does not predict the next token, or has fewer positions.
    pub fn plan(config: &Config, room: Room) -> Result<Plan, Error> {
        Ok(prepare(config, None, room)?.1)
    }

    /// Makes everything, with the weights that a config names.
    ///
    /// # Errors
    /// As [`plan`](Generator::plan); what is wrong with what the config names; there is less
    /// memory than that takes.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn start(config: Config, room: Room) -> Result<Generator, Error> {
        Generator::start_with(config, None, room).await
    }

    /// The same for a model of one's own. Its weights are read from `model.path`, under the names
    /// of its tensors; without one they are random.
    ///
    /// # Errors
    /// As [`start`](Generator::start).
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn of_model(config: Config, model: Model, room: Room) -> Result<Generator, Error> {
        Generator::start_with(config, Some(model), room).await
    }

    async fn start_with(
        config: Config,
        model: Option<Model>,
        room: Room,
    ) -> Result<Generator, Error> {
        unblock(move || {
            let (model, plan) = prepare(&config, model, room)?;
            Ok(Generator { loaded: Loaded::start(config, model, plan)?, room })
        })
        .await
    }

    /// Continues each prompt by at most `most` tokens, until it draws one of `ends`. `each` is
    /// called with every token as it comes, and with the index of its prompt, and says what
    /// follows. The tokens of all prompts are drawn in turns.
    ///
    /// # Errors
    /// A prompt is empty, does not fit the room, or has a token outside the vocabulary; `how` is
    /// no way to draw; the ring failed.
    pub async fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        most: usize,
        how: Sampling,
        ends: &[u32],
        each: impl FnMut(usize, u32, Option<Ended>) -> Then,
    ) -> Result<(), Error> {
        let Generator { loaded, room } = self;
        generate(&mut loaded.engine, *room, prompts, most, (how, ends), each).await
    }

    /// Ends all threads and tasks.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn stop(self) -> Result<(), Error> {
        self.loaded.stop().await
    }
}

/// Generates with an engine whose plan has a KV cache of this room.
///
/// # Errors
/// As [`Generator::generate`].
pub(crate) async fn generate(
    engine: &mut Engine,
    room: Room,
    prompts: &[Vec<u32>],
    most: usize,
    (how, ends): (Sampling, &[u32]),
    mut each: impl FnMut(usize, u32, Option<Ended>) -> Then,
) -> Result<(), Error> {
    how.check()?;
    let Room { prompts: sequences, prompt: longest, tokens } = room;
    if prompts.is_empty() || prompts.len() > sequences {
        return Err(Error::argument(format_args!(
            "{} prompts, and there is room for 1 to {sequences} at once (Room::prompts)",
            prompts.len()
        )));
    }
    for (index, len) in prompts.iter().map(Vec::len).enumerate() {
        if len == 0 || len > longest {
            return Err(Error::argument(format_args!(
                "prompt {index} has {len} tokens, and there is room for 1 to {longest} \
                 (Room::prompt)"
            )));
        }
        if len + most > tokens {
            return Err(Error::argument(format_args!(
                "prompt {index} has {len} tokens, and {most} more are to be generated: there is \
                 room for {tokens} together (Room::tokens)"
            )));
        }
    }
    if most == 0 {
        return Ok(());
    }
    let mut writing: Vec<Writing> = (0..prompts.len())
        .map(|index| {
            let mut dice = Dice::new(how, index as u64);
            dice.see(&prompts[index]);
            Writing { index, past: 0, last: 0, written: 0, dice }
        })
        .collect();
    let mut batch = Batch::for_generation(prompts);
    while !writing.is_empty() {
        let lengths: Vec<usize> = batch.lengths().collect();
        let past = writing.iter().map(|one| one.past).max().unwrap_or(0);
        let past = past.next_multiple_of(STRIDE).min(tokens - 1);
        let places = writing.iter().map(|one| CacheSlot { slot: one.index, cached: one.past });
        let (places, purpose) = (places.collect(), Purpose::Generate { cached: past });
        let logits = engine.run(batch, purpose, places).await?.logits;
        let vocabulary = engine.model.shape.vocabulary;
        let of_each = writing.iter_mut().zip(lengths).zip(logits.chunks_exact(vocabulary));
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::NotFinite(
                "the model's logits are not finite: are its weights?".into(),
            ));
        }
        let mut goes_on = Vec::new();
        for ((one, length), logits) in of_each {
            one.past += length;
            one.written += 1;
            one.last = one.dice.draw(logits);
            let ended = match one.last {
                token if ends.contains(&token) => Some(Ended::EndOfText),
                _ if one.written == most => Some(Ended::Length),
                _ => None,
            };
            match each(one.index, one.last, ended) {
                Then::EndAll => return Ok(()),
                then => goes_on.push(ended.is_none() && then == Then::GoOn),
            }
        }
        let mut goes_on = goes_on.into_iter();
        writing.retain(|_| goes_on.next() == Some(true));
        batch = Batch::for_generation(&writing.iter().map(|one| [one.last]).collect::<Vec<_>>());
    }
    Ok(())
}

fn prepare(config: &Config, own: Option<Model>, room: Room) -> Result<(Model, Plan), Error> {
    config.check()?;
    let model = model_of(config, own)?;
    room.check(&model)?;
    let plan = Plan::of_generation(config, &model, room)?;
    Ok((model, plan))
}
