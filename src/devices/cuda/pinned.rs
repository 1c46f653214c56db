//! Memory of the host that is pinned, so that the GPU copies it directly.

use std::ops::Range;
use std::sync::Mutex;

use l2l_actors::BoxedError;

use super::driver::Driver;
use crate::config::ByteSize;
use crate::tensor::touch;

/// Memory is pinned in parts that end at multiples of this. The system refuses memory part by part,
/// and the driver copies from one part at a time.
const PART: usize = if cfg!(test) { 1 << 14 } else { 1 << 30 };

/// The parts of memory that begins at an address, in bytes from there.
pub(super) fn parts(at: usize, bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let begin = from;
        from = bytes.min((at + begin + 1).next_multiple_of(PART) - at);
        (begin < bytes).then_some(begin..from)
    })
}

/// The pinned memory of a device.
#[derive(Default)]
pub(super) struct Pinned(Mutex<State>);

#[derive(Default)]
struct State {
    /// The address of each pinned part.
    parts: Vec<usize>,
    bytes: u64,
    refused: u64,
    /// The driver's first error, until a warning has reported it.
    error: Option<BoxedError>,
}

impl Pinned {
    /// Pins memory, where the system allows that much. Without it copies are slower.
    pub(super) fn pin(&self, driver: &dyn Driver, memory: &mut [f32]) {
        touch(memory); // while it pins pages, the system would give them by one thread
        let at = memory.as_mut_ptr().cast::<u8>();
        let bytes = size_of_val(memory);
        let mut state = self.0.lock().expect("nothing panics inside");
        for part in parts(at.addr(), bytes) {
            let begin = at.wrapping_add(part.start);
            match driver.pin(begin, part.len()) {
                Ok(()) => {
                    state.parts.push(begin.expose_provenance());
                    state.bytes += part.len() as u64;
                }
                Err(error) => {
                    state.refused += part.len() as u64;
                    state.error.get_or_insert(error);
                }
            }
        }
    }

    /// Bytes that are pinned.
    pub(super) fn bytes(&self) -> u64 {
        self.0.lock().expect("nothing panics inside").bytes
    }

    /// A warning about memory that could not be pinned, once.
    pub(super) fn take_warning(&self) -> Option<String> {
        let mut state = self.0.lock().expect("nothing panics inside");
        let error = state.error.take()?;
        let refused = ByteSize::from(state.refused);
        let all = ByteSize::from(state.refused + state.bytes);
        Some(format!(
            "{refused} of {all} of host memory could not be pinned ({error}): copies of it are \
             slower, and may not overlap with kernels. The host may have too little free memory, \
             or its container a limit"
        ))
    }

    /// Unpins all parts.
    pub(super) fn unpin(&mut self, driver: &dyn Driver) {
        for at in self.0.get_mut().expect("nothing panics inside").parts.drain(..) {
            driver.unpin(std::ptr::with_exposed_provenance_mut(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_at_multiples() {
        let all = |at, bytes| parts(at, bytes).collect::<Vec<_>>();
        assert_eq!(all(PART - 4, 5), [0..4, 4..5]);
        assert_eq!(all(8, 2 * PART), [0..PART - 8, PART - 8..2 * PART - 8, 2 * PART - 8..2 * PART]);
        assert!(all(8, 0).is_empty());
    }
}
