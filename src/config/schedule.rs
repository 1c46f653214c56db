//! `[schedule]`: the order of visits, and what backward recomputes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use super::{Config, Deal, OnResume};
use crate::error::Error;
use crate::models::Save;

/// `[schedule]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// The order in which layers meet micro-batches. `relay`: all micro-batches through a layer,
    /// then the next layer (L2L). `resident`: one micro-batch through all layers, then the next
    /// one, as ordinary training does. `gpipe`, `1f1b`, `interleaved`: pipelines, in which each
    /// device has stages of layers that follow each other. `file`: a pipeline from `path`. All of
    /// these give the same result, bit for bit. `pipedream`: a pipeline of `stages` stages, in
    /// which each batch has an update of its own as soon as a stage has gone backward with it, and
    /// later batches of a `window` go on with older weights meanwhile. This changes the results,
    /// and may cost loss: see docs/delay.md. `2bw`: such a pipeline with `delay = 1`, in which each
    /// batch has several micro-batches and lacks one update. The results are those of all other
    /// kinds with `delay = 1`.
    pub kind: ScheduleKind,
    /// Stages on each device in a pipeline. 1 when absent, and 2 with `interleaved`.
    pub chunks: Option<u32>,
    /// With `kind = "pipedream"` or `"2bw"`: the stages, which are dealt to the devices by turns.
    /// At most the layers of the model. The result of `pipedream` depends on their number, and not
    /// on the devices. With `2bw` a batch has at least as many micro-batches as there are stages
    /// behind the first one.
    pub stages: Option<u32>,
    /// With `kind = "pipedream"` or `"2bw"`: the batches that pass the stages behind each other
    /// without a pause. Behind a window all updates are done, so runs stop, validate and write
    /// checkpoints there alone. Longer windows have fewer pauses, and with `pipedream` fewer
    /// batches that read new weights.
    pub window: Option<u32>,
    /// With `kind = "file"`: a CSV file as `torch.distributed.pipelining` writes it. Each row has
    /// the actions of a device, such as `2F0` and `2B0` (stage, forward or backward, micro-batch).
    pub path: Option<PathBuf>,
    /// The activations that backward recomputes. `true`: everything inside a layer, so that only
    /// the activations between layers are stored, and device memory does not depend on depth.
    /// `false`: nothing; all saved activations wait in the stash. `attention`: attention only; the
    /// activations of the feed-forward layer wait. `auto`: as `true`, but as many whole layers as
    /// `device.memory` has room for, from the last downwards, keep their activations on the device
    /// and recompute nothing. Without `device.memory`, layers fill what a GPU has free when the run
    /// starts, less 1 GiB; on a CPU, or with several ranks, it is `true`. Results are the same, bit
    /// for bit.
    pub recompute: Recompute,
    /// Of a model with experts: the most bundles of experts in one visit. Each layer is then
    /// visited once for all but its experts, and again for its bundles in turn. So the memory of
    /// the device does not grow with the number of experts. What these visits pass to each other
    /// stays on the device: for each channel of each token of a step about 11 bytes in 16 bits, and
    /// 17 in f32. Experts that no token chose are not uploaded, and neither are their gradients
    /// downloaded, if the stash is on the host: in the backward pass, and in the forward pass of
    /// steps of so few tokens that an eighth of the experts is likely to be idle. When absent, one
    /// visit has the whole layer. Results are the same, bit for bit.
    pub bundles: Option<usize>,
    /// How many updates old the weights are that a batch reads. 0: it waits for all updates. 1:
    /// updates run on the host while the next batch computes, on the weights before them. This
    /// changes the results, and costs loss, more at high learning rates: see docs/delay.md. The
    /// trained weights, as the device is sent them, and the gradients are then on the host once
    /// more.
    pub delay: u32,
    /// With `delay = 1`: the first batches, so many, wait for all updates. 0 when absent.
    pub delay_after: Option<u64>,
}

impl Default for ScheduleConfig {
    fn default() -> ScheduleConfig {
        let recompute = Recompute::AUTO;
        let kind = ScheduleKind::Relay;
        ScheduleConfig {
            kind,
            chunks: None,
            stages: None,
            window: None,
            path: None,
            recompute,
            bundles: None,
            delay: 0,
            delay_after: None,
        }
    }
}

/// The activations that the backward pass recomputes.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected true, false, \"attention\" or \"auto\"")]
pub enum Recompute {
    /// The whole layer, or nothing.
    Layer(bool),
    /// A part of the layer, or of the layers.
    Part(RecomputedPart),
}

/// The part that is recomputed.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RecomputedPart {
    /// The attention half of each layer.
    Attention,
    /// The layers whose activations have no room on the device.
    Auto,
}

impl Recompute {
    /// Only attention is recomputed.
    pub const ATTENTION: Recompute = Recompute::Part(RecomputedPart::Attention);

    /// The layers that have no room on the device are recomputed.
    pub const AUTO: Recompute = Recompute::Part(RecomputedPart::Auto);

    /// The activations that wait in the stash, if some do.
    pub fn keep(self) -> Option<Save> {
        match self {
            Recompute::Layer(true) | Recompute::AUTO => None,
            Recompute::Layer(false) => Some(Save::All),
            Recompute::ATTENTION => Some(Save::AllButAttention),
        }
    }
}

impl Recompute {
    /// The same, if no layer has room on the device.
    pub(crate) fn without_keeping(self) -> Recompute {
        if self == Recompute::AUTO { Recompute::Layer(true) } else { self }
    }
}

impl From<bool> for Recompute {
    fn from(all: bool) -> Recompute {
        Recompute::Layer(all)
    }
}

/// The kinds of schedule.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// All micro-batches through a layer, then the next.
    Relay,
    /// One micro-batch through all layers, then the next.
    Resident,
    /// All forward passes, then all backward passes.
    Gpipe,
    /// Forward and backward passes alternate.
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// Forward and backward passes alternate, with several stages on each device.
    Interleaved,
    /// A pipeline in a file.
    File,
    /// A pipeline in which each batch has an update of its own (PipeDream).
    Pipedream,
    /// Such a pipeline, in which each batch lacks one update (PipeDream-2BW).
    #[serde(rename = "2bw")]
    DoubleBuffered,
}

impl ScheduleKind {
    /// True if each device has stages of layers that follow each other.
    pub fn is_pipeline(self) -> bool {
        !matches!(self, ScheduleKind::Relay | ScheduleKind::Resident)
    }

    /// The name of a kind whose steps in the ring are windows: batches that have an update each.
    pub fn of_windows(self) -> Option<&'static str> {
        match self {
            ScheduleKind::Pipedream => Some("pipedream"),
            ScheduleKind::DoubleBuffered => Some("2bw"),
            _ => None,
        }
    }
}

impl ScheduleConfig {
    pub(super) const ON_RESUME: OnResume = OnResume::free("kind chunks path recompute bundles")
        .with_changes("delay delay_after stages window");

    /// The first training step that reads weights before their last update, if there is one.
    pub fn delay(&self) -> Option<u64> {
        (self.delay > 0).then(|| self.delay_after.unwrap_or(0))
    }

    /// Stages on each device of a pipeline.
    pub fn chunks(&self) -> u32 {
        let default = if self.kind == ScheduleKind::Interleaved { 2 } else { 1 };
        self.chunks.unwrap_or(default)
    }
}

impl Config {
    pub(super) fn check_schedule(&self) -> Result<(), Error> {
        let ScheduleConfig { kind, chunks, ref path, bundles, .. } = self.schedule;
        must(bundles != Some(0), "schedule.bundles", "at least 1")?;
        must(chunks != Some(0), "schedule.chunks", "at least 1")?;
        must(chunks.is_none_or(|chunks| chunks <= 1 << 16), "schedule.chunks", "at most 65536")?;
        let takes_chunks = matches!(kind, ScheduleKind::Gpipe | ScheduleKind::Interleaved);
        let problem = "is for schedule.kind = \"gpipe\" or \"interleaved\": leave it out";
        refuse(chunks.is_some() && !takes_chunks, "schedule.chunks", problem)?;
        let on_file = kind == ScheduleKind::File;
        let problem = "is missing: with schedule.kind = \"file\" it names the file";
        refuse(on_file && path.is_none(), "schedule.path", problem)?;
        let problem = "is for schedule.kind = \"file\": leave it out";
        refuse(!on_file && path.is_some(), "schedule.path", problem)?;
        self.check_delay()?;
        self.check_windows()?;
        refuse(
            kind.is_pipeline() && self.parallel.deal == Deal::Sequences,
            "parallel.deal",
            "must be \"layers\" with a pipeline, which says itself what each device does",
        )
    }

    fn check_delay(&self) -> Result<(), Error> {
        let ScheduleConfig { delay, delay_after, .. } = self.schedule;
        let what = "0 or 1: an update that has one whole step to run in is hidden, and a longer \
                    delay would only cost loss";
        must(delay <= 1, "schedule.delay", what)?;
        let problem = "is for schedule.delay = 1: leave it out";
        refuse(delay == 0 && delay_after.is_some(), "schedule.delay_after", problem)
    }
}
