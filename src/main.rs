//! The command line.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run() {
        Ok(cli::Ended::Well) => ExitCode::SUCCESS,
        Ok(cli::Ended::Interrupted) => ExitCode::from(130),
        Ok(cli::Ended::DoesNotFit) => ExitCode::from(2),
        Err(error) => {
            cli::say(format_args!("error: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}
