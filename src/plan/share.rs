//! What one process of a run has of a step.
//!
//! A step that trains is dealt: each rank computes groups of its own, which are a subtree of the
//! tree in which groups' gradients are added. All other steps are computed whole by each rank.

use std::ops::Range;

use l2l_actors::schedule::{Fetch, Reduction, StepPlan, group_spans};

use super::Purpose;
use crate::compression::Compression;
use crate::config::{Config, Deal};
use crate::error::Error;
use crate::fabric::Rank;
use crate::models::{MasterFormat, Model};
use crate::optimizers::UpdateRule;

/// Which process of how many this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankShare {
    /// From 0.
    pub rank: Rank,
    /// How many there are.
    pub ranks: u32,
}

/// How a step that trains is dealt to the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DealtStep {
    /// The groups of each rank.
    pub(crate) groups: Vec<Range<u32>>,
    /// The sequences of each rank, which follow each other.
    pub(crate) sequences: Vec<Range<usize>>,
}

impl RankShare {
    /// The only process.
    pub const WHOLE: RankShare = RankShare { rank: 0, ranks: 1 };

    /// True if other processes compute other groups of a step.
    pub(crate) fn deals(self, purpose: Purpose) -> bool {
        self.ranks > 1 && purpose.trains()
    }

    /// How a step of so many sequences is dealt.
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
        let turns = sequences.div_ceil(config.step.micro_batch);
        let first = |group: u32| {
            let turn = turns * group as usize / groups as usize;
            (turn * config.step.micro_batch).min(sequences)
        };
        let groups = group_spans(groups, ranks);
        let sequences = groups.iter().map(|span| first(span.start)..first(span.end)).collect();
        Ok(DealtStep { groups, sequences })
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
            let parts = crate::eps::cut(tensors, self.ranks);
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

/// Bytes that a process sends to the others in a step that trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FabricBytes {
    /// Its parts of blocks, each time that a block is completed.
    pub blocks: u64,
    /// The others' parts of gradients. Rows of the embedding's gradient come to it.
    pub gradients: u64,
}

impl RankShare {
    /// What this process sends in a step, but for rows of the embedding's gradient.
    pub(super) fn sends(
        self,
        plan: &StepPlan,
        model: &Model,
        compression: Option<Compression>,
    ) -> FabricBytes {
        let others = u64::from(self.ranks - 1);
        if others == 0 {
            return FabricBytes::default();
        }
        let part = |block: u32, bytes: u64, is_gradient: bool| {
            let tensors = &model.blocks[block as usize];
            let len = if is_gradient { tensors.trained_len() } else { tensors.len() };
            let cut = crate::eps::cut(tensors, self.ranks).clipped(len);
            let element = bytes / cut.len().max(1) as u64;
            let own = cut.of(self.rank).len() as u64 * element;
            [own, bytes - own]
        };
        let block = |id: u32| &plan.schedule.blocks[id as usize];
        let gradient = |id: u32| match compression {
            None => part(id, block(id).gradient_bytes, true)[1],
            Some(kind) => {
                let block = &model.blocks[id as usize];
                kind.sent_bytes(block, &crate::eps::cut(block, self.ranks), self.rank, self.ranks)
            }
        };
        let (fetched, dealt) = exchanges(plan);
        let dealt = dealt.into_iter().filter(|&id| id != SCATTER);
        FabricBytes {
            blocks: fetched
                .into_iter()
                .map(|id| others * part(id, block(id).weight_bytes, false)[0])
                .sum(),
            gradients: dealt.map(gradient).sum(),
        }
    }
}

/// A scatter, among the gradients that ranks exchange.
const SCATTER: u32 = u32::MAX;

/// What ranks exchange in a step, in order: blocks that are completed, and gradients.
pub(super) fn exchanges(plan: &StepPlan) -> (Vec<u32>, Vec<u32>) {
    let fetched = plan.fetches.iter().filter_map(|fetch| match fetch {
        Fetch::Read { block, .. } => Some(block.0),
        Fetch::Gather { .. } => None,
    });
    let dealt = plan.reductions.iter().filter_map(|reduction| match reduction {
        Reduction::Gradient { block, join, .. } => (!join.keeps).then_some(block.0),
        Reduction::Scatter { .. } => Some(SCATTER),
        Reduction::Loss { .. } => None,
    });
    (fetched.collect(), dealt.collect())
}
