//! The dashboards as Grafana's classic JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::panels::{DASHBOARDS, Dashboard, Panel};

#[cfg(test)]
pub(super) fn queries() -> Vec<&'static str> {
    let panels = DASHBOARDS.iter().flat_map(|Dashboard(.., panels)| panels.iter());
    panels.flat_map(|Panel(.., queries, _)| queries.iter().map(|(query, _)| *query)).collect()
}

pub(super) fn files() -> BTreeMap<String, String> {
    let file = |one: &Dashboard| {
        let text = serde_json::to_string_pretty(&dashboard(one)).expect("it is JSON") + "\n";
        (format!("grafana/dashboards/l2l-{}.json", one.0), text)
    };
    DASHBOARDS.iter().map(file).collect()
}

fn dashboard(Dashboard(uid, title, panels): &Dashboard) -> Value {
    let (mut x, mut y, mut height) = (0, 0, 0);
    let mut made = Vec::new();
    for (index, panel) in panels.iter().enumerate() {
        let (width, tall) = (panel.5, if panel.0 == "stat" { 4 } else { 8 });
        if x + width > 24 {
            (x, y, height) = (0, y + height, 0);
        }
        made.push(of_panel(panel, index + 1, json!({ "x": x, "y": y, "w": width, "h": tall })));
        (x, height) = (x + width, height.max(tall));
    }
    let links = DASHBOARDS.iter().filter(|other| other.0 != *uid).map(|other| {
        json!({
            "title": other.1, "type": "link", "url": format!("/d/l2l-{}", other.0),
            "icon": "dashboard",
            "tooltip": "", "tags": [], "asDropdown": false, "targetBlank": false,
            "includeVars": true, "keepTime": true,
        })
    });
    json!({
        "uid": format!("l2l-{uid}"), "title": title, "tags": ["l2l"], "schemaVersion": 39,
        "version": 1,
        "editable": true, "graphTooltip": 1, "refresh": "5s", "timezone": "browser",
        "fiscalYearStartMonth": 0, "time": { "from": "now-15m", "to": "now" },
        "annotations": { "list": [] }, "links": links.collect::<Vec<_>>(), "panels": made,
        "templating": { "list": [
            { "name": "datasource", "label": "Data source", "type": "datasource",
              "query": "prometheus", "hide": 0, "includeAll": false, "multi": false, "options": [],
              "refresh": 1, "regex": "",
              "skipUrlSync": false },
            variable("run", "Run", "label_values(l2l_steps_target, run)"),
            variable("device", "Device",
                "label_values(l2l_device_memory_budget_bytes{run=\"$run\"}, device)"),
            variable("rank", "Rank", "label_values(l2l_rank_step{run=\"$run\"}, rank)"),
        ] },
    })
}

fn variable(name: &str, label: &str, query: &str) -> Value {
    json!({
        "name": name, "label": label, "type": "query", "datasource": source(),
        "query": { "query": query, "refId": name }, "hide": 0, "includeAll": false, "multi": false,
        "options": [], "refresh": 2, "regex": "", "sort": 2, "skipUrlSync": false,
    })
}

fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

fn of_panel(Panel(kind, title, unit, about, queries, _): &Panel, id: usize, at: Value) -> Value {
    let targets = queries.iter().enumerate().map(|(index, (query, legend))| {
        let letter = char::from(b'A' + index as u8).to_string();
        json!({ "refId": letter, "datasource": source(), "expr": query, "legendFormat": legend,
                "editorMode": "code", "range": true, "instant": false })
    });
    let options = match *kind {
        "stat" => json!({
            "reduceOptions": { "calcs": ["lastNotNull"], "fields": "", "values": false },
            "orientation": "auto", "colorMode": "none", "graphMode": "none", "justifyMode": "auto",
            "textMode": if *title == "State" || *title == "Bottleneck" { "name" } else { "auto" },
        }),
        "bargauge" => json!({
            "reduceOptions": { "calcs": ["lastNotNull"], "fields": "", "values": false },
            "orientation": "horizontal", "displayMode": "basic", "showUnfilled": true,
        }),
        "heatmap" => json!({
            "calculate": false, "cellGap": 1, "rowsFrame": { "layout": "auto" },
            "color": { "mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5,
                       "fill": "dark-orange", "reverse": false, "scale": "exponential" },
            "yAxis": { "axisPlacement": "left", "reverse": true },
            "tooltip": { "mode": "single", "showColorScale": true, "yHistogram": false },
            "legend": { "show": true }, "exemplars": { "color": "rgba(255,0,255,0.7)" },
        }),
        _ => json!({
            "legend": { "displayMode": "list", "placement": "bottom", "showLegend": true,
                        "calcs": [] },
            "tooltip": { "mode": "multi", "sort": "desc" },
        }),
    };
    json!({
        "id": id, "type": kind, "title": title, "description": about, "datasource": source(),
        "gridPos": at, "targets": targets.collect::<Vec<_>>(), "options": options,
        "fieldConfig": { "defaults": { "unit": unit, "custom": {} }, "overrides": [] },
    })
}
