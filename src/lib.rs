//! Trains transformers too large for the device, one layer at a time.
//!
//! ```text
//!  Batches ──▶ Trainer ──▶ the ring of actors ──▶ lanes: upload, compute, download, host, update
//!  (data)         │                                  │              │
//!                 ▼                              the device     the host: masters, optimizer
//!             checkpoint                       (one layer)      state, gradients, stash
//! ```
//!
//! The ring of actors is the crate [`actors`] (`l2l-actors`); this crate implements its ports. A
//! [`Trainer`] is a training run, made from a [`Config`]: a model ([`models`]), its update rule
//! ([`optimizers`]), the host's eager param-server ([`eps`]) and a device ([`devices`]). It trains
//! on batches ([`data`]).

pub use l2l_actors as actors;

pub mod limits;

mod error;

mod blocking;
mod lock;

mod folder;
mod lfs;

pub mod fabric;

mod random;
mod simd;

pub mod tensor;

mod product;

pub mod kernels;

pub mod objectives;

pub mod models;

pub mod optimizers;

pub mod compression;

pub mod config;

pub mod eps;

pub mod hf;

mod resolve;

pub mod data;

pub mod machine;

pub mod devices;

mod stash;

pub mod plan;

mod worker;

mod engine;

pub mod telemetry;

pub mod checkpoint;

mod trainer;

pub mod inference;

pub mod testing;

pub use config::Config;
pub use engine::{Bottleneck, StepReport, Summary};
pub use error::{Error, ErrorKind, Misfit, Resource};
pub use plan::Plan;
pub use resolve::{largest_shape_of, model_of, shape_of, training_of};
pub use trainer::{
    Builder, Callbacks, End, Fit, Fitted, NewLayer, Prepared, RunMessage, StopRequest, Trainer,
    state_on_file,
};

/// The programs in docs/embedding.md compile.
#[cfg(doctest)]
#[doc = include_str!("../docs/embedding.md")]
pub struct Embedding;
