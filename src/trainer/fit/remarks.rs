//! Warnings about settings that have no effect in a run, or hardly the one that was meant.

use crate::config::{
    Config, DataConfig, OptimizerConfig, RateSchedule, ScheduleConfig, ScheduleKind,
};
use crate::models::{Head, Model};

/// The warnings about a run of `steps` steps, of which `done` are done.
pub(super) fn remarks(config: &Config, model: &Model, steps: u64, done: u64) -> Vec<String> {
    let mut remarks = Vec::new();
    let OptimizerConfig { warmup_steps, learning_rate, min_learning_rate, schedule, .. } =
        config.optimizer;
    if min_learning_rate > 0.0 && schedule == RateSchedule::Constant {
        remarks.push(format!(
            "optimizer.min_learning_rate is {min_learning_rate:e}, and has no effect: \
             optimizer.schedule is \"constant\""
        ));
    }
    if warmup_steps > steps {
        remarks.push(format!(
            "optimizer.warmup_steps is {warmup_steps}, and the run has {steps} steps: the \
             learning rate does not reach {learning_rate:e}"
        ));
    }
    if done >= steps {
        remarks.push(format!(
            "the run is complete: it has done all of its {steps} steps; to train on, set more of \
             them and resume with --resume-with-changes"
        ));
    }
    let mask = config.data.mask_probability;
    let masks = model.shape.head == Head::Masked && !config.data.train.is("random");
    if mask != DataConfig::default().mask_probability && !masks {
        remarks.push(format!(
            "data.mask_probability is {mask}, and has no effect: this run masks no tokens"
        ));
    }
    if config.schedule.delay().is_some() {
        let rule = config.optimizer.kind.name();
        remarks.push(format!(
            "schedule.delay is 1: a batch reads the weights before the last update, and with \
             optimizer.kind = \"{rule}\" and a learning rate of {learning_rate:e} this may cost \
             loss, more at higher rates (docs/delay.md)"
        ));
    }
    remarks.extend(remarks_on_windows(config));
    if let Some(factor) = config.experts.capacity_factor.filter(|factor| *factor < 1.0) {
        remarks.push(format!(
            "experts.capacity_factor is {factor}: an expert takes less than its even share of the \
             tokens, so choices are dropped however well the experts are balanced; Switch has 1.25 \
             and GShard 2.0"
        ));
    }
    remarks
}

/// The warnings about windows: what they cost or save, and devices without a stage.
fn remarks_on_windows(config: &Config) -> Vec<String> {
    let ScheduleConfig { kind, stages: Some(stages), .. } = config.schedule else {
        return Vec::new();
    };
    let devices = config.devices();
    let lacks = (kind == ScheduleKind::Pipedream && stages > 1).then(|| {
        format!(
            "schedule.kind is \"pipedream\": in the first of {stages} stages a batch reads weights \
             without the last {} updates, which may cost loss, and the last stage waits for each \
             update and upload (docs/delay.md)",
            stages - 1
        )
    });
    let saves = (kind == ScheduleKind::DoubleBuffered && devices > 1).then(|| {
        let behind = f64::from(stages.min(devices) - 1);
        let each = config.step.batch.div_ceil(config.step.micro_batch) as f64;
        let share = |micro_batches: f64| 100.0 * behind / (micro_batches + behind);
        format!(
            "schedule.kind is \"2bw\": by its order each device is idle for {:.0} % of a \
             window, and for {:.0} % of each step with \"1f1b\", which computes the same \
             (docs/delay.md)",
            share(each * f64::from(config.window())),
            share(each)
        )
    });
    let idle = (devices > stages).then(|| {
        format!(
            "schedule.stages is {stages}, and there are {devices} devices: {} of them have no \
             stage, and nothing to do",
            devices - stages
        )
    });
    [lacks, saves, idle].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::families;

    #[test]
    fn settings_without_effect_are_named() {
        let model = Model::new(families::gpt2([1, 16, 2, 24, 50, 9]));
        let mut config = Config::default();
        assert_eq!(remarks(&config, &model, 10, 9), [""; 0]);
        config.optimizer.warmup_steps = 11;
        config.optimizer.min_learning_rate = 1e-5;
        config.optimizer.schedule = RateSchedule::Constant;
        config.data.mask_probability = 0.3;
        config.experts.capacity_factor = Some(0.9);
        config.schedule.delay = 1;
        config.schedule.kind = ScheduleKind::Pipedream;
        config.schedule.stages = Some(4);
        let all = remarks(&config, &model, 10, 10);
        let said = [
            "is 1e-5",
            "warmup_steps is 11",
            "complete",
            "is 0.3",
            "delay is 1",
            "the first of 4 stages a batch reads weights without the last 3 updates",
            "capacity_factor is 0.9",
        ];
        assert_eq!(all.len(), said.len());
        for (remark, says) in all.iter().zip(said) {
            assert!(remark.contains(says), "{remark}");
        }
        // One stage lacks nothing.
        config.schedule.stages = Some(1);
        assert_eq!(remarks_on_windows(&config), [""; 0]);
        config.device.count = Some(3);
        let idle = remarks_on_windows(&config);
        assert!(idle.len() == 1 && idle[0].contains("3 devices: 2 of them"), "{idle:?}");
        // A window of 20 batches of 8 micro-batches, through three stages.
        config.schedule.kind = ScheduleKind::DoubleBuffered;
        (config.schedule.stages, config.schedule.window) = (Some(3), Some(20));
        let saves = remarks_on_windows(&config);
        assert!(saves.len() == 1 && saves[0].contains("idle for 1 % of a window, and for 20 % of"));
        (config.schedule.stages, config.device.count) = (Some(4), None);
        config.schedule.kind = ScheduleKind::Pipedream;
        config.experts.capacity_factor = Some(1.0);
        assert_eq!(remarks(&config, &model, 10, 10).len(), said.len() - 1);
    }
}
