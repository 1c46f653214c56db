//! How long a sequence fits: the longest for which a plan stays below what a device has, and below
//! what the host has.
//!
//! Lengths are tried in whole chunks, and in less only if one chunk does not fit. A try sizes
//! the regions of a plan, and nothing else of it.

use std::collections::BTreeMap;

use super::spec::PlanSpec;
use super::{Plan, Purpose, StepShape, fit};
use crate::models::{Model, Shape};
use crate::optimizers::UpdateRule;

/// The longest sequences that fit, in positions, if all of a step are that long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongestSequence {
    /// For which a device has memory. `None`: nothing says how much it has.
    pub device: Option<usize>,
    /// For which the host has memory. `None`: the system does not say how much it has.
    pub host: Option<usize>,
    /// The positions of the model; at most a chunk if its experts drop choices, for which
    /// sequences must be whole.
    pub model: usize,
    /// No longer sequence was tried: the most positions that any model may have, or those of this
    /// one if it learns a vector for each.
    pub tried: usize,
}

/// What ends first as sequences get longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthEnd {
    /// The model's positions.
    Model,
    /// The memory of a device.
    Device,
    /// The memory of the host.
    Host,
}

impl LengthEnd {
    /// The name in the JSON output.
    pub fn name(self) -> &'static str {
        match self {
            LengthEnd::Model => "model",
            LengthEnd::Device => "device",
            LengthEnd::Host => "host",
        }
    }
}

impl LongestSequence {
    /// The longest sequence that a run can have, and what ends there.
    pub fn first_end(&self) -> (usize, LengthEnd) {
        let ends = [
            (Some(self.model), LengthEnd::Model),
            (self.device, LengthEnd::Device),
            (self.host, LengthEnd::Host),
        ];
        let known = ends.into_iter().filter_map(|(length, end)| Some((length?, end)));
        known.min_by_key(|&(length, _)| length).expect("a model has positions")
    }
}

impl Plan {
    /// The longest sequences for which a device of `device` bytes and a host of `host` bytes have
    /// memory, with all else of the step as it is planned. `None` if the plan is for generation.
    pub fn longest_sequence(
        &self,
        model: &Model,
        rule: &dyn UpdateRule,
        device: Option<u64>,
        host: Option<u64>,
    ) -> Option<LongestSequence> {
        if self.cache.is_some() {
            return None;
        }
        let most = model.shape.most_positions();
        let tried = if model.shape.rotary.is_some() { Shape::POSITION_LIMIT } else { most };
        let mut tries = Tries { plan: self, model, rule, sizes: BTreeMap::new() };
        // Experts that drop choices need whole sequences, whatever these take.
        let drops = model.shape.experts.is_some_and(|experts| experts.balance.drops());
        let planned = if drops { tried.min(model.shape.chunk_positions) } else { tried };
        let mut within = |ceiling: Option<u64>, of: fn(Sizes) -> u64| {
            ceiling.map(|ceiling| tries.longest(planned, |sizes| of(sizes) <= ceiling))
        };
        let device = within(device, |sizes| sizes.device);
        let host = within(host, |sizes| sizes.host);
        Some(LongestSequence { device, host, model: most.min(planned), tried })
    }

    /// The same with the memory that the config and this machine leave.
    pub fn longest_sequence_here(
        &self,
        model: &Model,
        rule: &dyn UpdateRule,
    ) -> Option<LongestSequence> {
        let device = [self.budget(), self.gpu_bytes()].into_iter().flatten().min();
        self.longest_sequence(model, rule, device, fit::host_bytes(&self.settings.config))
    }
}

/// Bytes of a plan.
#[derive(Clone, Copy)]
struct Sizes {
    device: u64,
    /// Of the host, with the devices that share its memory.
    host: u64,
}

/// Plans for sequences of other lengths.
struct Tries<'a> {
    plan: &'a Plan,
    model: &'a Model,
    rule: &'a dyn UpdateRule,
    /// By length. `None`: the plan was refused.
    sizes: BTreeMap<usize, Option<Sizes>>,
}

impl Tries<'_> {
    /// The longest length of at most `most` whose plan fits, in whole chunks. 0: none fits.
    fn longest(&mut self, most: usize, fits: impl Fn(Sizes) -> bool) -> usize {
        let chunk = self.model.shape.chunk_positions;
        let mut is_fit = |length| self.sizes(length).is_some_and(&fits);
        // A plan of more chunks takes longer to make, so lengths grow from one chunk on.
        let mut unfit = chunk;
        while unfit < most && is_fit(unfit) {
            unfit *= 2;
        }
        if unfit >= most {
            if most == 0 || is_fit(most) {
                return most;
            }
            unfit = most;
        }
        for grain in [chunk, Shape::CHUNK_TILE, 1] {
            let mut fit = 0;
            let mut over = unfit.div_ceil(grain);
            while over - fit > 1 {
                let middle = fit.midpoint(over);
                if is_fit(middle * grain) { fit = middle } else { over = middle }
            }
            if fit > 0 {
                return fit * grain;
            }
            unfit = unfit.min(grain);
        }
        0
    }

    fn sizes(&mut self, length: usize) -> Option<Sizes> {
        if let Some(&sizes) = self.sizes.get(&length) {
            return sizes;
        }
        let sizes = self.plan.sizes_at(self.model, self.rule, length);
        self.sizes.insert(length, sizes);
        sizes
    }
}

impl Plan {
    /// Bytes of this plan with sequences of another length, without layers that keep activations
    /// where there is room. `None` if there is no plan for it.
    fn sizes_at(&self, model: &Model, rule: &dyn UpdateRule, positions: usize) -> Option<Sizes> {
        let mut config = self.settings.config.clone();
        config.schedule.recompute = config.schedule.recompute.without_keeping();
        let sequences = model.sequences_of(config.step.batch);
        let steps = match self.trains() {
            true => Plan::training_steps(&config, model, self.share, positions),
            false => {
                let purpose = Purpose::of_evaluation(model);
                vec![StepShape { sequences, positions, purpose }]
            }
        };
        let rule = Some(rule).filter(|_| self.trains());
        let mut spec = PlanSpec::new(&config, model, rule, &steps, self.share);
        spec.settings.pipeline.clone_from(&self.settings.pipeline);
        let [device, host] = spec.memory().ok()?;
        let of_devices = fit::on_host(&config, device);
        Some(Sizes { device, host: host.saturating_add(of_devices) })
    }
}
