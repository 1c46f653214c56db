//! `l2l dashboards`: what `dashboards/` has, made from the one list of metrics.

mod grafana;
mod rules;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use l2l::Error;
use l2l::telemetry::METRICS;

/// Every file, by its place in the folder.
fn files() -> BTreeMap<String, String> {
    let mut files = grafana::files();
    files.extend(rules::files());
    files.insert("METRICS.md".into(), table());
    for (name, text) in PLAIN {
        files.insert((*name).into(), (*text).into());
    }
    files
}

/// What is the same whatever the list says.
const PLAIN: &[(&str, &str)] = &[
    (
        "prometheus/prometheus.yml",
        "global:\n  scrape_interval: 5s\n  evaluation_interval: 5s\nrule_files:\n  - rules.yml\n  \
         - alerts.yml\nscrape_configs:\n  - job_name: l2l\n    static_configs:\n      - targets: \
         [\"127.0.0.1:9464\"]\n",
    ),
    (
        "grafana/provisioning/datasources/l2l.yml",
        "apiVersion: 1\ndatasources:\n  - name: l2l\n    uid: l2l-prometheus\n    type: prometheus\n    \
         access: proxy\n    url: http://127.0.0.1:9090\n    isDefault: true\n    jsonData:\n      \
         timeInterval: 5s\n",
    ),
    (
        "grafana/provisioning/dashboards/l2l.yml",
        "apiVersion: 1\nproviders:\n  - name: l2l\n    folder: l2l\n    type: file\n    options:\n      \
         path: /var/lib/grafana/dashboards\n",
    ),
    (
        "compose.yml",
        "# Prometheus at :9090 and Grafana at :3000, beside a run that was started with\n# `l2l train \
         --metrics 127.0.0.1:9464`. They share the host's network, so that the run\n# need not be \
         reachable by others; nor are they.\nservices:\n  prometheus:\n    image: \
         prom/prometheus:v3.5.0\n    network_mode: host\n    command:\n      - \
         --config.file=/etc/prometheus/prometheus.yml\n      - \
         --storage.tsdb.path=/prometheus\n      - --web.listen-address=127.0.0.1:9090\n    \
         volumes:\n      - ./prometheus:/etc/prometheus:ro\n  grafana:\n    image: \
         grafana/grafana:12.1.0\n    network_mode: host\n    environment:\n      \
         GF_AUTH_ANONYMOUS_ENABLED: \"true\"\n      GF_SERVER_HTTP_ADDR: 127.0.0.1\n    volumes:\n      \
         - ./grafana/provisioning:/etc/grafana/provisioning:ro\n      - \
         ./grafana/dashboards:/var/lib/grafana/dashboards:ro\n",
    ),
];

/// The table of metrics.
fn table() -> String {
    let mut page = String::from(
        "# Metrics\n\nMade by `l2l dashboards` from the list in `src/telemetry/list.rs`. All carry \
         `run`, those of the process\ntoo: several runs may share a recorder. Layers are numbered \
         as the ring passes them, 0 the\nembedding, padded so that they sort.\n\n| metric | kind | \
         labels | meaning |\n|---|---|---|---|\n",
    );
    for metric in METRICS {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, kind, help) = (metric.name, metric.kind.name(), metric.help);
        let _ = writeln!(page, "| `{name}` | {kind} | {} | {help} |", labels.join(", "));
    }
    page
}

/// Writes all of it.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write(folder: &Path) -> Result<(), Error> {
    for (name, text) in files() {
        let path = folder.join(name);
        let parent = path.parent().expect("it is in a folder");
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|error| Error::Refused(format!("--to {}: {error}", path.display())))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_what_the_list_makes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards");
        for (name, text) in files() {
            let there = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
            assert!(there == text, "dashboards/{name}: run `l2l dashboards --to dashboards`");
        }
    }

    /// Each `l2l_` or `process_` word of a query is a metric, or made of a histogram.
    #[test]
    fn every_query_is_of_the_list() {
        let is_known = |word: &str| {
            let of = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end));
            METRICS.iter().any(|metric| metric.name == word || Some(metric.name) == of)
        };
        let of_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        let recorded: Vec<&str> = rules::RECORDED.iter().map(|(name, _)| *name).collect();
        let queries = grafana::queries().into_iter().chain(rules::queries());
        let mut met = 0;
        for query in queries {
            for word in query.split(|c| !of_name(c)) {
                if word.starts_with("l2l_") || word.starts_with("process_") {
                    assert!(is_known(word), "{word} in {query}");
                    met += 1;
                } else if word.starts_with("l2l:") {
                    assert!(recorded.contains(&word), "{word} in {query}");
                }
            }
            assert!(!query.contains("vector("), "{query}");
        }
        assert!(met > 40);
    }
}
