//! Trains transformers too large for the device, one layer at a time.
//!
//! ```text
//!  Batches ──▶ Trainer ──▶ the ring of actors ──▶ lanes: upload, compute, download, host, update
//!  (data)         │                                  │              │
//!                 ▼                              the device     the host: masters, optimizer
//!             checkpoint                       (one layer)      state, gradients, stash
//! ```
//!
//! The ring is [`actors`] (crate `l2l-actors`); this crate is what its ports are made of. A
//! [`Trainer`] is a run: a model ([`models`]), its update rule ([`optimizers`]), the host's eager
//! param-server and a device, made from a [`Config`], driven by batches ([`data`]).

pub use l2l_actors as actors;

mod arena;
pub mod checkpoint;
pub mod config;
pub mod data;
mod devices;
mod eps;
mod error;
pub mod hf;
pub mod inference;
pub mod machine;
pub mod models;
pub mod optimizers;
mod random;
mod simd;
mod stash;
pub mod telemetry;
pub mod testing;
mod trainer;

pub use config::{Config, Plan, shape_of};
pub use error::Error;
pub use trainer::{Bottleneck, Builder, StepReport, Summary, Trainer, state_on_file};

/// The page's program compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
