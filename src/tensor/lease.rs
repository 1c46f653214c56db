//! Leases: access of one operation of the ring to an arena.

use super::arena::Arena;
use super::view::View;

/// The right to read and write the slots that the ring granted to one operation.
///
/// The ring grants slots by credit: while an operation runs, no other operation touches the slots
/// that it writes, or writes the slots that it reads (crate `l2l-actors`, kept by fences and tested
/// there). `new` makes this promise once; the methods then return slices.
#[derive(Clone, Copy)]
pub(crate) struct Lease<'a> {
    arena: &'a Arena,
}

impl<'a> Lease<'a> {
    /// A lease of an arena, for one operation.
    ///
    /// # Safety
    /// Its owner reads and writes only views of slots that the ring granted to the operation. While
    /// the slices live, no other access writes a view that is read here, or touches one that is
    /// written here.
    pub(crate) unsafe fn new(arena: &'a Arena) -> Lease<'a> {
        Lease { arena }
    }

    /// The floats of a view.
    pub(crate) fn read(&self, view: View) -> &'a [f32] {
        // SAFETY: they are not written meanwhile, by the promise of `new`.
        unsafe { self.arena.read(view) }
    }

    /// The floats of a view, to write.
    pub(crate) fn write(&self, view: View) -> &'a mut [f32] {
        // SAFETY: no other access touches them meanwhile, by the promise of `new`.
        unsafe { self.arena.write(view) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{ArenaPlan, Slots};

    /// Two threads write a slot each and read a third one, as lanes do.
    #[test]
    fn operations_share_an_arena() {
        let slots = Slots { at: 0, count: 3, slot_floats: 20 };
        let plan = ArenaPlan { floats: 64, slots: vec![("inputs", slots)] };
        let mut arena = Arena::planned(&plan).expect("little");
        arena.values_mut(slots.whole(0)).fill(2.0);
        std::thread::scope(|scope| {
            for slot in [1, 2] {
                let arena = &arena;
                scope.spawn(move || {
                    // SAFETY: each thread writes a slot of its own, and none writes the first.
                    let lease = unsafe { Lease::new(arena) };
                    let to = lease.write(slots.whole(slot));
                    let from = lease.read(slots.whole(0));
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from * slot as f32);
                    arena.check_zones();
                });
            }
        });
        assert!(arena.values(slots.whole(1)).iter().all(|&value| value == 2.0));
        assert!(arena.values(slots.whole(2)).iter().all(|&value| value == 4.0));
    }
}
