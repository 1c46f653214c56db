//! What a plan is made of, and how its parts follow from each other: the schedules of all steps,
//! the pools that they need, the regions of memory, and the bytes that a step moves.

use std::collections::BTreeSet;
use std::sync::Arc;

use l2l_actors::schedule::{LayerId, Schedule, StepPlan};

use super::checks::check_sizes;
use super::config::Settings;
use super::parts::DevicePart;
use super::room::KvCache;
use super::share::RankShare;
use super::step::{Schedules, StepShape, StepSpec, schedule_of};
use super::traffic::PlannedTraffic;
use super::{BatchSizes, Plan, most_positions, pipelines};
use crate::config::{Config, DeviceKind};
use crate::eps::cut;
use crate::error::Error;
use crate::models::{BlockTensors, Model};
use crate::optimizers::{StateLayout, UpdateRule};

/// What a plan is made of.
pub(super) struct PlanSpec<'a> {
    pub(super) settings: Settings,
    pub(super) model: &'a Model,
    pub(super) rule: Option<&'a dyn UpdateRule>,
    /// Steps that will be run. The first has the longest sequences.
    pub(super) steps: &'a [StepShape],
    pub(super) share: RankShare,
    pub(super) cache: Option<KvCache>,
    /// This rank's part of each block.
    pub(super) own: Vec<BlockTensors>,
    /// The optimizer's states of those parts.
    pub(super) states: StateLayout,
    /// The layers that keep their activations on the device.
    pub(super) kept: BTreeSet<LayerId>,
}

impl<'a> PlanSpec<'a> {
    /// Without a KV cache.
    pub(super) fn new(
        config: &Config,
        model: &'a Model,
        rule: Option<&'a dyn UpdateRule>,
        steps: &'a [StepShape],
        share: RankShare,
    ) -> PlanSpec<'a> {
        let RankShare { rank, ranks } = share;
        let own = |block: &BlockTensors| block.part(cut(block, ranks).of(rank));
        let own: Vec<BlockTensors> = match ranks {
            1 => model.blocks.clone(),
            _ => model.blocks.iter().map(own).collect(),
        };
        let states = rule.map_or_else(StateLayout::default, |rule| StateLayout::new(rule, &own));
        let settings = Settings::new(config, model, rule.is_some());
        let kept = BTreeSet::new();
        PlanSpec { settings, model, rule, steps, share, cache: None, own, states, kept }
    }

    /// Makes the plan.
    ///
    /// # Errors
    /// The configuration, the model or the number of ranks cannot be planned for.
    pub(super) fn plan(mut self) -> Result<Plan, Error> {
        self.check()?;
        self.settings.pipeline = pipelines::read(&self.settings.config)?.map(Arc::new);
        let keeping = self.keep()?;
        let schedules = self.schedules()?;
        let pools = self.pools(&schedules.all);
        // The shown traffic is that of training, or of generation's last step, whose cache is full.
        let shown = if self.settings.trains { 0 } else { self.steps.len() - 1 };
        let walked = StepPlan::new(schedules.all[shown].clone(), pools)?;
        self.check_exchanges(&walked)?;
        self.check_dtype()?;
        self.check_rank()?;
        let regions = self.regions(&schedules, &pools)?;
        let [device, host, file] = regions.terms();
        let is_pinned = self.settings.config.device.kind == DeviceKind::Cuda;
        let counts = schedules.all.iter().map(|schedule| schedule.micro_batches.len());
        let batch = BatchSizes {
            positions: self.steps[0].positions,
            sequences: self.steps[0].sequences,
            micro_batches: walked.schedule.micro_batches.clone(),
            most_micro_batches: counts.max().unwrap_or(0),
        };
        let plan = Plan {
            device,
            host,
            file,
            pinned_bytes: if is_pinned { regions.copied_bytes() } else { 0 },
            traffic: PlannedTraffic::of(&self, &walked),
            parts: DevicePart::all(&walked),
            batch,
            pools,
            regions,
            share: self.share,
            states: self.states,
            cache: self.cache,
            kept: self.kept,
            keeping,
            settings: self.settings,
        };
        // The arena of a device is allocated from the regions, and must be what was planned.
        let arena_bytes = plan.regions.device_floats() * size_of::<f32>();
        assert_eq!(plan.device_bytes(), arena_bytes as u64);
        Ok(plan)
    }

    /// Bytes of a device and of the host.
    ///
    /// # Errors
    /// What this needs cannot be sized.
    pub(super) fn memory(&self) -> Result<[u64; 2], Error> {
        self.check()?;
        let schedules = self.schedules()?;
        let [device, host, _] = self.regions(&schedules, &self.pools(&schedules.all))?.terms();
        Ok([device, host].map(|terms| terms.iter().map(|term| term.bytes).sum()))
    }

    /// Refuses what cannot be planned, before anything is sized by it.
    fn check(&self) -> Result<(), Error> {
        let config = &self.settings.config;
        check_sizes(config, self.model, self.steps[0], self.share.ranks)?;
        self.share.check(config, self.model, self.rule)?;
        self.check_routers()?;
        self.check_idle_experts()?;
        self.check_objective()?;
        self.check_reference()?;
        if self.settings.trains {
            config.check_training()?;
        }
        config
            .optimizer
            .groups
            .iter()
            .try_for_each(|group| self.model.check_patterns("optimizer.groups", &group.patterns))
    }

    /// The schedules of all steps.
    pub(super) fn schedules(&self) -> Result<Schedules, Error> {
        let mut schedules = Schedules::default();
        for step in self.steps {
            schedules.add(self.schedule(*step, self.share)?);
        }
        // A step may also have whole sequences alone, each as long as a chunk.
        for &step in self.steps {
            let most = most_positions(&self.settings.config, self.model, step.purpose);
            if let Some(positions) = most.filter(|&most| most < step.positions) {
                schedules.add(self.schedule(StepShape { positions, ..step }, self.share)?);
            }
        }
        // A smaller step may have no room for what would stay on the device.
        for &step in self.steps.iter().filter(|_| self.settings.config.hands_over()) {
            schedules.add(self.schedule_of(step, self.share, false)?);
        }
        Ok(schedules)
    }

    pub(super) fn schedule(&self, shape: StepShape, share: RankShare) -> Result<Schedule, Error> {
        self.schedule_of(shape, share, true)
    }

    fn schedule_of(
        &self,
        shape: StepShape,
        share: RankShare,
        may_stay: bool,
    ) -> Result<Schedule, Error> {
        let file = self.settings.pipeline.as_deref();
        let states = &self.states;
        let kept = &self.kept;
        let units = None;
        let layers = None;
        let may_wait = true;
        let spec = StepSpec { shape, units, layers, states, share, file, kept, may_wait, may_stay };
        schedule_of(&self.settings.config, self.model, spec)
    }
}
