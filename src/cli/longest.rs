//! How long a sequence fits, as `l2l plan` says it.

use l2l::plan::{LengthEnd, LongestSequence};
use serde_json::{Value, json};

/// The field of the event.
pub(super) fn field(longest: LongestSequence) -> Value {
    let (positions, end) = longest.first_end();
    let LongestSequence { device, host, model, tried } = longest;
    json!({
        "positions": positions, "ends": end.name(), "device": device, "host": host,
        "model": model, "tried": tried,
    })
}

/// What the length is, and how long sequences could be if only one of the ends were there.
pub(super) fn words(longest: LongestSequence, sequences: usize) -> String {
    let LongestSequence { device, host, model, tried } = longest;
    let (_, end) = longest.first_end();
    let of_each = match sequences {
        1 => String::new(),
        _ => format!(" in each of {sequences} sequences"),
    };
    let why = match end {
        LengthEnd::Model => "all that the model has",
        LengthEnd::Device => "for which a device has memory",
        LengthEnd::Host => "for which the host has memory",
    };
    let mut text = format!("positions{of_each}, {why}");
    for (place, name, length) in
        [(LengthEnd::Device, "a device", device), (LengthEnd::Host, "the host", host)]
    {
        if let Some(length) = length.filter(|_| place != end) {
            let more = if length == tried { " or more" } else { "" };
            text += &format!("; {name} has memory for {length}{more}");
        }
    }
    if end != LengthEnd::Model {
        text += &format!("; the model has {model}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_is_named_with_the_others() {
        let mut longest =
            LongestSequence { device: None, host: Some(5120), model: 2048, tried: 1 << 20 };
        assert_eq!(
            words(longest, 1),
            "positions, all that the model has; the host has memory for 5120"
        );
        (longest.device, longest.model) = (Some(1 << 20), 8192);
        assert_eq!(
            words(longest, 4),
            "positions in each of 4 sequences, for which the host has memory; a device has memory \
             for 1048576 or more; the model has 8192"
        );
        assert_eq!((field(longest)["ends"].as_str(), longest.first_end().0), (Some("host"), 5120));
    }
}
