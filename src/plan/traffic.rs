//! The bytes that a step moves: between the host and devices, between ranks, and to and from the
//! EPS's file.

use l2l_actors::schedule::{BlockId, StepPlan};

use super::share::{Exchanged, RankShare};
use super::spec::PlanSpec;
use crate::eps::cut;
use crate::fabric::parts::Parts;

/// Bytes that one device moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkBytes {
    /// From the host to the device.
    pub upload: u64,
    /// From the device to the host.
    pub download: u64,
    /// From other devices to this one.
    pub peers: u64,
}

impl LinkBytes {
    /// The sum over two devices, or over two steps.
    pub(crate) fn plus(self, other: LinkBytes) -> LinkBytes {
        LinkBytes {
            upload: self.upload + other.upload,
            download: self.download + other.download,
            peers: self.peers + other.peers,
        }
    }
}

/// Bytes that a rank sends to the others in a training step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FabricBytes {
    /// Its parts of blocks, each time that a block is completed.
    pub blocks: u64,
    /// The others' parts of gradients. Rows of the embedding's gradient are not counted.
    pub gradients: u64,
}

/// Bytes that a step of the longest sequences moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedTraffic {
    /// From the host to all devices.
    pub upload_bytes: u64,
    /// From all devices to the host.
    pub download_bytes: u64,
    /// Those of both that are activations and their gradients, as they pass from visit to visit.
    pub activation_bytes: u64,
    /// The bytes of each device.
    pub link_bytes: Vec<LinkBytes>,
    /// From this rank to the others.
    pub fabric_bytes: FabricBytes,
    /// Read from the EPS's file.
    pub read_bytes: u64,
    /// Written to the EPS's file.
    pub written_bytes: u64,
}

impl PlannedTraffic {
    /// The traffic of a step that is walked like this.
    pub(super) fn of(spec: &PlanSpec<'_>, walked: &StepPlan) -> PlannedTraffic {
        let (read_bytes, written_bytes) = walked.file_bytes(spec.settings.deferred());
        let links = walked.walks.iter().map(|walk| LinkBytes {
            upload: walk.traffic.to_device(),
            download: walk.traffic.from_device(),
            peers: walk.traffic.shards,
        });
        PlannedTraffic {
            upload_bytes: walked.traffic.to_device(),
            download_bytes: walked.traffic.from_device(),
            activation_bytes: walked.traffic.inputs.saturating_add(walked.traffic.outputs),
            link_bytes: links.collect(),
            fabric_bytes: fabric_bytes(spec, walked),
            read_bytes,
            written_bytes,
        }
    }
}

/// What this rank sends in a step, without rows of the embedding's gradient.
fn fabric_bytes(spec: &PlanSpec<'_>, walked: &StepPlan) -> FabricBytes {
    let RankShare { rank, ranks } = spec.share;
    if ranks == 1 {
        return FabricBytes::default();
    }
    // This rank's share of the bytes of a whole block or gradient.
    let own = |parts: &Parts, bytes: u64| {
        let element_bytes = bytes / parts.len().max(1) as u64;
        parts.of(rank).len() as u64 * element_bytes
    };
    let block = |id: BlockId| {
        let parts = cut(&spec.model.blocks[id.0 as usize], ranks);
        u64::from(ranks - 1) * own(&parts, walked.schedule.block(id).weight_bytes)
    };
    let gradient = |id: BlockId| {
        let tensors = &spec.model.blocks[id.0 as usize];
        let parts = cut(tensors, ranks);
        if let Some(kind) = spec.settings.compression() {
            return kind.sent_bytes(tensors, &parts, rank, ranks);
        }
        let bytes = walked.schedule.block(id).gradient_bytes;
        bytes - own(&parts.clipped(tensors.trained_len()), bytes)
    };
    let Exchanged { blocks, gradients } = Exchanged::of(walked);
    FabricBytes {
        blocks: blocks.into_iter().map(block).sum(),
        gradients: gradients.into_iter().flatten().map(gradient).sum(),
    }
}
