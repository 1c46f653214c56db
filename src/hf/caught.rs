//! Calls of libraries that work on untrusted files (tokenizers, templates).
//!
//! Files with known causes of panics are refused before a library is called. All other panics are
//! caught here, and become errors of the file: they do not end a run. The default panic hook still
//! prints a line to stderr, because the hook belongs to the program and not to a library.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns the value of `call`, or the message of its panic.
///
/// A panic may leave a value half changed. So callers pass only values that they drop after an
/// error, and values that `call` does not change.
pub(super) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| message_of(panic.as_ref()))
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").lines().next().unwrap_or_default().to_string()
}
