//! Runs the program as a user does, and reads its output.

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub(crate) fn l2l<A: AsRef<OsStr>>(arguments: &[A]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_l2l"));
    command.args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn output<A: AsRef<OsStr>>(arguments: &[A]) -> Output {
    l2l(arguments).output().expect("the program runs")
}

/// The output of a run that succeeds.
#[track_caller]
pub(crate) fn good<A: AsRef<OsStr>>(arguments: &[A]) -> String {
    let output = output(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

pub(crate) fn events(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
}

pub(crate) fn of_kind<'e>(events: &'e [Value], kind: &str) -> Vec<&'e Value> {
    events.iter().filter(|event| event["event"] == kind).collect()
}
