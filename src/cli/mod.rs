//! Commands: `train` and `plan`.

use std::io::Write;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use l2l::config::Term;
use l2l::models::Model;
use l2l::{Config, Error, Plan, StepReport, Summary, Trainer, shape_of};
use serde_json::{Map, Value, json};

/// Trains transformers too large for the device, one layer at a time.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Trains.
    Train(Common),
    /// Says what a run would hold and move, and starts nothing.
    Plan(Common),
}

#[derive(clap::Args)]
struct Common {
    /// The config file; every key has a default.
    config: Option<PathBuf>,
    /// What is printed.
    #[arg(long, value_enum, default_value_t = Format::Pretty)]
    format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Lines to read.
    Pretty,
    /// One object a line.
    Json,
}

/// Runs the command that the arguments name.
pub(crate) fn run() -> Result<(), Error> {
    match Arguments::parse().command {
        Command::Train(common) => train(&common),
        Command::Plan(common) => plan(&common),
    }
}

fn config_of(common: &Common) -> Result<Config, Error> {
    common.config.as_deref().map_or_else(|| Ok(Config::default()), Config::read)
}

/// Prints a line at once; a reader that has gone away is no failure of the run.
fn print(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn train(common: &Common) -> Result<(), Error> {
    let config = config_of(common)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|error| Error::Failed(format!("no runtime: {error}")))?;
    runtime.block_on(async {
        let (steps, link) = (config.step.steps, config.device.link.clone());
        let mut trainer = Trainer::start(config)?;
        for _ in 0..steps {
            let report = trainer.step().await?;
            match common.format {
                Format::Json => print(step_event(&report)),
                Format::Pretty => print(step_line(&report, steps)),
            }
        }
        let summary = trainer.finish().await?;
        match common.format {
            Format::Json => print(summary_event(&summary, link.as_deref())),
            Format::Pretty => print(format_args!(
                "{} steps in {:.1} s, weights {}",
                summary.steps, summary.seconds, summary.weights_digest
            )),
        }
        Ok(())
    })
}

fn step_line(report: &StepReport, steps: u64) -> String {
    let StepReport { step, loss, grad_norm, tokens, seconds, exposed_wait_seconds, .. } = *report;
    let waited = 100.0 * exposed_wait_seconds / seconds;
    let speed = tokens as f64 / seconds;
    format!(
        "step {step}/{steps}  loss {loss:.4}  norm {grad_norm:.3}  {speed:.0} tokens/s  \
         exposed wait {waited:.0} %"
    )
}

fn step_event(report: &StepReport) -> Value {
    json!({
        "event": "step",
        "step": report.step,
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
        "tokens": report.tokens,
        "seconds": report.seconds,
        "exposed_wait_seconds": report.exposed_wait_seconds,
        "device_peak_bytes": report.device_peak_bytes,
        "host_rss_bytes": host_rss_bytes(),
    })
}

fn summary_event(summary: &Summary, link: Option<&str>) -> Value {
    let mut event = json!({
        "event": "summary",
        "steps": summary.steps,
        "seconds": summary.seconds,
        "weights_digest": summary.weights_digest,
        "visits": summary.visits,
        "bytes_uploaded": summary.bytes_uploaded,
        "bytes_downloaded": summary.bytes_downloaded,
    });
    if let Some(link) = link {
        event["link"] = json!(link);
    }
    event
}

/// Resident bytes of this process, where the system tells.
fn host_rss_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes * 1024)
}

fn plan(common: &Common) -> Result<(), Error> {
    let config = config_of(common)?;
    let model = Model::gpt2(shape_of(&config)?);
    let plan = Plan::new(&config, &model)?;
    let misfits = plan.misfits();
    if common.format == Format::Json {
        let terms = |terms: &[Term], total: u64| {
            let terms = terms.iter().map(|term| (term.name.to_string(), json!(term.bytes)));
            json!({ "total": total, "terms": terms.collect::<Map<String, Value>>() })
        };
        print(json!({
            "event": "plan",
            "fits": misfits.is_empty(),
            "why_not": misfits,
            "device_bytes": terms(&plan.device, plan.device_bytes()),
            "host_bytes": terms(&plan.host, plan.host_bytes()),
            "upload_bytes": plan.upload_bytes,
            "download_bytes": plan.download_bytes,
        }));
        return Ok(());
    }
    print(format_args!("{} parameters", model.parameters()));
    for (place, terms, total) in
        [("device", &plan.device, plan.device_bytes()), ("host", &plan.host, plan.host_bytes())]
    {
        print(format_args!("{place}: {total} bytes"));
        terms.iter().for_each(|term| print(format_args!("  {:<18}{:>16}", term.name, term.bytes)));
    }
    print(format_args!("upload a step: {} bytes", plan.upload_bytes));
    print(format_args!("download a step: {} bytes", plan.download_bytes));
    misfits.iter().for_each(|misfit| print(format_args!("does not fit: {misfit}")));
    Ok(())
}
