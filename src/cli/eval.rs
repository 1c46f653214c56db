//! `l2l eval`: evaluates a model on its validation sets.

use l2l::config::{Format, Labels};
use l2l::data::Dataset;
use l2l::inference::{Evaluation, Evaluator, LabelCount, LabelCounts, Quality};
use l2l::{Config, Error, StopRequest, shape_of};
use serde_json::json;

use super::common::load;
use super::output::{has_ended, print};
use super::runtime::Runtime;
use super::signals::Signals;
use super::{EvalArguments, Exit, say};

pub(super) fn eval(arguments: &EvalArguments) -> Result<Exit, Error> {
    let (mut config, layers) = arguments.common.read_and_say(arguments.model.own_flags())?;
    let mut run = || {
        let from = load(&mut config, &arguments.model)?;
        let mut sets = Dataset::open_validation(&config, &shape_of(&config)?)?;
        sets.iter_mut().try_for_each(|set| set.refer_to(&from))?;
        for set in &sets {
            set.notes().iter().for_each(|note| say(format_args!("data {}: {note}", set.name())));
        }
        Runtime::new()?.block_on(async {
            let stop = StopRequest::new();
            let signals = Signals::stop(&stop, true);
            let mut evaluator = Evaluator::start(config.clone()).await?;
            for data in &sets {
                let most = if data.len().is_none() { config.validation.batches } else { u64::MAX };
                let in_order = data.in_order(config.step.batch, arguments.batches.unwrap_or(most));
                let batches = in_order.take_while(|_| !stop.is_requested());
                let found = evaluator.evaluate(batches).await?;
                if stop.is_requested() {
                    return Ok(signals.ended());
                }
                if found.labelled == 0 {
                    let what = "nothing to evaluate, no sequence has a label";
                    return Err(Error::Argument(format!("data {}: {what}", data.name())));
                }
                show(&config, &from, data, &found);
                if has_ended() {
                    break;
                }
            }
            evaluator.stop().await?;
            Ok(Exit::Well)
        })
    };
    run().map_err(|error| layers.locate(error))
}

fn show(config: &Config, from: &std::path::Path, set: &Dataset, found: &Evaluation) {
    let data = set.name();
    let Evaluation { sequences, tokens, labelled, quality, .. } = found;
    let values = found.values();
    let names = match &config.model.labels {
        Some(Labels::Names(names)) => names.clone(),
        // Adapters that PEFT wrote do not name classes; their model may.
        _ => [Some(from), config.model.path.as_deref()]
            .into_iter()
            .flatten()
            .map(l2l::hf::labels)
            .find(|names| !names.is_empty())
            .unwrap_or_default(),
    };
    let name = |class: usize| names.get(class).cloned().unwrap_or_else(|| class.to_string());
    if config.log.format == Format::Json {
        let mut event = json!({
            "event": "evaluation",
            "model": from,
            "data": data,
            "sequences": sequences,
            "tokens": tokens,
            "labelled": labelled,
            "skipped_records": set.skipped_records(),
        });
        if let Some(name) = set.set_name() {
            event["set"] = json!(name);
        }
        values.iter().for_each(|(name, value)| event[*name] = json!(value));
        if let Some(Quality::Classes(confusion)) = quality {
            event["confusion"] = confusion.rows().collect::<Vec<_>>().into();
            event["labels"] = (0..confusion.classes()).map(name).collect::<Vec<String>>().into();
        }
        if let Some(Quality::LabelSets(counts)) = quality {
            let of_label = |(label, count): (usize, &LabelCount)| {
                json!({
                    "label": name(label),
                    "true_positives": count.true_positives,
                    "false_positives": count.false_positives,
                    "false_negatives": count.false_negatives,
                    "precision": count.precision(),
                    "recall": count.recall(),
                    "f1": count.f1(),
                })
            };
            event["by_label"] = counts.labels().iter().enumerate().map(of_label).collect();
        }
        return print(event);
    }
    print(format_args!("{} on {data}: {sequences} sequences, {tokens} tokens", from.display()));
    let width = values.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(12);
    values.iter().for_each(|(name, value)| print(format_args!("  {name:<width$} {value:>12.6}")));
    if let Some(Quality::LabelSets(counts)) = quality {
        show_labels(counts, &name);
    }
    if let Some(Quality::Classes(confusion)) = quality {
        let width = (0..confusion.classes()).map(|class| name(class).chars().count()).max();
        let width = width.unwrap_or(0).max(8);
        let heads: String =
            (0..confusion.classes()).map(|c| format!("{:>width$} ", name(c))).collect();
        print(format_args!("  {:<12} {heads}", "taken for"));
        for (class, row) in confusion.rows().enumerate() {
            let row: String = row.iter().map(|count| format!("{count:>width$} ")).collect();
            print(format_args!("  {:<12} {row}", name(class)));
        }
    }
}

/// A row for each label: how well it is predicted, and how many sequences have it.
fn show_labels(counts: &LabelCounts, name: &dyn Fn(usize) -> String) {
    let labels = counts.labels();
    let names: Vec<String> = (0..labels.len()).map(name).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max(12);
    let head = format!("  {:<width$} {:>9} {:>9} {:>9}", "label", "precision", "recall", "f1");
    print(format_args!("{head} {:>9}", "sequences"));
    for (name, count) in names.iter().zip(labels) {
        let [precision, recall, f1] = [count.precision(), count.recall(), count.f1()];
        let has = count.true_positives + count.false_negatives;
        let row = format!("  {name:<width$} {precision:>9.6} {recall:>9.6} {f1:>9.6}");
        print(format_args!("{row} {has:>9}"));
    }
}
