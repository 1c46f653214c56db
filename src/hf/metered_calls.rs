//! The checks of [`super::metered`]: what an operator, a filter, a test or a method of a template
//! may read and make. They bound the result before the engine makes it.

use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::metered::{ITEM, Meter, items, refusal, settle, size_inside, size_of};

/// The widest indent, column or precision.
const MOST_COLUMNS: u64 = 1_000;

/// The most parts that a list may be cut into, or items that a part may be filled up to.
const MOST_PARTS: u64 = 100_000;

/// Filters and methods that look at no more of a value than its length, its end or one key.
const GLANCES: [&str; 9] =
    ["length", "count", "default", "d", "first", "safe", "attr", "get", "items"];

/// Filters that take a text apart into its characters.
const LISTS: [&str; 15] = [
    "batch",
    "chain",
    "dictsort",
    "groupby",
    "list",
    "map",
    "reject",
    "rejectattr",
    "select",
    "selectattr",
    "slice",
    "sort",
    "sum",
    "unique",
    "zip",
];

/// Tests that look at no more of a value than its kind.
const KINDS: [&str; 20] = [
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "int",
    "integer",
    "iterable",
    "mapping",
    "none",
    "number",
    "odd",
    "sequence",
    "string",
    "true",
    "undefined",
];

pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter("l2l.add", add_values);
    environment.add_filter("l2l.multiply", multiply);
    environment.add_filter("l2l.concat", concat);
    environment.add_filter("l2l.compare", compare);
    environment.add_filter("l2l.contains", contains);
    environment.add_filter("l2l.item", item);
    environment.add_filter("l2l.keep", keep);
    environment.add_filter("l2l.slice", slice);
    environment.add_filter("l2l.filter", |state: &State<'_, '_>, all: Rest<Value>| {
        let (name, arguments) = named(&all)?;
        filter(state, name, arguments)
    });
    environment.add_filter("l2l.test", |state: &State<'_, '_>, all: Rest<Value>| {
        let (name, arguments) = named(&all)?;
        check(state, name, arguments)?;
        state.perform_test(name, arguments).map_err(|error| unknown("test", name, error))
    });
    environment.add_filter("l2l.method", |state: &State<'_, '_>, all: Rest<Value>| {
        let (name, arguments) = named(&all)?;
        method(state, name, arguments)
    });
}

/// Whether a test reads its values.
pub(super) fn reads(test: &str) -> bool {
    !KINDS.contains(&test)
}

/// The arguments of a call, and the name that lies above them on the stack.
fn named(all: &[Value]) -> Result<(&str, &[Value]), Error> {
    let call = all.split_last().and_then(|(name, rest)| Some((name.as_str()?, rest)));
    call.ok_or_else(|| refusal("it calls a filter that is none of its own"))
}

/// The engine's error of a name that it does not know, with the name.
fn unknown(kind: &str, name: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest if error.detail().is_none() => {
            Error::new(error.kind(), format!("{kind} {name} is unknown"))
        }
        _ => error,
    }
}

fn filter(state: &State<'_, '_>, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    check(state, name, arguments)?;
    // With a filter's name, `map` is a call of that filter for each item, checked as any other.
    let mapped = arguments.get(1).and_then(Value::as_str).filter(|_| name == "map");
    if let Some((mapped, value)) = mapped.zip(arguments.first()) {
        let each = value.try_iter()?.map(|item| {
            let arguments: Vec<Value> = [item].into_iter().chain(arguments[2..].to_vec()).collect();
            filter(state, mapped, &arguments)
        });
        return settle(state, Value::from(each.collect::<Result<Vec<Value>, Error>>()?));
    }
    let made = state.apply_filter(name, arguments);
    settle(state, made.map_err(|error| unknown("filter", name, error))?)
}

fn method(state: &State<'_, '_>, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    check(state, name, arguments)?;
    let Some((value, arguments)) = arguments.split_first() else {
        return Err(refusal("it calls a method of nothing"));
    };
    if let ("count", Some(text), Some("")) =
        (name, value.as_str(), arguments.first().and_then(Value::as_str))
    {
        // The engine would count forever.
        return Ok(Value::from(text.chars().count() + 1));
    }
    settle(state, value.call_method(state, name, arguments)?)
}

/// Charges for what a call reads, and refuses it where its result would be too large.
fn check(state: &State<'_, '_>, name: &str, arguments: &[Value]) -> Result<(), Error> {
    let meter = Meter::of(state);
    let Some((value, rest)) = arguments.split_first() else { return Ok(()) };
    if let Some(text) = value.as_str().filter(|_| LISTS.contains(&name)) {
        meter.fits(ITEM * text.len() as u64)?;
    }
    let mut others = (0u64, 0u64);
    for one in rest {
        let size = size_of(one)?;
        others = (others.0 + size.bytes, others.1 + size.text);
    }
    if GLANCES.contains(&name) && (name != "count" || rest.is_empty()) {
        return meter.read(others.0);
    }
    let first = size_of(value)?;
    let length = value.as_str().map_or_else(|| value.len().unwrap_or(0), str::len) as u64;
    // What is done with the other arguments once for each item, or with the sum so far.
    let again = match name {
        "select" | "reject" | "selectattr" | "rejectattr" | "strip" | "lstrip" | "rstrip"
        | "trim" => others.0,
        "sum" => first.bytes,
        _ => 0,
    };
    let read = first.bytes.saturating_add(others.0);
    meter.read(read.saturating_add(length.saturating_mul(again)))?;
    let text = |at: usize| arguments.get(at).and_then(Value::as_str);
    let made = match name {
        "replace" => match (text(0), text(1), text(2)) {
            (Some(text), Some(from), Some(to)) => {
                let found = text.matches(from).count() as u64;
                text.len() as u64 + found.saturating_mul(to.len() as u64)
            }
            _ => first.text.saturating_mul(1 + others.1),
        },
        "join" => {
            // As a filter it comes behind the list, as a method behind the separator.
            let (list, separator) = match (value.as_str(), rest.first()) {
                (Some(separator), Some(list)) if list.as_str().is_none() => (list, separator),
                _ => (value, text(1).unwrap_or_default()),
            };
            let separator = separator.len() as u64;
            let each = |item: Value| -> Result<u64, Error> {
                Ok(size_of(&item)?.text.saturating_add(separator))
            };
            let letters = list.as_str().map_or(0, str::len) as u64;
            letters.saturating_mul(4 + separator)
                + items(list).map(each).sum::<Result<u64, Error>>()?
        }
        "indent" => {
            let lines = value.as_str().map_or(0, |text| text.lines().count() as u64 + 1);
            first.text + lines.saturating_mul(most_number(rest, MOST_COLUMNS)?.max(4))
        }
        "format" => {
            let format = text(0).unwrap_or_default();
            let starred = if format.contains('*') { most_number(rest, MOST_COLUMNS)? } else { 0 };
            let holes = format.matches(['%', '{']).count() as u64;
            let each = widest(format).saturating_add(starred).saturating_add(others.1);
            first.text.saturating_add(holes.saturating_mul(each))
        }
        "batch" | "slice" => ITEM.saturating_mul(length + most_number(rest, MOST_PARTS)?),
        "round" => most_number(rest, MOST_COLUMNS)?,
        "string" => first.text,
        "split" | "lines" | "splitlines" => {
            let whole = text(0).unwrap_or_default();
            let cuts = match text(1) {
                Some(separator) => whole.matches(separator).count(),
                None => whole.matches(char::is_whitespace).count(),
            };
            first.text + ITEM * (1 + cuts as u64)
        }
        // Each item has a line of its own, with four columns a level.
        "pprint" => first.text + first.bytes / ITEM * 4 * first.levels as u64,
        _ => 0,
    };
    meter.fits(made)
}

/// The largest number among arguments.
fn most_number(arguments: &[Value], most: u64) -> Result<u64, Error> {
    let mut largest = 0;
    for one in arguments {
        let named = one.is_kwargs().then(|| one.try_iter().ok()).flatten().into_iter().flatten();
        let named = named.filter_map(|key| one.get_item(&key).ok());
        for number in named.chain([one.clone()]).filter(Value::is_number) {
            let size = f64::try_from(number).map_or(f64::INFINITY, f64::abs);
            if size > most as f64 {
                return Err(too_many(most));
            }
            largest = largest.max(size as u64);
        }
    }
    Ok(largest)
}

fn too_many(most: u64) -> Error {
    refusal(format!("it asks for more than {most} columns or parts, which is the most"))
}

/// The largest number in a text with holes.
fn widest(text: &str) -> u64 {
    let digits = text.split(|one: char| !one.is_ascii_digit()).filter(|digits| !digits.is_empty());
    digits.map(|digits| digits.parse().unwrap_or(u64::MAX)).max().unwrap_or(0)
}

/// Two values of an operator, as the engine takes them off the stack again.
fn pair(a: Value, b: Value) -> Vec<Value> {
    vec![b, a]
}

fn add_values(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    let length = |one: &Value| match one.as_str() {
        Some(text) => text.len() as u64,
        None => ITEM * items(one).count() as u64,
    };
    Meter::of(state).fits(length(&a).saturating_add(length(&b)))?;
    Ok(pair(a, b))
}

fn multiply(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    for (one, times) in [(&a, &b), (&b, &a)] {
        if let Some(times) = times.as_usize() {
            let bytes = match one.as_str() {
                Some(text) => text.len() as u64,
                None => ITEM * items(one).count() as u64,
            };
            Meter::of(state).fits(bytes.saturating_mul(times as u64))?;
        }
    }
    Ok(pair(a, b))
}

fn concat(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    Meter::of(state).fits(size_of(&a)?.text.saturating_add(size_of(&b)?.text))?;
    Ok(pair(a, b))
}

fn compare(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    let read = match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => a.len().min(b.len()) as u64,
        _ if a.kind() != b.kind() => 0,
        _ => size_of(&a)?.bytes + size_of(&b)?.bytes,
    };
    Meter::of(state).read(read)?;
    Ok(pair(a, b))
}

fn contains(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    let (first, second) = (size_of(&a)?, size_of(&b)?);
    Meter::of(state).read(first.bytes + second.bytes)?;
    Meter::of(state).fits(first.text)?;
    Ok(pair(a, b))
}

fn item(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    // Characters of a text are counted from its begin, and a key is hashed.
    let counted = a.as_str().map_or(0, str::len) as u64;
    Meter::of(state).read(counted + size_of(&b)?.bytes)?;
    Ok(pair(a, b))
}

/// Charges for a value that becomes a part of a namespace.
fn keep(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    Meter::of(state).read(size_inside(&value)?.bytes)?;
    Ok(value)
}

/// `value[start:stop:step]`, as Python means it. The engine's own panics for an empty list or text
/// and a negative step.
fn slice(
    state: &State<'_, '_>,
    value: Value,
    start: Value,
    stop: Value,
    step: Value,
) -> Result<Value, Error> {
    let meter = Meter::of(state);
    if value.is_undefined() || value.is_none() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    let number = |value: Value| match value.is_none() {
        true => Ok(None),
        false => i64::try_from(value).map(Some),
    };
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    if step == 0 {
        return Err(refusal("cannot slice by step size of 0"));
    }
    if let Some(text) = value.as_str() {
        meter.fits(4 * text.len() as u64)?;
        meter.read(4 * text.len() as u64)?;
        let all: Vec<char> = text.chars().collect();
        let text: String = places(all.len(), start, stop, step).map(|at| all[at]).collect();
        return settle(state, Value::from(text));
    }
    if value.as_object().is_none_or(|object| object.try_iter().is_none()) {
        return Err(refusal(format!("value of type {} cannot be sliced", value.kind())));
    }
    let all: Vec<Value> = items(&value).collect();
    let list: Vec<Value> = places(all.len(), start, stop, step).map(|at| all[at].clone()).collect();
    settle(state, Value::from(list))
}

/// The places, of so many, that a slice takes.
fn places(
    length: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = length as i64;
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |at: Option<i64>, default: i64| match at {
        Some(at) if at < 0 => at.saturating_add(length).clamp(low, high),
        Some(at) => at.clamp(low, high),
        None => default,
    };
    let (from, to) = if step > 0 {
        (place(start, low), place(stop, high))
    } else {
        (place(start, high), place(stop, low))
    };
    let next = move |at: &i64| at.checked_add(step);
    let inside = move |at: &i64| if step > 0 { *at < to } else { *at > to };
    std::iter::successors(Some(from), next).take_while(inside).map(|at| at as usize)
}
