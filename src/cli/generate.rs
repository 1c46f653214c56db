//! `l2l generate`: text from a model, as it comes.

use std::io::{IsTerminal, Read, Write};
use std::path::Path;

use l2l::config::Format;
use l2l::data::Vocabulary;
use l2l::hf::{self, Message};
use l2l::inference::{self, Generator, Room, Sampling};
use l2l::models::Model;
use l2l::{Config, Error, StopRequest, shape_of};
use serde::Deserialize;
use serde_json::json;

use super::{Ended, GenerateArguments, load, plan, print, train};

pub(super) fn generate(arguments: &GenerateArguments) -> Result<Ended, Error> {
    let (mut config, layers) = arguments.common.read(None, None)?;
    let mut run = || {
        let from = load(&mut config, &arguments.model)?;
        let shape = shape_of(&config)?;
        let vocabulary = Vocabulary::of(&config, &shape)?;
        let prompts = prompts(arguments, &vocabulary, shape.vocabulary)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        // As many as were asked for, or as the model has positions for.
        let left = shape.positions.saturating_sub(longest).clamp(1, DEFAULT_TOKENS);
        let most = arguments.tokens.unwrap_or(left);
        let tokens = longest.saturating_add(most);
        let room = Room { prompts: prompts.len(), prompt: longest, tokens };
        if arguments.plan {
            let plan = Generator::plan(&config, room)?;
            plan::show(&config, &plan, &Model::new(shape), None);
            return Ok(Ended::Well);
        }
        let mut ends = hf::ends(&from);
        ends.extend(vocabulary.end());
        if arguments.ignore_end {
            ends.clear();
        }
        let &GenerateArguments { temperature, top_k, top_p, .. } = arguments;
        let seed = arguments.seed.unwrap_or(config.step.seed);
        let how = Sampling { temperature, top_k, top_p, seed };
        how.check()?;
        train::runtime()?.block_on(async {
            let stop = StopRequest::new();
            train::stop_on_signal(&stop, true);
            let mut page = Page::new(&config, &vocabulary, &prompts);
            let mut generator = Generator::start(config.clone(), room)?;
            let each = |prompt: usize, token: u32, ended: Option<inference::Ended>| {
                page.take(prompt, token, ended, ends.contains(&token));
                !stop.is_requested()
            };
            let done = generator.generate(&prompts, most, how, &ends, each).await;
            page.end();
            done?;
            generator.stop().await?;
            Ok(if stop.is_requested() { Ended::Interrupted } else { Ended::Well })
        })
    };
    run().map_err(|error| layers.locate(error))
}

/// Tokens that are generated when nobody says how many.
const DEFAULT_TOKENS: usize = 128;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    input_ids: Option<Vec<u32>>,
}

/// The tokens of every prompt: from `--prompt` and `--prompts`, or else from stdin.
fn prompts(
    arguments: &GenerateArguments,
    vocabulary: &Vocabulary,
    known: usize,
) -> Result<Vec<Vec<u32>>, Error> {
    let refused = |what: String| Error::Argument(what);
    let chats = arguments.chat;
    let mut all = Vec::new();
    for (index, text) in arguments.prompt.iter().enumerate() {
        let tokens = encode(vocabulary, text, chats);
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
        all.push(encode(vocabulary, &text, chats).map_err(refused)?);
    }
    match all.iter().position(Vec::is_empty) {
        Some(index) => Err(refused(format!("prompt {index} is empty"))),
        None => Ok(all),
    }
}

/// The tokens of a text: as it is, or as a user's message in a chat.
fn encode(vocabulary: &Vocabulary, text: &str, chats: bool) -> Result<Vec<u32>, String> {
    if chats {
        let content = text.to_string();
        let text = vocabulary.ask(&[Message { role: "user".into(), content }])?;
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
    chats: bool,
    known: usize,
) -> Result<Vec<Vec<u32>>, Error> {
    let refused = |what: String| Error::Argument(format!("{}{what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| refused(format!(": {error}")))?;
    let mut all = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let tokens = prompt_of_line(line, vocabulary, chats);
        let tokens =
            tokens.and_then(|tokens| match tokens.iter().find(|token| **token as usize >= known) {
                Some(token) => Err(format!("token {token} is outside the vocabulary of {known}")),
                None => Ok(tokens),
            });
        all.push(tokens.map_err(|what| refused(format!(", line {}: {what}", number + 1)))?);
    }
    if all.is_empty() {
        return Err(refused(": no prompt in it".into()));
    }
    Ok(all)
}

fn prompt_of_line(line: &str, vocabulary: &Vocabulary, chats: bool) -> Result<Vec<u32>, String> {
    let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
    match line {
        Line { prompt: Some(text), messages: None, input_ids: None } => {
            encode(vocabulary, &text, chats)
        }
        Line { messages: Some(messages), .. } if messages.is_empty() => {
            Err("messages is empty".into())
        }
        Line { prompt: None, messages: Some(messages), input_ids: None } => {
            let text = vocabulary.ask(&messages)?;
            Ok(vocabulary.encode(&text, None, false)?.tokens)
        }
        Line { prompt: None, messages: None, input_ids: Some(ids) } => Ok(ids),
        _ => Err("it needs one of prompt, messages and input_ids".into()),
    }
}

/// What was generated of a prompt.
struct Writing {
    /// With the prompt's.
    tokens: Vec<u32>,
    prompt: usize,
    /// Tokens before it are behind what can still change; before `read` they are shown.
    stable: usize,
    read: usize,
    ended: Option<inference::Ended>,
    /// True when the last token is no text, but ends it.
    is_cut: bool,
}

impl Writing {
    /// All of what was generated, as text.
    fn text(&self, vocabulary: &Vocabulary) -> String {
        let from = self.prompt.saturating_sub(CONTEXT);
        let to = self.tokens.len() - usize::from(self.is_cut);
        let decode = |to: usize| vocabulary.decode(&self.tokens[from..to], false);
        behind(&decode(self.prompt), &decode(to)).into()
    }
}

/// Tokens that what stands behind them is decoded with: a space may depend on them.
const CONTEXT: usize = 4;

/// What a text adds to one that it begins with, or nearly: bytes of a broken character are shown
/// otherwise when more of them come.
fn behind<'t>(before: &str, with: &'t str) -> &'t str {
    let alike = before.chars().zip(with.chars()).take_while(|(a, b)| a == b);
    let alike: usize = alike.map(|(a, _)| a.len_utf8()).sum();
    &with[alike..]
}

/// Shows tokens as text, as they come when there is one prompt, else when a sequence has ended.
struct Page<'v> {
    vocabulary: &'v Vocabulary,
    format: Format,
    all: Vec<Writing>,
}

impl<'v> Page<'v> {
    fn new(config: &Config, vocabulary: &'v Vocabulary, prompts: &[Vec<u32>]) -> Page<'v> {
        let writing = |tokens: &Vec<u32>| Writing {
            tokens: tokens.clone(),
            prompt: tokens.len(),
            stable: tokens.len().saturating_sub(CONTEXT),
            read: tokens.len(),
            ended: None,
            is_cut: false,
        };
        Page { vocabulary, format: config.log.format, all: prompts.iter().map(writing).collect() }
    }

    fn take(&mut self, prompt: usize, token: u32, ended: Option<inference::Ended>, is_end: bool) {
        let is_alone = self.all.len() == 1;
        let one = &mut self.all[prompt];
        one.tokens.push(token);
        one.ended = ended;
        one.is_cut = is_end;
        let decode = |tokens: &[u32]| self.vocabulary.decode(tokens, false);
        let (before, with) =
            (decode(&one.tokens[one.stable..one.read]), decode(&one.tokens[one.stable..]));
        // A character may be made of several tokens, but not of many.
        let waits = with.ends_with('\u{fffd}') && one.tokens.len() - one.read < 8;
        let is_shown = !is_end && (!waits || ended.is_some());
        let new = if is_shown { behind(&before, &with) } else { "" };
        if is_shown {
            (one.stable, one.read) = (one.read, one.tokens.len());
        }
        match self.format {
            Format::Json => {
                print(json!({ "event": "token", "prompt": prompt, "token": token, "text": new }));
            }
            Format::Pretty if is_alone => {
                let mut out = std::io::stdout().lock();
                let _ = write!(out, "{new}").and_then(|()| out.flush());
            }
            Format::Pretty => {}
        }
    }

    fn end(&self) {
        for (index, one) in self.all.iter().enumerate() {
            match self.format {
                Format::Json => print(json!({
                    "event": "generated",
                    "prompt": index,
                    "tokens": one.tokens[one.prompt..],
                    "text": one.text(self.vocabulary),
                    "ended": match one.ended {
                        Some(inference::Ended::EndOfText) => "end-of-text",
                        Some(inference::Ended::Length) => "length",
                        None => "interrupted",
                    },
                })),
                Format::Pretty if self.all.len() == 1 => print(""),
                Format::Pretty => print(format_args!("{index}: {}", one.text(self.vocabulary))),
            }
        }
    }
}
