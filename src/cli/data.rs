//! `l2l data`: shows the sequences that the model will see, before a run trains.

use l2l::data::{Batches, Dataset, Overview, Predicts, Sequence};
use l2l::{Error, config::Format, shape_of};
use serde_json::json;

use super::DataArguments;
use super::output::{has_ended, print};

pub(super) fn data(arguments: &DataArguments) -> Result<(), Error> {
    let (config, layers) = arguments.common.read()?;
    let run = || {
        let shape = shape_of(&config)?;
        let (train, aside) = Dataset::open(&config, &shape)?;
        if let Some(batches) = arguments.batches {
            for step in (0..batches).take_while(|_| !has_ended()) {
                let sequences = Batches::of_step(&config, &train, step)?;
                print(batch_event(step + 1, &sequences, train.predicts()));
            }
            return Ok(());
        }
        let is_json = config.log.format == Format::Json;
        if !is_json {
            print("⟦ ⟧ marks what the model learns to predict");
        }
        let validation = aside.iter().map(|data| (data.set_name().unwrap_or("validation"), data));
        for (part, data) in [("train", &train)].into_iter().chain(validation) {
            let overview = Overview::of(&config, data)?;
            match is_json {
                true => print(overview_event(part, data, &overview)),
                false => show(part, data, &overview),
            }
            let rows = arguments.rows.min(data.len().unwrap_or(u64::MAX));
            for row in (0..rows).take_while(|_| !has_ended()) {
                let sequence = data.sequence(row)?;
                match is_json {
                    true => print(row_event(part, row, data, &sequence)),
                    false => print(format_args!("  {row}: {}", shown(data, &sequence))),
                }
            }
        }
        Ok(())
    };
    run().map_err(|error| layers.locate(error))
}

/// Labels as other tools expect them: one for each sequence, or one for each token.
fn labels(sequence: &Sequence, predicts: Predicts) -> serde_json::Value {
    match predicts {
        Predicts::Class => json!(sequence.labels[0]),
        Predicts::Value => json!(f32::from_bits(sequence.labels[0] as u32)),
        Predicts::LabelSet => {
            json!(
                sequence.labels.iter().map(|&bits| f32::from_bits(bits as u32)).collect::<Vec<_>>()
            )
        }
        Predicts::Next | Predicts::Own | Predicts::TokenClass => json!(sequence.labels),
        Predicts::Embedding => json!(sequence.score),
    }
}

fn batch_event(step: u64, sequences: &[Sequence], predicts: Predicts) -> serde_json::Value {
    let each = |of: &dyn Fn(&Sequence) -> serde_json::Value| -> Vec<serde_json::Value> {
        sequences.iter().map(of).collect()
    };
    json!({
        "event": "batch",
        "step": step,
        "input_ids": each(&|one| json!(one.tokens)),
        "token_type_ids": each(&|one| json!(kinds(one))),
        "labels": each(&|one| labels(one, predicts)),
        "documents": each(&|one| json!(one.documents)),
    })
}

fn kinds(sequence: &Sequence) -> Vec<u8> {
    let mut kinds = sequence.kinds.clone();
    kinds.resize(sequence.tokens.len(), 0);
    kinds
}

fn row_event(part: &str, row: u64, data: &Dataset, sequence: &Sequence) -> serde_json::Value {
    json!({
        "event": "row",
        "part": part,
        "index": row,
        "input_ids": sequence.tokens,
        "token_type_ids": kinds(sequence),
        "labels": labels(sequence, data.predicts()),
        "documents": sequence.documents,
        "text": data.vocabulary().decode(&sequence.tokens, true),
    })
}

fn overview_event(part: &str, data: &Dataset, overview: &Overview) -> serde_json::Value {
    let lengths = overview.lengths.iter().map(|&(to, count)| json!({ "to": to, "count": count }));
    json!({
        "event": "data",
        "part": part,
        "name": data.name(),
        "sequences": overview.sequences,
        "endless": data.len().is_none(),
        "tokens": overview.tokens,
        "learnt": overview.labelled,
        "longest": overview.longest,
        "lengths": lengths.collect::<Vec<_>>(),
        "padding_share": overview.padding_share,
        "unused_columns": data.unused_columns(),
        "skipped_records": data.skipped_records(),
        "notes": data.notes(),
    })
}

fn show(part: &str, data: &Dataset, overview: &Overview) {
    let Overview { sequences, tokens, labelled, longest, lengths, padding_share } = overview;
    print(format_args!("{part}: {}", data.name()));
    let of = if data.len().is_none() { " shown of endless data" } else { "" };
    print(format_args!("  {sequences} sequences{of}, {tokens} tokens, the longest {longest}"));
    print(format_args!(
        "  {labelled} are learnt; padded batches would be {:.1} % padding (nothing is padded)",
        100.0 * padding_share
    ));
    data.notes().iter().for_each(|note| print(format_args!("  {note}")));
    let most = lengths.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1);
    for (to, count) in lengths {
        let bar = "█".repeat((40 * count).div_ceil(most) as usize);
        print(format_args!("  up to {to:>6} tokens {count:>9} {bar}"));
    }
}

/// A sequence as text, with brackets around the tokens that the model learns to predict.
fn shown(data: &Dataset, sequence: &Sequence) -> String {
    let decode = |tokens: &[u32]| data.vocabulary().decode(tokens, true);
    let predicts = data.predicts();
    match predicts {
        Predicts::Class | Predicts::Value | Predicts::LabelSet => {
            return format!("{} ⟦{}⟧", decode(&sequence.tokens), labels(sequence, predicts));
        }
        Predicts::TokenClass => {
            let each = sequence.tokens.iter().zip(&sequence.labels).map(|(&token, &label)| {
                let class = if label < 0 { String::new() } else { format!("⟦{label}⟧") };
                decode(&[token]) + &class
            });
            return each.collect::<Vec<_>>().join(" ");
        }
        Predicts::Embedding => {
            let ends = sequence.documents.iter().scan(0, |end, tokens| {
                *end += tokens;
                Some(*end - tokens..*end)
            });
            let texts: Vec<String> = ends.map(|text| decode(&sequence.tokens[text])).collect();
            let score = sequence.score.map_or_else(String::new, |score| format!(" ⟦{score}⟧"));
            return texts.join(" | ") + &score;
        }
        Predicts::Next | Predicts::Own => {}
    }
    let mut text = String::new();
    let is_learnt = sequence.scored(predicts);
    let mut at = 0;
    for run in is_learnt.chunk_by(|a, b| a == b) {
        let span = at..at + run.len();
        at = span.end;
        if !run[0] {
            text += &decode(&sequence.tokens[span]);
            continue;
        }
        // A masked token shows as the model sees it, and then its label.
        let hidden = predicts == Predicts::Own;
        let labels: Vec<u32> = sequence.labels[span.clone()].iter().map(|&l| l as u32).collect();
        let there = if hidden { decode(&sequence.tokens[span]) } else { String::new() };
        text += &format!("{there}⟦{}⟧", decode(&labels));
    }
    text
}
