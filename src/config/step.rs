//! `[step]`: the size of a training step, and the length of the run.

use serde::{Deserialize, Serialize};

use super::check::{is_positive, must, refuse};
use super::{Config, NonFinite, OnResume};
use crate::error::Error;
use crate::models::Shape;

/// `[step]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StepConfig {
    /// Sequences in one step. With the stash on the host, device memory does not depend on it.
    pub batch: usize,
    /// Sequences that the device computes at once; the last micro-batch of a step may have fewer.
    /// The memory of activations on the device grows with it.
    pub micro_batch: usize,
    /// The most positions of a sequence that a layer computes at once, a multiple of 128. A decoder
    /// computes a longer sequence in chunks of this length. Workspace on the device is for
    /// `micro_batch` sequences of this length, or of the longest sequence if it is shorter. Each
    /// chunk adds once to the gradient of each weight.
    pub chunk_positions: usize,
    /// Number of steps of the run; 100 if neither this nor `epochs` is set.
    pub steps: Option<u64>,
    /// Length of the run in passes over the training data, instead of `steps`; 0.5 is half a pass.
    /// It is rounded up to whole steps of `batch` sequences: a step may begin in one pass and end
    /// in the next.
    pub epochs: Option<f64>,
    /// Seed of all random numbers: initial weights, order of the data, masked tokens, dropout. The
    /// same seed gives the same run, bit for bit.
    pub seed: u64,
    /// What happens if the loss or the gradient of a step is infinite or not a number: `stop` ends
    /// the run; `skip` changes nothing and counts the step (gradients wait on the host until the
    /// norm is known, as with `optimizer.clip_norm`); `continue` updates the weights.
    pub non_finite: NonFinite,
}

impl Default for StepConfig {
    fn default() -> StepConfig {
        StepConfig {
            batch: 32,
            micro_batch: 4,
            chunk_positions: Shape::CHUNK_POSITIONS,
            steps: None,
            epochs: None,
            seed: 0,
            non_finite: NonFinite::Stop,
        }
    }
}

impl StepConfig {
    pub(super) const ON_RESUME: OnResume = OnResume::free("epochs steps")
        .with_changes("batch chunk_positions micro_batch non_finite seed");

    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { batch, micro_batch, chunk_positions, steps, epochs, .. } = *self;
        must(batch >= 1, "step.batch", "at least 1")?;
        must(batch <= 1 << 20, "step.batch", "at most 1048576")?;
        must(micro_batch >= 1, "step.micro_batch", "at least 1")?;
        let is_whole = chunk_positions > 0 && chunk_positions.is_multiple_of(Shape::CHUNK_TILE);
        must(is_whole, "step.chunk_positions", "a multiple of 128, at least 128")?;
        must(steps != Some(0), "step.steps", "at least 1")?;
        must(steps.is_none_or(|steps| steps <= 1 << 40), "step.steps", "at most 1099511627776")?;
        must(epochs.is_none_or(is_positive), "step.epochs", "above 0")?;
        must(epochs.is_none_or(|epochs| epochs <= 1e9), "step.epochs", "at most 1e9")?;
        let problem = "is set together with step.steps: set only one of them";
        refuse(steps.is_some() && epochs.is_some(), "step.epochs", problem)
    }
}

impl Config {
    /// The number of steps of a run on training data of `sequences` sequences. `None`: the data has
    /// no end.
    ///
    /// # Errors
    /// `step.epochs` is set, and the data has no end.
    pub fn steps(&self, sequences: Option<u64>) -> Result<u64, Error> {
        const DEFAULT: u64 = 100;
        match (self.step.epochs, sequences) {
            (None, _) => Ok(self.step.steps.unwrap_or(DEFAULT)),
            (Some(_), None) => Err(Error::config(
                "step.epochs",
                "cannot count random data, which has no end: set step.steps",
            )),
            (Some(epochs), Some(count)) => {
                // Decimal fractions are not exact in binary: 1.1 passes over 10 sequences are 11.
                let billionths = (epochs * 1e9).round() as u128;
                let sequences = billionths.saturating_mul(u128::from(count));
                let steps = sequences.div_ceil(self.step.batch as u128 * 1_000_000_000);
                Ok(u64::try_from(steps).unwrap_or(u64::MAX).max(1))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_are_rounded_up_to_whole_steps() {
        for (epochs, sequences, batch, steps) in [
            (0.1, 10, 1, 1),
            (0.1, 100, 10, 1),
            (0.1, 101, 10, 2),
            (0.5, 7, 2, 2),
            (1.0, 100, 32, 4),
            (3.0, 100, 32, 10),
            (1.1, 10, 1, 11),
            (1.1, 1000, 100, 11),
            (2.999, 1000, 1, 2999),
            (2.999, 1000, 10, 300),
            (1e-9, 5, 4, 1),
            (1e9, 1 << 30, 1, (1 << 30) * 1_000_000_000),
        ] {
            let step = StepConfig { epochs: Some(epochs), batch, ..StepConfig::default() };
            let config = Config { step, ..Config::default() };
            let found = config.steps(Some(sequences)).expect("the data has an end");
            assert_eq!(found, steps, "{epochs} epochs of {sequences} by {batch}");
        }
    }
}
