//! The relay: a ring of actors that moves a model through devices, one layer at a time. Prefetcher,
//! Executor and Stasher are there once for each device.
//!
//! ```text
//!         Staged          Weights, Inputs          Gradients          Reduced
//! Fetcher ──────▶ Prefetcher ────────────▶ Executor ────────▶ Reducer ───────▶ Optimizer
//!    ▲             ▲    ▲                     │ Outputs                           │
//!    │             │    └─ Stashed (a fact) ─ Stasher                             │
//!    └─────────────┴──────────────── Updated (a fact) ────────────────────────────┘
//! ```
//!
//! No tensors here: actors decide, [lanes](ports::Lanes) do. A step walks a [`StepPlan`]: a
//! [`Schedule`](schedule::Schedule) (plain data) with every choice made.
//!
//! # One block's round trip
//!
//! 1. The [`Relay`] sends [`Begin`](messages::Flow::Begin). The Fetcher gathers the batch's
//!    embeddings, and reads a block that is on file to a staging slot, which rides in
//!    [`Staged`](messages::Staged) to the Prefetcher. All actors walk lists of the one plan.
//! 2. The Prefetcher awaits the fact [`Updated`](facts::Fact::Updated)` { block, version }`, takes
//!    the [slot](pool::Held) that the plan names and a visit credit, queues
//!    [`UploadBlock`](work::Work::UploadBlock), and sends [`Weights`](messages::Weights) with the
//!    slot and the upload's [fence](fence::Fence).
//!    Where blocks come in shards, a PeerCopier behind it queues
//!    [`CopyShards`](work::Work::CopyShards) and hands `Weights` on.
//! 3. The Executor takes [`Inputs`](messages::Inputs) with it, one per micro-batch, acquires
//!    outputs and a gradient slot, queues [`Compute`](work::Work::Compute) for every micro-batch,
//!    and sends [`Outputs`](messages::Outputs) to the Stasher, which queues downloads; each
//!    becomes the fact [`Stashed`](facts::Fact::Stashed), which brings it back as an input.
//! 4. When the last operation that adds to it is queued, the block's gradient rides in
//!    [`Gradients`](messages::Gradients) to the Reducer, which takes a landing block and queues
//!    [`DownloadGradient`](work::Work::DownloadGradient), and [`Reduce`](work::Work::Reduce)
//!    where it must wait or be joined.
//! 5. [`Reduced`](messages::Reduced) takes it to the Optimizer, which queues
//!    [`Update`](work::Work::Update); when that ends,
//!    [`Updated`](facts::Fact::Updated)` { block, version + 1 }` is a fact. Once loss and norm are
//!    known, [`Resolved`] goes to the relay.
//!
//! The protocol, edge by edge and pool by pool, is in the crate's `README.md`.

pub mod schedule;
pub mod work;

pub mod facts;
pub mod fence;
pub mod mailbox;
pub mod meter;
pub mod pool;

mod cause;
mod names;
mod operation;
mod report;
mod ring;

pub mod ports;
mod record;

mod context;
pub mod messages;
mod task;

mod fetcher;

mod prefetcher;

mod peer_copier;

mod executor;

mod stasher;

mod reducer;

mod optimizer;

mod config;
mod observer;
mod relay;
mod watchdog;
mod wiring;

pub mod conformance;
pub mod serial;
pub mod threads;
pub mod virtual_time;

pub use cause::{BoxedError, Cause, Problem};
pub use config::{Patience, RingConfig};
pub use context::{Fault, FaultInjection};
pub use messages::Resolved;
pub use names::ActorName;
pub use observer::Observer;
pub use operation::{Operation, Step};
pub use record::{Record, RecordSink};
pub use relay::{Integrity, Relay, RingError};
pub use report::{Doing, InFlight, Snapshot};
pub use schedule::{Refusal, StepPlan};
pub use task::ActorTask;
