//! Renders a chat template with bounded time, memory and stack, whoever wrote it.
//!
//! The engine bounds how deep macros call each other. Its bound on instructions ("fuel") would not
//! be enough: one instruction may double a text, walk a lazy sequence of 10¹⁸ items, or wrap a list
//! in a list until dropping it overflows the stack. So the compiled program is not run as it is:
//! before each instruction that may be large stands a check of its arguments, and behind it one
//! of its result. Each pass of a loop and each call of a macro counts the instructions of its body.
//! The checks are filters of ours, which see the meter of this rendering.
//!
//! Three rules make a bound of it. No value may be larger or nested deeper than the constants
//! below, counting a shared part as often as it occurs. The sizes of all values and texts that are
//! made are summed, and so are those of all values that are read. Lazy sequences become lists
//! as soon as they are made.
//!
//! That the engine shows its instructions is a feature without a promise (`unstable_machinery`), so
//! Cargo.toml admits no later minor version unseen.

use std::collections::{BTreeMap, BTreeSet};
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

/// The most instructions of one rendering, counting all of a loop's body for each pass. Templates
/// of published models have 50 to 1,000 for a message: enough for chats of 10,000 messages.
const MOST_INSTRUCTIONS: u64 = 10_000_000;

/// The most memory, in bytes, that all values and texts of one rendering may come to. Every use of
/// a message's text counts once, so a chat of 10 MB can be rendered.
pub(super) const MOST_BYTES: u64 = 256 << 20;

/// The most bytes that all operations of one rendering may read: some seconds' worth.
const MOST_READ: u64 = 8 << 30;

/// The deepest that a value may be nested. JSON has at most 128 levels (serde_json). Printing,
/// comparing and dropping a value take some stack frames a level.
const MOST_LEVELS: usize = 256;

/// What an item of a list or a map takes, in bytes.
pub(super) const ITEM: u64 = 32;

/// The engine's limit on depth, of which a macro's call takes 4: 50 macros inside each other. Those
/// of published templates that call themselves follow a tool's JSON schema.
const MOST_FRAMES: usize = 200;

/// What a macro is charged where it is built: building is rare, and copies a list of all macros.
const MACRO: u64 = 64 << 10;

/// What one rendering has used up.
#[derive(Debug, Default)]
pub(super) struct Meter {
    run: AtomicU64,
    made: AtomicU64,
    read: AtomicU64,
}

impl Object for Meter {}

impl Meter {
    pub(super) fn of(state: &State<'_, '_>) -> Arc<Meter> {
        state.get_or_set_temp_object("l2l.meter", Meter::default)
    }

    /// Whether so many more bytes can be made, asked before they are.
    pub(super) fn fits(&self, bytes: u64) -> Result<(), Error> {
        match self.made.load(Ordering::Relaxed).saturating_add(bytes) > MOST_BYTES {
            true => Err(refusal(format!(
                "its texts and values take more than {} MiB, which is the most",
                MOST_BYTES >> 20
            ))),
            false => Ok(()),
        }
    }

    pub(super) fn make(&self, bytes: u64) -> Result<(), Error> {
        self.fits(bytes)?;
        self.made.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn read(&self, bytes: u64) -> Result<(), Error> {
        let read = self.read.load(Ordering::Relaxed).saturating_add(bytes);
        self.read.store(read, Ordering::Relaxed);
        match read > MOST_READ {
            true => Err(refusal(format!(
                "its operations read more than {} GiB, which is the most",
                MOST_READ >> 30
            ))),
            false => Ok(()),
        }
    }
}

pub(super) fn refusal(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// How large a value is, counting a shared part as often as it occurs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    /// Its bytes in memory.
    pub(super) bytes: u64,
    /// The most bytes that it has as text.
    pub(super) text: u64,
    /// How many levels of lists and maps it has.
    pub(super) levels: usize,
}

/// The size of a value.
///
/// # Errors
/// It is larger or nested deeper than a value may be, or it holds what only a variable may hold: a
/// namespace, which could hold itself, a macro, or a lazy sequence.
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
    if level > MOST_LEVELS {
        return Err(refusal(format!("it nests values deeper than {MOST_LEVELS}, the most")));
    }
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
    match size.bytes.max(size.text / 8) > MOST_BYTES {
        true => Err(refusal(format!(
            "one of its values takes more than {} MiB, which is the most",
            MOST_BYTES >> 20
        ))),
        false => Ok(()),
    }
}

/// The items of a list or of a lazy sequence; none of another value.
pub(super) fn items(value: &Value) -> impl Iterator<Item = Value> {
    let is_sequence = |object: &&minijinja::value::DynObject| {
        matches!(object.repr(), ObjectRepr::Seq | ObjectRepr::Iterable)
    };
    let object = value.as_object().filter(is_sequence);
    object.and_then(|object| object.try_iter()).into_iter().flatten()
}

/// Charges for a value that was made. A lazy sequence becomes a list.
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
    // The parts were charged when they were made.
    meter.make(ITEM * (1 + value.len().unwrap_or(0) as u64))?;
    Ok(value)
}

/// Adds the checks, as filters, and the engine's limits to an environment.
pub(super) fn add_limits(environment: &mut Environment<'static>) {
    environment.set_recursion_limit(MOST_FRAMES);
    // It prints all variables.
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
    escape_formatter(out, state, value)
}

/// Charges for entering a loop, where the engine may copy what it is over.
fn enter_loop(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    let length = value.as_str().map_or_else(|| value.len().unwrap_or(0), str::len) as u64;
    Meter::of(state).fits(ITEM * length)?;
    Meter::of(state).read(ITEM * length)?;
    Ok(value)
}

/// Counts instructions that are about to run.
fn run(state: &State<'_, '_>, instructions: u64) -> Result<(), Error> {
    let before = Meter::of(state).run.fetch_add(instructions, Ordering::Relaxed);
    match before.saturating_add(instructions) > MOST_INSTRUCTIONS {
        true => Err(refusal(format!(
            "it runs more than {MOST_INSTRUCTIONS} instructions, which is the most"
        ))),
        false => Ok(()),
    }
}

/// Renders the environment's template `chat`.
pub(super) fn render(environment: &Environment<'_>, values: Value) -> Result<String, Error> {
    let template = environment.get_template("chat").expect("it was added");
    let program = metered(&get_compiled_template(&template).instructions);
    let (mut text, none) = (String::new(), BTreeMap::new());
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
    // Where each instruction, with the checks before it, begins in the new program.
    let mut begins = Vec::with_capacity(program.len() + 1);
    let (mut pieces, mut before) = (Vec::with_capacity(4), None);
    for (at, instruction) in (0u32..).zip(all) {
        begins.push(out.len() as u32);
        if macros.contains(&at) {
            let end = (at..).find(returns).unwrap_or(at);
            pieces.extend(counted(end - at));
        }
        // At the end of a jump, the instruction before may not have run.
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

/// The place in the program that an instruction names.
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

/// A call of one of our filters, with so many arguments.
fn call(name: &'static str, arguments: u16) -> Instruction<'static> {
    // The engine remembers filters by a number; this one stands for none.
    Instruction::ApplyFilter(name, Some(arguments), u8::MAX)
}

/// An instruction, with what must stand before and behind it. `previous`: the one before it.
fn with_checks<'source>(
    instruction: &Instruction<'source>,
    previous: Option<&Instruction<'source>>,
    out: &mut Vec<Instruction<'source>>,
) {
    use Instruction as I;

    let mut named = |filter: &'static str, name: &'source str, arguments: Option<u16>| {
        out.push(I::LoadConst(Value::from(name)));
        match arguments {
            Some(count) => out.push(call(filter, count + 1)),
            // The count lies on the stack, above the arguments.
            None => out.extend([
                I::Swap,
                I::LoadConst(Value::from(1)),
                I::Add,
                I::ApplyFilter(filter, None, u8::MAX),
            ]),
        }
    };
    // A check of the two values on top of the stack, which it puts back.
    let both = |check| [call(check, 2), I::UnpackList(2)];
    let compares = match previous {
        Some(I::LoadConst(with)) => with.as_str().is_some_and(|text| text.len() > 64),
        _ => true,
    };
    match instruction {
        I::EmitRaw(text) => {
            out.extend([I::LoadConst(Value::from_safe_string(text.to_string())), I::Emit]);
        }
        I::LoadConst(value) if value.as_object().is_some() => {
            out.extend([instruction.clone(), call("l2l.settle", 1)]);
        }
        I::Slice => out.push(call("l2l.slice", 4)),
        I::Add => {
            out.extend(both("l2l.add"));
            out.extend([I::Add, call("l2l.settle", 1)]);
        }
        I::Mul => {
            out.extend(both("l2l.multiply"));
            out.extend([I::Mul, call("l2l.settle", 1)]);
        }
        I::StringConcat => {
            out.extend(both("l2l.concat"));
            out.extend([I::StringConcat, call("l2l.settle", 1)]);
        }
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte if compares => {
            out.extend(both("l2l.compare"));
            out.push(instruction.clone());
        }
        I::In | I::CompareAndPreserve(_) => {
            out.extend(both("l2l.contains"));
            out.push(instruction.clone());
        }
        I::GetItem => {
            if !matches!(previous, Some(I::LoadConst(key)) if key.as_str().is_some()) {
                out.extend(both("l2l.item"));
            }
            out.push(I::GetItem);
        }
        I::SetAttr(_) => {
            out.extend([I::Swap, call("l2l.keep", 1), I::Swap, instruction.clone()]);
        }
        I::PushLoop(_) => out.extend([call("l2l.loop", 1), instruction.clone()]),
        I::BuildMacro(..) => {
            out.extend([call("l2l.macro", 0), I::DiscardTop, instruction.clone()]);
        }
        I::ApplyFilter(name, arguments, _) => named("l2l.filter", name, *arguments),
        I::PerformTest(name, arguments, _) if metered_calls::reads(name) => {
            named("l2l.test", name, *arguments);
        }
        I::CallMethod(name, arguments) => named("l2l.method", name, *arguments),
        I::BuildList(_) | I::BuildMap(_) | I::CallFunction(..) | I::CallObject(_) => {
            out.extend([instruction.clone(), call("l2l.settle", 1)])
        }
        _ => out.push(instruction.clone()),
    }
}
