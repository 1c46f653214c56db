//! Sizes of memory as people write them: `auto`, bytes, or a number with a unit.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes, or `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteSize(Option<u64>);

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        struct Written;
        impl Visitor<'_> for Written {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "\"auto\", bytes, or a number with a unit (\"12GiB\")")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(Some(bytes)))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                let negative = || E::invalid_value(Unexpected::Signed(bytes), &self);
                u64::try_from(bytes).map(|bytes| ByteSize(Some(bytes))).map_err(|_| negative())
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Written)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => serializer.serialize_str("auto"),
            Some(bytes) => serializer.serialize_u64(bytes),
        }
    }
}

#[cfg(feature = "cli")]
impl schemars::JsonSchema for ByteSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ByteSize".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": ["integer", "string"],
            "description": "Bytes, a number with a unit (`12GiB`), or `auto`."
        })
    }
}

impl ByteSize {
    /// The number of bytes; `None` for `auto`.
    pub fn bytes(self) -> Option<u64> {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        if text == "auto" {
            return Ok(ByteSize(None));
        }
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let factor = match unit.trim() {
            "" | "B" => 1.0,
            "kB" | "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "TB" => 1e12,
            "KiB" => 1024.0,
            "MiB" => f64::from(1 << 20),
            "GiB" => f64::from(1 << 30),
            "TiB" => f64::from(1 << 30) * 1024.0,
            _ => f64::NAN,
        };
        let bytes = number.parse::<f64>().map_or(f64::NAN, |number| number * factor);
        if bytes.is_finite() && bytes < 1e18 {
            Ok(ByteSize(Some(bytes as u64)))
        } else {
            Err(format!(
                "{text:?} is not a size: write \"auto\", bytes, or a number with a unit (\"12GiB\")"
            ))
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => write!(f, "auto"),
            Some(bytes) if bytes < 10_000 => write!(f, "{bytes} B"),
            Some(bytes) if bytes < 10_000_000 => write!(f, "{:.1} KiB", bytes as f64 / 1024.0),
            Some(bytes) => write!(f, "{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        }
    }
}

impl From<u64> for ByteSize {
    fn from(bytes: u64) -> ByteSize {
        ByteSize(Some(bytes))
    }
}
