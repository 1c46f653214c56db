//! What a run shows while it goes: JSON lines, a bar on a terminal, or plain lines elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use l2l::config::{ByteSize, Format};
use l2l::inference::Evaluation;
use l2l::{StepReport, Summary};
use serde_json::Value;

use super::print;

/// Plain lines that a run prints about its steps, about.
const LINES: u64 = 20;

/// See the [module](self).
pub(super) struct Screen {
    format: Format,
    bar: Option<ProgressBar>,
    steps: u64,
    /// The validation set whose loss is shown with each step, and its last loss.
    validation: Option<(Option<String>, f64)>,
    /// Bytes of the device that may be in use.
    ceiling: u64,
}

impl Screen {
    pub(super) fn new(format: Format, first: u64, steps: u64, ceiling: u64) -> Screen {
        let shows = format == Format::Pretty && std::io::stderr().is_terminal();
        let bar = shows.then(|| {
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}  {eta} left");
            ProgressBar::new(steps)
                .with_position(first)
                .with_style(style.expect("a template of ours"))
        });
        Screen { format, bar, steps, validation: None, ceiling }
    }

    /// An event, which is shown as it is in the format for tools.
    pub(super) fn event(&self, event: &Value) {
        if self.format == Format::Json {
            print(event);
        }
    }

    /// A step, for people.
    pub(super) fn step(&mut self, report: &StepReport) {
        match (&self.bar, self.format) {
            (_, Format::Json) => {}
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
        let slowest = report.slowest_device.map(|(device, share)| {
            format!("  slowest device {device} (computes {:.0} %)", 100.0 * share)
        });
        let validation = self.validation.as_ref().map(|(_, loss)| format!(" (held out {loss:.4})"));
        format!(
            "loss {loss:.4}{}  {:.0} tokens/s  exposed wait {:.0} %  bottleneck {}  \
             device {} of {}{}",
            validation.unwrap_or_default(),
            *tokens as f64 / seconds,
            100.0 * exposed_wait_seconds / seconds,
            bottleneck.name(),
            ByteSize::from(report.device_peak_bytes),
            ByteSize::from(self.ceiling),
            slowest.unwrap_or_default(),
        )
    }

    /// A validation, for people.
    pub(super) fn validation(&mut self, step: u64, evaluation: &Evaluation) {
        let set = evaluation.set.as_ref().map(|set| format!(" ({set})")).unwrap_or_default();
        let loss = evaluation.loss;
        let shown = self.validation.get_or_insert_with(|| (evaluation.set.clone(), loss));
        if shown.0 == evaluation.set {
            shown.1 = loss;
        }
        let shown = evaluation.values().into_iter();
        let shown: Vec<String> = shown.map(|(name, value)| format!("{name} {value:.4}")).collect();
        self.say(format_args!("step {step}: held-out{set} {}", shown.join(", ")));
    }

    /// A line to read, above the bar; nothing for tools.
    pub(super) fn say(&self, line: impl std::fmt::Display) {
        match (&self.bar, self.format) {
            (_, Format::Json) => {}
            (Some(bar), Format::Pretty) => bar.suspend(|| print(line)),
            (None, Format::Pretty) => print(line),
        }
    }

    /// One line of how fast a kernel is, in billions a second, and as a share of a limit.
    pub(super) fn kernel(&self, kernel: &str, rate: f64, share: f64, of: &str) {
        if self.format != Format::Json {
            let rate = rate / 1e9;
            print(format_args!("{kernel:<26} {rate:>16.1} G/s, {share:.2} of the {of}'s rate"));
        }
    }

    /// The summary of a run, for people, with values that a command adds.
    pub(super) fn summary(&mut self, summary: &Summary, link: Option<&str>, more: &[(&str, f64)]) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.format == Format::Json {
            return;
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
