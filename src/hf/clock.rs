//! The day on which chat templates are rendered: today, or the one that the config names.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use chrono::{Local, NaiveDate, NaiveTime};

/// The day that a template's `strftime_now` writes. Its time is midnight, because all records of a
/// run must have the same.
#[derive(Debug)]
pub(super) struct Clock {
    day: Mutex<NaiveDate>,
    /// Whether a template has asked for it.
    is_read: AtomicBool,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock { day: Mutex::new(Local::now().date_naive()), is_read: AtomicBool::new(false) }
    }
}

impl Clock {
    /// Sets the day, in the form `2026-01-31`.
    pub(super) fn set(&self, day: &str) -> Result<(), String> {
        let parsed = NaiveDate::parse_from_str(day, "%Y-%m-%d");
        let parsed = parsed.map_err(|error| format!("{day:?} is no date: {error}"))?;
        *self.day.lock().expect("nothing panics inside") = parsed;
        Ok(())
    }

    /// The day in the form of Python's `strftime`.
    pub(super) fn format(&self, format: &str) -> Result<String, String> {
        self.is_read.store(true, Ordering::Relaxed);
        let day = *self.day.lock().expect("nothing panics inside");
        let mut text = String::new();
        match write!(text, "{}", day.and_time(NaiveTime::MIN).format(format)) {
            Ok(()) => Ok(text),
            Err(_) => Err(format!("strftime_now does not know a part of {format:?}")),
        }
    }

    /// The day, if a template has asked for it.
    pub(super) fn read(&self) -> Option<String> {
        let day = self.day.lock().expect("nothing panics inside");
        self.is_read.load(Ordering::Relaxed).then(|| day.to_string())
    }
}
