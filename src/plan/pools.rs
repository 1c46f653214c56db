//! How many slots each pool of the ring has.

use l2l_actors::schedule::{Capacities, Pools, Schedule, StepPlan};

use super::share::{Exchanged, RankShare};
use super::spec::PlanSpec;
use crate::config::ChannelsConfig;
use crate::error::Error;

/// Visits that are announced ahead where layers go in rounds: two rounds, and the visit that runs.
/// So the inputs of the next round come while this one computes.
const ROUNDS: u32 = 5;

impl PlanSpec<'_> {
    /// The pools of a schedule, at the depths of the config. All devices have the same number of
    /// slots, even if the schedule leaves one out.
    fn pools_of(&self, schedule: &Schedule) -> Pools {
        let ChannelsConfig { weights, gradients, reduced, stash } = self.settings.config.channels;
        let config = &self.settings.config;
        let pools = Pools::of(schedule, &Capacities { weights, gradients, reduced, stash });
        let visits = if config.hands_over() && schedule.has_rounds() { ROUNDS } else { 0 };
        Pools { devices: config.devices(), visits: pools.visits.max(visits), ..pools }
    }

    /// The pools of a run with these schedules.
    pub(super) fn pools(&self, schedules: &[Schedule]) -> Pools {
        let mut all = schedules.iter().map(|schedule| self.pools_of(schedule));
        let first = all.next().expect("a plan has a step");
        // Validation and scoring fit into the pools of training. A step with a KV cache, or one
        // that every rank computes whole, may need more. So may one in which nothing stays on the
        // device.
        let hands_over = self.settings.config.hands_over();
        let others = all.filter(|_| self.cache.is_some() || self.share.ranks > 1 || hands_over);
        others.fold(first, Pools::max)
    }

    /// Refuses a step in which ranks would not make the same exchanges in the same order.
    ///
    /// # Errors
    /// The number of groups.
    pub(super) fn check_exchanges(&self, walked: &StepPlan) -> Result<(), Error> {
        let RankShare { rank: own, ranks } = self.share;
        if ranks == 1 {
            return Ok(());
        }
        let config = &self.settings.config;
        let sequences = self.share.deal(config, self.steps[0].sequences)?.sequences;
        let exchanged = Exchanged::of(walked);
        let has_others =
            |rank: &u32| sequences[*rank as usize].len() != sequences[own as usize].len();
        for rank in (0..ranks).filter(has_others) {
            let share = RankShare { rank, ranks };
            let schedule = self.schedule(self.steps[0], share)?;
            let pools = self.pools_of(&schedule);
            if Exchanged::of(&StepPlan::new(schedule, pools)?) != exchanged {
                let groups = config.parallel.groups;
                let unlike = "different numbers, and their devices would need blocks in different \
                              orders: set";
                let relay = "(a relay with one device a process takes any number)";
                if groups.is_multiple_of(ranks) {
                    let whole = groups as usize * config.step.micro_batch;
                    let problem = format_args!(
                        "is {}, of whose long sequences {ranks} processes have {unlike} a multiple \
                         of {whole} {relay}",
                        config.step.batch
                    );
                    return Err(Error::config("step.batch", problem));
                }
                let problem = format_args!(
                    "is {groups}, of which {ranks} processes have {unlike} {ranks}, {} or another \
                     {ranks} times a power of two {relay}",
                    2 * ranks
                );
                return Err(Error::config("parallel.groups", problem));
            }
        }
        Ok(())
    }
}
