//! The keys of `[schedule]`: the order of visits, and what backward recomputes.

use serde::{Deserialize, Serialize};

use crate::models::Save;

/// `[schedule]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// `relay`: all micro-batches through a layer, then the next layer (L2L). `resident`: one
    /// micro-batch through all layers, then the next one, as ordinary training does. Both give the
    /// same result, bit for bit.
    pub kind: ScheduleKind,
    /// What backward recomputes. `true`: everything inside a layer, so only the activations between
    /// layers are stored. `false`: nothing; all saved activations wait in the stash. `attention`:
    /// attention only; those of the feed-forward layer wait.
    pub recompute: Recompute,
}

impl Default for ScheduleConfig {
    fn default() -> ScheduleConfig {
        ScheduleConfig { kind: ScheduleKind::Relay, recompute: Recompute::Layer(true) }
    }
}

/// See [`ScheduleConfig::recompute`].
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected true, false or \"attention\"")]
pub enum Recompute {
    /// The whole layer, or nothing.
    Layer(bool),
    /// A part of the layer.
    Part(RecomputedPart),
}

/// The part of a layer that is recomputed.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RecomputedPart {
    /// The attention half.
    Attention,
}

impl Recompute {
    /// Only attention is recomputed.
    pub const ATTENTION: Recompute = Recompute::Part(RecomputedPart::Attention);

    /// The activations that wait in the stash, if any.
    pub fn keep(self) -> Option<Save> {
        match self {
            Recompute::Layer(true) => None,
            Recompute::Layer(false) => Some(Save::All),
            Recompute::Part(RecomputedPart::Attention) => Some(Save::AllButAttention),
        }
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
}
