//! `l2l plan`: what a run would hold and move.

use l2l::config::{Format, Term};
use l2l::models::Model;
use l2l::{Error, Plan, shape_of};
use serde_json::{Map, Value, json};

use super::{Common, print};

pub(super) fn plan(common: &Common) -> Result<(), Error> {
    let (config, layers) = common.read(None, None)?;
    let model = Model::new(shape_of(&config).map_err(|error| layers.locate(error))?);
    let plan = Plan::new(&config, &model, &config.update_rule());
    let plan = plan.map_err(|error| layers.locate(error))?;
    show(&plan, &model, config.log.format);
    Ok(())
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
