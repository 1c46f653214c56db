//! The first rank cannot write checkpoints, or has too little room for them: all ranks end, and one
//! of them says why. Complete checkpoints stay.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Instant;

use crate::runs::{BOUND, LOOK, checkpoints, resumes, train};

/// A file system in memory, of a given size. It is unmounted at the end.
struct SmallDisk(PathBuf);

/// Calls a program of util-linux. The error is what it says.
fn call(program: &str, arguments: &[&str], at: &Path) -> Result<(), String> {
    let output = Command::new(program).args(arguments).arg(at).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_string()),
    }
}

impl SmallDisk {
    /// The error is why it cannot be mounted here.
    fn mount(at: PathBuf, size: &str) -> Result<SmallDisk, String> {
        fs::create_dir(&at).map_err(|error| error.to_string())?;
        let size = format!("size={size}");
        call("mount", &["-t", "tmpfs", "-o", &size, "l2l-test"], &at)?;
        Ok(SmallDisk(at))
    }

    fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        call("mount", &["-o", &options], &self.0).expect("it was mounted");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        _ = call("umount", &["--lazy"], &self.0);
    }
}

/// One rank says it once, and the exit status is not 0.
fn is_said_once(output: &Output, what: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    let said = text.lines().filter(|line| line.starts_with("error:")).count();
    assert_eq!((said, text.matches(what).count()), (1, 1), "{text}");
}

pub(crate) fn problems_are_said_once(folder: &Path, expected: &str) {
    let file = folder.join("a-file");
    fs::write(&file, "").expect("room on a disk");
    for directory in [file.clone(), file.join("below")] {
        let output = train(2, &directory, &[]).output().expect("it starts");
        is_said_once(&output, "cannot be written to");
    }
    println!("a checkpoint directory that cannot be made is refused once");

    // Room for two checkpoints, and not for those that a run has at once.
    let disk = match SmallDisk::mount(folder.join("disk"), "1200k") {
        Ok(disk) => disk,
        Err(why) => {
            println!("a full disk: left out, none can be mounted here: {why}");
            return;
        }
    };
    for ranks in [2, 3] {
        let directory = disk.0.join(format!("of-{ranks}"));
        let output = train(ranks, &directory, &[]).output().expect("it starts");
        is_said_once(&output, "checkpoints of ");
        assert!(checkpoints(&directory).is_empty(), "it is refused before it begins");
        disk.resize("16m");
        resumes(0, &directory, expected);
        fs::remove_dir_all(&directory).expect("it is ours");
        disk.resize("1200k");
    }
    println!("a disk without room is refused on all ranks, and one says so");

    // Another program fills the disk as soon as there is a checkpoint, and takes each byte that
    // becomes free. The emulated disk is slow, so that most checkpoints are still to come.
    disk.resize("16m");
    for ranks in [2, 3] {
        let directory = disk.0.join(format!("filled-{ranks}"));
        let mut train = train(ranks, &directory, &["eps.disk_rate=200KB/s"]);
        let mut run =
            train.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let begin = Instant::now();
        while checkpoints(&directory).is_empty() {
            assert!(begin.elapsed() < BOUND, "no checkpoint came");
            thread::sleep(LOOK);
        }
        let junk = disk.0.join("junk");
        let mut fills = File::create(&junk).expect("there is room for a name");
        while run.try_wait().expect("it is ours").is_none() {
            while fills.write(&[1; 4096]).is_ok() {}
            thread::sleep(LOOK);
        }
        let output = run.wait_with_output().expect("it ends");
        is_said_once(&output, "No space left");
        assert!(!checkpoints(&directory).is_empty(), "what was complete stays");
        drop(fills); // an open file keeps its space
        fs::remove_file(&junk).expect("it is ours");
        resumes(ranks, &directory, expected);
        fs::remove_dir_all(&directory).expect("it is ours");
    }
    println!("a disk that fills up ends all ranks, one says so, and the run is resumed");
}
