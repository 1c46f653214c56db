//! The version before the newest, with a delay.
//!
//! A step reads that version. Its masters are in the older copy, until the next update begins to
//! write there. Before that the step has ended. A run that resumes cannot rely on that copy. So
//! each copy also has the trained weights that devices were sent of the version before, and the
//! first step is given those in the place of the newest.

use std::io;

use l2l_actors::schedule::{BlockId, Version};

use super::{Current, FileTier};
use crate::eps::direct::Progress;
use crate::eps::index::Entry;
use crate::eps::places::{MASTERS, OLDER};
use crate::tensor::View;

impl FileTier {
    /// The version before a block's newest is the same from now on.
    pub(super) fn forget_older(&self, id: BlockId, current: &mut Current) {
        if self.has_older() {
            current.before[id.0 as usize] = None;
            current.index.blocks[id.0 as usize].digests[OLDER] = None;
        }
    }

    /// True if the version before the newest is there, too.
    pub(in crate::eps) fn has_older(&self) -> bool {
        self.places.has_older()
    }

    /// Reads the masters of a block of this version: the newest, or with a delay also the one
    /// before.
    ///
    /// # Errors
    /// The disk fails, or the data is not what was written.
    pub(crate) fn read_parameters(
        &self,
        id: BlockId,
        version: Version,
        to: &mut [f32],
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let at = id.0 as usize;
        let current = self.current();
        let is_older = self.has_older() && version + 1 == current.versions[at];
        let before = current.before[at].clone().filter(|_| is_older);
        drop(current);
        if let Some(before) = before {
            return self.read_run(id, &before, MASTERS, to, progress);
        }
        let entry = self.entry(id, version + u64::from(is_older));
        self.read_run(id, &entry, MASTERS, to, progress)?;
        if is_older && entry.digests[OLDER].is_some() {
            self.read_older(id, &entry, to, progress)?;
        }
        Ok(())
    }

    /// Puts the trained weights that devices were sent of the version before in the place of the
    /// newest.
    fn read_older(
        &self,
        id: BlockId,
        entry: &Entry,
        to: &mut [f32],
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let len = self.places.older(id).expect("the blocks have such a run");
        let mut buffer = self.buffer.lock().expect("nobody panicked inside");
        let older = buffer.values_mut(View::floats(0, self.places.runs(id)[OLDER]));
        self.read_run(id, entry, OLDER, older, progress)?;
        to[..len].copy_from_slice(&older[..len]);
        Ok(())
    }

    /// With a delay, copies what devices were sent of a block's trained part to the run behind its
    /// masters, before an update. Gives the optimizer's states.
    pub(crate) fn keep_older<'r, 'm>(
        &self,
        id: BlockId,
        masters: &[f32],
        behind: &'r mut [&'m mut [f32]],
        copy: impl Fn(&mut [f32], &[f32]),
    ) -> &'r mut [&'m mut [f32]] {
        let Some(len) = self.places.older(id) else { return behind };
        let (older, states) = behind.split_first_mut().expect("the run is behind the masters");
        copy(&mut older[..len], &masters[..len]);
        states
    }

    /// The run that has what is in this one: the masters, if the version before is the same.
    pub(super) fn given(&self, nth: usize, entry: &Entry) -> usize {
        let is_same = nth == OLDER && self.has_older() && entry.digests[OLDER].is_none();
        if is_same { MASTERS } else { nth }
    }
}
