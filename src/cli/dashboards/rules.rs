//! The files of rules and alerts, with the alerts' runbooks and promtool's tests of them.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::alerts::{ALERTS, Alert};
use super::recorded::RECORDED;

#[cfg(test)]
pub(super) fn queries() -> Vec<&'static str> {
    let recorded = RECORDED.iter().map(|(_, expression)| *expression);
    recorded.chain(ALERTS.iter().map(|alert| alert.expression)).collect()
}

/// The time at which promtool evaluates the alert: late enough for any of them.
fn evaluated_at(alert: &Alert) -> &'static str {
    if alert.fires[0].1.ends_with("x500") { "400m" } else { "10m" }
}

/// The alerts in whose place `L2lExposedWaitHigh` would say less.
const EXPLAIN_WAITS: [&str; 4] = ["L2lLinkBound", "L2lUpdateBound", "L2lDiskBound", "L2lRankSlow"];

/// The recording rules, the alerts with their pages below `runbooks`, an address or a folder, and
/// tests of both.
pub(super) fn files(runbooks: &str) -> BTreeMap<String, String> {
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
             runbook_url: {}",
            quoted(expression),
            quoted(&format!("run {{{{ $labels.run }}}}: {summary}")),
            quoted(&format!("{runbooks}/{name}.md")),
        );
        let at = evaluated_at(alert);
        for (does, series) in [("fires", alert.fires), ("stays silent", alert.silent)] {
            let mut expected = vec![(*name, does == "fires")];
            if does == "fires" && EXPLAIN_WAITS.contains(name) {
                expected.push(("L2lExposedWaitHigh", false));
            }
            let _ = writeln!(tests, "  - name: {name} {does}\n    interval: 1m\n    input_series:");
            // A run that is there has a step.
            let has_step = alert.name == "L2lVanished";
            let step = (!has_step).then_some(("l2l_step{run=\"r\"}", "1x500"));
            for (series, values) in series.iter().copied().chain(step) {
                let (series, values) = (quoted(series), quoted(values));
                let _ = writeln!(tests, "      - series: {series}\n        values: {values}");
            }
            tests.push_str("    promql_expr_test:\n");
            for (name, fires) in expected {
                let samples = if fires { "[{ labels: \"{}\", value: 1 }]" } else { "[]" };
                let _ = writeln!(
                    tests,
                    "      - expr: \
                     count(ALERTS{{alertname=\"{name}\",alertstate=\"firing\"}})\n        \
                     eval_time: {at}\n        exp_samples: {samples}"
                );
            }
        }
        let steps = alert.todo.iter().map(|step| format!("- {step}\n")).collect::<String>();
        let page = format!(
            "# {name}\n\n{}: {summary}.\n\n## What it means\n\n{}\n\n## What to \
                do\n\n{steps}\n## The rule\n\n```promql\n{expression}\n```\n",
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
