//! What devices are sent of a block, twice: of its newest version, and of the one before.
//!
//! With a delay, a step reads the version before the newest. Meanwhile the update of the step
//! before runs. It writes the next version over the older copy, which only that step before has
//! read. So no lock is ever waited for. What is frozen is there once, and no step changes it.

use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};

use l2l_actors::schedule::{BlockId, Version};

use super::memory::pages;
use crate::models::BlockTensors;
use crate::tensor::Pages;

/// Floats of a block that are there twice with a delay: those of the trained part. The host gathers
/// rows of a tile of the vocabulary, so a tile that trains is there twice as a whole.
pub(crate) fn doubled_len(tensors: &BlockTensors, is_tile: bool) -> usize {
    let dtype = tensors.masters().sent();
    match tensors.trained_len() {
        0 => 0,
        _ if is_tile => tensors.published_len(dtype),
        trained => dtype.floats(trained),
    }
}

/// Two copies of the first floats that devices are sent of a block, and the floats behind them.
pub(super) struct Twice {
    copies: [RwLock<Pages>; 2],
    frozen: RwLock<Pages>,
    now: Mutex<Now>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Now {
    /// The version of the newest copy.
    version: Version,
    newest: usize,
    /// True if the other copy has the version before. False: that version is the same.
    has_older: bool,
}

impl Now {
    /// The copy with this version.
    fn copy(self, id: BlockId, version: Version) -> usize {
        let Now { version: held, newest, has_older } = self;
        assert!(
            version == held || version + 1 == held,
            "{id} v{version} asked, the EPS holds v{held} and the version before"
        );
        if version < held && has_older { 1 - newest } else { newest }
    }
}

/// A lease to read a block that is there twice.
pub(crate) struct TwiceLease<'b> {
    copy: RwLockReadGuard<'b, Pages>,
    frozen: RwLockReadGuard<'b, Pages>,
}

impl TwiceLease<'_> {
    /// What devices are sent, in pieces that follow each other.
    pub(super) fn pieces(&self) -> Vec<&[f32]> {
        let pieces = [&self.copy[..], &self.frozen[..]];
        pieces.into_iter().filter(|piece| !piece.is_empty()).collect()
    }
}

impl Twice {
    /// Zeros: `len` floats twice, and `frozen` floats once.
    pub(super) fn new(len: usize, frozen: usize) -> Twice {
        let copy = || RwLock::new(pages(len));
        Twice {
            copies: [copy(), copy()],
            frozen: RwLock::new(pages(frozen)),
            now: Mutex::default(),
        }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().expect("nothing panics inside")
    }

    /// The copies by their age: the newest, and the other.
    fn by_age(&self) -> [&RwLock<Pages>; 2] {
        let newest = self.now().newest;
        [&self.copies[newest], &self.copies[1 - newest]]
    }

    pub(super) fn begin_at(&self, version: Version) {
        self.now().version = version;
    }

    pub(super) fn prepare(&self, pin: &mut impl FnMut(&mut [f32])) {
        for memory in self.copies.iter().chain([&self.frozen]) {
            pin(&mut memory.write().expect("nobody panicked inside"));
        }
    }

    /// All floats of the block as they are stored once, of which `kept` are not sent.
    pub(super) fn with_rest(&self, kept: &[f32]) -> Vec<f32> {
        let [newest, _] = self.by_age();
        let newest = newest.read().expect("nobody panicked inside");
        let frozen = self.frozen.read().expect("nobody panicked inside");
        [&newest[..], &frozen[..], kept].concat()
    }

    /// Replaces the block. The version before is then the same.
    pub(super) fn replace(&self, all: &[f32], kept: &mut [f32]) {
        let [newest, _] = self.by_age();
        let mut newest = newest.write().expect("nobody panicked inside");
        let mut frozen = self.frozen.write().expect("nobody panicked inside");
        let (first, rest) = all.split_at(newest.len());
        let (second, third) = rest.split_at(frozen.len());
        newest.copy_from_slice(first);
        frozen.copy_from_slice(second);
        kept.copy_from_slice(third);
        self.now().has_older = false;
    }

    /// The version before the newest.
    pub(super) fn older(&self) -> Vec<f32> {
        let has_older = self.now().has_older;
        let [newest, other] = self.by_age();
        let copy = if has_older { other } else { newest };
        copy.read().expect("nobody panicked inside").to_vec()
    }

    /// Changes the version before the newest.
    pub(super) fn write_older(&self, write: impl FnOnce(&mut [f32])) {
        let older = self.older();
        let [_, other] = self.by_age();
        let mut other = other.write().expect("nobody panicked inside");
        other.copy_from_slice(&older);
        write(&mut other);
        self.now().has_older = true;
    }

    pub(super) fn read(&self, id: BlockId, version: Version) -> TwiceLease<'_> {
        let copy = self.now().copy(id, version);
        let copy = self.copies[copy].try_read();
        let copy = copy.unwrap_or_else(|_| panic!("{id} v{version} asked, it is being replaced"));
        let frozen = self.frozen.try_read();
        let frozen = frozen.unwrap_or_else(|_| panic!("{id} v{version} asked, it is replaced"));
        TwiceLease { copy, frozen }
    }

    /// Writes the next version over the copy of the version before this one, which it begins as
    /// this version.
    pub(super) fn update(
        &self,
        id: BlockId,
        version: Version,
        copy: impl Fn(&mut [f32], &[f32]),
        apply: impl FnOnce(&mut [f32]),
    ) {
        let held = self.now().version;
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        let [newest, other] = self.by_age();
        let next = other.try_write();
        let mut next = next.unwrap_or_else(|_| panic!("{id} v{version} to update, it is in use"));
        copy(&mut next, &newest.read().expect("nobody panicked inside"));
        apply(&mut next);
        let mut now = self.now();
        *now = Now { version: version + 1, newest: 1 - now.newest, has_older: true };
    }

    pub(super) fn carry(&self, id: BlockId, version: Version) {
        let mut now = self.now();
        let held = now.version;
        assert!(held == version, "{id} v{version} asked, the EPS holds v{held}");
        now.version = version + 1;
        now.has_older = false;
    }
}
