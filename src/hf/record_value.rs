//! A value of a record's JSON as Python reads it: the keys of objects keep their order, and
//! integers keep all their digits. Values of `serde_json` keep neither, and what the program writes
//! as JSON relies on their sorted keys.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// The most levels of lists and objects, as in `serde_json`.
const MOST_LEVELS: usize = 128;

/// A value of a record's JSON.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RecordValue {
    /// `null`.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number without a fraction and without an exponent.
    Integer(i128),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<RecordValue>),
    /// An object, with its keys in the order of the text.
    Object(Vec<(String, RecordValue)>),
}

impl RecordValue {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// The text is no JSON; or has an integer beyond 128 bits; or nests too deep.
    pub fn parse(text: &str) -> Result<RecordValue, String> {
        let raw: &RawValue = serde_json::from_str(text).map_err(|error| error.to_string())?;
        RecordValue::of_raw(raw, 0)
    }

    fn of_raw(raw: &RawValue, level: usize) -> Result<RecordValue, String> {
        let text = raw.get();
        if level > MOST_LEVELS {
            return Err(format!("it nests values deeper than {MOST_LEVELS}"));
        }
        let bad = |error: serde_json::Error| error.to_string();
        match text.as_bytes().first() {
            Some(b'{') => {
                let Pairs(pairs) = serde_json::from_str(text).map_err(bad)?;
                let mut fields: Vec<(String, RecordValue)> = Vec::with_capacity(pairs.len());
                let mut places = HashMap::new();
                for (key, raw) in pairs {
                    let value = RecordValue::of_raw(raw, level + 1)?;
                    // The last value of a key counts, at the place of the first.
                    let place = *places.entry(key.clone()).or_insert(fields.len());
                    match fields.get_mut(place) {
                        Some(field) => field.1 = value,
                        None => fields.push((key, value)),
                    }
                }
                Ok(RecordValue::Object(fields))
            }
            Some(b'[') => {
                let items: Vec<&RawValue> = serde_json::from_str(text).map_err(bad)?;
                let items = items.into_iter().map(|raw| RecordValue::of_raw(raw, level + 1));
                Ok(RecordValue::List(items.collect::<Result<_, _>>()?))
            }
            Some(b'-' | b'0'..=b'9') if !text.contains(['.', 'e', 'E']) => {
                let integer = text.parse().map(RecordValue::Integer);
                integer.map_err(|_| format!("the integer {text} has more than 128 bits"))
            }
            _ => serde_json::from_str::<Value>(text).map(RecordValue::from).map_err(bad),
        }
    }

    /// The value of a key, if this is an object that has it.
    pub fn get(&self, key: &str) -> Option<&RecordValue> {
        let RecordValue::Object(fields) = self else { return None };
        fields.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The text, if this is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            RecordValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Whether this is null.
    pub fn is_null(&self) -> bool {
        *self == RecordValue::Null
    }
}

impl From<Value> for RecordValue {
    fn from(value: Value) -> RecordValue {
        match value {
            Value::Null => RecordValue::Null,
            Value::Bool(is) => RecordValue::Bool(is),
            Value::Number(number) => match number.as_i128() {
                Some(integer) => RecordValue::Integer(integer),
                None => RecordValue::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => RecordValue::Text(text),
            Value::Array(items) => {
                RecordValue::List(items.into_iter().map(RecordValue::from).collect())
            }
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(key, value)| (key, value.into()));
                RecordValue::Object(fields.collect())
            }
        }
    }
}

impl Serialize for RecordValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            RecordValue::Null => serializer.serialize_unit(),
            RecordValue::Bool(is) => serializer.serialize_bool(*is),
            RecordValue::Integer(integer) => match i64::try_from(*integer) {
                Ok(integer) => serializer.serialize_i64(integer),
                Err(_) => serializer.serialize_i128(*integer),
            },
            RecordValue::Float(float) => serializer.serialize_f64(*float),
            RecordValue::Text(text) => serializer.serialize_str(text),
            RecordValue::List(items) => serializer.collect_seq(items),
            RecordValue::Object(fields) => {
                serializer.collect_map(fields.iter().map(|(key, value)| (key, value)))
            }
        }
    }
}

impl<'de> Deserialize<'de> for RecordValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RecordValue, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        RecordValue::of_raw(&raw, 0).map_err(D::Error::custom)
    }
}

/// The keys of an object and the texts of their values, in order.
struct Pairs<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Pairs<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Pairs<'de>, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Pairs<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = access.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_order_and_integers_their_digits() {
        let text = r#"{"b":[1,{"z":null,"a":18446744073709551616}],"a":-0,"c":1e-07,"d":"x\n"}"#;
        let value = RecordValue::parse(text).expect("good");
        assert_eq!(
            serde_json::to_string(&value).expect("plain"),
            r#"{"b":[1,{"z":null,"a":18446744073709551616}],"a":0,"c":1e-7,"d":"x\n"}"#
        );
        let twice = RecordValue::parse(r#"{"x":1,"y":2,"x":3}"#).expect("good");
        assert_eq!(serde_json::to_string(&twice).expect("plain"), r#"{"x":3,"y":2}"#);
        assert_eq!(twice.get("x"), Some(&RecordValue::Integer(3)));
    }

    #[test]
    fn what_cannot_be_kept_is_refused() {
        let wide = RecordValue::parse(&"9".repeat(40)).expect_err("too wide");
        assert!(wide.contains("128 bits"), "{wide}");
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(RecordValue::parse(&deep).expect_err("too deep").contains("deeper"));
        assert!(RecordValue::parse("[1e999]").is_err());
        assert!(RecordValue::parse("{").is_err());
    }
}
