//! Short runs of a config, and what they tell of rates.

use std::collections::BTreeMap;

use l2l_actors::schedule::{LayerId, Phase};
use l2l_actors::work::WorkKind;

use super::fitted::{CUTS, Points, TimeOfSize, VERSION, key_of, threads_of, units_of, word};
use super::status::unix_seconds;
use super::{FittedLine, FittedRates, Slice, SliceKind};
use crate::config::{Config, Recompute, ScheduleKind};
use crate::error::Error;
use crate::machine;
use crate::models::{Model, Save};
use crate::plan::Plan;

/// Work whose units are the bytes that it moves.
const MOVES: [WorkKind; 7] = [
    WorkKind::Weights,
    WorkKind::Shards,
    WorkKind::Input,
    WorkKind::Output,
    WorkKind::Gradient,
    WorkKind::Read,
    WorkKind::Write,
];

/// Short runs of one config, with different numbers of sequences.
#[derive(Default)]
pub struct RateRuns {
    compute: BTreeMap<String, Points>,
    work: BTreeMap<WorkKind, Points>,
}

/// Runs with different sizes of micro-batches.
const SIZES: u32 = 3;

impl RateRuns {
    /// Small steps of a config: two micro-batches of its size in each group, of half of it and of a
    /// quarter; the first and the last also where layers keep their activations, or recompute them
    /// if the config keeps them; and one whose updates wait for the norm, so that some updates
    /// find the host's threads free.
    ///
    /// # Errors
    /// Its schedule is of as many micro-batches as the config has.
    pub fn configs(config: &Config) -> Result<Vec<Config>, Error> {
        let kind = config.schedule.kind;
        if kind == ScheduleKind::File || kind.of_windows().is_some() {
            let kind = word(kind);
            let problem = "and `--rates` runs other numbers of micro-batches: set another one, and \
                           use the rates for this";
            return Err(Error::config("schedule.kind", format_args!("is \"{kind}\", {problem}")));
        }
        let groups = config.parallel.groups as usize;
        let most = config.step.micro_batch.max(2);
        let mut sizes: Vec<usize> = (0..SIZES).map(|nth| most >> nth).collect();
        sizes.retain(|&size| size > 0);
        let least = sizes[sizes.len() - 1];
        let own = match config.schedule.recompute {
            Recompute::AUTO => Recompute::Layer(true), // whatever room there is
            own => own,
        };
        let other = Recompute::Layer(own.keep() == Some(Save::All));
        let of = |size: usize, recompute: Recompute, clip_norm: Option<f64>| {
            let mut run = config.clone();
            (run.step.micro_batch, run.step.batch) = (size, 2 * size * groups);
            run.step.epochs = None;
            run.schedule.recompute = recompute;
            run.optimizer.clip_norm = clip_norm;
            // It is of activations that are kept.
            run.stash.relu_density = run.stash.relu_density.filter(|_| recompute.keep().is_some());
            run
        };
        let clips = config.optimizer.clip_norm.or(Some(1.0));
        let mut all: Vec<Config> = sizes.iter().map(|&size| of(size, own, None)).collect();
        all.extend([of(most, own, clips), of(most, other, None), of(least, other, None)]);
        Ok(all)
    }

    /// Checks that all sequences of a run have the plan's length, and are whole.
    ///
    /// # Errors
    /// They have not.
    pub fn check(config: &Config, model: &Model, plan: &Plan) -> Result<(), Error> {
        let refuse = |key: &str, problem: &str| {
            Err(Error::Config { key: key.into(), problem: problem.into() })
        };
        if !config.data.train.is("random") {
            let problem = "is not \"random\": `--rates` needs sequences that are all of one length";
            return refuse("data.train", problem);
        }
        if plan.chunks(model) > 1 {
            let problem = format!("{CUTS}, and `--rates` needs whole ones");
            return refuse("step.chunk_positions", &problem);
        }
        Ok(())
    }

    /// Adds the slices of whole steps of sequences that are all of the plan's length.
    pub fn add(&mut self, slices: &[Slice], model: &Model, plan: &Plan) {
        let positions = plan.batch.positions;
        for slice in slices {
            let SliceKind::Work(kind) = slice.kind else { continue };
            let sequences = slice.micro_batch.map_or(1, |m| {
                plan.batch.micro_batches.get(m as usize).map_or(1, |&count| count as usize)
            });
            let seconds = slice.took().as_secs_f64();
            let units = match (kind, slice.layer, slice.block) {
                (WorkKind::Forward | WorkKind::Keys | WorkKind::Backward, Some(layer), _) => {
                    let of = match kind {
                        WorkKind::Forward => Phase::Forward,
                        WorkKind::Keys => Phase::Keys,
                        _ => Phase::Backward,
                    };
                    let save = plan.saves(LayerId(layer));
                    let layer = layer as usize;
                    let units = units_of(model, layer, of, [sequences, positions], save);
                    let key = key_of(model, layer, of, save);
                    let points = self.compute.entry(key).or_default();
                    points.push((units, seconds));
                    continue;
                }
                (WorkKind::Gather, ..) if slice.micro_batch.is_some() => {
                    (sequences * positions) as f64
                }
                // From one block of its visit, for all micro-batches.
                (WorkKind::Gather, layer, _) => {
                    let all: u32 = plan.batch.micro_batches.iter().sum();
                    let blocks = &model.layer_blocks[layer.unwrap_or(0) as usize];
                    (all as usize * positions) as f64 / blocks.len() as f64
                }
                (WorkKind::Update | WorkKind::Reduce, _, Some(block)) => {
                    model.blocks[block as usize].gradient_bytes() as f64
                }
                _ if MOVES.contains(&kind) => slice.bytes as f64,
                _ => continue,
            };
            if units > 0.0 {
                self.work.entry(kind).or_default().push((units, seconds));
            }
        }
    }

    /// Fits a line to each kind of work.
    pub fn fit(&self, config: &Config, plan: &Plan) -> FittedRates {
        let kernels = |(name, points): (&String, &Points)| {
            Some((name.clone(), FittedLine::of(points, TimeOfSize::Median)?))
        };
        let work = |(&kind, points): (&WorkKind, &Points)| {
            Some((
                kind.name().to_owned(),
                FittedLine::of(points, TimeOfSize::of(kind, config.device.kind))?,
            ))
        };
        let device = config.device_names().swap_remove(0);
        FittedRates {
            version: VERSION,
            date: day_of(unix_seconds()),
            machine: format!("{device}, {} cores of the host", machine::cores()),
            device: config.device.kind,
            threads: threads_of(config),
            dtype: config.device.dtype,
            optimizer: config.optimizer.kind,
            stash_on_device: plan.stash_on_device(),
            compute: self.compute.iter().filter_map(kernels).collect(),
            work: self.work.iter().filter_map(work).collect(),
        }
    }
}

/// The day of a Unix time, as `2026-11-28` (H. Hinnant's days of the civil calendar).
fn day_of(seconds: f64) -> String {
    let days = (seconds / 86_400.0) as i64 + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, day) in [
            (0.0, "1970-01-01"),
            (951_782_400.0, "2000-02-29"),
            (1_795_824_000.0, "2026-11-28"),
            (1_798_761_599.0, "2026-12-31"),
        ] {
            assert_eq!(day_of(seconds), day);
        }
    }
}
