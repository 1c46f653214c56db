//! Generation: each step of the ring gives one token of each sequence.
//!
//! The first step reads the prompts, and every layer's keys and values go to the KV cache on the
//! host. Each later step reads one token of each sequence, and uploads a layer's part of the cache
//! with the layer's block. So a model that is too large for the device generates, too.

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
    /// Its last token ends a text.
    EndOfText,
    /// It has the number of tokens that was asked for.
    Length,
}

/// What a caller wants after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The next token.
    GoOn,
    /// The end of its sequence.
    EndSequence,
    /// The end of all sequences.
    EndAll,
}

/// A model that continues prompts.
pub struct Generator {
    loaded: Loaded,
    room: Room,
}

/// A sequence that is not complete.
struct Writing {
    /// The index of its prompt, which is its slot in the KV cache, too.
    index: usize,
    /// The number of positions in the KV cache.
    cached: usize,
    /// The tokens that are not in the KV cache; or all tokens, where a text may be read anew.
    text: Vec<u32>,
    /// The number of tokens behind the prompt.
    written: usize,
    dice: Dice,
}

/// The uploaded part of the KV cache grows by this number of positions at a time. With a smaller
/// number more tokens would need a schedule of their own.
const STRIDE: usize = 64;

impl Generator {
    /// The plan of a generator of a config's model.
    ///
    /// # Errors
    /// The model does not predict the next token, or has fewer positions than the room.
    pub fn plan(config: &Config, room: Room) -> Result<Plan, Error> {
        Ok(prepare(config, None, room)?.1)
    }

    /// Starts the ring of a config's model, and loads the weights that the config names.
    ///
    /// # Errors
    /// As [`plan`](Generator::plan); the weights cannot be used; or there is too little memory.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn start(config: Config, room: Room) -> Result<Generator, Error> {
        Generator::start_with(config, None, room).await
    }

    /// Starts the ring of a model that the program built. Its weights are read from `model.path`,
    /// under the names of its tensors. Without this key they are random.
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
        .await?
    }

    /// Continues each prompt by at most `most` tokens, and ends it earlier at a token of `ends`.
    /// `each` is called with the index of a prompt and its next token, as soon as the token is
    /// drawn, and returns what should follow. The prompts take turns.
    ///
    /// # Errors
    /// A prompt is empty, does not fit the room, or has a token outside the vocabulary; `how` is
    /// out of range; or the ring failed.
    pub async fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        most: usize,
        how: Sampling,
        ends: &[u32],
        each: impl FnMut(usize, u32, Option<Ended>) -> Then,
    ) -> Result<(), Error> {
        let Generator { loaded, room } = self;
        generate(&mut loaded.engine, *room, prompts, most, how, ends, each).await
    }

    /// Ends all threads and tasks.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn stop(self) -> Result<(), Error> {
        self.loaded.stop().await
    }
}

/// Continues prompts with an engine whose plan has a KV cache for `room`.
pub(crate) async fn generate(
    engine: &mut Engine,
    room: Room,
    prompts: &[Vec<u32>],
    most: usize,
    how: Sampling,
    ends: &[u32],
    mut each: impl FnMut(usize, u32, Option<Ended>) -> Then,
) -> Result<(), Error> {
    how.check()?;
    check_prompts(prompts, most, room)?;
    if most == 0 {
        return Ok(());
    }
    let begin = |(index, text): (usize, &Vec<u32>)| {
        let mut dice = Dice::new(how, index as u64);
        dice.see(text);
        Writing { index, cached: 0, text: text.clone(), written: 0, dice }
    };
    let mut writing: Vec<Writing> = prompts.iter().enumerate().map(begin).collect();
    let rereads_beyond = engine.model.shape.rereads_beyond();
    while !writing.is_empty() {
        let mut goes_on = vec![true; prompts.len()];
        // Texts that are read anew have a step of their own: it reads all of their tokens.
        let gets_long = |one: &Writing| one.written > 0 && Some(one.cached) == rereads_beyond;
        let (mut anew, mut others): (Vec<_>, Vec<_>) = writing.into_iter().partition(gets_long);
        anew.iter_mut().for_each(|one| one.cached = 0);
        for writing in [&mut anew, &mut others].into_iter().filter(|some| !some.is_empty()) {
            let logits = next_logits(engine, room, writing).await?;
            let vocabulary = engine.model.shape.vocabulary;
            for (one, logits) in writing.iter_mut().zip(logits.chunks_exact(vocabulary)) {
                let token = one.dice.draw(logits);
                one.take(token, rereads_beyond);
                let ended = match token {
                    token if ends.contains(&token) => Some(Ended::EndOfText),
                    _ if one.written == most => Some(Ended::Length),
                    _ => None,
                };
                match each(one.index, token, ended) {
                    Then::EndAll => return Ok(()),
                    then => goes_on[one.index] = ended.is_none() && then == Then::GoOn,
                }
            }
        }
        writing = anew.into_iter().chain(others).filter(|one| goes_on[one.index]).collect();
        writing.sort_by_key(|one| one.index);
    }
    Ok(())
}

impl Writing {
    /// The tokens that the next step reads.
    fn unread(&self) -> &[u32] {
        match self.cached {
            0 => &self.text,
            _ => &self.text[self.text.len() - 1..],
        }
    }

    /// Notes that all tokens were read, and the next token. Tokens are kept while the text may be
    /// read anew.
    fn take(&mut self, token: u32, rereads_beyond: Option<usize>) {
        self.cached += self.unread().len();
        self.written += 1;
        if rereads_beyond.is_none_or(|beyond| self.cached > beyond) {
            self.text.clear();
        }
        self.text.push(token);
    }
}

/// The logits of the next token of each text.
async fn next_logits(
    engine: &mut Engine,
    room: Room,
    writing: &[Writing],
) -> Result<Vec<f32>, Error> {
    let unread: Vec<&[u32]> = writing.iter().map(Writing::unread).collect();
    let cached = writing.iter().map(|one| one.cached).max().unwrap_or(0);
    let cached = cached.next_multiple_of(STRIDE).min(room.tokens - 1);
    let slots = writing.iter().map(|one| CacheSlot { slot: one.index, cached: one.cached });
    let slots = slots.collect();
    let batch = Batch::for_generation(&unread);
    let logits = engine.run(batch, Purpose::Generate { cached }, slots).await?.logits;
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Err(Error::NotFinite("the model's logits are not finite: are its weights?".into()));
    }
    Ok(logits)
}

/// Refuses prompts that the KV cache has no room for.
fn check_prompts(prompts: &[Vec<u32>], most: usize, room: Room) -> Result<(), Error> {
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
    Ok(())
}

fn prepare(config: &Config, own: Option<Model>, room: Room) -> Result<(Model, Plan), Error> {
    config.check()?;
    let model = model_of(config, own)?;
    room.check(&model)?;
    let plan = Plan::of_generation(config, &model, room)?;
    Ok((model, plan))
}
