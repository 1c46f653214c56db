//! The batches of a training run, each a function of its step. A thread prepares the next batch
//! while the ring works on the current one.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread;

use futures_core::Stream;
use tokio::sync::mpsc::{self, Receiver};

use super::order::Order;
use super::{Batch, Dataset, Sequence};
use crate::config::Config;
use crate::error::Error;
use crate::hf::shape_of;

/// An endless stream of batches. Dropping it ends its thread.
pub struct Batches {
    /// Filled by the thread `l2l-data`, which makes one batch ahead.
    ready: Receiver<Result<Batch, Error>>,
}

/// The order of training that a config asks for.
pub(super) fn order(config: &Config) -> Order {
    Order {
        seed: config.step.seed,
        shuffle: config.data.shuffle,
        by_length: config.data.group_by_length,
        batch: config.step.batch,
    }
}

fn unlabelled(name: &str, step: u64) -> Error {
    let step = step + 1;
    Error::bad_data(name, format_args!("no position of the batch of step {step} has a label"))
}

impl Batches {
    /// Opens the training set of a config, and starts with its first step. It reads and tokenizes,
    /// and blocks its thread; [`Trainer::open`](crate::Trainer::open) does not.
    ///
    /// # Errors
    /// As [`Dataset::open`], [`Batches::check`] and [`Batches::start`].
    pub fn open(config: &Config) -> Result<Batches, Error> {
        let (data, _) = Dataset::open(config, &shape_of(config)?)?;
        Batches::check(config, &data, config.steps(data.len())?)?;
        Batches::start(config, data, 0)
    }

    /// Refuses data of which some batch of the first `steps` steps has no label.
    ///
    /// # Errors
    /// The first step without a label.
    pub fn check(config: &Config, data: &Dataset, steps: u64) -> Result<(), Error> {
        match order(config).unlabelled(data, steps) {
            None => Ok(()),
            Some(step) => Err(unlabelled(data.name(), step)),
        }
    }

    /// The sequences that a step trains on. The first step is 0.
    ///
    /// # Errors
    /// The spooled data cannot be read any more.
    pub fn of_step(config: &Config, data: &Dataset, step: u64) -> Result<Vec<Sequence>, Error> {
        order(config).sequences(data, step)
    }

    /// Starts to make the batches of `data`, from step `first` on.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(config: &Config, data: Dataset, first: u64) -> Result<Batches, Error> {
        let order = order(config);
        // Capacity 1: one batch waits while the next one is made.
        let (sender, ready) = mpsc::channel(1);
        let make = move || {
            for step in first.. {
                let batch = match order.batch(&data, step) {
                    Ok(batch) if batch.labelled == 0 => Err(unlabelled(data.name(), step)),
                    batch => batch,
                };
                let is_last = batch.is_err();
                if sender.blocking_send(batch).is_err() || is_last {
                    return;
                }
            }
        };
        thread::Builder::new().name("l2l-data".into()).spawn(make).map_err(Error::system)?;
        Ok(Batches { ready })
    }

    /// The next batch.
    ///
    /// # Errors
    /// The spooled data cannot be read any more, or the batch has no label.
    pub async fn next(&mut self) -> Result<Batch, Error> {
        let none =
            || Err(Error::system("the data has ended with an error that was reported before"));
        self.ready.recv().await.unwrap_or_else(none)
    }
}

impl Stream for Batches {
    type Item = Result<Batch, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.ready.poll_recv(context)
    }
}
