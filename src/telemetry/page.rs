//! The live page and the report: one self-contained page. Live, it asks the listener for a view
//! every second; in a report, the view is in it.

use serde_json::{Value, json};

use super::View;

const PAGE: &str = include_str!("page.html");

/// Where the page looks for a view that it was made with.
const PLACE: &str = "<script type=\"application/json\" id=\"embedded\"></script>";

/// The page that updates itself from `live.json` beside it.
pub fn live() -> &'static str {
    PAGE
}

/// The page with a run in it: a view with the slices of a step, and what else is to be kept, each
/// under its title.
pub fn report(view: &View, more: &[(&str, Value)]) -> String {
    let more = more.iter().map(|(title, value)| json!([title, value])).collect::<Value>();
    let data = json!({ "view": view, "more": more }).to_string();
    // Nothing that is no text to a script can be in it.
    let data = data.replace('<', "\\u003c");
    let embedded = PLACE.replace("></", &format!(">{data}</"));
    PAGE.replacen(PLACE, &embedded, 1)
}
