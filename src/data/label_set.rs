//! The labels of a record, where a sequence may have several: names, indices, a number for each
//! label, or a column for each label.

use serde_json::Value;
use serde_json::value::RawValue;

use super::reader::Reader;
use super::record::{ColumnTexts, columns_of};

/// A label that a sequence has, as the bits of an f32.
const YES: i32 = 1.0_f32.to_bits() as i32;

impl Reader {
    /// Takes the labels from a record's columns: for each label of the model, the bits of a number
    /// from 0 to 1.
    ///
    /// # Errors
    /// The record has no labels, or they are not labels of the model.
    pub(super) fn take_label_set(&self, columns: &mut ColumnTexts) -> Result<Vec<i32>, String> {
        let named = self.fields.iter().find(|(ours, _)| *ours == "label");
        let column = match named {
            Some((_, theirs)) => theirs.as_str(),
            None => {
                let is_given =
                    |name: &&str| columns.get(*name).is_some_and(|one| one.get() != "null");
                match ["label", "labels"].into_iter().filter(is_given).collect::<Vec<_>>()[..] {
                    [] => return self.take_label_columns(columns),
                    [one] => one,
                    _ => {
                        return Err("it has label and labels: name the one to use, for example \
                                    data.fields.label = \"labels\""
                            .into());
                    }
                }
            }
        };
        // The column stays, without a value: a column that data.fields names must be there.
        let none = || RawValue::NULL.to_owned();
        let text = columns.get_mut(column).map(|text| std::mem::replace(text, none()));
        let text = text.ok_or_else(|| {
            let has = columns_of(columns);
            format!("column {column:?} is missing, which data.fields.label names; {has}")
        })?;
        if named.is_none() {
            columns.remove(column);
        }
        match value_of(&text)? {
            Value::Null => Err(self.no_labels(columns)),
            value => self.label_set(&value).map_err(|what| format!("{column}: {what}")),
        }
    }

    fn no_labels(&self, columns: &ColumnTexts) -> String {
        let of_columns = match self.names[..] {
            [] => "list them in model.labels to read a column for each".into(),
            _ => format!("or give a column for each of {}", self.names.join(", ")),
        };
        format!(
            "labels is missing: this model gives a sequence any number of its labels; give a list \
             of names, of indices, or of 0 or 1 for each label; {of_columns}; {}",
            columns_of(columns)
        )
    }

    /// Takes a column for each label, of its name.
    fn take_label_columns(&self, columns: &mut ColumnTexts) -> Result<Vec<i32>, String> {
        let has = |name: &&String| columns.contains_key(*name);
        let missing: Vec<&str> =
            self.names.iter().filter(|name| !has(name)).map(String::as_str).collect();
        if missing.len() == self.names.len() {
            return Err(self.no_labels(columns));
        }
        if !missing.is_empty() {
            let missing = missing.join(", ");
            return Err(format!("no column {missing}: there must be a column for each label"));
        }
        let take = |name: &String| {
            let text = columns.remove(name).unwrap_or_else(|| RawValue::NULL.to_owned());
            let value = value_of(&text)?;
            let share = match &value {
                Value::String(text) => share_of_text(text),
                value => share(value),
            };
            let share =
                share.ok_or_else(|| format!("column {name:?} is {value}: it must be 0 or 1"));
            share.map(|share| share.to_bits() as i32)
        };
        self.names.iter().map(take).collect()
    }

    fn label_set(&self, value: &Value) -> Result<Vec<i32>, String> {
        match value {
            Value::Array(list) => self.set_of_list(list),
            // A cell of a table is a text.
            Value::String(text) if text.trim_start().starts_with('[') => {
                match serde_json::from_str::<Vec<Value>>(text) {
                    Ok(list) => self.set_of_list(&list),
                    Err(error) => Err(format!("{text} is no list in JSON: {error}")),
                }
            }
            Value::String(text) if self.classes == 1 && !self.names.contains(text) => {
                let share = share_of_text(text);
                let share = share.ok_or_else(|| format!("it is {text:?}: it must be 0 or 1"))?;
                Ok(vec![share.to_bits() as i32])
            }
            Value::String(_) => self.set_of_list(std::slice::from_ref(value)),
            value if self.classes == 1 => self.set_of_list(std::slice::from_ref(value)),
            value => Err(format!(
                "it is {value}, and it must be a list: of names, of indices, or of 0 or 1 for each \
                 of the {} labels",
                self.classes
            )),
        }
    }

    /// A list is one of names, of 0 or 1 for each label, or of indices. Lists of numbers cannot be
    /// told apart with one or two labels: they have 0 or 1 for each label.
    fn set_of_list(&self, list: &[Value]) -> Result<Vec<i32>, String> {
        let labels = self.classes;
        let shares: Option<Vec<f32>> = list.iter().map(share).collect();
        if let Some(shares) = shares.filter(|shares| shares.len() == labels) {
            return Ok(shares.into_iter().map(|share| share.to_bits() as i32).collect());
        }
        let is_share = |value: &Value| value.is_f64() || value.is_boolean();
        let are_numbers = list.iter().any(|value| !value.is_string());
        if list.iter().any(is_share) || (are_numbers && labels <= 2) {
            return Err(format!(
                "{} numbers for {labels} labels: give 0 or 1 for each, or a list of names",
                list.len()
            ));
        }
        let mut set = vec![0; labels];
        for value in list {
            let label = match value {
                Value::String(name) => self.label_of_name(name)?,
                Value::Number(number) => number.as_u64().map(|label| label as usize),
                _ => None,
            };
            let of_label = label.and_then(|label| set.get_mut(label)).ok_or_else(|| {
                format!("label {value} is none of the {labels} labels, which count from 0")
            })?;
            if *of_label == YES {
                return Err(format!(
                    "label {value} stands twice in a list of {}: a list of 0 or 1 for each label \
                     has {labels} numbers",
                    list.len()
                ));
            }
            *of_label = YES;
        }
        Ok(set)
    }

    /// The label of this name, or of the number that the name is.
    fn label_of_name(&self, name: &str) -> Result<Option<usize>, String> {
        if let Some(label) = self.names.iter().position(|known| known == name) {
            return Ok(Some(label));
        }
        match name.parse() {
            Ok(label) => Ok(Some(label)),
            Err(_) if self.names.is_empty() => {
                Err(format!("label {name:?}: the labels have no names: list them in model.labels"))
            }
            Err(_) => Err(format!("label {name:?} is none of {}", self.names.join(", "))),
        }
    }
}

fn value_of(text: &RawValue) -> Result<Value, String> {
    serde_json::from_str(text.get()).map_err(|error| format!("{text}: {error}"))
}

/// A number from 0 to 1, or a truth value.
fn share(value: &Value) -> Option<f32> {
    let share = match value {
        Value::Bool(is) => f64::from(u8::from(*is)),
        value => value.as_f64()?,
    };
    (0.0..=1.0).contains(&share).then_some(share as f32)
}

/// The number in a table's cell, where pandas writes truth values as Python does.
fn share_of_text(text: &str) -> Option<f32> {
    match text.trim() {
        "true" | "True" => Some(1.0),
        "false" | "False" => Some(0.0),
        text => text.parse().ok().filter(|share| (0.0..=1.0).contains(share)),
    }
}
