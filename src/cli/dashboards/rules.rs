//! Recording rules, alerts with what to do about them, and promtool's tests of both.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Recording rules, in order: names, and what they are.
pub(super) const RECORDED: &[(&str, &str)] = &[
    (
        "l2l:layer_overlap:ratio",
        "clamp_min(1 - sum by (run, layer) (rate(l2l_exposed_wait_seconds_total{cause=\"transfer\"}[5m])) \
         / sum by (run, layer) (rate(l2l_transfer_seconds_total[5m])), 0)",
    ),
    (
        "l2l:overlap:ratio",
        "clamp_min(1 - sum by (run) (rate(l2l_exposed_wait_seconds_total{cause=\"transfer\"}[5m])) \
         / sum by (run) (rate(l2l_transfer_seconds_total[5m])), 0)",
    ),
    (
        "l2l:compute_lane:rate",
        "sum by (run) (rate(l2l_compute_wait_seconds_total[5m])) + sum by (run) \
         (rate(l2l_lane_seconds_total{lane=\"compute\"}[5m]))",
    ),
    (
        "l2l:exposed_wait:ratio",
        "sum by (run) (rate(l2l_compute_wait_seconds_total{cause!~\"outside|checkpoint\"}[5m])) / on (run) \
         l2l:compute_lane:rate",
    ),
    (
        "l2l:wait:share",
        "(sum by (run, cause) (rate(l2l_compute_wait_seconds_total{cause!~\"outside|checkpoint|file|host|ring\"}[5m])) or \
         label_replace(sum by (run) (rate(l2l_compute_wait_seconds_total{cause=~\"host|ring\"}[5m])), \
         \"cause\", \"host\", \"\", \"\") or \
         label_replace(sum by (run) (rate(l2l_compute_wait_seconds_total{cause=~\"checkpoint|file\"}[5m])), \
         \"cause\", \"disk\", \"\", \"\")) / on (run) group_left () l2l:compute_lane:rate",
    ),
    (
        "l2l:bottleneck:share",
        "topk by (run) (1, l2l:wait:share > 0.1) or on (run) label_replace(sum by (run) \
         (rate(l2l_lane_seconds_total{lane=\"compute\"}[5m])) / on (run) l2l:compute_lane:rate, \
         \"cause\", \"compute\", \"\", \"\")",
    ),
];

/// A series for promtool: its name with labels, and its values a minute apart.
type Series = (&'static str, &'static str);

/// An alert.
struct Alert {
    name: &'static str,
    expression: &'static str,
    after: &'static str,
    severity: &'static str,
    summary: &'static str,
    means: &'static str,
    todo: &'static [&'static str],
    fires: &'static [Series],
    silent: &'static [Series],
}

#[rustfmt::skip]
const ALERTS: &[Alert] = &[
    Alert {
        name: "L2lStalled",
        expression: "(time() - l2l_last_step_timestamp_seconds > 60 + 5 * l2l_step_seconds_sum / clamp_min(l2l_step_seconds_count, 1) + 600 * (l2l_step_seconds_count == bool 0)) and on (run) (sum by (run) (l2l_state{state=~\"training|validating|checkpointing\"}) == 1)",
        after: "1m", severity: "critical",
        summary: "no step for five times as long as steps take",
        means: "The run is in its steps, or a look or a checkpoint between them, and the last step ended more than a minute and five mean steps ago (the first has ten minutes more). The watchdog (`watchdog.seconds`) ends a ring in which nothing moves; what moves and does not come forward is a machine that is busy with something else, or a disk that does not answer.",
        todo: &["Look at the live page, or at *l2l: channels*: who is starved, who is blocked?", "`l2l_lane_seconds_total` says which lane still works.", "Look at the machine: memory that is swapped, other processes, a disk that hangs.", "If the run was stopped by hand (a debugger, `SIGSTOP`), let it go on."],
        fires: &[("l2l_last_step_timestamp_seconds{run=\"r\"}", "0x20"), ("l2l_step_seconds_sum{run=\"r\"}", "10x20"), ("l2l_step_seconds_count{run=\"r\"}", "10x20"), ("l2l_state{run=\"r\",state=\"training\"}", "1x20")],
        silent: &[("l2l_last_step_timestamp_seconds{run=\"r\"}", "0+60x20"), ("l2l_step_seconds_sum{run=\"r\"}", "10+60x20"), ("l2l_step_seconds_count{run=\"r\"}", "10+60x20"), ("l2l_state{run=\"r\",state=\"training\"}", "1x20")],
    },
    Alert {
        name: "L2lExposedWaitHigh",
        expression: "l2l:exposed_wait:ratio > 0.25",
        after: "5m", severity: "warning",
        summary: "the device stands still for more than a quarter of the time",
        means: "The compute lane waits within steps. `l2l:wait:share` says for what: `upload`, `download`, `host`, `update`, or `ring` (the actors' own latency, which shows when layers are tiny).",
        todo: &["`l2l tune CONFIG.toml` tries depths, micro-batches and the stash's place.", "upload: `channels.weights` from 1 to 2; a larger `step.batch`, so that a visit is longer.", "download: `channels.gradients`, `stash.place = \"device\"`.", "update: `channels.reduced`; a larger `step.batch`; `optimizer.clip_norm` moves updates under the next forward.", "host: a larger `step.micro_batch` means fewer operations."],
        fires: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"upload\"}", "0+30x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"outside\"}", "0+1x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+29x20")],
        silent: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"upload\"}", "0+3x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"outside\"}", "0+1x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+56x20")],
    },
    Alert {
        name: "L2lLinkBound",
        expression: "sum by (run) (l2l:bottleneck:share{cause=~\"upload|download\"}) > 0.25",
        after: "5m", severity: "warning",
        summary: "transfers hold the run up",
        means: "More than a quarter of the time the compute lane waits for something on its way over the link.",
        todo: &["A larger `step.batch` makes visits longer, while a block crosses the link as often as before.", "`channels.weights = 2` lets a block arrive under the layer before it.", "`stash.place = \"device\"` keeps activations off the link, where the device has the memory."],
        fires: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"host\"}", "0+1x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"ring\"}", "0+1x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"upload\"}", "0+30x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+30x20")],
        silent: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"update\"}", "0+30x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+30x20")],
    },
    Alert {
        name: "L2lUpdateBound",
        expression: "sum by (run) (l2l:bottleneck:share{cause=~\"update|host\"}) > 0.25",
        after: "5m", severity: "warning",
        summary: "updates, or the host's sums, hold the run up",
        means: "More than a quarter of the time the compute lane waits for an update or for the host's own work.",
        todo: &["A larger `step.batch`: as many updates, for more tokens.", "`channels.reduced` and `channels.gradients` let more gradients wait beside the device.", "`optimizer.clip_norm` defers updates under the next forward."],
        fires: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"update\"}", "0+30x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+30x20")],
        silent: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"upload\"}", "0+30x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+30x20")],
    },
    Alert {
        name: "L2lDiskBound",
        expression: "sum by (run) (l2l:bottleneck:share{cause=\"disk\"}) > 0.25",
        after: "5m", severity: "warning",
        summary: "the disk holds the run up",
        means: "More than a quarter of the time is spent on checkpoints, or waiting for the file under the EPS, and more than on any other wait of the compute lane.",
        todo: &["`checkpoint.every_steps` larger.", "With `eps.tier = \"file\"`: a larger `step.batch` hides what is read and written; `l2l plan --forecast` says from how many tokens on.", "`checkpoint.directory` or `eps.path` on a faster disk; `l2l doctor` says how fast one is."],
        fires: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"upload\"}", "0+3x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+20x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"file\"}", "0+10x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"checkpoint\"}", "0+20x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"outside\"}", "0+7x20")],
        silent: &[("l2l_compute_wait_seconds_total{run=\"r\",cause=\"upload\"}", "0+3x20"), ("l2l_lane_seconds_total{run=\"r\",lane=\"compute\"}", "0+50x20"), ("l2l_compute_wait_seconds_total{run=\"r\",cause=\"file\"}", "0+3x20")],
    },
    Alert {
        name: "L2lLossNotFinite",
        expression: "(l2l_loss != l2l_loss) or (abs(l2l_loss) == Inf) or (increase(l2l_faults_total{kind=\"not_finite\"}[5m]) > 0)",
        after: "0s", severity: "critical",
        summary: "loss or gradient is no finite number",
        means: "A step came to NaN or infinity. The run stops there, and says whether the model is whole; the last checkpoint is.",
        todo: &["Go back to the last checkpoint with `--resume`, and a smaller `optimizer.learning_rate` in a new run.", "`optimizer.clip_norm = 1.0` and `optimizer.warmup_steps` keep early steps small.", "`l2l data` shows what the model saw."],
        fires: &[("l2l_loss{run=\"r\"}", "2 NaN NaN NaN NaN NaN NaN NaN NaN NaN NaN")],
        silent: &[("l2l_loss{run=\"r\"}", "2-0.1x20"), ("l2l_faults_total{run=\"r\",kind=\"not_finite\"}", "0x20")],
    },
    Alert {
        name: "L2lMemoryAtCeiling",
        expression: "sum by (run, device) (l2l_device_memory_bytes) / on (run, device) l2l_device_memory_budget_bytes > 0.98",
        after: "1m", severity: "info",
        summary: "the device's memory is used up to its ceiling",
        means: "The plan is at the ceiling. It cannot pass it, and no more is taken while the run goes; but nothing is left for deeper channels.",
        todo: &["`l2l plan CONFIG.toml` says which holder is the largest.", "A smaller `step.micro_batch` or shallower `channels` if something else needs the device."],
        fires: &[("l2l_device_memory_bytes{run=\"r\",device=\"cpu0\",kind=\"weights\"}", "60x20"), ("l2l_device_memory_bytes{run=\"r\",device=\"cpu0\",kind=\"inputs\"}", "39x20"), ("l2l_device_memory_budget_bytes{run=\"r\",device=\"cpu0\"}", "100x20")],
        silent: &[("l2l_device_memory_bytes{run=\"r\",device=\"cpu0\",kind=\"weights\"}", "60x20"), ("l2l_device_memory_budget_bytes{run=\"r\",device=\"cpu0\"}", "100x20")],
    },
    Alert {
        name: "L2lCheckpointOld",
        expression: "(time() - l2l_checkpoint_last_success_timestamp_seconds > 21600) and on (run) (l2l_checkpoint_last_success_timestamp_seconds > 0) and on (run) (sum by (run) (l2l_state{state=~\"training|validating|checkpointing\"}) == 1)",
        after: "5m", severity: "warning",
        summary: "the last checkpoint is more than six hours old",
        means: "What a failure costs now is more than six hours of steps. A run that wants checkpoints and has none yet counts from its begin.",
        todo: &["`checkpoint.every_steps` smaller.", "An interrupt (Ctrl-C) finishes the step, writes a checkpoint and ends; `--resume` goes on."],
        fires: &[("l2l_checkpoint_last_success_timestamp_seconds{run=\"r\"}", "1x500"), ("l2l_state{run=\"r\",state=\"training\"}", "1x500")],
        silent: &[("l2l_checkpoint_last_success_timestamp_seconds{run=\"r\"}", "0x500"), ("l2l_state{run=\"r\",state=\"training\"}", "1x500")],
    },
    Alert {
        name: "L2lCheckpointFailed",
        expression: "increase(l2l_checkpoint_failures_total[15m]) > 0",
        after: "0s", severity: "critical",
        summary: "a checkpoint could not be written",
        means: "The run ends with the error. The checkpoints before it are untouched.",
        todo: &["Is the disk full, or the directory no longer writable? The error says which.", "`--resume` goes on from the last checkpoint."],
        fires: &[("l2l_checkpoint_failures_total{run=\"r\"}", "0 0 0 1x20")],
        silent: &[("l2l_checkpoint_failures_total{run=\"r\"}", "0x20")],
    },
    Alert {
        name: "L2lVanished",
        expression: "(last_over_time(l2l_step[15m]) < last_over_time(l2l_steps_target[15m])) unless on (run) l2l_step",
        after: "1m", severity: "critical",
        summary: "the run is gone before its last step",
        means: "It was scraped within the last quarter of an hour, was not done, and answers no more: it failed, was stopped (by hand, or early by `validation.patience`), or the system ended it (no memory, say). A run that fails waits up to 15 s for one more scrape, so its last samples say what of (`l2l_faults_total`); one that the system ended says nothing.",
        todo: &["Its output says what failed, and whether the model is whole.", "The system's log says whether it was short of memory.", "`--resume` goes on from the last checkpoint."],
        fires: &[("l2l_step{run=\"r\"}", "1 2 3 4 5 stale"), ("l2l_steps_target{run=\"r\"}", "100x4 stale")],
        silent: &[("l2l_step{run=\"r\"}", "1 2 3 4 100 stale"), ("l2l_steps_target{run=\"r\"}", "100x4 stale")],
    },
    Alert {
        name: "L2lWatchdog",
        expression: "increase(l2l_faults_total{kind=\"hang\"}[15m]) > 0",
        after: "0s", severity: "critical",
        summary: "the watchdog ended a ring in which nothing moved",
        means: "For `watchdog.seconds` no operation ended and no actor went on. The error names who waited for what.",
        todo: &["The error's snapshot says which operation had begun and not ended.", "A machine that slept, or a process that was stopped, looks the same: `watchdog.seconds` larger.", "Otherwise it is a bug: report the snapshot."],
        fires: &[("l2l_faults_total{run=\"r\",kind=\"hang\"}", "0 0 0 1x20")],
        silent: &[("l2l_faults_total{run=\"r\",kind=\"hang\"}", "0x20"), ("l2l_faults_total{run=\"r\",kind=\"error\"}", "0 0 0 1x20")],
    },
];

#[cfg(test)]
pub(super) fn queries() -> Vec<&'static str> {
    let recorded = RECORDED.iter().map(|(_, expression)| *expression);
    recorded.chain(ALERTS.iter().map(|alert| alert.expression)).collect()
}

/// When promtool looks: late enough for any of them.
fn looked_at(alert: &Alert) -> &'static str {
    if alert.fires[0].1.ends_with("x500") { "400m" } else { "10m" }
}

pub(super) fn files() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let quoted = |text: &str| serde_json::to_string(text).expect("a string is JSON");
    let mut rules = String::from("groups:\n  - name: l2l\n    rules:\n");
    for (name, expression) in RECORDED {
        let _ = writeln!(rules, "      - record: {name}\n        expr: {}", quoted(expression));
    }
    let mut alerts = String::from("groups:\n  - name: l2l-alerts\n    rules:\n");
    let mut tests =
        String::from("rule_files: [rules.yml, alerts.yml]\nevaluation_interval: 1m\ntests:\n");
    for alert in ALERTS {
        let Alert { name, expression, after, severity, summary, .. } = alert;
        let _ = writeln!(
            alerts,
            "      - alert: {name}\n        expr: {}\n        for: {after}\n        labels: {{ \
             severity: {severity} }}\n        annotations:\n          summary: {}\n          \
             runbook_url: dashboards/runbooks/{name}.md",
            quoted(expression),
            quoted(&format!("run {{{{ $labels.run }}}}: {summary}")),
        );
        for (does, series) in [("fires", alert.fires), ("stays silent", alert.silent)] {
            let _ = writeln!(tests, "  - name: {name} {does}\n    interval: 1m\n    input_series:");
            for (series, values) in series {
                let (series, values) = (quoted(series), quoted(values));
                let _ = writeln!(tests, "      - series: {series}\n        values: {values}");
            }
            let at = looked_at(alert);
            let _ = writeln!(
                tests,
                "    promql_expr_test:\n      - expr: count(ALERTS{{alertname=\"{name}\",\
                 alertstate=\"firing\"}})\n        eval_time: {at}"
            );
            match does {
                "fires" => tests.push_str("        exp_samples: [{ labels: \"{}\", value: 1 }]\n"),
                _ => tests.push_str("        exp_samples: []\n"),
            }
        }
        let steps = alert.todo.iter().map(|step| format!("- {step}\n")).collect::<String>();
        let page = format!(
            "# {name}\n\n{}: {summary}.\n\n## What it means\n\n{}\n\n## What to do\n\n{steps}\n## The \
             rule\n\n```promql\n{expression}\n```\n",
            severity[..1].to_uppercase() + &severity[1..],
            alert.means,
        );
        files.insert(format!("runbooks/{name}.md"), page);
    }
    files.insert("prometheus/rules.yml".into(), rules);
    files.insert("prometheus/alerts.yml".into(), alerts);
    files.insert("prometheus/tests.yml".into(), tests);
    files
}
