//! The part of a setting's device memory that grows with the model's depth. It is found from plans
//! for deeper models, so no list of keys is needed.

use l2l::config::Recompute;
use l2l::models::{Model, Shape};
use l2l::plan::Term;
use l2l::{Config, Plan, model_of};

use super::trial::Settings;

/// The smallest depth whose plan is compared with that of twice the depth. A shallower model may
/// have fewer blocks than a pool has slots.
const DEEP: usize = 8;

/// Bytes of the device that each further layer of the model adds, term by term. Empty if it adds
/// none, or if the settings work for one depth alone (a schedule's file).
pub(super) fn of(config: &Config, model: &Model, settings: Settings) -> Vec<Term> {
    let at = |layers: usize| {
        let shape = Shape { layers, chunk_positions: settings.chunk, ..model.shape };
        let deeper = model_of(config, shape).ok()?;
        let mut settings = settings;
        // A device of a pipeline holds all its layers, also those that a deeper model adds.
        if settings.layout.kind.is_pipeline() {
            settings.depths[0] = settings.depths[0].max(deeper.layers.len() as u32);
        }
        let mut config = settings.on(config);
        // What layers keep under a ceiling is what a deeper model leaves them.
        if config.schedule.recompute == Recompute::AUTO {
            config.schedule.recompute = true.into();
        }
        Some(Plan::new(&config, &deeper, &config.update_rule()).ok()?.device)
    };
    let layers = model.shape.layers.max(DEEP);
    let Some((less, more)) = at(layers).zip(at(2 * layers)) else { return Vec::new() };
    let before = |name| less.iter().find(|term| term.name == name).map_or(0, |term| term.bytes);
    let added = more.iter().map(|term| Term {
        name: term.name,
        bytes: term.bytes.saturating_sub(before(term.name)).div_ceil(layers as u64),
    });
    added.filter(|term| term.bytes > 0).collect()
}

#[cfg(test)]
mod tests {
    use l2l::config::{Config, ScheduleKind, StashPlace};
    use l2l::largest_shape_of;

    use super::*;

    fn grows(change: impl Fn(&mut Config)) -> Vec<&'static str> {
        let mut config = Config::default();
        config.data.train = "random".into();
        change(&mut config);
        let shape = largest_shape_of(&config).expect("a shape of ours");
        let model = model_of(&config, shape).expect("a model of ours");
        of(&config, &model, Settings::of(&config)).into_iter().map(|term| term.name).collect()
    }

    #[test]
    fn the_plan_says_what_grows() {
        let none: Vec<&str> = Vec::new();
        assert_eq!(grows(|_| {}), none);
        assert_eq!(grows(|config| config.model.layers = Some(1)), none, "few blocks, three slots");
        assert_eq!(grows(|config| config.schedule.recompute = false.into()), none, "on the host");
        let on_device = |config: &mut Config| config.stash.place = StashPlace::Device;
        assert_eq!(grows(on_device).len(), 1);
        let resident = grows(|config| {
            on_device(config);
            config.schedule.kind = ScheduleKind::Resident;
            config.channels.weights = 100_000;
        });
        assert!(resident.len() > 1, "weights, too: {resident:?}");
    }
}
