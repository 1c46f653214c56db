//! A region of memory, cut into equal slots; and an arena, cut into regions.

use super::view::View;

/// The places of a region's slots in its arena. All sizes are in floats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    /// The first float of the first slot.
    pub(crate) at: usize,
    /// The number of slots.
    pub(crate) count: usize,
    /// Floats of each.
    pub(crate) slot_floats: usize,
}

impl Slots {
    /// The first `len` floats of a slot.
    ///
    /// # Panics
    /// The region has no slot of this number, or its slots are smaller.
    pub(crate) fn slot(&self, slot: u32, len: usize) -> View {
        let slot = slot as usize;
        assert!(slot < self.count && len <= self.slot_floats, "{len} floats of {slot} of {self:?}");
        View::floats(self.at + slot * self.slot_floats, len)
    }

    /// A whole slot.
    ///
    /// # Panics
    /// The region has no slot of this number.
    pub(crate) fn whole(&self, slot: u32) -> View {
        self.slot(slot, self.slot_floats)
    }

    pub(crate) fn all(&self) -> View {
        View::floats(self.at, self.floats())
    }

    /// Floats of all slots.
    pub(crate) fn floats(&self) -> usize {
        self.count * self.slot_floats
    }
}

/// The plan of an arena: its floats, and its regions of slots with their holders.
#[derive(Clone, Debug, Default)]
pub(crate) struct ArenaPlan {
    pub(crate) floats: usize,
    pub(crate) slots: Vec<(&'static str, Slots)>,
}

impl ArenaPlan {
    /// Adds the regions of another plan to this one, from float `from` on.
    pub(crate) fn place(&mut self, from: usize, other: &ArenaPlan) {
        let slots = other.slots.iter();
        self.slots
            .extend(slots.map(|&(holder, slots)| (holder, Slots { at: from + slots.at, ..slots })));
        self.floats = self.floats.max(from + other.floats);
    }
}
