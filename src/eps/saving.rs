//! Blocks that are saved while training goes on: none is updated before its turn has come.
//!
//! A saving has the state of one version. A thread beside the ring writes block after block. A lane
//! that is about to update a block waits until that block is written. The thread does not wait for
//! later steps, so the two never wait for each other.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use l2l_actors::schedule::{BlockId, Version};

use super::Eps;

/// How long a waiting lane sleeps before it looks whether the saving goes on.
const LOOK: Duration = Duration::from_millis(200);

/// How long storage may stall: disks and network file systems come back within minutes.
pub(crate) const STORAGE_PATIENCE: Duration = Duration::from_secs(600);

/// A state that is being saved. When it is dropped, every block may be updated.
pub(crate) struct Saving(Arc<Progress>);

/// Shared by the thread that saves and the lanes that wait for it.
pub(super) struct Progress {
    version: Version,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// For each block.
    is_saved: Vec<bool>,
    is_over: bool,
    /// The number of blocks that are saved.
    count: usize,
    /// The time that lanes have waited, for this state and earlier ones.
    waited: Duration,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics inside")
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    fn saved(&self, id: BlockId) {
        self.change(|state| {
            state.is_saved[id.0 as usize] = true;
            state.count += 1;
        });
    }

    fn wait_until_saved(&self, id: BlockId, beat: &dyn Fn()) {
        let began = Instant::now();
        let mut state = self.state();
        let mut count = state.count;
        let mut since = began;
        while !state.is_saved[id.0 as usize] && !state.is_over {
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.expect("nothing panics inside").0;
            if state.count > count {
                count = state.count;
                since = Instant::now();
            }
            if since.elapsed() < STORAGE_PATIENCE {
                beat();
            }
        }
        state.waited += began.elapsed();
    }
}

impl Saving {
    pub(crate) fn saved(&self, id: BlockId) {
        self.0.saved(id);
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.0.change(|state| state.is_over = true);
    }
}

impl Eps {
    /// Begins to save the state of this version. One state is saved at a time.
    pub(crate) fn begin_saving(&self, version: Version) -> Saving {
        let is_saved = vec![false; self.tensors.len()];
        let waited = self.waited_for_saving();
        let state = State { is_saved, is_over: false, count: 0, waited };
        let progress =
            Arc::new(Progress { version, state: Mutex::new(state), changed: Condvar::new() });
        let mut current = self.saving.lock().expect("nothing panics inside");
        let before = current.replace(progress.clone());
        assert!(before.is_none_or(|before| before.state().is_over), "another state is being saved");
        Saving(progress)
    }

    /// Waits until a block of this version may be changed. `beat` is called while the saving goes
    /// on, also if the storage stalls for [`STORAGE_PATIENCE`].
    pub(crate) fn wait_until_saved(&self, id: BlockId, version: Version, beat: &dyn Fn()) {
        let current = self.saving.lock().expect("nothing panics inside").clone();
        let Some(progress) = current.filter(|progress| version >= progress.version) else { return };
        progress.wait_until_saved(id, beat);
    }

    /// The time that lanes have waited until now.
    pub(crate) fn waited_for_saving(&self) -> Duration {
        let current = self.saving.lock().expect("nothing panics inside");
        current.as_ref().map_or(Duration::ZERO, |progress| progress.state().waited)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use std::thread;

    use super::*;

    /// A block that takes long to be saved is no standstill.
    #[test]
    fn a_lane_that_waits_for_a_slow_disk_tells_the_watchdog() {
        let state =
            State { is_saved: vec![false], is_over: false, count: 0, waited: Duration::ZERO };
        let progress = Progress { version: 1, state: Mutex::new(state), changed: Condvar::new() };
        let beats = AtomicU32::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                while beats.load(Relaxed) < 2 {
                    thread::yield_now();
                }
                progress.saved(BlockId(0));
            });
            progress.wait_until_saved(BlockId(0), &|| _ = beats.fetch_add(1, Relaxed));
        });
        assert!(progress.state().waited > Duration::ZERO);
    }
}
