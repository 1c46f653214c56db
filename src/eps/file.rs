//! The EPS on file: each block is there twice, so that a kill never costs the last complete state.
//!
//! An update writes the new block over the older copy; the newer copy stays as it is. The
//! [index](super::index) says which copy is valid, and is written when a step is complete
//! ([`FileTier::seal`]). The runs of a block (masters, each optimizer state) begin at pages, and
//! each has a digest that is checked when it is read. Memory holds only the index. `older.rs` has
//! what a delay adds.

mod older;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use l2l_actors::schedule::{BlockId, Version};
use serde_json::Value;

use super::BlockRun;
use super::direct::{Direct, Progress};
use super::index::{Entry, Index, StateOnFile, states_in};
use super::places::{BlockPlace, FileRange, OLDER, Places};
use crate::folder;
use crate::limits::named;
use crate::lock::Lock;
use crate::models::BlockTensors;
use crate::optimizers::StateLayout;
use crate::tensor::Arena;
use crate::tensor::View;

/// The copies of each block of a model that is trained: the valid copy and the one before it.
const COPIES: usize = 2;

/// What changes while a run goes on.
struct Current {
    versions: Vec<Version>,
    /// With a delay, where the version before is. `None`: this run has not written the newest one.
    before: Vec<Option<Entry>>,
    /// The digests of gradient regions. They are not in the index, because no region outlives a
    /// run.
    regions: Vec<u128>,
    index: Index,
}

/// Between steps no watchdog asks for progress.
const NO_PROGRESS: Progress<'static> = &|| ();

/// The blocks of a model on file.
pub(crate) struct FileTier {
    file: Direct,
    /// The folder of the index. `None` for an unnamed file, which has no index.
    folder: Option<PathBuf>,
    places: Places,
    current: Mutex<Current>,
    /// Holds one run of a block, for reads and writes between steps.
    buffer: Mutex<Arena>,
    /// The locks of the folder's files `lock` and `blocks`, which keep other processes away. Where
    /// the file system has no locks, `lock` has an owner, and that is all.
    locks: Vec<Lock>,
}

/// A folder for an EPS on file, locked by this run.
pub(crate) struct Folder {
    path: PathBuf,
    lock: Lock,
}

impl Folder {
    /// Makes the folder if it does not exist, and locks it.
    ///
    /// # Errors
    /// The folder cannot be made, or another run has locked it.
    pub(crate) fn lock(path: &Path) -> io::Result<Folder> {
        folder::create(path)?;
        let at = path.join("lock");
        let lock = OpenOptions::new().write(true).create(true).truncate(false).open(&at)?;
        Ok(Folder { path: path.into(), lock: Lock::of(&at, lock)? })
    }

    /// The states that the folder holds, the newest first.
    ///
    /// # Errors
    /// As [`states_in`].
    pub(crate) fn states(&self) -> io::Result<Vec<StateOnFile>> {
        states_in(&self.path)
    }
}

/// The error of data whose digest differs.
fn changed(what: &str, FileRange { at, floats }: FileRange) -> io::Error {
    let bytes = floats * size_of::<f32>();
    let what = format!(
        "{what}, {bytes} bytes at byte {at}, is not what was written: the disk, or somebody, \
         changed it"
    );
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl FileTier {
    /// Opens the file in a folder: with the state after step `resume` of the run before, or new. A
    /// new run's blocks are written beside an existing state, which stays valid until the first
    /// seal.
    ///
    /// # Errors
    /// The disk is full; or there is no complete state after that step, of blocks of this shape.
    pub(crate) fn open(
        folder: Folder,
        blocks: &[BlockTensors],
        states: &StateLayout,
        region: impl Fn(BlockId) -> bool,
        is_delayed: bool,
        resume: Option<u64>,
    ) -> io::Result<FileTier> {
        let Folder { path, lock } = folder;
        let at = path.join("blocks");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&at)?;
        // If the file `lock` was removed, another process could lock a new one, but not the blocks.
        let mut locks = vec![lock];
        if locks[0].is_by_system() {
            locks.push(Lock::of(&at, file.try_clone()?)?);
        }
        let places = Places::new(blocks, COPIES, states, region, is_delayed);
        let layout = places.layout();
        let fits =
            |index: &Index| index.layout == layout && index.blocks.len() == places.blocks.len();
        let found = match resume {
            Some(step) => Index::all(&path)?.into_iter().find(|index| index.step == step),
            None => Index::all(&path).unwrap_or_default().into_iter().next(),
        };
        let index = match found {
            Some(index) if resume.is_some() && fits(&index) => index,
            _ if resume.is_some() => {
                let what = "it is of a model of another shape, of another update rule, of another \
                            schedule.delay or parallel.slices, or of another number of processes";
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            // The new blocks go where the valid copies are not.
            Some(before) if fits(&before) => {
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
        Index::sync(&path)?;
        FileTier::new(file, Some(path), places, index, locks)
    }

    /// An unnamed file in a folder, which leaves nothing behind: for a trial run, or for a model
    /// that is not trained, which needs only one copy of each block.
    ///
    /// # Errors
    /// The disk is full.
    pub(crate) fn unnamed(
        folder: &Path,
        blocks: &[BlockTensors],
        trains: bool,
        states: &StateLayout,
        region: impl Fn(BlockId) -> bool,
        is_delayed: bool,
    ) -> io::Result<FileTier> {
        fs::create_dir_all(folder)?;
        let copies = if trains { COPIES } else { 1 };
        let places = Places::new(blocks, copies, states, region, is_delayed);
        let index = FileTier::blank(&places);
        FileTier::new(tempfile::tempfile_in(folder)?, None, places, index, Vec::new())
    }

    /// The index of blocks of zeros.
    fn blank(places: &Places) -> Index {
        let entry = |block: &BlockPlace| {
            let digests = vec![None; block.runs.len()];
            Entry { copy: 0, updates: 0, digests }
        };
        let blocks = places.blocks.iter().map(entry).collect();
        Index { layout: places.layout(), blocks, ..Index::default() }
    }

    fn new(
        file: File,
        folder: Option<PathBuf>,
        places: Places,
        index: Index,
        locks: Vec<Lock>,
    ) -> io::Result<FileTier> {
        let file = Direct::new(file);
        file.reserve(places.bytes)?;
        let buffer = Mutex::new(Arena::new(places.largest())?);
        let blocks = places.blocks.len();
        let current = Current {
            versions: vec![0; blocks],
            before: vec![None; blocks],
            regions: vec![0; blocks],
            index,
        };
        let current = Mutex::new(current);
        Ok(FileTier { file, folder, places, current, buffer, locks })
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().expect("nothing panics inside")
    }

    /// The entry of a block, which must have this version.
    fn entry(&self, id: BlockId, version: Version) -> Entry {
        let current = self.current();
        let held = current.versions[id.0 as usize];
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        current.index.blocks[id.0 as usize].clone()
    }

    /// Whether the file is read and written past the system's page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    /// The folder of the state, unless it has no name.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    pub(super) fn updates(&self) -> Vec<u64> {
        self.current().index.blocks.iter().map(|entry| entry.updates).collect()
    }

    pub(super) fn set_updates(&self, updates: &[u64]) {
        for (entry, updates) in self.current().index.blocks.iter_mut().zip(updates) {
            entry.updates = *updates;
        }
    }

    pub(crate) fn updates_of(&self, id: BlockId) -> u64 {
        self.current().index.blocks[id.0 as usize].updates
    }

    pub(super) fn begin_at(&self, version: Version) {
        self.current().versions.fill(version);
    }

    pub(super) fn carry(&self, id: BlockId, version: Version) {
        let mut current = self.current();
        let held = &mut current.versions[id.0 as usize];
        assert!(*held == version, "{id} v{version} asked, the EPS holds v{held}");
        *held = version + 1;
        self.forget_older(id, &mut current);
    }

    /// Sets the run's progress and identity, which the next seal writes beside the blocks.
    pub(crate) fn set_run(&self, run: Value) {
        self.current().index.run = run;
    }

    /// Reads one run of a block from the copy that its entry names.
    fn read_run(
        &self,
        id: BlockId,
        entry: &Entry,
        run: usize,
        to: &mut [f32],
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let Some(expected) = &entry.digests[run] else {
            to.fill(0.0);
            return Ok(());
        };
        let range = self.places.of(id, entry.copy, run);
        if format!("{:032x}", self.read_range(id, range, to, progress)?) == *expected {
            return Ok(());
        }
        Err(self.located(id, changed(&format!("part {run}"), range)))
    }

    /// Reads a range of a block, and gives its digest.
    fn read_range(
        &self,
        id: BlockId,
        FileRange { at, floats }: FileRange,
        to: &mut [f32],
        progress: Progress<'_>,
    ) -> io::Result<u128> {
        let digest = self.file.read(at, &mut to[..floats], progress);
        digest.map_err(|error| self.located(id, error))
    }

    /// Writes a range of a block, and gives its digest.
    fn write_range(
        &self,
        id: BlockId,
        FileRange { at, floats }: FileRange,
        from: &[f32],
        progress: Progress<'_>,
    ) -> io::Result<u128> {
        let digest = self.file.write(at, &from[..floats], progress);
        digest.map_err(|error| self.located(id, error))
    }

    fn located(&self, id: BlockId, error: io::Error) -> io::Error {
        let folder = self.folder.as_deref().map_or("an unnamed file".into(), Path::to_string_lossy);
        io::Error::new(error.kind(), format!("eps.path {folder}: {id}: {}", named(error)))
    }

    /// Splits memory into the runs of a block and the rest behind them.
    pub(crate) fn split<'m>(&self, id: BlockId, memory: &'m mut [f32]) -> Vec<&'m mut [f32]> {
        let mut rest = memory;
        let mut all = Vec::new();
        for &floats in self.places.runs(id) {
            let (run, behind) = rest.split_at_mut(floats);
            all.push(run);
            rest = behind;
        }
        all.push(rest);
        all
    }

    /// Reads all runs of a block into `to`, one behind the other, but not that of the version
    /// before: an update fills it. With `region`, the block's gradient region follows.
    ///
    /// # Errors
    /// As [`read_parameters`](FileTier::read_parameters).
    pub(crate) fn read_state(
        &self,
        id: BlockId,
        version: Version,
        to: &mut [f32],
        region: bool,
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let entry = self.entry(id, version);
        let mut runs = self.split(id, to);
        let behind = runs.pop().expect("the rest is behind the runs");
        let is_read = |run: &usize| *run != OLDER || !self.has_older();
        for (run, to) in runs.into_iter().enumerate().filter(|(run, _)| is_read(run)) {
            self.read_run(id, &entry, run, to, progress)?;
        }
        if region { self.read_region(id, behind, progress) } else { Ok(()) }
    }

    /// Writes all runs of a block that was updated from this version, over the older copy. They lie
    /// in `from` as [`read_state`](FileTier::read_state) leaves them.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn write_state(
        &self,
        id: BlockId,
        version: Version,
        mut from: &[f32],
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let before = self.entry(id, version);
        let copy = 1 - before.copy;
        let updates = before.updates + 1;
        let mut digests = Vec::new();
        for run in 0..self.places.runs(id).len() {
            let range = self.places.of(id, copy, run);
            let digest = self.write_range(id, range, from, progress)?;
            digests.push(Some(format!("{digest:032x}")));
            from = &from[range.floats..];
        }
        let mut current = self.current();
        current.versions[id.0 as usize] = version + 1;
        current.before[id.0 as usize] = Some(before).filter(|_| self.has_older());
        current.index.blocks[id.0 as usize] = Entry { copy, updates, digests };
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
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let region = self.region(id);
        let digest = self.read_range(id, region, to, progress)?;
        match self.current().regions[id.0 as usize] == digest {
            true => Ok(()),
            false => Err(self.located(id, changed("its gradient", region))),
        }
    }

    /// Replaces a block's gradient region.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn write_region(
        &self,
        id: BlockId,
        from: &[f32],
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let digest = self.write_range(id, self.region(id), from, progress)?;
        self.current().regions[id.0 as usize] = digest;
        Ok(())
    }

    /// The place of a block's gradient region.
    fn region(&self, id: BlockId) -> FileRange {
        let region = self.places.regions[id.0 as usize];
        region.unwrap_or_else(|| panic!("{id} has no region"))
    }

    /// Makes everything written until now the valid state, after `step` training steps. An unnamed
    /// file is not sealed.
    ///
    /// # Errors
    /// The disk fails; then the state before stays valid.
    pub(crate) fn seal(&self, step: u64) -> io::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        // What the index names has been written by now, and is synced next.
        let index = {
            let mut current = self.current();
            (current.index.step, current.index.sequence) = (step, current.index.sequence + 1);
            current.index.clone()
        };
        let written = self.file.sync().and_then(|()| {
            // Without its lock, the folder may belong to another process by now.
            self.locks.last().map_or(Ok(()), Lock::still_held)?;
            index.write(folder)
        });
        written.map_err(|error| {
            io::Error::new(error.kind(), format!("eps.path {}: {error}", folder.display()))
        })
    }

    pub(super) fn read_with<R>(
        &self,
        id: BlockId,
        run: BlockRun,
        read: impl FnOnce(&[f32]) -> R,
    ) -> io::Result<R> {
        let Some(nth) = self.places.nth(id, run) else { return Ok(read(&[])) };
        let mut buffer = self.buffer.lock().expect("nobody panicked inside");
        let entry = self.current().index.blocks[id.0 as usize].clone();
        let nth = self.given(nth, &entry);
        let to = buffer.values_mut(View::floats(0, self.places.runs(id)[nth]));
        self.read_run(id, &entry, nth, to, NO_PROGRESS)?;
        Ok(read(to))
    }

    pub(super) fn write_with(
        &self,
        id: BlockId,
        run: BlockRun,
        write: impl FnOnce(&mut [f32]),
    ) -> io::Result<()> {
        let Some(nth) = self.places.nth(id, run) else {
            write(&mut []);
            return Ok(());
        };
        let mut buffer = self.buffer.lock().expect("nobody panicked inside");
        let entry = self.current().index.blocks[id.0 as usize].clone();
        let given = self.given(nth, &entry);
        let values = buffer.values_mut(View::floats(0, self.places.runs(id)[given]));
        self.read_run(id, &entry, given, values, NO_PROGRESS)?;
        let range = self.places.of(id, entry.copy, nth);
        let values = &mut values[..range.floats];
        write(values);
        let digest = self.write_range(id, range, values, NO_PROGRESS)?;
        let mut current = self.current();
        if run == BlockRun::Parameters {
            self.forget_older(id, &mut current);
        }
        current.index.blocks[id.0 as usize].digests[nth] = Some(format!("{digest:032x}"));
        Ok(())
    }
}
