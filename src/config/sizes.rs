//! Sizes of memory in a config: `auto`, bytes, or a number with a unit.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};

/// A number of bytes, or `auto`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "Written")]
pub struct ByteSize(Option<u64>);

/// A size as a config writes it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected \"auto\", bytes, or a number with a unit (\"12GiB\")")]
enum Written {
    Bytes(u64),
    Negative(i64),
    Text(String),
}

impl TryFrom<Written> for ByteSize {
    type Error = String;

    fn try_from(written: Written) -> Result<ByteSize, String> {
        match written {
            Written::Bytes(bytes) => Ok(ByteSize(Some(bytes))),
            Written::Negative(bytes) => {
                let what = "expected \"auto\", bytes, or a number with a unit (\"12GiB\")";
                Err(format!("invalid value: integer `{bytes}`, {what}"))
            }
            Written::Text(text) => text.parse(),
        }
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

/// Bytes a second, from a text such as `12GB/s`.
pub(crate) fn bytes_per_second(text: &str) -> Option<f64> {
    let bytes = text.strip_suffix("/s")?.parse::<ByteSize>().ok()?.bytes()?;
    (bytes > 0).then_some(bytes as f64)
}

/// FLOP/s, from a text such as `200GFLOP/s`. The prefixes of units are those of bytes.
pub(crate) fn flops_per_second(text: &str) -> Option<f64> {
    bytes_per_second(&format!("{}B/s", text.strip_suffix("FLOP/s")?))
}
