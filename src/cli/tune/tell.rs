//! The output of `l2l tune`: each trial, the settings that won and why, and the tuned config.

use l2l::config::{ByteSize, Format, StashPlace};
use l2l::{Bottleneck, Error};
use serde_json::json;
use toml_edit::{DocumentMut, Item, Table, value};

use super::super::{print, say};
use super::trial::{Choice, Settings, Trial, WORTH_GROWTH, gain};

pub(super) fn tell(format: Format, trial: &Trial, round: usize) {
    let seconds = trial.seconds[0];
    if format == Format::Json {
        let [weights, gradients, reduced, stash] = trial.settings.depths;
        let predicted = trial.predicted.is_finite().then_some(trial.predicted);
        return print(json!({
            "event": "trial", "round": round, "weights": weights, "gradients": gradients,
            "reduced": reduced, "stash": stash, "micro_batch": trial.settings.micro_batch,
            "stash_on_device": trial.settings.place == StashPlace::Device,
            "step_seconds": seconds, "predicted_seconds": predicted,
            "device_bytes": trial.device_bytes,
            "device_bytes_a_layer": trial.device_bytes_a_layer(),
            "bottleneck": trial.bottleneck.name(),
            "exposed_wait_fraction": trial.exposed,
            "schedule": trial.settings.layout.names()[0],
            "deal": trial.settings.layout.names()[1],
            "transfer": trial.settings.layout.names()[2],
        }));
    }
    say(format_args!(
        "round {round}: {seconds:.3} s a step, device {}{}, bottleneck {}, {}: {}",
        ByteSize::from(trial.device_bytes),
        match trial.device_bytes_a_layer() {
            0 => String::new(),
            bytes => format!(" (grows by {} a layer)", ByteSize::from(bytes)),
        },
        trial.bottleneck.name(),
        match trial.predicted.is_finite() {
            true => format!("predicted {:.3}", trial.predicted),
            false => format!("exposed wait {:.0} %", 100.0 * trial.exposed),
        },
        trial.settings
    ));
}

/// Reports the settings that won, and why.
pub(super) fn conclude(
    format: Format,
    trials: &[Trial],
    choice: &Choice,
    disk: Option<f64>,
    config: &str,
) {
    let (own, kept) = (&trials[0], &trials[choice.best]);
    let step = kept.median();
    let of_disk = disk.filter(|disk| *disk > 0.1 * (step + disk));
    let of_disk = of_disk.filter(|disk| *disk > kept.exposed * step);
    let bottleneck = of_disk.map_or(own.bottleneck, |_| Bottleneck::Disk).name();
    let why = if let Some(faster) = choice.passed_over.map(|index| &trials[index]) {
        format!(
            "{step:.3} s a step, and its device memory does not grow with the number of layers; \
             another setting's does, by {} a layer, for a gain of {:.1} %, under {:.0} %: {}",
            ByteSize::from(faster.device_bytes_a_layer()),
            100.0 * gain(kept, faster),
            100.0 * WORTH_GROWTH,
            faster.settings
        )
    } else if choice.best == 0 {
        "no other setting was faster by more than rounds differ, or as fast with less memory"
            .to_string()
    } else if own.is_as_fast_as(kept) {
        format!(
            "it is as fast ({step:.3} s a step, before {:.3}; rounds differ by {:.3} and {:.3}) \
             and takes {} of the device, before {}",
            own.median(),
            kept.spread(),
            own.spread(),
            ByteSize::from(kept.device_bytes),
            ByteSize::from(own.device_bytes)
        )
    } else {
        format!(
            "{step:.3} s a step, before {:.3}; the difference is more than rounds differ ({:.3} \
             and {:.3})",
            own.median(),
            kept.spread(),
            own.spread()
        )
    };
    let advice = of_disk.map(|disk| {
        format!(
            "checkpoints cost {disk:.3} s a step; with checkpoint.every_steps {} times as large \
             they cost a twentieth of the time",
            (disk / (0.05 * step)).ceil()
        )
    });
    let warning = grows(kept);
    if format == Format::Json {
        let [weights, gradients, reduced, stash] = kept.settings.depths;
        return print(json!({
            "event": "tuned", "weights": weights, "gradients": gradients, "reduced": reduced,
            "stash": stash, "micro_batch": kept.settings.micro_batch,
            "stash_on_device": kept.settings.place == StashPlace::Device,
            "schedule": kept.settings.layout.names()[0], "deal": kept.settings.layout.names()[1],
            "transfer": kept.settings.layout.names()[2],
            "step_seconds": step, "own_step_seconds": own.median(),
            "spread_seconds": kept.spread(), "own_spread_seconds": own.spread(),
            "device_bytes": kept.device_bytes,
            "device_bytes_a_layer": kept.device_bytes_a_layer(), "warning": warning,
            "bottleneck": bottleneck,
            "kept_bottleneck": kept.bottleneck.name(), "disk_seconds": disk, "why": why,
            "advice": advice, "config": config,
        }));
    }
    say(format_args!("bottleneck {bottleneck}; chosen: {}: {why}", kept.settings));
    advice.into_iter().chain(warning).for_each(say);
}

/// Says that a setting's device memory grows with depth, if it does.
fn grows(trial: &Trial) -> Option<String> {
    if trial.growth.is_empty() {
        return None;
    }
    let terms: Vec<String> = trial
        .growth
        .iter()
        .map(|term| format!("{} {}", term.name, ByteSize::from(term.bytes)))
        .collect();
    Some(format!(
        "device memory grows with the number of layers: {} for each layer that is added ({})",
        ByteSize::from(trial.device_bytes_a_layer()),
        terms.join(", ")
    ))
}

/// The user's config text with the changed values.
pub(super) fn tuned(
    text: &str,
    written: &Settings,
    kept: &Trial,
    first: &Trial,
) -> Result<String, Error> {
    let mut document: DocumentMut =
        text.parse().map_err(|error| Error::System(format!("the config: {error}")))?;
    for (section, key, new) in kept.settings.changes(written) {
        let section = document.entry(section).or_insert(Item::Table(Table::new()));
        match section.as_table_like_mut() {
            Some(section) => {
                let mut new = new;
                // Keep the blanks and the comment of the old value.
                if let Some(old) = section.get(key).and_then(Item::as_value) {
                    *new.decor_mut() = old.decor().clone();
                }
                section.insert(key, value(new));
            }
            None => return Err(Error::System("the config has no such section".into())),
        }
    }
    let warning = grows(kept).map(|what| format!("# {what}\n")).unwrap_or_default();
    Ok(format!(
        "# l2l tune: {:.3} s a step, {:.3} s before; {} of device memory, {} before.\n\
         {warning}{document}",
        kept.median(),
        first.median(),
        ByteSize::from(kept.device_bytes),
        ByteSize::from(first.device_bytes),
    ))
}
