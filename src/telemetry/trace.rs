//! The timeline as a file for Perfetto (ui.perfetto.dev) and Chrome: the Trace Event Format's array
//! of objects, one a line, written as operations end.
//!
//! A thread of its own writes. Operations wait for it in a queue of fixed length; an operation that
//! comes when the queue is full is left out and counted. The file of a run that was killed lacks
//! the last bracket, which its readers accept.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use l2l_actors::work::{Lane, WorkKind};
use serde_json::{Value, json};

use super::{Observe, Slice, SliceKind};

/// Slices that wait to be written, at most.
const QUEUE: usize = 1 << 14;

/// What the rest of a file may take to be written, at the end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Writes a timeline.
pub struct Trace {
    slices: Mutex<Option<SyncSender<Slice>>>,
    /// What became of the writer.
    writer: Mutex<Option<Receiver<io::Result<()>>>>,
    left_out: Arc<AtomicU64>,
}

impl Trace {
    /// Opens a file, whose old content stays until there is something to write. `run` names it in
    /// the viewer.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create(path: &Path, run: &str) -> io::Result<Arc<Trace>> {
        let mut open = File::options();
        let file = open.create(true).write(true).truncate(false).open(path)?;
        let (slices, received) = sync_channel(QUEUE);
        let left_out = Arc::new(AtomicU64::new(0));
        let missed = left_out.clone();
        let (done, writer) = channel();
        let (named, run) = (std::thread::Builder::new().name("l2l-trace".into()), run.to_string());
        named.spawn(move || _ = done.send(write(&file, &run, &received, &missed)))?;
        let (slices, writer) = (Mutex::new(Some(slices)), Mutex::new(Some(writer)));
        Ok(Arc::new(Trace { slices, writer, left_out }))
    }

    /// Ends the file; how many slices were left out.
    ///
    /// # Errors
    /// It could not be written.
    pub fn finish(&self) -> io::Result<u64> {
        self.slices.lock().expect("nothing panics inside").take();
        let writer = self.writer.lock().expect("nothing panics inside").take();
        if let Some(writer) = writer {
            let slow = || format!("the disk is too slow: given up after {PATIENCE:?}");
            let written = writer.recv_timeout(PATIENCE);
            written.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, slow()))??;
        }
        Ok(self.left_out.load(Relaxed))
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

const PROCESS: u64 = 1;

/// A row's thread: none is that of the process, which viewers take for its main one. The lanes of
/// the host and of the first device come first, then those of each other device.
fn thread(lane: Lane, device: Option<u8>) -> u64 {
    let row = lane as usize + Lane::ALL.len() * usize::from(device.unwrap_or_default());
    PROCESS + 1 + row as u64
}

/// The events that name a row.
fn row_names(lane: Lane, device: Option<u8>) -> [Value; 2] {
    let tid = thread(lane, device);
    let name = match device.filter(|&device| device > 0) {
        Some(device) => format!("{} of device {device}", lane.name()),
        None => lane.name().to_string(),
    };
    let (name, order) = (json!({ "name": name }), json!({ "sort_index": tid }));
    [("thread_name", name), ("thread_sort_index", order)].map(
        |(what, args)| json!({ "ph": "M", "pid": PROCESS, "tid": tid, "name": what, "args": args }),
    )
}

/// Opens the array, and names its rows.
fn head(to: &mut impl Write, run: &str) -> io::Result<()> {
    let name = json!({ "ph": "M", "pid": PROCESS, "name": "process_name",
                       "args": { "name": format!("l2l {run}") } });
    write!(to, "[\n{name}")?;
    for lane in Lane::ALL.into_iter().filter(|lane| lane.is_always_there()) {
        for event in row_names(lane, None) {
            write!(to, ",\n{event}")?;
        }
    }
    Ok(())
}

fn write(file: &File, run: &str, slices: &Receiver<Slice>, left_out: &AtomicU64) -> io::Result<()> {
    let mut flows = Flows::default();
    let Ok(mut next) = slices.recv() else { return Ok(()) };
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    let mut to = BufWriter::new(file);
    head(&mut to, run)?;
    let mut named = BTreeSet::new();
    loop {
        let other = next.device.filter(|&device| device > 0);
        let is_named = other.is_none() && next.lane.is_always_there();
        if !is_named && named.insert((next.lane, other)) {
            for event in row_names(next.lane, other) {
                write!(to, ",\n{event}")?;
            }
        }
        for event in flows.events(&next) {
            write!(to, ",\n{event}")?;
        }
        match slices.recv() {
            Ok(slice) => next = slice,
            Err(_) => break,
        }
    }
    let left_out = left_out.load(Relaxed);
    if left_out > 0 {
        let what = json!({ "ph": "M", "pid": PROCESS, "name": "process_labels",
                           "args": { "labels": format!("{left_out} slices left out") } });
        write!(to, ",\n{what}")?;
    }
    writeln!(to, "\n]")?;
    to.flush()
}

/// Arrows that have begun: of a block's upload to its first use, and of its gradient to its update.
#[derive(Default)]
struct Flows {
    uploads: HashMap<u32, u64>,
    gradients: HashMap<u32, u64>,
    next: u64,
}

impl Flows {
    /// The events of a slice: itself, and the arrows that begin or end there.
    fn events(&mut self, slice: &Slice) -> Vec<Value> {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let tid = thread(slice.lane, slice.device);
        let name = match (slice.layer, slice.micro_batch) {
            (Some(layer), Some(m)) => format!("{} {layer}.{m}", slice.kind.name()),
            (Some(layer), None) => format!("{} {layer}", slice.kind.name()),
            _ => slice.kind.name().to_string(),
        };
        let mut args = json!({ "step": slice.step, "bytes": slice.bytes });
        let mut add = |key: &str, value: Option<Value>| {
            value.into_iter().for_each(|value| args[key] = value);
        };
        add("layer", slice.layer.map(Value::from));
        add("phase", slice.phase.map(Value::from));
        add("micro_batch", slice.micro_batch.map(Value::from));
        add("block", slice.block.map(Value::from));
        add("version", slice.version.map(Value::from));
        let mut events = vec![json!({
            "ph": "X", "pid": PROCESS, "tid": tid, "name": name, "cat": slice.kind.name(),
            "ts": micros(slice.begin), "dur": micros(slice.took()), "args": args,
        })];
        let Some(block) = slice.block else { return events };
        let SliceKind::Work(kind) = slice.kind else { return events };
        let mut arrow = |ph: &str, id: u64, kind: &str| {
            let mut event = json!({ "ph": ph, "pid": PROCESS, "tid": tid, "id": id, "name": kind,
                                    "cat": kind, "ts": micros(slice.begin) });
            if ph == "f" {
                event["bp"] = json!("e"); // to the slice around it
            }
            events.push(event);
        };
        match kind {
            WorkKind::Weights => {
                self.next += 1;
                self.uploads.insert(block, self.next);
                arrow("s", self.next, "upload to first use");
            }
            WorkKind::Forward | WorkKind::Backward => {
                let begun = self.uploads.remove(&block);
                begun.into_iter().for_each(|id| arrow("f", id, "upload to first use"));
            }
            WorkKind::Gradient | WorkKind::Scatter => {
                self.next += 1;
                self.gradients.insert(block, self.next);
                arrow("s", self.next, "gradient to update");
            }
            WorkKind::Update => {
                let begun = self.gradients.remove(&block);
                begun.into_iter().for_each(|id| arrow("f", id, "gradient to update"));
            }
            _ => {}
        }
        events
    }
}
