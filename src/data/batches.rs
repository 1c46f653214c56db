//! The batches of a training run; each depends only on its step. A thread prepares the next batch
//! while the ring works on the current one.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread;

use futures_core::Stream;
use tokio::sync::mpsc::{self, Receiver};

use super::order::Order;
use super::reader::SKIP_THEM;
use super::{Batch, Dataset, Sequence};
use crate::config::Config;
use crate::error::Error;
use crate::resolve::shape_of;

/// An endless stream of batches. Dropping it ends its thread. The stream ends after an error.
pub struct Batches {
    /// Sent by the thread `l2l-data`. Capacity 1: one batch waits while the next one is made.
    ready: Receiver<Result<Batch, Error>>,
}

/// The error of a batch without a label. It names the first record that has none.
fn unlabelled(data: &Dataset, step: u64) -> Error {
    let batch = format!("no position of the batch of step {} has a label", step + 1);
    let what = match data.unlabelled().count {
        0 | 1 => format!(", and {batch}"),
        count => format!("; there are {count} such records, and {batch}"),
    };
    let error = data.unlabelled().error(format_args!("{what}: {SKIP_THEM}"));
    error.unwrap_or_else(|| Error::bad_data(data.name(), batch))
}

/// The batch of a step; or, as one batch, those of all steps of a window, each with a label.
fn made(order: Order, data: &Dataset, first: u64, window: u32) -> Result<Batch, Error> {
    let mut all = Vec::new();
    for step in first..first + u64::from(window) {
        let sequences = order.sequences(data, step)?;
        let batch = data.batch_of(&sequences);
        if batch.labelled == 0 {
            return Err(unlabelled(data, step));
        }
        if window == 1 {
            return Ok(batch);
        }
        all.extend(sequences);
    }
    Ok(data.batch_of(&all))
}

impl Batches {
    /// Opens the training set of a config, and starts with the first step. It reads and tokenizes
    /// on the calling thread; [`Trainer::open`](crate::Trainer::open) does not block.
    ///
    /// # Errors
    /// The errors of [`Dataset::open`], [`Batches::check`] and [`Batches::start`].
    pub fn open(config: &Config) -> Result<Batches, Error> {
        let (data, _) = Dataset::open(config, &shape_of(config)?)?;
        Batches::check(config, &data, config.steps(data.len())?)?;
        Batches::start(config, data, 0)
    }

    /// Refuses data if a batch of the first `steps` steps has no label.
    ///
    /// # Errors
    /// The first step without a label, with the first record that has none.
    pub fn check(config: &Config, data: &Dataset, steps: u64) -> Result<(), Error> {
        match Order::of(config).unlabelled(data, steps) {
            None => Ok(()),
            Some(step) => Err(unlabelled(data, step)),
        }
    }

    /// The sequences that a step trains on. The first step is 0.
    ///
    /// # Errors
    /// The spooled data cannot be read any more.
    pub fn of_step(config: &Config, data: &Dataset, step: u64) -> Result<Vec<Sequence>, Error> {
        Order::of(config).sequences(data, step)
    }

    /// Starts a thread that makes the batches of `data`, from step `first` on.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(config: &Config, data: Dataset, first: u64) -> Result<Batches, Error> {
        let order = Order::of(config);
        let window = config.window();
        let (sender, ready) = mpsc::channel(1);
        let make = move || {
            for step in (first..).step_by(window as usize) {
                let batch = made(order, &data, step, window);
                let is_last = batch.is_err();
                if sender.blocking_send(batch).is_err() || is_last {
                    return;
                }
            }
        };
        thread::Builder::new().name("l2l-data".into()).spawn(make).map_err(Error::no_thread)?;
        Ok(Batches { ready })
    }

    /// The next batch. With `schedule.window`: those of the next window, as one.
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
