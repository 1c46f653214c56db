//! Draws a step as an SVG: a row for each lane of each device, a bar for each operation, and time
//! to the right.

use std::collections::BTreeSet;
use std::fmt::Write;

use l2l_actors::work::Queue;

use super::Slice;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 76.0;
const ROW: f64 = 34.0;
const TOP: f64 = 46.0;

/// The colour of one of `layers` layers. Their hues go round the colour circle once.
fn colour(layer: Option<u32>, layers: u32, phase: Option<&str>) -> String {
    let Some(layer) = layer else { return "#888".into() };
    let hue = 360.0 * f64::from(layer) / f64::from(layers.max(1));
    let light = if phase == Some("backward") { 42 } else { 62 };
    format!("hsl({hue:.0} 65% {light}%)")
}

/// Draws slices under a title. Each layer has a hue, light in the forward pass and dark in the
/// backward pass.
pub fn draw(title: &str, slices: &[Slice]) -> String {
    let begin = slices.iter().map(|slice| slice.begin).min().unwrap_or_default();
    let end = slices.iter().map(|slice| slice.end).max().unwrap_or_default();
    let span = (end.saturating_sub(begin)).as_secs_f64().max(1e-9);
    let layers = slices.iter().filter_map(|slice| slice.layer).max().map_or(1, |layer| layer + 1);
    let queue = |slice: &Slice| Queue { lane: slice.lane, device: slice.device };
    let tracks: BTreeSet<Queue> = slices.iter().map(queue).collect();
    let has_several = tracks.iter().any(|track| track.device > Some(0));
    let name = |track: &Queue| match track.device.filter(|_| has_several) {
        Some(device) => format!("{} {device}", track.lane.name()),
        None => track.lane.name().to_string(),
    };
    let height = TOP + ROW * tracks.len() as f64 + 34.0;
    let x = |seconds: f64| LEFT + (WIDTH - LEFT - 12.0) * seconds / span;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\" font-size=\"13\">\n\
         <title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"12\" y=\"26\" font-size=\"16\">{title}</text>\n",
        title = escape(title)
    );
    for (row, track) in tracks.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let _ = writeln!(svg, "<text x=\"12\" y=\"{}\">{}</text>", y + 20.0, name(track));
        let _ = writeln!(svg, "<g>");
        for slice in slices.iter().filter(|slice| queue(slice) == *track) {
            let from = x(slice.begin.saturating_sub(begin).as_secs_f64());
            let to = x(slice.end.saturating_sub(begin).as_secs_f64());
            let layer = slice.layer.map(|layer| format!(" of layer {layer}"));
            let micro = slice.micro_batch.map(|m| format!(", micro-batch {m}"));
            let _ = writeln!(
                svg,
                "<rect x=\"{from:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"{}\" fill=\"{}\" \
                 stroke=\"#fff\" stroke-width=\"0.4\"><title>{}{}{}: {}</title></rect>",
                (to - from).max(0.3),
                ROW - 6.0,
                colour(slice.layer, layers, slice.phase),
                slice.kind.name(),
                layer.unwrap_or_default(),
                micro.unwrap_or_default(),
                duration(slice.took().as_secs_f64()),
            );
        }
        let _ = writeln!(svg, "</g>");
    }
    let bottom = height - 12.0;
    for tick in 0..=5 {
        let seconds = span * f64::from(tick) / 5.0;
        let anchor = ["start", "middle", "middle", "middle", "middle", "end"][tick as usize];
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{bottom}\" text-anchor=\"{anchor}\" fill=\"#555\">{}</text>",
            x(seconds),
            duration(seconds)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
