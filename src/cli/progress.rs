//! What a run shows while it goes: JSON lines, a bar on a terminal, or plain lines elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use l2l::config::{ByteSize, Format};
use l2l::inference::Evaluation;
use l2l::{StepReport, Summary, machine};
use serde_json::{Value, json};

use super::journal::Journal;
use super::print;

/// Plain lines that a run prints about its steps, about.
const LINES: u64 = 20;

/// See the [module](self).
pub(super) struct Screen {
    journal: Journal,
    format: Format,
    bar: Option<ProgressBar>,
    steps: u64,
    validation: Option<f64>,
    /// Bytes of the device that may be in use.
    ceiling: u64,
}

impl Screen {
    pub(super) fn new(
        journal: Journal,
        format: Format,
        first: u64,
        steps: u64,
        ceiling: u64,
    ) -> Screen {
        let shows = format == Format::Pretty && std::io::stderr().is_terminal();
        let bar = shows.then(|| {
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}  {eta} left");
            ProgressBar::new(steps)
                .with_position(first)
                .with_style(style.expect("a template of ours"))
        });
        Screen { journal, format, bar, steps, validation: None, ceiling }
    }

    pub(super) fn step(&mut self, report: &StepReport) {
        let event = step_event(report);
        self.journal.note(&event);
        match (&self.bar, self.format) {
            (_, Format::Json) => print(event),
            (Some(bar), Format::Pretty) => {
                bar.set_message(self.line(report));
                bar.set_position(report.step);
            }
            (None, Format::Pretty) => {
                let every = self.steps.div_ceil(LINES);
                if report.step.is_multiple_of(every)
                    || report.step == 1
                    || report.step == self.steps
                {
                    print(format_args!(
                        "step {}/{}  {}",
                        report.step,
                        self.steps,
                        self.line(report)
                    ));
                }
            }
        }
    }

    fn line(&self, report: &StepReport) -> String {
        let StepReport { loss, tokens, seconds, exposed_wait_seconds, bottleneck, .. } = report;
        let validation = self.validation.map(|loss| format!(" (held out {loss:.4})"));
        format!(
            "loss {loss:.4}{}  {:.0} tokens/s  exposed wait {:.0} %  bottleneck {}  device {} of {}",
            validation.unwrap_or_default(),
            *tokens as f64 / seconds,
            100.0 * exposed_wait_seconds / seconds,
            bottleneck.name(),
            ByteSize::from(report.device_peak_bytes),
            ByteSize::from(self.ceiling),
        )
    }

    pub(super) fn validation(&mut self, step: u64, found: &Evaluation) {
        self.validation = Some(found.loss);
        let mut event = json!({ "event": "validation", "step": step });
        let values = found.values();
        values.iter().for_each(|(name, value)| event[*name] = json!(value));
        self.journal.note(&event);
        let shown = values.iter().map(|(name, value)| format!("{name} {value:.4}"));
        match self.format {
            Format::Json => print(event),
            Format::Pretty => {
                let shown: Vec<String> = shown.collect();
                self.say(format_args!("step {step}: held-out {}", shown.join(", ")));
            }
        }
    }

    /// An event for tools, and what it says to people.
    pub(super) fn event(&mut self, event: Value, says: impl std::fmt::Display) {
        self.journal.note(&event);
        match self.format {
            Format::Json => print(event),
            Format::Pretty => self.say(says),
        }
    }

    /// A line to read, above the bar; nothing for tools.
    pub(super) fn say(&self, line: impl std::fmt::Display) {
        match (&self.bar, self.format) {
            (_, Format::Json) => {}
            (Some(bar), Format::Pretty) => bar.suspend(|| print(line)),
            (None, Format::Pretty) => print(line),
        }
    }

    /// The end; `more` are fields that a command adds.
    pub(super) fn summary(&mut self, summary: &Summary, link: Option<&str>, more: &[(&str, f64)]) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let mut event = summary_event(summary, link);
        more.iter().for_each(|(name, value)| event[name] = json!(value));
        self.journal.note(&event);
        if self.format == Format::Json {
            return print(event);
        }
        let Summary { steps, seconds, visits, bytes_uploaded, bytes_downloaded, .. } = *summary;
        print(format_args!("{steps} steps, {seconds:.1} s, {visits} visits"));
        let link = link.map(|link| format!(", over a link of {link}, emulated"));
        print(format_args!(
            "{} up, {} down{}",
            ByteSize::from(bytes_uploaded),
            ByteSize::from(bytes_downloaded),
            link.unwrap_or_default()
        ));
        for (name, value) in more {
            print(format_args!("{:<26} {value:>16.3}", name.replace('_', " ")));
        }
        print(format_args!("weights {}", summary.weights_digest));
    }
}

fn step_event(report: &StepReport) -> Value {
    json!({
        "event": "step",
        "step": report.step,
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
        "tokens": report.tokens,
        "model_flops": report.model_flops,
        "seconds": report.seconds,
        "exposed_wait_seconds": report.exposed_wait_seconds,
        "device_peak_bytes": report.device_peak_bytes,
        "host_rss_bytes": machine::resident_memory(),
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
