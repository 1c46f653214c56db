//! `l2l plan`: what a run would hold and move.

use std::path::Path;

use l2l::config::{Format, Term};
use l2l::models::Model;
use l2l::telemetry::{self, Forecast, Rates};
use l2l::{Config, Error, Plan, machine, shape_of};
use serde_json::{Map, Value, json};

use super::{PlanArguments, RateArguments, print};

pub(super) fn plan(arguments: &PlanArguments) -> Result<(), Error> {
    let PlanArguments { common, draw: picture, rates } = arguments;
    let (config, layers) = common.read(None, None)?;
    let model = Model::new(shape_of(&config).map_err(|error| layers.locate(error))?);
    let plan = Plan::new(&config, &model, &config.update_rule());
    let plan = plan.map_err(|error| layers.locate(error))?;
    show(&plan, &model, config.log.format);
    match picture {
        Some(picture) => {
            draw(picture, &config, &model, rates).map_err(|error| layers.locate(error))
        }
        None => Ok(()),
    }
}

/// Draws a step of a config in virtual time.
fn draw(to: &Path, config: &Config, model: &Model, arguments: &RateArguments) -> Result<(), Error> {
    let forecast = Forecast::of(config, model, &rates(config, model, arguments)?)?;
    let title = format!(
        "A step of {} layers, {} sequences in micro-batches of {}: {:.3} s in virtual time",
        model.parts.len(),
        config.step.batch,
        config.step.micro_batch,
        forecast.seconds
    );
    let refused = |error| Error::Refused(format!("--draw {}: {error}", to.display()));
    std::fs::write(to, telemetry::draw(&title, &forecast.slices)).map_err(refused)
}

/// Rates as arguments say, and else as this machine has them.
pub(super) fn rates(
    config: &Config,
    model: &Model,
    arguments: &RateArguments,
) -> Result<Rates, Error> {
    let RateArguments { tflops, link_gbps, host_gbps } = *arguments;
    for (name, rate) in [("tflops", tflops), ("link-gbps", link_gbps), ("host-gbps", host_gbps)] {
        if rate.is_some_and(|rate| !(1e-9..=1e9).contains(&rate)) {
            return Err(Error::Refused(format!("--{name} must be from 1e-9 to 1e9")));
        }
    }
    let threads = config.device.threads.unwrap_or_else(machine::cores);
    let flops = match tflops {
        Some(rate) => rate * 1e12,
        None => machine::product_flops_per_second(threads)?,
    };
    let host = match host_gbps {
        Some(rate) => rate * 1e9,
        None => machine::stream_bytes_per_second(threads)?,
    };
    let link = match link_gbps {
        Some(rate) => rate * 1e9,
        None => config.link_bytes_per_second()?.unwrap_or(host),
    };
    Ok(Rates::of(config, model, flops, link, host))
}

/// Shows what a plan holds and moves.
pub(super) fn show(plan: &Plan, model: &Model, format: Format) {
    let misfits = plan.misfits();
    if format == Format::Json {
        let terms = |terms: &[Term], total: u64| {
            let terms = terms.iter().map(|term| (term.name.to_string(), json!(term.bytes)));
            json!({ "total": total, "terms": terms.collect::<Map<String, Value>>() })
        };
        print(json!({
            "event": "plan",
            "fits": misfits.is_empty(),
            "why_not": misfits,
            "parameters": model.parameters(),
            "device_bytes": terms(&plan.device, plan.device_bytes()),
            "host_bytes": terms(&plan.host, plan.host_bytes()),
            "upload_bytes": plan.upload_bytes,
            "download_bytes": plan.download_bytes,
        }));
        return;
    }
    print(format_args!("{:<20}{:>16}", "parameters", model.parameters()));
    for (place, terms, total) in
        [("device", &plan.device, plan.device_bytes()), ("host", &plan.host, plan.host_bytes())]
    {
        print(format_args!("{place:<20}{total:>16} bytes"));
        terms.iter().for_each(|term| print(format_args!("  {:<18}{:>16}", term.name, term.bytes)));
    }
    print(format_args!("{:<20}{:>16} bytes", "upload a step", plan.upload_bytes));
    print(format_args!("{:<20}{:>16} bytes", "download a step", plan.download_bytes));
    match &misfits[..] {
        [] => print("fits"),
        misfits => misfits.iter().for_each(|misfit| print(format_args!("does not fit: {misfit}"))),
    }
}
