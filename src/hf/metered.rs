//! Renders an untrusted chat template with bounded time, memory and stack.
//!
//! The engine bounds how deep macros call each other. Its bound on instructions ("fuel") is not
//! enough: one instruction may double a text, walk a lazy sequence of 10¹⁸ items, or wrap a list in
//! a list until dropping it overflows the stack. So checks are added to the compiled program:
//! before each instruction that may be expensive a check of its arguments, and behind it a check of
//! its result. Each pass of a loop and each call of a macro counts the instructions of its body.
//! The checks are filters of ours, which see the meter of this rendering.
//!
//! Three rules give the bound. No value may be larger or nested deeper than the constants below,
//! where a shared part counts as often as it occurs. The sizes of all values and texts that are
//! made are summed, and so are those of all values that are read. Lazy sequences become lists as
//! soon as they are made.
//!
//! The engine's instructions are an unstable interface (`unstable_machinery`). So Cargo.toml
//! accepts no later minor version.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::machinery::{
    Instruction, Instructions, Vm, get_compiled_template, make_string_output,
};
use minijinja::value::{Object, ObjectRepr};
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter,
};

use super::metered_calls;
use super::python_text::printed;

/// The most instructions of one rendering, counting all of a loop's body for each pass. Templates
/// of published models have 50 to 1,000 for a message: enough for chats of 10,000 messages.
const MOST_INSTRUCTIONS: u64 = 10_000_000;

/// The most bytes of all values and texts of one rendering. Every use of a message's text counts,
/// so a chat of 10 MB can be rendered.
pub(super) const MOST_BYTES: u64 = 256 << 20;

/// The most bytes that all operations of one rendering may read, which takes some seconds.
const MOST_READ: u64 = 8 << 30;

/// The most levels of a nested value. JSON has at most 128 (serde_json). Printing, comparing and
/// dropping a value take some stack frames a level.
const MOST_LEVELS: usize = 256;

/// The bytes of an item of a list or a map.
pub(super) const ITEM: u64 = 32;

/// The engine's limit on depth. A macro's call takes 4 of it, so macros may call each other 50
/// levels deep. In published templates such calls follow the levels of a tool's JSON schema.
const MOST_FRAMES: usize = 200;

/// The bytes that building a macro counts for: it is rare, and copies a list of all macros.
const MACRO: u64 = 64 << 10;

/// The resources that one rendering has used.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// Instructions that ran.
    run: AtomicU64,
    /// Bytes of values and texts that were made.
    made: AtomicU64,
    /// Bytes that operations read.
    read: AtomicU64,
}

impl Object for Meter {}

impl Meter {
    pub(super) fn of(state: &State<'_, '_>) -> Arc<Meter> {
        state.get_or_set_temp_object("l2l.meter", Meter::default)
    }

    /// Refuses to make more bytes than the limit allows.
    pub(super) fn fits(&self, bytes: u64) -> Result<(), Error> {
        let made = self.made.load(Ordering::Relaxed).saturating_add(bytes);
        let most = MOST_BYTES >> 20;
        at_most(made, MOST_BYTES, format_args!("its texts and values take more than {most} MiB"))
    }

    pub(super) fn make(&self, bytes: u64) -> Result<(), Error> {
        self.fits(bytes)?;
        self.made.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn read(&self, bytes: u64) -> Result<(), Error> {
        let read = self.read.load(Ordering::Relaxed).saturating_add(bytes);
        self.read.store(read, Ordering::Relaxed);
        let most = MOST_READ >> 30;
        at_most(read, MOST_READ, format_args!("its operations read more than {most} GiB"))
    }
}

/// Refuses a number above its limit. `what` is the message, without its end.
pub(super) fn at_most(number: u64, most: u64, what: fmt::Arguments<'_>) -> Result<(), Error> {
    match number > most {
        true => Err(refusal(format!("{what}, which is the most"))),
        false => Ok(()),
    }
}

pub(super) fn refusal(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// The size of a value. A shared part counts as often as it occurs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    /// Its bytes in memory.
    pub(super) bytes: u64,
    /// The most bytes of its text.
    pub(super) text: u64,
    /// Its levels of lists and maps.
    pub(super) levels: usize,
}

/// The size of a value.
///
/// # Errors
/// The value is too large or nested too deep; or a part of it is a namespace, which could hold
/// itself, a macro, or a lazy sequence.
pub(super) fn size_of(value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    measure(value, 0, &mut size)?;
    Ok(size)
}

/// The size of a value that becomes a part of another one.
pub(super) fn size_inside(value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    measure(value, 1, &mut size)?;
    Ok(size)
}

fn measure(value: &Value, level: usize, size: &mut Size) -> Result<(), Error> {
    size.bytes += ITEM;
    size.levels = size.levels.max(level);
    let what = format_args!("it nests values deeper than {MOST_LEVELS}");
    at_most(level as u64, MOST_LEVELS as u64, what)?;
    if let Some(text) = value.as_str() {
        let length = text.len() as u64;
        size.bytes += length;
        // Inside a list a text is quoted, and a byte becomes up to six.
        size.text += if level == 0 { length } else { 6 * length + 4 };
    } else if let Some(bytes) = value.as_bytes() {
        size.bytes += bytes.len() as u64;
        size.text += 6 * bytes.len() as u64;
    } else if let Some(object) = value.as_object() {
        let kind = object.type_name();
        let is_variable = kind.ends_with("::Namespace") || kind.ends_with("::Macro");
        if level > 0 && (is_variable || object.repr() == ObjectRepr::Iterable) {
            return Err(refusal("it puts a namespace, a macro or a lazy sequence into a value"));
        }
        size.text += 16;
        match object.repr() {
            ObjectRepr::Map => {
                for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                    measure(&key, level + 1, size)?;
                    measure(&value, level + 1, size)?;
                }
            }
            ObjectRepr::Seq | ObjectRepr::Iterable => {
                for value in object.try_iter().into_iter().flatten() {
                    measure(&value, level + 1, size)?;
                }
            }
            _ => {}
        }
    } else {
        // An integer of 128 bits has 40 digits, a float up to 325.
        size.text += if value.as_i64().is_some() { 40 } else { 352 };
    }
    let bytes = size.bytes.max(size.text / 8);
    let most = MOST_BYTES >> 20;
    at_most(bytes, MOST_BYTES, format_args!("one of its values takes more than {most} MiB"))
}

/// The number of items of a list or a map, or of bytes of a text.
pub(super) fn length(value: &Value) -> u64 {
    value.as_str().map_or_else(|| value.len().unwrap_or(0), str::len) as u64
}

/// The items of a list or of a lazy sequence; none of another value.
pub(super) fn items(value: &Value) -> impl Iterator<Item = Value> {
    let is_sequence = |object: &&minijinja::value::DynObject| {
        matches!(object.repr(), ObjectRepr::Seq | ObjectRepr::Iterable)
    };
    let object = value.as_object().filter(is_sequence);
    object.and_then(|object| object.try_iter()).into_iter().flatten()
}

/// Counts a value that was made. A lazy sequence becomes a list.
pub(super) fn settle(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    let meter = Meter::of(state);
    if let Some(text) = value.as_str() {
        meter.make(ITEM + text.len() as u64)?;
        return Ok(value);
    }
    let Some(object) = value.as_object() else { return Ok(value) };
    let value = match object.repr() {
        ObjectRepr::Iterable => {
            let mut list = Vec::new();
            for item in items(&value) {
                if list.len().is_multiple_of(1024) {
                    meter.fits(ITEM * (list.len() as u64 + 1024))?;
                }
                list.push(item);
            }
            Value::from(list)
        }
        _ => value,
    };
    meter.read(size_of(&value)?.bytes)?;
    // The parts were counted when they were made.
    meter.make(ITEM * (1 + value.len().unwrap_or(0) as u64))?;
    Ok(value)
}

/// Adds the checks, as filters, and the engine's limits to an environment.
pub(super) fn add_limits(environment: &mut Environment<'static>) {
    environment.set_recursion_limit(MOST_FRAMES);
    // It would print all variables.
    environment.remove_global("debug");
    environment.set_formatter(emit);
    environment.add_filter("l2l.settle", settle);
    environment.add_filter("l2l.loop", enter_loop);
    environment.add_filter("l2l.run", run);
    environment.add_filter("l2l.macro", |state: &State<'_, '_>| Meter::of(state).make(MACRO));
    metered_calls::add(environment);
}

/// Writes a value as output.
fn emit(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let bytes = match value.as_str() {
        Some(text) => text.len() as u64,
        None => size_of(value)?.text,
    };
    Meter::of(state).make(bytes)?;
    escape_formatter(out, state, printed(value).as_ref().unwrap_or(value))
}

/// Counts the items of a loop, because the engine may copy them.
fn enter_loop(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    let bytes = ITEM * length(&value);
    Meter::of(state).fits(bytes)?;
    Meter::of(state).read(bytes)?;
    Ok(value)
}

/// Counts instructions that are about to run.
fn run(state: &State<'_, '_>, instructions: u64) -> Result<(), Error> {
    let before = Meter::of(state).run.fetch_add(instructions, Ordering::Relaxed);
    let what = format_args!("it runs more than {MOST_INSTRUCTIONS} instructions");
    at_most(before.saturating_add(instructions), MOST_INSTRUCTIONS, what)
}

/// Renders the environment's template `chat`.
pub(super) fn render(environment: &Environment<'_>, values: Value) -> Result<String, Error> {
    let template = environment.get_template("chat").expect("it was added");
    let program = metered(&get_compiled_template(&template).instructions);
    let mut text = String::new();
    let none = BTreeMap::new();
    let mut out = make_string_output(&mut text);
    Vm::new(environment).eval(&program, values, &none, &mut out, AutoEscape::None)?;
    Ok(text)
}

/// A program with its checks.
fn metered<'source>(program: &Instructions<'source>) -> Instructions<'source> {
    let mut out = Instructions::new(program.name(), program.source());
    let all = (0..program.len() as u32).map_while(|at| program.get(at));
    let targets: BTreeSet<u32> =
        all.clone().filter_map(|one| target_of(&mut one.clone()).copied()).collect();
    let macros: BTreeSet<u32> = all
        .clone()
        .filter_map(|one| match one {
            Instruction::BuildMacro(_, begin, _) => Some(*begin),
            _ => None,
        })
        .collect();
    let returns = |at: &u32| matches!(program.get(*at), Some(Instruction::Return) | None);
    // For each instruction, the place in the new program of the checks before it.
    let mut begins = Vec::with_capacity(program.len() + 1);
    let mut pieces = Vec::with_capacity(4);
    let mut before = None;
    for (at, instruction) in (0u32..).zip(all) {
        begins.push(out.len() as u32);
        if macros.contains(&at) {
            let end = (at..).find(returns).unwrap_or(at);
            pieces.extend(counted(end - at));
        }
        // If a jump leads here, the instruction before may not have run.
        let previous = before.filter(|_| !targets.contains(&at));
        with_checks(instruction, previous, &mut pieces);
        if let Instruction::Iterate(end) = instruction {
            pieces.extend(counted(end.saturating_sub(at)));
        }
        let line = program.get_line(at).unwrap_or(0) as u16;
        pieces.drain(..).for_each(|piece| {
            out.add_with_line(piece, line);
        });
        before = Some(instruction);
    }
    begins.push(out.len() as u32);
    for at in 0..out.len() as u32 {
        if let Some(target) = out.get_mut(at).and_then(target_of) {
            *target = begins[*target as usize];
        }
    }
    out
}

/// The place in the program that an instruction jumps to.
fn target_of<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}

/// Counts the instructions of a body, before it runs.
fn counted(body: u32) -> [Instruction<'static>; 3] {
    [
        Instruction::LoadConst(Value::from(u64::from(body) + 1)),
        call("l2l.run", 1),
        Instruction::DiscardTop,
    ]
}

/// A call of one of our filters, with this number of arguments.
fn call(name: &'static str, arguments: u16) -> Instruction<'static> {
    // The engine caches filters by a number. This number means no cache.
    Instruction::ApplyFilter(name, Some(arguments), u8::MAX)
}

/// Adds an instruction, with the checks before and behind it. `previous` is the instruction before
/// it, which has certainly run.
fn with_checks<'source>(
    instruction: &Instruction<'source>,
    previous: Option<&Instruction<'source>>,
    out: &mut Vec<Instruction<'source>>,
) {
    use Instruction as I;

    // A check of the two values on top of the stack, which it puts back.
    let both = |check| [call(check, 2), I::UnpackList(2)];
    let compares = match previous {
        // A short constant is compared with few bytes, so this needs no check.
        Some(I::LoadConst(with)) => with.as_str().is_some_and(|text| text.len() > 64),
        _ => true,
    };
    match instruction {
        I::EmitRaw(text) => {
            let text = Value::from_safe_string(text.to_string());
            return out.extend([I::LoadConst(text), I::Emit]);
        }
        I::Slice => return out.push(call("l2l.slice", 4)),
        I::ApplyFilter(name, arguments, _) => return named("l2l.filter", name, *arguments, out),
        I::CallMethod(name, arguments) => return named("l2l.method", name, *arguments, out),
        I::PerformTest(name, arguments, _) if metered_calls::reads(name) => {
            return named("l2l.test", name, *arguments, out);
        }
        I::Add => out.extend(both("l2l.add")),
        I::Mul => out.extend(both("l2l.multiply")),
        I::StringConcat => {
            return out.extend([call("l2l.concat", 2), call("l2l.settle", 1)]);
        }
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte if compares => {
            out.extend(both("l2l.compare"));
        }
        I::In | I::CompareAndPreserve(_) => out.extend(both("l2l.contains")),
        // An attribute has a constant name, whose hash is short.
        I::GetItem if !matches!(previous, Some(I::LoadConst(key)) if key.as_str().is_some()) => {
            out.extend(both("l2l.item"));
        }
        I::SetAttr(_) => out.extend([I::Swap, call("l2l.keep", 1), I::Swap]),
        I::PushLoop(_) => out.push(call("l2l.loop", 1)),
        I::BuildMacro(..) => out.extend([call("l2l.macro", 0), I::DiscardTop]),
        _ => {}
    }
    out.push(instruction.clone());
    let makes_a_value = match instruction {
        I::LoadConst(value) => value.as_object().is_some(),
        I::Add | I::Mul => true,
        I::BuildList(_) | I::BuildMap(_) | I::CallFunction(..) | I::CallObject(_) => true,
        _ => false,
    };
    if makes_a_value {
        out.push(call("l2l.settle", 1));
    }
}

/// A call of our filter with the arguments of a filter, test or method of the template, and its
/// name above them.
fn named<'source>(
    filter: &'static str,
    name: &'source str,
    arguments: Option<u16>,
    out: &mut Vec<Instruction<'source>>,
) {
    use Instruction as I;

    out.push(I::LoadConst(Value::from(name)));
    match arguments {
        Some(count) => out.push(call(filter, count + 1)),
        // The stack has the count above the arguments, and now the name above the count.
        None => out.extend([
            I::Swap,
            I::LoadConst(Value::from(1)),
            I::Add,
            I::ApplyFilter(filter, None, u8::MAX),
        ]),
    }
}
