//! Rates that were fitted to short runs on a machine, as a file that people can read.
//!
//! Each kind of work has a line: `seconds = fixed + units / rate`, by least squares over all
//! operations of the runs. The units are FLOPs of kernels, by layer and phase; tokens of layers
//! without products, and of gathers; bytes of everything else. FLOPs grow with rows and with rows ×
//! positions before them as attention does, so one number stands for both.

use std::collections::{BTreeMap, HashMap};
use std::iter;

use l2l_actors::schedule::{LayerId, Phase};
use l2l_actors::work::WorkKind;
use serde::{Deserialize, Serialize};

use super::forecast::Rates;
use super::status::unix_seconds;
use super::{Slice, SliceKind};
use crate::config::{
    Config, DeviceKind, EpsTier, OptimizerKind, Recompute, ScheduleKind, Transfer,
};
use crate::error::Error;
use crate::machine;
use crate::models::{Model, Save};
use crate::plan::Plan;
use crate::tensor::Dtype;

const CUTS: &str = "cuts sequences";

/// The version of the file.
const VERSION: u32 = 1;

/// Rates of a machine, fitted to runs on it.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct FittedRates {
    /// The version of the file's form.
    pub version: u32,
    /// The day of the runs, in UTC.
    pub date: String,
    /// The machine.
    pub machine: String,
    /// The kind of its device.
    pub device: DeviceKind,
    /// The data type that kernels computed in.
    pub dtype: Dtype,
    /// The update rule.
    pub optimizer: OptimizerKind,
    /// True if the stash was on the device.
    pub stash_on_device: bool,
    /// Kernels, by the name of a layer and the phase. Units are FLOPs.
    pub compute: BTreeMap<String, FittedLine>,
    /// Other work, by the name of its kind. Units are bytes, and tokens of `gather`.
    pub work: BTreeMap<String, FittedLine>,
}

/// What an operation takes: `fixed` seconds, and `units_per_second` for the rest.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct FittedLine {
    /// Seconds of an operation of no size.
    pub fixed: f64,
    /// Units a second beyond that.
    pub units_per_second: f64,
    /// The root of the mean square of what the line is off, by the mean time of an operation.
    pub residual: f64,
    /// The operations that it was fitted to.
    pub operations: u64,
}

/// Operations of a kind: units and seconds of each.
type Points = Vec<(f64, f64)>;

impl FittedLine {
    /// The line through these points by least squares. Where that has a negative part, or all
    /// operations have one size, the line through the origin. `None`: no operation took any time.
    fn of(points: &Points) -> Option<FittedLine> {
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let [units, seconds] = [mean(|point| point.0), mean(|point| point.1)];
        if !(units > 0.0 && seconds > 0.0) {
            return None;
        }
        let spread = points.iter().map(|(x, _)| (x - units).powi(2)).sum::<f64>();
        let together = points.iter().map(|(x, y)| (x - units) * (y - seconds)).sum::<f64>();
        let slope = together / spread;
        let fixed = seconds - slope * units;
        let is_one = spread > 1e-12 * count * units * units && slope > 0.0 && fixed >= 0.0;
        let [fixed, slope] = if is_one { [fixed, slope] } else { [0.0, seconds / units] };
        let off = points.iter().map(|(x, y)| (y - fixed - slope * x).powi(2)).sum::<f64>();
        let residual = (off / count).sqrt() / seconds;
        let operations = points.len() as u64;
        Some(FittedLine { fixed, units_per_second: slope.recip(), residual, operations })
    }

    /// What is wrong with it.
    fn problem(&self) -> Option<&'static str> {
        let FittedLine { fixed, units_per_second, residual, .. } = *self;
        if ![fixed, units_per_second, residual].into_iter().all(f64::is_finite) {
            Some("has a number that is not finite")
        } else if fixed < 0.0 || residual < 0.0 {
            Some("has a negative number")
        } else {
            (units_per_second <= 0.0).then_some("has a rate that is not above 0")
        }
    }
}

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

/// What files call a layer without products. It may take no time.
const EDGE: &str = "edge";

/// Kernels of a layer in a phase, as a file names them.
fn key_of(model: &Model, layer: usize, phase: Phase) -> String {
    let of = &model.layers[layer];
    let has_products = flops_of_one(model, layer) > 0.0;
    let name = if has_products { of.name() } else { EDGE };
    let phase = match phase {
        Phase::Forward | Phase::Reference => "forward",
        Phase::Keys => "keys",
        Phase::Backward => "backward",
    };
    format!("{name} {phase}")
}

fn flops_of_one(model: &Model, layer: usize) -> f64 {
    model.visit_flops(layer, Phase::Forward, iter::once(0..1), None)
}

/// The units of kernels for these sequences, of so many positions: FLOPs, or tokens of a layer that
/// has no products.
fn units_of(
    model: &Model,
    layer: usize,
    phase: Phase,
    [sequences, positions]: [usize; 2],
    save: Option<Save>,
) -> f64 {
    match flops_of_one(model, layer) > 0.0 {
        true => {
            let all = iter::repeat_n(0..positions, sequences);
            model.visit_flops(layer, phase, all, save)
        }
        false => (sequences * positions) as f64,
    }
}

/// Short runs of one config, with different numbers of sequences.
#[derive(Default)]
pub struct RateRuns {
    compute: BTreeMap<String, Points>,
    work: BTreeMap<String, Points>,
}

/// Runs with different sizes of micro-batches.
const SIZES: u32 = 3;

impl RateRuns {
    /// Small steps of a config: two micro-batches of its size in each group, of half of it and of a
    /// quarter; and one more whose updates wait for the norm, so that gradients wait in their
    /// regions.
    ///
    /// # Errors
    /// Its schedule is of as many micro-batches as the config has.
    pub fn configs(config: &Config) -> Result<Vec<Config>, Error> {
        let kind = config.schedule.kind;
        if matches!(kind, ScheduleKind::File | ScheduleKind::Pipedream) {
            let kind = word(kind);
            let problem = "and `--rates` runs other numbers of micro-batches: set another one, and \
                           use the rates for this";
            return Err(Error::config("schedule.kind", format_args!("is \"{kind}\", {problem}")));
        }
        let groups = config.parallel.groups as usize;
        let most = config.step.micro_batch.max(2);
        let mut sizes: Vec<usize> = (0..SIZES).map(|nth| most >> nth).collect();
        sizes.retain(|&size| size > 0);
        let of = |size: usize, clips: bool| {
            let mut run = config.clone();
            (run.step.micro_batch, run.step.batch) = (size, 2 * size * groups);
            run.step.epochs = None;
            if run.schedule.recompute == Recompute::AUTO {
                run.schedule.recompute = Recompute::Layer(true); // whatever room there is
            }
            if clips {
                run.optimizer.clip_norm = run.optimizer.clip_norm.or(Some(1.0));
            }
            run
        };
        Ok(sizes.iter().map(|&size| of(size, false)).chain([of(most, true)]).collect())
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
                    let points = self.compute.entry(key_of(model, layer, of)).or_default();
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
                self.work.entry(kind.name().to_owned()).or_default().push((units, seconds));
            }
        }
    }

    /// Fits a line to each kind of work.
    pub fn fit(&self, config: &Config, plan: &Plan) -> FittedRates {
        let lines = |points: &BTreeMap<String, Points>| {
            let line =
                |(name, points): (&String, &Points)| Some((name.clone(), FittedLine::of(points)?));
            points.iter().filter_map(line).collect()
        };
        let device = config.device_names().swap_remove(0);
        FittedRates {
            version: VERSION,
            date: day_of(unix_seconds()),
            machine: format!("{device}, {} cores of the host", machine::cores()),
            device: config.device.kind,
            dtype: config.device.dtype,
            optimizer: config.optimizer.kind,
            stash_on_device: plan.stash_on_device(),
            compute: lines(&self.compute),
            work: lines(&self.work),
        }
    }
}

/// A value as a config has it.
fn word(value: impl Serialize) -> String {
    serde_json::to_value(value)
        .ok()
        .and_then(|word| Some(word.as_str()?.to_owned()))
        .unwrap_or_default()
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

fn lacks(line: &str) -> String {
    format!("they have no line `{line}`, which this run needs")
}

impl FittedRates {
    /// The text of a file.
    pub fn text(&self) -> String {
        let FittedRates { version, date, machine, .. } = self;
        let mut text = format!(
            "# seconds = fixed + units / units_per_second (docs/machines.md)\n\
             version = {version}\ndate = \"{date}\"\nmachine = \"{machine}\"\n\
             device = \"{}\"\ndtype = \"{}\"\noptimizer = \"{}\"\nstash_on_device = {}\n",
            word(self.device),
            word(self.dtype),
            word(self.optimizer),
            self.stash_on_device,
        );
        for (table, lines) in [("compute", &self.compute), ("work", &self.work)] {
            for (name, line) in lines {
                let FittedLine { fixed, units_per_second, residual, operations } = line;
                text += &format!(
                    "\n[{table}.\"{name}\"]\nfixed = {fixed:?}\n\
                     units_per_second = {units_per_second:?}\nresidual = {residual:?}\n\
                     operations = {operations}\n"
                );
            }
        }
        text
    }

    /// Reads a file.
    ///
    /// # Errors
    /// A key is missing or unknown, the version is another one, or a number cannot be.
    pub fn parse(text: &str) -> Result<FittedRates, String> {
        let found: FittedRates =
            toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        if found.version != VERSION {
            let version = found.version;
            return Err(format!(
                "it is of version {version}, and this program reads {VERSION}: fit the rates again"
            ));
        }
        let wrong =
            |(name, line): (&String, &FittedLine)| Some(format!("{name} {}", line.problem()?));
        let problem = found.compute.iter().chain(&found.work).find_map(wrong);
        problem.map_or(Ok(found), Err)
    }

    /// Why these are no rates for a plan of this config.
    fn refusal(&self, config: &Config, model: &Model, plan: &Plan) -> Option<String> {
        let place = |on_device: bool| if on_device { "device" } else { "host" }.to_owned();
        let device = &config.device;
        let facts = [
            ("device.dtype", word(device.dtype), word(self.dtype)),
            ("device.kind", word(device.kind), word(self.device)),
            ("optimizer.kind", word(config.optimizer.kind), word(self.optimizer)),
            ("the stash's place", place(plan.stash_on_device()), place(self.stash_on_device)),
        ];
        let other = facts.into_iter().find(|(_, needs, has)| needs != has);
        other
            .map(|(what, needs, has)| format!("{what} is {needs}, and the rates are of {has}"))
            .or_else(|| {
                let is_one = plan.share().ranks == 1;
                (!is_one).then(|| "the rates are of one process".to_owned())
            })
            .or_else(|| {
                let is_cut = plan.chunks(model) > 1;
                is_cut.then(|| {
                    format!("step.chunk_positions {CUTS}, and the rates are of whole ones")
                })
            })
    }

    /// The line of a layer's kernels; `None` if they take no time.
    fn kernels(
        &self,
        model: &Model,
        layer: usize,
        phase: Phase,
    ) -> Result<Option<FittedLine>, String> {
        let key = key_of(model, layer, phase);
        let found = self.compute.get(&key).or_else(|| {
            // A head of one tile has one visit for both phases.
            let is_head = model.layers[layer].is_head();
            is_head.then(|| self.compute.get(&key_of(model, layer, Phase::Backward)))?
        });
        let may_lack = key.starts_with(EDGE);
        if found.is_none() && !may_lack {
            return Err(lacks(&key));
        }
        Ok(found.copied())
    }

    /// The line of a kind of work.
    fn line(&self, kind: WorkKind) -> Result<FittedLine, String> {
        let name = kind.name();
        let found = self.work.get(name).copied();
        found.ok_or_else(|| lacks(name))
    }
}

impl Rates {
    /// The rates of a run of this config on the machine that others were fitted on.
    ///
    /// # Errors
    /// They are of another data type, device or update rule, or lack a line that the run needs.
    pub fn fitted(
        fit: &FittedRates,
        config: &Config,
        model: &Model,
        plan: &Plan,
    ) -> Result<Rates, Error> {
        let refuse = |problem: String| Error::Argument(format!("--rates: {problem}"));
        if let Some(problem) = fit.refusal(config, model, plan) {
            return Err(refuse(problem));
        }
        let line = |kind| fit.line(kind).map_err(refuse);
        // FLOPs at one a second are seconds; then each line's own rate.
        let mut rates = Rates::of(config, model, 1.0, f64::INFINITY, f64::INFINITY);
        rates.compute.clear();
        let positions = plan.batch.positions;
        let save = config.schedule.recompute.keep();
        for layer in 1..model.layers.len() {
            for phase in [Phase::Forward, Phase::Backward] {
                let Some(of) = fit.kernels(model, layer, phase).map_err(refuse)? else { continue };
                let units = units_of(model, layer, phase, [1, positions], save);
                let at = (layer as u32, phase);
                rates.compute.insert(at, units / of.units_per_second);
                rates.fixed.compute.insert(at, of.fixed);
            }
        }
        let mut work = HashMap::new();
        let mut take = |kind: WorkKind| {
            let FittedLine { fixed, units_per_second, .. } = line(kind)?;
            work.insert(kind, fixed);
            Ok::<f64, Error>(units_per_second)
        };
        rates.link = [take(WorkKind::Weights)?, take(WorkKind::Gradient)?];
        let boundaries = [take(WorkKind::Input)?, take(WorkKind::Output)?];
        (rates.boundaries, rates.on_device) = (boundaries, boundaries);
        rates.update = take(WorkKind::Update)?;
        let tokens = take(WorkKind::Gather)?;
        rates.host = positions as f64 / tokens;
        rates.reduce = take(WorkKind::Reduce)?;
        if config.eps.tier == EpsTier::File {
            rates.file = [take(WorkKind::Read)?, take(WorkKind::Write)?];
        }
        if config.parallel.transfer == Transfer::Sharded && config.devices() > 1 {
            rates.peers = take(WorkKind::Shards)?;
        }
        rates.fixed.work = work;
        Ok(rates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let points: Points = (1..20).map(|x| (f64::from(x), 0.5 + f64::from(x) / 4.0)).collect();
        let FittedLine { fixed, units_per_second, residual, operations } =
            FittedLine::of(&points).expect("a line");
        assert!((fixed - 0.5).abs() < 1e-12 && (units_per_second - 4.0).abs() < 1e-12);
        assert!(residual < 1e-12 && operations == 19);
        // All of one size, or faster with size: through the origin.
        let of = |points: &[(f64, f64)]| FittedLine::of(&points.to_vec());
        let one = of(&[(8.0, 1.0), (8.0, 3.0)]).expect("a line");
        assert_eq!((one.fixed, one.units_per_second, one.residual), (0.0, 4.0, 0.5));
        let falls = of(&[(1.0, 3.0), (3.0, 1.0)]).expect("a line");
        assert_eq!((falls.fixed, falls.units_per_second), (0.0, 1.0));
        assert_eq!(of(&[(0.0, 1.0)]), None);
        assert_eq!(of(&[]), None);
    }

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
