//! How a key is checked by itself and beside others. The plan checks what the model and the machine
//! allow.

use super::sizes::bytes_per_second;
use crate::error::Error;

/// Refuses a key whose value is not what it must be.
pub(super) fn must(holds: bool, key: &str, be: &str) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::config(key, format_args!("must be {be}"))) }
}

/// Refuses a key that contradicts another.
pub(super) fn refuse(contradicts: bool, key: &str, problem: &str) -> Result<(), Error> {
    if contradicts { Err(Error::config(key, problem)) } else { Ok(()) }
}

pub(super) fn is_positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

pub(super) fn is_not_negative(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

/// The value of a key that is a rate, in bytes a second.
pub(super) fn rate(key: &str, text: Option<&str>) -> Result<Option<f64>, Error> {
    let Some(text) = text else { return Ok(None) };
    let must = || format!("must be a rate such as \"12GB/s\", not {text:?}");
    bytes_per_second(text).map(Some).ok_or_else(|| Error::config(key, must()))
}
