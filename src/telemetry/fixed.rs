//! Seconds that operations take whatever their size.

use std::collections::HashMap;

use l2l_actors::schedule::Phase;
use l2l_actors::work::WorkKind;

/// What each operation takes beside what grows with its size. What is not in it takes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Fixed {
    /// Of kernels: one micro-batch, or chunk, in a layer and a phase.
    pub(super) compute: HashMap<(u32, Phase), f64>,
    /// Of other work.
    pub(super) work: HashMap<WorkKind, f64>,
}

impl Fixed {
    /// Of kernels.
    pub(super) fn of_compute(&self, layer: u32, phase: Phase) -> f64 {
        let phase = if phase == Phase::Reference { Phase::Forward } else { phase };
        self.compute.get(&(layer, phase)).copied().unwrap_or(0.0)
    }

    /// Of other work.
    pub(super) fn of(&self, kind: WorkKind) -> f64 {
        self.work.get(&kind).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use l2l_actors::schedule::LayerId;

    use super::*;
    use crate::config::{Config, Recompute};
    use crate::models::Model;
    use crate::plan::Plan;
    use crate::resolve::shape_of;
    use crate::telemetry::{Hiding, Rates};

    fn planned() -> (Config, Model, Plan) {
        let mut config = Config::default();
        config.data.train = "random".into();
        config.data.sequence_length = Some(32);
        (config.step.batch, config.step.micro_batch) = (8, 4);
        config.schedule.recompute = Recompute::Layer(true);
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        (config, model, plan)
    }

    /// A layer that keeps its activations launches fewer kernels in its backward pass.
    #[test]
    fn launches_change_as_the_kernels_do() {
        let (config, model, mut plan) = planned();
        let mut rates = Rates::of(&config, &model, 1e10, 1e9, 1e9);
        rates.fixed.compute = rates.compute.clone();
        let flops = |layer| model.visit_flops(layer, Phase::Forward, std::iter::once(0..1), None);
        let layer = (1..model.layers.len()).find(|&layer| flops(layer) > 0.0).expect("it has one");
        plan.kept.insert(LayerId(layer as u32));
        let kept = rates.in_plan(&model, &plan);
        let at = (layer as u32, Phase::Backward);
        assert!(kept.compute[&at] < rates.compute[&at]);
        assert_eq!(kept.fixed.compute, kept.compute);
    }

    /// Starts of uploads take more tokens to hide, and starts of kernels hide some.
    #[test]
    fn what_takes_time_whatever_its_size_hides_too() {
        let (config, model, plan) = planned();
        let tokens = |upload: f64, launches: f64| {
            let endless = f64::INFINITY;
            let mut rates = Rates::of(&config, &model, 1e10, endless, endless);
            let each = |(&at, seconds): (&(u32, Phase), &f64)| (at, launches * 4.0 * seconds);
            rates.fixed.compute = rates.compute.iter().map(each).collect();
            rates.fixed.work.insert(WorkKind::Weights, upload);
            let hiding = Hiding::of(&config, &model, &plan, &rates, false);
            let hiding = hiding.expect("a schedule of ours");
            (hiding.lane, hiding.tokens.expect("it hides") as f64)
        };
        assert_eq!(tokens(0.0, 0.0).1, 0.0);
        let (lane, once) = tokens(1.0, 0.0);
        assert_eq!(lane, "upload");
        for (expected, upload, launches) in [(2.0, 2.0, 0.0), (0.5, 1.0, 1.0), (1.0, 2.0, 1.0)] {
            let ratio = tokens(upload, launches).1 / once;
            assert!((ratio / expected - 1.0).abs() < 0.01, "{upload} {launches}: {ratio}");
        }
    }
}
