//! `l2l embed`: writes the embeddings of texts, one JSON object a line.

use std::fs;
use std::io::{IsTerminal, Read};
use std::path::Path;

use l2l::config::Task;
use l2l::data::{Batch, sequences_of_texts};
use l2l::inference::Evaluator;
use l2l::{Error, StopRequest, shape_of};
use serde::Deserialize;
use serde_json::json;

use super::common::load;
use super::output::{has_ended, print};
use super::runtime::Runtime;
use super::signals::Signals;
use super::{EmbedArguments, Exit};

pub(super) fn embed(arguments: &EmbedArguments) -> Result<Exit, Error> {
    let (mut config, layers) = arguments.common.read_of_model(arguments.model.own_flags())?;
    let mut run = || {
        let from = load(&mut config, &arguments.model)?;
        config.model.task.get_or_insert(Task::SentenceEmbedding);
        if arguments.prompt_name.is_some() {
            config.model.default_prompt.clone_from(&arguments.prompt_name);
        }
        let shape = shape_of(&config)?;
        if !shape.embeds() {
            let what = format!(
                "{}: its task is {:?}: set model.task = \"sentence-embedding\"",
                from.display(),
                config.model.task.map_or("", Task::name)
            );
            return Err(Error::Argument(what));
        }
        let texts = texts(arguments)?;
        let sequences = sequences_of_texts(&config, &shape, &texts)?;
        Runtime::new()?.block_on(async {
            let stop = StopRequest::new();
            let signals = Signals::stop(&stop, true);
            let mut evaluator = Evaluator::start(config.clone()).await?;
            let mut index = 0;
            for batch in sequences.chunks(config.step.batch) {
                if stop.is_requested() || has_ended() {
                    break;
                }
                let embeddings = evaluator.embed(Batch::of_texts(batch)).await?;
                for embedding in embeddings.chunks(embeddings.len() / batch.len()) {
                    let text = texts.get(index);
                    print(json!({ "text": text, "embedding": embedding }));
                    index += 1;
                }
            }
            evaluator.stop().await?;
            Ok(signals.ended())
        })
    };
    run().map_err(|error| layers.locate(error))
}

#[derive(Deserialize)]
struct Line {
    text: String,
}

/// The texts of `--text` and `--texts`, or else the lines of stdin.
fn texts(arguments: &EmbedArguments) -> Result<Vec<String>, Error> {
    let mut all = arguments.text.clone();
    if let Some(path) = &arguments.texts {
        all.extend(texts_of_file(path)?);
    }
    if all.is_empty() {
        if std::io::stdin().is_terminal() {
            let what = "no text: give --text, --texts, or lines on stdin";
            return Err(Error::Argument(what.into()));
        }
        let mut lines = String::new();
        let read = std::io::stdin().read_to_string(&mut lines);
        read.map_err(|error| Error::Argument(format!("stdin: {error}")))?;
        all.extend(lines.lines().map(str::to_string));
    }
    match all.is_empty() {
        true => Err(Error::Argument("there is no text".into())),
        false => Ok(all),
    }
}

/// The lines of a file; of a `.jsonl` file, the texts of its objects.
fn texts_of_file(path: &Path) -> Result<Vec<String>, Error> {
    let at = path.display();
    let refused = |what: String| Error::Argument(format!("--texts {at}: {what}"));
    let all = fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    if path.extension().is_none_or(|extension| extension != "jsonl") {
        return Ok(all.lines().map(str::to_string).collect());
    }
    let read = |(number, line): (usize, &str)| {
        let line: Result<Line, _> = serde_json::from_str(line);
        line.map(|line| line.text).map_err(|error| refused(format!("line {}: {error}", number + 1)))
    };
    all.lines().enumerate().map(read).collect()
}
