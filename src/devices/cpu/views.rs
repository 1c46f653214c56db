//! The views of one operation as slices of floats. A view that is written overlaps no other view.
//!
//! Kernels compute in f32. Elements of 16 bits are widened to floats before an operation, in a
//! region of the device's memory, and what the operation wrote is rounded after it. So results are
//! rounded where a GPU's kernels round theirs. Operands of products are not widened here: a
//! product packs their elements.
//!
//! Under AddressSanitizer an operation works on copies of its views, with guard zones between them,
//! because the tensors of a workspace lie side by side.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rayon::prelude::*;

use crate::kernels::{
    Access, CombineRows, DeviceKernels, Dispatch, KernelOperation, Linear, LinearBackward, Runs,
    RunsIn, Score, ScoreBackward, UnpackPositive, each_view,
};
use crate::product::Elements;
use crate::simd::Level;
use crate::tensor::{Arena, ArenaPlan, Dtype, Scratch, Slots, View, narrow, widen};

/// Kernels on a device's memory; without memory, they only take their workspace.
#[derive(Debug)]
pub(crate) struct CpuKernels<'a> {
    memory: Option<&'a Arena>,
    pub(super) level: Level,
    /// Memory for the elements of 16 bits of one operation, widened to floats.
    widened: View,
    /// The most floats of `widened` that an operation took.
    most_widened: AtomicUsize,
}

/// An operation that is computed on the slices of its views.
pub(super) trait Compute: KernelOperation {
    /// Views that its products alone read, as [`Call::elements`].
    fn packed(&self) -> Vec<View> {
        Vec::new()
    }

    fn compute(&self, level: Level, call: &Call<'_>);
}

/// An operation that is computed on the slices of its views and of its workspace.
pub(super) trait ComputeIn: KernelOperation {
    fn workspace(&self) -> usize;

    /// Views that its products alone read, as [`Call::elements`].
    fn packed(&self) -> Vec<View> {
        Vec::new()
    }

    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]);
}

/// The views of one operation, as slices of floats.
pub(super) struct Call<'a> {
    memory: &'a Arena,
    /// Views that are written, and were not taken as a slice yet.
    unwritten: RefCell<Vec<View>>,
    reads: Vec<View>,
    /// Each view of 16 bits, with the place of its floats.
    widened: Vec<(View, View)>,
    /// The first `written` of these are written.
    written: usize,
    /// The copies that an operation works on under AddressSanitizer.
    copies: Option<Copies>,
}

/// Floats of views, with guard zones between them.
struct Copies {
    memory: Arena,
    /// Each view, with the place of its copy.
    places: Vec<(View, View)>,
    /// The first `written` of these are written.
    written: usize,
}

/// Elements that one task widens or rounds.
const PIECE: usize = 1 << 15;

impl<'a> CpuKernels<'a> {
    /// Kernels on a memory whose elements are all floats.
    pub(crate) fn new(memory: Option<&'a Arena>, level: Level) -> CpuKernels<'a> {
        CpuKernels::with_room(memory, level, View::floats(0, 0))
    }

    /// Kernels with room to widen elements of 16 bits.
    pub(crate) fn with_room(
        memory: Option<&'a Arena>,
        level: Level,
        widened: View,
    ) -> CpuKernels<'a> {
        CpuKernels { memory, level, widened, most_widened: AtomicUsize::new(0) }
    }

    pub(crate) fn most_widened(&self) -> usize {
        self.most_widened.load(Relaxed)
    }

    /// Begins an operation; `None` without memory.
    pub(super) fn call(&self, op: &dyn KernelOperation) -> Option<Call<'a>> {
        self.call_in(op, [], &[])
    }

    /// Begins an operation that also writes workspace, and whose products alone read the `packed`
    /// views; `None` without memory.
    pub(super) fn call_in(
        &self,
        op: &dyn KernelOperation,
        workspace: impl IntoIterator<Item = View>,
        packed: &[View],
    ) -> Option<Call<'a>> {
        let (mut writes, reads) = views_of([op]);
        writes.extend(workspace);
        self.call_on(writes, reads, packed)
    }

    /// Begins several operations, none of which reads what another one writes; `None` without
    /// memory.
    pub(super) fn call_all<O: KernelOperation>(&self, ops: &[O]) -> Option<Call<'a>> {
        let (mut writes, reads) = views_of(ops.iter().map(|op| op as &dyn KernelOperation));
        // Several may add to one view, which is then taken once. `write` refuses to take it twice.
        writes.sort_unstable_by_key(|view| (view.at, view.rows));
        writes.dedup();
        self.call_on(writes, reads, &[])
    }

    /// Begins a call that writes and reads these views; `None` without memory. Elements of the
    /// `packed` views stay as they are, but not under AddressSanitizer, which watches copies.
    pub(super) fn call_on(
        &self,
        writes: Vec<View>,
        reads: Vec<View>,
        packed: &[View],
    ) -> Option<Call<'a>> {
        check_apart(&writes, &reads);
        let packed = if cfg!(l2l_asan) { &[] } else { packed };
        let mut widened: Vec<(View, View)> = Vec::new();
        let mut written = 0;
        let mut end = 0;
        for (index, &view) in writes.iter().chain(&reads).enumerate() {
            let is_known = widened.iter().any(|(known, _)| *known == view);
            let stays = view.dtype == Dtype::F32 || packed.contains(&view);
            if !stays && !view.is_empty() && !is_known {
                let at = self.widened.at + end;
                widened.push((view, View { at, dtype: Dtype::F32, ..view }));
                end += view.len().next_multiple_of(16);
                written += usize::from(index < writes.len());
            }
        }
        self.most_widened.fetch_max(end, Relaxed);
        let memory = self.memory?;
        assert!(end <= self.widened.len(), "room to widen {end} elements: {}", self.widened);
        let unwritten = RefCell::new(writes);
        let mut call = Call { memory, unwritten, reads, widened, written, copies: None };
        call.widened.iter().for_each(|&(view, floats)| call.widen(view, floats));
        call.copies = cfg!(l2l_asan).then(|| call.copy());
        Some(call)
    }
}

impl<O: Compute> Runs<O> for CpuKernels<'_> {
    fn run(&self, op: &O) {
        let Some(call) = self.call_in(op, [], &op.packed()) else { return };
        op.compute(self.level, &call);
    }
}

impl<O: ComputeIn> RunsIn<O> for CpuKernels<'_> {
    fn run_in(&self, op: &O, scratch: &Scratch<'_>) {
        let scratch = scratch.nested();
        let workspace = scratch.take_floats(1, op.workspace());
        let Some(call) = self.call_in(op, [workspace], &op.packed()) else { return };
        op.compute(self.level, &call, call.write(workspace));
    }
}

impl DeviceKernels for CpuKernels<'_> {
    fn unpack_positive(&self, op: &UnpackPositive) -> bool {
        self.unpack(op)
    }

    fn dispatch(&self, op: &Dispatch) -> Vec<usize> {
        self.sort_assignments(op)
    }

    fn linears(&self, ops: &[Linear]) {
        self.run_linears(ops);
    }

    fn linears_backward(&self, ops: &[LinearBackward], scratch: &Scratch<'_>) {
        self.run_linears_backward(ops, scratch);
    }

    fn combine_experts(&self, ops: &[CombineRows]) {
        self.combine_in_order(ops);
    }

    fn score_and_backward(&self, score: &Score, op: &ScoreBackward<'_>, scratch: &Scratch<'_>) {
        self.score_last_tile(score, op, scratch);
    }
}

impl Call<'_> {
    /// The floats of a view that the operation reads.
    pub(super) fn read(&self, view: View) -> &[f32] {
        assert!(view.is_empty() || self.reads.contains(&view), "{view} is not declared as read");
        let (memory, view) = self.given(view);
        // SAFETY: it was checked that no view which this call writes overlaps it, and the ring lets
        // no other operation write it. Its widened elements and copies are this call's alone.
        unsafe { memory.read(view) }
    }

    /// The elements of a view that the operation reads, for a product.
    pub(super) fn elements(&self, view: View) -> Elements<'_> {
        let is_widened = self.widened.iter().any(|(known, _)| *known == view);
        if view.dtype == Dtype::F32 || view.is_empty() || is_widened {
            return Elements::Floats(self.read(view));
        }
        assert!(self.reads.contains(&view), "{view} is not declared as read");
        // SAFETY: as in `read`.
        Elements::of(view.dtype, unsafe { self.memory.read_halves(view) })
    }

    /// The floats of a view that the operation may read.
    pub(super) fn read_if(&self, view: Option<View>) -> Option<&[f32]> {
        view.map(|view| self.read(view))
    }

    /// The floats of a view that the operation writes: once for each view.
    #[allow(clippy::mut_from_ref, reason = "the views that a call writes are apart")]
    pub(super) fn write(&self, view: View) -> &mut [f32] {
        if !view.is_empty() {
            let mut unwritten = self.unwritten.borrow_mut();
            let found = unwritten.iter().position(|known| *known == view);
            unwritten.swap_remove(found.expect("a view is declared as written, and taken once"));
        }
        let (memory, view) = self.given(view);
        // SAFETY: it was checked that the views overlap neither each other nor one that is read,
        // and the ring gives them to no other operation. Each is taken once. Its widened elements
        // and copies are this call's.
        unsafe { memory.write(view) }
    }

    /// The floats of a view that the operation may write: once for each view.
    #[allow(clippy::mut_from_ref, reason = "the views that a call writes are apart")]
    pub(super) fn write_if(&self, view: Option<View>) -> Option<&mut [f32]> {
        view.map(|view| self.write(view))
    }

    /// The place of a view's floats.
    fn floats(&self, view: View) -> View {
        if view.is_empty() {
            return View::floats(0, 0);
        }
        if view.dtype == Dtype::F32 {
            return view;
        }
        place(&self.widened, view)
    }

    /// The memory and the place of the floats that an operation gets for a view.
    fn given(&self, view: View) -> (&Arena, View) {
        match &self.copies {
            Some(copies) if !view.is_empty() => (&copies.memory, place(&copies.places, view)),
            _ => (self.memory, self.floats(view)),
        }
    }

    /// Copies of views, each with a guard zone before it and behind it.
    fn copy(&self) -> Copies {
        let mut places = Vec::<(View, View)>::new();
        let mut plan = ArenaPlan::default();
        let writes = self.unwritten.borrow();
        for &view in writes.iter().chain(&self.reads) {
            if !view.is_empty() && !places.iter().any(|(known, _)| *known == view) {
                places.push((view, View { at: plan.floats, dtype: Dtype::F32, ..view }));
                let slot = Slots { at: plan.floats, count: 1, slot_floats: view.len() };
                plan.slots.push(("an operation's views", slot));
                plan.floats += view.len().next_multiple_of(16);
            }
        }
        let mut memory = Arena::planned(&plan).expect("memory for copies");
        for &(view, copy) in &places {
            // SAFETY: no other operation writes the view meanwhile, as in `read`.
            memory.fill(copy, unsafe { self.memory.read(self.floats(view)) });
        }
        let written = writes.iter().filter(|view| !view.is_empty()).count();
        Copies { memory, places, written }
    }

    fn widen(&self, view: View, floats: View) {
        // SAFETY: its floats are this call's, and were not given away yet.
        let to = unsafe { self.memory.write(floats) };
        // SAFETY: no other operation writes the view meanwhile, as in `read`.
        let from = unsafe { self.memory.read_halves(view) };
        let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
        pieces.for_each(|(to, from)| widen(view.dtype, to, from));
    }
}

impl Drop for Call<'_> {
    /// Rounds the floats that were written to the dtypes of their views.
    fn drop(&mut self) {
        if let Some(mut copies) = self.copies.take() {
            for &(view, copy) in &copies.places[..copies.written] {
                // SAFETY: as below.
                let to = unsafe { self.memory.write(self.floats(view)) };
                to.copy_from_slice(copies.memory.values(copy));
            }
        }
        for &(view, floats) in &self.widened[..self.written] {
            // SAFETY: the slices ended with the operation, and the view is still granted to it.
            let to = unsafe { self.memory.write_halves(view) };
            // SAFETY: as above.
            let from = unsafe { self.memory.read(floats) };
            let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
            pieces.for_each(|(to, from)| narrow(view.dtype, to, from));
        }
    }
}

/// The views that operations write, and those that they read.
fn views_of<'o>(ops: impl IntoIterator<Item = &'o dyn KernelOperation>) -> (Vec<View>, Vec<View>) {
    let mut writes = Vec::new();
    let mut reads = Vec::new();
    for op in ops {
        each_view(op, &mut |access, view| match access {
            Access::Read => reads.push(view),
            Access::Write | Access::WriteOpaque => writes.push(view),
        });
    }
    (writes, reads)
}

/// The place that belongs to a view of this call.
fn place(places: &[(View, View)], view: View) -> View {
    let found = places.iter().find(|(known, _)| *known == view);
    found.expect("a call names its views when it begins").1
}

/// Panics when a view that is written overlaps another one.
fn check_apart(writes: &[View], reads: &[View]) {
    let bytes = |view: &View| {
        let size = view.dtype.size();
        view.at * size..(view.at + view.len()) * size
    };
    let are_apart = |a: &View, b: &View| {
        let a = bytes(a);
        let b = bytes(b);
        a.end <= b.start || b.end <= a.start
    };
    for (index, write) in writes.iter().enumerate() {
        for other in writes[index + 1..].iter().chain(reads) {
            assert!(are_apart(write, other), "{write} is written, and {other} is in use");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::kernels::Cast;

    #[test]
    fn an_operation_gets_slices_of_its_declared_views_alone() {
        let x = View::floats(0, 3);
        let y = View::floats(16, 3);
        let mut memory = Arena::new(32).expect("little");
        memory.fill(x, &[1.0, 2.0, 3.0]);
        let kernels = CpuKernels::new(Some(&memory), Level::Portable);
        let call = kernels.call(&Cast { y, x }).expect("there is memory");
        let panics = |take: &dyn Fn()| catch_unwind(AssertUnwindSafe(take)).is_err();
        assert!(panics(&|| _ = call.read(y)), "it is written");
        assert!(panics(&|| _ = call.write(x)), "it is read");
        call.write(y).copy_from_slice(call.read(x));
        assert!(panics(&|| _ = call.write(y)), "it was taken");
    }
}
