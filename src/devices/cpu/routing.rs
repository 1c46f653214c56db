//! Sums of a router's probabilities and choices, the gradient of its losses, and capacities.

use rayon::prelude::*;

use super::dropout::Row;
use super::experts::is_larger;
use super::math::{dot, exp, largest, sum_of};
use super::views::{Call, Compute, ComputeIn};
use crate::kernels::{DROPPED, LimitExperts, MeasureRoutes, RouteSlopes};
use crate::simd::Level;

/// Rows whose sums are one partial sum.
const PART: usize = 256;

/// The expert of an assignment, dropped or not.
pub(super) fn expert_of(float: f32) -> usize {
    (float.to_bits() & !DROPPED) as usize
}

pub(super) fn is_dropped(float: f32) -> bool {
    float.to_bits() & DROPPED != 0
}

/// The number of a row's choices that are better than this one.
fn rank_of(choice: usize, chosen: &[f32], logits: &[f32]) -> usize {
    let own = expert_of(chosen[choice]);
    let is_better = |other: &&f32| {
        let other = expert_of(**other);
        let [a, b] = [logits[other], logits[own]];
        is_larger(a, b) || other < own && !is_larger(b, a)
    };
    chosen.iter().filter(is_better).count()
}

/// The log-sum-exp of a row's logits.
#[inline(always)]
fn log_sum_exp(logits: &[f32]) -> f32 {
    let most = largest(logits);
    most + sum_of(logits, |logit| exp(logit - most)).ln()
}

impl ComputeIn for MeasureRoutes<'_> {
    /// The log-sum-exp of each row.
    fn workspace(&self) -> usize {
        self.logits.rows
    }

    fn compute(&self, level: Level, call: &Call<'_>, lse: &mut [f32]) {
        let MeasureRoutes { first_choice, batch, accumulate, .. } = *self;
        let experts = self.logits.columns;
        let k = self.chosen.columns / 2;
        let logits = call.read(self.logits);
        let chosen = call.read(self.chosen);
        let rows = lse.par_iter_mut().zip(logits.par_chunks(experts)).with_min_len(16);
        rows.for_each(|(lse, logits)| {
            level.run(
                #[inline(always)]
                || *lse = log_sum_exp(logits),
            );
        });
        let width = self.statistics.columns;
        let sum = |from: usize, to: usize| {
            let mut sums = vec![0.0; width];
            level.run(
                #[inline(always)]
                || {
                    for row in from..to {
                        let logits = &logits[row * experts..][..experts];
                        let chosen = &chosen[row * 2 * k..][..k];
                        for (choice, expert) in chosen.iter().enumerate() {
                            if !first_choice || rank_of(choice, chosen, logits) == 0 {
                                sums[expert_of(*expert)] += 1.0;
                            }
                        }
                        let to = sums[experts..].iter_mut().zip(logits);
                        to.for_each(|(sum, logit)| *sum += exp(logit - lse[row]));
                        sums[2 * experts] += lse[row] * lse[row];
                        let dropped = chosen.iter().filter(|expert| is_dropped(**expert));
                        sums[2 * experts + 1] += dropped.count() as f32;
                    }
                },
            );
            sums
        };
        let out = call.write(self.statistics).chunks_exact_mut(width).enumerate();
        for (sequence, out) in out {
            // The rows of a chunk are summed by themselves, whatever came before them.
            let before = accumulate.then(|| out.to_vec());
            out.fill(0.0);
            let rows = batch.sequence(sequence);
            let parts = rows.clone().step_by(PART).collect::<Vec<_>>().into_par_iter();
            let parts = parts.map(|from| sum(from, rows.end.min(from + PART)));
            for part in parts.collect::<Vec<_>>() {
                out.iter_mut().zip(part).for_each(|(out, sum)| *out += sum);
            }
            let before = before.into_iter().flatten();
            out.iter_mut().zip(before).for_each(|(out, before)| *out += before);
        }
    }
}

impl Compute for LimitExperts<'_> {
    fn compute(&self, _level: Level, call: &Call<'_>) {
        let LimitExperts { factor_millionths, second, batch, .. } = *self;
        let experts = self.logits.columns;
        let k = self.chosen.columns / 2;
        let logits = call.read(self.logits);
        let mut left = call.write(self.limited);
        left.copy_from_slice(call.read(self.chosen));
        let mut sequences = Vec::new();
        for sequence in 0..batch.sequences() {
            let (own, rest) = left.split_at_mut(batch.sequence(sequence).len() * 2 * k);
            sequences.push((sequence, own));
            left = rest;
        }
        sequences.into_par_iter().for_each(|(sequence, chosen)| {
            let rows = batch.sequence(sequence);
            let places = factor_millionths.map_or(usize::MAX, |millionths| {
                LimitExperts::capacity(millionths, k, rows.len(), experts)
            });
            let mut counts = vec![0; experts];
            for rank in 0..k {
                for (position, chosen) in chosen.chunks_exact_mut(2 * k).enumerate() {
                    let (chosen, weights) = chosen.split_at_mut(k);
                    let logits = &logits[(rows.start + position) * experts..][..experts];
                    let choice = (0..k).find(|&choice| rank_of(choice, chosen, logits) == rank);
                    let choice = choice.expect("a total order has every rank");
                    let count = &mut counts[expert_of(chosen[choice])];
                    let is_kept = rank != 1
                        || second.is_none_or(|draws| {
                            let draw = Row::new(&draws, sequence, position as u32).first_draw();
                            keeps(draw, weights[choice])
                        });
                    if is_kept && *count < places {
                        *count += 1;
                    } else {
                        chosen[choice] = f32::from_bits(chosen[choice].to_bits() | DROPPED);
                    }
                }
            }
        });
    }
}

/// True with a probability of twice the weight, for a random word.
fn keeps(draw: u32, weight: f32) -> bool {
    2.0 * weight >= 1.0 || draw < (weight * 8_589_934_592.0) as u32 // 2³³
}

/// Adds the gradients of a router's losses to those of its logits.
pub(super) fn add_slopes(
    level: Level,
    call: &Call<'_>,
    slopes: RouteSlopes<'_>,
    logits: &[f32],
    dl: &mut [f32],
) {
    let RouteSlopes { of_sequences, batch } = slopes;
    let experts = of_sequences.columns - 1;
    let slopes = call.read(of_sequences);
    let rows = dl.par_chunks_mut(experts).zip(logits.par_chunks(experts)).enumerate();
    rows.with_min_len(16).for_each(|(row, (dl, logits))| {
        let (sequence, _) = batch.place(row);
        let (b, z) = slopes[sequence * (experts + 1)..][..experts + 1].split_at(experts);
        level.run(
            #[inline(always)]
            || {
                let lse = log_sum_exp(logits);
                let p: Vec<f32> = logits.iter().map(|logit| exp(logit - lse)).collect();
                let rest = z[0] * lse - dot(&p, b);
                for ((dl, p), b) in dl.iter_mut().zip(&p).zip(b) {
                    *dl += p * (b + rest);
                }
            },
        );
    });
}

#[cfg(test)]
mod tests;
