//! Where the steps of a run are shown: as a bar in a terminal, as lines everywhere else.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::{Output, Stdio};
use std::thread::{self, JoinHandle};

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};

use crate::program::l2l;

/// A part of the bar that no line has.
const BAR: &str = "░";
const LINE: &str = "step 1/5  loss";

/// A terminal, and the text that programs write there. The text is complete when the last of them
/// has ended.
fn terminal() -> io::Result<(OwnedFd, JoinHandle<String>)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let controller = openpt(flags)?;
    unlockpt(&controller)?;
    let user = ioctl_tiocgptpeer(&controller, flags)?;
    let text = thread::spawn(move || {
        let mut bytes = Vec::new();
        // The system reports the end of a terminal as an error.
        _ = File::from(controller).read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    });
    Ok((user, text))
}

/// A run whose streams are a terminal, or not.
struct Streams {
    out_is_terminal: bool,
    err_is_terminal: bool,
    /// The environment variable TERM.
    term: &'static str,
}

impl Streams {
    /// Trains, and returns what the terminal shows, standard output and standard error.
    fn train(&self) -> [String; 3] {
        let (user, shown) = terminal().expect("Linux has pseudoterminals");
        let stream = |is_terminal| match is_terminal {
            true => Stdio::from(user.try_clone().expect("a descriptor is free")),
            false => Stdio::piped(),
        };
        let settings = [
            "model.layers=2",
            "model.hidden=32",
            "model.heads=4",
            "data.train=random",
            "data.sequence_length=16",
            "step.batch=4",
            "step.steps=5",
            "validation.every_steps=",
        ];
        let sets = settings.into_iter().flat_map(|setting| ["--set", setting]);
        let arguments: Vec<&str> = ["train"].into_iter().chain(sets).collect();
        let Output { status, stdout, stderr } = l2l(&arguments)
            .env("TERM", self.term)
            .stdout(stream(self.out_is_terminal))
            .stderr(stream(self.err_is_terminal))
            .output()
            .expect("the program runs");
        drop(user);
        let shown = shown.join().expect("nothing panics inside");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let all = [shown, text(stdout), text(stderr)];
        assert!(status.success(), "{all:?}");
        all
    }
}

/// As in `l2l train | tee log`, or with `> log`: before, the file had no line about steps.
#[test]
fn a_file_has_lines_beside_the_bar_of_the_terminal() {
    let streams = Streams { out_is_terminal: false, err_is_terminal: true, term: "xterm" };
    let [shown, out, _] = streams.train();
    assert!(out.contains(LINE) && out.contains("step 5/5  loss"), "{out}");
    assert!(!out.contains(BAR) && !out.contains('\r'), "{out:?}");
    assert!(shown.contains(BAR), "{shown:?}");
}

#[test]
fn a_terminal_has_the_bar_alone() {
    let streams = Streams { out_is_terminal: true, err_is_terminal: true, term: "xterm" };
    let [shown, _, _] = streams.train();
    assert!(shown.contains(BAR) && !shown.contains(LINE), "{shown:?}");
}

/// As with `2> log`.
#[test]
fn a_terminal_has_lines_where_standard_error_is_a_file() {
    let streams = Streams { out_is_terminal: true, err_is_terminal: false, term: "xterm" };
    let [shown, _, err] = streams.train();
    assert!(shown.contains(LINE) && !shown.contains(BAR), "{shown:?}");
    assert!(!err.contains(BAR), "{err:?}");
}

/// A terminal that cannot move its cursor, as in an editor: before, it showed no steps.
#[test]
fn a_terminal_without_a_cursor_has_lines() {
    let streams = Streams { out_is_terminal: true, err_is_terminal: true, term: "dumb" };
    let [shown, _, _] = streams.train();
    assert!(shown.contains(LINE) && !shown.contains(BAR), "{shown:?}");
}
