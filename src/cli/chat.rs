//! `l2l chat`: a conversation with a model, a message a line.

use std::io::{BufRead, IsTerminal};

use l2l::config::Format;
use l2l::data::Vocabulary;
use l2l::hf::{Message, RecordValue};
use l2l::inference::{Generator, Room};
use l2l::{Error, StopRequest, shape_of};

use super::common::load;
use super::generate::{DEFAULT_TOKENS, Page};
use super::output::{has_ended, print_part};
use super::runtime::Runtime;
use super::signals::Signals;
use super::{ChatArguments, Exit, say};

pub(super) fn chat(arguments: &ChatArguments) -> Result<Exit, Error> {
    let ChatArguments { common, sampling, model } = arguments;
    let (mut config, layers) = common.read_of_model(model.own_flags())?;
    let mut run = || {
        let from = load(&mut config, model)?;
        let shape = shape_of(&config)?;
        let vocabulary = Vocabulary::of(&config, &shape)?;
        vocabulary.excess(shape.vocabulary).iter().for_each(say);
        vocabulary.template().map_err(Error::Argument)?;
        let ends = sampling.ends(&from, &vocabulary);
        let how = sampling.how(&config)?;
        // A conversation is at most as long as data.sequence_length, or as the model has positions.
        let tokens = config.sequence_length(&shape)?;
        let most = sampling.tokens.unwrap_or(DEFAULT_TOKENS).clamp(1, tokens - 1);
        let room = Room { prompts: 1, prompt: tokens - most, tokens };
        Runtime::new()?.block_on(async {
            let stop = StopRequest::new();
            let signals = Signals::stop(&stop, false);
            let mut generator = Generator::start(config.clone(), room).await?;
            let system = sampling.system.as_ref().map(|text| Message::new("system", text.clone()));
            let first = usize::from(system.is_some());
            let mut messages: Vec<Message> = system.into_iter().collect();
            let shows = std::io::stdin().is_terminal() && config.log.format == Format::Pretty;
            if shows {
                say("write a message and press return; an empty line begins anew, Ctrl-D ends");
            }
            while let Some(line) = next_line(shows) {
                if line.trim().is_empty() {
                    messages.truncate(first);
                    continue;
                }
                messages.push(Message::new("user", line.trim_end()));
                let prompt = fitting(&mut messages, first, room.prompt, &vocabulary)?;
                let known = vocabulary.check(&prompt, shape.vocabulary);
                known.map_err(Error::Argument)?;
                let prompts = [prompt];
                let mut page = Page::new(&config, &vocabulary, &sampling.stop, &prompts);
                page.fill(&mut generator, &prompts, most, how, &ends, &stop).await?;
                messages.push(Message::new("assistant", page.text(0)));
                if stop.is_requested() || has_ended() {
                    break;
                }
            }
            generator.stop().await?;
            Ok(signals.ended())
        })
    };
    run().map_err(|error| layers.locate(error))
}

/// The next line of standard input; `None` at the end.
fn next_line(shows: bool) -> Option<String> {
    if shows {
        print_part("> ");
    }
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).ok()?;
    (read > 0).then_some(line)
}

/// The tokens of a conversation. The oldest messages after the `first` ones are left out until it
/// fits.
fn fitting(
    messages: &mut Vec<Message>,
    first: usize,
    room: usize,
    vocabulary: &Vocabulary,
) -> Result<Vec<u32>, Error> {
    loop {
        let text = vocabulary.ask(messages, &RecordValue::Null).map_err(Error::Argument)?;
        let tokens = vocabulary.encode(&text, None, false).map_err(Error::Argument)?.tokens;
        if tokens.len() <= room {
            return Ok(tokens);
        }
        if messages.len() < first + 3 {
            return Err(Error::Argument(format!(
                "the message has {} tokens, and there is room for {room}: set \
                 data.sequence_length, or ask for fewer with --tokens",
                tokens.len()
            )));
        }
        messages.drain(first..first + 2);
        say("(the oldest messages are left out: the conversation is longer than the model reads)");
    }
}
