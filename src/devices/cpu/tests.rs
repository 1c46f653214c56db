//! The device as a whole: the suite every implementation of the ports is run through.

use std::sync::Arc;

use l2l_actors::conformance::{Report, Subject, check};
use l2l_actors::schedule::{Pools, Schedule, Version};
use l2l_actors::threads::ThreadLanes;

use super::{Cpu, Goal, Turn};
use crate::config::{
    ChannelsConfig, Config, Plan, Purpose, StashPlace, Walk, schedule_of, shape_of,
};
use crate::data::{Batch, Dataset};
use crate::models::Model;

/// A model small enough to be run a thousand times.
struct Small {
    config: Config,
}

impl Small {
    fn new(recompute: bool, place: StashPlace) -> Small {
        let mut config = Config::default();
        config.data.train = "random".into();
        config.model.layers = Some(1);
        config.model.hidden = Some(8);
        config.model.heads = Some(2);
        config.model.vocabulary = Some(11);
        config.model.positions = Some(4);
        config.step.batch = 3;
        config.step.micro_batch = 2;
        config.device.threads = Some(1);
        config.schedule.recompute = recompute;
        config.stash.place = place;
        config.optimizer.clip_norm = Some(1e9); // never cuts; gives every block a region
        Small { config }
    }

    fn model(&self) -> Model {
        Model::new(shape_of(&self.config).expect("a shape of ours"))
    }
}

impl Subject for Small {
    type Ports = ThreadLanes<Cpu>;

    fn schedule(&self) -> Schedule {
        let walk = Walk { sequences: 3, positions: 4, purpose: Purpose::Train };
        schedule_of(&self.config, &self.model(), walk).expect("a model of ours").0
    }

    fn ports(&self, pools: &Pools) -> Arc<Self::Ports> {
        let channels = ChannelsConfig {
            weights: pools.weights,
            gradients: pools.gradients,
            reduced: pools.reduced,
            stash: pools.ahead,
        };
        let config = Config { channels, ..self.config.clone() };
        let model = Arc::new(self.model());
        let rule = Box::new(config.update_rule());
        let plan = Plan::new(&config, &model, &*rule).expect("a plan of ours");
        assert_eq!(plan.pools, *pools);
        let cpu =
            Cpu::new(&config, model, Arc::new(plan), rule, config.learning_rate(100), Vec::new())
                .expect("memory and threads");
        cpu.eps().randomise(1);
        Arc::new(ThreadLanes::start(cpu).expect("threads"))
    }

    fn batch(&self, step: Version) -> Turn {
        let shape = shape_of(&self.config).expect("a shape of ours");
        let (data, _) = Dataset::open(&self.config, &shape).expect("random data");
        let sequence = |index| data.sequence(index).expect("random data");
        let sequences: Vec<_> = (3 * step..3 * step + 3).map(sequence).collect();
        Turn {
            batch: Batch::new(&sequences),
            goal: Goal::Train,
            trained: step,
            carries: Arc::default(),
            memory: Vec::new(),
        }
    }
}

#[test]
fn the_cpu_device_conforms() {
    for (recompute, place) in [(true, StashPlace::Host), (false, StashPlace::Device)] {
        let Report { operations, rings, failures, drops } = check(&Small::new(recompute, place));
        assert!(operations > 0 && rings == 6 && failures > 100 && drops > 0);
    }
}
