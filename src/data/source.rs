//! Where batches come from, step after step.

use std::path::Path;

use super::{Batch, Sequence, jsonl};
use crate::config::Config;
use crate::error::Error;
use crate::random;

/// An endless source of batches, each a function of its step.
pub struct Source {
    sequences: Option<Vec<Sequence>>,
    name: String,
    batch: usize,
    positions: usize,
    vocabulary: usize,
    seed: u64,
    shuffle: bool,
    /// The order of one epoch.
    order: (u64, Vec<usize>),
}

impl Source {
    /// Opens what `data.train` names.
    ///
    /// # Errors
    /// The file and line, and what is wrong there.
    pub fn open(config: &Config, vocabulary: usize, positions: usize) -> Result<Source, Error> {
        let name = config.data.train.clone();
        let sequences = if name == "random" {
            None
        } else if Path::new(&name).extension().is_some_and(|extension| extension == "jsonl") {
            let too_long = config.data.too_long;
            Some(jsonl::read(Path::new(&name), vocabulary, positions, too_long)?)
        } else {
            return Err(Error::refused(format_args!(
                "data.train is {name:?}: it must be \"random\" or a .jsonl file"
            )));
        };
        let (seed, shuffle) = (config.step.seed, config.data.shuffle);
        let batch = config.step.batch;
        let order = (u64::MAX, Vec::new());
        let source = Source { sequences, name, batch, positions, vocabulary, seed, shuffle, order };
        if positions < 2 && source.sequences.is_none() {
            return Err(Error::refused("random sequences need data.sequence_length of at least 2"));
        }
        Ok(source)
    }

    /// Looks through all batches of a run for one without a label, before anything starts.
    ///
    /// # Errors
    /// Its step.
    pub fn check(&mut self, steps: u64) -> Result<(), Error> {
        let Some(sequences) = &self.sequences else { return Ok(()) };
        let labelled: Vec<bool> = sequences.iter().map(|one| one.labelled() > 0).collect();
        if labelled.iter().all(|&has| has) {
            return Ok(());
        }
        // A few epochs: what comes behind them is refused when it is met.
        let epochs = 4 * (labelled.len() as u64).div_ceil(self.batch as u64);
        match (0..steps.min(epochs))
            .find(|&step| !self.places(labelled.len(), step).any(|at| labelled[at]))
        {
            None => Ok(()),
            Some(step) => Err(self.unlabelled(step)),
        }
    }

    /// Which of `count` sequences a step trains on.
    fn places(&mut self, count: usize, step: u64) -> impl Iterator<Item = usize> {
        let (order, shuffle, seed) = (&mut self.order, self.shuffle, self.seed);
        let from = step * self.batch as u64;
        (from..from + self.batch as u64).map(move |index| {
            let (epoch, at) = (index / count as u64, (index % count as u64) as usize);
            place(order, shuffle, seed, count, epoch, at)
        })
    }

    fn unlabelled(&self, step: u64) -> Error {
        let (name, step) = (&self.name, step + 1);
        Error::refused(format_args!(
            "data {name}: no position of the batch of step {step} has a label"
        ))
    }

    /// The batch of a step.
    ///
    /// # Errors
    /// None of its positions has a label.
    pub fn batch(&mut self, step: u64) -> Result<Batch, Error> {
        let batch = match self.sequences.as_ref().map(Vec::len) {
            None => self.random(step),
            Some(count) => {
                let places: Vec<usize> = self.places(count, step).collect();
                let sequences = self.sequences.as_ref().expect("they were just counted");
                Batch::new(&places.iter().map(|&at| &sequences[at]).collect::<Vec<_>>())
            }
        };
        if batch.labelled == 0 { Err(self.unlabelled(step)) } else { Ok(batch) }
    }

    fn random(&self, step: u64) -> Batch {
        let mut state = self.seed ^ random::next(&mut step.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let mut sequence = || {
            let token = |_| (random::next(&mut state) % self.vocabulary as u64) as u32;
            let tokens: Vec<u32> = (0..self.positions).map(token).collect();
            let labels = tokens.iter().map(|&token| token as i32).collect();
            Sequence { tokens, labels }
        };
        let sequences: Vec<Sequence> = (0..self.batch).map(|_| sequence()).collect();
        Batch::new(&sequences.iter().collect::<Vec<_>>())
    }
}

/// The sequence at a place of an epoch.
fn place(
    order: &mut (u64, Vec<usize>),
    shuffle: bool,
    seed: u64,
    count: usize,
    epoch: u64,
    at: usize,
) -> usize {
    if !shuffle {
        return at;
    }
    if order.0 != epoch {
        let mut state = seed ^ random::next(&mut epoch.wrapping_add(1));
        let mut places: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            places.swap(last, (random::next(&mut state) % (last as u64 + 1)) as usize);
        }
        *order = (epoch, places);
    }
    order.1[at]
}
