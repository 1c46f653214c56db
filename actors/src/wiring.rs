//! Wires the ring, from the last actor back to the first, so that each outbox has its inbox.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::config::RingConfig;
use crate::context::Context;
use crate::executor::Executor;
use crate::fetcher::Fetcher;
use crate::mailbox::{Inbox, Outbox, mailbox};
use crate::messages::{Flow, Gradients, Resolved, Staged, Uploaded};
use crate::names::ActorName;
use crate::optimizer::Optimizer;
use crate::peer_copier::PeerCopier;
use crate::pool::Pool;
use crate::ports::Lanes;
use crate::prefetcher::Prefetcher;
use crate::reducer::Reducer;
use crate::ring::Ring;
use crate::schedule::{DeviceId, Pools};
use crate::stasher::Stasher;
use crate::task::{ActorTask, task};

/// A ring that was made and not started.
pub(crate) struct Wired {
    pub(crate) ring: Arc<Ring>,
    pub(crate) tasks: Vec<ActorTask>,
    /// The edge to the first actor.
    pub(crate) fetcher: Outbox<Flow<()>>,
    /// The edge from the last actor.
    pub(crate) resolved: Inbox<Resolved>,
}

/// The pools of a device, each for its one taker.
struct DevicePools {
    weights: Pool,
    visits: Pool,
    inputs: Pool,
    outputs: Pool,
    gradients: Pool,
}

impl DevicePools {
    fn new(sizes: &Pools, device: DeviceId) -> DevicePools {
        let pool = |name, slots| Pool::on_device(name, device, slots);
        DevicePools {
            weights: pool("weights", sizes.weights),
            visits: pool("visits", sizes.visits),
            inputs: pool("inputs", sizes.inputs),
            outputs: pool("outputs", sizes.outputs),
            gradients: pool("gradients", sizes.gradients),
        }
    }

    fn all(&self) -> [&Pool; 5] {
        [&self.weights, &self.visits, &self.inputs, &self.outputs, &self.gradients]
    }
}

/// `Begin`, `End` and `Stop` of the one unresolved step.
const SIGNALS: usize = 3;

/// Makes the ring. A mailbox has room for the credits that its messages carry, and for signals; a
/// `Reduced` carries a landing slot, or is one of a block's or a micro-batch's per step.
pub(crate) fn wire(config: &RingConfig, lanes: &Arc<dyn Lanes>) -> Wired {
    let &RingConfig { pools: sizes, blocks, max_micro_batches, deferred, inject, .. } = config;
    let devices = (0..sizes.devices).map(|device| DevicePools::new(&sizes, device as DeviceId));
    let devices: Vec<DevicePools> = devices.collect();
    let landing = Pool::new("reduced", sizes.reduced);
    let part_slots = Pool::new("parts", sizes.parts);
    let read_slots = Pool::new("reads", sizes.reads);
    let state_slots = Pool::new("states", sizes.states);
    let of_devices = devices.iter().flat_map(DevicePools::all);
    let of_process = [&landing, &part_slots, &read_slots, &state_slots];
    let all = of_devices.chain(of_process).map(Pool::gauge);
    let gauges = all.filter(|gauge| !gauge.read().holders.is_empty()).collect();
    let ring = Arc::new(Ring::new(config, gauges, lanes.now()));
    let context_of = |name| Context::new(name, &ring, lanes, inject);

    let outcomes = blocks as usize + max_micro_batches as usize;
    let (to_relay, resolved) = mailbox("resolved", 1);
    let (to_optimizer, reduced) = mailbox("reduced", outcomes + SIGNALS);
    let optimizer = Optimizer {
        context: context_of(ActorName::Optimizer),
        reduced,
        resolved: to_relay,
        deferred,
        state_slots,
        updating: None,
        sealed: None,
    };
    let mut tasks = vec![task(ActorName::Optimizer, &ring, lanes, optimizer)];
    let mut gradients = Vec::new();
    let mut staged = Vec::new();
    for ((device, pools), peers) in (0..).zip(devices).zip(peers(&sizes)) {
        let wired = wire_device(device, pools, peers, &sizes, &ring, lanes, &context_of);
        tasks.extend(wired.tasks);
        gradients.push(wired.gradients);
        staged.push(wired.staged);
    }
    let context = context_of(ActorName::Reducer);
    let reduced = to_optimizer;
    let kept = BTreeMap::new();
    let merging = BTreeMap::new();
    let measured = None;
    let reducer = Reducer {
        context,
        gradients,
        reduced,
        landing,
        part_slots,
        kept,
        merging,
        measured,
        deferred,
    };
    tasks.push(task(ActorName::Reducer, &ring, lanes, reducer));
    let (fetcher, inbox) = mailbox("steps", SIGNALS);
    let context = context_of(ActorName::Fetcher);
    let gathered = VecDeque::new();
    let first = Fetcher { context, inbox, staged, read_slots, gathered };
    tasks.push(task(ActorName::Fetcher, &ring, lanes, first));
    Wired { ring, tasks, fetcher, resolved }
}

/// The edges of shards between one device and each other: to their PeerCopiers, and to its own.
#[derive(Default)]
struct Peers {
    to: Vec<Outbox<Uploaded>>,
    from: Vec<Inbox<Uploaded>>,
}

/// The edges of each device; none if blocks come whole.
fn peers(sizes: &Pools) -> Vec<Peers> {
    let devices = sizes.devices as usize;
    let mut all: Vec<Peers> = (0..devices).map(|_| Peers::default()).collect();
    for to in (0..devices).filter(|_| sizes.shards > 1) {
        for from in (0..devices).filter(|&from| from != to) {
            let (outbox, inbox) = mailbox("shards", sizes.weights as usize);
            all[from].to.push(outbox);
            all[to].from.push(inbox);
        }
    }
    all
}

/// The actors of one device, and their edges to the others.
struct WiredDevice {
    tasks: Vec<ActorTask>,
    /// The edge to the first of them.
    staged: Outbox<Flow<Staged>>,
    /// The edge from them to the Reducer.
    gradients: Inbox<Flow<Gradients>>,
}

fn wire_device(
    device: DeviceId,
    pools: DevicePools,
    peers: Peers,
    sizes: &Pools,
    ring: &Arc<Ring>,
    lanes: &Arc<dyn Lanes>,
    context_of: &dyn Fn(ActorName) -> Context,
) -> WiredDevice {
    let (to_reducer, gradients) = mailbox("gradients", sizes.gradients as usize + SIGNALS);
    let (to_stasher, outputs) = mailbox("outputs", sizes.outputs as usize + SIGNALS);
    let (inputs_to_executor, inputs) = mailbox("inputs", sizes.inputs as usize);
    let (to_prefetcher, staged) = mailbox("staged", sizes.reads as usize + SIGNALS);

    let name = ActorName::Stasher(device);
    let stasher = Stasher { context: context_of(name), outputs, step: None };
    let mut tasks = vec![task(name, ring, lanes, stasher)];
    let weights_mailbox = |name| mailbox(name, sizes.visits as usize + SIGNALS);
    let (mut to_executor, weights) = weights_mailbox("weights");
    let name = ActorName::Executor(device);
    let executor = Executor {
        context: context_of(name),
        device,
        weights,
        inputs,
        outputs: to_stasher,
        gradients: to_reducer,
        output_slots: pools.outputs,
        gradient_slots: pools.gradients,
        open: HashMap::new(),
    };
    tasks.push(task(name, ring, lanes, executor));
    if sizes.shards > 1 {
        let name = ActorName::PeerCopier(device);
        let (to_peer_copier, prefetched) = weights_mailbox("prefetched");
        let weights = std::mem::replace(&mut to_executor, to_peer_copier);
        let context = context_of(name);
        let peers = peers.from;
        let peer_copier = PeerCopier { context, device, prefetched, peers, weights, step: None };
        tasks.push(task(name, ring, lanes, peer_copier));
    }
    let name = ActorName::Prefetcher(device);
    let prefetcher = Prefetcher {
        context: context_of(name),
        device,
        staged,
        master: None,
        weights: to_executor,
        inputs: inputs_to_executor,
        peers: peers.to,
        weight_slots: pools.weights,
        visit_credits: pools.visits,
        input_slots: pools.inputs,
        resident: vec![None; sizes.weights as usize],
    };
    tasks.push(task(name, ring, lanes, prefetcher));
    WiredDevice { tasks, staged: to_prefetcher, gradients }
}
