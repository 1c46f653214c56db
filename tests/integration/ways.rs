//! The ways in which one case can be run: none of them may change a bit.

use l2l::Config;
use l2l::config::{
    ChannelsConfig, CompressionKind, Deal, Recompute, ScheduleKind, StashPlace, Transfer,
};
use proptest::prelude::*;

use crate::exact::Case;
use crate::plan::limit;

/// How it is trained: this must not change a bit.
#[derive(Clone, Debug)]
pub(crate) struct Ways {
    pub(crate) kind: ScheduleKind,
    pub(crate) channels: ChannelsConfig,
    pub(crate) place: StashPlace,
    pub(crate) recompute: Recompute,
    /// With `recompute = "auto"`: the share of the memory for all kept layers that there is.
    pub(crate) room: f64,
    pub(crate) on_file: bool,
    pub(crate) devices: u32,
    pub(crate) deal: Deal,
    pub(crate) sharded: bool,
    pub(crate) chunks: Option<u32>,
    /// Bundles of experts that a visit has, if a block has experts. `None`: all.
    pub(crate) bundles: Option<usize>,
    pub(crate) threads: usize,
    pub(crate) link: bool,
    /// Pieces of a block, if it is cut into as many slices or more.
    pub(crate) tensor: u32,
}

/// The baseline: resident, everything on the device, one thread.
pub(crate) fn baseline() -> Ways {
    Ways {
        kind: ScheduleKind::Resident,
        channels: ChannelsConfig { weights: 1000, gradients: 2, reduced: 2, stash: 4 },
        place: StashPlace::Device,
        recompute: false.into(),
        room: 0.0,
        on_file: false,
        devices: 1,
        deal: Deal::Layers,
        sharded: false,
        chunks: None,
        bundles: None,
        threads: 1,
        link: false,
        tensor: 1,
    }
}

pub(crate) fn ways() -> impl Strategy<Value = Ways> {
    let channels = (prop::sample::select(vec![1_u32, 2, 3, 1000]), 1..=2_u32, 1..=3_u32);
    let stash = prop::sample::select(vec![1_u32, 4]);
    let kinds = prop::sample::select(vec![
        ScheduleKind::Relay,
        ScheduleKind::Resident,
        ScheduleKind::Gpipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
    ]);
    let deals = prop::sample::select(vec![Deal::Layers, Deal::Sequences]);
    let kinds = (kinds, deals, any::<bool>());
    let places = prop::sample::select(vec![StashPlace::Device, StashPlace::Host, StashPlace::Auto]);
    let auto = prop::sample::select(vec![0.0, 0.4, 0.7, 1.0]);
    let others = vec![true.into(), false.into(), Recompute::ATTENTION];
    let others = prop::sample::select(others).prop_map(|recompute| (recompute, 0.0));
    let recompute = prop_oneof![3 => others, 2 => auto.prop_map(|room| (Recompute::AUTO, room))];
    let bundles = prop::option::weighted(0.7, 1..=3_usize);
    let tensor = prop::sample::select(vec![1_u32, 2, 4]);
    let threads = (1..=4_u32, 1..=2_usize, bundles, tensor);
    let flags = (recompute, threads, prop::bool::weighted(0.2), prop::bool::weighted(0.4));
    (kinds, channels, stash, places, flags).prop_map(
        |(
            (kind, deal, sharded),
            (weights, gradients, reduced),
            stash,
            place,
            ((recompute, room), (devices, threads, bundles, tensor), link, on_file),
        )| Ways {
            kind,
            channels: ChannelsConfig { weights, gradients, reduced, stash },
            place,
            recompute,
            room,
            on_file,
            devices,
            deal,
            sharded,
            chunks: None,
            bundles,
            threads,
            link,
            tensor,
        },
    )
}

impl Ways {
    /// Sets these ways in a config, all but the tier.
    pub(crate) fn set(&self, config: &mut Config, has_experts: bool) {
        config.schedule.kind = self.kind;
        config.schedule.recompute = self.recompute;
        config.channels = self.channels;
        config.device.count = Some(self.devices);
        config.parallel.deal = self.deal;
        config.parallel.transfer = if self.sharded { Transfer::Sharded } else { Transfer::Whole };
        config.schedule.chunks = self.chunks.filter(|_| self.kind.is_pipeline());
        config.schedule.bundles = self.bundles.filter(|_| has_experts);
        // Several devices pass boundaries on through the host.
        let is_refused = self.devices > 1 && self.place == StashPlace::Device;
        config.stash.place = if is_refused { StashPlace::Host } else { self.place };
        config.parallel.tensor = self.tensor;
        config.device.threads = Some(self.threads);
        config.device.link = self.link.then(|| "2GB/s".to_string());
        limit(config, self.room);
    }

    /// The same for one of so many ranks, of which each has some of the groups.
    pub(crate) fn for_ranks(mut self, case: &Case, ranks: u32) -> Ways {
        let spans = l2l_actors::schedule::group_spans(case.groups, ranks);
        self.room = 2.0; // of one process: more than enough for a rank
        let fewest = spans.iter().map(|span| span.len() as u32).min().expect("there is a rank");
        let most = spans.iter().map(|span| span.len() as u32).max().expect("there is a rank");
        if fewest < most {
            // Ranks with different numbers of groups exchange the same only in a relay.
            (self.kind, self.devices) = (ScheduleKind::Relay, 1);
        }
        let turns = case.batch.div_ceil(case.micro_batch) as u32 / case.groups;
        let micro_batches = (turns * fewest) as usize;
        let part = Case { batch: micro_batches * case.micro_batch, groups: fewest, ..case.clone() };
        self.for_case(&part)
    }

    /// The nearest way in which this case can be run.
    pub(crate) fn for_case(self, case: &Case) -> Ways {
        // Behind a block of experts come its norm and its head alone.
        let layers = if case.experts.is_some() { case.layers as u32 + 2 } else { u32::MAX };
        let is_whole = case.encodings.2 != CompressionKind::None;
        let tensor = if is_whole { 1 } else { self.tensor.min(case.slices) };
        let turns = case.batch.div_ceil(case.micro_batch) as u32;
        Ways { tensor, ..self.for_sizes(layers, turns, case.groups) }
    }

    /// The nearest way for so many layers with weights, micro-batches and groups, of which none is
    /// visited in pieces.
    pub(crate) fn for_sizes(mut self, layers: u32, turns: u32, groups: u32) -> Ways {
        self.tensor = 1;
        self.devices = self.devices.min(layers);
        if self.kind.is_pipeline() {
            self.deal = Deal::Layers;
        }
        if self.deal == Deal::Sequences {
            self.devices = self.devices.min(groups);
        }
        self.sharded &= self.deal == Deal::Sequences && self.kind == ScheduleKind::Relay;
        if self.kind == ScheduleKind::Interleaved {
            self.devices = self.devices.min(2); // of two stages each
            let rounds = (turns / self.devices).max(1);
            let is_cut = turns.is_multiple_of(rounds) && 2 * self.devices <= layers;
            self.chunks = Some(2).filter(|_| is_cut);
            if self.chunks.is_none() {
                self.kind = ScheduleKind::OneForwardOneBackward;
            }
        }
        self
    }
}
