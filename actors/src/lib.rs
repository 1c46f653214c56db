//! The relay: a ring of five actors that moves a model through a device, one layer at a time.
//!
//! ```text
//!               Weights, Inputs            Gradients              Reduced
//!  Prefetcher ─────────────────▶ Executor ───────────▶ Reducer ───────────▶ Optimizer
//!    ▲    ▲                         │ Outputs                                   │
//!    │    └── Stashed (a fact) ── Stasher                                       │
//!    └────────────────────── Updated (a fact) ──────────────────────────────────┘
//! ```
//!
//! No tensors here: actors decide, [lanes](ports::Lanes) do. A step walks a [`Plan`]: a
//! [`Schedule`](schedule::Schedule) (plain data) with every choice made.
//!
//! # One block's round trip
//!
//! 1. The [`Relay`] sends [`Begin`](messages::Flow::Begin); the Prefetcher walks the plan's list.
//! 2. The Prefetcher awaits the fact [`Updated`](facts::Fact::Updated)` { block, version }`, takes
//!    the [slot](pool::Held) that the plan names and a visit credit, queues
//!    [`UploadBlock`](ports::Work::UploadBlock), and sends [`Weights`](messages::Weights) with the
//!    slot and the upload's [fence](fence::Fence).
//! 3. The Executor takes [`Inputs`](messages::Inputs) with it, one per micro-batch, acquires
//!    outputs and a gradient slot, queues [`Compute`](ports::Work::Compute) for every micro-batch,
//!    and sends [`Outputs`](messages::Outputs) to the Stasher, which queues downloads; each
//!    becomes the fact [`Stashed`](facts::Fact::Stashed), which brings it back as an input.
//! 4. When the last operation that adds to it is queued, the block's gradient rides in
//!    [`Gradients`](messages::Gradients) to the Reducer, which takes a landing block and queues
//!    [`DownloadGradient`](ports::Work::DownloadGradient), and [`Reduce`](ports::Work::Reduce)
//!    where it must wait or be joined.
//! 5. [`Reduced`](messages::Reduced) takes it to the Optimizer, which queues
//!    [`Update`](ports::Work::Update); when that ends,
//!    [`Updated`](facts::Fact::Updated)` { block, version + 1 }` is a fact. Once loss and norm are
//!    known, [`Resolved`] goes to the relay.
//!
//! The protocol, edge by edge and pool by pool, is in the crate's `README.md`.

pub mod schedule;

mod prefetcher;

mod executor;

mod stasher;

mod reducer;

mod optimizer;

mod cause;
pub mod conformance;
mod crew;
pub mod facts;
pub mod fence;
pub mod mailbox;
pub mod messages;
pub mod meter;
pub mod pool;
pub mod ports;
mod record;
mod relay;
mod report;
pub mod threads;
pub mod virtual_time;
mod watchdog;

pub use cause::{ActorName, Cause, Problem};
pub use crew::{Drill, Fault, Task};
pub use messages::Resolved;
pub use record::Record;
pub use relay::{Config, Error, Integrity, Relay};
pub use report::{Doing, InFlight, Observer, Snapshot};
pub use schedule::{Plan, Refusal};
