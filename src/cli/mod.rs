//! The command line: it parses arguments and config layers, calls the library, and shows the
//! result. Each command has a file of its own.

mod arguments;
mod bench;
mod chat;
mod common;
mod dashboards;
mod data;
mod doctor;
mod embed;
mod eval;
mod export;
mod fabric;
mod generate;
mod layers;
mod longest;
mod machines;
mod man;
mod observe;
mod other_names;
mod outlook;
mod output;
mod pieces;
mod plan;
mod progress;
mod rates;
mod reference;
mod runtime;
mod score;
mod signals;
mod stubs;
mod train;
mod tune;

use std::io::Write;

use clap::{CommandFactory, Parser};
use l2l::Error;

use arguments::*;
use output::print;

/// The end of a command that had no error.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Well,
    /// A signal with this number asked for the end.
    Signalled(u8),
    /// `plan --check` found that the plan does not fit.
    DoesNotFit,
}

/// Runs the command that the arguments name.
pub(crate) fn run() -> Result<Exit, Error> {
    stubs::leave_out();
    signals::prepare()?;
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() => error.exit(),
        Err(help) => {
            print(help.to_string().trim_end());
            return Ok(Exit::Well);
        }
    };
    match arguments.command {
        Command::Train(arguments) => return train::train(arguments),
        Command::Data(arguments) => data::data(&arguments)?,
        Command::Eval(arguments) => return eval::eval(&arguments),
        Command::Embed(arguments) => return embed::embed(&arguments),
        Command::Score(arguments) => return score::score(&arguments),
        Command::Generate(arguments) => return generate::generate(&arguments),
        Command::Chat(arguments) => return chat::chat(&arguments),
        Command::Plan(arguments) if !arguments.machine.is_empty() => {
            return machines::compare(&arguments);
        }
        Command::Plan(arguments) => return plan::plan(&arguments),
        Command::Tune(arguments) => {
            fabric::refuse_ranks("tune")?;
            tune::tune(&arguments)?;
        }
        Command::Dashboards { to, runbooks } => dashboards::write(&to, runbooks.as_deref())?,
        Command::Bench(arguments) => return bench::bench(&arguments),
        Command::Export(arguments) => export::export(&arguments)?,
        Command::Doctor(arguments) if arguments.check => doctor::check(&arguments)?,
        Command::Doctor(DoctorArguments { common, mpi: true, .. }) => fabric::check(&common)?,
        Command::Doctor(DoctorArguments { common, .. }) => doctor::doctor(&common)?,
        Command::Config(ConfigArguments { what }) => match what {
            What::Show(common) => {
                let (config, _) = common.read()?;
                let text = serde_json::to_string_pretty(&config);
                print(text.expect("a config is plain data"));
            }
            What::Schema => print(reference::schema()),
            What::Reference => print(reference::page().trim_end()),
        },
        Command::Man { to } => man::write(&to)?,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "l2l", &mut script);
            print(String::from_utf8_lossy(&script).trim_end());
        }
    }
    Ok(Exit::Well)
}

/// Reports an error, and returns the exit status of the program.
pub(crate) fn status(outcome: Result<Exit, Error>) -> u8 {
    match outcome {
        Ok(Exit::Well) => output::status(),
        Ok(Exit::Signalled(number)) => 128 + number,
        Ok(Exit::DoesNotFit) => 2,
        Err(error) => {
            say(format_args!("error: {error}"));
            error.exit_code()
        }
    }
}

/// Prints a line to standard error. It does not matter if standard error is closed.
fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
