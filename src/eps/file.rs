//! The EPS on file: each block twice, what it is and what it was, so that a kill never costs the last
//! complete state. A block's parts (masters, each of the optimizer's states) begin at pages, and are
//! read and written in chunks with a digest; what is kept in memory is where they are.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use l2l_actors::schedule::{BlockId, Version};
use serde_json::Value;

use super::Which;
use super::direct::{Direct, PAGE_FLOATS};
use super::index::{Entry, Index};
use crate::models::{Model, block_len};
use crate::tensor::Arena;
use crate::tensor::View;

/// A state that a folder holds.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Training steps done.
    pub(crate) step: u64,
    /// What the run remembered.
    pub(crate) run: Value,
}

/// Where blocks lie in the file.
struct Places {
    /// Of each block: its first byte, and floats of a part.
    blocks: Vec<(u64, usize)>,
    /// Of each block's gradient region, if it has one: its first byte.
    regions: Vec<Option<u64>>,
    parts: usize,
    bytes: u64,
}

/// Of a model that is trained: what it is, and what it was.
const COPIES: usize = 2;

/// What changes.
struct Now {
    versions: Vec<Version>,
    /// Of gradient regions, since they were written.
    regions: Vec<u128>,
    index: Index,
}

/// Called with each chunk that is read or written, for whoever wants to know that it goes on.
type Beat<'b> = &'b dyn Fn();

/// For whoever does not.
const ALONE: Beat<'static> = &|| ();

/// See the [module](self).
pub(crate) struct FileTier {
    file: Direct,
    /// Where the index goes; nowhere, of a model that is not trained.
    folder: Option<PathBuf>,
    places: Places,
    now: Mutex<Now>,
    /// One part of a block, between steps.
    buffer: Mutex<Arena>,
    /// Held as long as this is.
    _lock: Option<File>,
}

/// Floats of a part of a block on file.
pub(crate) fn part_floats(floats: usize) -> usize {
    floats.next_multiple_of(PAGE_FLOATS)
}

impl Places {
    fn new(
        model: &Model,
        copies: usize,
        states: usize,
        region: impl Fn(BlockId) -> bool,
    ) -> Places {
        let mut bytes = 0;
        let mut place = |floats: usize| {
            let at = bytes;
            bytes += (floats * size_of::<f32>()) as u64;
            at
        };
        let parts = 1 + states;
        let floats = model.blocks.iter().map(|tensors| part_floats(block_len(tensors)));
        let floats: Vec<usize> = floats.collect();
        let blocks = floats.iter().map(|&part| (place(copies * parts * part), part)).collect();
        let regions = floats.iter().enumerate();
        let regions =
            regions.map(|(id, &part)| region(BlockId(id as u32)).then(|| place(part))).collect();
        Places { blocks, regions, parts, bytes }
    }

    /// First byte, and floats, of a part of a copy of a block.
    fn of(&self, id: BlockId, copy: u8, part: usize) -> (u64, usize) {
        let (at, floats) = self.blocks[id.0 as usize];
        let nth = usize::from(copy) * self.parts + part;
        (at + (nth * floats * size_of::<f32>()) as u64, floats)
    }

    fn layout(&self) -> String {
        let floats: Vec<String> = self.blocks.iter().map(|(_, part)| part.to_string()).collect();
        format!("{} parts of {}", self.parts, floats.join(" "))
    }

    fn largest(&self) -> usize {
        self.blocks.iter().map(|&(_, floats)| floats).max().unwrap_or(0)
    }
}

/// A folder that one run at a time may have.
pub(crate) struct Folder {
    path: PathBuf,
    lock: File,
}

impl Folder {
    /// Makes the folder where there is none, and takes it.
    ///
    /// # Errors
    /// It cannot be made, or another run has it.
    pub(crate) fn take(path: &Path) -> io::Result<Folder> {
        fs::create_dir_all(path)?;
        let lock = File::create(path.join("lock"))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another run has it"),
            TryLockError::Error(error) => error,
        })?;
        Ok(Folder { path: path.into(), lock })
    }

    /// The state it holds, if it holds one.
    ///
    /// # Errors
    /// It is not whole.
    pub(crate) fn found(&self) -> io::Result<Option<Found>> {
        found(&self.path)
    }
}

/// The state that a folder holds, if it holds one.
///
/// # Errors
/// It is not whole.
pub(crate) fn found(folder: &Path) -> io::Result<Option<Found>> {
    let index = Index::read(folder)?;
    Ok(index.map(|Index { step, run, .. }| Found { step, run }))
}

fn changed(what: &str, floats: usize, at: u64) -> io::Error {
    let bytes = floats * size_of::<f32>();
    let what = format!(
        "{what}, {bytes} bytes at byte {at}, is not what was written: the disk, or somebody, changed it"
    );
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl FileTier {
    /// A file for a run in a folder: as the run before left it, or new, when what was there is gone.
    ///
    /// # Errors
    /// The disk is full, or what is there is no state of this model's.
    pub(crate) fn open(
        folder: Folder,
        model: &Model,
        states: usize,
        region: impl Fn(BlockId) -> bool,
        goes_on: bool,
    ) -> io::Result<FileTier> {
        let Folder { path, lock } = folder;
        let places = Places::new(model, COPIES, states, region);
        let layout = places.layout();
        let fits =
            |index: &Index| index.layout == layout && index.blocks.len() == places.blocks.len();
        let index = match Index::read(&path) {
            Ok(Some(index)) if goes_on && fits(&index) => index,
            Ok(Some(_)) if goes_on => {
                let what = "it is of a model of another shape, or of another update rule";
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            Err(error) if goes_on => return Err(error),
            // What takes its place goes beside it, and it stays until that is sealed.
            Ok(Some(before)) if fits(&before) => {
                let mut index = FileTier::blank(&places);
                index.sequence = before.sequence;
                for (entry, before) in index.blocks.iter_mut().zip(&before.blocks) {
                    entry.copy = 1 - before.copy;
                }
                index
            }
            _ => {
                Index::remove(&path)?;
                FileTier::blank(&places)
            }
        };
        let at = path.join("blocks");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(at)?;
        FileTier::new(file, Some(path), places, index, Some(lock))
    }

    /// An unnamed file in a folder, for what is not kept: a trial, or a model that is not trained, of
    /// which one copy is enough.
    ///
    /// # Errors
    /// The disk is full.
    pub(crate) fn unnamed(
        folder: &Path,
        model: &Model,
        trains: bool,
        states: usize,
        region: impl Fn(BlockId) -> bool,
    ) -> io::Result<FileTier> {
        fs::create_dir_all(folder)?;
        let places = Places::new(model, if trains { COPIES } else { 1 }, states, region);
        let index = FileTier::blank(&places);
        FileTier::new(tempfile::tempfile_in(folder)?, None, places, index, None)
    }

    fn blank(places: &Places) -> Index {
        let entry = Entry { copy: 0, updates: 0, digests: vec![None; places.parts] };
        let blocks = vec![entry; places.blocks.len()];
        Index { layout: places.layout(), blocks, ..Index::default() }
    }

    fn new(
        file: File,
        folder: Option<PathBuf>,
        places: Places,
        index: Index,
        lock: Option<File>,
    ) -> io::Result<FileTier> {
        let file = Direct::new(file);
        file.reserve(places.bytes)?;
        let buffer = Mutex::new(Arena::new(places.largest())?);
        let blocks = places.blocks.len();
        let now = Mutex::new(Now { versions: vec![0; blocks], regions: vec![0; blocks], index });
        Ok(FileTier { file, folder, places, now, buffer, _lock: lock })
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().expect("nothing panics inside")
    }

    /// The block's entry, as of a version.
    fn entry(&self, id: BlockId, version: Version) -> Entry {
        let now = self.now();
        let held = now.versions[id.0 as usize];
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        now.index.blocks[id.0 as usize].clone()
    }

    /// Whether it goes past the system's cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    pub(super) fn updates(&self) -> Vec<u64> {
        self.now().index.blocks.iter().map(|entry| entry.updates).collect()
    }

    pub(super) fn set_updates(&self, updates: &[u64]) {
        for (entry, updates) in self.now().index.blocks.iter_mut().zip(updates) {
            entry.updates = *updates;
        }
    }

    /// Updates that a block has had.
    pub(crate) fn updates_of(&self, id: BlockId) -> u64 {
        self.now().index.blocks[id.0 as usize].updates
    }

    pub(super) fn carry(&self, id: BlockId, version: Version) {
        let held = &mut self.now().versions[id.0 as usize];
        assert!(*held == version, "{id} v{version} asked, the EPS holds v{held}");
        *held = version + 1;
    }

    /// What a run remembers beside its blocks, from the next seal on.
    pub(crate) fn remember(&self, run: Value) {
        self.now().index.run = run;
    }

    /// Reads one part of a block, as its entry says.
    fn part(
        &self,
        id: BlockId,
        entry: &Entry,
        part: usize,
        to: &mut [f32],
        beat: Beat<'_>,
    ) -> io::Result<()> {
        let Some(expected) = &entry.digests[part] else {
            to.fill(0.0);
            return Ok(());
        };
        let (at, floats) = self.places.of(id, entry.copy, part);
        let found = self.file.read(at, &mut to[..floats], beat).map_err(|e| self.located(id, e))?;
        if format!("{found:032x}") == *expected {
            return Ok(());
        }
        Err(self.located(id, changed(&format!("part {part}"), floats, at)))
    }

    fn located(&self, id: BlockId, error: io::Error) -> io::Error {
        let folder = self.folder.as_deref().map_or("an unnamed file".into(), Path::to_string_lossy);
        io::Error::new(error.kind(), format!("eps.path {folder}: {id}: {error}"))
    }

    /// Reads the published block of a version.
    ///
    /// # Errors
    /// The disk's, or it is not what was written.
    pub(crate) fn read_parameters(
        &self,
        id: BlockId,
        version: Version,
        to: &mut [f32],
        beat: Beat<'_>,
    ) -> io::Result<()> {
        self.part(id, &self.entry(id, version), Which::Parameter.part(), to, beat)
    }

    /// Reads all parts of a block, one behind the other, each as long as a share of `to`; and its
    /// gradient region behind them where `region`.
    ///
    /// # Errors
    /// As [`read_parameters`](FileTier::read_parameters).
    pub(crate) fn read_state(
        &self,
        id: BlockId,
        version: Version,
        to: &mut [f32],
        share: usize,
        region: bool,
        beat: Beat<'_>,
    ) -> io::Result<()> {
        let entry = self.entry(id, version);
        let mut shares = to.chunks_mut(share);
        for (part, to) in (0..self.places.parts).zip(&mut shares) {
            self.part(id, &entry, part, to, beat)?;
        }
        match shares.next().filter(|_| region) {
            Some(to) => self.read_region(id, to, beat),
            None => Ok(()),
        }
    }

    /// Writes all parts of a block that was moved on from a version, beside what it was.
    ///
    /// # Errors
    /// The disk's.
    pub(crate) fn write_state(
        &self,
        id: BlockId,
        version: Version,
        from: &[f32],
        share: usize,
        beat: Beat<'_>,
    ) -> io::Result<()> {
        let Entry { copy, updates, .. } = self.entry(id, version);
        let copy = 1 - copy;
        let mut digests = Vec::with_capacity(self.places.parts);
        for (part, from) in (0..self.places.parts).zip(from.chunks(share)) {
            let (at, floats) = self.places.of(id, copy, part);
            let written = self.file.write(at, &from[..floats], beat);
            let digest = written.map_err(|e| self.located(id, e))?;
            digests.push(Some(format!("{digest:032x}")));
        }
        let mut now = self.now();
        now.versions[id.0 as usize] = version + 1;
        now.index.blocks[id.0 as usize] = Entry { copy, updates: updates + 1, digests };
        Ok(())
    }

    /// Reads a block's gradient region.
    ///
    /// # Errors
    /// As [`read_parameters`](FileTier::read_parameters).
    pub(crate) fn read_region(
        &self,
        id: BlockId,
        to: &mut [f32],
        beat: Beat<'_>,
    ) -> io::Result<()> {
        let (at, floats) = self.region(id);
        let found = self.file.read(at, &mut to[..floats], beat);
        let found = found.map_err(|error| self.located(id, error))?;
        match self.now().regions[id.0 as usize] == found {
            true => Ok(()),
            false => Err(self.located(id, changed("its gradient", floats, at))),
        }
    }

    /// Replaces a block's gradient region.
    ///
    /// # Errors
    /// The disk's.
    pub(crate) fn write_region(&self, id: BlockId, from: &[f32], beat: Beat<'_>) -> io::Result<()> {
        let (at, floats) = self.region(id);
        let written = self.file.write(at, &from[..floats], beat);
        let digest = written.map_err(|error| self.located(id, error))?;
        self.now().regions[id.0 as usize] = digest;
        Ok(())
    }

    fn region(&self, id: BlockId) -> (u64, usize) {
        let (_, floats) = self.places.blocks[id.0 as usize];
        let at = self.places.regions[id.0 as usize];
        (at.unwrap_or_else(|| panic!("{id} has no region")), floats)
    }

    /// Makes what was written until now the state to go on from, after so many training steps.
    ///
    /// # Errors
    /// The disk's; then the state before is the one to go on from.
    pub(crate) fn seal(&self, step: u64) -> io::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        self.file.sync()?;
        let index = {
            let mut now = self.now();
            (now.index.step, now.index.sequence) = (step, now.index.sequence + 1);
            now.index.clone()
        };
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("eps.path {}: {error}", folder.display()))
        };
        index.write(folder).map_err(failed)
    }

    pub(super) fn read_with<R>(
        &self,
        id: BlockId,
        which: Which,
        read: impl FnOnce(&[f32]) -> R,
    ) -> io::Result<R> {
        let mut buffer = self.buffer.lock().expect("nobody panicked inside");
        let entry = self.now().index.blocks[id.0 as usize].clone();
        let (_, floats) = self.places.blocks[id.0 as usize];
        let to = buffer.values_mut(View::floats(0, floats));
        self.part(id, &entry, which.part(), to, ALONE)?;
        Ok(read(to))
    }

    pub(super) fn write_with(
        &self,
        id: BlockId,
        which: Which,
        write: impl FnOnce(&mut [f32]),
    ) -> io::Result<()> {
        let mut buffer = self.buffer.lock().expect("nobody panicked inside");
        let (entry, part) = (self.now().index.blocks[id.0 as usize].clone(), which.part());
        let (at, floats) = self.places.of(id, entry.copy, part);
        let to = buffer.values_mut(View::floats(0, floats));
        self.part(id, &entry, part, to, ALONE)?;
        write(to);
        let digest = self.file.write(at, to, ALONE).map_err(|error| self.located(id, error))?;
        self.now().index.blocks[id.0 as usize].digests[part] = Some(format!("{digest:032x}"));
        Ok(())
    }
}
