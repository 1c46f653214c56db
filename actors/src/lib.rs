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
//! 1. [`Begin`](messages): the [`Relay`] starts a step; the Prefetcher walks its list.
//! 2. The Prefetcher awaits the fact [`Updated`](facts::Fact::Updated)` { block, version }`, takes
//!    the [slot](pool::Held) that the plan names and a visit credit, queues
//!    [`UploadBlock`](ports::Work::UploadBlock) and sends
//!    **Weights** ([`messages`]) with slot and [fence](fence::Fence).
//! 3. The Executor takes **Inputs** with it, one message per micro-batch, acquires outputs and a
//!    gradient slot, queues [`Compute`](ports::Work::Compute) for every micro-batch, and sends
//!    **Outputs** to the Stasher, which queues downloads and whose fact
//!    [`Stashed`](facts::Fact::Stashed) brings them back as inputs.
//! 4. After the last micro-batch of its last backward visit, the gradient rides in **Gradients**
//!    to the Reducer, which takes a landing block and queues
//!    [`DownloadGradient`](ports::Work::DownloadGradient), and
//!    [`Reduce`](ports::Work::Reduce) where it must wait or join.
//! 5. **Reduced** takes it to the Optimizer, which queues [`Update`](ports::Work::Update); when
//!    that ends, [`Updated`](facts::Fact::Updated)` { block, version + 1 }` is a fact.
//!
//! The protocol, edge by edge and pool by pool, is in the crate's `README.md`.

pub mod schedule;

mod prefetcher;

mod executor;

mod stasher;

mod reducer;

mod optimizer;

pub mod conformance;
mod crew;
pub mod facts;
pub mod fence;
pub mod mailbox;
pub mod messages;
pub mod meter;
pub mod pool;
pub mod ports;
mod relay;
mod report;
pub mod threads;
pub mod virtual_time;
mod watchdog;

pub use crew::{ActorName, Cause, Drill, Fault, Problem, Task};
pub use messages::Resolved;
pub use relay::{Config, Error, Integrity, Relay};
pub use report::{Doing, InFlight, Observer, Snapshot};
pub use schedule::{Plan, Refusal};
