//! What one rank has of a step.
//!
//! A training step is dealt: each rank computes groups of its own, which are a subtree of the tree
//! in which groups' gradients are added. Every rank computes all other steps whole.

use std::ops::Range;

use l2l_actors::schedule::{BlockId, Fetch, Reduction, StepPlan, group_spans};

use super::Purpose;
use crate::config::{Config, Deal};
use crate::eps::cut;
use crate::error::Error;
use crate::fabric::Rank;
use crate::models::{MasterFormat, Model};
use crate::optimizers::UpdateRule;

/// A rank of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankShare {
    /// The number of the rank, from 0.
    pub rank: Rank,
    /// The number of ranks.
    pub ranks: u32,
}

/// How a training step is dealt to the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DealtStep {
    pub(crate) groups: Vec<Range<u32>>,
    pub(crate) sequences: Vec<Range<usize>>,
}

/// The first sequence of a group: micro-batches are dealt evenly.
fn first_of(config: &Config, sequences: usize, group: u32) -> usize {
    let turns = sequences.div_ceil(config.step.micro_batch);
    let turn = turns * group as usize / config.parallel.groups as usize;
    (turn * config.step.micro_batch).min(sequences)
}

impl RankShare {
    /// The only rank of a run with one process.
    pub const WHOLE: RankShare = RankShare { rank: 0, ranks: 1 };

    /// True if other ranks compute other groups of a step.
    pub(crate) fn deals(self, purpose: Purpose) -> bool {
        self.ranks > 1 && purpose.trains()
    }

    pub(crate) fn deal(self, config: &Config, sequences: usize) -> Result<DealtStep, Error> {
        let groups = config.parallel.groups;
        let ranks = self.ranks;
        if groups < ranks {
            let problem = format_args!(
                "is {groups}, and {ranks} processes share each step: set at least {ranks} (a step \
                 has {} micro-batches)",
                sequences.div_ceil(config.step.micro_batch)
            );
            return Err(Error::config("parallel.groups", problem));
        }
        let first = |group| first_of(config, sequences, group);
        let groups = group_spans(groups, ranks);
        let sequences = groups.iter().map(|span| first(span.start)..first(span.end)).collect();
        Ok(DealtStep { groups, sequences })
    }

    /// The other ranks of a training step that do other work than this one, one of each kind. Ranks
    /// with as many groups, of as many sequences each, do the same work.
    pub(crate) fn kinds(self, config: &Config, sequences: usize) -> Result<Vec<RankShare>, Error> {
        if self.ranks == 1 {
            return Ok(Vec::new());
        }
        let sizes = self.sizes(config, sequences)?;
        let mut seen = vec![&sizes[self.rank as usize]];
        let mut kinds = Vec::new();
        for (rank, of) in (0..).zip(&sizes) {
            if !seen.contains(&of) {
                seen.push(of);
                kinds.push(RankShare { rank, ..self });
            }
        }
        Ok(kinds)
    }

    /// The first of the ranks that compute most of a step's sequences, as the config deals them.
    ///
    /// # Errors
    /// There are fewer groups than ranks.
    pub fn busiest(self, config: &Config, sequences: usize) -> Result<RankShare, Error> {
        let sizes = self.sizes(config, sequences)?;
        let all = sizes.iter().map(|sizes| sizes.iter().sum::<usize>());
        let most = all.clone().max().unwrap_or(0);
        let rank = (0..).zip(all).find(|(_, of)| *of == most).map_or(0, |(rank, _)| rank);
        Ok(RankShare { rank, ..self })
    }

    /// The sequences of each group, by rank.
    fn sizes(self, config: &Config, sequences: usize) -> Result<Vec<Vec<usize>>, Error> {
        let first = |group| first_of(config, sequences, group);
        let size = |group: u32| first(group + 1) - first(group);
        let groups = self.deal(config, sequences)?.groups.into_iter();
        Ok(groups.map(|of_rank| of_rank.map(size).collect()).collect())
    }

    /// Refuses what several ranks cannot do.
    pub(super) fn check(
        self,
        config: &Config,
        model: &Model,
        rule: Option<&dyn UpdateRule>,
    ) -> Result<(), Error> {
        if self.ranks == 1 {
            return Ok(());
        }
        let groups = config.parallel.groups;
        if rule.is_some() && config.compression().is_some() && groups != self.ranks {
            let problem = format_args!(
                "is {groups}, and with compression each of {0} processes computes one group: set \
                 {0}, or start {groups} processes",
                self.ranks
            );
            return Err(Error::config("parallel.groups", problem));
        }
        let deals_groups = config.parallel.deal == Deal::Sequences && config.devices() > 1;
        if rule.is_some() && config.compression().is_some() && deals_groups {
            let problem = "is sequences, and with compression each process has one group, which \
                           one of its devices computes: set \"layers\", or one device a process";
            return Err(Error::config("parallel.deal", problem));
        }
        if rule.is_some_and(|rule| !rule.is_elementwise()) {
            return Err(Error::argument(
                "the update rule needs whole tensors, or its states are not floats by parameter, \
                 and each of several processes has parts of tensors: start one process, set \
                 optimizer.kind to \"adamw\", \"adam\", \"sgd\" or \"lion\", or implement \
                 UpdateRule::is_elementwise if a rule of your own updates each parameter by itself",
            ));
        }
        if model.blocks.iter().any(|block| block.stored().pieces().next().is_some()) {
            let problem = "is for one process, and each of several has parts of tensors: start one \
                           process, or leave it out";
            return Err(Error::config("train.base", problem));
        }
        if model.blocks.iter().any(|block| block.masters() == MasterFormat::Rounded) {
            let problem = "is bf16, which rounds whole tensors at random, and each of several \
                           processes has parts of tensors: set \"split\"";
            return Err(Error::config("optimizer.masters", problem));
        }
        let most = model.blocks.iter().map(|tensors| {
            let parts = cut(tensors, self.ranks);
            (0..self.ranks).filter(|&rank| !parts.of(rank).is_empty()).count()
        });
        if most.max().unwrap_or(0) < self.ranks as usize {
            return Err(Error::argument(format_args!(
                "{} processes, and no block of the model has that many parts of 16384 parameters: \
                 start fewer",
                self.ranks
            )));
        }
        Ok(())
    }
}

/// What ranks exchange in a step, in order. All ranks must exchange the same.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Exchanged {
    /// Blocks that are completed.
    pub(super) blocks: Vec<BlockId>,
    /// Blocks whose gradients are exchanged; `None`: rows of the embedding's gradient.
    pub(super) gradients: Vec<Option<BlockId>>,
}

impl Exchanged {
    /// The exchanges of a step that is walked like this.
    pub(super) fn of(walked: &StepPlan) -> Exchanged {
        let blocks = walked.fetches.iter().filter_map(|fetch| match fetch {
            Fetch::Read { block, .. } => Some(*block),
            Fetch::Gather { .. } => None,
        });
        let gradients = walked.reductions.iter().filter_map(|reduction| match reduction {
            Reduction::Gradient { portion, join, .. } => {
                // The gradient of a block in portions ends with the first of them.
                let ends = !join.keeps && portion.cut.unwrap_or(0) == 0;
                ends.then_some(Some(portion.block))
            }
            Reduction::Scatter { .. } => Some(None),
            // The measures of a step have a channel of their own.
            Reduction::Balance { .. } | Reduction::Loss { .. } | Reduction::Objective { .. } => {
                None
            }
        });
        Exchanged { blocks: blocks.collect(), gradients: gradients.collect() }
    }
}
