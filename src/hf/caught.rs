//! The one door to libraries that work on what a stranger's file says (tokenizers, templates).
//!
//! Causes of panics that are known are refused before the library is called. The rest is caught
//! here: a panic of theirs is an error of the file, and not the end of a run. The default panic
//! hook still prints a line to stderr, because a hook belongs to the program and not to a library.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `call` returns, or what it panicked with.
///
/// A value that was being changed when its owner panicked may be half changed. So callers pass only
/// what they drop after an error, and what is read alone.
pub(super) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| message_of(panic.as_ref()))
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").lines().next().unwrap_or_default().to_string()
}
