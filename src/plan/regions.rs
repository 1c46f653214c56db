//! The one list of memory regions. Addresses, the plan's terms, the pinned share and the high-water
//! marks all follow from it.

use super::Term;
use crate::tensor::{ALIGNED, ArenaPlan, Slots, View};

/// What a memory region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Published blocks on the device.
    Weights,
    /// Gradient accumulators on the device.
    Gradients,
    /// Boundaries that a visit reads.
    Inputs,
    /// Boundaries that a visit writes.
    Outputs,
    /// Keys, values or states, and their gradients, passed between chunks of one long sequence.
    ChunkState,
    /// Intermediates of the kernels that run.
    Workspace,
    /// Elements of 16 bits, widened to floats for one operation of a CPU device.
    Widened,
    /// Memory that a device needs beside that of the ring.
    Overhead,
    /// Boundaries between visits.
    Stash,
    /// Boundaries that visits leave on the device, for later visits of it.
    Kept,
    /// Keys and values of all layers and sequences, while text is generated.
    KvCache,
    /// Landing blocks: gradients on their way to the EPS.
    Landing,
    /// Gradients of earlier groups of micro-batches, which wait for those of later groups.
    Parts,
    /// Blocks that were read from the EPS's file, or completed from the parts of all ranks.
    FileReads,
    /// Blocks with their optimizer states, read from the EPS's file to be updated.
    FileStates,
    /// The file tier's own buffer.
    FileBuffer,
    /// Master weights.
    Masters,
    /// The optimizer's states.
    OptimizerStates,
    /// Gradients that wait for the global norm, or for another contribution.
    GradientRegions,
    /// Error feedback of compression, and factors of matrices.
    GradientErrors,
    /// Masters of other formats as f32, for update rules that need whole floats.
    UnpackedMasters,
    /// Workspace of the update rule.
    UpdateWorkspace,
    /// Shares of this rank's part of a gradient that other ranks send. With compression: its
    /// workspace.
    ReceivedGradient,
    /// Rows of the embedding's gradient that other ranks send.
    ReceivedRows,
    /// Lengths, kinds and documents of micro-batches, on their way to a device.
    BatchMetadata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The device's arena.
    Device,
    /// The worker's arena on the host.
    Host,
    /// Other memory of the host: that of the EPS, of updates or of a device's driver.
    HostOwn,
    File,
}

/// The memory of one holder in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) holder: Holder,
    pub(crate) place: Side,
    /// Its address in the arena, if the place has one.
    pub(crate) slots: Slots,
}

/// All regions, in the order in which they lie in their arenas.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions {
    list: Vec<Region>,
    device_end: usize,
    host_end: usize,
}

/// Names of the terms of each place, in the order in which plans show them.
pub(crate) const DEVICE_TERMS: [&str; 9] = [
    "weights",
    "gradients",
    "inputs",
    "outputs",
    "keys_and_values",
    "workspace",
    "stash",
    "device_overhead",
    "kv_cache",
];
pub(crate) const HOST_TERMS: [&str; 11] = [
    "file_reads",
    "file_states",
    "file_buffer",
    "masters",
    "optimizer_states",
    "gradient_regions",
    "landing",
    "stash",
    "update_workspace",
    "batch_metadata",
    "kv_cache",
];
const FILE_TERMS: [&str; 3] = ["masters", "optimizer_states", "gradient_regions"];

const FLOAT: u64 = size_of::<f32>() as u64;

impl Holder {
    /// The term of the plan that the region counts to: a name that tools rely on.
    fn term(self) -> &'static str {
        match self {
            Holder::Weights => "weights",
            Holder::Gradients => "gradients",
            Holder::Inputs => "inputs",
            Holder::Outputs => "outputs",
            Holder::ChunkState => "keys_and_values",
            Holder::Workspace | Holder::Widened => "workspace",
            Holder::Overhead => "device_overhead",
            Holder::Stash | Holder::Kept => "stash",
            Holder::KvCache => "kv_cache",
            Holder::Landing | Holder::Parts => "landing",
            Holder::FileReads => "file_reads",
            Holder::FileStates => "file_states",
            Holder::FileBuffer => "file_buffer",
            Holder::Masters => "masters",
            Holder::OptimizerStates => "optimizer_states",
            Holder::GradientRegions | Holder::GradientErrors => "gradient_regions",
            Holder::UnpackedMasters
            | Holder::UpdateWorkspace
            | Holder::ReceivedGradient
            | Holder::ReceivedRows => "update_workspace",
            Holder::BatchMetadata => "batch_metadata",
        }
    }

    /// The ring's pool that hands out its slots.
    fn pool(self) -> Option<&'static str> {
        match self {
            Holder::Weights | Holder::Gradients | Holder::Inputs | Holder::Outputs => {
                Some(self.term())
            }
            _ => None,
        }
    }
}

impl Regions {
    /// Adds a region behind the other regions of its arena.
    pub(super) fn add(&mut self, holder: Holder, place: Side, count: usize, slot_floats: usize) {
        let end = match place {
            Side::Device => &mut self.device_end,
            Side::Host => &mut self.host_end,
            Side::HostOwn | Side::File => &mut 0,
        };
        let slots = Slots { at: *end, count, slot_floats };
        *end += slots.floats().next_multiple_of(ALIGNED);
        self.list.push(Region { holder, place, slots });
    }

    /// Adds a region, unless it is empty. Then the plan does not list it.
    pub(super) fn add_if_any(&mut self, holder: Holder, place: Side, floats: usize) {
        if floats > 0 {
            self.add(holder, place, 1, floats);
        }
    }

    fn find(&self, holder: Holder, place: Side) -> Option<&Region> {
        self.list.iter().find(|region| region.holder == holder && region.place == place)
    }

    /// A holder's slots in a place. There are none if it has no region there.
    pub(crate) fn slots(&self, holder: Holder, place: Side) -> Slots {
        self.find(holder, place).map_or(Slots::default(), |region| region.slots)
    }

    /// All of a holder's memory on the device.
    pub(crate) fn on_device(&self, holder: Holder) -> View {
        self.slots(holder, Side::Device).all()
    }

    /// The arena of a device, or of the worker on the host.
    pub(crate) fn arena(&self, place: Side) -> ArenaPlan {
        let floats = match place {
            Side::Device => self.device_end,
            Side::Host => self.host_end,
            Side::HostOwn | Side::File => 0,
        };
        let here = self.list.iter().filter(|region| region.place == place);
        let slots = here.map(|region| (region.holder.term(), region.slots)).collect();
        ArenaPlan { floats, slots }
    }

    /// Floats of the device's arena.
    pub(crate) fn device_floats(&self) -> usize {
        self.device_end
    }

    /// Bytes of the host that a GPU copies from and to: the arena, masters and batch metadata.
    pub(super) fn copied_bytes(&self) -> u64 {
        let is_copied = |region: &&Region| {
            region.place == Side::HostOwn
                && matches!(region.holder, Holder::Masters | Holder::BatchMetadata)
        };
        let own: usize =
            self.list.iter().filter(is_copied).map(|region| region.slots.floats()).sum();
        (self.host_end + own) as u64 * FLOAT
    }

    /// Terms of the device, of the host, and of files.
    pub(super) fn terms(&self) -> [Vec<Term>; 3] {
        let planned = |region: &Region| region.slots.floats();
        [
            self.sums(&DEVICE_TERMS, &[Side::Device], planned),
            self.sums(&HOST_TERMS, &[Side::Host, Side::HostOwn], planned),
            self.sums(&FILE_TERMS, &[Side::File], planned),
        ]
    }

    /// High-water marks of the device's terms. `slots_of_pool` gives the most slots that a pool
    /// handed out at once, and `workspace` the most floats. All other regions are always in use.
    pub(crate) fn peaks(
        &self,
        slots_of_pool: impl Fn(&str) -> usize,
        workspace: usize,
    ) -> Vec<Term> {
        let used = |region: &Region| match (region.holder, region.holder.pool()) {
            (_, Some(pool)) => slots_of_pool(pool) * region.slots.slot_floats,
            (Holder::Workspace, _) => workspace,
            _ => region.slots.floats(),
        };
        self.sums(&DEVICE_TERMS, &[Side::Device], used)
    }

    /// A term for each name that has a region in these places, even an empty one.
    fn sums(
        &self,
        names: &[&'static str],
        places: &[Side],
        floats: impl Fn(&Region) -> usize,
    ) -> Vec<Term> {
        let mut terms = Vec::new();
        for &name in names {
            let of_term =
                |region: &&Region| places.contains(&region.place) && region.holder.term() == name;
            let mut regions = self.list.iter().filter(of_term).peekable();
            if regions.peek().is_some() {
                let floats: u64 = regions.map(|region| floats(region) as u64).sum();
                terms.push(Term { name, bytes: floats * FLOAT });
            }
        }
        terms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_of_an_arena_do_not_overlap_and_sum_to_its_terms() {
        let mut regions = Regions::default();
        regions.add(Holder::Weights, Side::Device, 2, 48);
        regions.add(Holder::Landing, Side::Host, 1, 32);
        regions.add(Holder::Outputs, Side::Device, 3, 16);
        regions.add(Holder::ChunkState, Side::Device, 1, 32);
        regions.add(Holder::Masters, Side::HostOwn, 1, 80);
        regions.add(Holder::Stash, Side::Device, 1, 0);
        regions.add_if_any(Holder::Overhead, Side::Device, 0);
        let [weights, outputs, chunk_state] =
            [Holder::Weights, Holder::Outputs, Holder::ChunkState]
                .map(|holder| regions.slots(holder, Side::Device));
        assert_eq!([weights.at, outputs.at, chunk_state.at], [0, 96, 144]);
        assert_eq!((regions.device_floats(), regions.arena(Side::Host).floats), (176, 32));
        let [device, host, file] = regions.terms();
        let named: Vec<_> = device.iter().map(|term| (term.name, term.bytes)).collect();
        // A term of an empty region is listed.
        assert_eq!(
            named,
            [("weights", 384), ("outputs", 192), ("keys_and_values", 128), ("stash", 0)]
        );
        assert_eq!(device.iter().map(|term| term.bytes).sum::<u64>(), 176 * FLOAT);
        assert_eq!(host.len() + file.len(), 2);
        assert_eq!(regions.copied_bytes(), (32 + 80) * FLOAT);
    }

    #[test]
    fn peaks_count_slots_that_were_handed_out() {
        let mut regions = Regions::default();
        regions.add(Holder::Weights, Side::Device, 4, 16);
        regions.add(Holder::Workspace, Side::Device, 1, 64);
        regions.add(Holder::Stash, Side::Device, 1, 32);
        let peaks = regions.peaks(|pool| if pool == "weights" { 3 } else { 0 }, 40);
        let bytes: Vec<_> = peaks.iter().map(|term| term.bytes / FLOAT).collect();
        assert_eq!(bytes, [48, 40, 32]);
    }
}
