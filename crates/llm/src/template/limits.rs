//! Limits on memory and time of templates, which come from untrusted files.
//!
//! A rendering has a budget for the bytes that its operations allocate, and one for the bytes that they read. The
//! filters with two underscores are inserted by [`rewrite`](super::rewrite); they return their input if the budget
//! allows the operation that follows. Filters and methods whose result is longer than their input check it first.

use std::io;
use std::time::{Duration, Instant};

use minijinja::value::{Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State};

/// Instructions that a template may execute: thousands of times what real templates need for a long conversation.
pub(super) const MAX_INSTRUCTIONS: u64 = 10_000_000;
/// Bytes that a rendering may allocate one after another, in addition to 128 times the size of the messages.
const MAX_MEMORY: usize = 96 << 20;
/// Bytes that a rendering may read, in addition to 1024 times the size of the messages.
const MAX_WORK: usize = 256 << 20;
/// The largest value in bytes, in addition to 4 times the size of the messages.
pub(super) const MAX_VALUE: usize = 16 << 20;
/// Levels of lists in lists.
const MAX_DEPTH: usize = 32;
/// The size of a value without its text.
const OVERHEAD: usize = 32;
/// The time that a rendering may take. The other limits end every known template long before.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The variable with the size of the messages. Its name is no identifier, so that templates cannot change it.
pub(super) const MESSAGE_BYTES: &str = "message bytes";
/// The variable with the time limit in milliseconds.
pub(super) const MILLISECONDS: &str = "time limit";

type Outcome<T = Value> = Result<T, Error>;

/// What a rendering may still use.
struct Budget {
    memory: usize,
    work: usize,
    largest: usize,
    deadline: Instant,
}

impl Budget {
    fn new(message_bytes: usize, milliseconds: usize) -> Budget {
        let scaled = |base: usize, factor: usize| base.saturating_add(message_bytes.saturating_mul(factor));
        Budget {
            memory: scaled(MAX_MEMORY, 128),
            work: scaled(MAX_WORK, 1024),
            largest: scaled(MAX_VALUE, 4),
            deadline: Instant::now() + Duration::from_millis(milliseconds as u64),
        }
    }
}

fn failure(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

fn too_large() -> Error {
    failure("a value is too large")
}

fn budget<'s>(state: &'s mut State<'_, '_>) -> &'s mut Budget {
    let (bytes, milliseconds) = match state.get_extension::<Budget>() {
        Some(_) => (0, 0),
        None => {
            let variable = |name: &str| state.lookup(name).and_then(|value| value.as_usize()).unwrap_or(0);
            (variable(MESSAGE_BYTES), variable(MILLISECONDS))
        }
    };
    state.get_or_insert_extension_with(|| Budget::new(bytes, milliseconds))
}

/// Takes bytes that are allocated and bytes that are read from the budget.
pub(super) fn spend(state: &mut State<'_, '_>, memory: usize, work: usize) -> Outcome<()> {
    let budget = budget(state);
    if memory > budget.largest {
        return Err(too_large());
    }
    budget.memory = budget.memory.checked_sub(memory).ok_or_else(|| failure("it uses too much memory"))?;
    let work = work.saturating_add(memory);
    budget.work = budget.work.checked_sub(work).ok_or_else(|| failure("it takes too long"))?;
    if Instant::now() >= budget.deadline {
        return Err(failure("its time is up"));
    }
    Ok(())
}

/// The size of a value with everything in it.
fn weight(state: &mut State<'_, '_>, value: &Value) -> Outcome<usize> {
    let limit = budget(state).largest;
    let mut left = limit;
    weigh(value, MAX_DEPTH, &mut left)?;
    Ok(limit - left)
}

fn weigh(value: &Value, depth: usize, left: &mut usize) -> Outcome<()> {
    let own = OVERHEAD + text_length(value);
    *left = left.checked_sub(own).ok_or_else(too_large)?;
    if !is_container(value) {
        return Ok(());
    }
    let depth = depth.checked_sub(1).ok_or_else(|| failure("lists are nested too deeply"))?;
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            weigh(&value.get_item(&item).unwrap_or_default(), depth, left)?;
        }
        weigh(&item, depth, left)?;
    }
    Ok(())
}

fn text_length(value: &Value) -> usize {
    value.as_str().map_or_else(|| value.as_bytes().map_or(0, <[u8]>::len), str::len)
}

fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable)
}

/// The value's text is going to be copied.
fn text(state: &mut State<'_, '_>, value: &Value) -> Outcome {
    let size = weight(state, value)?;
    spend(state, size, 0)?;
    Ok(value.clone())
}

/// A string is going to be copied, or the references to the elements of a list.
fn added(state: &mut State<'_, '_>, value: &Value) -> Outcome {
    let size = weight(state, value)?;
    let memory = if is_container(value) {
        value.len().unwrap_or(size / OVERHEAD).saturating_mul(OVERHEAD)
    } else {
        size
    };
    spend(state, memory, size)?;
    Ok(value.clone())
}

/// The value is going to be read, for example by a comparison.
fn weighed(state: &mut State<'_, '_>, value: &Value) -> Outcome {
    let size = weight(state, value)?;
    spend(state, 0, size)?;
    Ok(value.clone())
}

/// An element of the value is going to be read, or its elements one after another.
fn item(state: &mut State<'_, '_>, value: &Value) -> Outcome {
    spend(state, 0, text_length(value))?;
    Ok(value.clone())
}

/// The value is going to be part of another one. A namespace must not: it could contain itself, or a chain of others
/// that is too long to be dropped.
fn nested(state: &mut State<'_, '_>, value: &Value) -> Outcome {
    if is_container(value) {
        let size = weight(state, value)?;
        spend(state, OVERHEAD, size)?;
        if value.as_object().is_some_and(|object| object.type_name().contains("Namespace")) {
            return Err(failure("a namespace cannot be an element or attribute"));
        }
    }
    Ok(value.clone())
}

fn multiplied(state: &mut State<'_, '_>, left: &Value, right: &Value) -> Outcome {
    let (repeated, count) = match (left.as_str(), right.as_str()) {
        (None, Some(_)) => (right, left),
        _ if is_container(right) => (right, left),
        _ => (left, right),
    };
    if repeated.kind() == ValueKind::String || is_container(repeated) {
        let count =
            count.as_usize().ok_or_else(|| failure("text and lists can be multiplied with integers only"))?;
        let size = match repeated.as_str() {
            Some(text) => text.len(),
            None => weight(state, repeated)?,
        };
        spend(state, size.saturating_mul(count).saturating_add(OVERHEAD), 0)?;
        if let Some(text) = repeated.as_str() {
            return Ok(Value::from(text.repeat(count)));
        }
        let items: Vec<Value> = repeated.try_iter()?.collect();
        let all: Vec<Value> = std::iter::repeat_n(&items, count).flatten().cloned().collect();
        return Ok(list_like(repeated, all));
    }
    let overflow = || failure(format!("unable to calculate {left} * {right}"));
    if left.is_integer() && right.is_integer() {
        let product =
            i128::try_from(left.clone())?.checked_mul(i128::try_from(right.clone())?).ok_or_else(overflow)?;
        return Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from));
    }
    Ok(Value::from(f64::try_from(left.clone())? * f64::try_from(right.clone())?))
}

/// A list, or a tuple if another value is one.
fn list_like(other: &Value, items: Vec<Value>) -> Value {
    if other.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) }
}

/// `value[start:stop:step]` as in Python, with a new list as its result.
fn sliced(
    state: &mut State<'_, '_>,
    value: &Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Outcome {
    added(state, value)?;
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(failure("cannot slice by step size of 0"));
    }
    match value.as_str() {
        Some(text) if step == 1 && start.unwrap_or(0) >= 0 && stop.is_none_or(|stop| stop >= 0) => {
            let start = start.unwrap_or(0);
            let count = stop.map_or(usize::MAX, |stop| usize::try_from(stop - start).unwrap_or(0));
            Ok(text.chars().skip(usize::try_from(start).unwrap_or(0)).take(count).collect::<String>().into())
        }
        Some(text) => {
            let letters: Vec<char> = text.chars().collect();
            spend(state, letters.len().saturating_mul(4), 0)?;
            Ok(pick(&letters, start, stop, step).collect::<String>().into())
        }
        None if value.is_undefined() || value.is_none() => Ok(Value::from(Vec::<Value>::new())),
        None if is_container(value) && value.kind() != ValueKind::Map => {
            let items: Vec<Value> = value.try_iter()?.collect();
            Ok(list_like(value, pick(&items, start, stop, step).collect()))
        }
        None => Err(failure(format!("value of type {} cannot be sliced", value.kind()))),
    }
}

/// The elements of a slice with a step.
fn pick<T: Clone>(
    items: &[T],
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = T> + use<'_, T> {
    let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |at: Option<i64>, usual: i64| match at {
        Some(at) if at < 0 => at.saturating_add(length).clamp(lowest, highest),
        Some(at) => at.clamp(lowest, highest),
        None => usual,
    };
    let (first, last) = if step > 0 { (0, length) } else { (length - 1, -1) };
    let (start, stop) = (bound(start, first), bound(stop, last));
    let mut at = start;
    std::iter::from_fn(move || {
        let inside = if step > 0 { at < stop } else { at > stop };
        let item = usize::try_from(at).ok().filter(|_| inside).and_then(|at| items.get(at)).cloned();
        at = at.saturating_add(step);
        item
    })
}

fn reversed(state: &mut State<'_, '_>, value: &Value) -> Outcome {
    if value.kind() == ValueKind::Map || value.is_undefined() || value.is_none() {
        return value.reverse();
    }
    sliced(state, value, None, None, Some(-1))
}

/// The arguments of a filter, with keyword arguments as the last value.
type Arguments = Rest<ValueOrKwargs>;

/// Checks the arguments of a filter whose result can be longer than its input, and calls it.
macro_rules! checked {
    ($name:ident, |$state:ident, $value:ident, $arguments:ident| $cost:expr) => {
        |$state: &mut State<'_, '_>, $value: &Value, arguments: Arguments| -> Outcome {
            let $arguments = arguments.into_values();
            let cost: usize = $cost;
            spend($state, cost, 0)?;
            let mut all = vec![$value.clone()];
            all.extend($arguments);
            builtin(stringify!($name)).call($state, &all)
        }
    };
}

/// A filter of the template engine.
fn builtin(name: &str) -> Value {
    match name {
        "indent" => Value::from_function(minijinja::filters::indent),
        "replace" => Value::from_function(minijinja::filters::replace),
        "join" => Value::from_function(minijinja::filters::join),
        "format" => Value::from_function(minijinja::filters::format),
        "batch" => Value::from_function(minijinja::filters::batch),
        "slice" => Value::from_function(minijinja::filters::slice),
        "trim" => Value::from_function(minijinja::filters::trim),
        "sum" => Value::from_function(minijinja::filters::sum),
        _ => Value::from_function(minijinja::filters::split),
    }
}

/// The greatest number in some arguments, keyword arguments included.
fn greatest(arguments: &[Value]) -> usize {
    // Negative numbers and fractions are refused by the filter itself.
    let number = |value: &Value| value.as_usize().unwrap_or(0);
    let of = |value: &Value| match value.kind() {
        ValueKind::Map => value
            .try_iter()
            .map(|keys| keys.filter_map(|key| value.get_item(&key).ok()).map(|value| number(&value)).max())
            .ok()
            .flatten()
            .unwrap_or(0),
        _ => number(value),
    };
    arguments.iter().map(of).max().unwrap_or(0)
}

/// The number of elements of a list, or of characters of a text.
fn count(value: &Value) -> usize {
    value.len().or_else(|| value.try_iter().ok().map(Iterator::count)).unwrap_or(0)
}

/// The size of the arguments.
fn argument_bytes(state: &mut State<'_, '_>, arguments: &[Value]) -> Outcome<usize> {
    arguments.iter().try_fold(0, |sum: usize, argument| Ok(sum.saturating_add(weight(state, argument)?)))
}

/// The longest result of a text that is replaced by another one.
fn replaced_bytes(text: &Value, arguments: &[Value]) -> usize {
    let text = text.to_string();
    let length = |i: usize| arguments.get(i).map_or(0, text_length);
    let old = arguments.first().and_then(Value::as_str).unwrap_or_default();
    let matches = if old.is_empty() { text.len().saturating_add(1) } else { text.matches(old).count() };
    text.len().saturating_add(matches.saturating_mul(length(1)))
}

/// The largest result of a format string: the sum of all numbers in it, which are widths and precisions, and its
/// arguments.
fn formatted_bytes(state: &mut State<'_, '_>, format: &Value, arguments: &[Value]) -> Outcome<usize> {
    let text = format.as_str().unwrap_or_default();
    // An argument can be printed once for each place in the format.
    let places = text.matches(['%', '{']).count().saturating_add(1);
    let widths = text
        .split(|letter: char| !letter.is_ascii_digit())
        .filter(|digits| !digits.is_empty())
        .fold(0usize, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(usize::MAX)));
    // Widths can be arguments, too: `%*d` and `{:{}}`.
    let nested = if text.contains([':', '*']) { greatest(arguments) } else { 0 };
    let sizes = argument_bytes(state, arguments)?;
    let numbers = arguments.len().saturating_mul(400);
    let each = sizes.saturating_add(numbers).saturating_add(nested);
    Ok(text.len().saturating_add(widths.saturating_mul(2)).saturating_add(each.saturating_mul(places)))
}

/// A method of Python's types.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Outcome {
    let size = weight(state, value)?;
    let given = argument_bytes(state, arguments)?;
    let text = value.kind() == ValueKind::String;
    match name {
        "replace" if text => spend(state, replaced_bytes(value, arguments), 0)?,
        "format" if text => {
            let bytes = formatted_bytes(state, value, arguments)?;
            spend(state, bytes, 0)?;
        }
        "join" if text => {
            let items = arguments.first().map_or(0, count);
            spend(state, items.saturating_mul(size).saturating_add(given), 0)?;
        }
        // Each character is compared with each given one.
        "strip" | "lstrip" | "rstrip" if text => {
            let letters = arguments.first().map_or(1, |letters| text_length(letters).max(1));
            spend(state, size, size.saturating_mul(letters))?;
        }
        "split" | "splitlines" if text => {
            spend(state, size.saturating_add(separated(value, arguments)), given)?
        }
        "upper" | "lower" | "title" | "capitalize" if text => spend(state, size.saturating_mul(3), 0)?,
        _ => spend(state, if text { size } else { 0 }, size.saturating_add(given))?,
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

/// The size of the list that a text is split into, without the text.
fn separated(text: &Value, arguments: &[Value]) -> usize {
    let text = text.as_str().unwrap_or_default();
    let parts = match arguments.first().and_then(Value::as_str) {
        Some(separator) if !separator.is_empty() => text.matches(separator).count(),
        Some(_) => text.len(),
        None => text.matches(char::is_whitespace).count(),
    };
    parts.saturating_add(1).saturating_mul(OVERHEAD)
}

/// Adds the meters, and replaces or removes the functions and filters that have no limits of their own.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_fuel(Some(MAX_INSTRUCTIONS));
    environment.set_unknown_method_callback(method);
    environment.add_filter("text__", text);
    environment.add_filter("added__", added);
    environment.add_filter("weighed__", weighed);
    environment.add_filter("item__", item);
    environment.add_filter("nested__", nested);
    environment.add_filter("multiplied__", multiplied);
    environment.add_filter("slice__", sliced);
    environment.add_filter("reverse", reversed);
    for unused in ["chain", "zip", "pprint"] {
        environment.remove_filter(unused);
    }
    environment.remove_global("debug");
    environment.add_function("namespace", |state: &mut State<'_, '_>, values: Arguments| -> Outcome {
        let values = values.into_values();
        values.iter().try_for_each(|value| nested_argument(state, value))?;
        Value::from_function(minijinja::functions::namespace).call(state, &values)
    });
    environment.add_function("dict", |state: &mut State<'_, '_>, values: Arguments| -> Outcome {
        let values = values.into_values();
        values.iter().try_for_each(|value| nested_argument(state, value))?;
        Value::from_function(minijinja::functions::dict).call(state, &values)
    });
    environment.add_filter(
        "indent",
        checked!(indent, |state, value, arguments| {
            let lines = value.to_string().matches('\n').count().saturating_add(2);
            lines.saturating_mul(greatest(&arguments).max(4)).saturating_add(text_length(value))
        }),
    );
    environment.add_filter(
        "replace",
        checked!(replace, |state, value, arguments| replaced_bytes(value, &arguments)),
    );
    environment.add_filter(
        "join",
        checked!(join, |state, value, arguments| {
            let separator = argument_bytes(state, &arguments)?;
            weight(state, value)?.saturating_add(count(value).saturating_mul(separator))
        }),
    );
    environment.add_filter(
        "format",
        checked!(format, |state, value, arguments| formatted_bytes(state, value, &arguments)?),
    );
    environment.add_filter(
        "batch",
        checked!(batch, |state, value, arguments| {
            count(value).saturating_add(greatest(&arguments)).saturating_mul(OVERHEAD)
        }),
    );
    environment.add_filter(
        "slice",
        checked!(slice, |state, value, arguments| {
            count(value).saturating_add(greatest(&arguments)).saturating_mul(2 * OVERHEAD)
        }),
    );
    environment.add_filter(
        "trim",
        checked!(trim, |state, value, arguments| {
            let letters = arguments.first().map_or(1, |letters| text_length(letters).max(1));
            spend(state, 0, text_length(value).saturating_mul(letters))?;
            text_length(value)
        }),
    );
    environment.add_filter(
        "sum",
        checked!(sum, |state, value, arguments| {
            // Texts are appended one by one.
            let size = weight(state, value)?.saturating_add(argument_bytes(state, &arguments)?);
            spend(state, 0, size.saturating_mul(count(value)))?;
            size
        }),
    );
    environment.add_filter(
        "split",
        checked!(split, |state, value, arguments| {
            text_length(value).saturating_add(separated(value, &arguments))
        }),
    );
}

/// Checks a value or keyword arguments that become attributes.
fn nested_argument(state: &mut State<'_, '_>, value: &Value) -> Outcome<()> {
    nested(state, value)?;
    if value.kind() == ValueKind::Map {
        for key in value.try_iter()? {
            nested(state, &value.get_item(&key)?)?;
        }
    }
    Ok(())
}

/// A writer with a limit on its output.
pub(super) struct LimitedWriter {
    pub(super) bytes: Vec<u8>,
    pub(super) left: usize,
}

impl io::Write for LimitedWriter {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.left =
            self.left.checked_sub(part.len()).ok_or_else(|| io::Error::other("its output is too long"))?;
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
