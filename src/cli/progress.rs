//! The screen of a run: JSON lines, a progress bar on a terminal, or plain lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use l2l::config::{ByteSize, Format};
use l2l::inference::Evaluation;
use l2l::telemetry::Point;
use l2l::{StepReport, Summary};
use serde_json::Value;

use super::print;

/// About how many plain lines a run prints about its steps.
const LINES: u64 = 20;

/// Shows a run in the format that the config asks for.
pub(super) struct Screen {
    format: Format,
    /// The bar, if standard error is a terminal.
    bar: Option<ProgressBar>,
    /// True if standard output shows steps as lines: there is no bar, or it is a terminal's and
    /// standard output is not.
    has_lines: bool,
    steps: u64,
    /// The validation set whose loss is shown with each step, and its last loss.
    validation: Option<(Option<String>, f64)>,
    /// Bytes of the device that may be in use; 0 if unknown.
    ceiling: u64,
    /// The number of steps that were done before this run.
    first: u64,
    began: Instant,
    /// The time from `began` to the last plain line.
    last_line: Duration,
}

/// In the first minute there is a line at least this often, so that the reader soon sees the loss.
const FIRST_LINES: Duration = Duration::from_secs(5);
const FIRST_MINUTE: Duration = Duration::from_secs(60);

impl Screen {
    pub(super) fn new(format: Format, first: u64, steps: u64, ceiling: u64) -> Screen {
        let is_pretty = format == Format::Pretty;
        let bar = is_pretty.then(|| {
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}");
            ProgressBar::new(steps)
                .with_position(first)
                .with_style(style.expect("a template of ours"))
        });
        // A bar is hidden if standard error is no terminal, or cannot move its cursor.
        let bar = bar.filter(|bar| !bar.is_hidden());
        let has_lines = is_pretty && (bar.is_none() || !std::io::stdout().is_terminal());
        Screen {
            format,
            bar,
            has_lines,
            steps,
            validation: None,
            ceiling,
            first,
            began: Instant::now(),
            last_line: Duration::ZERO,
        }
    }

    /// Shows an event, in the format for tools.
    pub(super) fn event(&self, event: &Value) {
        if self.format == Format::Json {
            print(event);
        }
    }

    /// Shows a step, in the format for people.
    pub(super) fn step(&mut self, report: &StepReport) {
        if let Some(bar) = &self.bar {
            bar.set_message(self.line(report));
            bar.set_position(report.step);
        }
        let every = self.steps.div_ceil(LINES);
        let elapsed = self.began.elapsed();
        let waits = elapsed < FIRST_MINUTE && elapsed - self.last_line >= FIRST_LINES;
        let is_due = report.step.is_multiple_of(every)
            || [1, self.first + 1, self.steps].contains(&report.step)
            || waits;
        if self.has_lines && is_due {
            self.last_line = elapsed;
            let StepReport { step, .. } = report;
            self.say(format_args!("step {step}/{}  {}", self.steps, self.line(report)));
        }
    }

    fn line(&self, report: &StepReport) -> String {
        let StepReport { loss, tokens, seconds, exposed_wait_seconds, bottleneck, .. } = report;
        let StepReport { learning_rate, grad_norm, step, .. } = report;
        let elapsed = self.began.elapsed();
        let done = step.saturating_sub(self.first).max(1);
        let left = self.steps.saturating_sub(*step);
        let remaining = elapsed.mul_f64(left as f64 / done as f64);
        let slowest = report.slowest_device.map(|(device, share)| {
            format!("  slowest device {device} (computes {:.0} %)", 100.0 * share)
        });
        let ceiling = match self.ceiling {
            0 => String::new(),
            ceiling => format!(" of {}", ByteSize::from(ceiling)),
        };
        let validation = self.validation.as_ref().map(|(_, loss)| format!(" (held out {loss:.4})"));
        format!(
            "loss {loss:.4}{}  rate {learning_rate:.2e}  norm {grad_norm:.3}  {} passed, {} left  \
             {:.0} tokens/s  exposed wait {:.0} %  bottleneck {}  \
             device {}{}{}{}",
            validation.unwrap_or_default(),
            clock(elapsed),
            clock(remaining),
            *tokens as f64 / seconds,
            100.0 * exposed_wait_seconds / seconds,
            bottleneck.name(),
            ByteSize::from(report.device_peak_bytes),
            ceiling,
            slowest.unwrap_or_default(),
            if report.skipped { "  skipped: the gradient is not finite" } else { "" },
        )
    }

    /// Shows the loss of the run as a line of bars, in the format for people.
    pub(super) fn chart(&self, losses: &[Point]) {
        let bars = bars(&losses.iter().map(|point| point.loss).collect::<Vec<_>>());
        if let (Some(bars), [first, .., last]) = (bars, losses) {
            self.say(format_args!("loss {:.4} {bars} {:.4}", first.loss, last.loss));
        }
    }

    /// Shows a validation, in the format for people.
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

    /// Shows a line above the bar, in the format for people.
    pub(super) fn say(&self, line: impl std::fmt::Display) {
        match (&self.bar, self.format) {
            (_, Format::Json) => {}
            (Some(bar), Format::Pretty) => bar.suspend(|| print(line)),
            (None, Format::Pretty) => print(line),
        }
    }

    /// Shows the summary of a run, with values that a command adds, in the format for people.
    pub(super) fn summary(
        &mut self,
        summary: &Summary,
        weights_digest: Option<&str>,
        link: Option<&str>,
        more: &[(&str, f64)],
    ) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.format == Format::Json {
            return;
        }
        let Summary { steps, skipped, seconds, visits, pinned_bytes, .. } = *summary;
        let Summary { bytes_uploaded, bytes_downloaded, .. } = *summary;
        print(format_args!("{steps} steps, {seconds:.1} s, {visits} visits"));
        if skipped > 0 {
            print(format_args!("{skipped} steps changed nothing: their gradients were not finite"));
        }
        if let (Some(balance), Some(z)) = (summary.balance_loss, summary.z_loss) {
            print(format_args!("last step: balance loss {balance:.4}, z-loss {z:.4}"));
        }
        let link = link.map(|link| format!(", over a link of {link}, emulated"));
        print(format_args!(
            "{} up, {} down{}",
            ByteSize::from(bytes_uploaded),
            ByteSize::from(bytes_downloaded),
            link.unwrap_or_default()
        ));
        if pinned_bytes > 0 {
            print(format_args!("{} of host memory pinned", ByteSize::from(pinned_bytes)));
        }
        for (name, value) in more {
            print(format_args!("{:<26} {value:>16.3}", name.replace('_', " ")));
        }
        if let Some(digest) = weights_digest {
            print(format_args!("weights {digest}"));
        }
    }
}

/// A time as minutes and seconds, with hours before them if there are any.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let minutes = seconds / 60 % 60;
    match seconds / 3600 {
        0 => format!("{minutes}:{:02}", seconds % 60),
        hours => format!("{hours}:{minutes:02}:{:02}", seconds % 60),
    }
}

/// Draws values as bars, each the mean of some neighbours. `None` if all values are equal, or one
/// is not finite.
fn bars(values: &[f64]) -> Option<String> {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    const WIDTH: usize = 48;
    let each = values.chunks(values.len().div_ceil(WIDTH).max(1));
    let means: Vec<f64> = each.map(|few| few.iter().sum::<f64>() / few.len() as f64).collect();
    let least = means.iter().copied().fold(f64::INFINITY, f64::min);
    let most = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let bar = |mean: &f64| BARS[((mean - least) / (most - least) * 7.0).round() as usize];
    let is_finite = means.iter().all(|mean| mean.is_finite());
    (is_finite && least < most).then(|| means.iter().map(bar).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_as_clocks_show_them() {
        let shown = [0, 59, 61, 3599, 3600, 86_399].map(|s| clock(Duration::from_secs(s)));
        assert_eq!(shown, ["0:00", "0:59", "1:01", "59:59", "1:00:00", "23:59:59"]);
    }

    #[test]
    fn a_falling_loss_is_falling_bars() {
        assert_eq!(bars(&[8.0, 4.5, 1.0]).as_deref(), Some("█▅▁"));
        let many: Vec<f64> = (0..1000).map(|step| 1.0 / f64::from(step + 1)).collect();
        assert!((40..=48).contains(&bars(&many).expect("they differ").chars().count()));
        assert_eq!(bars(&[1.0, 1.0]), None);
        assert_eq!(bars(&[1.0, f64::NAN]), None);
        assert_eq!(bars(&[]), None);
    }
}
