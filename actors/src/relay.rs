//! The relay: wires the ring, last to first, and drives it a step at a time.
//!
//! One step is unresolved at a time: when its loss and norm are known, every gradient has reached
//! the host, so the device, its slots and the stash are idle and the next step may use them. What
//! may still be in flight are updates on the host. The next step's Fetcher and Prefetcher follow
//! them block by block.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::cause::{Cause, Problem, until};
use crate::config::RingConfig;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Resolved};
use crate::names::ActorName;
use crate::observer::Observer;
use crate::operation::{Step, layers_of};
use crate::ports::{Lanes, Ports};
use crate::report::Snapshot;
use crate::ring::Ring;
use crate::schedule::{Refusal, Schedule, StepPlan, Version};
use crate::task::ActorTask;
use crate::watchdog;
use crate::wiring::{Wired, wire};

/// Whether the blocks in the EPS belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// All are of this version: the state after this number of training steps.
    Whole(Version),
    /// Some were updated and some were not, or an update did not end well (then the versions, of
    /// what was published last, may all be the same): recover from the last checkpoint.
    Torn(Vec<Version>),
    /// A block that was read differs from what was written. The code that keeps the blocks reports
    /// this, because the ring cannot tell.
    Damaged,
}

impl fmt::Display for Integrity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Integrity::Whole(version) => write!(f, "the model is whole, as of step {version}"),
            Integrity::Torn(_) => {
                write!(f, "the model is torn: go back to the last state that was kept")
            }
            Integrity::Damaged => {
                write!(f, "a block is damaged where it is kept: go back to a checkpoint")
            }
        }
    }
}

/// The errors of the relay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The step was not started; the relay can be used further.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The relay has ended. Reported once.
    #[error("{cause} ({integrity})")]
    Failed {
        /// The first failure.
        #[source]
        cause: Arc<Cause>,
        /// The state of the blocks after the failure.
        integrity: Integrity,
    },
    /// The failure was reported before.
    #[error("the relay has ended; the failure that ended it was reported before")]
    Ended,
}

/// The ring. Dropping it ends it: tasks and lanes end by themselves.
pub struct Relay<P: Ports> {
    config: RingConfig,
    ports: Arc<P>,
    ring: Arc<Ring>,
    fetcher: Outbox<Flow<()>>,
    resolved: Inbox<Resolved>,
    /// The number of the next step.
    next: u64,
    /// The version of every block when all updates are done.
    newest: Version,
    unresolved: bool,
    ended: bool,
    _watchdog: Option<watchdog::Leash>,
}

impl<P: Ports> Relay<P> {
    /// Starts the ring on the caller's tokio runtime, of either flavour.
    ///
    /// # Errors
    /// The system gives no thread for the watchdog.
    pub fn start(config: RingConfig, ports: Arc<P>) -> io::Result<Relay<P>> {
        let (mut relay, tasks) = Relay::wire(config, ports);
        let watch = |patience| watchdog::watch(&relay.ring, patience);
        relay._watchdog = relay.config.watchdog.map(watch).transpose()?;
        for task in tasks {
            tokio::spawn(task.future);
        }
        Ok(relay)
    }

    /// Makes the ring without starting it, last to first: run the tasks on any executor.
    pub fn wire(config: RingConfig, ports: Arc<P>) -> (Relay<P>, Vec<ActorTask>) {
        let lanes: Arc<dyn Lanes> = ports.clone();
        let Wired { ring, tasks, fetcher, resolved } = wire(&config, &lanes);
        let newest = config.trained;
        let relay = Relay {
            config,
            ports,
            ring,
            fetcher,
            resolved,
            next: 0,
            newest,
            unresolved: false,
            ended: false,
            _watchdog: None,
        };
        (relay, tasks)
    }

    /// Checks a schedule against this ring. A plan may be stepped many times.
    ///
    /// # Errors
    /// The schedule breaks a rule. The error names the rule and the visit.
    pub fn plan(&self, schedule: Schedule) -> Result<Arc<StepPlan>, Refusal> {
        self.check_bounds(&schedule)?;
        StepPlan::new(schedule, self.config.pools).map(Arc::new)
    }

    /// Refuses a schedule that this ring has no room for.
    fn check_bounds(&self, schedule: &Schedule) -> Result<(), Refusal> {
        if schedule.in_batches {
            self.check_batches(schedule)?;
        }
        let RingConfig { blocks, max_layers, max_micro_batches, .. } = self.config;
        let layers: BTreeSet<_> = schedule.device_visits().map(|visit| visit.layer).collect();
        let losses = schedule.visits.iter().filter(|visit| visit.kind.takes_loss());
        let losses = losses.map(|visit| visit.micro_batches.len()).sum();
        let bounds = [
            ("blocks in the schedule (as the model has)", schedule.blocks.len(), blocks),
            ("layers at most", layers.len(), max_layers),
            ("micro-batches at most", schedule.micro_batches.len(), max_micro_batches),
            ("losses at most, one a micro-batch", losses, max_micro_batches),
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

    /// Refuses a step in batches in a ring whose updates come too late for it, or too early.
    fn check_batches(&self, schedule: &Schedule) -> Result<(), Refusal> {
        let RingConfig { deferred, delay_from, .. } = self.config;
        let needs = (schedule.lag > 0).then_some(0);
        if deferred {
            return Err(Refusal::of(
                "a step in batches has updates inside it, which this ring would have wait for the \
                 norm of all its gradients",
            ));
        }
        if delay_from != needs {
            return Err(Refusal::of(format!(
                "a step in batches with a lag of {} needs a ring with delay_from {needs:?}, and \
                 this one has {delay_from:?}",
                schedule.lag
            )));
        }
        Ok(())
    }

    /// Runs one step by a plan of [`plan`](Relay::plan), and resolves when its loss and norm are
    /// known; updates may be in flight.
    ///
    /// When it is cancelled, the step itself continues; the next call waits for it first, and its
    /// result is lost.
    ///
    /// # Errors
    /// [`RingError::Refused`] leaves everything as it was; any other error ends the relay.
    pub async fn step(
        &mut self,
        plan: Arc<StepPlan>,
        batch: P::Batch,
    ) -> Result<Resolved, RingError> {
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
        let trains = plan.schedule.trains;
        let version = self.newest;
        let reads = if trains { self.config.reads(version) } else { version };
        let copies = self.config.copies();
        let layers = layers_of(&plan);
        let batches = u64::from(plan.schedule.batches());
        let step = Arc::new(Step { number: self.next, version, reads, copies, plan, layers });
        self.ports.begin(&step, batch);
        self.next += 1;
        self.newest += if trains { batches } else { 0 };
        self.unresolved = true;
        self.ring.awaited.store(true, Relaxed);
        self.ring.facts.begin(&step.plan);
        self.fetcher.send(Flow::Begin(step));
        let resolved = self.resolve().await?;
        Ok(resolved.expect("a step was unresolved"))
    }

    /// Steps that have begun: the number of the next.
    pub fn begun(&self) -> u64 {
        self.next
    }

    /// The version of every block when all updates are done: the training steps that have begun,
    /// with those before this run.
    pub fn newest(&self) -> Version {
        self.newest
    }

    /// The time at which the last result was known, by the lanes' clock. It may be before the
    /// caller took the result.
    pub fn resolved_at(&self) -> Duration {
        self.ring.resolved_at()
    }

    /// Waits for a step whose future was dropped, if there is one, and returns its result. The next
    /// call of [`step`](Relay::step) or [`settle`](Relay::settle) would drop it.
    ///
    /// # Errors
    /// The failure that ended the relay.
    pub async fn resolve(&mut self) -> Result<Option<Resolved>, RingError> {
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
    pub async fn settle(&mut self) -> Result<(), RingError> {
        self.resolve().await?;
        self.ring.awaited.store(true, Relaxed);
        match self.ring.switch.until_tripped(self.ring.facts.settled(self.newest)).await {
            Some(()) => {
                self.ring.awaited.store(false, Relaxed);
                Ok(())
            }
            None => Err(self.end().await),
        }
    }

    /// Resolves once every block is published as of all steps that have begun, with true; with
    /// false if the relay ends before. Further steps may run meanwhile.
    pub fn settled(&self) -> impl Future<Output = bool> + Send + 'static + use<P> {
        let ring = self.ring.clone();
        let version = self.newest;
        async move { ring.switch.until_tripped(ring.facts.settled(version)).await.is_some() }
    }

    /// Settles, stops every actor with a message along the flow, and waits for tasks and lanes.
    ///
    /// # Errors
    /// The failure that ended the relay before.
    pub async fn stop(mut self) -> Result<(), RingError> {
        self.settle().await?;
        self.ring.awaited.store(true, Relaxed);
        self.fetcher.send(Flow::Stop);
        match self.ring.switch.until_tripped(self.ring.ended()).await {
            Some(()) => {
                // Lanes may fail or hang in the operations that they still have.
                let closed = self.ring.switch.until_tripped(self.ports.closed()).await;
                if closed.is_none() || self.ring.switch.tripped() {
                    return Err(self.end().await);
                }
                self.ended = true;
                Ok(())
            }
            None => Err(self.end().await),
        }
    }

    /// Waits until all has ended after the switch tripped, and reports the reason, once.
    async fn end(&mut self) -> RingError {
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
                RingError::Failed { cause, integrity: self.integrity() }
            }
            _ => RingError::Ended,
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

    /// The state of the ring now: waiting actors, slots in use, queued operations.
    pub fn snapshot(&self) -> Snapshot {
        self.ring.snapshot()
    }

    /// An observer, to look at the ring while another task drives the relay.
    pub fn observer(&self) -> Observer {
        let lanes: Arc<dyn Lanes> = self.ports.clone();
        Observer::new(&self.ring, &lanes)
    }
}

impl<P: Ports> Drop for Relay<P> {
    fn drop(&mut self) {
        if !self.ended {
            self.ring.switch.trip(Cause {
                actor: ActorName::Fetcher,
                layer: None,
                operation: "between steps".into(),
                problem: Problem::Dropped,
            });
        }
    }
}
