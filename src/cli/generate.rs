//! `l2l generate`: shows the text that a model generates, as it comes.

use std::io::{IsTerminal, Read};
use std::path::Path;

use l2l::config::Format;
use l2l::data::Vocabulary;
use l2l::hf::{self, Message, RecordValue};
use l2l::inference::{self, Generator, Room, Sampling, Then};
use l2l::models::Model;
use l2l::{Config, Error, StopRequest, shape_of};
use serde::Deserialize;
use serde_json::json;

use super::common::load;
use super::output::{has_ended, print, print_part};
use super::runtime::Runtime;
use super::signals::Signals;
use super::{Exit, GenerateArguments, SamplingArguments, plan, say};

pub(super) fn generate(arguments: &GenerateArguments) -> Result<Exit, Error> {
    let (mut config, layers) = arguments.common.read_of_model(arguments.model.own_flags())?;
    let mut run = || {
        let from = load(&mut config, &arguments.model)?;
        let shape = shape_of(&config)?;
        let vocabulary = Vocabulary::of(&config, &shape)?;
        vocabulary.excess(shape.vocabulary).iter().for_each(say);
        let prompts = prompts(arguments, &vocabulary, shape.vocabulary)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let left = shape.most_positions().saturating_sub(longest).clamp(1, DEFAULT_TOKENS);
        let most = arguments.sampling.tokens.unwrap_or(left);
        let tokens = longest.saturating_add(most);
        let room = Room { prompts: prompts.len(), prompt: longest, tokens };
        if arguments.plan {
            let plan = Generator::plan(&config, room)?;
            plan::show(&config, &plan, &Model::new(shape), None);
            return Ok(Exit::Well);
        }
        let ends = arguments.sampling.ends(&from, &vocabulary);
        let how = arguments.sampling.how(&config)?;
        Runtime::new()?.block_on(async {
            let stop = StopRequest::new();
            let signals = Signals::stop(&stop, true);
            let mut page = Page::new(&config, &vocabulary, &arguments.sampling.stop, &prompts);
            let mut generator = Generator::start(config.clone(), room).await?;
            page.fill(&mut generator, &prompts, most, how, &ends, &stop).await?;
            generator.stop().await?;
            Ok(signals.ended())
        })
    };
    run().map_err(|error| layers.locate(error))
}

/// The most tokens that are generated without `--tokens`.
pub(super) const DEFAULT_TOKENS: usize = 128;

impl SamplingArguments {
    /// The settings by which tokens are drawn.
    ///
    /// # Errors
    /// A setting is out of range, or a stop string is empty.
    pub(super) fn how(&self, config: &Config) -> Result<Sampling, Error> {
        let &SamplingArguments { temperature, top_k, top_p, min_p, repetition_penalty, .. } = self;
        let seed = self.seed.unwrap_or(config.step.seed);
        let how = Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed };
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::Argument("--stop: give a text that is not empty".into()));
        }
        how.check().map(|()| how)
    }

    /// The tokens that end a text of the model in the directory `model`.
    pub(super) fn ends(&self, model: &Path, vocabulary: &Vocabulary) -> Vec<u32> {
        if self.ignore_end {
            return Vec::new();
        }
        let mut ends = hf::ends(model);
        ends.extend(vocabulary.end());
        ends
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    tools: Option<RecordValue>,
    input_ids: Option<Vec<u32>>,
}

/// The tokens of every prompt, from `--prompt` and `--prompts`, or else from stdin. `known` is the
/// size of the vocabulary.
fn prompts(
    arguments: &GenerateArguments,
    vocabulary: &Vocabulary,
    known: usize,
) -> Result<Vec<Vec<u32>>, Error> {
    let refused = |what: String| Error::Argument(what);
    let system = arguments.sampling.system.as_deref();
    if system.is_some() && !arguments.chat {
        return Err(refused(
            "--system: only a chat has a system's message: give --chat, too".into(),
        ));
    }
    let chats = arguments.chat.then_some(system);
    let mut all = Vec::new();
    let encode = |text: &str| {
        let tokens = encode(vocabulary, text, chats)?;
        vocabulary.check(&tokens, known).map(|()| tokens)
    };
    for (index, text) in arguments.prompt.iter().enumerate() {
        let tokens = encode(text);
        all.push(tokens.map_err(|what| refused(format!("prompt {index}: {what}")))?);
    }
    if let Some(path) = &arguments.prompts {
        all.extend(prompts_of_file(path, vocabulary, chats, known)?);
    }
    if all.is_empty() {
        if std::io::stdin().is_terminal() {
            return Err(refused("no prompt: give --prompt, --prompts, or text on stdin".into()));
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(|e| refused(format!("stdin: {e}")))?;
        all.push(encode(&text).map_err(refused)?);
    }
    match all.iter().position(Vec::is_empty) {
        Some(index) => Err(refused(format!("prompt {index} is empty"))),
        None => Ok(all),
    }
}

/// The tokens of a text. With `chats` the text is a user's message in a chat, after the system's
/// message if there is one.
fn encode(
    vocabulary: &Vocabulary,
    text: &str,
    chats: Option<Option<&str>>,
) -> Result<Vec<u32>, String> {
    if let Some(system) = chats {
        let mut messages = vec![Message::new("user", text)];
        system.into_iter().for_each(|system| messages.insert(0, Message::new("system", system)));
        let text = vocabulary.ask(&messages, &RecordValue::Null)?;
        return Ok(vocabulary.encode(&text, None, false)?.tokens);
    }
    let mut encoded = vocabulary.encode(text, None, true)?;
    // The text continues, so tokens that end a text are removed.
    let is_added = |span: &(usize, usize)| *span == (0, 0);
    while encoded.tokens.len() > 1 && encoded.spans.last().is_some_and(is_added) {
        encoded.tokens.pop();
        encoded.spans.pop();
    }
    Ok(encoded.tokens)
}

/// The tokens of every line of a `.jsonl` of prompts.
fn prompts_of_file(
    path: &Path,
    vocabulary: &Vocabulary,
    chats: Option<Option<&str>>,
    known: usize,
) -> Result<Vec<Vec<u32>>, Error> {
    let refused = |what: String| Error::Argument(format!("{}{what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| refused(format!(": {error}")))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let mut all = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let tokens = prompt_of_line(line, vocabulary, chats)
            .and_then(|tokens| vocabulary.check(&tokens, known).map(|()| tokens));
        all.push(tokens.map_err(|what| refused(format!(", line {}: {what}", number + 1)))?);
    }
    if all.is_empty() {
        return Err(refused(": no prompt in it".into()));
    }
    Ok(all)
}

fn prompt_of_line(
    line: &str,
    vocabulary: &Vocabulary,
    chats: Option<Option<&str>>,
) -> Result<Vec<u32>, String> {
    let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
    match line {
        Line { messages: None, tools: Some(_), .. } => Err("tools go with messages".into()),
        Line { prompt: Some(text), messages: None, input_ids: None, .. } => {
            encode(vocabulary, &text, chats)
        }
        Line { messages: Some(messages), .. } if messages.is_empty() => {
            Err("messages is empty".into())
        }
        Line { prompt: None, messages: Some(messages), input_ids: None, tools } => {
            let text = vocabulary.ask(&messages, &tools.unwrap_or_default())?;
            Ok(vocabulary.encode(&text, None, false)?.tokens)
        }
        Line { prompt: None, messages: None, input_ids: Some(ids), .. } => Ok(ids),
        _ => Err("it needs one of prompt, messages and input_ids".into()),
    }
}

/// The text that continues a prompt, so far.
struct Writing {
    /// All tokens, those of the prompt first.
    tokens: Vec<u32>,
    /// The number of the prompt's tokens.
    prompt: usize,
    /// The text that was shown.
    shown: String,
    /// The reason that it ended.
    ended: Option<&'static str>,
    /// True when the last token ends the text and is not a part of it.
    is_cut: bool,
}

impl Writing {
    /// The generated text up to the first of the stop strings, and whether there was one.
    fn text(&self, vocabulary: &Vocabulary, stops: &[String]) -> (String, bool) {
        let from = self.prompt.saturating_sub(CONTEXT);
        let to = self.tokens.len() - usize::from(self.is_cut);
        let decode = |to: usize| vocabulary.decode(&self.tokens[from..to], false);
        let mut text = behind(&decode(self.prompt), &decode(to)).to_string();
        let stop = stops.iter().filter_map(|stop| text.find(stop)).min();
        stop.into_iter().for_each(|at| text.truncate(at));
        (text, stop.is_some())
    }

    /// The part of the text that was not shown yet, which counts as shown from now on.
    fn show<'t>(&mut self, text: &'t str) -> &'t str {
        // The text may be shorter than before, if a broken character waits for its other bytes.
        if self.shown.starts_with(text) {
            return "";
        }
        let new = behind(&self.shown, text);
        self.shown = text.into();
        new
    }
}

/// Tokens of the prompt that the generated ones are decoded with, because a space may depend on
/// them.
const CONTEXT: usize = 4;

/// The part of `with` behind its common beginning with `before`. The two may differ at the end of
/// `before`: a broken character is decoded otherwise once more of its bytes are there.
fn behind<'t>(before: &str, with: &'t str) -> &'t str {
    let alike = before.chars().zip(with.chars()).take_while(|(a, b)| a == b);
    let alike: usize = alike.map(|(a, _)| a.len_utf8()).sum();
    &with[alike..]
}

/// The number of bytes of a text that no further token can change: all up to a character that may
/// not be complete, or to the beginning of a stop string.
fn settled(text: &str, stops: &[String]) -> usize {
    // A character has four bytes at most, and each broken one is shown as U+FFFD.
    let whole = text.trim_end_matches('\u{fffd}');
    let broken = (text.len() - whole.len()) / '\u{fffd}'.len_utf8();
    let text = if (1..4).contains(&broken) { whole } else { text };
    let begins = |stop: &String| {
        let ends = stop.char_indices().map(|(at, _)| at).filter(|&at| at > 0);
        ends.filter(|&at| text.ends_with(&stop[..at])).max()
    };
    text.len() - stops.iter().filter_map(begins).max().unwrap_or(0)
}

/// Shows generated text: of a single prompt as it comes, of several at the end.
pub(super) struct Page<'v> {
    vocabulary: &'v Vocabulary,
    format: Format,
    stops: &'v [String],
    all: Vec<Writing>,
}

impl<'v> Page<'v> {
    pub(super) fn new(
        config: &Config,
        vocabulary: &'v Vocabulary,
        stops: &'v [String],
        prompts: &[Vec<u32>],
    ) -> Page<'v> {
        let writing = |tokens: &Vec<u32>| Writing {
            tokens: tokens.clone(),
            prompt: tokens.len(),
            shown: String::new(),
            ended: None,
            is_cut: false,
        };
        let all = prompts.iter().map(writing).collect();
        Page { vocabulary, format: config.log.format, stops, all }
    }

    /// Generates until each prompt's text ends, and shows it. All end early if `stop` is requested,
    /// or if nobody reads the output.
    ///
    /// # Errors
    /// A prompt does not fit, or the ring failed.
    pub(super) async fn fill(
        &mut self,
        generator: &mut Generator,
        prompts: &[Vec<u32>],
        most: usize,
        how: Sampling,
        ends: &[u32],
        stop: &StopRequest,
    ) -> Result<(), Error> {
        let each = |prompt: usize, token: u32, ended: Option<inference::Ended>| {
            let then = self.take(prompt, token, ended, ends.contains(&token));
            if stop.is_requested() || has_ended() { Then::EndAll } else { then }
        };
        let done = generator.generate(prompts, most, how, ends, each).await;
        self.end();
        done
    }

    /// Takes a token of a prompt, shows the settled text, and decides whether the sequence goes on.
    fn take(
        &mut self,
        prompt: usize,
        token: u32,
        ended: Option<inference::Ended>,
        is_end: bool,
    ) -> Then {
        let is_alone = self.all.len() == 1;
        let one = &mut self.all[prompt];
        one.tokens.push(token);
        one.is_cut = is_end;
        one.ended = ended.map(|ended| match ended {
            inference::Ended::EndOfText => "end-of-text",
            inference::Ended::Length => "length",
        });
        let (text, is_stopped) = one.text(self.vocabulary, self.stops);
        if is_stopped {
            one.ended = Some("stop");
        }
        let to = if one.ended.is_some() { text.len() } else { settled(&text, self.stops) };
        let new = one.show(&text[..to]);
        match self.format {
            Format::Json => {
                print(json!({ "event": "token", "prompt": prompt, "token": token, "text": new }));
            }
            Format::Pretty if is_alone => print_part(new),
            Format::Pretty => {}
        }
        if is_stopped { Then::EndSequence } else { Then::GoOn }
    }

    /// The text that continues a prompt.
    pub(super) fn text(&self, prompt: usize) -> String {
        self.all[prompt].text(self.vocabulary, self.stops).0
    }

    /// Shows the texts as they ended.
    fn end(&self) {
        for (index, one) in self.all.iter().enumerate() {
            match self.format {
                Format::Json => print(json!({
                    "event": "generated",
                    "prompt": index,
                    "tokens": one.tokens[one.prompt..],
                    "text": self.text(index),
                    "ended": one.ended.unwrap_or("interrupted"),
                })),
                Format::Pretty if self.all.len() == 1 => print(""),
                Format::Pretty => print(format_args!("{index}: {}", self.text(index))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::settled;

    #[test]
    fn a_possible_beginning_of_a_stop_string_waits() {
        let stops = ["\nUser:".to_string(), "##".to_string()];
        for (text, to) in [("Hi", 2), ("Hi\n", 2), ("Hi\nUse", 2), ("Hi\nX", 4), ("a#", 1)] {
            assert_eq!(settled(text, &stops), to, "{text:?}");
        }
        assert_eq!(settled("a\u{fffd}", &[]), 1);
        assert_eq!(settled("a\u{fffd}\u{fffd}\u{fffd}\u{fffd}", &[]), 13);
    }
}
