//! `l2l plan --machine`: what a run would take on machines that are not at hand.

use std::collections::BTreeMap;
use std::fs;

use l2l::config::Format;
use l2l::telemetry::{self, Forecast, Lane, MACHINES, Machine, WaitCause};
use l2l::{Config, Error, Plan, largest_shape_of, model_of};
use serde_json::json;

use super::outlook::bound_by;
use super::output::{print, write_file};
use super::plan::title;
use super::tune::Layout;
use super::{Exit, PlanArguments};

/// Compares machines and, if asked, layouts of each.
pub(super) fn compare(arguments: &PlanArguments) -> Result<Exit, Error> {
    let (config, _) = arguments.common.read()?;
    let machines: Vec<Machine> =
        arguments.machine.iter().map(|name| find(name)).collect::<Result<_, _>>()?;
    let mut rows = Vec::new();
    for machine in &machines {
        let here = machine.config(&config);
        let layouts = Layout::all(&here);
        let count = if arguments.layouts { layouts.len() } else { 1 };
        for layout in layouts.into_iter().take(count) {
            let mut here = here.clone();
            layout.set(&mut here);
            let found = Found::of(machine, &here);
            let found = found.unwrap_or_else(Found::Refused);
            rows.push(Row { machine, layout: layout.to_string(), found });
        }
    }
    if rows.iter().all(|row| matches!(row.found, Found::Refused(_)))
        && let Some(Row { found: Found::Refused(error), .. }) = rows.pop()
    {
        return Err(error);
    }
    rows.sort_by(|a, b| b.found.tokens_per_second().total_cmp(&a.found.tokens_per_second()));
    match config.log.format {
        Format::Json => rows.iter().for_each(|row| print(row.event())),
        Format::Pretty => table(&rows),
    }
    if let Some(path) = &arguments.csv {
        write_file("--csv", path, &csv_of(&rows)?)?;
    }
    if let Some(path) = &arguments.trace {
        let Found::Fits(first) = &rows[0].found else {
            let problem = "it fits on none of these machines, so there is no step to write";
            return Err(Error::Argument(format!("--trace {}: {problem}", path.display())));
        };
        let title = format!("{}, {}: {}", rows[0].machine.name, rows[0].layout, first.title);
        write_file("--trace", path, &telemetry::timeline(&title, &first.forecast.slices))?;
    }
    let fits = rows.iter().any(|row| matches!(row.found, Found::Fits(_)));
    Ok(if arguments.check && !fits { Exit::DoesNotFit } else { Exit::Well })
}

/// Reads a machine's file, or finds the one of this name.
fn find(name: &str) -> Result<Machine, Error> {
    let parse = |text: &str| {
        Machine::parse(text)
            .map_err(|problem| Error::Argument(format!("--machine {name}: {problem}")))
    };
    if let Some((_, text)) = MACHINES.iter().find(|(known, _)| *known == name) {
        return parse(text);
    }
    match fs::read_to_string(name) {
        Ok(text) => parse(&text),
        Err(error) => {
            let known = MACHINES.map(|(name, _)| name).join(", ");
            Err(Error::Argument(format!(
                "--machine {name}: {error}; it is no name of a machine either: {known}"
            )))
        }
    }
}

/// A machine and a layout with what was found.
struct Row<'m> {
    machine: &'m Machine,
    layout: String,
    found: Found,
}

enum Found {
    Fits(Box<Answer>),
    Lacks(String),
    Refused(Error),
}

/// The run of a plan that fits.
struct Answer {
    seconds: f64,
    tokens_per_second: f64,
    /// Tokens for one unit of the price.
    tokens_per_price: Option<f64>,
    /// Messages between the hosts in a step.
    messages: u64,
    device_bytes: u64,
    host_bytes: u64,
    file_bytes: u64,
    /// The share of a step in which devices compute.
    computes: f64,
    /// The shares of the step in which they wait, the largest first.
    waits: Vec<(WaitCause, f64)>,
    /// What a picture of the step is called.
    title: String,
    forecast: Forecast,
}

impl Found {
    fn of(machine: &Machine, config: &Config) -> Result<Found, Error> {
        config.check()?;
        let model = model_of(config, largest_shape_of(config)?)?;
        let share = machine.share(config, &model)?;
        let plan = Plan::of_rank(config, &model, &config.update_rule(), share)?;
        if let Some(lack) = machine.misfit(&plan) {
            return Ok(Found::Lacks(lack));
        }
        let rates = machine.rates_of(config, &model)?;
        let forecast = Forecast::of_plan(config, &model, &plan, &rates)?;
        let batches = config.step.batch * config.window() as usize;
        let tokens = (batches * plan.batch.positions) as f64;
        let seconds = forecast.seconds;
        let tokens_per_second = tokens / seconds;
        Ok(Found::Fits(Box::new(Answer {
            seconds,
            tokens_per_second,
            tokens_per_price: machine.price_per_hour.map(|p| tokens_per_second * 3600.0 / p.0),
            messages: messages(&forecast, machine.hosts()),
            device_bytes: plan.device_bytes(),
            host_bytes: plan.host_bytes(),
            file_bytes: plan.file_bytes(),
            computes: 1.0 - forecast.exposed_seconds() / seconds,
            waits: waits(&forecast),
            title: title(config, &model, &forecast),
            forecast,
        })))
    }

    fn tokens_per_second(&self) -> f64 {
        match self {
            Found::Fits(answer) => answer.tokens_per_second,
            Found::Lacks(_) => 0.0,
            Found::Refused(_) => -1.0,
        }
    }
}

/// The messages of a step: in each exchange every host has one from each other.
fn messages(forecast: &Forecast, hosts: u32) -> u64 {
    let exchanges = |lane: Lane| matches!(lane, Lane::Fetch | Lane::Exchange);
    let exchanges = forecast.slices.iter().filter(|slice| exchanges(slice.lane)).count();
    exchanges as u64 * u64::from(hosts) * u64::from(hosts - 1)
}

/// The shares of a step in which devices wait for one cause, the largest first.
fn waits(forecast: &Forecast) -> Vec<(WaitCause, f64)> {
    let of = |cause| {
        let waits = forecast.waits.iter().filter(|wait| wait.cause == cause);
        (cause, waits.map(|wait| wait.seconds).sum::<f64>() / forecast.seconds)
    };
    let mut waits: Vec<_> = WaitCause::ALL.into_iter().map(of).collect();
    waits.retain(|(_, share)| *share >= 0.005);
    waits.sort_by(|a, b| b.1.total_cmp(&a.1));
    waits
}

impl Row<'_> {
    fn event(&self) -> serde_json::Value {
        let mut event = json!({
            "event": "machine", "machine": self.machine.name, "layout": self.layout,
            "fits": matches!(self.found, Found::Fits(_)), "rates": self.machine.rates.name(),
        });
        match &self.found {
            Found::Lacks(why) => event["why_not"] = json!(why),
            Found::Refused(error) => event["why_not"] = json!(error.to_string()),
            Found::Fits(answer) => {
                event["step_seconds"] = json!(answer.seconds);
                event["tokens_per_second"] = json!(answer.tokens_per_second);
                event["tokens_per_price"] = json!(answer.tokens_per_price);
                event["messages"] = json!(answer.messages);
                event["device_bytes"] = json!(answer.device_bytes);
                event["host_bytes"] = json!(answer.host_bytes);
                event["file_bytes"] = json!(answer.file_bytes);
                event["computes"] = json!(answer.computes);
                event["bound_by"] = bound_by(&answer.forecast);
                let waits = answer.waits.iter().map(|(cause, share)| (cause.name(), *share));
                event["waits"] = json!(waits.collect::<BTreeMap<_, _>>());
            }
        }
        event
    }
}

/// The columns of a table in CSV: fields of the events, and below them of `bound_by` and `waits`.
const COLUMNS: [&str; 13] = [
    "machine",
    "layout",
    "fits",
    "why_not",
    "rates",
    "step_seconds",
    "tokens_per_second",
    "tokens_per_price",
    "messages",
    "device_bytes",
    "host_bytes",
    "file_bytes",
    "computes",
];

/// The rows in CSV, with the names and values of the events. What a row lacks is empty.
fn csv_of(rows: &[Row<'_>]) -> Result<String, Error> {
    let lanes = Lane::ALL.map(|lane| ("bound_by", lane.name()));
    let causes = WaitCause::ALL.map(|cause| ("waits", cause.name()));
    let nested: Vec<(&str, &str)> = lanes.into_iter().chain(causes).collect();
    let mut table = csv::Writer::from_writer(Vec::new());
    let heads = COLUMNS.iter().map(|&column| column.to_owned());
    let heads = heads.chain(nested.iter().map(|(field, of)| format!("{field} {of}")));
    let mut lines = vec![heads.collect::<Vec<_>>()];
    for row in rows {
        let event = row.event();
        let values = COLUMNS.iter().map(|&column| &event[column]);
        let values = values.chain(nested.iter().map(|&(field, of)| &event[field][of]));
        let cell = |value: &serde_json::Value| match value {
            serde_json::Value::Null => String::new(),
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        lines.push(values.map(cell).collect());
    }
    let written = lines.iter().try_for_each(|line| table.write_record(line));
    let written = written.map_err(|error| error.to_string());
    let bytes = written.and_then(|()| table.into_inner().map_err(|error| error.to_string()));
    let text = bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    text.map_err(|problem| Error::System(format!("--csv: {problem}")))
}

/// Prints the rows, in columns as wide as their widest cell.
fn table(rows: &[Row<'_>]) {
    let is_priced = rows.iter().any(|row| row.machine.price_per_hour.is_some());
    let mut heads = vec!["machine", "layout", "step s", "tokens/s"];
    heads.extend(is_priced.then_some("tokens/price"));
    heads.extend(["device GB", "host GB", "computes", "rates", "bound by", "waits"]);
    let mut lines = vec![heads.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for row in rows {
        let mut line = vec![row.machine.name.clone(), row.layout.clone()];
        match &row.found {
            Found::Lacks(why) => line.push(format!("no: {why}")),
            Found::Refused(error) => line.push(format!("no: {error}")),
            Found::Fits(answer) => line.extend(answer.cells(row.machine, is_priced)),
        }
        lines.push(line);
    }
    let width = |column: usize| {
        // A refusal is longer than the columns that it takes the place of.
        let cells = lines.iter().filter(|line| column < 2 || line.len() > 3);
        cells.filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max()
    };
    for line in &lines {
        let cells = line.iter().enumerate();
        let padded = cells.map(|(at, cell)| format!("{cell:<0$}", width(at).unwrap_or(0)));
        print(padded.collect::<Vec<_>>().join("  ").trim_end());
    }
}

impl Answer {
    fn cells(&self, machine: &Machine, is_priced: bool) -> Vec<String> {
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let gigabytes = |bytes: u64| format!("{:.1}", bytes as f64 / 1e9);
        let mut cells = vec![format!("{:.3}", self.seconds), in_thousands(self.tokens_per_second)];
        if is_priced {
            cells.push(self.tokens_per_price.map_or("-".into(), in_thousands));
        }
        let waits =
            self.waits.iter().map(|(cause, share)| format!("{} {}", cause.name(), percent(*share)));
        cells.extend([gigabytes(self.device_bytes), gigabytes(self.host_bytes)]);
        cells.extend([percent(self.computes), machine.rates.name().to_owned()]);
        let bound = self.forecast.bound.first();
        let bound = bound.map(|(lane, share)| format!("{} {}", lane.name(), percent(*share)));
        cells.push(bound.unwrap_or_default());
        cells.push(waits.collect::<Vec<_>>().join(", "));
        cells
    }
}

/// A number with commas between thousands.
fn in_thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
