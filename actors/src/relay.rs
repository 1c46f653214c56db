//! The relay: wires the ring, last to first, and drives it a step at a time.
//!
//! One step is unresolved at a time: when its loss and norm are known, every gradient has reached
//! the host, so the device, its slots and the stash are idle and the next step may use them. What
//! may still be in flight are updates on the host, and the next step's Prefetcher follows them
//! block by block.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::cause::{ActorName, Cause, Problem, until};
use crate::crew::{Desk, Drill, Ring, Task, task};
use crate::executor::Executor;
use crate::mailbox::{Inbox, Outbox, mailbox};
use crate::messages::{Flow, Resolved};
use crate::optimizer::Optimizer;
use crate::pool::Pool;
use crate::ports::{Lanes, Ports, Step};
use crate::prefetcher::Prefetcher;
use crate::reducer::Reducer;
use crate::report::{Observer, Snapshot};
use crate::schedule::{Plan, Pools, Refusal, Schedule, Version};
use crate::stasher::Stasher;
use crate::watchdog;

/// What a ring is made with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Slots of every pool: [`Pools::of`] the largest schedule it will run.
    pub pools: Pools,
    /// Blocks of the model.
    pub blocks: u32,
    /// The most layers a step visits.
    pub max_layers: u32,
    /// The most micro-batches a step has.
    pub max_micro_batches: u32,
    /// False: eager, a block is updated as soon as its gradient is complete. True: deferred,
    /// when the norm is known (clipping, loss scaling, skipping).
    pub deferred: bool,
    /// The ring fails when nothing moved for this long.
    pub watchdog: Option<Duration>,
    /// A failure to rehearse.
    pub drill: Option<Drill>,
}

/// Whether the blocks in the EPS belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// All are of this version: the state after so many steps.
    Whole(Version),
    /// Some were updated and some were not, or an update did not end well (then the versions, of
    /// what was published last, may all be the same): recover from the last checkpoint.
    Torn(Vec<Version>),
}

/// How the relay can fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The step was not started; the relay goes on.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The relay has ended. Reported once.
    #[error("{cause} ({})", match .integrity {
        Integrity::Whole(version) => format!("the model is whole, as of step {version}"),
        Integrity::Torn(_) => "the model is torn: go back to the last state that was kept".to_string(),
    })]
    Failed {
        /// The first failure.
        cause: Arc<Cause>,
        /// What it left behind.
        integrity: Integrity,
    },
    /// The failure was reported before.
    #[error("the relay has ended; the failure that ended it was reported before")]
    Ended,
}

/// The ring. Dropping it ends it: tasks and lanes end by themselves.
pub struct Relay<P: Ports> {
    config: Config,
    ports: Arc<P>,
    ring: Arc<Ring>,
    prefetcher: Outbox<Flow<()>>,
    resolved: Inbox<Resolved>,
    next: Version,
    unresolved: bool,
    ended: bool,
    last_plan: Option<Arc<Plan>>,
    _watchdog: Option<watchdog::Leash>,
}

impl<P: Ports> Relay<P> {
    /// Starts the ring on the caller's tokio runtime, of either flavour.
    pub fn start(config: Config, ports: Arc<P>) -> Relay<P> {
        let (mut relay, tasks) = Relay::wire(config, ports);
        for task in tasks {
            tokio::spawn(task.future);
        }
        relay._watchdog =
            relay.config.watchdog.map(|patience| watchdog::watch(&relay.ring, patience));
        relay
    }

    /// Makes the ring without starting it, last to first: run the tasks on any executor.
    pub fn wire(config: Config, ports: Arc<P>) -> (Relay<P>, Vec<Task>) {
        let Config { pools, deferred, drill, blocks, .. } = config;
        let lanes: Arc<dyn Lanes> = ports.clone();
        let weight_slots = Pool::new("weights", pools.weights);
        let visit_credits = Pool::new("visits", pools.visits);
        let input_slots = Pool::new("inputs", pools.inputs);
        let output_slots = Pool::new("outputs", pools.outputs);
        let gradient_slots = Pool::new("gradients", pools.gradients);
        let landing = Pool::new("reduced", pools.reduced);
        let (read_slots, state_slots) =
            (Pool::new("reads", pools.reads), Pool::new("states", pools.states));
        let all =
            [&weight_slots, &visit_credits, &input_slots, &output_slots, &gradient_slots, &landing];
        let on_file = [&read_slots, &state_slots];
        let on_file = on_file.into_iter().filter(|_| pools.is_on_file());
        let gauges = all.into_iter().chain(on_file).map(Pool::gauge).collect();
        let ring = Arc::new(Ring::new(blocks as usize, gauges, lanes.now()));
        let desk = |name| Desk::new(name, &ring, &lanes, drill);

        // Room: the credits a message carries, and Begin, End, Stop of the one unresolved step.
        // A Reduced carries a landing slot, or is one of a block's or a micro-batch's per step.
        const SIGNALS: usize = 3;
        let outcomes = blocks as usize + config.max_micro_batches as usize;
        let (to_relay, resolved) = mailbox("resolved", 1);
        let (to_optimizer, reduced) = mailbox("reduced", outcomes + SIGNALS);
        let (to_reducer, gradients) = mailbox("gradients", pools.gradients as usize + SIGNALS);
        let (to_stasher, outputs) = mailbox("outputs", pools.outputs as usize + SIGNALS);
        let (inputs_to_executor, inputs) = mailbox("inputs", pools.inputs as usize);
        let (to_executor, weights) = mailbox("weights", pools.visits as usize + SIGNALS);
        let (to_prefetcher, steps) = mailbox("steps", SIGNALS);

        let optimizer = Optimizer {
            desk: desk(ActorName::Optimizer),
            reduced,
            resolved: to_relay,
            deferred,
            state_slots,
            updating: None,
        };
        let reducer = Reducer {
            desk: desk(ActorName::Reducer),
            gradients,
            reduced: to_optimizer,
            landing,
            deferred,
        };
        let stasher = Stasher { desk: desk(ActorName::Stasher), outputs, step: None };
        let executor = Executor {
            desk: desk(ActorName::Executor),
            weights,
            inputs,
            outputs: to_stasher,
            gradients: to_reducer,
            output_slots,
            gradient_slots,
            open: HashMap::new(),
        };
        let prefetcher = Prefetcher {
            desk: desk(ActorName::Prefetcher),
            inbox: steps,
            weights: to_executor,
            inputs: inputs_to_executor,
            weight_slots,
            visit_credits,
            input_slots,
            resident: vec![None; pools.weights as usize],
            read_slots,
            read: VecDeque::new(),
        };
        let tasks = vec![
            task(ActorName::Optimizer, &ring, &lanes, optimizer),
            task(ActorName::Stasher, &ring, &lanes, stasher),
            task(ActorName::Reducer, &ring, &lanes, reducer),
            task(ActorName::Executor, &ring, &lanes, executor),
            task(ActorName::Prefetcher, &ring, &lanes, prefetcher),
        ];
        let relay = Relay {
            config,
            ports,
            ring,
            prefetcher: to_prefetcher,
            resolved,
            next: 0,
            unresolved: false,
            ended: false,
            last_plan: None,
            _watchdog: None,
        };
        (relay, tasks)
    }

    /// Checks a schedule against this ring. A plan made once may be stepped many times.
    ///
    /// # Errors
    /// The rule it breaks and the visit that breaks it.
    pub fn plan(&self, schedule: Schedule) -> Result<Arc<Plan>, Refusal> {
        self.check_bounds(&schedule)?;
        Plan::new(schedule, self.config.pools).map(Arc::new)
    }

    /// What this ring has room for.
    fn check_bounds(&self, schedule: &Schedule) -> Result<(), Refusal> {
        let layers: BTreeSet<_> =
            schedule.visits.iter().filter(|v| v.on_device()).map(|visit| visit.layer).collect();
        let losses = schedule.visits.iter().filter(|visit| visit.is_loss());
        let losses = losses.map(|visit| visit.micro_batches.len()).sum();
        let bounds = [
            (
                "blocks in the schedule (as the model has)",
                schedule.blocks.len(),
                self.config.blocks,
            ),
            ("layers at most", layers.len(), self.config.max_layers),
            ("micro-batches at most", schedule.micro_batches.len(), self.config.max_micro_batches),
            ("losses at most, one a micro-batch", losses, self.config.max_micro_batches),
        ];
        for (index, (what, has, allowed)) in bounds.into_iter().enumerate() {
            let allowed = allowed as usize;
            if has > allowed || (index == 0 && has != allowed) {
                let reason = format!("this ring was made for {allowed} {what}, not {has}");
                return Err(Refusal::of(reason));
            }
        }
        Ok(())
    }

    /// Runs one step and resolves when its loss and norm are known; updates may be in flight.
    ///
    /// Cancelled, the step goes on; the next call waits for it first and its result is lost.
    ///
    /// # Errors
    /// [`Error::Refused`] leaves everything as it was; any other error ends the relay.
    pub async fn step(&mut self, schedule: &Schedule, batch: P::Batch) -> Result<Resolved, Error> {
        let plan = match self.last_plan.take().filter(|plan| plan.schedule == *schedule) {
            Some(plan) => plan,
            None => self.plan(schedule.clone())?,
        };
        self.last_plan = Some(plan.clone());
        self.step_plan(plan, batch).await
    }

    /// [`step`](Relay::step) with a plan of [`plan`](Relay::plan)'s.
    ///
    /// # Errors
    /// As [`step`](Relay::step).
    pub async fn step_plan(&mut self, plan: Arc<Plan>, batch: P::Batch) -> Result<Resolved, Error> {
        self.check_bounds(&plan.schedule)?;
        if plan.pools != self.config.pools {
            return Err(
                Refusal::of("the plan was made for other pools: plan with this relay").into()
            );
        }
        self.resolve().await?;
        if self.ended || self.ring.switch.tripped() {
            return Err(self.end().await);
        }
        let step = Arc::new(Step { number: self.next, plan });
        self.ports.begin(&step, batch);
        self.next += 1;
        self.unresolved = true;
        self.ring.awaited.store(true, Relaxed);
        self.prefetcher.send(Flow::Begin(step));
        let resolved = self.resolve().await?;
        Ok(resolved.expect("a step was unresolved"))
    }

    /// Steps that have begun: the number of the next.
    pub fn begun(&self) -> Version {
        self.next
    }

    /// When the last result was known, by the lanes' clock, which may be before its caller took it.
    pub fn resolved_at(&self) -> Duration {
        self.ring.resolved_at()
    }

    /// The result of the unresolved step, if there is one.
    async fn resolve(&mut self) -> Result<Option<Resolved>, Error> {
        if !self.unresolved {
            return Ok(None);
        }
        match self.ring.switch.until_tripped(self.resolved.recv()).await {
            Some(resolved) => {
                self.unresolved = false;
                Ok(Some(resolved))
            }
            None => Err(self.end().await),
        }
    }

    /// Waits until every update of every step is done.
    ///
    /// # Errors
    /// The failure that ended the relay.
    pub async fn settle(&mut self) -> Result<(), Error> {
        self.resolve().await?;
        self.ring.awaited.store(true, Relaxed);
        match self.ring.switch.until_tripped(self.ring.facts.settled(self.next)).await {
            Some(()) => {
                self.ring.awaited.store(false, Relaxed);
                Ok(())
            }
            None => Err(self.end().await),
        }
    }

    /// Settles, stops every actor with a message along the flow, and waits for tasks and lanes.
    ///
    /// # Errors
    /// The failure that ended the relay before.
    pub async fn stop(mut self) -> Result<(), Error> {
        self.settle().await?;
        self.ring.awaited.store(true, Relaxed);
        self.prefetcher.send(Flow::Stop);
        match self.ring.switch.until_tripped(self.ring.ended()).await {
            Some(()) => {
                self.ports.closed().await;
                if self.ring.switch.tripped() {
                    return Err(self.end().await); // what lanes still had to do
                }
                self.ended = true;
                Ok(())
            }
            None => Err(self.end().await),
        }
    }

    /// After the switch tripped: waits until all has ended, and tells why, once.
    async fn end(&mut self) -> Error {
        let cause = self.ring.switch.cause();
        let hung = cause.is_some_and(|cause| matches!(cause.problem, Problem::Hang(..)));
        let ended = async {
            self.ring.ended().await;
            if !hung {
                self.ports.closed().await; // what hangs may never
            }
        };
        until(&self.ring.given_up, ended).await;
        match self.ring.switch.cause() {
            Some(cause) if !std::mem::replace(&mut self.ended, true) => {
                Error::Failed { cause, integrity: self.integrity() }
            }
            _ => Error::Ended,
        }
    }

    fn integrity(&self) -> Integrity {
        let versions = self.ring.facts.versions();
        let first = versions.first().copied().unwrap_or(0);
        let whole = versions.iter().all(|&version| version == first);
        if whole && !self.ring.is_torn_inside() {
            Integrity::Whole(first)
        } else {
            Integrity::Torn(versions)
        }
    }

    /// The ring now: who waits for what, who holds which slot, what is queued.
    pub fn snapshot(&self) -> Snapshot {
        self.ring.snapshot()
    }

    /// For whoever wants to look while another task drives the relay.
    pub fn observer(&self) -> Observer {
        let lanes: Arc<dyn Lanes> = self.ports.clone();
        Observer { ring: self.ring.clone(), lanes: Arc::downgrade(&lanes) }
    }
}

impl<P: Ports> Drop for Relay<P> {
    fn drop(&mut self) {
        if !self.ended {
            self.ring.switch.trip(Cause {
                actor: ActorName::Prefetcher,
                layer: None,
                operation: "between steps".into(),
                problem: Problem::Dropped,
            });
        }
    }
}
