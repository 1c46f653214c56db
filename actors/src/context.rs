//! An actor's context: how it waits and how it orders work.
//!
//! Three things wait: `recv`, `acquire`, and awaiting a fence or a fact. All go through
//! [`Context::wait`], which times the wait and notes its reason, so the watchdog can name both. The
//! kill switch is raced against the whole actor, so every wait ends when it trips and no wait needs
//! to know about it.

use std::future::Future;
use std::sync::Arc;

use crate::cause::BoxedError;
use crate::facts::Facts;
use crate::fence::{Done, Fence};
use crate::mailbox::Inbox;
use crate::messages::Flow;
use crate::meter::ActorState;
use crate::names::ActorName;
use crate::operation::{Operation, Order, Step};
use crate::pool::{Content, Held, Pool};
use crate::ports::Lanes;
use crate::ring::{Ring, Standing, WaitsFor};
use crate::schedule::{BlockId, BoundaryId, LayerId, MicroBatch, Version};
use crate::work::Lane;

/// A fault to inject, for tests: what an actor does instead of its `wait`-th wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultInjection {
    /// The actor that fails.
    pub actor: ActorName,
    /// The number of the wait at which it fails, from 0.
    pub wait: u64,
    /// The fault.
    pub fault: Fault,
}

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The actor returns an error.
    Error,
    /// The actor panics.
    Panic,
    /// The actor waits for ever.
    Hang,
}

/// One actor's access to its ring.
pub(crate) struct Context {
    name: ActorName,
    ring: Arc<Ring>,
    lanes: Arc<dyn Lanes>,
    injection: Option<FaultInjection>,
    waits: u64,
}

impl Context {
    pub(crate) fn new(
        name: ActorName,
        ring: &Arc<Ring>,
        lanes: &Arc<dyn Lanes>,
        injection: Option<FaultInjection>,
    ) -> Context {
        let injection = injection.filter(|injection| injection.actor == name);
        Context { name, ring: ring.clone(), lanes: lanes.clone(), injection, waits: 0 }
    }

    /// Every wait of an actor goes through here.
    async fn wait<F: Future>(
        &mut self,
        state: ActorState,
        what: WaitsFor,
        layer: Option<LayerId>,
        future: F,
    ) -> Result<F::Output, BoxedError> {
        if let Some(FaultInjection { wait, fault, .. }) = self.injection
            && wait == self.waits
        {
            self.fail_on_purpose(fault, what, layer).await?;
        }
        self.waits += 1;
        self.enter(state, what, layer);
        let output = future.await;
        self.enter(ActorState::Busy, what, layer);
        self.ring.moves();
        Ok(output)
    }

    fn enter(&self, state: ActorState, what: WaitsFor, layer: Option<LayerId>) {
        let since = self.lanes.now();
        let waits = self.waits;
        self.ring.post(self.name).enter(Standing { state, what, layer, since, waits });
    }

    async fn fail_on_purpose(
        &self,
        fault: Fault,
        what: WaitsFor,
        layer: Option<LayerId>,
    ) -> Result<(), BoxedError> {
        self.enter(ActorState::Busy, what, layer);
        match fault {
            Fault::Error => Err("an injected error".into()),
            Fault::Panic => panic!("an injected panic"),
            Fault::Hang => std::future::pending().await,
        }
    }

    pub(crate) async fn recv<T>(
        &mut self,
        inbox: &mut Inbox<T>,
        layer: Option<LayerId>,
    ) -> Result<T, BoxedError> {
        self.wait(ActorState::Starved, WaitsFor::Message(inbox.name()), layer, inbox.recv()).await
    }

    /// Receives the begin of the next step; `None`: the ring stops.
    pub(crate) async fn next_step<T>(
        &mut self,
        inbox: &mut Inbox<Flow<T>>,
    ) -> Result<Option<Arc<Step>>, BoxedError> {
        match self.recv(inbox, None).await? {
            Flow::Begin(step) => Ok(Some(step)),
            Flow::Stop => Ok(None),
            Flow::Datum(_) | Flow::End(_) => unreachable!("the walk of a step takes all of it"),
        }
    }

    /// Takes one slot, whichever is free.
    pub(crate) async fn acquire(
        &mut self,
        pool: &mut Pool,
        content: Content,
        layer: Option<LayerId>,
    ) -> Result<Held, BoxedError> {
        let what = WaitsFor::Slot(pool.name(), content);
        self.wait(ActorState::Blocked, what, layer, pool.acquire(content)).await
    }

    /// Takes the slot of this number.
    pub(crate) async fn acquire_slot(
        &mut self,
        pool: &mut Pool,
        slot: u32,
        content: Content,
        layer: Option<LayerId>,
    ) -> Result<Held, BoxedError> {
        let what = WaitsFor::Slot(pool.name(), content);
        self.wait(ActorState::Blocked, what, layer, pool.acquire_slot(slot, content)).await
    }

    /// Waits for an operation on this lane.
    pub(crate) async fn fence(
        &mut self,
        lane: Lane,
        fence: &Fence,
        layer: Option<LayerId>,
    ) -> Result<Done, BoxedError> {
        self.wait(ActorState::Blocked, WaitsFor::Operation(lane), layer, fence.wait()).await
    }

    /// Waits for an operation on this lane that another actor queued.
    pub(crate) async fn arrived(
        &mut self,
        lane: Lane,
        fence: &Fence,
        layer: Option<LayerId>,
    ) -> Result<Done, BoxedError> {
        let what = WaitsFor::Operation(lane);
        self.wait(ActorState::Starved, what, layer, fence.wait()).await
    }

    /// Waits until a block is published as of this version.
    pub(crate) async fn published(
        &mut self,
        block: BlockId,
        version: Version,
        layer: Option<LayerId>,
    ) -> Result<(), BoxedError> {
        let updated = async |facts: &Facts| facts.updated(block, version).await;
        self.fact(Content::Block(block, version), layer, updated).await
    }

    /// Waits until these boundaries of a micro-batch are in the stash. A report names the first.
    pub(crate) async fn stashed(
        &mut self,
        boundaries: &[BoundaryId],
        micro_batch: MicroBatch,
        layer: Option<LayerId>,
    ) -> Result<(), BoxedError> {
        let landed = async |facts: &Facts| facts.stashed(boundaries, micro_batch).await;
        self.fact(Content::Boundary(boundaries[0], micro_batch), layer, landed).await
    }

    async fn fact(
        &mut self,
        content: Content,
        layer: Option<LayerId>,
        fact: impl AsyncFnOnce(&Facts),
    ) -> Result<(), BoxedError> {
        let ring = self.ring.clone();
        self.wait(ActorState::Starved, WaitsFor::Fact(content), layer, fact(&ring.facts)).await
    }

    /// Notes that a step's result is known, even if its caller has not asked for it yet.
    pub(crate) fn resolves(&self) {
        self.ring.resolves(self.lanes.now());
    }

    pub(crate) fn queue(&self, order: Order) -> Fence {
        let (operation, fence) =
            Operation::new(self.name, order, self.ring.clone(), self.lanes.now());
        self.lanes.queue(operation);
        fence
    }
}
