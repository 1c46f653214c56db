//! The timeline as a file for Perfetto (ui.perfetto.dev) and Chrome: the Trace Event Format's array
//! of objects, one a line, written as operations end.
//!
//! A thread of its own writes. Slices wait for it in a queue of fixed length; one that comes when
//! the queue is full is left out and counted. The file of a run that was killed lacks the last
//! bracket, which its readers accept.
//!
//! In a run of several ranks each writes its own events. When the run ends well, the first rank
//! collects the others' in its file. If a rank is lost, the file has the first rank's events.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use serde_json::Value;

use super::perfetto::{Events, Place};
use super::{Observe, Slice};
use crate::fabric::{ClockOffset, Exchanges, Lost, Rank};
use crate::folder;
use crate::limits::{named, no_thread};

/// The most slices that wait to be written.
const QUEUE: usize = 1 << 14;

/// The time that the end of a run waits for the rest of the file.
const PATIENCE: Duration = Duration::from_secs(10);

/// The most bytes of another rank's events that are sent at once.
const PIECE: u64 = 4 << 20;

/// Stands between two events.
const SEPARATOR: &str = ",\n";

/// Writes a timeline.
pub struct Trace {
    slices: Mutex<Option<SyncSender<Slice>>>,
    output: Mutex<Output>,
    place: Arc<OnceLock<Place>>,
    left_out: Arc<AtomicU64>,
}

/// The file of a timeline, once its writer has ended.
struct Output {
    /// Receives the file from the writer's thread, or `None` if nothing was written to it. It is
    /// `None` itself once the writer has ended.
    writer: Option<Receiver<io::Result<Option<File>>>>,
    /// The file without its last bracket.
    file: Option<File>,
    /// The first thing that went wrong.
    problem: Option<io::Error>,
}

impl Trace {
    /// Opens the file of a run's timeline; with several ranks, of the first rank's. Its old content
    /// stays until there is something to write. A device or a pipe gets the first bracket at once.
    /// `run` names the timeline in the viewer.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path, run: &str) -> io::Result<Arc<Trace>> {
        let mut open = File::options();
        let mut file = open.create(true).write(true).truncate(false).open(path)?;
        let run = run.to_string();
        let opens = "[\n";
        let is_file = file.metadata()?.is_file();
        if !is_file {
            file.write_all(opens.as_bytes())?;
        }
        Trace::start(file, if is_file { opens } else { "" }, move |place| match place {
            None => format!("l2l {run}"),
            Some((rank, _)) => format!("l2l {run}, rank {rank}"),
        })
    }

    /// Opens the timeline of a rank that is not the first: a file without a name in the system's
    /// folder of temporary files. The first rank collects its events
    /// ([`Builder::trace`](crate::trainer::Builder::trace)).
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn unnamed() -> io::Result<Arc<Trace>> {
        let name = |place: Option<Place>| format!("rank {}", place.unwrap_or_default().0);
        let file = tempfile::tempfile().map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", folder::temporary()))
        });
        Trace::start(file?, SEPARATOR, name)
    }

    /// Starts the writer. `opens` comes before the first event.
    fn start(
        file: File,
        opens: &'static str,
        name: impl FnOnce(Option<Place>) -> String + Send + 'static,
    ) -> io::Result<Arc<Trace>> {
        let (slices, received) = sync_channel(QUEUE);
        let left_out = Arc::new(AtomicU64::new(0));
        let missed = left_out.clone();
        let place = Arc::new(OnceLock::new());
        let told = place.clone();
        let (done, writer) = channel();
        let thread = std::thread::Builder::new().name("l2l-trace".into());
        let started = thread.spawn(move || {
            let written = received.recv().ok().map(|first| {
                let place = told.get().copied(); // set before the first step
                let mut events = Events::new(place);
                let head = events.head(&name(place));
                write(file, opens, head, &mut events, first, &received, &missed)
            });
            _ = done.send(written.transpose());
        });
        started.map_err(|error| io::Error::other(no_thread(error)))?;
        let output = Mutex::new(Output { writer: Some(writer), file: None, problem: None });
        Ok(Arc::new(Trace { slices: Mutex::new(Some(slices)), output, place, left_out }))
    }

    /// Sets the rank of this timeline. It is called before the first step of a run of several
    /// ranks.
    pub(crate) fn is_of(&self, rank: Rank, clock: ClockOffset) {
        _ = self.place.set((rank, clock));
    }

    /// Lets the writer end, and takes the file from it.
    fn settle(&self) -> MutexGuard<'_, Output> {
        self.slices.lock().expect("nothing panics inside").take();
        let mut output = self.output.lock().expect("nothing panics inside");
        let Some(writer) = output.writer.take() else { return output };
        match writer.recv_timeout(PATIENCE) {
            Ok(Ok(file)) => output.file = file,
            Ok(Err(error)) => output.problem = Some(error),
            Err(_) => {
                let slow = format!("the disk is too slow: given up after {PATIENCE:?}");
                output.problem = Some(io::Error::new(io::ErrorKind::TimedOut, slow));
            }
        }
        output
    }

    /// Ends the file, and returns the number of slices that were left out, the sum over the ranks
    /// in it.
    ///
    /// # Errors
    /// The file could not be written, or lacks the operations of another rank.
    pub fn finish(&self) -> io::Result<u64> {
        let mut output = self.settle();
        if output.file.is_some() {
            output.append(b"\n]\n");
        }
        output.file = None;
        output.problem.take().map_or_else(|| Ok(self.left_out.load(Relaxed)), Err)
    }

    /// Collects the events of all ranks in the first rank's file. Collective: every rank calls it
    /// once, also one without a timeline. [`finish`](Trace::finish) of the first rank returns what
    /// went wrong.
    pub(crate) fn collect(trace: Option<&Trace>, exchanges: &Exchanges) {
        let mut output = trace.map(Trace::settle);
        let left_out = trace.map_or(0, |trace| trace.left_out.load(Relaxed));
        let collected = collect(output.as_deref_mut(), left_out, exchanges);
        let (Some(trace), Some(output)) = (trace, &mut output) else { return };
        match collected {
            Ok(others) => _ = trace.left_out.fetch_add(others, Relaxed),
            Err(lost) => output.fails(format!("operations of other ranks are missing: {lost}")),
        }
    }
}

impl Observe for Trace {
    fn heard(&self, slice: &Slice) {
        let slices = self.slices.lock().expect("nothing panics inside");
        if let Some(slices) = &*slices
            && let Err(TrySendError::Full(_)) = slices.try_send(*slice)
        {
            self.left_out.fetch_add(1, Relaxed);
        }
    }
}

/// Writes events until the queue of slices closes, without the last bracket.
fn write(
    file: File,
    opens: &str,
    head: Vec<Value>,
    events: &mut Events,
    first: Slice,
    slices: &Receiver<Slice>,
    left_out: &AtomicU64,
) -> io::Result<File> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    let mut to = BufWriter::new(file);
    let mut before = opens;
    let mut put = |all: Vec<Value>| {
        let mut all = all.into_iter();
        all.try_for_each(|event| write!(to, "{}{event}", std::mem::replace(&mut before, SEPARATOR)))
    };
    put(head)?;
    put(events.of(&first))?;
    for slice in slices {
        put(events.of(&slice))?;
    }
    let left_out = left_out.load(Relaxed);
    if left_out > 0 {
        put(vec![events.label(&format!("{left_out} slices left out"))])?;
    }
    Ok(to.into_inner()?)
}

impl Output {
    fn fails(&mut self, problem: String) {
        self.problem.get_or_insert_with(|| io::Error::other(problem));
    }

    fn append(&mut self, bytes: &[u8]) {
        let Some(file) = &mut self.file else { return };
        if let Err(error) = file.write_all(bytes) {
            self.problem.get_or_insert(error);
            self.file = None;
        }
    }

    /// The report of a rank about its timeline: the bytes of its events, the number of slices that
    /// were left out, and the problem, if there is one.
    fn said(&mut self, left_out: u64) -> Vec<u8> {
        let bytes = self.file.as_mut().map_or(Ok(0), |file| {
            let bytes = file.stream_position()?;
            file.rewind().map(|()| bytes)
        });
        let bytes = bytes.unwrap_or_else(|error| {
            self.problem.get_or_insert(error);
            0
        });
        let problem = self.problem.as_ref();
        let problem = problem.map(|error| format!("{}: {}", folder::temporary(), named(error)));
        let problem = problem.unwrap_or_default();
        [&bytes.to_le_bytes(), &left_out.to_le_bytes(), problem.as_bytes()].concat()
    }
}

/// Does the work of [`Trace::collect`]. Returns the number of slices that other ranks left out.
fn collect(
    mut output: Option<&mut Output>,
    left_out: u64,
    exchanges: &Exchanges,
) -> Result<u64, Lost> {
    let own = exchanges.rank();
    let said = match &mut output {
        Some(_) if own == 0 => vec![0; 16],
        Some(output) => output.said(left_out),
        None => Vec::new(),
    };
    let all = exchanges.meet(&said)?;
    if all[0].is_empty() {
        return Ok(0);
    }
    let word = |said: &[u8]| u64::from_le_bytes(said.try_into().expect("eight bytes"));
    let mut others = 0;
    let mut piece = Vec::new();
    for (rank, said) in (0..).zip(&all).skip(1).filter(|(_, said)| !said.is_empty()) {
        others += word(&said[8..16]);
        if let (0, Some(output), [_, ..]) = (own, &mut output, &said[16..]) {
            output.fails(format!("rank {rank}: {}", String::from_utf8_lossy(&said[16..])));
        }
        let mut left = word(&said[..8]);
        let mut lines = Vec::new();
        while left > 0 {
            piece.resize(left.min(PIECE) as usize, 0);
            if let (true, Some(Output { file: Some(file), .. })) = (own == rank, &mut output)
                && file.read_exact(&mut piece).is_err()
            {
                piece.fill(0);
            }
            exchanges.to_first(rank, &mut piece)?;
            left -= piece.len() as u64;
            if let (0, Some(output)) = (own, &mut output) {
                lines.extend_from_slice(&piece);
                let whole = whole_events(&lines, left == 0);
                output.append(&lines[..whole]);
                lines.drain(..whole);
            }
        }
    }
    Ok(if own == 0 { others } else { 0 })
}

/// The number of bytes of whole events. Each event begins with the [`SEPARATOR`].
fn whole_events(lines: &[u8], is_last: bool) -> usize {
    if is_last && lines.ends_with(b"}") {
        return lines.len();
    }
    let mut separators = lines.windows(SEPARATOR.len());
    separators.rposition(|two| two == SEPARATOR.as_bytes()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::threads;

    /// A rank is lost while it sends its events: the file has those that arrived, each of them
    /// whole.
    #[test]
    fn a_rank_that_is_lost_while_it_sends_leaves_a_whole_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trace.json");
        let patience = Duration::from_secs(1);
        let fabrics = threads(2).into_iter();
        let mut all = fabrics.map(|fabric| Exchanges::new(Arc::new(fabric), patience));
        let first = all.next().expect("the first");
        let other = all.next().expect("another");
        let trace = Trace::create(&path, "tested").expect("a folder of ours");
        trace.heard(&slice());
        std::thread::scope(|scope| {
            scope.spawn(|| Trace::collect(Some(&trace), &first));
            let event = br#",
{"ph":"X","pid":2,"tid":3,"name":"own","ts":1,"dur":1,"args":{"bytes":1}}"#;
            let mut piece: Vec<u8> = event.iter().copied().cycle().take(PIECE as usize).collect();
            let said = [&(2 * PIECE).to_le_bytes()[..], &7_u64.to_le_bytes()].concat();
            other.meet(&said).expect("both are there");
            other.to_first(1, &mut piece).expect("both are there");
            drop(other);
        });
        let says = trace.finish().expect_err("a piece is missing").to_string();
        assert!(says.starts_with("operations of other ranks are missing"), "{says}");
        let text = std::fs::read_to_string(&path).expect("it is there");
        let events: Vec<Value> = serde_json::from_str(&text).expect("an array of objects");
        let others = events.iter().filter(|event| event["pid"] == 2).count();
        assert!(others > 10_000, "{others}");
    }

    fn slice() -> Slice {
        Slice {
            number: None,
            lane: l2l_actors::work::Lane::File,
            device: None,
            kind: super::super::SliceKind::Checkpoint,
            step: 0,
            layer: None,
            phase: None,
            micro_batch: None,
            block: None,
            version: None,
            bytes: 0,
            begin: Duration::ZERO,
            end: Duration::from_nanos(1),
            released_by: None,
        }
    }
}
