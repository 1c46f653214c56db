//! The output of `l2l tune`: each trial, the settings that won with the reason, and the tuned
//! config.

use l2l::config::{ByteSize, Format, StashPlace};
use l2l::{Bottleneck, Error};
use serde_json::{Value, json};
use toml_edit::{DocumentMut, Item, Table, value};

use super::super::{print, say};
use super::trial::{Choice, Key, Settings, Trial, WORTH_GROWTH, gain};

/// The fields of an event that describe a trial.
fn event(name: &str, trial: &Trial) -> Value {
    let Settings { micro_batch, chunk, place, depths, layout } = trial.settings;
    let [weights, gradients, reduced, stash] = depths;
    let [schedule, deal, transfer] = layout.names();
    json!({
        "event": name, "weights": weights, "gradients": gradients, "reduced": reduced,
        "stash": stash, "micro_batch": micro_batch, "chunk_positions": chunk,
        "stash_on_device": place == StashPlace::Device,
        "schedule": schedule, "deal": deal, "transfer": transfer,
        "device_bytes": trial.device_bytes,
        "device_bytes_a_layer": trial.device_bytes_a_layer(),
        "bottleneck": trial.bottleneck.name(),
    })
}

/// Reports one trial.
pub(super) fn tell(format: Format, trial: &Trial, round: usize) {
    let seconds = trial.seconds[0];
    if format == Format::Json {
        let mut event = event("trial", trial);
        event["round"] = json!(round);
        event["step_seconds"] = json!(seconds);
        event["predicted_seconds"] = json!(trial.predicted);
        event["exposed_wait_fraction"] = json!(trial.exposed);
        return print(event);
    }
    say(format_args!(
        "round {round}: {seconds:.3} s a step, device {}{}, bottleneck {}, {}: {}",
        ByteSize::from(trial.device_bytes),
        match trial.device_bytes_a_layer() {
            0 => String::new(),
            bytes => format!(" (grows by {} a layer)", ByteSize::from(bytes)),
        },
        trial.bottleneck.name(),
        match trial.predicted {
            Some(predicted) => format!("predicted {predicted:.3}"),
            None => format!("exposed wait {:.0} %", 100.0 * trial.exposed),
        },
        trial.settings
    ));
}

/// Reports the settings that won, and the reason. `disk` is the time of checkpoints in each step.
pub(super) fn conclude(
    format: Format,
    trials: &[Trial],
    choice: &Choice,
    disk: Option<f64>,
    config: &str,
) {
    let own = &trials[0];
    let kept = &trials[choice.best];
    let step = kept.median();
    let of_disk = disk.filter(|disk| *disk > 0.1 * (step + disk));
    let of_disk = of_disk.filter(|disk| *disk > kept.exposed * step);
    let bottleneck = of_disk.map_or(own.bottleneck, |_| Bottleneck::Disk).name();
    let why = why(trials, choice);
    let advice = of_disk.map(|disk| {
        format!(
            "checkpoints cost {disk:.3} s a step; with checkpoint.every_steps {} times as large \
             they cost a twentieth of the time",
            (disk / (0.05 * step)).ceil()
        )
    });
    let warning = grows(kept);
    if format == Format::Json {
        let mut event = event("tuned", kept);
        event["kept_bottleneck"] = event["bottleneck"].take();
        event["bottleneck"] = json!(bottleneck);
        event["step_seconds"] = json!(step);
        event["own_step_seconds"] = json!(own.median());
        event["spread_seconds"] = json!(kept.spread());
        event["own_spread_seconds"] = json!(own.spread());
        event["disk_seconds"] = json!(disk);
        event["why"] = json!(why);
        event["advice"] = json!(advice);
        event["warning"] = json!(warning);
        event["config"] = json!(config);
        return print(event);
    }
    say(format_args!("bottleneck {bottleneck}; chosen: {}: {why}", kept.settings));
    advice.into_iter().chain(warning).for_each(say);
}

/// The reason for a choice.
fn why(trials: &[Trial], choice: &Choice) -> String {
    let own = &trials[0];
    let kept = &trials[choice.best];
    let step = kept.median();
    if let Some(faster) = choice.passed_over.map(|index| &trials[index]) {
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
    }
}

/// The warning that a setting's device memory grows with depth, if it does.
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
    for Key { section, name, value: mut new } in kept.settings.changes(written) {
        let section = document.entry(section).or_insert(Item::Table(Table::new()));
        match section.as_table_like_mut() {
            Some(section) => {
                // Keep the blanks and the comment of the old value.
                if let Some(old) = section.get(name).and_then(Item::as_value) {
                    *new.decor_mut() = old.decor().clone();
                }
                section.insert(name, value(new));
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
