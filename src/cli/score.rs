//! `l2l score`: writes the scores that a reward model or a reranker gives to records, one JSON
//! object a line.

use std::fs;
use std::io::{IsTerminal, Read};

use l2l::data::{Batch, sequences_to_score};
use l2l::inference::Evaluator;
use l2l::{Error, StopRequest, shape_of};
use serde_json::{Value, json};

use super::common::load;
use super::output::{has_ended, print};
use super::runtime::Runtime;
use super::signals::Signals;
use super::{Exit, ScoreArguments};

pub(super) fn score(arguments: &ScoreArguments) -> Result<Exit, Error> {
    let (mut config, layers) = arguments.common.read_of_model(arguments.model.own_flags())?;
    let mut run = || {
        load(&mut config, &arguments.model)?;
        let shape = shape_of(&config)?;
        let records = records(arguments)?;
        let sequences = sequences_to_score(&config, &shape, &records)?;
        Runtime::new()?.block_on(async {
            let stop = StopRequest::new();
            let signals = Signals::stop(&stop, true);
            let mut evaluator = Evaluator::start(config.clone()).await?;
            let mut left = records.iter();
            for batch in sequences.chunks(config.step.batch) {
                if stop.is_requested() || has_ended() {
                    break;
                }
                let scores = evaluator.scores(Batch::of_scored(batch)).await?;
                for (score, record) in scores.iter().zip(&mut left) {
                    let record: Value = serde_json::from_str(record).expect("it was read");
                    print(json!({ "record": record, "score": score }));
                }
            }
            evaluator.stop().await?;
            Ok(signals.ended())
        })
    };
    run().map_err(|error| layers.locate(error))
}

/// The lines of `--records`, or else of stdin.
fn records(arguments: &ScoreArguments) -> Result<Vec<String>, Error> {
    let text = match &arguments.records {
        Some(path) => {
            let refused = |error| Error::Argument(format!("--records {}: {error}", path.display()));
            fs::read_to_string(path).map_err(refused)?
        }
        None if std::io::stdin().is_terminal() => {
            let what = "no records: give --records, or lines on stdin";
            return Err(Error::Argument(what.into()));
        }
        None => {
            let mut lines = String::new();
            let read = std::io::stdin().read_to_string(&mut lines);
            read.map_err(|error| Error::Argument(format!("stdin: {error}")))?;
            lines
        }
    };
    let lines: Vec<String> = text.lines().map(str::to_string).collect();
    match lines.is_empty() {
        true => Err(Error::Argument("there is no record".into())),
        false => Ok(lines),
    }
}
