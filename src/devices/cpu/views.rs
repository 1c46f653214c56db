//! Views as slices of the arena, for one operation: who may write them, and that none overlap.

use crate::simd::Level;
use crate::tensor::{Arena, View};

/// Kernels on a device's memory; without memory, they only take their workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuKernels<'a> {
    pub(crate) memory: Option<&'a Arena>,
    pub(crate) level: Level,
}

/// Views resolved for one call.
pub(super) struct Call<'a, const N: usize> {
    memory: &'a Arena,
    writes: [View; N],
}

impl<'a> CpuKernels<'a> {
    /// Begins a call that writes some views and reads others; `None` without memory.
    pub(super) fn call<const N: usize>(
        &self,
        writes: [View; N],
        reads: &[View],
    ) -> Option<Call<'a, N>> {
        check_apart(&writes, reads);
        self.memory.map(|memory| Call { memory, writes })
    }
}

impl<'a, const N: usize> Call<'a, N> {
    pub(super) fn read(&self, view: View) -> &'a [f32] {
        // SAFETY: `call` checked that no view which this call writes overlaps it, and the ring lets
        // no other operation write it.
        unsafe { self.memory.read(view) }
    }

    pub(super) fn read_if(&self, view: Option<View>) -> Option<&'a [f32]> {
        view.map(|view| self.read(view))
    }

    pub(super) fn write(&self) -> [&'a mut [f32]; N] {
        // SAFETY: `call` checked that the views overlap neither each other nor one that is read,
        // and the ring gives them to no other operation.
        self.writes.map(|view| unsafe { self.memory.write(view) })
    }
}

impl CpuKernels<'_> {
    /// Calls a function with the floats of some views; does nothing without memory.
    pub(super) fn with_slices(
        &self,
        writes: &[View],
        reads: &[View],
        function: impl FnOnce(&mut [&mut [f32]], &[&[f32]]),
    ) {
        check_apart(writes, reads);
        let Some(memory) = self.memory else { return };
        // SAFETY: views that are written overlap no others, and the ring gives them to no other
        // operation.
        let mut outputs: Vec<_> =
            writes.iter().map(|view| unsafe { memory.write(*view) }).collect();
        // SAFETY: no view that is read is written here, and the ring lets no other operation write
        // it.
        let inputs: Vec<_> = reads.iter().map(|view| unsafe { memory.read(*view) }).collect();
        function(&mut outputs, &inputs);
    }
}

/// Panics when a view that is written overlaps another one.
fn check_apart(writes: &[View], reads: &[View]) {
    let are_apart = |a: &View, b: &View| a.at + a.len() <= b.at || b.at + b.len() <= a.at;
    for (index, write) in writes.iter().enumerate() {
        for other in writes[index + 1..].iter().chain(reads) {
            assert!(are_apart(write, other), "{write} is written, and {other} is in use");
        }
    }
}

/// An optional view, or a view of nothing.
pub(super) fn or_nothing(view: Option<View>) -> View {
    view.unwrap_or(View::floats(0, 0))
}
