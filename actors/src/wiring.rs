//! Wires the ring, from the last actor back to the first, so that each outbox has its inbox.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::config::RingConfig;
use crate::context::Context;
use crate::executor::Executor;
use crate::fetcher::Fetcher;
use crate::mailbox::{Inbox, Outbox, mailbox};
use crate::messages::{Flow, Resolved};
use crate::names::ActorName;
use crate::optimizer::Optimizer;
use crate::pool::{Gauge, Pool};
use crate::ports::Lanes;
use crate::prefetcher::Prefetcher;
use crate::reducer::Reducer;
use crate::ring::Ring;
use crate::schedule::Pools;
use crate::stasher::Stasher;
use crate::task::{ActorTask, task};

/// A ring that is made and not started.
pub(crate) struct Wired {
    pub(crate) ring: Arc<Ring>,
    pub(crate) tasks: Vec<ActorTask>,
    /// To the first actor.
    pub(crate) fetcher: Outbox<Flow<()>>,
    /// From the last.
    pub(crate) resolved: Inbox<Resolved>,
}

/// All pools, each for its one taker.
struct AllPools {
    weights: Pool,
    visits: Pool,
    inputs: Pool,
    outputs: Pool,
    gradients: Pool,
    reduced: Pool,
    reads: Pool,
    states: Pool,
}

impl AllPools {
    fn new(sizes: &Pools) -> AllPools {
        AllPools {
            weights: Pool::new("weights", sizes.weights),
            visits: Pool::new("visits", sizes.visits),
            inputs: Pool::new("inputs", sizes.inputs),
            outputs: Pool::new("outputs", sizes.outputs),
            gradients: Pool::new("gradients", sizes.gradients),
            reduced: Pool::new("reduced", sizes.reduced),
            reads: Pool::new("reads", sizes.reads),
            states: Pool::new("states", sizes.states),
        }
    }

    /// Gauges of the pools that have slots.
    fn gauges(&self) -> Vec<Gauge> {
        let AllPools { weights, visits, inputs, outputs, gradients, reduced, reads, states } = self;
        let all = [weights, visits, inputs, outputs, gradients, reduced, reads, states];
        let gauges = all.into_iter().map(Pool::gauge);
        gauges.filter(|gauge| !gauge.read().holders.is_empty()).collect()
    }
}

/// `Begin`, `End` and `Stop` of the one unresolved step.
const SIGNALS: usize = 3;

/// Makes the ring. A mailbox has room for the credits that its messages carry, and for signals; a
/// `Reduced` carries a landing slot, or is one of a block's or a micro-batch's per step.
pub(crate) fn wire(config: &RingConfig, lanes: &Arc<dyn Lanes>) -> Wired {
    let &RingConfig { pools: sizes, blocks, max_micro_batches, deferred, inject, .. } = config;
    let pools = AllPools::new(&sizes);
    let ring = Arc::new(Ring::new(blocks as usize, pools.gauges(), lanes.now()));
    let context_of = |name| Context::new(name, &ring, lanes, inject);

    let outcomes = blocks as usize + max_micro_batches as usize;
    let (to_relay, resolved) = mailbox("resolved", 1);
    let (to_optimizer, reduced) = mailbox("reduced", outcomes + SIGNALS);
    let (to_reducer, gradients) = mailbox("gradients", sizes.gradients as usize + SIGNALS);
    let (to_stasher, outputs) = mailbox("outputs", sizes.outputs as usize + SIGNALS);
    let (inputs_to_executor, inputs) = mailbox("inputs", sizes.inputs as usize);
    let (to_executor, weights) = mailbox("weights", sizes.visits as usize + SIGNALS);
    let (to_prefetcher, staged) = mailbox("staged", sizes.reads as usize + SIGNALS);
    let (fetcher, steps) = mailbox("steps", SIGNALS);

    let optimizer = Optimizer {
        context: context_of(ActorName::Optimizer),
        reduced,
        resolved: to_relay,
        deferred,
        state_slots: pools.states,
        updating: None,
    };
    let stasher = Stasher { context: context_of(ActorName::Stasher), outputs, step: None };
    let reducer = Reducer {
        context: context_of(ActorName::Reducer),
        gradients,
        reduced: to_optimizer,
        landing: pools.reduced,
        deferred,
    };
    let executor = Executor {
        context: context_of(ActorName::Executor),
        weights,
        inputs,
        outputs: to_stasher,
        gradients: to_reducer,
        output_slots: pools.outputs,
        gradient_slots: pools.gradients,
        open: HashMap::new(),
    };
    let prefetcher = Prefetcher {
        context: context_of(ActorName::Prefetcher),
        staged,
        weights: to_executor,
        inputs: inputs_to_executor,
        weight_slots: pools.weights,
        visit_credits: pools.visits,
        input_slots: pools.inputs,
        resident: vec![None; sizes.weights as usize],
    };
    let first = Fetcher {
        context: context_of(ActorName::Fetcher),
        inbox: steps,
        staged: to_prefetcher,
        read_slots: pools.reads,
        gathered: VecDeque::new(),
    };
    let tasks = vec![
        task(ActorName::Optimizer, &ring, lanes, optimizer),
        task(ActorName::Stasher, &ring, lanes, stasher),
        task(ActorName::Reducer, &ring, lanes, reducer),
        task(ActorName::Executor, &ring, lanes, executor),
        task(ActorName::Prefetcher, &ring, lanes, prefetcher),
        task(ActorName::Fetcher, &ring, lanes, first),
    ];
    Wired { ring, tasks, fetcher, resolved }
}
