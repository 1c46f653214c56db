//! Which keys may have another value when a run resumes. Each section lists its own.

use super::{
    CompressionConfig, DataConfig, DepthConfig, DeviceConfig, ExpertsConfig, LossScaleConfig,
    ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, StashConfig,
    StepConfig, TrainConfig,
};

/// The keys of a section that may have another value, with spaces between their names. `*` is all
/// keys. A key in neither list must have the value that it had.
#[derive(Clone, Copy)]
pub(crate) struct OnResume {
    free: &'static str,
    with_changes: &'static str,
}

impl OnResume {
    /// Keys that change when and where something is computed and not what, or whose effect is
    /// checked separately.
    pub(super) const fn free(keys: &'static str) -> OnResume {
        OnResume { free: keys, with_changes: "" }
    }

    /// Keys that a run may change if it resumes with changes, because the weights and the
    /// optimizer's states stay valid.
    pub(super) const fn with_changes(self, keys: &'static str) -> OnResume {
        OnResume { free: self.free, with_changes: keys }
    }

    /// The lists of a section.
    pub(crate) fn of(section: &str) -> OnResume {
        match section {
            "model" => ModelConfig::ON_RESUME,
            "data" => DataConfig::ON_RESUME,
            "step" => StepConfig::ON_RESUME,
            "train" => TrainConfig::ON_RESUME,
            "objective" => ObjectiveConfig::ON_RESUME,
            "experts" => ExpertsConfig::ON_RESUME,
            "optimizer" => OptimizerConfig::ON_RESUME,
            "loss_scale" => LossScaleConfig::ON_RESUME,
            "device" => DeviceConfig::ON_RESUME,
            "depth" => DepthConfig::ON_RESUME,
            "parallel" => ParallelConfig::ON_RESUME,
            "compression" => CompressionConfig::ON_RESUME,
            "stash" => StashConfig::ON_RESUME,
            "schedule" => ScheduleConfig::ON_RESUME,
            "channels" | "checkpoint" | "eps" | "export" | "log" | "metrics" | "validation"
            | "watchdog" => OnResume::free("*"),
            _ => OnResume::free(""),
        }
    }

    /// True if the key may have another value.
    pub(crate) fn is_free(self, key: &str) -> bool {
        self.free == "*" || has(self.free, key)
    }

    /// True if the key may have another value in a run that resumes with changes.
    pub(crate) fn may_change(self, key: &str) -> bool {
        has(self.with_changes, key)
    }
}

fn has(list: &str, key: &str) -> bool {
    list.split(' ').any(|name| name == key)
}
