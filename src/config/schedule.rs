//! `[schedule]`: in which order visits come, and what they compute again.

use serde::{Deserialize, Serialize};

use crate::models::Save;

/// `[schedule]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// `relay`: all micro-batches through a layer, then the next. `resident`: one micro-batch
    /// through all layers, then the next, as ordinary training does.
    pub kind: ScheduleKind,
    /// True: backward computes a layer's intermediates again. False: they wait in the stash.
    /// `attention`: attention's are computed again, the feed-forward's wait.
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
    /// All of a layer, or nothing.
    Layer(bool),
    /// A part of it.
    Part(RecomputedPart),
}

/// What alone is computed again.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RecomputedPart {
    /// Attention.
    Attention,
}

impl Recompute {
    /// Attention alone.
    pub const ATTENTION: Recompute = Recompute::Part(RecomputedPart::Attention);

    /// What waits in the stash, if anything.
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

/// The schedules there are.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// All micro-batches through a layer, then the next.
    Relay,
    /// One micro-batch through all layers, then the next.
    Resident,
}
