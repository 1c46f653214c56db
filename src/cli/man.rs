//! `l2l man`: writes a manual page for each command, from what `--help` shows.

use std::path::Path;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use l2l::Error;

use super::Arguments;
use super::output::{refused, write_file};

/// Writes `l2l.1`, `l2l-train.1` and so on.
pub(super) fn write(folder: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(folder).map_err(|error| refused("--to", folder, error))?;
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    pages(command, folder)
}

fn pages(command: Command, folder: &Path) -> Result<(), Error> {
    for inner in command.get_subcommands() {
        pages(inner.clone(), folder)?;
    }
    let page = Man::new(command);
    let mut text = Vec::new();
    page.render(&mut text).expect("memory takes it");
    let text = String::from_utf8(text).expect("help is UTF-8");
    write_file("--to", &folder.join(page.get_filename()), &text)
}
