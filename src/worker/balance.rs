//! What the routers of a step did, and the losses that follow from it.
//!
//! A loss of this kind is linear in the probabilities P of the rows, and its factors b follow from
//! counts of choices: loss = Σ b P. So b is the gradient that the backward pass needs. It comes
//! from integers, and has the same bits however sequences are dealt; and each micro-batch has a
//! share of the loss, which is added like a share of the model's loss.

use std::collections::BTreeMap;
use std::ops::Range;

use l2l_actors::schedule::{LayerId, MicroBatch};

use crate::kernels::OF_SEQUENCE;
use crate::models::{BalanceOf, BalanceOver, Experts};

/// The sums of one layer over some rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RouterSums {
    /// For each expert the rows that chose it.
    pub(crate) counts: Vec<u64>,
    /// For each expert the sum of its probabilities.
    pub(crate) probabilities: Vec<f64>,
    /// The sum of the squares of the logits' log-sum-exp.
    pub(crate) squares: f64,
    /// Choices that were dropped.
    pub(crate) dropped: u64,
}

/// The losses of a step's routers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RouterLosses {
    pub(crate) balance: f64,
    pub(crate) z: f64,
}

/// What the routers of a step did.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RouterReport {
    /// The losses, if the routers have any.
    pub(crate) losses: Option<RouterLosses>,
    /// The layers in their order.
    pub(crate) layers: Vec<(LayerId, RouterSums)>,
}

/// What this rank has of a step's routers so far.
#[derive(Default)]
pub(super) struct RouterDesk {
    /// The layers that measure, in the order of the forward pass.
    pub(super) layers: Vec<LayerId>,
    pub(super) sums: Vec<RouterSums>,
    /// The counts of the whole step, on all ranks, if they were exchanged.
    pub(super) of_step: Option<Vec<Vec<u64>>>,
    /// The losses of each micro-batch, if the routers have any.
    pub(super) losses: BTreeMap<MicroBatch, RouterLosses>,
    /// The sums and losses of all ranks, if there are several.
    pub(super) total: Option<RouterReport>,
}

/// What one layer measured of one micro-batch: a row of numbers for each sequence.
pub(super) type Measures<'a> = &'a [f32];

/// A micro-batch whose losses are computed.
pub(super) struct Share<'a> {
    pub(super) experts: &'a Experts,
    /// Of each layer that measured.
    pub(super) measures: &'a [Measures<'a>],
    /// The rows of each sequence.
    pub(super) rows: &'a [usize],
    /// The rows of the step, on all ranks.
    pub(super) rows_of_step: usize,
}

impl RouterSums {
    /// Adds what a layer measured.
    pub(super) fn add(&mut self, measures: Measures<'_>, experts: usize) {
        self.counts.resize(experts, 0);
        self.probabilities.resize(experts, 0.0);
        for row in measures.chunks_exact(2 * experts + OF_SEQUENCE) {
            let (counts, rest) = row.split_at(experts);
            let (probabilities, rest) = rest.split_at(experts);
            self.counts.iter_mut().zip(counts).for_each(|(sum, n)| *sum += *n as u64);
            let sums = self.probabilities.iter_mut().zip(probabilities);
            sums.for_each(|(sum, p)| *sum += f64::from(*p));
            self.squares += f64::from(rest[0]);
            self.dropped += rest[1] as u64;
        }
    }

    /// The largest number of choices of an expert ÷ the mean; 0 without choices.
    pub(crate) fn load_max_ratio(&self) -> f64 {
        let all: u64 = self.counts.iter().sum();
        let most = self.counts.iter().copied().max().unwrap_or(0);
        if all == 0 { 0.0 } else { most as f64 * self.counts.len() as f64 / all as f64 }
    }

    /// The share of the rows that chose the most used expert. The probabilities of a row sum to 1.
    pub(crate) fn token_share(&self) -> f64 {
        let rows: f64 = self.probabilities.iter().sum();
        let most = self.counts.iter().copied().max().unwrap_or(0);
        if rows > 0.0 { (most as f64 / rows).min(1.0) } else { 0.0 }
    }

    /// Experts that no row chose.
    pub(crate) fn idle(&self) -> usize {
        self.counts.iter().filter(|count| **count == 0).count()
    }

    /// The entropy of the mean probabilities, in nats.
    pub(crate) fn entropy(&self) -> f64 {
        let all: f64 = self.probabilities.iter().sum();
        let terms = self.probabilities.iter().map(|p| p / all).filter(|p| *p > 0.0);
        -terms.map(|p| p * p.ln()).sum::<f64>()
    }

    /// The sums as floats, which are exact for counts, for an exchange between ranks.
    pub(super) fn numbers(&self) -> impl Iterator<Item = f64> {
        let counts = self.counts.iter().map(|count| *count as f64);
        let ends = [self.squares, self.dropped as f64];
        counts.chain(self.probabilities.iter().copied()).chain(ends)
    }

    /// Adds the numbers of another rank.
    pub(super) fn add_numbers(&mut self, numbers: &[f64]) {
        let experts = self.counts.len();
        let (counts, rest) = numbers.split_at(experts);
        let (probabilities, rest) = rest.split_at(experts);
        self.counts.iter_mut().zip(counts).for_each(|(sum, n)| *sum += *n as u64);
        self.probabilities.iter_mut().zip(probabilities).for_each(|(sum, p)| *sum += p);
        self.squares += rest[0];
        self.dropped += rest[1] as u64;
    }
}

impl RouterDesk {
    /// The counts of each layer over the whole step.
    pub(super) fn step_counts(&self) -> Vec<Vec<u64>> {
        let own = || self.sums.iter().map(|sums| sums.counts.clone()).collect();
        self.of_step.clone().unwrap_or_else(own)
    }

    /// The counts of a layer over this rank's rows; `None`: it measured nothing.
    pub(super) fn counts(&self, layer: LayerId) -> Option<&[u64]> {
        let at = self.layers.iter().position(|one| *one == layer)?;
        self.sums.get(at).map(|sums| &sums.counts[..])
    }

    /// Takes what a micro-batch's layers measured.
    pub(super) fn add(&mut self, measures: &[Measures<'_>], experts: usize) {
        self.sums.resize_with(measures.len(), RouterSums::default);
        let layers = self.sums.iter_mut().zip(measures);
        layers.for_each(|(sums, measures)| sums.add(measures, experts));
    }

    /// The report of a step that one rank computed, or whose sums were exchanged; `None`: no layer
    /// measured anything.
    pub(super) fn report(&self) -> Option<RouterReport> {
        let own = || RouterReport {
            losses: RouterLosses::sum(self.losses.values()),
            layers: self.layers.iter().copied().zip(self.sums.iter().cloned()).collect(),
        };
        (!self.layers.is_empty()).then(|| self.total.clone().unwrap_or_else(own))
    }
}

impl RouterLosses {
    /// The sum, in the order of micro-batches; `None` without any.
    pub(super) fn sum<'a>(all: impl Iterator<Item = &'a RouterLosses>) -> Option<RouterLosses> {
        all.copied().reduce(|a, b| RouterLosses { balance: a.balance + b.balance, z: a.z + b.z })
    }
}

impl Share<'_> {
    fn width(&self) -> usize {
        self.experts.measured_width()
    }

    /// The counts of each layer over some sequences.
    fn counts(&self, sequences: Range<usize>) -> Vec<Vec<u64>> {
        let of_layer = |measures: &&[f32]| {
            let width = self.width();
            let mut sums = RouterSums::default();
            sums.add(&measures[sequences.start * width..sequences.end * width], self.experts.count);
            sums.counts
        };
        self.measures.iter().map(of_layer).collect()
    }

    /// b of each layer, from counts over a scope of these rows.
    fn slopes(&self, counts: &[Vec<u64>], rows: usize) -> Vec<Vec<f64>> {
        let Experts { count, per_token, balance, .. } = *self.experts;
        let layers = counts.len() as f64;
        let all_rows = rows as f64 * self.rows_of_step as f64;
        let factor = balance.loss * count as f64 / all_rows;
        let of = |counts: &[u64], factor: f64| -> Vec<f64> {
            counts.iter().map(|count| factor * *count as f64).collect()
        };
        match balance.of {
            BalanceOf::AllLayers => {
                let sum = |expert: usize| counts.iter().map(|of_layer| of_layer[expert]).sum();
                let sums: Vec<u64> = (0..count).map(sum).collect();
                vec![of(&sums, factor / (layers * layers)); counts.len()]
            }
            BalanceOf::EachLayer => {
                counts.iter().map(|counts| of(counts, factor / per_token as f64)).collect()
            }
            BalanceOf::FirstChoice => counts.iter().map(|counts| of(counts, factor)).collect(),
        }
    }

    /// The share of the losses, and for each layer and sequence the gradients: b for each expert,
    /// then z. `of_step` has the counts of the whole step.
    pub(super) fn losses(
        &self,
        of_step: impl FnOnce() -> Vec<Vec<u64>>,
        mut each: impl FnMut(usize, usize, &[f64]),
    ) -> RouterLosses {
        let Experts { count, balance, .. } = *self.experts;
        let z = balance.z_loss / self.rows_of_step as f64;
        let sequences = self.rows.len();
        let shared = match balance.over {
            _ if balance.loss == 0.0 => Some(vec![vec![0.0; count]; self.measures.len()]),
            BalanceOver::Step => Some(self.slopes(&of_step(), self.rows_of_step)),
            BalanceOver::MicroBatch => {
                Some(self.slopes(&self.counts(0..sequences), self.rows.iter().sum()))
            }
            BalanceOver::Sequence => None,
        };
        let mut losses = RouterLosses::default();
        for sequence in 0..sequences {
            let own = match &shared {
                Some(_) => Vec::new(),
                None => self.slopes(&self.counts(sequence..sequence + 1), self.rows[sequence]),
            };
            let slopes = shared.as_ref().unwrap_or(&own);
            for (layer, (measures, b)) in self.measures.iter().zip(slopes).enumerate() {
                let row = &measures[sequence * self.width()..][..self.width()];
                let probabilities = &row[count..2 * count];
                let products = b.iter().zip(probabilities).map(|(b, p)| b * f64::from(*p));
                losses.balance += products.sum::<f64>();
                losses.z += z * f64::from(row[2 * count]);
                let answer: Vec<f64> = b.iter().copied().chain([2.0 * z]).collect();
                each(layer, sequence, &answer);
            }
        }
        losses
    }
}

#[cfg(test)]
mod tests;
