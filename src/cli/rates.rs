//! `l2l bench --rates` fits rates to short runs, and `l2l plan --rates` reads them.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use l2l::config::Format;
use l2l::data::{Batches, Dataset};
use l2l::models::Model;
use l2l::telemetry::{FittedLine, FittedRates, Observe, RateRuns, Rates, Slice};
use l2l::{Config, Error, Plan, Trainer, largest_shape_of, model_of, shape_of};
use serde_json::json;

use super::output::{OutputFile, print};
use super::runtime::Runtime;
use super::say;

/// Steps of a run that count, behind one that does not.
const STEPS: u64 = 3;

/// Reads a file of rates, for a run of this config.
pub(super) fn read(
    file: &Path,
    config: &Config,
    model: &Model,
    plan: &Plan,
) -> Result<Rates, Error> {
    let named = |problem: String| Error::Argument(format!("--rates {}: {problem}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| named(error.to_string()))?;
    let fit = FittedRates::parse(&text).map_err(named)?;
    Rates::fitted(&fit, config, model, plan)
}

/// Fits rates to short runs of a config, and writes them.
pub(super) fn fit(config: &Config, file: &Path) -> Result<(), Error> {
    let to = OutputFile::open("--rates", file)?;
    let mut runs = RateRuns::default();
    let mut plans = Vec::new();
    let configs = RateRuns::configs(config)?;
    let own = configs[0].schedule.recompute;
    for mut run in configs {
        run.step.steps = Some(1 + STEPS);
        let model = model_of(&run, largest_shape_of(&run)?)?;
        let plan = match Plan::new(&run, &model, &run.update_rule()) {
            Err(error) if run.schedule.recompute != own => {
                say(format_args!("left out, with another schedule.recompute: {error}"));
                continue;
            }
            plan => plan?,
        };
        RateRuns::check(&run, &model, &plan)?;
        let slices = Runtime::new()?.block_on(slices_of(&run))?;
        runs.add(&slices, &model, &plan);
        plans.push(plan);
    }
    let fit = runs.fit(config, &plans[0]);
    let all = fit.compute.iter().chain(&fit.work);
    all.for_each(|(name, line)| show(config.log.format, name, line));
    to.write(&fit.text())
}

/// Runs the steps of a config, and returns the operations of those that count.
async fn slices_of(config: &Config) -> Result<Vec<Slice>, Error> {
    let (mut train, _) = Dataset::open(config, &shape_of(config)?)?;
    train.refer_to_nothing();
    let slices = Arc::new(Slices::default());
    let builder = Trainer::builder(config.clone()).observe(slices.clone()).trial();
    let mut trainer = builder.start().await?;
    let mut batches = Batches::start(config, train, 0)?;
    for _ in 0..=STEPS {
        trainer.step(batches.next().await?).await?;
    }
    trainer.stop().await?;
    let mut all = std::mem::take(&mut *slices.0.lock().expect("nothing panics inside"));
    all.retain(|slice| slice.step > 1); // the first touches memory for the first time
    Ok(all)
}

/// Collects the operations of a run.
#[derive(Default)]
struct Slices(Mutex<Vec<Slice>>);

impl Observe for Slices {
    fn heard(&self, slice: &Slice) {
        self.0.lock().expect("nothing panics inside").push(*slice);
    }
}

fn show(format: Format, name: &str, line: &FittedLine) {
    let FittedLine { fixed, units_per_second, residual, operations } = *line;
    match format {
        Format::Json => print(json!({
            "event": "rate", "of": name, "fixed_seconds": fixed,
            "units_per_second": units_per_second, "residual": residual, "operations": operations,
        })),
        Format::Pretty => print(format_args!(
            "{name:<16} {:>9.1} µs + units / {units_per_second:.4e}, residual {:.1} % of \
             {operations} operations",
            1e6 * fixed,
            100.0 * residual
        )),
    }
}
