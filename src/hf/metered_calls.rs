//! The checks of [`super::metered`]: they limit the bytes that an operator, a filter, a test or a
//! method of a template may read and make, before the engine makes the result.

use std::borrow::Cow;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::metered::{
    ITEM, Meter, Size, at_most, items, length, refusal, settle, size_inside, size_of,
};
use super::python_text::{printed, str_of};

/// The widest indent, column or precision.
const MOST_COLUMNS: u64 = 1_000;

/// The most parts of a list, or items of a part that is filled up.
const MOST_PARTS: u64 = 100_000;

/// Filters and methods that read only the length, the ends or one key of a value.
const GLANCES: &str = "length count default d first safe attr get items";

/// Filters that make a list of a text's characters.
const LISTS: &str = "batch chain dictsort groupby list map reject rejectattr select selectattr \
                     slice sort sum unique zip";

/// Filters that take any value as a text.
const TEXTS: &str = "capitalize e escape indent lower replace string title trim upper urlencode";

/// Tests that read only the kind of a value.
const KINDS: &str = "boolean callable defined divisibleby escaped even false filter float int \
                     integer iterable mapping none number odd sequence string true undefined";

fn is_one_of(name: &str, names: &str) -> bool {
    names.split(' ').any(|known| known == name)
}

/// Whether a test reads its values.
pub(super) fn reads(test: &str) -> bool {
    !is_one_of(test, KINDS)
}

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

/// The arguments of a call, and the name that lies above them on the stack.
fn named(all: &[Value]) -> Result<(&str, &[Value]), Error> {
    let call = all.split_last().and_then(|(name, rest)| Some((name.as_str()?, rest)));
    call.ok_or_else(|| refusal("it calls a filter of l2l's own, which is for its checks alone"))
}

/// The engine's error about an unknown filter or test, with its name.
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
    // `map` with a filter's name calls that filter for each item. Each call is checked.
    let mapped = arguments.get(1).and_then(Value::as_str).filter(|_| name == "map");
    if let Some((mapped, value)) = mapped.zip(arguments.first()) {
        let each = value.try_iter()?.map(|item| {
            let arguments: Vec<Value> = [item].into_iter().chain(arguments[2..].to_vec()).collect();
            filter(state, mapped, &arguments)
        });
        return settle(state, Value::from(each.collect::<Result<Vec<Value>, Error>>()?));
    }
    let made = state.apply_filter(name, &printed_as_python(name, arguments));
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
    settle(state, value.call_method(state, name, &printed_as_python(name, arguments))?)
}

/// The arguments of a filter or a method of texts. Lists, maps and floats are given as the text
/// that Python prints, because the engine would print another.
fn printed_as_python<'a>(name: &str, arguments: &'a [Value]) -> Cow<'a, [Value]> {
    let text = |value: &Value| printed(value).unwrap_or_else(|| value.clone());
    let each = |value: &Value| match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => items(value).map(|item| text(&item)).collect(),
        _ => value.clone(),
    };
    let is_number = |value: &&Value| value.is_number();
    match arguments {
        [first, rest @ ..] if is_one_of(name, TEXTS) && printed(first).is_some() => {
            [text(first)].into_iter().chain(rest.iter().cloned()).collect()
        }
        // The list comes first for a filter, and second for a method of the separator.
        [..] if name == "join" => arguments.iter().map(each).collect(),
        [..] if name == "format" => arguments
            .iter()
            .map(|one| if is_number(&one) { one.clone() } else { text(one) })
            .collect(),
        _ => Cow::Borrowed(arguments),
    }
}

/// Counts the bytes that a call reads, and refuses a call whose result would be too large.
fn check(state: &State<'_, '_>, name: &str, arguments: &[Value]) -> Result<(), Error> {
    let meter = Meter::of(state);
    let Some((value, rest)) = arguments.split_first() else { return Ok(()) };
    if let Some(text) = value.as_str().filter(|_| is_one_of(name, LISTS)) {
        meter.fits(ITEM * text.len() as u64)?;
    }
    let mut others = Size::default();
    for one in rest {
        let size = size_of(one)?;
        others.bytes += size.bytes;
        others.text += size.text;
    }
    if is_one_of(name, GLANCES) && (name != "count" || rest.is_empty()) {
        return meter.read(others.bytes);
    }
    let first = size_of(value)?;
    // Some calls look at the other arguments once for each item, or at the sum so far.
    let again = match name {
        "select" | "reject" | "selectattr" | "rejectattr" | "strip" | "lstrip" | "rstrip"
        | "trim" => others.bytes,
        "sum" => first.bytes,
        _ => 0,
    };
    let read = first.bytes.saturating_add(others.bytes);
    meter.read(read.saturating_add(length(value).saturating_mul(again)))?;
    meter.fits(made(name, arguments, first, others)?)
}

/// An upper bound of the new bytes in the result of a call. `first` is the size of the first
/// argument, and `others` is the size of all others together.
fn made(name: &str, arguments: &[Value], first: Size, others: Size) -> Result<u64, Error> {
    let rest = &arguments[1..];
    let text = |at: usize| arguments.get(at).and_then(Value::as_str);
    Ok(match name {
        "replace" => match (text(0), text(1), text(2)) {
            (Some(text), Some(from), Some(to)) => {
                let found = text.matches(from).count() as u64;
                text.len() as u64 + found.saturating_mul(to.len() as u64)
            }
            _ => first.text.saturating_mul(1 + others.text),
        },
        "join" => {
            // The list comes first for a filter, and second for a method of the separator.
            let (list, separator) = match (text(0), rest.first()) {
                (Some(separator), Some(list)) if list.as_str().is_none() => (list, separator),
                _ => (&arguments[0], text(1).unwrap_or_default()),
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
            let lines = text(0).map_or(0, |text| text.lines().count() as u64 + 1);
            first.text + lines.saturating_mul(most_number(rest, MOST_COLUMNS)?.max(4))
        }
        "format" => {
            let format = text(0).unwrap_or_default();
            let starred = if format.contains('*') { most_number(rest, MOST_COLUMNS)? } else { 0 };
            let holes = format.matches(['%', '{']).count() as u64;
            let each = widest(format).saturating_add(starred).saturating_add(others.text);
            first.text.saturating_add(holes.saturating_mul(each))
        }
        "batch" | "slice" => {
            ITEM.saturating_mul(length(&arguments[0]) + most_number(rest, MOST_PARTS)?)
        }
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
    })
}

/// The largest number among arguments.
fn most_number(arguments: &[Value], most: u64) -> Result<u64, Error> {
    let mut largest = 0;
    for one in arguments {
        let named = one.is_kwargs().then(|| one.try_iter().ok()).flatten().into_iter().flatten();
        let named = named.filter_map(|key| one.get_item(&key).ok());
        for number in named.chain([one.clone()]).filter(Value::is_number) {
            let size = f64::try_from(number).map_or(f64::INFINITY, f64::abs).ceil() as u64;
            at_most(size, most, format_args!("it asks for more than {most} columns or parts"))?;
            largest = largest.max(size);
        }
    }
    Ok(largest)
}

/// The largest number in a format, which may be a width.
fn widest(text: &str) -> u64 {
    let digits = text.split(|one: char| !one.is_ascii_digit()).filter(|digits| !digits.is_empty());
    digits.map(|digits| digits.parse().unwrap_or(u64::MAX)).max().unwrap_or(0)
}

/// Both values of an operator, in the order in which the engine puts them back on the stack.
fn pair(a: Value, b: Value) -> Vec<Value> {
    vec![b, a]
}

/// The bytes of a text, or of a list's items without what they hold.
fn own_bytes(value: &Value) -> u64 {
    match value.as_str() {
        Some(text) => text.len() as u64,
        None => ITEM * items(value).count() as u64,
    }
}

fn add_values(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    Meter::of(state).fits(own_bytes(&a).saturating_add(own_bytes(&b)))?;
    Ok(pair(a, b))
}

fn multiply(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    for (one, times) in [(&a, &b), (&b, &a)] {
        if let Some(times) = times.as_usize() {
            Meter::of(state).fits(own_bytes(one).saturating_mul(times as u64))?;
        }
    }
    Ok(pair(a, b))
}

/// `a ~ b`, as Python prints both.
fn concat(state: &State<'_, '_>, a: Value, b: Value) -> Result<String, Error> {
    Meter::of(state).fits(size_of(&a)?.text.saturating_add(size_of(&b)?.text))?;
    Ok([str_of(&a), str_of(&b)].concat())
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
    let first = size_of(&a)?;
    let second = size_of(&b)?;
    Meter::of(state).read(first.bytes + second.bytes)?;
    Meter::of(state).fits(first.text)?;
    Ok(pair(a, b))
}

fn item(state: &State<'_, '_>, a: Value, b: Value) -> Result<Vec<Value>, Error> {
    // The engine counts the characters of a text from its beginning, and hashes a key.
    let counted = a.as_str().map_or(0, str::len) as u64;
    Meter::of(state).read(counted + size_of(&b)?.bytes)?;
    Ok(pair(a, b))
}

/// Counts a value that becomes a part of a namespace.
fn keep(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    Meter::of(state).read(size_inside(&value)?.bytes)?;
    Ok(value)
}

/// `value[start:stop:step]`, as in Python. The engine's own slice panics for an empty list or text
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
    let start = number(start)?;
    let stop = number(stop)?;
    let step = number(step)?.unwrap_or(1);
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

/// The places of a slice of `length` items.
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
