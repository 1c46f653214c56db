//! Rates that were fitted to short runs on a machine, as a file that people can read.
//!
//! Each kind of work has a line: `seconds = fixed + units / rate`, by least squares over a time for
//! each size: the median of its operations. Beside kernels of the CPU, it is the fastest of
//! updates, sums and gathers, since others waited while kernels had the host's threads. The units
//! are FLOPs of kernels, by layer, phase and whether the layer keeps its activations; tokens of
//! layers without products, and of gathers; bytes of everything else. FLOPs grow with rows and with
//! rows × positions before them as attention does, so one number stands for both.

use std::collections::{BTreeMap, HashMap};
use std::iter;

use l2l_actors::schedule::{LayerId, Phase};
use l2l_actors::work::WorkKind;
use serde::{Deserialize, Serialize};

use super::forecast::Rates;
use super::machine::Sharing;
use crate::config::{Config, DeviceKind, EpsTier, OptimizerKind, Transfer};
use crate::error::Error;
use crate::machine;
use crate::models::{Model, Save};
use crate::plan::Plan;
use crate::tensor::Dtype;

pub(super) const CUTS: &str = "cuts sequences";

/// The version of the file.
pub(super) const VERSION: u32 = 3;

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
    /// The threads of each device of the CPU; 1 of a GPU, whose kernels have their own.
    pub threads: usize,
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
    /// The root of the mean square of what operations, or the fastest of each size, are off the
    /// line, by their mean time.
    pub residual: f64,
    /// The operations that it was fitted to.
    pub operations: u64,
}

/// Operations of a kind: units and seconds of each.
pub(super) type Points = Vec<(f64, f64)>;

/// Whether such work waits while kernels of the CPU have the host's threads.
pub(super) fn waits_for_threads(kind: WorkKind) -> bool {
    matches!(kind, WorkKind::Gather | WorkKind::Reduce | WorkKind::Update)
}

/// Which time stands for the operations of one size.
#[derive(Clone, Copy)]
pub(super) enum TimeOfSize {
    /// Of three and more, one that was interrupted does not count.
    Median,
    /// All others may have waited for threads. Where all have, it is that of a larger size, which
    /// takes no less.
    Fastest,
}

impl TimeOfSize {
    /// That of a kind of work, beside kernels of such a device.
    pub(super) fn of(kind: WorkKind, device: DeviceKind) -> TimeOfSize {
        match device == DeviceKind::Cpu && waits_for_threads(kind) {
            true => TimeOfSize::Fastest,
            false => TimeOfSize::Median,
        }
    }

    /// Each size, its time, and the number of its operations.
    fn times(self, points: &Points) -> Vec<(f64, f64, f64)> {
        let mut sorted = points.clone();
        sorted.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1)));
        let of_size = sorted.chunk_by(|one, other| one.0 == other.0);
        let time = |all: &[(f64, f64)]| match self {
            TimeOfSize::Median => (all[(all.len() - 1) / 2].1 + all[all.len() / 2].1) / 2.0,
            TimeOfSize::Fastest => all[0].1,
        };
        let mut times: Vec<_> =
            of_size.map(|all| (all[0].0, time(all), all.len() as f64)).collect();
        if matches!(self, TimeOfSize::Fastest) {
            let mut least = f64::INFINITY;
            for (_, time, _) in times.iter_mut().rev() {
                least = least.min(*time);
                *time = least;
            }
        }
        times
    }
}

impl FittedLine {
    /// The line through the times of these points' sizes by least squares. Where that has a
    /// negative part, or all operations have one size, the line through the origin. `None`: no
    /// operation took any time.
    pub(super) fn of(points: &Points, time: TimeOfSize) -> Option<FittedLine> {
        let count = points.len() as f64;
        let times = time.times(points);
        let sum = |of: &dyn Fn(f64, f64) -> f64| {
            times.iter().map(|&(x, y, count)| of(x, y) * count).sum::<f64>()
        };
        let [units, seconds] = [sum(&|x, _| x) / count, sum(&|_, y| y) / count];
        if !(units > 0.0 && seconds > 0.0) {
            return None;
        }
        let spread = sum(&|x, _| (x - units).powi(2));
        let slope = sum(&|x, y| (x - units) * (y - seconds)) / spread;
        let fixed = seconds - slope * units;
        let is_one = spread > 1e-12 * count * units * units && slope > 0.0 && fixed >= 0.0;
        let [fixed, slope] = if is_one { [fixed, slope] } else { [0.0, seconds / units] };
        let off = |x: f64, y: f64| (y - fixed - slope * x).powi(2);
        let off = match time {
            TimeOfSize::Median => points.iter().map(|&(x, y)| off(x, y)).sum::<f64>(),
            TimeOfSize::Fastest => sum(&off),
        };
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

/// What files call a layer without products. It may take no time.
const EDGE: &str = "edge";

/// Kernels of a layer in a phase that saves these activations, as a file names them.
pub(super) fn key_of(model: &Model, layer: usize, phase: Phase, save: Option<Save>) -> String {
    let of = &model.layers[layer];
    let has_products = flops_of_one(model, layer) > 0.0;
    let name = if has_products { of.name() } else { EDGE };
    let phase = match phase {
        Phase::Forward | Phase::Reference => "forward",
        Phase::Keys => "keys",
        Phase::Backward => "backward",
    };
    let keeps = if save == Some(Save::All) { ", kept" } else { "" };
    format!("{name} {phase}{keeps}")
}

/// The threads of each device of the CPU.
pub(super) fn threads_of(config: &Config) -> usize {
    match config.device.kind {
        DeviceKind::Cuda => 1,
        DeviceKind::Cpu => {
            let all = config.device.threads.unwrap_or_else(machine::cores);
            (all / config.devices() as usize).max(1)
        }
    }
}

fn flops_of_one(model: &Model, layer: usize) -> f64 {
    model.visit_flops(layer, Phase::Forward, iter::once(0..1), None)
}

/// The units of kernels for these sequences, of so many positions: FLOPs, or tokens of a layer that
/// has no products.
pub(super) fn units_of(
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

/// A value as a config has it.
pub(super) fn word(value: impl Serialize) -> String {
    serde_json::to_value(value)
        .ok()
        .and_then(|word| Some(word.as_str()?.to_owned()))
        .unwrap_or_default()
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
             device = \"{}\"\nthreads = {}\ndtype = \"{}\"\noptimizer = \"{}\"\n\
             stash_on_device = {}\n",
            word(self.device),
            self.threads,
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
        let told = |error: toml::de::Error| error.to_string().trim_end().to_owned();
        let keys: toml::Table = toml::from_str(text).map_err(told)?;
        let version = keys.get("version").and_then(toml::Value::as_integer);
        if let Some(version) = version.filter(|version| *version != i64::from(VERSION)) {
            return Err(format!(
                "it is of version {version}, and this program reads {VERSION}: fit the rates again"
            ));
        }
        let found: FittedRates = toml::from_str(text).map_err(told)?;
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
            (
                "device.threads of each device",
                threads_of(config).to_string(),
                self.threads.to_string(),
            ),
            ("optimizer.kind", word(config.optimizer.kind), word(self.optimizer)),
            ("the stash's place", place(plan.stash_on_device()), place(self.stash_on_device)),
        ];
        let other = facts.into_iter().find(|(_, needs, has)| needs != has);
        other
            .map(|(what, needs, has)| format!("{what} is {needs}, and the rates are of {has}"))
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
        save: Option<Save>,
    ) -> Result<Option<FittedLine>, String> {
        let key = key_of(model, layer, phase, save);
        let found = self.compute.get(&key).or_else(|| {
            // A head of one tile has one visit for both phases.
            let is_head = model.layers[layer].is_head();
            is_head.then(|| self.compute.get(&key_of(model, layer, Phase::Backward, save)))?
        });
        let may_lack = key.starts_with(EDGE);
        if found.is_none() && !may_lack {
            return Err(lacks(&key));
        }
        Ok(found.copied())
    }

    /// The line of a kind of work.
    fn line(&self, kind: WorkKind) -> Result<FittedLine, String> {
        let found = self.work.get(kind.name()).copied();
        found.ok_or_else(|| lacks(kind.name()))
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
        rates.kept = plan.kept.clone();
        for layer in 1..model.layers.len() {
            let save = plan.saves(LayerId(layer as u32));
            for phase in [Phase::Forward, Phase::Backward] {
                let Some(of) = fit.kernels(model, layer, phase, save).map_err(refuse)? else {
                    continue;
                };
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
        // Kernels that sleep take no threads.
        let computes = config.device.kind == DeviceKind::Cpu && config.device.flop_rate.is_none();
        rates.sharing = computes.then(|| Sharing::Threads { devices: config.devices() });
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
            FittedLine::of(&points, TimeOfSize::Median).expect("a line");
        assert!((fixed - 0.5).abs() < 1e-12 && (units_per_second - 4.0).abs() < 1e-12);
        assert!(residual < 1e-12 && operations == 19);
        // All of one size, or faster with size: through the origin.
        let of = |points: &[(f64, f64)]| FittedLine::of(&points.to_vec(), TimeOfSize::Median);
        let one = of(&[(8.0, 1.0), (8.0, 3.0)]).expect("a line");
        assert_eq!((one.fixed, one.units_per_second, one.residual), (0.0, 4.0, 0.5));
        let falls = of(&[(1.0, 3.0), (3.0, 1.0)]).expect("a line");
        assert_eq!((falls.fixed, falls.units_per_second), (0.0, 1.0));
        assert_eq!(of(&[(0.0, 1.0)]), None);
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn work_that_waits_for_threads_is_as_fast_as_its_fastest_operation() {
        let points = vec![(4.0, 9.0), (4.0, 1.0), (8.0, 2.0), (8.0, 7.0), (8.0, 8.0)];
        let line =
            |kind| FittedLine::of(&points, TimeOfSize::of(kind, DeviceKind::Cpu)).expect("a line");
        let FittedLine { fixed, units_per_second, residual, .. } = line(WorkKind::Update);
        assert_eq!((fixed, units_per_second, residual), (0.0, 4.0, 0.0));
        assert!(line(WorkKind::Weights).fixed > 2.0);
        // All operations of the smallest size have waited.
        let waited = [&[(2.0, 7.0)][..], &points].concat();
        let found = FittedLine::of(&waited, TimeOfSize::Fastest).expect("a line");
        assert!(found.fixed < 1.0 && found.units_per_second > 4.0, "{found:?}");
    }
}
